/*
 * fp8_comm.h - communicators of libfp8: collectives on FP8 bytes, gradients and amaxes over ranks.
 *
 * Four calls, as much as weight parallel needs: all_gather and all_to_all of bytes, reduce_scatter
 * of bf16, fp16 or fp32 numbers, all_reduce_max of fp32 numbers. Over NCCL (communicators of its
 * own, or one that the caller has), or between threads of one process, which is what the host
 * backend runs on.
 *
 * The laws of fp8.h hold here. In addition:
 *   - All ranks of a communicator make the same collective calls in the same order. A rank that
 *     does not is found: at once by the local communicator, by the timeout over NCCL. The call then
 *     fails on the others with a sentence that names rank, layer and collective; nothing hangs.
 *   - A communicator that failed stays failed: FP8_ERR_COMM or FP8_ERR_TIMEOUT from every later
 *     call. Destroy it, and start again.
 *   - A comm is used by one thread at a time.
 */
#ifndef FP8_COMM_PUBLIC_H
#define FP8_COMM_PUBLIC_H

#include "fp8.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- communicators --------------------------------------------------------------------------- */

typedef struct fp8_comm fp8_comm;
typedef struct fp8_comm_group fp8_comm_group;

/* Names a communicator that is about to be made; as ncclUniqueId. */
typedef struct fp8_comm_id {
    char bytes[128];
} fp8_comm_id;

/* A new id, made on one rank and carried to the others by any means. Opens NCCL.
 * FP8_ERR_LIBRARY. */
FP8_API fp8_status fp8_comm_id_create(fp8_comm_id *id);

/* Who this process is, as torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE), mpirun
 * (OMPI_COMM_WORLD_*, PMI_*, MPI_LOCAL*) or srun (SLURM_*) say it in the environment. */
typedef struct fp8_comm_place {
    uint32_t size; /* sizeof(fp8_comm_place), set by the caller */
    int32_t rank;
    int32_t ranks;
    int32_t local_rank;  /* on this node: the usual device ordinal */
    int32_t local_ranks; /* on this node; 0 if the launcher does not say */
    uint32_t reserved0;
    const char *launcher; /* "torchrun", "mpirun", "srun" */
    char file[512];       /* for fp8_comm_options.file: FP8_COMM_FILE, else one in TMPDIR (or /tmp)
                           * named after the run; "" if ranks are on other nodes and FP8_COMM_FILE,
                           * which must be on a file system that all see, is not set */
    uint64_t reserved[4];
} fp8_comm_place;

#define FP8_COMM_PLACE_INIT                                                                        \
    {                                                                                              \
        sizeof(fp8_comm_place), 0, 0, 0, 0, 0, NULL, { 0 },                                        \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }

/* FP8_ERR_NOT_FOUND: no launcher's variables are set; FP8_ERR_ARGUMENT: they contradict each other,
 * or FP8_COMM_FILE does not fit. */
FP8_API fp8_status fp8_comm_environment(fp8_comm_place *place);

enum {
    /* gathers by NCCL's kernels even where the copy engine could do it */
    FP8_COMM_NO_COPY_ENGINE = 1u,
    /* no thread: failures are found by fp8_comm_poll and fp8_comm_wait */
    FP8_COMM_NO_WATCHDOG = 2u,
};

typedef struct fp8_comm_options {
    uint32_t size;
    int32_t rank;
    int32_t ranks;
    uint32_t flags;         /* FP8_COMM_* */
    double timeout_seconds; /* for joining, and for a collective to finish; 0 = 120 */
    const fp8_comm_id *id;  /* give this, or */
    const char *file; /* the path through which rank 0 hands its id to the others: any path that all
                             * ranks can write; left-overs of earlier runs do no harm. Not needed
                             * for ranks = 1 */
    const char *name; /* in messages: "fsdp" (the default) */
    uint64_t reserved[4];
} fp8_comm_options;

#define FP8_COMM_OPTIONS_INIT                                                                      \
    {                                                                                              \
        sizeof(fp8_comm_options), 0, 1, 0, 0.0, NULL, NULL, NULL,                                  \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }

/* One rank of a communicator over NCCL, on the context's device. Blocks until all ranks have come;
 * the others' threads or processes must be calling too. ranks = 1 needs no NCCL and works on the
 * host. NCCL is opened as the other libraries are (FP8_NCCL_PATH), its communicator is
 * non-blocking, and a thread watches it: on an error of NCCL or a collective that is not done in
 * time it is aborted, so that streams that wait for it go on. Only copy engines that wait for a
 * rank cannot be called off: the call fails in time all the same and says that then the process has
 * to end. The context must outlive it. FP8_ERR_LIBRARY; FP8_ERR_TIMEOUT: which ranks did not come;
 * FP8_ERR_COMM; FP8_ERR_UNSUPPORTED: a host context and ranks > 1 (fp8_comm_join is for that). */
