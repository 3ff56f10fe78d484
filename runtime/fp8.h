/*
 * fp8.h - FP8 linear layers on NVIDIA GPUs: the public C API of libfp8.
 *
 * A bundle (made by fp8gen from a layer spec) is opened on a context, a layer is created from it,
 * and its passes are launched on the caller's tensors and stream:
 *
 *     y[M,N]  = x[M,K] w[N,K]^T + bias[N]      fprop   (M tokens, N out_features, K in_features)
 *     dx[M,K] = dy[M,N] w[N,K]                 dgrad
 *     dw[N,K] = dy[M,N]^T x[M,K]               wgrad
 *     dbias[N] = column sums of dy             quantize_dy
 *
 * Laws:
 *   - Every call returns fp8_status, except pure queries. A create call writes through its last
 *     pointer and leaves NULL there on failure; a destroy call takes NULL.
 *   - The sentence that explains a failure, with the numbers, is fp8_last_error() of that thread.
 *   - Tensors, operands and workspace are the caller's memory: device memory on a CUDA context,
 *     host memory on the host context. A const pointer is borrowed for the call only.
 *   - Passes are asynchronous on the caller's stream. Nothing blocks the host, allocates or changes
 *     the current device unless its comment says so. Work on a layer's tensors is ordered by the
 *     caller's streams; the library adds no synchronisation between streams.
 *   - The library never prints, exits or aborts; messages go to the log callback of the context.
 *   - Contexts, bundles and layers may be used from many threads at once. One workspace serves one
 *     stream at a time.
 *   - After a fork the child uses none of its parent's objects, not even to destroy them: CUDA does
 *     not survive a fork, nor do the threads of a host context. It may make its own on the host,
 *     and on a GPU if the parent had called nothing of CUDA's (use fork with exec otherwise). A
 *     child that calls nothing here, or exec, harms nothing of the parent.
 *
 * Beside it: fp8_primitives.h (the parts of the passes), fp8_state.h (recipe "delayed"), fp8_jit.h
 * (layers by description), fp8_comm.h (communicators), fp8_model.h (weight parallel), fp8_device.h
 * (memory, streams, libraries).
 * This header includes only stdint and stddef, so that it fits into any build.
 */
#ifndef FP8_H
#define FP8_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(FP8_BUILD) && defined(__GNUC__)
#define FP8_API __attribute__((visibility("default")))
#else
#define FP8_API
#endif

#define FP8_VERSION_MAJOR 0
#define FP8_VERSION_MINOR 1
#define FP8_VERSION_PATCH 0
#define FP8_VERSION_STRING "0.1.0"

/* ---- status ---------------------------------------------------------------------------------- */

/* X(enumerator, value, name, remedy). Values are pinned: new ones are added at the end. */
#define FP8_STATUS_MAP(X)                                                                          \
    X(FP8_OK, 0, "ok", "nothing to do")                                                            \
    X(FP8_ERR_ARGUMENT, 1, "argument", "correct the argument that the message names")              \
    X(FP8_ERR_SHAPE, 2, "shape", "pass tensors of the shapes that the layer's spec gives")         \
    X(FP8_ERR_DTYPE, 3, "dtype", "pass the dtype of the spec, or change the spec and rebuild")     \
    X(FP8_ERR_ALIGNMENT, 4, "alignment", "pass a pointer aligned to its element size")             \
    X(FP8_ERR_TOKENS, 5, "tokens", "raise max_tokens in the spec and rebuild, or split the batch") \
    X(FP8_ERR_WORKSPACE, 6, "workspace", "ask fp8_layer_bytes for the size and allocate it")       \
    X(FP8_ERR_VERSION, 7, "version", "run forward again with the weight that backward uses")       \
    X(FP8_ERR_OPERAND, 8, "operand", "pass an operand that the pass named in the message filled")  \
    X(FP8_ERR_BUNDLE, 9, "bundle", "name the folder of a bundle that this version built")          \
    X(FP8_ERR_ARCH, 10, "arch", "rebuild the bundle with --arch for this GPU")                     \
    X(FP8_ERR_NOT_FOUND, 11, "not found", "use one of the names that the message lists")           \
    X(FP8_ERR_LIBRARY, 12, "library", "install the library, or set the variable if one is named")  \
    X(FP8_ERR_DEVICE, 13, "device", "run on a machine with a supported NVIDIA GPU")                \
    X(FP8_ERR_MEMORY, 14, "memory", "free memory and call again")                                  \
    X(FP8_ERR_CUDA, 15, "cuda", "read the driver's message; an earlier kernel may be at fault")    \
    X(FP8_ERR_CUBLASLT, 16, "cublaslt", "report the shape; no cuBLASLt algorithm accepts it")      \
    X(FP8_ERR_UNSUPPORTED, 17, "unsupported", "use what the message offers instead")               \
    X(FP8_ERR_INTERNAL, 18, "internal", "report this as a bug of fp8gen")                          \
    X(FP8_ERR_CAPTURE, 19, "capture", "prepare everything before the capture of a graph begins")   \
    X(FP8_ERR_COMM, 20, "comm", "end all ranks, remove the cause the message names, start again")  \
    X(FP8_ERR_TIMEOUT, 21, "timeout", "find the rank that died or calls in another order")

