// Made by fp8gen 0.1.0 from the template quantize_block.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     quantize_block_bf16_e4m3_pow2
//   used by:    block
//   parameters: entry = "fp8_quantize_block_bf16_e4m3_pow2"
//               format = "e4m3"
//               power_of_two = true
//               source = "bf16"
#line 1 "quantize_block.cu"
// quantize_block.cu of the golden files: substitutions only.
using source_t = bf16;
using format = e4m3;
constexpr bool power_of_two = true;
extern "C" __global__ void fp8_quantize_block_bf16_e4m3_pow2(const source_t *source) {}

// Made by fp8gen 0.1.0 from the template store.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     store_fp32_bf16
//   used by:    block, delayed, rowwise, hp_wgrad, bf16
//   parameters: entry = "fp8_store_fp32_bf16"
//               source = "fp32"
//               target = "bf16"
#line 1 "store.cu"
// store.cu of the golden files: a loop, a value of several lines, a comment with a Lua line inside.
#line 4 "store.cu"
constexpr int step_1 = 1;
#line 4 "store.cu"
constexpr int step_2 = 4;
#line 4 "store.cu"
constexpr int step_3 = 9;
#line 7 "store.cu"
/* The line below is no text,
   and the next one is: converted. */
#line 10 "store.cu"
extern "C" __global__ void fp8_store_fp32_bf16(bf16 *out, const fp32 *in) {
    use(step_1);
    use(step_2);
    use(step_3);
#line 12 "store.cu"
    finish();
}

// Made by fp8gen 0.1.0 from the template quantize_tile.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     quantize_tile_fp32_e4m3_pow2
//   used by:    block
//   parameters: entry = "fp8_quantize_tile_fp32_e4m3_pow2"
//               format = "e4m3"
//               power_of_two = true
//               source = "fp32"
#line 1 "quantize_tile.cu"
// quantize_tile.cu of the golden files: substitutions only.
using source_t = fp32;
using format = e4m3;
constexpr bool power_of_two = true;
extern "C" __global__ void fp8_quantize_tile_fp32_e4m3_pow2(const source_t *source) {}

// Made by fp8gen 0.1.0 from the template column_sums.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     column_sums
//   used by:    block, delayed, bf16
//   parameters: entry = "fp8_column_sums"
#line 1 "column_sums.cu"
// column_sums.cu of the golden files: it has no parameters.
extern "C" __global__ void fp8_column_sums() {}

// Made by fp8gen 0.1.0 from the template store.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     store_fp32_fp32
//   used by:    block, delayed, rowwise, hp_wgrad, bf16
//   parameters: entry = "fp8_store_fp32_fp32"
//               source = "fp32"
//               target = "fp32"
#line 1 "store.cu"
// store.cu of the golden files: a loop, a value of several lines, a comment with a Lua line inside.
#line 4 "store.cu"
constexpr int step_1 = 1;
#line 4 "store.cu"
constexpr int step_2 = 4;
#line 7 "store.cu"
/* The line below is no text,
   and the next one is: copied. */
#line 10 "store.cu"
extern "C" __global__ void fp8_store_fp32_fp32(fp32 *out, const fp32 *in) {
    use(step_1);
    use(step_2);
#line 12 "store.cu"
    finish();
}

// Made by fp8gen 0.1.0 from the template store.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     store_fp32_fp32_add
//   used by:    block, delayed, rowwise, hp_wgrad, bf16
//   parameters: entry = "fp8_store_fp32_fp32"
//               source = "fp32"
//               target = "fp32"
#line 1 "store.cu"
// store.cu of the golden files: a loop, a value of several lines, a comment with a Lua line inside.
#line 4 "store.cu"
constexpr int step_1 = 1;
#line 4 "store.cu"
constexpr int step_2 = 4;
#line 7 "store.cu"
/* The line below is no text,
   and the next one is: copied. */
