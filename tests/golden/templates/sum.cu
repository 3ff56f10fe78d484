// sum.cu of the golden files: two dtypes.
using source_t = $source;
using target_t = $target;
extern "C" __global__ void $entry(const source_t *source, target_t *target) {}
