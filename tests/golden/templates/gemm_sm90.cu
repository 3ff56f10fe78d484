// gemm_sm90.cu of the golden files: numbers and booleans.
constexpr int bm = $bm, bn = $bn, stages = $stages, cluster = $cluster, group = $group;
constexpr bool pingpong = $pingpong, add = $add;
//% if partials > 0 then
constexpr int partials = $partials;
//% end
extern "C" __global__ void $entry($target *out, const $a_format *a, const $b_format *b) {
    registers<$producer_registers, $consumer_registers>();
}