#line 10 "store.cu"
extern "C" __global__ void fp8_store_fp32_fp32(fp32 *out, const fp32 *in) {
    use(step_1);
    use(step_2);
#line 12 "store.cu"
    finish();
}

// Made by fp8gen 0.1.0 from the template store.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     store_bf16_bf16
//   used by:    block, delayed, bf16
//   parameters: entry = "fp8_store_bf16_bf16"
//               source = "bf16"
//               target = "bf16"
#line 1 "store.cu"
// store.cu of the golden files: a loop, a value of several lines, a comment with a Lua line inside.
#line 4 "store.cu"
constexpr int step_1 = 1;
#line 4 "store.cu"
constexpr int step_2 = 4;
#line 7 "store.cu"
/* The line below is no text,
   and the next one is: copied. */
#line 10 "store.cu"
extern "C" __global__ void fp8_store_bf16_bf16(bf16 *out, const bf16 *in) {
    use(step_1);
    use(step_2);
#line 12 "store.cu"
    finish();
}

// Made by fp8gen 0.1.0 from the template dequantize.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     dequantize_e4m3_block
//   used by:    block
//   parameters: entry = "fp8_dequantize_block"
//               scaling = "block"
#line 1 "dequantize.cu"
// dequantize.cu of the golden files: a table in a fixed order.
#line 3 "dequantize.cu"
constexpr int mantissa_e4m3 = 3; // of block: false
#line 3 "dequantize.cu"
constexpr int mantissa_e5m2 = 2; // of block: false
#line 5 "dequantize.cu"
extern "C" __global__ void fp8_dequantize_block() {}

// Made by fp8gen 0.1.0 from the template dequantize.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     dequantize_e4m3_tile
//   used by:    block
//   parameters: entry = "fp8_dequantize_tile"
//               scaling = "tile"
#line 1 "dequantize.cu"
// dequantize.cu of the golden files: a table in a fixed order.
#line 3 "dequantize.cu"
constexpr int mantissa_e4m3 = 3; // of tile: false
#line 3 "dequantize.cu"
constexpr int mantissa_e5m2 = 2; // of tile: false
#line 5 "dequantize.cu"
extern "C" __global__ void fp8_dequantize_tile() {}

// Made by fp8gen 0.1.0 from the template transpose.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     transpose
//   used by:    weights that were gathered
//   parameters: entry = "fp8_transpose"
#line 1 "transpose.cu"
// transpose.cu of the golden files: it has no parameters.
extern "C" __global__ void fp8_transpose() {}

// Made by fp8gen 0.1.0 from the template amax.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     amax_bf16
//   used by:    delayed, hp_wgrad
//   parameters: entry = "fp8_amax_bf16"
//               source = "bf16"
#line 1 "amax.cu"
// amax.cu of the golden files: substitutions only, so the output stays in step.
using source_t = bf16;
extern "C" __global__ void fp8_amax_bf16(const source_t *p) {
    asm("mov.u32 %0, $5;"); // a dollar
}

// Made by fp8gen 0.1.0 from the template cast.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     cast_bf16_e4m3_pow2_margin1
//   used by:    delayed
//   parameters: entry = "fp8_cast_bf16_pow2_margin1"
//               margin = 1
//               power_of_two = true
//               source = "bf16"
#line 1 "cast.cu"
// cast.cu of the golden files: substitutions only.
using source_t = bf16;
constexpr bool power_of_two = true;
extern "C" __global__ void fp8_cast_bf16_pow2_margin1(const source_t *source) {}