typedef enum fp8_status {
#define FP8_STATUS_ENUM_(name, value, word, remedy) name = value,
    FP8_STATUS_MAP(FP8_STATUS_ENUM_)
#undef FP8_STATUS_ENUM_
} fp8_status;

/* One word for a status ("workspace"); "unknown" for a value outside the table. Never NULL. */
FP8_API const char *fp8_status_name(fp8_status status);
/* What to do about a status, one sentence. Never NULL. */
FP8_API const char *fp8_status_remedy(fp8_status status);
/* The sentence about this thread's last failed call, with the numbers; "" if there was none.
 * Valid until this thread's next call into the library. */
FP8_API const char *fp8_last_error(void);
/* "0.1.0": the version of the library in use (compare with FP8_VERSION_STRING of the header). */
FP8_API const char *fp8_version(void);

/* ---- foreign and own handles ----------------------------------------------------------------- */

struct CUstream_st;
typedef struct CUstream_st *fp8_stream; /* CUstream or cudaStream_t; ignored on the host context */

typedef struct fp8_context fp8_context;
typedef struct fp8_bundle fp8_bundle;
typedef struct fp8_layer fp8_layer;
typedef struct fp8_state fp8_state; /* of recipe "delayed": fp8_state.h */
typedef struct fp8_event fp8_event; /* fp8_device.h */

/* ---- tensors --------------------------------------------------------------------------------- */

typedef enum fp8_dtype {
    FP8_DTYPE_NONE = 0,
    FP8_DTYPE_E4M3 = 1, /* 1 byte, max 448, no inf */
    FP8_DTYPE_E5M2 = 2, /* 1 byte, max 57344 */
    FP8_DTYPE_BF16 = 3,
    FP8_DTYPE_FP32 = 4,
    FP8_DTYPE_UINT32 = 5,
    FP8_DTYPE_UINT8 = 6,
    FP8_DTYPE_FP16 = 7, /* outputs only: y, dx, dw */
} fp8_dtype;

/* Bytes of one element; 0 for FP8_DTYPE_NONE and unknown values. */
FP8_API size_t fp8_dtype_bytes(fp8_dtype dtype);
/* "e4m3", "bf16", ...; "none" for unknown values. */
FP8_API const char *fp8_dtype_name(fp8_dtype dtype);

/* A row-major matrix in the caller's memory: element (i, j) is at data + (i * ld + j) elements.
 * A vector has rows = 1. ld >= cols (ld is not read when rows <= 1; 0 means cols). data is aligned
 * to the element size, nothing more; nothing outside the rows x cols elements is read or written.
 * rows = 0 is allowed for token dims, data may then be NULL. */
typedef struct fp8_tensor {
    void *data;
    int64_t rows;
    int64_t cols;
    int64_t ld; /* elements from one row to the next */
    fp8_dtype dtype;
    uint32_t reserved;
} fp8_tensor;

/* ---- operands: quantised tensors in the caller's memory -------------------------------------- */

typedef enum fp8_role {
    FP8_ROLE_NONE = 0,
    FP8_ROLE_X = 1,  /* x[M,K] */
    FP8_ROLE_W = 2,  /* w[N,K] */
    FP8_ROLE_DY = 3, /* dy[M,N] */
} fp8_role;