FP8_API fp8_status fp8_comm_create(fp8_context *context, const fp8_comm_options *options,
                                   fp8_comm **comm);

/* Address of a function of the caller's NCCL ("ncclAllGather"), NULL if it has none. */
typedef void *(*fp8_comm_symbol)(void *user, const char *name);

typedef struct fp8_comm_adopt_args {
    uint32_t size;
    uint32_t flags;  /* FP8_COMM_*; this, timeout_seconds and name as in fp8_comm_options */
    void *nccl_comm; /* an ncclComm_t on the context's device; borrowed until fp8_comm_destroy */
    /* where NCCL's functions are; NULL: the NCCL in the process. Needed where the caller's NCCL is
     * linked statically or under another name */
    fp8_comm_symbol symbol;
    void *symbol_user;
    int32_t nccl_version; /* of the NCCL that made it, as ncclGetVersion; 0 = not known */
    uint32_t reserved0;
    double timeout_seconds;
    const char *name;
    uint64_t reserved[4];
} fp8_comm_adopt_args;

#define FP8_COMM_ADOPT_ARGS_INIT                                                                   \
    {                                                                                              \
        sizeof(fp8_comm_adopt_args), 0, NULL, NULL, NULL, 0, 0, 0.0, NULL,                         \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }

/* Uses a communicator of the caller's. It is never aborted, finalised or destroyed here, also not
 * after a timeout: calls then fail, and the caller aborts it. No other thread may use it at the
 * same time.
 * FP8_ERR_LIBRARY: the NCCL found is not of nccl_version: two copies would meet one
 * communicator. */
FP8_API fp8_status fp8_comm_adopt(fp8_context *context, const fp8_comm_adopt_args *args,
                                  fp8_comm **comm);

/* A meeting point of `ranks` (1 to 65536) threads of this process; timeout_seconds as in
 * fp8_comm_options. Destroy it after all that joined. FP8_ERR_ARGUMENT, FP8_ERR_MEMORY. */
FP8_API fp8_status fp8_comm_group_create(int32_t ranks, double timeout_seconds,
                                         fp8_comm_group **group);
FP8_API void fp8_comm_group_destroy(fp8_comm_group *group);

/* This thread becomes a rank of the group: all on host contexts (one shared context, or one each),
 * or each on the context of another GPU (over NCCL). Blocks until all have joined. On the host a
 * collective is done when the call returns, sums are over ranks in ascending order in fp32, and a
 * rank that makes another call, fails or leaves is an error on all at once. A rank calls from one
 * thread at a time. The context must outlive the comm; name (NULL: "fsdp") is copied.
 * FP8_ERR_TIMEOUT: which ranks did not come; FP8_ERR_ARGUMENT: a rank twice, or contexts of both
 * kinds; and what fp8_comm_create gives. */
FP8_API fp8_status fp8_comm_join(fp8_comm_group *group, fp8_context *context, int32_t rank,
                                 const char *name, fp8_comm **comm);

/* Ends this rank; enqueued work must be done (fp8_comm_wait). Waits for no other rank's call, but
 * up to timeout_seconds for NCCL's abort, which other work on the device may hold: the device is
 * then stuck until that ends (fp8_device_info), as it is for good where no thread can be started
 * for the abort. */
FP8_API void fp8_comm_destroy(fp8_comm *comm);

typedef struct fp8_comm_info {
    uint32_t size; /* set by the caller */
    int32_t rank;
    int32_t ranks;
    uint32_t is_owned;       /* 0: adopted */
    uint32_t is_copy_engine; /* memory of fp8_comm_alloc is gathered without SMs */
    int32_t version;         /* of NCCL (23203 = 2.32.3); 0: none in use */
    const char *transport;   /* "nccl", "local" */
    const char *path; /* of NCCL, "" if not known; lives as long as the comm, like the next */
    const char *name;
    uint64_t reserved[4];
} fp8_comm_info;

FP8_API fp8_status fp8_comm_describe(const fp8_comm *comm, fp8_comm_info *info);

