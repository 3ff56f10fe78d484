/*
 * model.h - the model as its rooms share it: where its memory lies, what is gathered, what runs.
 *
 * model.c lays out and makes it, model_agree.c compares it over the ranks, model_update.c quantises
 * shards, model_gather.c brings weights into slots, model_hold.c gives them to passes, model_pass.c
 * runs the passes and reduces gradients, model_capture.c follows the caller into graphs,
 * model_trace.c records what ran when. Not public.
 */
#ifndef FP8_MODEL_INTERNAL_H
#define FP8_MODEL_INTERNAL_H

#include "runtime/comm.h"
#include "runtime/shard.h"

enum { FP8_MODEL_GRADS = 2, FP8_MODEL_NAME = 64 };

/* A point in a stream's work; on the host everything is done when it is enqueued. Only work of the
 * same capture can wait for it. */
struct fp8_mark {
    void *event; /* CUevent */
    bool set;
    uint64_t capture; /* of the model when it was recorded */
};

struct fp8_model_weight {
    const fp8_layer *layer;
    const struct fp8_layer_plan *plan;
    char name[FP8_MODEL_NAME];
    fp8_hooks hooks; /* all NULL: none */
    int group;
    bool is_hooked; /* a weight hook gives it */
    struct fp8_shard_shape shard;
    size_t bias_bytes; /* of one rank's chunk; 0: no bias */
    /* places in the pool */
    uint8_t *shard_memory; /* scales, rows */
    uint8_t *bias_memory;
    size_t operand_offset; /* in the slot of its group */
    size_t operand_bytes;  /* what fp8_operand.bytes says */
    size_t bias_offset;
    size_t scales_offset; /* scales of tiles or rows of all ranks, which then go into the operand */
    size_t turned_offset; /* with scales by row: the operand of the transposed copy, */
    size_t turned_bytes;
    size_t pieces_offset; /* and what is gathered for it */
    float *amax;
    /* state */
    bool has_bias;       /* the last update brought the bias */
    fp8_operand operand; /* with scales by row the row copy alone */
    fp8_operand turned;  /* and the transposed copy alone */
    fp8_tensor tensor;   /* of a hook, for products that read w itself (compute bf16) */
};

enum fp8_group_state { FP8_GROUP_AWAY, FP8_GROUP_GATHERED, FP8_GROUP_USED };

struct fp8_model_group {
    int first, count; /* weights */
    size_t bytes;     /* of a slot */
    int slot;         /* -1: none */
    enum fp8_group_state state;
    uint32_t gathered; /* copies that are there or can be made of what is there */
    int readers;       /* acquired and not released */
    struct fp8_mark arrived;
};

struct fp8_model_slot {
    uint8_t *memory;
    int group; /* -1: none */
    uint64_t last_use;
    struct fp8_mark read; /* by the last reader */
};

struct fp8_model_grad {
    uint8_t *memory;   /* dw of all ranks' rows, then dbias */
    uint8_t *arrivals; /* of an exchange: parts of all ranks, as large */
    struct fp8_mark free, summed;
};

struct fp8_model_record {
    const char *what;
    int32_t layer;
    bool is_comm;
    fp8_event *start, *finish;
};

struct fp8_model {
    fp8_context *context;
    fp8_comm *comm; /* NULL: hooks only */
    int32_t rank, ranks;
    bool keep, average, prefetch, transposed_shards;
    bool exchanges;   /* gradients go through all_to_all and a sum, not reduce_scatter */
    bool is_apart;    /* gradients lie beside the pool: sums by NCCL are not in registered memory */
    int32_t comm_sms; /* that dgrad leaves to a reduce-scatter */
    int weight_count, group_count, slot_count;
    int ahead; /* groups that a pass gathers before they are needed */
    struct fp8_model_weight *weights;
    struct fp8_model_group *groups;
    struct fp8_model_slot *slots;
    struct fp8_model_grad grads[FP8_MODEL_GRADS];
    int next_grad;
    size_t dbias_offset; /* in a grad */
    fp8_model_bytes bytes;
    uint8_t *pool;
    size_t pool_bytes;
    void *apart;
    float *amaxes;
    size_t amax_count;
    fp8_stream stream; /* of the collectives */
    /* of the sums behind exchanges: one that waits for SMs keeps no gather waiting */
    fp8_stream sums;
    struct fp8_mark caller; /* scratch: the caller's stream, for ours to wait on */
    struct fp8_mark ours;   /* and the reverse */
    struct fp8_mark updated;
    struct fp8_mark came; /* scratch: an exchange, for its sum to wait on */
    uint64_t version;
    bool updates_captured; /* a graph may bring values whenever it is launched, unseen from here */
    uint64_t capture;      /* that the last call was part of (fp8_capture_of); 0: none */
    uint64_t clock;        /* counts uses of slots */
    struct fp8_model_record *records;
    int32_t record_capacity, record_count;
    fp8_event *trace_start;
};

