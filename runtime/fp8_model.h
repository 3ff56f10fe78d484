/*
 * fp8_model.h - weight parallel (FSDP, ZeRO-3) on top of fp8.h and fp8_comm.h: shards, hooks, the
 * model.
 *
 * Every rank holds rows of each weight. After the optimizer step the rows are quantised with the
 * amax of the whole weight (one all-reduce for all layers); before a pass the FP8 bytes of all
 * ranks are gathered, and after it the gradient is reduce-scattered. Two layers, the first usable
 * alone:
 *
 *     shard     quantise my shard, unpack what was gathered: for an engine that gathers itself
 *     model     layers + comm: gathers ahead on a stream of its own, and hooks for everything else
 *
 * The laws of both headers hold here; a model is used by one thread at a time.
 */
#ifndef FP8_MODEL_H
#define FP8_MODEL_H

#include "fp8_comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- shards: for an engine that gathers itself ----------------------------------------------- */

typedef enum fp8_shard_kind {
    FP8_SHARD_ROWS = 0, /* whole rows of w[N,K] */
    /* a range of w's elements in row-major order, cut anywhere; recipes with one scale a tensor
     * only */
    FP8_SHARD_ELEMENTS = 1,
} fp8_shard_kind;

/* Part `rank` of `ranks` equal ones; the last may be short, those behind it empty. */
typedef struct fp8_sharding {
    uint32_t size;
    fp8_shard_kind kind;
    int32_t rank;
    int32_t ranks;
    /* 1: shards of rows with one scale a tensor also hold the transposed copy of their rows, as
     * those with a scale a row always do */
    uint32_t transposed;
    uint32_t reserved0;
    uint64_t reserved[1];
} fp8_sharding;

#define FP8_SHARDING_INIT                                                                          \
    {                                                                                              \
        sizeof(fp8_sharding), FP8_SHARD_ROWS, 0, 1, 0, 0,                                          \
        {                                                                                          \
            0                                                                                      \
        }                                                                                          \
    }

/* The shard of a rank: [first, first + count), in rows or elements, of chunks of `chunk`:
 * chunk = ceil(N / ranks) rows (rounded up to 128 for 128x128 scaling and with weight_scale shard),
 * or ceil(N K / ranks) elements;
 * first = min(rank * chunk, all), count = min(chunk, all - first). Pure arithmetic; each pointer
 * may be NULL. FP8_ERR_ARGUMENT; FP8_ERR_UNSUPPORTED: elements, and the recipe has more than one
 * scale. */
FP8_API fp8_status fp8_shard_range(const fp8_layer *layer, const fp8_sharding *sharding,
                                   int64_t *first, int64_t *count, int64_t *chunk);

/* Bytes of a quantised shard, the same for all ranks, a multiple of 256. What they hold, in this
 * order, each part 256-byte aligned:
 *     scales      float32[16] as in an operand
 *     tiles       with scaling of 128 x 128: float32 [chunk / 128][roundup(ceil(K / 128), 4)]
 *     row scales  with a scale a row, or (weight_scale shard) a shard: float32 [chunk]
 *     data        rows: chunk rows of roundup(K,128) bytes; elements: chunk bytes
 *     transposed  with a scale a row, or where the sharding asks for it: float32[16] as in an
 *                 operand; with rowwise float32 [roundup(K,16)], the scales of the columns;
 *                 roundup(K,16) rows of roundup(chunk,128) bytes
 * Unused rows and bytes are zero. Gather it as bytes. Recipes: all that quantise w (delayed: the
 * scale comes from the amax given, not from the state). */
FP8_API fp8_status fp8_shard_bytes(const fp8_layer *layer, const fp8_sharding *sharding,
                                   size_t *bytes);