// Made by fp8gen 0.1.0 from the template gemm_sm90.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     gemm_e4m3_e4m3_bf16_bias_pp64x64c1s12g8
//   used by:    delayed
//   parameters: a_format = "e4m3"
//               a_row_scaled = false
//               add = false
//               b_format = "e4m3"
//               b_row_scaled = false
//               b_tile_scaled = false
//               biased = true
//               bm = 64
//               bn = 64
//               cluster = 1
//               consumer_registers = 232
//               consumers = 2
//               entry = "fp8_gemm_e4m3_e4m3_bf16_bias_pp64x64c1s12g8"
//               flow = "stream"
//               group = 8
//               partials = 0
//               pingpong = true
//               producer_registers = 40
//               run = 1
//               scheduler = "static"
//               slabs = 2
//               slices = 1
//               stages = 12
//               swapped = false
//               target = "bf16"
//               vectors = 256
#line 1 "gemm_sm90.cu"
// gemm_sm90.cu of the golden files: numbers and booleans.
constexpr int bm = 64, bn = 64, stages = 12, cluster = 1, group = 8;
constexpr bool pingpong = true, add = false;
#line 7 "gemm_sm90.cu"
extern "C" __global__ void fp8_gemm_e4m3_e4m3_bf16_bias_pp64x64c1s12g8(bf16 *out, const e4m3 *a, const e4m3 *b) {
    registers<40, 232>();
}

// Made by fp8gen 0.1.0 from the template gemm_sm90.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     gemm_e4m3_e4m3_fp32_co128x64c1s8p2g8
//   used by:    delayed
//   parameters: a_format = "e4m3"
//               a_row_scaled = false
//               add = false
//               b_format = "e4m3"
//               b_row_scaled = false
//               b_tile_scaled = false
//               biased = false
//               bm = 128
//               bn = 64
//               cluster = 1
//               consumer_registers = 232
//               consumers = 2
//               entry = "fp8_gemm_e4m3_e4m3_fp32_co128x64c1s8p2g8"
//               flow = "stream"
//               group = 8
//               partials = 2
//               pingpong = false
//               producer_registers = 40
//               run = 1
//               scheduler = "static"
//               slabs = 2
//               slices = 1
//               stages = 8
//               swapped = false
//               target = "fp32"
//               vectors = 0
#line 1 "gemm_sm90.cu"
// gemm_sm90.cu of the golden files: numbers and booleans.
constexpr int bm = 128, bn = 64, stages = 8, cluster = 1, group = 8;
constexpr bool pingpong = false, add = false;
#line 5 "gemm_sm90.cu"
constexpr int partials = 2;
#line 7 "gemm_sm90.cu"
extern "C" __global__ void fp8_gemm_e4m3_e4m3_fp32_co128x64c1s8p2g8(fp32 *out, const e4m3 *a, const e4m3 *b) {
    registers<40, 232>();
}

// Made by fp8gen 0.1.0 from the template gemm_sm90.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     gemm_e4m3_e4m3_fp32_add_co128x64c1s8p2g8
//   used by:    delayed
//   parameters: a_format = "e4m3"
//               a_row_scaled = false
//               add = true
//               b_format = "e4m3"
//               b_row_scaled = false
//               b_tile_scaled = false
//               biased = false
//               bm = 128
//               bn = 64
//               cluster = 1
//               consumer_registers = 232
//               consumers = 2
//               entry = "fp8_gemm_e4m3_e4m3_fp32_add_co128x64c1s8p2g8"
//               flow = "stream"
//               group = 8
//               partials = 2
//               pingpong = false
//               producer_registers = 40
//               run = 1
//               scheduler = "static"
//               slabs = 2
//               slices = 1
//               stages = 8
//               swapped = false
//               target = "fp32"
//               vectors = 0
#line 1 "gemm_sm90.cu"
// gemm_sm90.cu of the golden files: numbers and booleans.
constexpr int bm = 128, bn = 64, stages = 8, cluster = 1, group = 8;
constexpr bool pingpong = false, add = true;
#line 5 "gemm_sm90.cu"
constexpr int partials = 2;
#line 7 "gemm_sm90.cu"
extern "C" __global__ void fp8_gemm_e4m3_e4m3_fp32_add_co128x64c1s8p2g8(fp32 *out, const e4m3 *a, const e4m3 *b) {
    registers<40, 232>();
}

