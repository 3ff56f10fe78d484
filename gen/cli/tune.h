/*
 * tune.h - what the files of `fp8gen tune` share: the GEMMs of a spec and what was measured of
 * them.
 */
#ifndef FP8GEN_CLI_TUNE_H
#define FP8GEN_CLI_TUNE_H

#include "gen/cli/gemm.h"

struct tune_measured {
    char name[64];
    double seconds;
};

/* One GEMM in one range of M. */
struct tune_entry {
    int layer; /* in the model of the candidates */
    fp8_pass pass;
    bool split, accumulate;
    char a_dtype[8], b_dtype[8], out_dtype[8];
    int64_t min_tokens, max_tokens, measured_tokens;
    bool done;
    /* the choice: a configuration, or a cuBLASLt algorithm */
    char winner[64];
    json_t *config; /* NULL: cuBLASLt */
    char algorithm[129];
    double seconds, generated_seconds, cublaslt_seconds, bf16_seconds; /* < 0: none */
    struct tune_measured *measured;
    int measured_count;
};

struct tune_plan {
    struct gemm_layer *layers;
    int layer_count;
    struct tune_entry *entries;
    int count;
    json_t *notes; /* what is not measured, and why: sentences */
};

/* tune_plan.c: reads the GEMMs of a plan, each once. only: NULL or the name of a layer; tokens:
 * the M to measure at (count 0: the usual M of a layer in its range, else the largest of the
 * range). */
int tune_plan_read(struct tune_plan *plan, const json_t *json, const char *only,
                   const int64_t *tokens, int count);
/* Says what is not measured, and why. */
void tune_plan_notes(const struct tune_plan *plan);
void tune_plan_destroy(struct tune_plan *plan);
double tune_flops(const struct tune_plan *plan, const struct tune_entry *entry);

/* tune_file.c: writes the entries that are done, under a temporary name that is then renamed. */
int tune_file_write(const struct tune_plan *plan, const struct cli_device *device,
                    const char *path);

#endif
