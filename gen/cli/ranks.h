/*
 * ranks.h - several ranks of one command: threads of this process, or this process as one of many.
 */
#ifndef FP8GEN_CLI_RANKS_H
#define FP8GEN_CLI_RANKS_H

#include "gen/cli/device.h"
#include "runtime/fp8_comm.h"

/* One rank at work. Rank 0 speaks for all. */
struct cli_rank {
    int rank, ranks;
    struct cli_device device;
    fp8_bundle *bundle;
    fp8_comm *comm;
};

struct cli_ranks {
    int ranks;
    int first, here;        /* ranks of this process: first, first + 1, ... */
    int ordinal;            /* GPU of the first of them */
    const char *device;     /* "host" or "cuda" */
    const char *launcher;   /* "torchrun", ...; NULL: this process starts all of them */
    char file[512];         /* where launched ranks find each other */
    double timeout;         /* seconds that a collective may take */
    struct cli_device lead; /* the first rank's, open from the start */
};

/* Finds out who runs where, says what is missing (GPUs, with both numbers; another number of ranks
 * than the launcher started) and opens the first device. choice: "auto", "host", "cuda". */
int cli_ranks_open(const char *choice, int ranks, double timeout, struct cli_ranks *all);
void cli_ranks_close(struct cli_ranks *all);
/* Calls work(rank, user) on every rank of this process, each with the bundle in `path` open on its
 * device and all joined. A rank that fails ends the others. Returns the first rank's exit code that
 * is not CLI_DONE. */
int cli_ranks_run(struct cli_ranks *all, const char *path,
                  int (*work)(struct cli_rank *rank, void *user), void *user);
/* Whether the GPU of a rank waits for one that has gone: the process then ends by _Exit, for exit
 * waits for the GPU. */
bool cli_ranks_are_stuck(void);
/* values[i] = maximum over ranks, in host memory; count <= 64. */
int cli_rank_max(struct cli_rank *rank, float *values, int count);
/* Every rank's `bytes` from host memory, in order of rank, into all[ranks * bytes]. */
int cli_rank_gather(struct cli_rank *rank, const void *mine, size_t bytes, void *all);

#endif
