/*
 * plan.h - a bundle as plain structs: buffers, steps, kernels and layers, as manifest.c fills them.
 *
 * A bundle is parsed once, and the structs never change afterwards. A step's arguments are already
 * sources (a literal, M, the address, leading dim or rows of a buffer), so that a call needs no
 * look-up. Knows neither JSON nor CUDA's types.
 */
#ifndef FP8_PLAN_H
#define FP8_PLAN_H

#include "runtime/check.h"
#include "runtime/fp8_jit.h"
#include "runtime/ops.h"

enum {
    FP8_MAX_BUFFERS = 48,
    FP8_MAX_STEPS = 8,
    FP8_MAX_RANGES = 64,
    FP8_MAX_CHOICES = 8,
    FP8_MAX_ARCHS = 16,
};

/* The tensors of a pass that are the caller's. */
enum fp8_slot {
    FP8_SLOT_X,
    FP8_SLOT_W,
    FP8_SLOT_BIAS,
    FP8_SLOT_Y,
    FP8_SLOT_DY,
    FP8_SLOT_DX,
    FP8_SLOT_DW,
    FP8_SLOT_DBIAS,
    FP8_SLOT_FOUND_INF,
    FP8_SLOT_AMAX, /* that is given */
    FP8_SLOT_WHEN, /* the device's word that the call depends on */
    FP8_SLOT_COUNT
};
extern const char *const fp8_slot_names[FP8_SLOT_COUNT];

enum fp8_object { FP8_OBJECT_CALLER, FP8_OBJECT_OPERAND, FP8_OBJECT_STATE, FP8_OBJECT_WORKSPACE };
/* The parts of an operand, in the order of its memory. */
enum fp8_part {
    FP8_PART_SCALES,
    FP8_PART_ROW_SCALES,
    FP8_PART_ROW,
    FP8_PART_TRANSPOSED_SCALES,
    FP8_PART_TRANSPOSED,
    FP8_PART_COUNT
};
extern const char *const fp8_part_names[FP8_PART_COUNT];
/* The places of a tensor in a delayed scaling state. */
enum fp8_place { FP8_PLACE_SCALE, FP8_PLACE_AMAX, FP8_PLACE_FRESH, FP8_PLACE_COUNT };
extern const char *const fp8_place_names[FP8_PLACE_COUNT];
/* The two copies of an operand: places in plan->scalings. */
enum fp8_copy { FP8_ROW_COPY, FP8_TRANSPOSED_COPY, FP8_COPY_COUNT };
/* Scalings that a copy can have: all but FP8_SCALING_NONE. */
enum { FP8_SCALING_COUNT = FP8_SCALING_NONE };
extern const char *const fp8_scaling_names[FP8_SCALING_COUNT + 1];
/* "x", "w", "dy" by fp8_role; "none" for FP8_ROLE_NONE. */
enum { FP8_ROLE_COUNT = 4 };
extern const char *const fp8_role_names[FP8_ROLE_COUNT];

/* min(roundup(ceil(of / div), pad), max); `of` is M if of_tokens. */
struct fp8_dim {
    bool of_tokens;
    int64_t of;
    int64_t div;
    int64_t pad;
    int64_t max; /* INT64_MAX: no limit */
};

static inline int64_t fp8_dim_at(const struct fp8_dim *dim, int64_t tokens)
{
    int64_t value = dim->of_tokens ? tokens : dim->of;
    if (dim->div > 1)
        value = fp8_ceil_div(value, dim->div);
    if (dim->pad > 1)
        value = fp8_round_up(value, dim->pad);
    return value < dim->max ? value : dim->max;
}

struct fp8_buffer {
    const char *name;
    enum fp8_object object;
    enum fp8_slot slot;   /* caller */
    fp8_role role;        /* operand */
    enum fp8_part part;   /* operand */
    enum fp8_place place; /* state */
    fp8_dtype dtype;
    struct fp8_dim rows;
    struct fp8_dim cols;
};