enum {
    FP8_COPY_ROW = 1u,        /* q[rows, cols], contraction along cols */
    FP8_COPY_TRANSPOSED = 2u, /* q[cols, rows], contraction along rows */
    FP8_COPY_BOTH = 3u,
};

/* What shares a scale, in a copy of r rows along whose d columns the product sums. */
typedef enum fp8_scaling {
    FP8_SCALING_TENSOR = 0, /* all of the copy, and both copies */
    FP8_SCALING_ROW = 1,    /* a row */
    FP8_SCALING_BLOCK = 2,  /* 128 elements of a row */
    FP8_SCALING_TILE = 3,   /* 128 x 128 */
    FP8_SCALING_NONE = 4,   /* there is no such copy */
} fp8_scaling;

/* A quantised tensor: the FP8 copies and their scales, in one piece of the caller's memory.
 *
 * One kind of object serves the quantised weight, what fprop saves for backward (x transposed),
 * what quantize_dy leaves for wgrad and dgrad (grad), and an x that several layers share. The
 * struct is plain data: copy it, or move its bytes elsewhere (offload) and set `data` to where they
 * are now.
 *
 * The caller sets size, data and bytes (FP8_OPERAND_INIT, fp8_layer_bytes) and leaves the rest
 * zero; the call that fills the operand sets the rest. Layout of the bytes, every part 256-byte
 * aligned:
 *   scales             float32[16]: [0] scale, [4] scale_inv, [8] amax, of copies of tensor scaling
 *   row_scales         if there is a row copy and its scaling is another
 *   row                if copies & FP8_COPY_ROW: roundup(rows,16) rows of roundup(cols,128) bytes
 *   transposed_scales  if there is a transposed copy and its scaling is not by tensor
 *   transposed         if copies & FP8_COPY_TRANSPOSED: roundup(cols,16) rows of roundup(rows,128)
 *                      bytes
 * Pad bytes are zero. row_scales and transposed_scales hold scale_inv as float32; for a copy of r
 * rows and depth d (row: rows, cols; transposed: cols, rows):
 *   FP8_SCALING_ROW    [roundup(r,16)]                          element i: of row i
 *   FP8_SCALING_BLOCK  [ceil(d/128)][roundup(r,8)]              (b, i): of k in 128 b + [0, 128)
 *   FP8_SCALING_TILE   [ceil(r/128)][roundup(ceil(d/128),4)]    (a, b): of 128 rows and 128 k */
typedef struct fp8_operand {
    uint32_t size; /* sizeof(fp8_operand) */
    fp8_role role; /* set by the filling call */
    void *data;    /* 256-byte aligned */
    size_t bytes;
    fp8_dtype dtype;                /* e4m3 or e5m2 */
    uint32_t copies;                /* FP8_COPY_* present */
    fp8_scaling row_scaling;        /* of the row copy; FP8_SCALING_NONE: the recipe has none */
    fp8_scaling transposed_scaling; /* of the transposed copy */
    int64_t rows;                   /* M of x and dy, N of w */
    int64_t cols;                   /* K of x and w, N of dy */
    uint64_t version; /* of the weight: its own, or the one that fprop used; 0 = not known. It names
                       * the contents, not the operand: see fp8_weight_args */
    uint64_t evaluated; /* of a weight scaled by a state: 1 if FP8_CALL_EVALUATE filled it, so that
                         * the state was not told its amax; else 0 */
    /* NULL: at the head of data. Else the part lies there instead, in memory of whoever set it; a
     * call that fills the operand puts it back into data */
    const float *scales;
    uint64_t reserved[2];
} fp8_operand;

#define FP8_OPERAND_INIT                                                                           \
    {                                                                                              \
        sizeof(fp8_operand), FP8_ROLE_NONE, NULL, 0, FP8_DTYPE_NONE, 0, FP8_SCALING_TENSOR,        \
            FP8_SCALING_TENSOR, 0, 0, 0, 0, NULL,                                                  \
        {                                                                                          \
            0, 0                                                                                   \
        }                                                                                          \
    }