/* How many amaxes a weight has: 1; K with recipe rowwise (of the columns); 1 that stays 0 with
 * scaling of 128 x 128; 1 of this shard alone with weight_scale shard, which is not reduced over
 * the ranks. Such a layer is sharded by rows over as many ranks as its bundle's fsdp says, in
 * chunks of whole 128 rows. */
FP8_API fp8_status fp8_shard_amaxes(const fp8_layer *layer, int64_t *count);

/* What is quantised, or looked at. */
typedef struct fp8_shard_args {
    uint32_t size;
    uint32_t reserved0;
    int64_t count; /* rows or elements here, at most the chunk; ranges of an engine's own are any */
    const fp8_sharding *sharding;
    /* w_dtype: [count, K], or for elements [1, count]; NULL if count is 0 */
    const fp8_tensor *source;
    float *amax; /* device, fp8_shard_amaxes numbers. shard_amax: receives the largest finite |w| of
               * the shard (rowwise: of each column). shard_quantize: those of the whole weight
               * (weight_scale shard: of the shard), read in stream order; as fp8_weight_args.amax.
               * With scaling of 128 x 128 there is nothing to know: 0 comes out, NULL will do */
    void *shard; /* shard_quantize: fp8_shard_bytes, 16-byte aligned; written whole */
    size_t shard_bytes;
    /* set to 1 if the shard holds inf or NaN, by shard_amax (with scaling of 128 x 128 by
     * shard_quantize); may be NULL */
    uint32_t *found_inf;
    fp8_call call; /* workspace as for the layer with 0 tokens */
    uint64_t reserved[4];
} fp8_shard_args;

#define FP8_SHARD_ARGS_INIT                                                                        \
    {                                                                                              \
        sizeof(fp8_shard_args), 0, 0, NULL, NULL, NULL, NULL, 0, NULL, FP8_CALL_INIT,              \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }

/* The amaxes of this shard; the maximum over ranks (fp8_comm_all_reduce_max, or the engine's own
 * all-reduce: one for all weights) is the amax of the weight. */
FP8_API fp8_status fp8_shard_amax(const fp8_layer *layer, const fp8_shard_args *args);
/* The FP8 bytes and the scale of this shard, exactly as fp8_weight_update gives these elements. */
FP8_API fp8_status fp8_shard_quantize(const fp8_layer *layer, const fp8_shard_args *args);

/* A quantised shard that has arrived. */
typedef struct fp8_shard_piece {
    const void *shard; /* as fp8_shard_quantize wrote it */
    int64_t first;     /* rows or elements of w */
    int64_t count;
} fp8_shard_piece;

typedef struct fp8_unpack_args {
    uint32_t size;
    /* FP8_COPY_*; 0 = both. The transposed copy is made from the row copy, or where rows have
     * scales of their own from the transposed parts */
    uint32_t copies;
    const fp8_sharding *sharding;  /* rank is not read */
    const fp8_shard_piece *pieces; /* ascending, together exactly w; empty ones may be there */
    size_t piece_count;
    uint64_t version;    /* of the values, as for fp8_weight_update; not 0 */
    fp8_operand *weight; /* fp8_layer_bytes(FP8_BYTES_WEIGHT or _WEIGHT_ROW) */
    fp8_call call;
    uint64_t reserved[4];
} fp8_unpack_args;

#define FP8_UNPACK_ARGS_INIT                                                                       \
    {                                                                                              \
        sizeof(fp8_unpack_args), 0, NULL, NULL, 0, 0, NULL, FP8_CALL_INIT,                         \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }

/* Makes the weight of a layer from its gathered shards: the same bytes as on one GPU.
 * FP8_ERR_SHAPE: the pieces are not w, or one is larger than a shard or begins inside 128 rows that
 * have one scale. */
FP8_API fp8_status fp8_shard_unpack(const fp8_layer *layer, const fp8_unpack_args *args);

/* ---- hooks ----------------------------------------------------------------------------------- */

