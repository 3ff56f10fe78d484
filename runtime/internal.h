/*
 * internal.h - the objects of the runtime and the calls between its files.
 *
 * A bundle's layers are plain structs (plan.h) that never change: a call fills a frame with the
 * addresses of this call, evaluates the sources of each step and launches. Nothing here knows JSON;
 * only driver.h and the .c files that use it know CUDA's types.
 */
#ifndef FP8_INTERNAL_H
#define FP8_INTERNAL_H

#include <stdatomic.h>

#include "runtime/check.h"
#include "runtime/fp8_device.h"
#include "runtime/fp8_primitives.h"
#include "runtime/plan.h"
#include "runtime/thread.h"

/* ---- log (log.c) ---- */

struct fp8_log {
    fp8_log_callback callback;
    void *user;
    uint32_t levels; /* bit (1 << level) */
};

static inline bool fp8_log_wanted(const struct fp8_log *log, fp8_log_level level)
{
    return log->callback && (log->levels >> level & 1u);
}

/* What the options and the variable FP8_LOG ("info,dispatch") ask for. */
void fp8_log_setup(struct fp8_log *log, const fp8_context_options *options);
/* Formats into a fixed buffer (1 KiB) and calls the callback if the level is wanted. */
void fp8_log_write(const struct fp8_log *log, fp8_log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* ---- context (context.c) ---- */

struct fp8_driver;
struct fp8_lt;
struct fp8_pool;
struct fp8_registry;

struct fp8_context {
    bool is_host;
    int32_t device;  /* ordinal, FP8_DEVICE_HOST for the host */
    int32_t sms;     /* of the device; threads of the host's pool */
    int32_t max_sms; /* 0 = all */
    int32_t arch;    /* 90 for 9.0 */
    struct fp8_log log;
    struct fp8_pool *pool;           /* host */
    const struct fp8_driver *driver; /* CUDA, as all below */
    void *primary;                   /* CUcontext */
    struct fp8_lt *lt;
    int32_t driver_version;
    uint64_t memory_bytes;
    struct fp8_registry *registry;
    _Atomic uint64_t epoch; /* of the last cooperative launch */
    char name[128];
};

/* A number that no other call has: 63 bits, from a random start, so that what memory holds by
 * chance is no such number. */
static inline int64_t fp8_context_epoch(struct fp8_context *context)
{
    return (int64_t)(atomic_fetch_add_explicit(&context->epoch, 2, memory_order_relaxed) >> 1);
}

/* ---- layers by description (provide.c) ---- */

fp8_status fp8_registry_create(struct fp8_registry **registry);
/* Destroys the layers and closes the bundles that the context owns. */
void fp8_registry_destroy(struct fp8_registry *registry);

/* ---- descriptions of layers (description.c) ---- */

struct fp8_layer_plan;
/* FP8_ERR_ARGUMENT; `call` names the call. */
fp8_status fp8_description_check(const char *call, const fp8_layer_description *description);
/* With nothing left to defaults. What follows takes such descriptions. */
fp8_layer_description fp8_description_fill(const fp8_layer_description *given);
bool fp8_description_equal(const fp8_layer_description *a, const fp8_layer_description *b);
/* "layer of 4096 in_features, ..." into text; returns text. */
const char *fp8_description_name(const fp8_layer_description *description, char text[128]);
/* Whether the plan is such a layer. */
bool fp8_description_fits(const struct fp8_layer_plan *plan,
                          const fp8_layer_description *description);

/* A device is stuck while something holds it (comm_nccl_end.c): for all contexts of the process on
 * it, which share its primary context. Each hold is let go once, or never. */
bool fp8_context_is_stuck(const struct fp8_context *context);
void fp8_device_hold(int32_t device);
void fp8_device_let_go(int32_t device);

/* Makes the context's device current for this thread unless it is already; leave undoes exactly
 * that. Both do nothing on the host. FP8_ERR_COMM: the device is stuck; as all ways to a device
 * lead through here, no call of the runtime waits for one that is. */
fp8_status fp8_context_enter(const struct fp8_context *context, bool *pushed);
void fp8_context_leave(const struct fp8_context *context, bool pushed);

/* ---- capture (capture.c) ---- */

struct fp8_uncaptured {
    bool pushed;
    bool relaxed;
    int mode; /* of the thread before: a CUstreamCaptureMode */
};

/* FP8_ERR_CAPTURE if the stream is captured (NULL: any blocking stream); the context is entered. */
fp8_status fp8_capture_check(const struct fp8_context *context, const char *call,
                             fp8_stream stream);
/* Which capture the stream is in, by a number that no other capture of the process has; 0: none.
 * The context is entered. FP8_ERR_CAPTURE: it was broken, or the legacy stream cannot be used
 * now. */
fp8_status fp8_capture_of(const struct fp8_context *context, const char *call, fp8_stream stream,
                          uint64_t *capture);
/* For calls that block, load or allocate: the check, then the context entered and this thread in
 * the relaxed capture mode until leave. call NULL: no check. */
fp8_status fp8_uncaptured_enter(const struct fp8_context *context, const char *call,
                                fp8_stream stream, struct fp8_uncaptured *entered);
void fp8_uncaptured_leave(const struct fp8_context *context, const struct fp8_uncaptured *entered);
/* The same for releases, whatever is captured. False: the device is stuck or cannot be made
 * current, and what was to be released stays as it is. The last error of this thread is not
 * touched. */
bool fp8_release_enter(const struct fp8_context *context, struct fp8_uncaptured *entered);

/* Logs the last error of this thread if `status` is one; returns `status`. */
fp8_status fp8_report(const struct fp8_context *context, fp8_status status);

/* SMs that a call may use: all, or the smaller of the context's and the call's bounds. */
static inline int32_t fp8_sms_of_call(const struct fp8_context *context, int32_t max_sms)
{
    int32_t sms = context->sms;
    if (context->max_sms > 0 && context->max_sms < sms)
        sms = context->max_sms;
    if (max_sms > 0 && max_sms < sms)
        sms = max_sms;
    return sms;
}

/* ---- memory (memory.c): pieces of passes, with the context entered ---- */

/* rows x width bytes = 0, rows pitch bytes apart. */
fp8_status fp8_zero_2d(const struct fp8_context *context, void *target, int64_t pitch,
                       int64_t width, int64_t rows, fp8_stream stream);
fp8_status fp8_fill_words(const struct fp8_context *context, void *target, uint32_t word,
                          int64_t count, fp8_stream stream);
fp8_status fp8_copy_bytes(const struct fp8_context *context, void *target, const void *source,
                          size_t bytes, fp8_stream stream);
/* `rows` pieces of `width` bytes, a pitch apart, none longer than a pitch. */
fp8_status fp8_copy_2d(const struct fp8_context *context, void *target, int64_t target_pitch,
                       const void *source, int64_t source_pitch, int64_t width, int64_t rows,
                       fp8_stream stream);

/* ---- bundles (bundle.c) ---- */

struct fp8_bundle {
    struct fp8_context *context;
    struct fp8_arena arena;
    char *path;
    char *text; /* of the manifest */
    struct fp8_manifest manifest;
    struct {
        double manifest, files, kernels;
    } seconds; /* that opening it took */
};

/* ---- kernels (kernel.c) ---- */

/* Loads the cubin image of a kernel; the context is entered. */
fp8_status fp8_kernel_load(const struct fp8_context *context, struct fp8_kernel *kernel,
                           const void *image);
/* The function of a kernel that is loaded and outlives this one. */
fp8_status fp8_kernel_share(const struct fp8_context *context, struct fp8_kernel *kernel,
                            const struct fp8_kernel *loaded);
void fp8_kernel_unload(const struct fp8_context *context, struct fp8_kernel *kernel);
/* CTAs of a launch that may use `sms` SMs of the context's. */
int64_t fp8_kernel_grid(const struct fp8_context *context, const struct fp8_kernel *kernel,
                        const fp8_value *args, int32_t sms);
/* Enqueues with the parameters as the kernel's list has them; the context is entered. */
fp8_status fp8_kernel_launch(const struct fp8_context *context, const struct fp8_kernel *kernel,
                             int64_t ctas, void **parameters, fp8_stream stream);
/* Runs the kernel with the op's arguments: enqueued on a CUDA context, executed on the host. */
fp8_status fp8_kernel_run(const struct fp8_context *context, const struct fp8_kernel *kernel,
                          const fp8_value *args, fp8_stream stream, int32_t sms);

/* ---- operands (operand.c) ---- */

/* What the size of an operand depends on. */
struct fp8_shape {
    int64_t rows;
    int64_t cols;
    uint32_t copies;
    fp8_scaling scalings[FP8_COPY_COUNT];
};
/* The copies that the recipe has of a role: FP8_COPY_*. */
static inline uint32_t fp8_operand_copies(const struct fp8_layer_plan *plan, fp8_role role)
{
    const fp8_scaling *scalings = plan->scalings[role];
    return (scalings[FP8_ROW_COPY] != FP8_SCALING_NONE ? (uint32_t)FP8_COPY_ROW : 0u) |
           (scalings[FP8_TRANSPOSED_COPY] != FP8_SCALING_NONE ? (uint32_t)FP8_COPY_TRANSPOSED : 0u);
}
/* The shape of a role's operand for M = tokens; copies that the recipe has not are left out. */
struct fp8_shape fp8_operand_shape(const struct fp8_layer_plan *plan, fp8_role role, int64_t tokens,
                                   uint32_t copies);
/* Bytes of an operand; -1 if that is beyond 2^62. */
int64_t fp8_operand_bytes(const struct fp8_shape *shape);
/* The operand as a successful call leaves it. */
void fp8_operand_fill(fp8_operand *operand, const struct fp8_layer_plan *plan, fp8_role role,
                      int64_t tokens, uint32_t copies, uint64_t version);
/* The operand as it is before a call: memory that holds nothing. */
void fp8_operand_clear(fp8_operand *operand);
/* The view of a filled operand's memory; nothing is checked. */
void fp8_operand_layout(const fp8_operand *operand, fp8_operand_view *view);

/* primitives.c: the transposed copy of an operand from its row copy, both in its memory, of which
 * no workspace is used. The context is entered. */
fp8_status fp8_transpose_operand(const struct fp8_layer *layer, const fp8_operand *operand,
                                 const fp8_call *call);

/* ---- argument checks (tensor.c) ---- */

/* Where a check stands: the call it speaks for ("fprop"), its layer. */
struct fp8_check {
    const char *call;
    const struct fp8_layer_plan *plan;
    int64_t tokens;
};

/* An args struct of `size` bytes in this version of the header, its size field and reserved words;
 * reserved0 is 0 where the struct has none. */
fp8_status fp8_check_args(const char *call, const struct fp8_layer *layer, const void *args,
                          size_t size, const uint64_t *reserved, uint32_t reserved0);
/* The size field of a struct that a query fills. */
fp8_status fp8_check_answer(const char *call, const char *name, const void *answer, size_t size);
fp8_status fp8_check_tokens(const struct fp8_check *check, const char *what, int64_t tokens);
/* Shape, dtype, stride, pointer and alignment of a tensor against the plan's buffer for `slot`. */
fp8_status fp8_check_tensor(const struct fp8_check *check, enum fp8_slot slot,
                            const fp8_tensor *tensor);
/* The same against explicit numbers. */
fp8_status fp8_check_matrix(const struct fp8_check *check, const char *name,
                            const fp8_tensor *tensor, int64_t rows, int64_t cols, fp8_dtype dtype);
/* An operand that is read: filled, of this role and shape, with the copies that are needed. */
fp8_status fp8_check_filled(const struct fp8_check *check, const char *name, fp8_role role,
                            uint32_t copies, const fp8_operand *operand);
/* An operand that is about to be filled: its memory is there, aligned and large enough. */
fp8_status fp8_check_target(const struct fp8_check *check, const char *name, fp8_role role,
                            uint32_t copies, const fp8_operand *operand);
/* The struct of an operand: its size field and reserved words. Then, that it is filled with this
 * role. */
fp8_status fp8_check_operand_struct(const char *call, const char *name, const fp8_operand *operand);
fp8_status fp8_check_operand_role(const char *call, const char *name, fp8_role role,
                                  const fp8_operand *operand);
/* M of a call that brings no tensor: the rows of an operand. Its role is checked before, so that a
 * weight's rows are never taken for tokens. */
fp8_status fp8_check_rows(const char *call, const char *name, fp8_role role,
                          const fp8_operand *operand, int64_t *tokens);
/* FP8_COPY_* or 0 for all; leaves those that the recipe has of the role. */
fp8_status fp8_check_copies(const struct fp8_check *check, fp8_role role, uint32_t *copies);
/* That the layer quantises at all. */
fp8_status fp8_check_quantises(const struct fp8_check *check);
/* Where a product reads this copy of the role's operand: that it is filled. Where it reads the
 * caller's tensor instead: that this is there; the operand is then optional. */
fp8_status fp8_check_factor(const struct fp8_check *check, fp8_role role, uint32_t copy,
                            const char *name, const fp8_operand *operand, const fp8_tensor *tensor);
/* A device pointer to 4 bytes, or NULL. */
fp8_status fp8_check_word(const char *call, const char *name, const void *word);
/* found_inf of a pass: that one of its steps writes it. */
fp8_status fp8_check_found_inf(const struct fp8_check *check, fp8_pass pass,
                               const uint32_t *found_inf);
/* A given amax: that the recipe can use one. */
fp8_status fp8_check_amax(const struct fp8_check *check, fp8_role role, const float *amax);
/* call.state is there for a pass (or steps for a given amax) that quantises by one. */
fp8_status fp8_check_state(const struct fp8_check *check, fp8_pass pass, const fp8_call *call);
/* call.state is not, for calls that would not look at it. */
fp8_status fp8_check_no_state(const char *call_name, const fp8_call *call);
fp8_status fp8_check_flag(const char *call, const char *name, uint32_t flag);
/* What all calls need of fp8_call; then its state, if one is given, and its workspace. */
fp8_status fp8_check_stream(const char *call_name, const fp8_call *call);
fp8_status fp8_check_call(const struct fp8_check *check, const struct fp8_layer *layer,
                          const fp8_call *call);

/* ---- frames (frame.c): what a call's sources are evaluated against ---- */

struct fp8_frame {
    const struct fp8_layer *layer;
    fp8_stream stream;
    int32_t max_sms; /* of the call */
    int32_t sms;     /* that kernels may use */
    int64_t tokens;
    int64_t accumulate;
    void *address[FP8_MAX_BUFFERS];
    int64_t ld[FP8_MAX_BUFFERS];
    int64_t rows[FP8_MAX_BUFFERS];
};

void fp8_frame_init(struct fp8_frame *frame, const struct fp8_layer *layer, const fp8_call *call,
                    int64_t tokens);
/* tensor may be NULL: the address stays NULL. */
void fp8_frame_tensor(struct fp8_frame *frame, enum fp8_slot slot, const fp8_tensor *tensor);
void fp8_frame_address(struct fp8_frame *frame, enum fp8_slot slot, void *address);
void fp8_frame_operand(struct fp8_frame *frame, fp8_role role, const fp8_operand *operand);
/* Sets the extents of the pass's buffers and gives a place in the workspace to those that need one:
 * the workspace's own, scales that no operand holds, and (if want_row) such a row copy. */
void fp8_frame_workspace(struct fp8_frame *frame, fp8_pass pass, void *workspace, bool want_row);
/* Bytes that fp8_frame_workspace takes at most, the slack for an unaligned workspace included. */
size_t fp8_frame_workspace_bytes(const struct fp8_layer *layer, fp8_pass pass, int64_t tokens);
/* What is launched instead of an amax step and the quantize after it; NULL: the two. */
const struct fp8_alternative *fp8_step_alternative(const struct fp8_layer *layer,
                                                   const struct fp8_step *step, int64_t tokens,
                                                   int32_t sms);
/* The places of a role's tensor in the call's state, if the call has one. */
void fp8_frame_state(struct fp8_frame *frame, fp8_role role, const fp8_call *call);
/* A step's arguments as values. */
void fp8_frame_evaluate(const struct fp8_frame *frame, const struct fp8_step *step,
                        fp8_value *values);
/* Runs the steps of a pass from `first` on with the device current. */
fp8_status fp8_frame_enqueue(const struct fp8_frame *frame, fp8_pass pass, int first);
/* Runs the steps [first, end) of a pass; the context is entered. */
fp8_status fp8_frame_run(const struct fp8_frame *frame, fp8_pass pass, int first, int end);

/* ---- delayed scaling state (state.c) ---- */

enum { FP8_STATE_ROLES = 3 }; /* x, w, dy */
/* The place of a layer's tensor in the arrays of a state. */
static inline int64_t fp8_state_tensor(int32_t layer, fp8_role role)
{
    return FP8_STATE_ROLES * (int64_t)layer + (int64_t)role - FP8_ROLE_X;
}

struct fp8_state {
    struct fp8_context *context;
    const struct fp8_kernel *roll;
    int32_t layer_count;
    int64_t tensors; /* x, w, dy of each layer */
    int64_t length;  /* of the history */
    bool most_recent;
    bool power_of_two;
    bool shares_amaxes;
    const struct fp8_layer **layers;
    void *memory; /* of the device; all below lies in it */
    float *scale;
    float *running;
    float *history;
    int32_t *counts;
    uint32_t *fresh;
    float *maxima;
};

/* ---- GEMM (gemm_plan.c and the rooms that gemm_plan.h names; gemm_lt.c) ---- */

struct fp8_gemm_plan;

/* Opens cuBLASLt and makes its handle; the context is entered. */
fp8_status fp8_lt_create(const struct fp8_context *context, struct fp8_lt **lt);
void fp8_lt_destroy(struct fp8_lt *lt);
uint64_t fp8_lt_version(const struct fp8_lt *lt);

/* Takes for every range of tokens the first choice that this context can run, and asks cuBLASLt's
 * heuristic where that is cublaslt; the context is entered. FP8_ERR_CUBLASLT: there is no algorithm
 * for some range. */
fp8_status fp8_gemm_plan_create(const struct fp8_context *context,
                                const struct fp8_layer_plan *layer, fp8_pass pass,
                                struct fp8_gemm_plan **plan);
void fp8_gemm_plan_destroy(struct fp8_gemm_plan *plan);
/* Runs the gemm step, whose arguments have been evaluated; nothing in it is empty. */
fp8_status fp8_gemm_run(struct fp8_gemm_plan *plan, const struct fp8_frame *frame,
                        const fp8_value *args);
/* Whether any range needs the stages and the workspace of cuBLASLt. */
bool fp8_gemm_needs_buffers(const struct fp8_gemm_plan *plan);
/* What runs for M = tokens: backend, kernel (the algorithm that would run first), dtype, reason, as
 * texts that live as long as the plan; adds the launches for an output that is contiguous and
 * aligned. */
void fp8_gemm_describe(const struct fp8_gemm_plan *plan, int64_t tokens, fp8_dispatch *dispatch);

/* ---- layers (layer.c) ---- */

struct fp8_layer {
    struct fp8_bundle *bundle;
    struct fp8_context *context;
    const struct fp8_layer_plan *plan;
    /* NULL on the host and for passes without a gemm */
    struct fp8_gemm_plan *gemms[FP8_PASS_COUNT];
    uint64_t unused[FP8_PLAN_COUNT];   /* bit = buffer: workspace that the backend needs not */
    size_t workspace_bytes;            /* for max_tokens */
    _Atomic uint64_t workspace_memo;   /* of fp8_layer_workspace */
    char kernels[FP8_PASS_COUNT][192]; /* for fp8_layer_dispatch */
    char dtypes[FP8_PASS_COUNT][64];
};

/* Bytes of workspace for so many tokens; remembers the answer for the last M, as calls repeat
 * it. */
size_t fp8_layer_workspace(const struct fp8_layer *layer, int64_t tokens);

#endif