/* Where the parts of a filled operand lie. NULL for a part that is not there. */
typedef struct fp8_operand_view {
    float *scales;       /* float32[16] as above */
    uint8_t *row;        /* [rows_padded][row_ld] */
    int64_t row_ld;      /* bytes */
    uint8_t *transposed; /* [cols_padded][transposed_ld] */
    int64_t transposed_ld;
    float *row_scales;     /* as above; NULL with tensor scaling */
    int64_t row_scales_ld; /* elements from one row of scales to the next */
    float *transposed_scales;
    int64_t transposed_scales_ld;
} fp8_operand_view;

/* Pure arithmetic on the struct; the pointers are in the memory of operand->data.
 * FP8_ERR_OPERAND: the operand is not filled. */
FP8_API fp8_status fp8_operand_parts(const fp8_operand *operand, fp8_operand_view *view);

/* ---- context --------------------------------------------------------------------------------- */

enum { FP8_DEVICE_HOST = -1 };

typedef enum fp8_log_level {
    FP8_LOG_ERROR = 1, /* what a call returned, with its sentence: off unless asked for */
    FP8_LOG_WARNING = 2,
    FP8_LOG_INFO = 3,
    FP8_LOG_DISPATCH = 4, /* one line for each choice and refusal of a GEMM, with the reason */
} fp8_log_level;

/* Called from whichever thread logs; must not call back into the library. */
typedef void (*fp8_log_callback)(void *user, fp8_log_level level, const char *message);

typedef struct fp8_context_options {
    uint32_t size;
    int32_t device;  /* CUDA ordinal, or FP8_DEVICE_HOST: every pass runs on the CPU */
    int32_t max_sms; /* upper bound on the SMs a kernel may use; 0 = all */
    int32_t threads; /* host context: worker threads; 0 = all cores */
    fp8_log_callback log;
    void *log_user;
    uint32_t log_levels; /* bit (1 << level): wanted; 0: warnings, and what FP8_LOG says */
    uint32_t reserved0;
    uint64_t reserved[4];
} fp8_context_options;

#define FP8_CONTEXT_OPTIONS_INIT                                                                   \
    {                                                                                              \
        sizeof(fp8_context_options), 0, 0, 0, NULL, NULL, 0, 0,                                    \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }

/* A context on the primary context of one device, or on the host. options may be NULL (device 0).
 * Opens libcuda and cuBLASLt; blocks while the driver initialises.
 * FP8_ERR_LIBRARY: libcuda or cuBLASLt not found (the message says what was searched);
 * FP8_ERR_DEVICE: no such device; FP8_ERR_MEMORY. */
FP8_API fp8_status fp8_context_create(const fp8_context_options *options, fp8_context **context);
/* Bundles, layers and memory made from the context must be gone; its own (fp8_context_layer,
 * fp8_context_add_bundle) go with it. */
FP8_API void fp8_context_destroy(fp8_context *context);

typedef struct fp8_device_info {
    uint32_t size;
    int32_t device;         /* ordinal, or FP8_DEVICE_HOST */
    int32_t sms;            /* SMs, or worker threads of the host context */
    int32_t arch;           /* 90 for compute capability 9.0; 0 for the host */
    int32_t driver_version; /* as cuDriverGetVersion: 13000 = CUDA 13.0; 0 for the host */
    /* 1: NCCL's abort of a failed communicator has not ended in 2 s, for it waits for work on the
     * device. Until it ends, on every context of the device in this process, what is released
     * stays as it is, from then on for as long as the process lives, and all else that reaches
     * the device fails with FP8_ERR_COMM. Long work of other streams ends, and then this is 0
     * again; a copy engine that waits for a rank that has gone never does, nor do calls of CUDA's
     * own that wait for the device: end the process by _exit. */
    int32_t is_stuck;
    uint64_t cublaslt_version; /* as cublasLtGetVersion; 0 for the host */
    uint64_t memory_bytes;
    char name[128];
    uint64_t reserved[4];
} fp8_device_info;

/* info->size is set by the caller; else FP8_ERR_ARGUMENT, as with all structs that a query
 * fills. */
FP8_API fp8_status fp8_context_info(const fp8_context *context, fp8_device_info *info);

/* ---- bundle and layer ------------------------------------------------------------------------ */

