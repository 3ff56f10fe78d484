// quantize.cu of the golden files: branches and expressions.
using source_t = $source;
//% local limit = ({ bf16 = 448.0, fp32 = 57344.0 })[source]
constexpr float limit = $limit, half = $(limit / 2), tenth = $(1 / 10);
constexpr bool power_of_two = $power_of_two;
//% if power_of_two then
#define ROUND(x) \
    floor_power( \
        x)
//% else
#define ROUND(x) (x)
//% end
extern "C" __global__ void $entry() {}
