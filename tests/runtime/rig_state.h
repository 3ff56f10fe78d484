/*
 * rig_state.h - a small world for delayed scaling: one layer (or two), a state, tensors of one
 * amplitude each, so that every amax and every scale is known in advance. The state is looked at as
 * its saved data.
 */
#ifndef RIG_STATE_H
#define RIG_STATE_H

#include "runtime/fp8_state.h"
#include "tests/runtime/rig.h"

enum { M = 40, N = 48, K = 80, MOST_LAYERS = 2, MOST_BYTES = 4096, MOST_WEIGHT = 32768 };

struct world {
    char path[256];
    fp8_bundle *bundle;
    fp8_layer *layer[MOST_LAYERS];
    int layers;
    fp8_state *state;
    struct rig_tensor x, w, dy, y, dx, dw;
    struct rig_operand weight, saved, grad;
    struct rig_scratch workspace;
    uint32_t flags;
};

size_t world_bytes(const fp8_layer *layer, fp8_bytes which);
/* fields: of recipe.delayed. */
void world_make(struct world *o, int layers, const char *fields);
/* One layer, tensors of these amplitudes, the weight quantised as version 1. */
void world_begin(struct world *o, const char *fields, float w, float x, float dy);
void world_free(struct world *o);
/* Values of either sign up to the amplitude, which the last one has. */
void world_fill(struct rig_tensor *tensor, float amplitude, uint64_t seed);
fp8_call world_call(struct world *o, int layer);
void world_update(struct world *o, int layer, uint64_t version);
void world_forward(struct world *o, int layer);
void world_backward(struct world *o, int layer);
void world_set_rows(struct world *o, int64_t rows);

/* ---- looking at a state ---- */

struct seen {
    unsigned char data[MOST_BYTES];
    size_t bytes;
    int64_t tensors, length;
    float scale[3 * MOST_LAYERS], running[3 * MOST_LAYERS];
    int32_t entries[3 * MOST_LAYERS];
    float history[3 * MOST_LAYERS][64]; /* oldest first */
};

void world_look(struct world *o, struct seen *s);
void world_expect_same(struct world *o, const struct seen *before);
/* Bit for bit; `what` and the line are for the message. */
void world_expect_float(float value, float want, const char *what, int line);
#define EXPECT_FLOAT(value, want) world_expect_float((value), (want), #value, __LINE__)

/* ---- steps ---- */

void world_advance(struct world *o);
/* One step of x alone. */
void world_step_x(struct world *o, float amplitude);

#endif