/* Opens the folder `path` that `fp8gen build` wrote, checks every file against the manifest and
 * loads the kernels of this context's arch. Blocks; allocates.
 * FP8_ERR_BUNDLE: missing, truncated, altered or of another format version; FP8_ERR_ARCH: no
 * kernels for this GPU. A host context needs no kernels. */
FP8_API fp8_status fp8_bundle_open(fp8_context *context, const char *path, fp8_bundle **bundle);
/* The bundle's layers must be gone, and it is none that a context owns (fp8_context_add_bundle). */
FP8_API void fp8_bundle_close(fp8_bundle *bundle);
FP8_API int32_t fp8_bundle_layer_count(const fp8_bundle *bundle);
/* NULL if index is out of range. Valid until the bundle is closed. */
FP8_API const char *fp8_bundle_layer_name(const fp8_bundle *bundle, int32_t index);
/* The manifest's text. Valid until the bundle is closed. */
FP8_API const char *fp8_bundle_manifest(const fp8_bundle *bundle);

/* A layer is immutable and may be used from many threads and streams at once. Blocks; allocates
 * (the last time for this layer): selects the GEMM algorithms for each range of tokens.
 * FP8_ERR_NOT_FOUND: no layer of that name; FP8_ERR_CUBLASLT: no algorithm for a GEMM of the
 * layer. */
FP8_API fp8_status fp8_layer_create(fp8_bundle *bundle, const char *name, fp8_layer **layer);
/* No call on it is running; states and models that were made of it are gone. */
FP8_API void fp8_layer_destroy(fp8_layer *layer);

typedef struct fp8_layer_info {
    uint32_t size;
    uint32_t has_bias;
    int64_t in_features;  /* K */
    int64_t out_features; /* N */
    int64_t tokens;       /* the usual M */
    int64_t max_tokens;   /* the largest M */
    fp8_dtype x_dtype, w_dtype, y_dtype, dy_dtype, dx_dtype, dw_dtype, bias_dtype, dbias_dtype;
    fp8_dtype x_format, w_format, dy_format; /* e4m3 or e5m2 */
    uint32_t reserved0;
    const char *name;   /* valid while the layer lives, like the next */
    const char *recipe; /* "current" */
    uint64_t reserved[4];
} fp8_layer_info;

FP8_API fp8_status fp8_layer_describe(const fp8_layer *layer, fp8_layer_info *info);

typedef enum fp8_bytes {
    FP8_BYTES_WORKSPACE = 0,       /* enough for any call on this layer with that many tokens */
    FP8_BYTES_X = 1,               /* x, both copies */
    FP8_BYTES_SAVED = 2,           /* x, transposed copy: what wgrad needs */
    FP8_BYTES_WEIGHT = 3,          /* w, both copies */
    FP8_BYTES_WEIGHT_ROW = 4,      /* w, row copy: what fprop needs (no dgrad) */
    FP8_BYTES_GRAD = 5,            /* dy, both copies */
    FP8_BYTES_GRAD_ROW = 6,        /* dy, row copy: what dgrad needs */
    FP8_BYTES_GRAD_TRANSPOSED = 7, /* dy, transposed copy: what wgrad needs */
} fp8_bytes;

/* Bytes of an operand count the copies that the recipe has; 0 where it has none of those asked for:
 * "rowwise_hp_wgrad" has no transposed copies of x and dy (saved is 0 bytes), compute "bf16" has no
 * copies at all. An operand of 0 bytes may have data = NULL; it still carries versions.
 *
 * Bytes of caller memory for `which` at `tokens` (0 <= tokens <= max_tokens). Grows with tokens, so
 * a buffer sized for max_tokens fits every call. FP8_ERR_TOKENS, FP8_ERR_ARGUMENT. */
FP8_API fp8_status fp8_layer_bytes(const fp8_layer *layer, int64_t tokens, fp8_bytes which,
                                   size_t *bytes);

/* ---- passes ---------------------------------------------------------------------------------- */

/* What every pass takes. The workspace has any alignment and at least fp8_layer_bytes(WORKSPACE);
 * its contents need not be initialised and are lost. */
