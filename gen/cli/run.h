/*
 * run.h - what the files of `fp8gen run` share: a layer with its tensors, the report's rows.
 */
#ifndef FP8GEN_CLI_RUN_H
#define FP8GEN_CLI_RUN_H

#include <jansson.h>

#include "gen/cli/device.h"
#include "runtime/fp8_state.h"

enum run_buffer {
    RUN_X,
    RUN_W,
    RUN_BIAS,
    RUN_DY,
    RUN_Y,
    RUN_DX,
    RUN_DW,
    RUN_DBIAS,
    RUN_X_QUANTIZED, /* both copies: what fprop multiplied, for the reference */
    RUN_SAVED,
    RUN_WEIGHT,
    RUN_GRAD,
    RUN_WORKSPACE,
    RUN_BUFFER_COUNT,
};

/* How the layer multiplies and casts, from the manifest. */
struct run_recipe {
    char name[32];
    bool power_of_two, is_delayed;
    int margin;
    int64_t shard_rows;           /* of w, that share a scale (weight_scale shard); 0: all */
    bool is_bf16;                 /* nothing is quantised */
    bool plain[FP8_PASS_COUNT];   /* the pass multiplies the caller's tensors, in bf16 */
    bool split[FP8_PASS_COUNT];   /* accumulation of the pass's GEMM */
    double bytes[FP8_PASS_COUNT]; /* moved by quantising, for each element */
};

enum run_data_kind {
    RUN_DATA_NORMAL,
    RUN_DATA_OUTLIER, /* a column of x times `factor`, that of w divided by it */
    RUN_DATA_SILU,    /* x after the activation */
    RUN_DATA_MEAN,    /* x and w around a mean of one sigma */
};

struct run_data {
    enum run_data_kind kind;
    float factor;
};

struct run_layer {
    const struct cli_device *device;
    fp8_layer *layer;
    fp8_layer_info info;
    struct run_recipe recipe;
    int64_t m, wanted_m; /* tokens of this run; of the spec or --tokens, before the host's cut */
    uint64_t seed;       /* of this layer */
    struct run_data data;
    struct cli_buffer buffers[RUN_BUFFER_COUNT];
    fp8_tensor tensors[RUN_X_QUANTIZED]; /* on the device */
    fp8_operand x_quantized, saved, weight, grad;
    uint64_t version;
    fp8_state *state; /* of delayed scaling, after a step on the same data; else NULL */
};

/* One line of the report. Negative numbers: not measured, not judged. */
struct run_row {
    const char *pass; /* "wgrad +=" for the accumulating one */
    char shape[72];
    char kernel[128], dtype[64];
    double seconds, flops, bytes;
    double error, error_bound; /* a bound of -1 with `each`: every output is judged by itself */
    double sqnr, sqnr_bound;
    double dbias_error;
    int64_t samples;
    bool each;         /* few outputs or little depth: each of them is judged, no average */
    bool no_bound;     /* the project promises none for this accumulation at this depth */
    int bit_equal;     /* 1 yes, 0 no, -1 does not apply */
    char failure[192]; /* "" = ok */
};

/* A row of which nothing is known yet. */
static inline struct run_row run_row_of(const char *pass)
{
    return (struct run_row){ .pass = pass,
                             .error = -1,
                             .error_bound = -1,
                             .sqnr = -1,
                             .sqnr_bound = -1,
                             .dbias_error = -1,
                             .bit_equal = -1 };
}

/* ---- run_layer.c: memory, data and passes ---------------------------------------------------- */

int run_layer_create(struct run_layer *run, const struct cli_device *device, fp8_bundle *bundle,
                     const char *name);
/* Allocates the tensors for run->m tokens and fills them with data of run->seed (run_data.c).
 * Delayed scaling takes its scales from a step on the same data. */
