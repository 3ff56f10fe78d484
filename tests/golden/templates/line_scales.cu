// line_scales.cu of the golden files: substitutions only.
using format = $format;
constexpr bool power_of_two = $power_of_two;
extern "C" __global__ void $entry(const float *row_partials) {}
