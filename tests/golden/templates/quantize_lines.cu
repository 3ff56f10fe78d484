// quantize_lines.cu of the golden files: substitutions only.
using source_t = $source;
using format = $format;
constexpr bool power_of_two = $power_of_two;
extern "C" __global__ void $entry(const source_t *source) {}
