/*
 * bench.h - what the benchmarks share: shapes, buffers in rotation, interleaved rounds, result
 * rows.
 */
#ifndef FP8GEN_CLI_BENCH_H
#define FP8GEN_CLI_BENCH_H

#include <jansson.h>

#include "gen/cli/cuda.h"
#include "gen/cli/device.h"

/* Buffer sets in rotation, so that L2 does not serve a repeat with what the one before left
 * there. */
enum { BENCH_SETS = 3, BENCH_MAX_ITEMS = 32, BENCH_MAX_SHAPES = 64, BENCH_MAX_RECIPES = 8 };

struct bench_values {
    struct cli_list shapes;
    int64_t rounds;
    bool json;
    const char *source_hash;
    const char *grad_weight;
    const char *template_dir;
    const char *tuning, *gemm;
    struct cli_list recipes; /* of bench layer and bench quantize */
    /* of bench gemm */
    const char *seconds, *candidates;
    struct cli_list cases;
};

struct bench_shape {
    int64_t m, n, k;
    char name[48]; /* of its layer in the bundle */
};

struct bench {
    const struct bench_values *values;
    struct cli_device device;
    struct cli_cuda cuda;
    bool context_pushed;
    fp8_bundle *bundle;
    struct cli_table *table;
    struct bench_shape shapes[BENCH_MAX_SHAPES];
    const char *recipes[BENCH_MAX_RECIPES]; /* "bf16": a layer that computes in bf16 */
    int shape_count, recipe_count, rows;    /* rows: printed so far */
    char nccl[16];                          /* its version, "" = not used */
};

/* Reads --shape M,N,K..., or takes the given ones. dims: numbers in a shape (2 or 3). */
int bench_read_shapes(struct bench *bench, int dims, const struct bench_shape *standard, int count);
/* Opens the GPU and makes its context current. command: "bench gemm", ..., for the refusal. */
int bench_open_gpu(struct bench *bench, const char *command);
/* What stands before the rows. */
void bench_print_header(const struct bench *bench, const char *what);
/* Opens the GPU, builds and opens a bundle of one layer per shape and recipe (`fields`: more fields
 * of each layer, as Lua) and prints the header. what: "layer", ... */
int bench_open(struct bench *bench, const char *what, const char *fields);
/* Reads --recipe, or takes the given ones; without a call there is one recipe, "current". */
int bench_read_recipes(struct bench *bench, const char *const *standard, int count);
/* A shape with the name of its layer of that recipe. */
struct bench_shape bench_shape_of(const struct bench *bench, int shape, int recipe);
/* Prints the table and closes everything; returns code. */
int bench_close(struct bench *bench, int code);

/* Something to measure: run(user, set) enqueues the work on the device's stream; returns an exit
 * code. */
struct bench_item {
    int (*run)(void *user, int set);
    void *user;
    double seconds; /* median of one run */
};

/* Warms up for so many seconds, then measures all items in turns, round by round. */
int bench_measure(struct bench *bench, struct bench_item *items, int count, int rounds,
                  double warm_seconds);

struct bench_result {
    const char *bench, *name, *pass; /* name: the case */
    const char *recipe;              /* NULL: "current" */
    const struct bench_shape *shape;
    const char *unit;
    double value, baseline; /* baseline < 0: none */
    const char *baseline_name;
    bool lower_is_better;
    int launches; /* a call; -1 = not told */
};

/* The row as JSON, and its line on stdout, which frees it. */
json_t *bench_result_json(const struct bench_result *result);
void bench_print_json(json_t *row);
void bench_result_print(struct bench *bench, const struct bench_result *result);

/* BENCH_SETS device buffers; if sigma > 0, of bf16 normal data. */
struct bench_buffers {
    struct cli_buffer set[BENCH_SETS];
};

int bench_buffers_create(struct bench *bench, struct bench_buffers *buffers, size_t bytes,
                         double sigma, uint64_t seed);
void bench_buffers_destroy(struct bench *bench, struct bench_buffers *buffers);

/* Enqueues a plain device copy of `bytes`. */
int bench_copy(struct bench *bench, void *target, const void *source, size_t bytes);

int bench_fp8_failed(fp8_status status, const struct bench_shape *shape, const char *what);

extern const struct cli_option bench_options_layer[], bench_options_quantize[],
    bench_options_host[], bench_options_gemm[];

#endif