// Made by fp8gen 0.1.0 from the template gemm_sm90.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     gemm_e4m3_e4m3_bf16_co128x64c1s8p2g8
//   used by:    delayed
//   parameters: a_format = "e4m3"
//               a_row_scaled = false
//               add = false
//               b_format = "e4m3"
//               b_row_scaled = false
//               b_tile_scaled = false
//               biased = false
//               bm = 128
//               bn = 64
//               cluster = 1
//               consumer_registers = 232
//               consumers = 2
//               entry = "fp8_gemm_e4m3_e4m3_bf16_co128x64c1s8p2g8"
//               flow = "stream"
//               group = 8
//               partials = 2
//               pingpong = false
//               producer_registers = 40
//               run = 1
//               scheduler = "static"
//               slabs = 2
//               slices = 1
//               stages = 8
//               swapped = false
//               target = "bf16"
//               vectors = 0
#line 1 "gemm_sm90.cu"
// gemm_sm90.cu of the golden files: numbers and booleans.
constexpr int bm = 128, bn = 64, stages = 8, cluster = 1, group = 8;
constexpr bool pingpong = false, add = false;
#line 5 "gemm_sm90.cu"
constexpr int partials = 2;
#line 7 "gemm_sm90.cu"
extern "C" __global__ void fp8_gemm_e4m3_e4m3_bf16_co128x64c1s8p2g8(bf16 *out, const e4m3 *a, const e4m3 *b) {
    registers<40, 232>();
}

// Made by fp8gen 0.1.0 from the template dequantize.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     dequantize_e4m3_tensor
//   used by:    delayed, hp_wgrad
//   parameters: entry = "fp8_dequantize_tensor"
//               scaling = "tensor"
#line 1 "dequantize.cu"
// dequantize.cu of the golden files: a table in a fixed order.
#line 3 "dequantize.cu"
constexpr int mantissa_e4m3 = 3; // of tensor: false
#line 3 "dequantize.cu"
constexpr int mantissa_e5m2 = 2; // of tensor: false
#line 5 "dequantize.cu"
extern "C" __global__ void fp8_dequantize_tensor() {}

// Made by fp8gen 0.1.0 from the template roll.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     roll
//   used by:    the state of recipe delayed
//   parameters: entry = "fp8_roll"
#line 1 "roll.cu"
// roll.cu of the golden files: it has no parameters.
extern "C" __global__ void fp8_roll() {}

// Made by fp8gen 0.1.0 from the template line_amax.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     line_amax_bf16
//   used by:    rowwise, hp_wgrad
//   parameters: entry = "fp8_line_amax_bf16"
//               source = "bf16"
#line 1 "line_amax.cu"
// line_amax.cu of the golden files: substitutions only.
using source_t = bf16;
extern "C" __global__ void fp8_line_amax_bf16(const source_t *source) {}

// Made by fp8gen 0.1.0 from the template line_scales.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     line_scales_e4m3
//   used by:    rowwise
//   parameters: entry = "fp8_line_scales_e4m3"
//               format = "e4m3"
//               power_of_two = false
#line 1 "line_scales.cu"
// line_scales.cu of the golden files: substitutions only.
using format = e4m3;
constexpr bool power_of_two = false;
extern "C" __global__ void fp8_line_scales_e4m3(const float *row_partials) {}

// Made by fp8gen 0.1.0 from the template quantize_lines.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     quantize_lines_bf16_e4m3
//   used by:    rowwise
//   parameters: entry = "fp8_quantize_lines_bf16_e4m3"
//               format = "e4m3"
//               power_of_two = false
//               source = "bf16"
#line 1 "quantize_lines.cu"
// quantize_lines.cu of the golden files: substitutions only.
using source_t = bf16;
using format = e4m3;
constexpr bool power_of_two = false;
extern "C" __global__ void fp8_quantize_lines_bf16_e4m3(const source_t *source) {}