/* What a hook is asked for. Valid during the call. */
typedef struct fp8_hook_request {
    uint32_t size;
    int32_t layer;     /* index in the model */
    const char *name;  /* of the layer */
    fp8_pass pass;     /* fprop, dgrad: which pass reads it; wgrad, quantize_dy: which wrote it */
    uint32_t is_bias;  /* 1: the bias [1,N], or dbias; 0: the weight, or dw */
    fp8_dtype dtype;   /* wanted: w_dtype, bias_dtype; of the tensor handed over otherwise */
    uint32_t copies;   /* weight: which copies an operand must have */
    fp8_stream stream; /* of the pass: everything is ordered by it */
    uint64_t reserved[4];
} fp8_hook_request;

/* A weight hook's answer: an operand with the copies asked for (of any source: gathered, cached),
 * or a tensor (w[N,K] in w_dtype, which the model then quantises into memory of its own, or
 * multiplies as it is with compute "bf16"; bias[1,N]). Both
 * stay the caller's and are only read, in work that is enqueued on request->stream before the pass
 * returns: an event recorded there afterwards says when they are free. */
typedef struct fp8_weight_view {
    uint32_t size;
    uint32_t reserved0;
    const fp8_operand *operand; /* NULL: the tensor */
    fp8_tensor tensor;
    uint64_t version; /* of the tensor's values, not 0; see fp8_weight_args */
    uint64_t reserved[4];
} fp8_weight_view;

/* What the data is ready for on return: work on request->stream. Work on other streams must have
 * been joined to it. An error is returned from the pass unchanged; nothing of the pass that reads
 * the weight has been enqueued then, and the layer can be used again. During a graph capture hooks
 * are called once, at capture. */
typedef fp8_status (*fp8_weight_hook)(void *user, const fp8_hook_request *request,
                                      fp8_weight_view *view);
/* dw[N,K] (or dbias[1,N]) is complete in the order of request->stream; the hook replaces the
 * model's reduce-scatter. The tensor is the model's (or backward's dw) and may be read and written
 * until the hook returns and what it enqueued on request->stream is done, or, if it sets *done,
 * until that event has happened: recorded by the hook on any stream, owned by the hook, alive until
 * the next call of it. */
typedef fp8_status (*fp8_grad_hook)(void *user, const fp8_hook_request *request,
                                    const fp8_tensor *grad, fp8_event **done);
/* output: y has been enqueued; the hook may enqueue work that reads or writes it. grad_output:
 * called before dy is read; the hook may write it or set *tensor to another of the same shape and
 * dtype, the caller's, read in work enqueued before the pass returns. */
typedef fp8_status (*fp8_tensor_hook)(void *user, const fp8_hook_request *request,
                                      fp8_tensor *tensor);

typedef struct fp8_hooks {
    uint32_t size;
    uint32_t reserved0;
    void *user;
    fp8_weight_hook weight; /* each may be NULL */
    fp8_grad_hook grad;
    fp8_tensor_hook output;
    fp8_tensor_hook grad_output;
    uint64_t reserved[4];
} fp8_hooks;

#define FP8_HOOKS_INIT                                                                             \
    {                                                                                              \
        sizeof(fp8_hooks), 0, NULL, NULL, NULL, NULL, NULL,                                        \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }

/* ---- model ----------------------------------------------------------------------------------- */

typedef struct fp8_model fp8_model;

typedef struct fp8_model_layer {
    uint32_t size;
    uint32_t group;         /* neighbours of one number are gathered together; 0: alone */
    const fp8_layer *layer; /* of the model's context; one layer may stand for several weights */
    const char *name;       /* in messages; NULL: the layer's. Copied, like the hooks */
    const fp8_hooks *hooks; /* NULL: none */
    uint64_t reserved[4];
} fp8_model_layer;

#define FP8_MODEL_LAYER_INIT                                                                       \
    {                                                                                              \
        sizeof(fp8_model_layer), 0, NULL, NULL, NULL,                                              \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }

