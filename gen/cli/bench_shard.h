/*
 * bench_shard.h - what the files of `fp8gen bench shard` share: ranks, their turns, result rows.
 */
#ifndef FP8GEN_CLI_BENCH_SHARD_H
#define FP8GEN_CLI_BENCH_SHARD_H

#include "gen/cli/bench.h"
#include "gen/cli/ranks.h"
#include "runtime/fp8_model.h"

enum { SHARD_BENCH_PARTS = 8, SHARD_BENCH_SPANS = 16384 };

struct shard_bench_values {
    struct cli_list shapes, cases, ranks;
    int64_t rounds, tokens, blocks, mib, comm_sms, slots;
    bool json, transposed;
    const char *device, *grad_weight, *reduce, *trace, *source_hash, *template_dir, *tuning, *gemm;
};

/* One run, shared by its ranks; rank 0 writes rows. */
struct shard_bench {
    const struct shard_bench_values *values;
    struct bench rows; /* header, table, shapes: m = N, n = K of a layer */
    int shape_count;
    int ranks;   /* of the running part */
    fp8gen *gen; /* which predicts, and what it predicts of a step: seconds by name, or null */
    json_t *predicted;
    struct {
        int count;
        double sum, worst;
        char where[64];
    } errors;           /* of the predictions, as shares of what was measured */
    fp8_comm_id ids[2]; /* of the two communicators over NCCL */
    struct shard_bench_span {
        fp8_model_span span;
        int rank;
    } * spans; /* of the traced step, SHARD_BENCH_SPANS a rank; `what` NULL: none there */
};

/* One rank of it. */
struct shard_bench_rank {
    struct shard_bench *bench;
    struct cli_rank *rank;
    fp8_comm *comm;    /* gathers by copy engines where it can */
    fp8_comm *kernels; /* gathers by NCCL's default kernels; on the host the same */
    bool own_comms;
};

/* Something to measure: enqueues the work on the rank's stream; returns an exit code. */
struct shard_bench_item {
    int (*run)(void *user);
    void *user;
    double seconds; /* median of one run, of the slowest rank */
};

/* Measures all items in turns, `repeats` runs of each at a time; all ranks call it. */
int shard_bench_measure(struct shard_bench_rank *r, struct shard_bench_item *items, int count,
                        int repeats);
/* Seconds behind a row: of its value, and of its baseline; < 0: none, or not predicted. */
struct shard_bench_times {
    double measured[2], predicted[2];
};

/* bench_shard_rows.c: the table of the rows, unless they are JSON. */
int shard_bench_open_rows(struct shard_bench *b);
/* A row with its predictions and their errors and the fields of `more` (which is freed), on rank
 * 0. */
void shard_bench_row(struct shard_bench_rank *r, const struct bench_result *result,
                     const struct shard_bench_times *times, json_t *more);
/* Predicted seconds of a collective; way: as fp8gen_collective_seconds. < 0: not known. Rank 0
 * alone asks. */
double shard_bench_collective(const struct shard_bench_rank *r, const char *op, const char *way,
                              double bytes);

/* How far off the predictions were over these ranks, as a row; then they are forgotten. */
void shard_bench_errors(struct shard_bench *b);

/* ---- bench_shard_gather.c, bench_shard_step.c: the cases; all ranks call them ---------------- */

int shard_bench_gathers(struct shard_bench_rank *r);
int shard_bench_weights(struct shard_bench_rank *r);
int shard_bench_step(struct shard_bench_rank *r);

#endif