// Made by fp8gen 0.1.0 from the template gemm_sm90.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     gemm_e4m3_e4m3_bf16_row_bias_pp64x64c1s12g8
//   used by:    rowwise, hp_wgrad
//   parameters: a_format = "e4m3"
//               a_row_scaled = true
//               add = false
//               b_format = "e4m3"
//               b_row_scaled = true
//               b_tile_scaled = false
//               biased = true
//               bm = 64
//               bn = 64
//               cluster = 1
//               consumer_registers = 232
//               consumers = 2
//               entry = "fp8_gemm_e4m3_e4m3_bf16_row_bias_pp64x64c1s12g8"
//               flow = "stream"
//               group = 8
//               partials = 0
//               pingpong = true
//               producer_registers = 40
//               run = 1
//               scheduler = "static"
//               slabs = 2
//               slices = 1
//               stages = 12
//               swapped = false
//               target = "bf16"
//               vectors = 512
#line 1 "gemm_sm90.cu"
// gemm_sm90.cu of the golden files: numbers and booleans.
constexpr int bm = 64, bn = 64, stages = 12, cluster = 1, group = 8;
constexpr bool pingpong = true, add = false;
#line 7 "gemm_sm90.cu"
extern "C" __global__ void fp8_gemm_e4m3_e4m3_bf16_row_bias_pp64x64c1s12g8(bf16 *out, const e4m3 *a, const e4m3 *b) {
    registers<40, 232>();
}

// Made by fp8gen 0.1.0 from the template gemm_sm90.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     gemm_e4m3_e4m3_fp32_row_co128x64c1s8p2g8
//   used by:    rowwise
//   parameters: a_format = "e4m3"
//               a_row_scaled = true
//               add = false
//               b_format = "e4m3"
//               b_row_scaled = true
//               b_tile_scaled = false
//               biased = false
//               bm = 128
//               bn = 64
//               cluster = 1
//               consumer_registers = 232
//               consumers = 2
//               entry = "fp8_gemm_e4m3_e4m3_fp32_row_co128x64c1s8p2g8"
//               flow = "stream"
//               group = 8
//               partials = 2
//               pingpong = false
//               producer_registers = 40
//               run = 1
//               scheduler = "static"
//               slabs = 2
//               slices = 1
//               stages = 8
//               swapped = false
//               target = "fp32"
//               vectors = 256
#line 1 "gemm_sm90.cu"
// gemm_sm90.cu of the golden files: numbers and booleans.
constexpr int bm = 128, bn = 64, stages = 8, cluster = 1, group = 8;
constexpr bool pingpong = false, add = false;
#line 5 "gemm_sm90.cu"
constexpr int partials = 2;
#line 7 "gemm_sm90.cu"
extern "C" __global__ void fp8_gemm_e4m3_e4m3_fp32_row_co128x64c1s8p2g8(fp32 *out, const e4m3 *a, const e4m3 *b) {
    registers<40, 232>();
}

// Made by fp8gen 0.1.0 from the template gemm_sm90.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     gemm_e4m3_e4m3_fp32_row_add_co128x64c1s8p2g8
//   used by:    rowwise
//   parameters: a_format = "e4m3"
//               a_row_scaled = true
//               add = true
//               b_format = "e4m3"
//               b_row_scaled = true
//               b_tile_scaled = false
//               biased = false
//               bm = 128
//               bn = 64
//               cluster = 1
//               consumer_registers = 232
//               consumers = 2
//               entry = "fp8_gemm_e4m3_e4m3_fp32_row_add_co128x64c1s8p2g8"
//               flow = "stream"
//               group = 8
//               partials = 2
//               pingpong = false
//               producer_registers = 40
//               run = 1
//               scheduler = "static"
//               slabs = 2
//               slices = 1
//               stages = 8
//               swapped = false
//               target = "fp32"
//               vectors = 256
#line 1 "gemm_sm90.cu"
// gemm_sm90.cu of the golden files: numbers and booleans.
constexpr int bm = 128, bn = 64, stages = 8, cluster = 1, group = 8;
constexpr bool pingpong = false, add = true;
#line 5 "gemm_sm90.cu"
constexpr int partials = 2;
#line 7 "gemm_sm90.cu"
extern "C" __global__ void fp8_gemm_e4m3_e4m3_fp32_row_add_co128x64c1s8p2g8(fp32 *out, const e4m3 *a, const e4m3 *b) {
    registers<40, 232>();
}