/* ---- marks (model.c); the context is entered ---- */

fp8_status fp8_mark_record(const fp8_model *model, struct fp8_mark *mark, fp8_stream stream);
fp8_status fp8_mark_wait(const fp8_model *model, const struct fp8_mark *mark, fp8_stream stream);
/* Work on `to` waits for all work that is on `from` now. */
fp8_status fp8_model_order(fp8_model *model, struct fp8_mark *mark, fp8_stream from, fp8_stream to);

/* ---- checks (model.c) ---- */

/* The model, the layer's index, and that its communicator is well. */
fp8_status fp8_model_check(const char *call, fp8_model *model, int32_t layer);

/* ---- agreement (model_agree.c) ---- */

/* Everything that makes ranks issue the same collectives, on operands of the same meaning.
 * FP8_ERR_COMM names the first field that differs, with both values. */
fp8_status fp8_model_agree(const fp8_model *model, const fp8_model_options *options);

/* ---- captures (model_capture.c) ---- */

/* The model goes with the stream of a call into a capture and out of it, before anything is
 * enqueued or decided: nothing is gathered then, and its own stream is behind the caller's. */
fp8_status fp8_model_follow(const char *call, fp8_model *model, fp8_stream stream);
/* FP8_ERR_CAPTURE: the model's own stream is in a capture that goes on, and not in `capture`. */
fp8_status fp8_model_check_own(const char *call, const fp8_model *model, uint64_t capture);

/* ---- gathering (model_gather.c) ---- */

/* Nothing is gathered any more. */
void fp8_model_forget_groups(fp8_model *model);
/* The group gets a slot of its own. All are held: an error if it is needed now, else FP8_OK and
 * slot -1. */
fp8_status fp8_model_take_slot(fp8_model *model, int group, bool needed);
/* Gathers what a pass reads of a group, unless it is there; `needed` as above. */
fp8_status fp8_model_bring(fp8_model *model, int group, fp8_pass pass, bool needed);
/* The groups after the layer's in the order of a pass, as far as slots are free. */
fp8_status fp8_model_prefetch(fp8_model *model, int32_t layer, fp8_pass pass);
/* That the pass reads weights. */
fp8_status fp8_model_check_pass(const char *call, fp8_pass pass);

/* ---- hooks (model_hold.c) ---- */

/* What a hook is told: everything but is_bias and copies. */
fp8_hook_request fp8_model_request(const fp8_model *model, int32_t layer, fp8_pass pass,
                                   fp8_dtype dtype, fp8_stream stream);
/* Its own status, with a sentence that names the hook and the layer, or FP8_OK. */
fp8_status fp8_model_hooked(const fp8_hook_request *request, const char *hook, fp8_status status);

/* ---- holding (model_hold.c) ---- */

/* The weight for a pass, its slot held until release: an operand or, with compute bf16, w itself;
 * the other is NULL. */
fp8_status fp8_model_hold(fp8_model *model, int32_t layer, fp8_pass pass, const fp8_call *call,
                          const fp8_operand **weight, const fp8_tensor **w);
void fp8_model_let_go(fp8_model *model, int32_t layer, fp8_stream stream);
/* The bias for fprop from the update or a hook; *bias stays as it is if neither has it. */
fp8_status fp8_model_bias(fp8_model *model, int32_t layer, const fp8_call *call, fp8_tensor *memory,
                          const fp8_tensor **bias);

/* ---- sums (model_pass.c) ---- */

/* The kernel that sums gradients of one dtype in another, or NULL. */
const struct fp8_kernel *fp8_model_sum(const fp8_layer *layer, fp8_dtype from, fp8_dtype to);

/* ---- trace (model_trace.c) ---- */

/* A span around what is enqueued between the two; -1: not recorded. */
int fp8_model_begin(fp8_model *model, const char *what, int32_t layer, bool is_comm,
                    fp8_stream stream);
void fp8_model_end(fp8_model *model, int span, fp8_stream stream);
void fp8_model_forget(fp8_model *model);

#endif