int run_layer_fill(struct run_layer *run);
void run_layer_destroy(struct run_layer *run);
/* Runs one pass once. */
int run_pass(struct run_layer *run, fp8_pass pass, bool accumulate);
/* Runs every pass once and brings all results into host memory; `backward` false: up to fprop. */
int run_all(struct run_layer *run, bool backward);
/* Whether the pass does anything in this layer, and whether it fills an operand. */
bool run_has_pass(const struct run_layer *run, fp8_pass pass);
bool run_has_operand(const struct run_layer *run, enum run_buffer operand);
/* Runs it as often as a median needs. */
int run_pass_timed(struct run_layer *run, fp8_pass pass, bool accumulate, double *seconds);
/* Fills x with both copies of the quantised x. */
int run_quantize_x(struct run_layer *run);
int run_download(const struct run_layer *run, enum run_buffer buffer);
/* The tensor, and the operand, in host memory. */
fp8_tensor run_host_tensor(const struct run_layer *run, enum run_buffer buffer);
fp8_operand run_host_operand(const struct run_layer *run, enum run_buffer buffer);

/* ---- run_data.c ------------------------------------------------------------------------------ */

/* Fills x, w, bias and dy with data of run->seed and run->data. */
int run_make_data(struct run_layer *run);
/* Fills dw with numbers that an accumulating wgrad adds to. */
int run_fill_dw(struct run_layer *run);

/* ---- run_check.c: the verdicts --------------------------------------------------------------- */

/* The buffers of the pass have been downloaded. dw_before: sampled dw of before an accumulating
 * wgrad (run_sample_dw), else NULL. */
int run_check_operand(const struct run_layer *run, enum run_buffer buffer, struct run_row *row);
int run_check_gemm(const struct run_layer *run, fp8_pass pass, const double *dw_before,
                   struct run_row *row);
int run_check_saved(const struct run_layer *run, struct run_row *row);
int run_check_dbias(const struct run_layer *run, struct run_row *row);
double *run_sample_dw(const struct run_layer *run);

/* ---- run_recipe.c ---------------------------------------------------------------------------- */

/* How the layer of that name computes, from the bundle's manifest. */
struct run_recipe run_read_recipe(const json_t *manifest, const char *name);

/* ---- run_accuracy.c -------------------------------------------------------------------------- */

/* `run --report`: the SQNR of every recipe on several kinds of data, and the error of sums against
 * their depth. Code CLI_BUG if a figure misses its bound. */
int run_accuracy(const struct cli_device *device, const char *template_dir, uint64_t seed,
                 bool json);

/* ---- run_report.c ---------------------------------------------------------------------------- */

struct run_report;
struct run_report *run_report_create(bool json, const char *model, const struct cli_device *device);
void run_report_row(struct run_report *report, const struct run_layer *run,
                    const struct run_row *row);
/* Prints the table, returns the number of rows that failed and frees the report. */
int run_report_finish(struct run_report *report);

/* ---- run_ranks.c: ranks that share the weights ----------------------------------------------- */

struct run_sharded_options {
    const char *device; /* "auto", "host", "cuda" */
    int ranks;
    const char *layer; /* only this one; NULL = all */
    int64_t tokens;    /* -1: as the spec says */
    int64_t seed;
    bool json, shrunk;
    double timeout; /* seconds of a collective */
};

/* Runs the loaded spec over ranks and reports; returns the exit code. */
int run_ranks(const struct run_sharded_options *options, fp8gen *gen);

/* ---- dump.c ---------------------------------------------------------------------------------- */

struct run_dump;
int run_dump_create(const char *path, const char *model, uint64_t seed, struct run_dump **dump);
/* The buffers that follow belong to this layer. */
int run_dump_layer(struct run_dump *dump, const struct run_layer *run);
/* Writes the tensor or operand from host memory. */
int run_dump_buffer(struct run_dump *dump, const struct run_layer *run, enum run_buffer buffer);
/* Publishes the folder if code is CLI_DONE or CLI_BUG (results that missed a bound are worth
 * keeping), else removes it; returns the exit code. Takes NULL. */
int run_dump_finish(struct run_dump *dump, int code);

#endif
