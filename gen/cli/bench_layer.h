/*
 * bench_layer.h - a layer with its tensors in every buffer set, and its passes as bench items.
 */
#ifndef FP8GEN_CLI_BENCH_LAYER_H
#define FP8GEN_CLI_BENCH_LAYER_H

#include "gen/cli/bench.h"
#include "runtime/fp8_state.h"

struct bench_layer {
    struct bench *bench;
    const struct bench_shape *shape;
    const char *recipe; /* "bf16": nothing is quantised */
    fp8_layer *layer;
    fp8_state *state; /* of delayed scaling */
    fp8_layer_info info;
    struct bench_buffers x, w, dy, y, dx, dw, dbias;
    struct bench_buffers x_bytes, weight_bytes, saved_bytes, grad_bytes;
    fp8_operand x_quantized[BENCH_SETS], weight[BENCH_SETS], saved[BENCH_SETS], grad[BENCH_SETS];
    struct cli_buffer workspace;
    uint64_t version;
    bool with_weight; /* w and its operand are there */
};

/* Which tensors a benchmark needs: GEMMs want all, quantising x and dy, and w where it is as large
 * as they are. recipe: that of the shape's layer. */
int bench_layer_create(struct bench_layer *b, struct bench *bench, const struct bench_shape *shape,
                       const char *recipe, bool gemms);
/* Bytes an element that quantising moves: 4 where one read gives both copies, 6 where an amax comes
 * first, 3 for a row copy alone, 0 where nothing is quantised. */
int bench_recipe_bytes(const char *recipe);
/* Whether its scales are of whole tensors. */
bool bench_recipe_of_tensors(const char *recipe);
void bench_layer_destroy(struct bench_layer *b);

/* Run functions of bench items; user is the struct bench_layer. */
int bench_run_weight(void *user, int set);
int bench_run_fprop(void *user, int set);
int bench_run_quantize_x(void *user, int set);
int bench_run_quantize_dy(void *user, int set);
int bench_run_quantize_dy_dbias(void *user, int set);
int bench_run_wgrad(void *user, int set);
int bench_run_dgrad(void *user, int set);
int bench_run_gemm_fprop(void *user, int set);
int bench_run_gemm_wgrad(void *user, int set);
int bench_run_gemm_dgrad(void *user, int set);

#endif
