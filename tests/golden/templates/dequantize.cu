// dequantize.cu of the golden files: a table in a fixed order.
//% for name, bits in pairs { e5m2 = 2, e4m3 = 3 } do
constexpr int mantissa_$(name) = $bits; // of $scaling: $(name == scaling)
//% end
extern "C" __global__ void $entry() {}
