/*
 * run_shard.h - what the files of `fp8gen run --fsdp` share: one rank's layers with their tensors.
 */
#ifndef FP8GEN_CLI_RUN_SHARD_H
#define FP8GEN_CLI_RUN_SHARD_H

#include <jansson.h>

#include "gen/cli/ranks.h"
#include "runtime/fp8_model.h"
#include "runtime/fp8_state.h"

enum {
    SHARD_STEPS = 2,         /* optimizer steps: new weights in the second */
    SHARD_MICRO_BATCHES = 2, /* of each */
    SHARD_MAX_LAYERS = 4096,
};

enum shard_buffer {
    SHARD_W,    /* the whole weight: for the reference; the model sees its rows alone */
    SHARD_BIAS, /* the whole bias */
    SHARD_W_ROWS,
    SHARD_BIAS_ROWS,
    SHARD_X,
    SHARD_DY,
    SHARD_Y,
    SHARD_DX,
    SHARD_SAVED,
    SHARD_GRAD,
    SHARD_DW_WHOLE, /* where micro-batches are added up before the one reduction */
    SHARD_DBIAS_WHOLE,
    SHARD_DW_ROWS,
    SHARD_DBIAS_ROWS,
    /* the unsharded layer's */
    SHARD_REF_WEIGHT,
    SHARD_REF_SAVED,
    SHARD_REF_Y,
    SHARD_REF_DX,
    SHARD_REF_DW,
    SHARD_REF_DBIAS,
    SHARD_REF_AMAX, /* of the whole w, for a layer whose scales are delayed */
    SHARD_BUFFERS,
};

/* What went wrong in a layer, as numbers that are compared over ranks: larger is worse. */
enum shard_result {
    SHARD_W_WRONG, /* bytes and scales of the gathered weight that differ */
    SHARD_Y_WRONG, /* bytes */
    SHARD_DX_WRONG,
    SHARD_DW_SHARE, /* largest error of an element as a share of its bound */
    SHARD_DBIAS_SHARE,
    SHARD_DW_ERROR, /* relative Frobenius error of a rank's rows */
    SHARD_RESULTS,
};

struct shard_layer {
    fp8_layer *layer;
    fp8_layer_info info;
    fp8_state *state;           /* of delayed scales; else NULL */
    int64_t first, rows, chunk; /* rows of w here; of every chunk */
    bool reduce_each;           /* each micro-batch is summed in fp32; else once, at the last */
    fp8_dtype rows_dtype;       /* of dw here */
    struct cli_buffer buffers[SHARD_BUFFERS];
    fp8_operand saved, grad, ref_weight, ref_saved;
    double *exact,
        *sizes; /* what dw's rows must be, and the sums of its terms' sizes; then dbias's */
    float results[SHARD_RESULTS];
};

/* One run, the same on all ranks. */
struct shard_run {
    const json_t *manifest;
    const char *only; /* a layer, or NULL */
    int64_t tokens;   /* of every layer; -1: as the spec says */
    uint64_t seed;
    bool average, shrunk;
    struct shard_report *report; /* of rank 0 */
};

struct shard_rank {
    const struct shard_run *run;
    struct cli_rank *rank;
    fp8_model *model;
    struct shard_layer *layers;
    int count;
    struct cli_buffer workspace;
    size_t pool_bytes; /* of the model */
    uint64_t version;
    int step, micro_batch;
};

/* ---- run_shard.c ----------------------------------------------------------------------------- */

/* One rank from its layers to its results; user is a struct shard_run. */
int shard_work(struct cli_rank *rank, void *user);
/* Rows of x of this rank's running micro-batch. */
int64_t shard_tokens(const struct shard_rank *s, const struct shard_layer *l);
fp8_tensor shard_tensor(const struct shard_rank *s, const struct shard_layer *l,
                        enum shard_buffer buffer);
/* l: whose pass it is; NULL: the whole model's. */
fp8_call shard_call(const struct shard_rank *s, const struct shard_layer *l);

/* ---- run_shard_check.c ----------------------------------------------------------------------- */

/* Fills the unsharded layer's weight, and compares what was gathered with it. */
int shard_check_weights(struct shard_rank *s);
/* Compares y and dx of the micro-batch, and adds the unsharded gradients of all ranks to what dw
 * must be. */
int shard_check_batch(struct shard_rank *s);
/* Compares this rank's rows of dw and dbias after the last micro-batch. */
int shard_check_gradients(struct shard_rank *s);

/* ---- run_shard_report.c ---------------------------------------------------------------------- */

struct shard_report;
struct shard_report *shard_report_create(bool json, const char *model, const char *how,
                                         const char *device);
void shard_report_layer(struct shard_report *report, const struct shard_rank *s,
                        const struct shard_layer *l);
/* Prints the table, frees the report and returns the number of layers that failed. */
int shard_report_finish(struct shard_report *report);

#endif
