/*
 * nccl_abi.h - the few declarations of NCCL that the runtime uses, written down here.
 *
 * The CUDA toolkit does not ship nccl.h, and the library is opened at run time, so the project
 * needs no header of NCCL's to build. What is here is NCCL's binary interface: values and layouts
 * that it never changes, only extends at the end (ncclConfig_t is cut to the size that its own size
 * field says). A test compares all of it with nccl.h where one exists.
 */
#ifndef FP8_NCCL_ABI_H
#define FP8_NCCL_ABI_H

#include <limits.h>
#include <stddef.h>

struct CUstream_st;

typedef void *fp8_nccl_comm;   /* ncclComm_t */
typedef void *fp8_nccl_window; /* ncclWindow_t */

typedef struct fp8_nccl_id {
    char bytes[128];
} fp8_nccl_id;

enum fp8_nccl_result { /* ncclResult_t */
                       FP8_NCCL_SUCCESS = 0,
                       FP8_NCCL_INVALID_ARGUMENT = 4,
                       FP8_NCCL_INVALID_USAGE = 5,
                       FP8_NCCL_IN_PROGRESS = 7,
};

enum fp8_nccl_dtype { /* ncclDataType_t */
                      FP8_NCCL_UINT8 = 1,
                      FP8_NCCL_FLOAT16 = 6,
                      FP8_NCCL_FLOAT32 = 7,
                      FP8_NCCL_BFLOAT16 = 9,
};

enum fp8_nccl_op { /* ncclRedOp_t */
                   FP8_NCCL_SUM = 0,
                   FP8_NCCL_MAX = 2,
                   FP8_NCCL_AVG = 4,
};

enum {
    FP8_NCCL_WIN_COLL_SYMMETRIC = 1,
    FP8_NCCL_CTA_POLICY_ZERO = 2,
    FP8_NCCL_WINDOW_ALIGNMENT = 4096,
    FP8_NCCL_UNDEFINED = INT_MIN,
    FP8_NCCL_NVLS_DISABLE = INT_MAX,
};
#define FP8_NCCL_MAGIC 0xcafebeefu

/* ncclConfig_t of 2.31; older ones end earlier: up to nvls_ctas since 2.27. */
typedef struct fp8_nccl_config {
    size_t size;
    unsigned magic;
    unsigned version;
    int blocking;
    int cga_cluster_size;
    int min_ctas;
    int max_ctas;
    const char *net_name;
    int split_share;
    int traffic_class;
    const char *comm_name;
    int collnet_enable;
    int cta_policy;
    int shrink_share;
    int nvls_ctas;
    int channels_per_net_peer;
    int nvlink_centric_sched;
    int graph_usage_mode;
    int num_rma_ctx;
    int max_p2p_peers;
    int graph_stream_ordering;
    int launch_order_implicit;
    int num_rma_sig;
    int rma_eager_init;
    int host_cft_mode;
    int nvls_host_mode;
} fp8_nccl_config;

/* X(member, symbol, parameters); every function returns ncclResult_t. */
#define FP8_NCCL_TABLE(X)                                                                          \
    X(get_version, "ncclGetVersion", (int *))                                                      \
    X(get_unique_id, "ncclGetUniqueId", (fp8_nccl_id *))                                           \
    X(init_rank_config, "ncclCommInitRankConfig",                                                  \
      (fp8_nccl_comm *, int, fp8_nccl_id, int, fp8_nccl_config *))                                 \
    X(destroy, "ncclCommDestroy", (fp8_nccl_comm))                                                 \
    X(abort, "ncclCommAbort", (fp8_nccl_comm))                                                     \
    X(get_async_error, "ncclCommGetAsyncError", (fp8_nccl_comm, int *))                            \
    X(count, "ncclCommCount", (fp8_nccl_comm, int *))                                              \
    X(cu_device, "ncclCommCuDevice", (fp8_nccl_comm, int *))                                       \
    X(user_rank, "ncclCommUserRank", (fp8_nccl_comm, int *))                                       \
    X(group_start, "ncclGroupStart", (void))                                                       \
    X(group_end, "ncclGroupEnd", (void))                                                           \
    X(all_gather, "ncclAllGather",                                                                 \
      (const void *, void *, size_t, int, fp8_nccl_comm, struct CUstream_st *))                    \
    X(reduce_scatter, "ncclReduceScatter",                                                         \
      (const void *, void *, size_t, int, int, fp8_nccl_comm, struct CUstream_st *))               \
    X(all_reduce, "ncclAllReduce",                                                                 \
      (const void *, void *, size_t, int, int, fp8_nccl_comm, struct CUstream_st *))

/* Newer libraries only; NULL if missing. */
#define FP8_NCCL_OPTIONAL(X)                                                                       \
    X(split, "ncclCommSplit", (fp8_nccl_comm, int, int, fp8_nccl_comm *, fp8_nccl_config *))       \
    X(all_to_all, "ncclAlltoAll",                                                                  \
      (const void *, void *, size_t, int, fp8_nccl_comm, struct CUstream_st *))                    \
    X(mem_alloc, "ncclMemAlloc", (void **, size_t))                                                \
    X(mem_free, "ncclMemFree", (void *))                                                           \
    X(window_register, "ncclCommWindowRegister",                                                   \
      (fp8_nccl_comm, void *, size_t, fp8_nccl_window *, int))                                     \
    X(window_deregister, "ncclCommWindowDeregister", (fp8_nccl_comm, fp8_nccl_window))

struct fp8_nccl {
#define X(member, symbol, parameters) int(*member) parameters;
    FP8_NCCL_TABLE(X)
    FP8_NCCL_OPTIONAL(X)
#undef X
    const char *(*error_string)(int);         /* ncclGetErrorString */
    const char *(*last_error)(fp8_nccl_comm); /* ncclGetLastError; NULL if missing */
    int version;                              /* 23203 = 2.32.3 */
    char path[1024];
};

#endif