// Made by fp8gen 0.1.0 from the template gemm_sm90.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     gemm_e4m3_e4m3_bf16_row_co128x64c1s8p2g8
//   used by:    rowwise
//   parameters: a_format = "e4m3"
//               a_row_scaled = true
//               add = false
//               b_format = "e4m3"
//               b_row_scaled = true
//               b_tile_scaled = false
//               biased = false
//               bm = 128
//               bn = 64
//               cluster = 1
//               consumer_registers = 232
//               consumers = 2
//               entry = "fp8_gemm_e4m3_e4m3_bf16_row_co128x64c1s8p2g8"
//               flow = "stream"
//               group = 8
//               partials = 2
//               pingpong = false
//               producer_registers = 40
//               run = 1
//               scheduler = "static"
//               slabs = 2
//               slices = 1
//               stages = 8
//               swapped = false
//               target = "bf16"
//               vectors = 256
#line 1 "gemm_sm90.cu"
// gemm_sm90.cu of the golden files: numbers and booleans.
constexpr int bm = 128, bn = 64, stages = 8, cluster = 1, group = 8;
constexpr bool pingpong = false, add = false;
#line 5 "gemm_sm90.cu"
constexpr int partials = 2;
#line 7 "gemm_sm90.cu"
extern "C" __global__ void fp8_gemm_e4m3_e4m3_bf16_row_co128x64c1s8p2g8(bf16 *out, const e4m3 *a, const e4m3 *b) {
    registers<40, 232>();
}

// Made by fp8gen 0.1.0 from the template dequantize.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     dequantize_e4m3_row
//   used by:    rowwise, hp_wgrad
//   parameters: entry = "fp8_dequantize_row"
//               scaling = "row"
#line 1 "dequantize.cu"
// dequantize.cu of the golden files: a table in a fixed order.
#line 3 "dequantize.cu"
constexpr int mantissa_e4m3 = 3; // of row: false
#line 3 "dequantize.cu"
constexpr int mantissa_e5m2 = 2; // of row: false
#line 5 "dequantize.cu"
extern "C" __global__ void fp8_dequantize_row() {}

// Made by fp8gen 0.1.0 from the template quantize_row.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     quantize_row_bf16_e4m3_pow2
//   used by:    hp_wgrad
//   parameters: entry = "fp8_quantize_row_bf16_e4m3_pow2"
//               format = "e4m3"
//               power_of_two = true
//               shared_bytes = 65536
//               source = "bf16"
#line 1 "quantize_row.cu"
// quantize_row.cu of the golden files: substitutions only.
using source_t = bf16;
using format = e4m3;
constexpr bool power_of_two = true;
extern "C" __global__ void fp8_quantize_row_bf16_e4m3_pow2(const source_t *source) {}

// Made by fp8gen 0.1.0 from the template fused.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     fused_bf16_e4m3_pow2
//   used by:    hp_wgrad
//   parameters: entry = "fp8_fused_bf16_pow2"
//               held = 3
//               power_of_two = true
//               source = "bf16"
#line 1 "fused.cu"
// fused.cu of the golden files: substitutions only.
using source_t = bf16;
constexpr bool power_of_two = true;
constexpr int held = 3;
extern "C" __global__ void fp8_fused_bf16_pow2(const source_t *source) {}

