/*
 * fp8_jit.h - layers by description: made at run time, without a bundle at hand.
 *
 * A description says what a layer of a spec says. The context looks for such a layer in the bundles
 * that it was given, among those that it has already, and then asks the provider, which makes a
 * bundle: fp8gen_jit_provider of libfp8gen, or one of the caller's.
 */
#ifndef FP8_JIT_H
#define FP8_JIT_H

#include "fp8.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fp8_accumulation {
    FP8_ACCUMULATION_DEFAULT = 0, /* fprop fast, dgrad and wgrad split; recipe "block": all split */
    FP8_ACCUMULATION_FAST = 1,
    FP8_ACCUMULATION_SPLIT = 2, /* promoted into fp32 every 128 of the contraction */
    FP8_ACCUMULATION_256 = 3,   /* every 256, where a generated kernel runs; else split */
    FP8_ACCUMULATION_512 = 4,
} fp8_accumulation;

typedef enum fp8_switch {
    FP8_DEFAULT = 0,
    FP8_ON = 1,
    FP8_OFF = 2,
} fp8_switch;

/* What a layer of a spec says, as a struct; or, if `spec` is set, which layer of which spec, and
 * nothing else (size and stream aside): other fields are then refused. Zero means the default. What
 * a recipe does not have is refused too, and ranges are those of a spec; with compute "bf16"
 * recipe, format, power_of_two, the accumulations and the history are checked and not used. */
typedef struct fp8_layer_description {
    uint32_t size;
    uint32_t has_bias;
    int64_t in_features;  /* K */
    int64_t out_features; /* N */
    int64_t tokens;       /* the usual M; 0 = max_tokens */
    int64_t max_tokens;   /* the largest M; 0 = tokens */
    fp8_dtype w_dtype;    /* default bf16 */
    fp8_dtype y_dtype;    /* default bf16 */
    fp8_dtype dx_dtype;   /* default bf16 */
    fp8_dtype dw_dtype;   /* default fp32 */
    fp8_accumulation fprop, dgrad, wgrad;
    /* scales rounded down to powers of two; default: off with "current" and "delayed", on with the
     * others */
    fp8_switch power_of_two;
    const char *recipe;  /* default "current" */
    const char *format;  /* default "hybrid" with "current" and "delayed", "e4m3" with the others */
    const char *compute; /* default "fp8"; "bf16": the recipe and the accumulations mean nothing */
    int64_t history_length; /* of "delayed" alone, as the next three: default 1024 */
    const char *algo;       /* default "max" */
    int32_t margin;
    uint32_t calibrate;
    const char *spec;  /* the text of a spec, NUL-terminated */
    const char *layer; /* its layer; NULL = its only one; without a spec NULL */
    int32_t arch;      /* for providers: the context's, 90 for 9.0, 0 for the host; callers: 0 */
    /* 1: with the kernels of quantised shards (fp8_shard_amax of recipe "rowwise") */
    uint32_t shards;
    fp8_stream stream; /* where the layer is wanted now, no part of what it is; NULL = not told */
    uint64_t reserved[4];
} fp8_layer_description;

#define FP8_LAYER_DESCRIPTION_INIT                                                                 \
    {                                                                                              \
        sizeof(fp8_layer_description), 0, 0, 0, 0, 0, FP8_DTYPE_NONE, FP8_DTYPE_NONE,              \
            FP8_DTYPE_NONE, FP8_DTYPE_NONE, FP8_ACCUMULATION_DEFAULT, FP8_ACCUMULATION_DEFAULT,    \
            FP8_ACCUMULATION_DEFAULT, FP8_DEFAULT, NULL, NULL, NULL, 0, NULL, 0, 0, NULL, NULL, 0, \
            0, NULL,                                                                               \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }

/* Writes the path of a bundle folder with such a layer for description->arch into
 * path[0..path_bytes) and returns FP8_OK; else an fp8_status, and a sentence in path.
 * description->spec, if set, is a spec that the layer belongs to. May block (compile); is called
 * without locks, from any thread, for different descriptions at once. It may ask the context for
 * other layers; one that waits for this very call is refused with FP8_ERR_ARGUMENT.
 * fp8gen_jit_provider of libfp8gen is one. */
typedef int (*fp8_provider)(void *user, const struct fp8_layer_description *description, char *path,
                            size_t path_bytes);

/* Where layers come from that no bundle of the context has; provider NULL = from nowhere. */
FP8_API fp8_status fp8_context_set_provider(fp8_context *context, fp8_provider provider,
                                            void *user);
/* Gives an open bundle of this context to it: fp8_context_layer looks for layers in these first, in
 * the order given (not for layers of a spec text). The context closes it. */
FP8_API fp8_status fp8_context_add_bundle(fp8_context *context, fp8_bundle *bundle);

/* The layer of this description: of a bundle given to the context, or one that the context has
 * already, or from the provider. The context owns it, equal descriptions get the same one, and it
 * lives as long as the context. A bundle's layer serves if it is equal but for tokens and a
 * max_tokens that is larger. The first call for a description blocks and allocates: it opens the
 * bundle, and a provider may compile, which is logged as a warning with the time; other threads
 * wait only if they want the same description. Later calls compare descriptions, without a lock.
 * Keep the layer all the same: a pass needs no look-up. A first call while description->stream is
 * captured into a CUDA graph is FP8_ERR_CAPTURE, and the capture stays whole; without a stream the
 * same holds for blocking streams, and a capture on another one is neither seen nor disturbed.
 * FP8_ERR_NOT_FOUND: no bundle has it and there is no provider; and what the provider,
 * fp8_bundle_open and fp8_layer_create give. After a failure the next call tries again. */
FP8_API fp8_status fp8_context_layer(fp8_context *context, const fp8_layer_description *description,
                                     const fp8_layer **layer);
/* Makes the layers of all descriptions, several at a time; call it before the first step and the
 * first collective. A description that is wrong is refused before any layer is made; else all are
 * tried, and the first that fails, by index, is returned. */
FP8_API fp8_status fp8_context_prepare(fp8_context *context,
                                       const fp8_layer_description *descriptions, size_t count);

#ifdef __cplusplus
}
#endif
#endif /* FP8_JIT_H */
