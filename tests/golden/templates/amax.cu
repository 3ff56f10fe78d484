// amax.cu of the golden files: substitutions only, so the output stays in step.
using source_t = $source;
extern "C" __global__ void $entry(const source_t *p) {
    asm("mov.u32 %0, $$5;"); // a dollar
}