enum fp8_source_kind {
    FP8_FROM_LITERAL, /* also NULL pointers */
    FP8_FROM_TOKENS,
    FP8_FROM_ACCUMULATE,
    FP8_FROM_ADDRESS,
    FP8_FROM_LD,
    FP8_FROM_ROWS,
    FP8_FROM_EPOCH,
};

struct fp8_source {
    uint8_t kind;
    int8_t buffer;
    int64_t literal;
};

struct fp8_cubin {
    const char *arch;
    const char *file;
    int64_t bytes;
    const char *xxh128;
};

enum fp8_grid_rule { FP8_GRID_TILES, FP8_GRID_ELEMENTS, FP8_GRID_CLUSTERS };

struct fp8_grid {
    enum fp8_grid_rule rule;
    int rows; /* arguments of the op */
    int cols;
    int64_t tile_rows;
    int64_t tile_cols;
    int64_t tile_elements;
    int64_t slices;      /* clusters: CTAs of one that share a tile's contraction */
    int64_t ctas_per_sm; /* 0: no such cap */
    int64_t max_ctas;    /* 0: no cap */
    bool persistent;     /* ctas_per_sm holds for calls that do not limit the SMs too */
};

/* What a kernel parameter is, if it is not an argument of the op: these follow its indices. */
enum fp8_parameter {
    FP8_PARAMETER_MAP_A = FP8_OP_MAX_ARGS,
    FP8_PARAMETER_MAP_B,
    FP8_PARAMETER_MAP_OUT,
    FP8_PARAMETER_OUT_BY_MAP,
    FP8_PARAMETER_END
};
enum { FP8_MAP_COUNT = 3 }; /* of a, b, out */

/* Elements that TMA moves at once. */
struct fp8_box {
    int32_t inner;
    int32_t outer;
};

struct fp8_kernel {
    const char *name;
    const char *entry;
    enum fp8_op op;
    fp8_semantics semantics;
    int arg_count;
    uint8_t arg_index[FP8_OP_MAX_ARGS]; /* the op's argument, or a fp8_parameter, behind each of the
                                         * kernel's */
    struct fp8_box boxes[FP8_MAP_COUNT]; /* op gemm */
    struct fp8_grid grid;
    int32_t block;
    int32_t cluster;
    int32_t shared_bytes;
    bool cooperative; /* all CTAs resident at once */
    bool overlaps;    /* may start before the kernel before it has ended */
    int cubin_count;
    const struct fp8_cubin *cubins;
    void *module;          /* CUmodule, set by fp8_kernel_load */
    void *function;        /* CUfunction */
    int32_t most_clusters; /* that the GPU runs at once, set by fp8_kernel_load; cluster > 1 */
};

enum fp8_backend { FP8_BACKEND_GENERATED, FP8_BACKEND_CUBLASLT };

/* One way to run the products of a range. */
struct fp8_choice {
    enum fp8_backend backend;
    const char *reason;
    const struct fp8_kernel *overwrite; /* generated */
    const struct fp8_kernel *add;       /* NULL: the pass never accumulates */
    int64_t version;                    /* cublaslt: of `algo`; 0: there is none */
    uint64_t algo[8];
};

struct fp8_range {
    int64_t min_tokens;
    int64_t max_tokens;
    const char *dtype;
    int choice_count;
    struct fp8_choice *choices; /* the last is cublaslt */
};

struct fp8_store {
    const struct fp8_kernel *kernel;
    fp8_dtype stage_dtype;
};

/* By fp8_accumulation; "" for the default, which no manifest has. */
enum { FP8_ACCUMULATION_COUNT = 5 };
extern const char *const fp8_accumulation_names[FP8_ACCUMULATION_COUNT];

struct fp8_gemm_step {
    fp8_accumulation accumulation;
    int8_t stage; /* buffers; stage_bias may be -1 */
    int8_t stage_bias;
    int8_t workspace;
    bool may_accumulate;
    struct fp8_store overwrite;
    struct fp8_store accumulate; /* kernel NULL: the pass never accumulates */
    int range_count;
    struct fp8_range *ranges;
};

