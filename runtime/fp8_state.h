/*
 * fp8_state.h - the state of recipe "delayed": scales from the amaxes of earlier steps.
 *
 * One state serves a list of layers, for each its x, w and dy. It lives in device memory of its
 * own. A pass reads the scale of its tensor there and notes the tensor's amax (the largest over all
 * calls since the last step, so micro-batches may come in any order and a recompute in backward
 * changes nothing); once an optimizer step, fp8_state_advance moves these amaxes into the history
 * and makes the next scales, all tensors in one launch. In between, a caller may reduce the amaxes
 * over ranks (where the spec says amax_group = "fsdp", fp8_model_advance of fp8_model.h does both):
 *
 *     call.state = state, call.state_layer = i;     every pass of the i-th layer of the list
 *     fp8_state_running(state, &amaxes, &count);    all-reduce (max) of fp32, by any communicator
 *     fp8_state_advance(state, stream);
 *
 * Only tensors that were quantised since the last step roll. Others carry -1 ("did not run"), which
 * a maximum over ranks keeps unless some rank ran: all ranks of a group roll alike. A call without
 * tokens does not run its tensors. In evaluation set FP8_CALL_EVALUATE: nothing is noted, nothing
 * rolls.
 *
 * The scale belongs to the bytes: an operand keeps the scales that it was quantised with, whatever
 * the state does afterwards. With an empty history the scale is 1, or the tensor's own
 * (`calibrate`).
 *
 * Calls on one state are ordered by the caller's stream, like all work on device memory.
 */
#ifndef FP8_STATE_H
#define FP8_STATE_H

#include "fp8.h"

#ifdef __cplusplus
extern "C" {
#endif

/* For a list of layers of recipe "delayed", all of one context and with the same history_length,
 * algo, power_of_two and amax_group; a layer may occur in it many times, once for each weight that
 * it serves. The layers must outlive the state. All histories are empty. Blocks; allocates device
 * memory.
 * FP8_ERR_ARGUMENT: a layer of another recipe, or layers that differ; FP8_ERR_MEMORY;
 * FP8_ERR_CUDA. */
FP8_API fp8_status fp8_state_create(const fp8_layer *const *layers, int32_t count,
                                    fp8_state **state);
FP8_API void fp8_state_destroy(fp8_state *state);

/* An optimizer step: the amaxes noted since the last one become an entry of the history, and the
 * scales follow. One launch, asynchronous. Reduces nothing over ranks, whatever amax_group is. */
FP8_API fp8_status fp8_state_advance(fp8_state *state, fp8_stream stream);

/* The amaxes noted since the last step: fp32[*count] in device memory, -1 for a tensor that did not
 * run; tensor 3 i + 0, 1, 2 is x, w, dy of the i-th layer. Valid until the state is destroyed. For
 * an all-reduce with the maximum over the ranks that share the scales, before fp8_state_advance;
 * every rank of such a group takes part. */
FP8_API fp8_status fp8_state_running(const fp8_state *state, float **running, int64_t *count);

/* Where the state is, for tools: pointers into its device memory, as fp8_state_running's. */
typedef struct fp8_state_view {
    uint32_t size;
    uint32_t reserved0;
    int64_t tensors; /* 3 for each layer */
    int64_t history_length;
    const float *scale;   /* [tensors]: multiplies on the way in */
    const float *running; /* [tensors] */
    const float *history; /* [history_length][tensors], used as a ring */
    /* [tensors]: the next entry goes to count % history_length, of which the first min(count,
     * history_length) rows are filled; 2 * history_length becomes history_length */
    const int32_t *counts;
    uint64_t reserved[4];
} fp8_state_view;

FP8_API fp8_status fp8_state_describe(const fp8_state *state, fp8_state_view *view);

/* Plain data, little-endian: { char[8] "fp8state", uint32 version (1), uint32 0, int64 tensors,
 * int64 length }, then fp32 scale[tensors], fp32 running[tensors], int32 entries[tensors], fp32
 * history[length][tensors] with each tensor's entries at rows 0 .. entries - 1, oldest first. Rows
 * behind the entries are 0.
 * Loading into a state of another history_length keeps the newest entries; the number of tensors
 * must be the same. Scales are taken as saved: the next step changes them. Only one that would not
 * let the amaxes saved with it fit the format (of a state whose spec had another one) is made anew
 * at once. The data is checked before anything is changed: its header and size, and that every
 * number is one that a state can have. It carries no checksum: an amax or a scale that was
 * altered to another good one is taken. Both block until the stream's earlier work and the copy
 * are done.
 * FP8_ERR_ARGUMENT: NULL, bytes too small, data of another version, of other tensors, or with a
 * number that no state has. */
FP8_API fp8_status fp8_state_bytes(const fp8_state *state, size_t *bytes);
FP8_API fp8_status fp8_state_save(const fp8_state *state, void *data, size_t bytes,
                                  fp8_stream stream);
FP8_API fp8_status fp8_state_load(fp8_state *state, const void *data, size_t bytes,
                                  fp8_stream stream);

#ifdef __cplusplus
}
#endif
#endif /* FP8_STATE_H */