typedef struct fp8_call {
    void *workspace;
    size_t workspace_bytes;
    fp8_stream stream;
    int32_t max_sms;        /* 0 = as the context says */
    uint32_t flags;         /* FP8_CALL_* */
    const fp8_state *state; /* recipe "delayed": required by what quantises, checked and not used by
                             * all other passes of the layer. Other recipes, shards: NULL */
    int32_t state_layer; /* index of this layer's weight in the state's list; read with a state */
    uint32_t reserved;
} fp8_call;

enum {
    FP8_CALL_EVALUATE = 1u, /* the state is read and not told of any amax */
};

/* Layers that compute in bf16 (compute = "bf16"), and wgrad of recipe "rowwise_hp_wgrad", multiply
 * the caller's own tensors: args have fields for these, required there and refused (not NULL)
 * elsewhere. The operands are then optional; where they are given, their shapes and versions are
 * checked all the same.
 *
 * Quantises w[N,K] into `weight` and gives it `version` (not 0). Does nothing if weight->version is
 * already `version`; but a weight that an evaluation quantised (weight->evaluated) is quantised
 * again, into the same bytes, by the first call that is none, which tells the state its amax.
 * copies: FP8_COPY_BOTH, or FP8_COPY_ROW where no dgrad is wanted; 0 = both; copies that the recipe
 * has not are left out.
 *
 * LAW: a version names the contents. One fp8_layer may serve many weights, and nothing is keyed by
 * an address, so the version alone tells whether `weight` holds w already and whether backward
 * meets the weight of its forward. Two weights that pass through the same operand (a gather slot)
 * must never carry the same version, else the second update does nothing and the first weight is
 * used. Either
 *   - give every weight versions of its own: version = step * weights + index, step from 1; or
 *   - clear the operand before another weight takes it: FP8_OPERAND_INIT, then data and bytes.
 *     dgrad then still takes two weights of one version for the same.
 *
 * In a CUDA graph `refresh` decides: versions are the host's, and the host sees a capture once and
 * its replays never. With it the versions are not compared, the call always enqueues, and at each
 * run its kernels do nothing (found_inf is not written either) where the word is 0. The operand
 * carries `version` afterwards, whatever the word: it names the update's place in the graph, the
 * same in every replay, so that saved and weight of one graph agree. What the bytes hold is then
 * the caller's affair: the word is not 0 in the first run, nor in the first after something else
 * used the operand's memory. A later call without refresh brings another version, else it takes
 * the operand for current. Without refresh a captured call counts as done, though its work comes
 * with the launch: after a capture that is dropped, clear the operand.
 * FP8_ERR_UNSUPPORTED: refresh with a bundle whose weight steps do not take it. */
typedef struct fp8_weight_args {
    uint32_t size;
    uint32_t copies;
    const fp8_tensor *w; /* [N,K], w_dtype */
    uint64_t version;    /* of w's values: never the same for two weights of one operand */
    fp8_operand *weight;
    uint32_t *found_inf;     /* set to 1 if w holds inf or NaN, else not written; may be NULL */
    const uint32_t *refresh; /* device memory, one word; NULL: `version` decides */
    /* device: the amax of w, which an optimizer or an all-reduce has already; saves the read that
     * finds it. NULL: not known. Recipes "current" and "delayed". It should be finite: +inf is
     * taken as FLT_MAX, NaN and negative as 0 */
    const float *amax;
    fp8_call call;
    uint64_t reserved[4];
} fp8_weight_args;

/* y = x w^T + bias. Give x, or an x_quantized that fp8_quantize filled (row copy needed).
 * saved receives the transposed copy of x, the scales and the version of the weight; NULL where no
 * wgrad is wanted. With x_quantized, saved becomes a view of it: its data pointer is set to
 * x_quantized's memory, which must hold the transposed copy and live until wgrad.
 * compute "bf16": x and w, no x_quantized and no found_inf (nothing reads x but the product). */
typedef struct fp8_fprop_args {
    uint32_t size;
    uint32_t reserved0;
    const fp8_tensor *x; /* [M,K], x_dtype */
    const fp8_operand *x_quantized;
    const fp8_operand *weight; /* row copy */
    const fp8_tensor *bias;    /* [1,N] bias_dtype; required if and only if the layer has a bias */
    const fp8_tensor *y;       /* [M,N], y_dtype; written */
    fp8_operand *saved;
    uint32_t *found_inf; /* set to 1 if x holds inf or NaN, else not written; may be NULL, and is
                          * with x_quantized: fp8_quantize has looked */
    /* [N,K]. compute "bf16": instead of weight. Else NULL, or what weight's bytes are made of
     * first, in the copies that it has, as by fp8_quantize: one call instead of two. weight has
     * version 0, and its fields stay as they are */
    const fp8_tensor *w;
    fp8_call call;
    uint64_t reserved[4];
} fp8_fprop_args;