/* The range that serves M = tokens; the first for none. */
static inline int fp8_range_at(const struct fp8_gemm_step *gemm, int64_t tokens)
{
    int index = 0;
    while (index + 1 < gemm->range_count && tokens > gemm->ranges[index].max_tokens)
        index++;
    return index;
}

struct fp8_alternative;

struct fp8_step {
    enum fp8_op op;
    const struct fp8_kernel *kernel; /* NULL for a gemm */
    fp8_semantics semantics;
    struct fp8_gemm_step *gemm;                /* NULL for all else */
    const struct fp8_alternative *alternative; /* of an amax and the quantize after it, or NULL */
    struct fp8_source args[FP8_OP_MAX_ARGS];
};

/* One launch for two steps, where the tensor fits on chip. */
struct fp8_alternative {
    struct fp8_step step; /* op fused */
    int64_t elements_per_sm;
};

struct fp8_pass_plan {
    int step_count;
    int gemm; /* index of the gemm step (always the last); step_count if there is none */
    struct fp8_step steps[FP8_MAX_STEPS];
    int buffer_count; /* those that the steps name, the gemm's own among them */
    int8_t buffers[FP8_MAX_BUFFERS];
    uint64_t gemm_buffers; /* bit = buffer: the stages and the workspace of cuBLASLt */
    bool uses_state;
};

/* How w[N,K] is spread over the ranks of the mesh: rank r has rows [r * rows, (r + 1) * rows) of
 * it, as far as there are any. */
struct fp8_shard_plan {
    int64_t ranks;    /* of the mesh; one has no kernels of shards */
    int64_t rows;     /* of each chunk, pads of the last ones among them */
    int64_t multiple; /* which rows is a multiple of */
    bool own_scales;  /* every chunk of w has one of its own (recipe current, weight_scale shard) */
    const char *group; /* neighbours of one group are gathered together; NULL: by itself */
};

/* The step lists of a layer: the passes, and what runs instead of quantising steps where the amax
 * is given. */
enum { FP8_PLAN_GIVEN_X = FP8_PASS_COUNT, FP8_PLAN_GIVEN_W, FP8_PLAN_GIVEN_DY, FP8_PLAN_COUNT };
/* The list for a given amax of x, w, dy. */
static inline fp8_pass fp8_given_pass(fp8_role role)
{
    return (fp8_pass)(FP8_PLAN_GIVEN_X + (int)role - FP8_ROLE_X);
}
/* fp8_pass_name, or "given x". */
const char *fp8_plan_pass_name(fp8_pass pass);

enum fp8_recipe_kind {
    FP8_RECIPE_CURRENT,
    FP8_RECIPE_DELAYED,
    FP8_RECIPE_ROWWISE,
    FP8_RECIPE_ROWWISE_HP_WGRAD,
    FP8_RECIPE_BLOCK,
    FP8_RECIPE_COUNT
};
extern const char *const fp8_recipe_names[FP8_RECIPE_COUNT];

struct fp8_recipe {
    enum fp8_recipe_kind kind;
    bool is_hybrid;
    bool power_of_two;
    bool by_shard;  /* current: weight_scale "shard" */
    bool calibrate; /* delayed, as all below */
    bool most_recent;
    bool shares_amaxes; /* amax_group "fsdp" */
    int32_t margin;
    int64_t history_length;
};

