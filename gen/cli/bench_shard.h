/*
 * bench_shard.h - what the files of `fp8gen bench shard` share: ranks, their turns, result rows.
 */
#ifndef FP8GEN_CLI_BENCH_SHARD_H
#define FP8GEN_CLI_BENCH_SHARD_H

#include "gen/cli/bench.h"
#include "gen/cli/ranks.h"
#include "runtime/fp8_model.h"

enum { SHARD_BENCH_ITEMS = 4, SHARD_BENCH_LAYERS = 4096, SHARD_BENCH_SPANS = 16384 };

struct shard_bench_values {
    struct cli_list shapes, cases;
    int64_t rounds, ranks, tokens, blocks, mib, comm_sms;
    bool json;
    const char *device, *grad_weight, *reduce, *trace, *source_hash, *template_dir, *tuning, *gemm;
};

/* One run, shared by its ranks; rank 0 writes rows. */
struct shard_bench {
    const struct shard_bench_values *values;
    struct bench rows; /* header, table, shapes: m = N, n = K of a layer */
    int shape_count;
    fp8_comm_id ids[2]; /* of the two communicators over NCCL */
    struct shard_bench_span {
        fp8_model_span span;
        int rank;
    } * spans; /* of the traced step: ranks times SHARD_BENCH_SPANS places, `what` NULL where none is */
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
/* A row with the fields of `more` added (which is freed), on rank 0. */
void shard_bench_row(struct shard_bench_rank *r, const struct bench_result *result, json_t *more);

/* ---- bench_shard_gather.c, bench_shard_step.c: the cases; all ranks call them ------------------------ */

int shard_bench_gathers(struct shard_bench_rank *r);
int shard_bench_weights(struct shard_bench_rank *r);
int shard_bench_step(struct shard_bench_rank *r);

#endif