// Made by fp8gen 0.1.0 from the template quantize.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     quantize_bf16_e4m3_pow2
//   used by:    hp_wgrad
//   parameters: entry = "fp8_quantize_bf16_pow2"
//               power_of_two = true
//               source = "bf16"
#line 1 "quantize.cu"
// quantize.cu of the golden files: branches and expressions.
using source_t = bf16;
#line 4 "quantize.cu"
constexpr float limit = 0x1.cp+8, half = 0x1.cp+7, tenth = 0x1.999999999999ap-4;
constexpr bool power_of_two = true;
#line 7 "quantize.cu"
#define ROUND(x) \
    floor_power( \
        x)
#line 13 "quantize.cu"
extern "C" __global__ void fp8_quantize_bf16_pow2() {}

// Made by fp8gen 0.1.0 from the template line_scales.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     line_scales_e4m3_pow2
//   used by:    hp_wgrad
//   parameters: entry = "fp8_line_scales_e4m3_pow2"
//               format = "e4m3"
//               power_of_two = true
#line 1 "line_scales.cu"
// line_scales.cu of the golden files: substitutions only.
using format = e4m3;
constexpr bool power_of_two = true;
extern "C" __global__ void fp8_line_scales_e4m3_pow2(const float *row_partials) {}

// Made by fp8gen 0.1.0 from the template quantize_lines.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     quantize_lines_bf16_e4m3_pow2
//   used by:    hp_wgrad
//   parameters: entry = "fp8_quantize_lines_bf16_e4m3_pow2"
//               format = "e4m3"
//               power_of_two = true
//               source = "bf16"
#line 1 "quantize_lines.cu"
// quantize_lines.cu of the golden files: substitutions only.
using source_t = bf16;
using format = e4m3;
constexpr bool power_of_two = true;
extern "C" __global__ void fp8_quantize_lines_bf16_e4m3_pow2(const source_t *source) {}

// Made by fp8gen 0.1.0 from the template gemm_sm90.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     gemm_e4m3_e4m3_bf16_arow_co128x64c1s8p2g8
//   used by:    hp_wgrad
//   parameters: a_format = "e4m3"
//               a_row_scaled = true
//               add = false
//               b_format = "e4m3"
//               b_row_scaled = false
//               b_tile_scaled = false
//               biased = false
//               bm = 128
//               bn = 64
//               cluster = 1
//               consumer_registers = 232
//               consumers = 2
//               entry = "fp8_gemm_e4m3_e4m3_bf16_arow_co128x64c1s8p2g8"
//               flow = "stream"
//               group = 8
//               partials = 2
//               pingpong = false
//               producer_registers = 40
//               run = 1
//               scheduler = "static"
//               slabs = 2
//               slices = 1
//               stages = 8
//               swapped = false
//               target = "bf16"
//               vectors = 256
#line 1 "gemm_sm90.cu"
// gemm_sm90.cu of the golden files: numbers and booleans.
constexpr int bm = 128, bn = 64, stages = 8, cluster = 1, group = 8;
constexpr bool pingpong = false, add = false;
#line 5 "gemm_sm90.cu"
constexpr int partials = 2;
#line 7 "gemm_sm90.cu"
extern "C" __global__ void fp8_gemm_e4m3_e4m3_bf16_arow_co128x64c1s8p2g8(bf16 *out, const e4m3 *a, const e4m3 *b) {
    registers<40, 232>();
}

// Made by fp8gen 0.1.0 from the template amax_dbias.cu; edit that, not this.
//   again:      fp8gen expand <spec of model recipes>
//   kernel:     amax_dbias_bf16
//   used by:    bf16
//   parameters: entry = "fp8_amax_dbias_bf16"
//               source = "bf16"
#line 1 "amax_dbias.cu"
#line 2 "amax_dbias.cu"
extern "C" __global__ void fp8_amax_dbias_bf16(const bf16 *p) {}
