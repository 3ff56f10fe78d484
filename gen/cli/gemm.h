/*
 * gemm.h - what `fp8gen bench gemm` and `fp8gen tune` share: generated candidates as bundles, the
 * tensors of a shape, and contests between GEMM kernels.
 *
 * A candidate is one configuration of the GEMM template for every GEMM of a model of layers; each
 * is a bundle of its own, so that nothing is measured that a user could not run. Accumulation is a
 * property of a configuration, so there are two models of the same layers: all fast and all split.
 */
#ifndef FP8GEN_CLI_GEMM_H
#define FP8GEN_CLI_GEMM_H

#include "gen/cli/cublaslt.h"

/* ---- gemm_set.c: candidates ------------------------------------------------------------------ */

/* A layer of the model of every candidate. */
struct gemm_layer {
    int64_t n, k, max_m;
    fp8_dtype y, dx, dw;
    char format[8]; /* "hybrid" or "e4m3" */
    char name[24];
};

struct gemm_candidate {
    char name[64];      /* of the configuration, or "plan" */
    bool plan;          /* what the plan chooses among the generated ones, */
    bool tuned;         /* by the tuning file */
    bool split;         /* accumulation */
    json_t *config;     /* of the configuration; NULL for plan */
    fp8_bundle *bundle; /* NULL: not built */
    json_t *manifest;   /* of the bundle */
    char *trouble;      /* why not, */
    int code;           /* and the exit code of it */
};

struct gemm_set {
    struct bench *bench;
    const struct gemm_layer *layers;
    int layer_count;
    struct gemm_candidate *items;
    int count;
};

/* Which candidates take part: "all" (NULL), "plan" or names with commas. with_plan: the plan's own
 * choice too. wanted: fast and split accumulation. Opens no device. */
int gemm_set_choose(struct gemm_set *set, const char *which, bool with_plan, const bool wanted[2]);
/* Builds and opens them, compiling on all cores. One that cannot be built is left out with a
 * warning; the plan's must be. */
int gemm_set_build(struct gemm_set *set);
void gemm_set_close(struct gemm_set *set);
/* A layer of every candidate of that accumulation, in order; NULL where there is none. */
int gemm_set_layers(const struct gemm_set *set, int layer, bool split, fp8_layer **layers);
/* The generated kernel that a candidate's bundle gives a GEMM of m tokens; NULL: it is
 * cuBLASLt's. */
const char *gemm_set_kernel(const struct gemm_candidate *candidate, const char *layer,
                            fp8_pass pass, int64_t m, bool accumulate);
void gemm_set_free_layers(const struct gemm_set *set, fp8_layer **layers);

/* ---- gemm_data.c: tensors -------------------------------------------------------------------- */

/* Memory for the largest of several shapes, in every buffer set. */
struct gemm_room {
    size_t x, w, dy, out;              /* bytes: bf16, and the largest output */
    size_t x_bytes, w_bytes, dy_bytes; /* of the operands */
};

struct gemm_data {
    struct bench *bench;
    const struct gemm_layer *layer;
    int64_t m;
    struct bench_buffers x, w, dy, out, x_bytes, w_bytes, dy_bytes;
    fp8_operand x_operand[BENCH_SETS], w_operand[BENCH_SETS], dy_operand[BENCH_SETS];
    struct cli_buffer workspace;
};

void gemm_room_for(struct gemm_room *room, const struct gemm_layer *layer, int64_t m);
int gemm_data_create(struct gemm_data *data, struct bench *bench, const struct gemm_room *room);
void gemm_data_destroy(struct gemm_data *data);
/* Quantises x, w and dy of m tokens; any candidate's layer will do. */
int gemm_data_fill(struct gemm_data *data, const struct gemm_layer *layer, int64_t m,
                   const fp8_layer *by);
/* Enough workspace for that layer's passes. */
int gemm_data_reserve(struct gemm_data *data, const fp8_layer *layer);

/* One GEMM on these tensors: out[rows, cols] (+)= a b^T. */
struct gemm_problem {
    struct gemm_data *data;
    fp8_pass pass;
    bool split, accumulate;
    int64_t rows, cols, depth;
    fp8_dtype out, a, b;
};

struct gemm_problem gemm_problem_of(struct gemm_data *data, fp8_pass pass, bool split,
                                    bool accumulate);
const fp8_operand *gemm_operand(const struct gemm_problem *problem, bool second, int set);
/* The same GEMM for cuBLASLt, on the operands or on the bf16 tensors. */
struct baseline_gemm_shape gemm_baseline_shape(const struct gemm_problem *problem, bool fp8);
/* Enqueues it on a layer of a candidate. */
fp8_status gemm_run(const struct gemm_problem *problem, const fp8_layer *layer, int set);

/* ---- gemm_check.c: is the product right? ----------------------------------------------------- */

struct gemm_check;
/* Sums in float64 over sampled rows and columns of set 0. */
int gemm_check_create(const struct gemm_problem *problem, struct gemm_check **check);
void gemm_check_destroy(struct gemm_check *check);
/* Fills out of set 0 with what a missing store would leave. Call before the GEMM. */
int gemm_check_prepare(const struct gemm_check *check);
/* Compares out of set 0 with the sums and with the first product that was right. why is "" if it
 * is. */
int gemm_check_verify(struct gemm_check *check, double *error, char why[96]);

/* ---- gemm_contest.c: who is fastest ---------------------------------------------------------- */

enum gemm_group { GEMM_GENERATED, GEMM_CUBLASLT, GEMM_BF16, GEMM_TWIN, GEMM_GROUPS };

struct gemm_contender {
    enum gemm_group group; /* contenders of a group compete for one place */
    const struct gemm_problem *problem;
    struct gemm_check *check; /* NULL: not checked */
    char name[160];           /* of the kernel or algorithm */
    const struct gemm_candidate *candidate;
    const fp8_layer *layer;
    const struct baseline_gemm *gemm;
    int algorithm;
    bool keep; /* stays to the end: the plan's choice */
    bool out;  /* did not run, was wrong or too slow: why says it */
    char why[96];
    double seconds; /* by the last stage that it was in */
    double error;   /* relative, of a checked one */
    int stage;      /* the last one that it was in */
};

struct gemm_contest {
    struct bench *bench;
    struct gemm_contender *list;
    int count, capacity;
};

/* layers: as gemm_set_layers made them. */
int gemm_contest_add_set(struct gemm_contest *contest, enum gemm_group group,
                         const struct gemm_problem *problem, struct gemm_check *check,
                         const struct gemm_set *set, fp8_layer **layers);
/* algorithm -1: all of them. */
int gemm_contest_add_baseline(struct gemm_contest *contest, enum gemm_group group,
                              const struct gemm_problem *problem, struct gemm_check *check,
                              const struct baseline_gemm *gemm, int algorithm);
/* Measures all: each once, the near ones in turns, then the best of each group for up to `seconds`
 * each. */
int gemm_contest_run(struct gemm_contest *contest, double seconds);
/* The fastest of a group; NULL if none is right. place 1: the second. */
const struct gemm_contender *gemm_contest_best(const struct gemm_contest *contest,
                                               enum gemm_group group, int place);
/* The plan's choice; NULL if it did not take part. */
const struct gemm_contender *gemm_contest_plan(const struct gemm_contest *contest,
                                               enum gemm_group group);
/* How many of a group ran, were right and were measured. */
int gemm_contest_members(const struct gemm_contest *contest, enum gemm_group group);
void gemm_contest_destroy(struct gemm_contest *contest);

#endif
