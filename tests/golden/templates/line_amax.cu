// line_amax.cu of the golden files: substitutions only.
using source_t = $source;
extern "C" __global__ void $entry(const source_t *source) {}