/* Reads dy as often as its recipe must (`current`: amax, then cast) and never again: fills grad for
 * wgrad (transposed copy) and dgrad (row copy), and writes dbias. */
typedef struct fp8_quantize_dy_args {
    uint32_t size;
    uint32_t copies;          /* FP8_COPY_*; 0 = both; what the recipe has not is left out */
    const fp8_tensor *dy;     /* [M,N], dy_dtype */
    const fp8_operand *saved; /* of the same forward, for dgrad to check the weight; may be NULL */
    fp8_operand *grad;
    const fp8_tensor *dbias;   /* [1,N] fp32: column sums of dy before quantisation; may be NULL */
    uint32_t accumulate_dbias; /* 0: dbias = sum, 1: dbias += sum */
    uint32_t reserved0;
    /* set to 1 if dy holds inf or NaN, else not written; may be NULL, and is where nothing reads
     * dy but products: compute "bf16" without bias */
    uint32_t *found_inf;
    fp8_call call;
    uint64_t reserved[4];
} fp8_quantize_dy_args;

/* dw = dy^T x, or dw += dy^T x. M = 0: dw = 0, or unchanged when accumulating. */
typedef struct fp8_wgrad_args {
    uint32_t size;
    uint32_t accumulate;      /* 0: dw = (dw may hold NaN), 1: dw += (one rounding to dw's dtype) */
    const fp8_operand *saved; /* x, transposed copy */
    const fp8_operand *grad;  /* dy, transposed copy */
    const fp8_tensor *dw;     /* [N,K], dw_dtype (fp32 for a main_grad) */
    /* of the forward and of this backward: "rowwise_hp_wgrad" and compute "bf16" only, which
     * multiply them */
    const fp8_tensor *x;  /* [M,K], x_dtype */
    const fp8_tensor *dy; /* [M,N], dy_dtype */
    fp8_call call;
    uint64_t reserved[4];
} fp8_wgrad_args;

/* dx = dy w. FP8_ERR_VERSION if grad carries another weight version than weight, unless
 * stale_ok. */
typedef struct fp8_dgrad_args {
    uint32_t size;
    uint32_t stale_ok;
    const fp8_operand *grad;   /* dy, row copy */
    const fp8_operand *weight; /* transposed copy */
    const fp8_tensor *dx;      /* [M,K], dx_dtype; written */
    /* compute "bf16" only, which multiplies them */
    const fp8_tensor *dy; /* [M,N], dy_dtype */
    const fp8_tensor *w;  /* [N,K], w_dtype */
    fp8_call call;
    uint64_t reserved[4];
} fp8_dgrad_args;

/* quantize_dy, then wgrad (if dw is given), then dgrad (if dx is given), on one stream. Only the
 * copies that these need are made. grad is scratch here unless the caller keeps it. */
typedef struct fp8_backward_args {
    uint32_t size;
    uint32_t accumulate_dw;    /* 0: dw =, 1: dw += */
    uint32_t accumulate_dbias; /* 0: dbias =, 1: dbias += */
    uint32_t stale_ok;
    const fp8_tensor *dy;
    const fp8_operand *saved;  /* required if dw is given */
    const fp8_operand *weight; /* required if dx is given */
    fp8_operand *grad;
    const fp8_tensor *dbias; /* may be NULL, like the next two */
    const fp8_tensor *dw;
    const fp8_tensor *dx;
    uint32_t *found_inf; /* as quantize_dy's */
    const fp8_tensor *x; /* if dw is given: as wgrad's x */
    const fp8_tensor *w; /* if dx is given: as dgrad's w */
    fp8_call call;
    uint64_t reserved[4];
} fp8_backward_args;

#define FP8_CALL_INIT                                                                              \
    {                                                                                              \
        NULL, 0, NULL, 0, 0, NULL, 0, 0                                                            \
    }
