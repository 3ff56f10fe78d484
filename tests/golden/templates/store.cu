// store.cu of the golden files: a loop, a value of several lines, a comment with a Lua line inside.
//% local names = {}
//% for i = 1, source == target and 2 or 3 do
constexpr int step_$i = $(i * i);
//%     names[i] = "    use(step_" .. i .. ");"
//% end
/* The line below is no text,
   //% local reason = source == target and "copied" or "converted"
   and the next one is: $reason. */
extern "C" __global__ void $entry($target *out, const $source *in) {
$(table.concat(names, "\n"))
    finish();
}