/* How gradients are summed over the ranks. */
typedef enum fp8_model_reduce {
    FP8_REDUCE_AUTO = 0,       /* EXCHANGE where copy engines do it, else COLLECTIVE */
    FP8_REDUCE_COLLECTIVE = 1, /* reduce_scatter: by NCCL's kernels, on SMs that dgrad wants */
    /* all_to_all, then one kernel that adds in the ranks' order, in fp32. Takes memory for one
     * more whole gradient */
    FP8_REDUCE_EXCHANGE = 2,
} fp8_model_reduce;

/* Weights in backward. AS_SPEC here and below: as the `shard` table of the layers' spec says, of
 * all layers the same; without one, and for layers described at run time, GATHER and AVERAGE. */
typedef enum fp8_model_weights {
    FP8_WEIGHTS_AS_SPEC = 0,
    FP8_WEIGHTS_GATHER = 1, /* gathered again */
    FP8_WEIGHTS_KEEP = 2,   /* a group stays gathered until the next update */
} fp8_model_weights;

/* What dw and dbias are over the ranks. */
typedef enum fp8_model_grads {
    FP8_GRADS_AS_SPEC = 0,
    FP8_GRADS_SUM = 1,
    FP8_GRADS_AVERAGE = 2,
} fp8_model_grads;

typedef struct fp8_model_options {
    uint32_t size;
    int32_t layer_count;
    /* in forward order, which is the order of prefetch; backward's is the reverse */
    const fp8_model_layer *layers;
    fp8_context *context;
    fp8_comm *comm; /* over which weights are sharded; NULL: every layer has a weight hook */
    int32_t slots;  /* groups that are gathered or in use at once: 1 + how far ahead; 0 = 2 */
    fp8_model_weights backward;
    fp8_model_grads grads;
    uint32_t no_prefetch; /* 1: only fp8_model_gather starts gathers ahead */
    int32_t comm_sms;     /* SMs that dgrad leaves to a reduce-scatter beside it; 0: none */
    fp8_model_reduce reduce_by;
    /* 1: backward gathers transposed copies that the ranks have made of their rows, where one
     * scale serves both copies; 0: it transposes what was gathered. Twice the memory for shards */
    uint32_t transposed_shards;
    uint32_t reserved0;
    /* compared over ranks at create, with the layers' shapes and recipes: the bundle's spec_hash;
     * NULL: none */
    const char *hash;
    uint64_t reserved[4];
} fp8_model_options;

#define FP8_MODEL_OPTIONS_INIT                                                                     \
    {                                                                                              \
        sizeof(fp8_model_options), 0, NULL, NULL, NULL, 0, FP8_WEIGHTS_AS_SPEC, FP8_GRADS_AS_SPEC, \
            0, 0, FP8_REDUCE_AUTO, 0, 0, NULL,                                                     \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }

typedef struct fp8_model_bytes {
    uint32_t size; /* set by the caller */
    uint32_t reserved0;
    size_t shards; /* FP8 shards of all layers, of this rank */
    size_t slots;  /* gathered weights: row and transposed copies */
    size_t grads;  /* whole gradients before they are reduced, two of the largest; two more for what
                   * arrives where they are exchanged */
    size_t pool; /* what fp8_model_create allocates on the device, once: the sum and some padding */
    uint64_t reserved[4];
} fp8_model_bytes;

/* What fp8_model_create would allocate, on every rank. Pure. FP8_ERR_ARGUMENT, FP8_ERR_UNSUPPORTED:
 * what it would refuse. */
FP8_API fp8_status fp8_model_measure(const fp8_model_options *options, fp8_model_bytes *bytes);