/* Memory for gathers and exchanges of this communicator: from ncclMemAlloc and registered as a
 * symmetric window where NCCL (2.28 and newer) and the node can, so that copy engines gather it;
 * else like fp8_memory_alloc. FP8_LOG says which and why. All ranks call it in the same order with
 * the same bytes and end alike: all have such a window or none, and where one rank has no memory,
 * no rank has (FP8_ERR_COMM on the others names it). Blocks; allocates. */
FP8_API fp8_status fp8_comm_alloc(fp8_comm *comm, size_t bytes, void **memory);
/* Every rank frees what it allocated, in the same order, before fp8_comm_destroy. */
FP8_API void fp8_comm_free(fp8_comm *comm, void *memory);

/* One piece of a gather: this rank's `bytes` at send go to recv + rank * bytes on all ranks.
 * send and recv are apart, or send is recv + rank * bytes: in place; all other overlaps are
 * refused. bytes is the same on all ranks and may be 0. */
typedef struct fp8_gather_part {
    const void *send;
    void *recv; /* ranks * bytes */
    size_t bytes;
} fp8_gather_part;

/* One piece of an exchange: bytes [r * bytes, (r + 1) * bytes) of this rank's send go to recv +
 * rank * bytes on rank r. send and recv do not overlap. bytes is the same on all ranks and may be
 * 0. */
typedef struct fp8_exchange_part {
    const void *send; /* ranks * bytes */
    void *recv;       /* ranks * bytes */
    size_t bytes;
} fp8_exchange_part;

/* One piece of a sum: recv[0..count) = sum over ranks of their send[rank * count + i], or the
 * average. Neither is in memory of fp8_comm_alloc, which NCCL sums by kernels of its own that are
 * not right: FP8_ERR_ARGUMENT. */
typedef struct fp8_reduce_part {
    const void *send; /* ranks * count elements */
    void *recv; /* count elements; apart from send, or in place: send + rank * count. All other
                       * overlaps are refused */
    size_t count;
    fp8_dtype dtype; /* bf16, fp16 or fp32. Sums of FP8 are refused: FP8_ERR_DTYPE */
    uint32_t average;
} fp8_reduce_part;

/* All parts form one operation; memory that one of them writes is of no other part, which is not
 * checked. `label` says what is moved ("w of layer 'qkv'") in messages and is copied.
 * FP8_ERR_COMM, FP8_ERR_TIMEOUT, FP8_ERR_ARGUMENT. */
FP8_API fp8_status fp8_comm_all_gather(fp8_comm *comm, const fp8_gather_part *parts,
                                       size_t part_count, const char *label, fp8_stream stream);
/* FP8_ERR_UNSUPPORTED: NCCL before 2.28 has none. Copy engines do it where they gather. */
FP8_API fp8_status fp8_comm_all_to_all(fp8_comm *comm, const fp8_exchange_part *parts,
                                       size_t part_count, const char *label, fp8_stream stream);
FP8_API fp8_status fp8_comm_reduce_scatter(fp8_comm *comm, const fp8_reduce_part *parts,
                                           size_t part_count, const char *label, fp8_stream stream);
/* values[i] = maximum over ranks, in place; NaN is not a maximum. For amaxes: -1 says "did not
 * run". */
FP8_API fp8_status fp8_comm_all_reduce_max(fp8_comm *comm, float *values, size_t count,
                                           const char *label, fp8_stream stream);

/* Whether everything is well so far: errors of NCCL, time. Waits for no work, but for another
 * thread's call on this communicator, and 2 s at most for NCCL's abort where it finds a failure.
 * FP8_ERR_COMM, FP8_ERR_TIMEOUT. */
FP8_API fp8_status fp8_comm_poll(fp8_comm *comm);
/* fp8_stream_synchronize for streams with collectives: returns with the error where that would
 * hang. */
FP8_API fp8_status fp8_comm_wait(fp8_comm *comm, fp8_stream stream);
/* For a rank that cannot go on: fails the communicator here with `why`, at once on all ranks of a
 * local group; over NCCL the others run into their timeout (or NCCL's own error). From any thread:
 * a call of another that hangs in NCCL on a communicator of ours ends, with `why`; one on an
 * adopted communicator is waited for. */
FP8_API void fp8_comm_abort(fp8_comm *comm, const char *why);
/* Compares a text of at most 255 bytes over all ranks. Blocks. FP8_ERR_COMM on every rank if they
 * differ, with both texts and the ranks: for hashes of specs, versions. */
FP8_API fp8_status fp8_comm_agree(fp8_comm *comm, const char *what, const char *text);

#ifdef __cplusplus
}
#endif
#endif /* FP8_COMM_PUBLIC_H */