struct fp8_layer_plan {
    const char *name;
    struct fp8_recipe recipe;
    bool is_bf16; /* compute: no operands */
    int64_t in_features;
    int64_t out_features;
    int64_t tokens;
    int64_t max_tokens;
    bool has_bias;
    struct fp8_shard_plan shard;
    int buffer_count;
    struct fp8_buffer buffers[FP8_MAX_BUFFERS];
    int8_t slots[FP8_SLOT_COUNT];                 /* buffer of a caller's tensor, or -1 */
    int8_t parts[FP8_ROLE_COUNT][FP8_PART_COUNT]; /* buffer of an operand's part */
    int8_t places[FP8_PLACE_COUNT];               /* buffer of a place in the state, or -1 */
    fp8_dtype formats[FP8_ROLE_COUNT];            /* none with compute bf16 */
    fp8_scaling scalings[FP8_ROLE_COUNT][FP8_COPY_COUNT];
    struct fp8_pass_plan passes[FP8_PLAN_COUNT]; /* given: without steps if there is none */
    /* by format (e4m3, e5m2) and scaling; NULL: no copy of the layer's operands has these */
    const struct fp8_kernel *dequantize[2][FP8_SCALING_COUNT];
    const struct fp8_kernel *transpose; /* NULL: w's copies cannot be made from each other */
    const struct fp8_kernel *roll;      /* NULL: not delayed */
};

/* The word of its recipe, or "compute bf16". */
static inline const char *fp8_plan_recipe_name(const struct fp8_layer_plan *plan)
{
    return plan->is_bf16 ? "compute bf16" : fp8_recipe_names[plan->recipe.kind];
}

/* Of a caller's tensor; none if the layer has no such tensor. */
static inline fp8_dtype fp8_slot_dtype(const struct fp8_layer_plan *plan, enum fp8_slot slot)
{
    return plan->slots[slot] < 0 ? FP8_DTYPE_NONE : plan->buffers[plan->slots[slot]].dtype;
}

/* Whether the transposed copy of a role can be made of the row copy: they share their scales, or
 * those of the rows are equal within 128 of them. */
static inline bool fp8_plan_transposes(const struct fp8_layer_plan *plan, fp8_role role)
{
    const fp8_scaling row = plan->scalings[role][FP8_ROW_COPY];
    if (plan->shard.own_scales && role == FP8_ROLE_W)
        return true;
    return row == plan->scalings[role][FP8_TRANSPOSED_COPY] &&
           (row == FP8_SCALING_TENSOR || row == FP8_SCALING_TILE);
}

static inline const struct fp8_kernel *fp8_dequantize_kernel(const struct fp8_layer_plan *plan,
                                                             fp8_dtype format, fp8_scaling scaling)
{
    return plan->dequantize[format == FP8_DTYPE_E5M2][scaling];
}

/* Memory of a bundle: blocks that only grow and are freed together. */
struct fp8_arena_block;
struct fp8_arena {
    struct fp8_arena_block *blocks;
};
void *fp8_arena_allocate(struct fp8_arena *arena, size_t bytes); /* zeroed; NULL: out of memory */
char *fp8_arena_copy(struct fp8_arena *arena, const char *text);
void fp8_arena_release(struct fp8_arena *arena);

struct fp8_manifest {
    const char *nvrtc; /* "13.0"; NULL: not known */
    int64_t fsdp;      /* ranks that share the weights */
    bool keep;         /* a gathered weight serves backward too; else it is gathered again */
    bool sum;          /* dw is the sum over the ranks, else the average */
    int arch_count;
    const char *archs[FP8_MAX_ARCHS];
    int kernel_count;
    struct fp8_kernel *kernels;
    int layer_count;
    struct fp8_layer_plan *layers;
};

/* manifest.c: the xxh128 of some bytes, as 32 hex digits. */
void fp8_hash_text(const void *data, size_t size, char text[33]);
/* Parses and checks the text of a manifest; `path` names it in messages. Strings and arrays are in
 * the arena, which the caller releases on failure too. FP8_ERR_BUNDLE, FP8_ERR_MEMORY. */
fp8_status fp8_manifest_parse(const char *path, const char *text, size_t length,
                              struct fp8_arena *arena, struct fp8_manifest *manifest);
/* plan_check.c: the steps of a parsed layer touch only what their buffers hold. FP8_ERR_BUNDLE. */
fp8_status fp8_plan_check(const char *path, const struct fp8_layer_plan *plan);

#endif