/* Compares the models of all ranks, then allocates and registers the pool. Blocks until all ranks
 * have come; fails on all ranks if it does on one. Context, layers and comm must outlive the model.
 * Alike on all ranks: hash, the options above but comm_sms, and of every layer its name, group,
 * features, bias, dtypes, compute, recipe with all its options, accumulations, whether it has a
 * weight and a grad hook. A rank may have its own tokens, max_tokens, GPU, kernels, comm_sms and
 * hooks on outputs and their gradients. FP8_ERR_ARGUMENT: options, or a weight of more than 2^40
 * elements; FP8_ERR_UNSUPPORTED: a layer that cannot be sharded; FP8_ERR_MEMORY; FP8_ERR_COMM: the
 * field that differs, of which layer, with both values; or another rank has failed. */
FP8_API fp8_status fp8_model_create(const fp8_model_options *options, fp8_model **model);
/* All ranks; enqueued work must be done. */
FP8_API void fp8_model_destroy(fp8_model *model);

/* This rank's rows of a layer's weight and bias: [first, first + count); all of a weight that a
 * hook gives. Each pointer may be NULL. FP8_ERR_ARGUMENT: no such layer. */
FP8_API fp8_status fp8_model_rows(const fp8_model *model, int32_t layer, int64_t *first,
                                  int64_t *count);

/* New values of all weights, after an optimizer step: amax of every shard, one all-reduce, then
 * FP8. */
typedef struct fp8_model_update_args {
    uint32_t size;
    uint32_t reserved0;
    /* [layer_count] shards [count, K] in w_dtype, read in stream order. The entry of a layer with
     * a weight hook, and of an empty shard, is not read */
    const fp8_tensor *w;
    /* [layer_count] shards [1, count] in bias_dtype, gathered with the weight; NULL: fprop is
     * given the bias. Entries of layers without bias are not read */
    const fp8_tensor *bias;
    uint64_t version; /* of the values: one more after each optimizer step, from 1. Nothing is done
                       * if the model has it already, unless an update was ever captured: a graph
                       * brings values whenever it is launched, so from then on every update does */
    uint32_t *found_inf; /* may be NULL */
    fp8_call call;       /* workspace as for any layer with 0 tokens */
    uint64_t reserved[4];
} fp8_model_update_args;

#define FP8_MODEL_UPDATE_ARGS_INIT                                                                 \
    {                                                                                              \
        sizeof(fp8_model_update_args), 0, NULL, NULL, 0, NULL, FP8_CALL_INIT,                      \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }

FP8_API fp8_status fp8_model_update(fp8_model *model, const fp8_model_update_args *args);

/* fp8_state_advance for a state of this model's layers. Where their spec says amax_group = "fsdp",
 * the amaxes are first reduced over the ranks, all of the state in one all-reduce: every rank calls
 * it, with states alike, whether or not it had tokens. FP8_ERR_ARGUMENT: of another context, or the
 * model has no communicator. */
FP8_API fp8_status fp8_model_advance(fp8_model *model, fp8_state *state, fp8_stream stream);

/* Starts the gather of the layer's group for a pass (FP8_PASS_FPROP or FP8_PASS_DGRAD) unless it is
 * under way or there, on the model's stream. The passes do this themselves, one group ahead. All
 * ranks do it in the same order. If no slot is free it does nothing: the pass that needs the weight
 * gathers then. */
FP8_API fp8_status fp8_model_gather(fp8_model *model, int32_t layer, fp8_pass pass);
/* For passes of the caller's own: the weight with the copy that `pass` reads, valid for work on
 * call->stream until fp8_model_release. Gathers if nobody has. *weight is the model's: read it
 * only. */
FP8_API fp8_status fp8_model_acquire(fp8_model *model, int32_t layer, fp8_pass pass,
                                     const fp8_call *call, const fp8_operand **weight);
/* All reads are enqueued on `stream`; the slot may be used again after them. */
FP8_API fp8_status fp8_model_release(fp8_model *model, int32_t layer, fp8_stream stream);

/* fp8_layer_fprop with the layer's weight: args->weight is NULL; args->bias is NULL where the model
 * or a hook has it. Order: weight hook, fprop, output hook. Starts the gather of the next group
 * first. */