#define FP8_WEIGHT_ARGS_INIT                                                                       \
    {                                                                                              \
        sizeof(fp8_weight_args), 0, NULL, 0, NULL, NULL, NULL, NULL, FP8_CALL_INIT,                \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }
#define FP8_FPROP_ARGS_INIT                                                                        \
    {                                                                                              \
        sizeof(fp8_fprop_args), 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, FP8_CALL_INIT,  \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }
#define FP8_QUANTIZE_DY_ARGS_INIT                                                                  \
    {                                                                                              \
        sizeof(fp8_quantize_dy_args), 0, NULL, NULL, NULL, NULL, 0, 0, NULL, FP8_CALL_INIT,        \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }
#define FP8_WGRAD_ARGS_INIT                                                                        \
    {                                                                                              \
        sizeof(fp8_wgrad_args), 0, NULL, NULL, NULL, NULL, NULL, FP8_CALL_INIT,                    \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }
#define FP8_DGRAD_ARGS_INIT                                                                        \
    {                                                                                              \
        sizeof(fp8_dgrad_args), 0, NULL, NULL, NULL, NULL, NULL, FP8_CALL_INIT,                    \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }
#define FP8_BACKWARD_ARGS_INIT                                                                     \
    {                                                                                              \
        sizeof(fp8_backward_args), 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,  \
            NULL, FP8_CALL_INIT,                                                                   \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }

/* Errors of all passes: FP8_ERR_ARGUMENT (NULL or wrong size field), FP8_ERR_SHAPE, FP8_ERR_DTYPE,
 * FP8_ERR_ALIGNMENT, FP8_ERR_TOKENS (M > max_tokens), FP8_ERR_WORKSPACE, FP8_ERR_OPERAND (not
 * filled, too small, or without the copy that is needed), FP8_ERR_VERSION, FP8_ERR_CUDA,
 * FP8_ERR_CUBLASLT. Arguments are checked before anything is enqueued: a refused call leaves memory
 * untouched. */
FP8_API fp8_status fp8_weight_update(const fp8_layer *layer, const fp8_weight_args *args);
FP8_API fp8_status fp8_layer_fprop(const fp8_layer *layer, const fp8_fprop_args *args);
FP8_API fp8_status fp8_layer_quantize_dy(const fp8_layer *layer, const fp8_quantize_dy_args *args);
FP8_API fp8_status fp8_layer_wgrad(const fp8_layer *layer, const fp8_wgrad_args *args);
FP8_API fp8_status fp8_layer_dgrad(const fp8_layer *layer, const fp8_dgrad_args *args);
FP8_API fp8_status fp8_layer_backward(const fp8_layer *layer, const fp8_backward_args *args);

typedef enum fp8_pass {
    FP8_PASS_WEIGHT = 0,
    FP8_PASS_FPROP = 1,
    FP8_PASS_QUANTIZE_DY = 2,
    FP8_PASS_WGRAD = 3,
    FP8_PASS_DGRAD = 4,
    FP8_PASS_COUNT = 5,
} fp8_pass;

/* "weight", "fprop", ...; "unknown" outside the range. */
FP8_API const char *fp8_pass_name(fp8_pass pass);

/* ---- queries --------------------------------------------------------------------------------- */

typedef struct fp8_dispatch {
    uint32_t size;
    uint32_t launches; /* kernels (and copies) the pass enqueues for contiguous, aligned tensors */
    const char *backend; /* "cublaslt", "generated", "host"; "quantize" for passes without a GEMM */
    const char *kernel;  /* name of the kernel or algorithm */
    const char *dtype;   /* "e4m3 x e4m3 -> bf16" */
    const char *reason;
    uint64_t reserved[4];
} fp8_dispatch;

#define FP8_DISPATCH_INIT                                                                          \
    {                                                                                              \
        sizeof(fp8_dispatch), 0, NULL, NULL, NULL, NULL,                                           \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }

/* What the pass would run for `tokens`, and why. Strings live as long as the layer. */
FP8_API fp8_status fp8_layer_dispatch(const fp8_layer *layer, fp8_pass pass, int64_t tokens,
                                      fp8_dispatch *dispatch);

#ifdef __cplusplus
}
#endif
#endif /* FP8_H */
