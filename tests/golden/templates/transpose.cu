// transpose.cu of the golden files: it has no parameters.
extern "C" __global__ void $entry() {}