FP8_API fp8_status fp8_model_fprop(fp8_model *model, int32_t layer, const fp8_fprop_args *args);

typedef struct fp8_model_backward_args {
    uint32_t size;
    /* 1: dw and dbias are reduced over ranks. 0: a micro-batch before the last, whose dw (and
     * dbias) the caller keeps in backward->dw and the last one adds to */
    uint32_t reduce;
    /* weight is NULL; dw and dbias: whole accumulators [N,K], [1,N] of the caller, or NULL: the
     * model's. dx may be NULL */
    const fp8_backward_args *backward;
    /* [count, K] of this rank, dw_dtype, or fp32 (main_grad); NULL: not wanted */
    const fp8_tensor *dw;
    const fp8_tensor *dbias; /* [1, count] fp32 */
    uint32_t accumulate;     /* of this dw and dbias: += the reduced gradient. fp32 only */
    uint32_t reserved0;
    uint64_t reserved[4];
} fp8_model_backward_args;

#define FP8_MODEL_BACKWARD_ARGS_INIT                                                               \
    {                                                                                              \
        sizeof(fp8_model_backward_args), 1, NULL, NULL, NULL, 0, 0,                                \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }

/* Order: grad_output hook, quantize_dy, wgrad, grad hook or the start of the reduce-scatter, weight
 * hook, dgrad: the reduce-scatter runs on the model's stream behind dgrad and the next backward. dw
 * and dbias of this rank are ready for work that comes after fp8_model_join. */
FP8_API fp8_status fp8_model_backward(fp8_model *model, int32_t layer,
                                      const fp8_model_backward_args *args);

/* Joins `stream` and the model's own stream: each waits for what the other has now. Before the
 * optimizer step; and around CUDA graphs:
 *
 * Every call above but create and destroy can be captured in every mode, collectives and gathers
 * ahead included, once the model is made. A capture begins and ends with fp8_model_join on its
 * stream: the first takes the model's stream in (a pass does so, too; fp8_model_gather alone
 * cannot), without the last the capture has a stream that was not joined. Inside, nothing counts as
 * gathered that was gathered outside, and the reverse; an update is always enqueued, also of a
 * version that the model has, and counts as done from then on, though its values come with the
 * launch: after a capture that is dropped, update again. All ranks capture and launch the same.
 * Between a launch and calls outside the graph: fp8_model_join on the stream of the launch.
 * Collectives of a graph are not watched: where a rank does not launch it, fp8_comm_wait ends with
 * the timeout, and the error names the graph, not the collective.
 * FP8_ERR_CAPTURE, from every call, and the capture goes on: a weight is still acquired that was
 * acquired on the other side of the capture; the model is in a capture that has not ended, and the
 * stream is not. */
FP8_API fp8_status fp8_model_join(fp8_model *model, fp8_stream stream);

/* ---- what ran when ---- */

typedef struct fp8_model_span {
    /* "all_gather", "reduce_scatter", "transpose", "fprop", "wgrad", "dgrad", ...; lives as long
     * as the process */
    const char *what;
    int32_t layer;
    uint32_t is_comm;     /* 1: on the model's stream; 0: on the caller's */
    double start, finish; /* seconds from fp8_model_trace */
} fp8_model_span;

/* Starts to record up to `capacity` spans of work enqueued from now on (0: stops, frees).
 * Allocates. */
FP8_API fp8_status fp8_model_trace(fp8_model *model, int32_t capacity, fp8_stream stream);
/* Blocks until all recorded work is done, writes the spans and forgets them. *count: how many fit
 * into spans; then how many are there. */
FP8_API fp8_status fp8_model_spans(fp8_model *model, fp8_model_span *spans, int32_t *count);

#ifdef __cplusplus
}
#endif
#endif /* FP8_MODEL_H */
