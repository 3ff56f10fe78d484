  //% -- an indented Lua line comes first, so the text begins with a #line
extern "C" __global__ void $(entry)(const $(source) *p) {}
