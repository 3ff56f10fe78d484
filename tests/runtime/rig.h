/*
 * rig.h - what every test of the public API shares: a device, bundles from spec text, guarded
 * memory, random data, and a float64 reference.
 *
 * The same test runs on the host context and on a GPU; FP8_TEST_DEVICE ("host", "cuda") chooses.
 * Without a GPU a cuda run is skipped (exit code 77) with the reason, unless FP8_TEST_REQUIRE holds
 * "gpu". FP8_TEST_GEMM, or a device "cuda+<word>", forces what computes the products of all
 * bundles:
 * "generated", "cublaslt" or the name of a configuration.
 *
 * All memory that the library sees lies in blocks: exact size, 4 KiB of guard bytes on both sides,
 * filled with a poison byte that spells NaN in every dtype (0xFF) or a large value (0x7E). A block
 * has an image in host memory: tests write the image and push it, pull it and look. Pulling checks
 * the guards and, for tensors, the gaps between rows.
 *
 * What a layer must compute is worked out from the images alone: FP8 bytes and scales with the
 * scalar codec (itself checked against other oracles), GEMMs in float64 on the dequantised
 * operands.
 */
#ifndef RIG_H
#define RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "runtime/fp8.h"
#include "runtime/fp8_primitives.h"
#include "runtime/fp8_jit.h"
#include "runtime/fp8_device.h"
#include "runtime/fp8_state.h"

/* ---- the device ---- */

struct rig {
    bool cuda;
    const char *gemm; /* what computes products, as fp8gen_override takes it; NULL: the plan's */
    const char *templates; /* a folder of templates; NULL: the built-in ones */
    fp8_context *context;
    fp8_stream stream;
    fp8_device_info info;
};
extern struct rig rig;

int rig_main(const char *name, const struct CMUnitTest *tests, size_t count);
#define RIG_RUN(tests) rig_main(#tests, tests, sizeof(tests) / sizeof(tests)[0])

/* The status must be FP8_OK; the library's sentence is part of the failure. */
#define RIG_OK(call) rig_expect((call), FP8_OK, #call, __FILE__, __LINE__)
/* The status must be `want`, with a sentence. */
#define RIG_REFUSED(want, call) rig_expect((call), (want), #call, __FILE__, __LINE__)
void rig_expect(fp8_status got, fp8_status want, const char *call, const char *file, int line);
/* The sentence of the last refusal holds `part`. */
void rig_expect_sentence(const char *part);

/* In a thread of its own a failure cannot end the test: it is printed and counted, and the test
 * asserts at the end that there was none. */
void rig_thread_begin(void);
int rig_thread_failures(void); /* since the last call */

/* Cuts a size on the host, where a full one takes too long, and says so once per call site's
 * name. */
int64_t rig_cut(const char *what, int64_t full, int64_t on_host);

/* ---- random numbers: pure functions of seed and index ---- */

uint64_t rig_hash(uint64_t seed, uint64_t index);
/* [0, limit). Advances the seed. */
int64_t rig_below(uint64_t *seed, int64_t limit);
double rig_normal(uint64_t seed, uint64_t index);

/* ---- guarded memory ---- */

struct rig_block {
    unsigned char *device; /* where the caller's bytes begin */
    unsigned char *image;  /* host copy of the same bytes */
    size_t bytes;
    uint8_t poison;
    void *memory;         /* of fp8_memory_alloc */
    unsigned char *whole; /* host copy of guards and all */
    size_t front, total;
};

/* shift: bytes beyond a 256-byte boundary. The image is all poison. */
void rig_block_make(struct rig_block *block, size_t bytes, size_t shift, uint8_t poison);
void rig_block_push(struct rig_block *block);
void rig_block_pull(struct rig_block *block, const char *name);
void rig_block_free(struct rig_block *block);

/* Memory without an image, for workspaces: tens of MiB that only the library looks into. */
struct rig_scratch {
    unsigned char *device;
    size_t bytes;
    uint8_t poison;
    void *memory;
    size_t capacity;
};

void rig_scratch_make(struct rig_scratch *scratch, size_t bytes, size_t shift, uint8_t poison);
void rig_scratch_poison(struct rig_scratch *scratch, uint8_t poison); /* guards and all */
void rig_scratch_check(struct rig_scratch *scratch, const char *name);
void rig_scratch_free(struct rig_scratch *scratch);
/* Memory of rig.context that the rig kept for the next case. */
void rig_release_kept(void);

struct rig_tensor {
    fp8_tensor t; /* on the device */
    struct rig_block block;
    const char *name;
};

/* Element (i, j) at (i * (cols + gap) + j), `offset` elements beyond a 256-byte boundary. */
void rig_tensor_make(struct rig_tensor *tensor, const char *name, fp8_dtype dtype, int64_t rows,
                     int64_t cols, int64_t gap, int64_t offset, uint8_t poison);
void rig_tensor_push(struct rig_tensor *tensor);
/* Also checks that nothing between the rows changed. */
void rig_tensor_pull(struct rig_tensor *tensor);
/* Pulls and checks that every byte is as it was pushed or pulled last. */
void rig_tensor_unchanged(struct rig_tensor *tensor);
void rig_tensor_free(struct rig_tensor *tensor);
/* Bits of an element of a dtype as its value, and back with one rounding. */
float rig_value(fp8_dtype dtype, uint32_t bits);
uint32_t rig_rounded(fp8_dtype dtype, float value);
float rig_get(const struct rig_tensor *tensor, int64_t i, int64_t j);
void rig_set(struct rig_tensor *tensor, int64_t i, int64_t j,
             float value); /* rounded to the dtype */
void rig_set_all(struct rig_tensor *tensor, float value);
void rig_set_bits(struct rig_tensor *tensor, int64_t i, int64_t j, uint32_t bits);
uint32_t rig_bits(const struct rig_tensor *tensor, int64_t i, int64_t j);

struct rig_operand {
    fp8_operand op;
    struct rig_block block;
};

void rig_operand_make(struct rig_operand *operand, size_t bytes, uint8_t poison);
void rig_operand_free(struct rig_operand *operand);

/* ---- layers ---- */

enum rig_recipe {
    RIG_CURRENT,
    RIG_DELAYED,
    RIG_ROWWISE,
    RIG_ROWWISE_HP_WGRAD,
    RIG_BLOCK,
    RIG_RECIPES
};
extern const char *const rig_recipe_names[RIG_RECIPES];

/* Zero means the default of the spec language, except where noted. */
struct rig_spec {
    enum rig_recipe recipe;
    bool bf16; /* compute = "bf16": no recipe */
    int64_t out_features, in_features;
    int64_t max_tokens; /* 0 = 512 */
    bool bias;
    fp8_dtype weight, output, grad_input, grad_weight;
    bool e4m3, power_of_two; /* e4m3: of current and delayed, the others have nothing else */
    bool fprop_split, dgrad_fast, wgrad_fast;
    int interval; /* 256 or 512, of all passes; 0: as the flags say */
    int64_t
        shards; /* recipe current with a scale for each of so many shards of w; 0: one for all */
};

/* Whether the sums of a pass stay in the tensor cores' accumulators. */
bool rig_is_fast(const struct rig_spec *spec, fp8_pass pass);

struct rig_layer {
    fp8_layer *handle;
    fp8_layer_info info;
    struct rig_spec spec;
};

/* Every recipe, then layers that compute in bf16. */
enum { RIG_KINDS = RIG_RECIPES + 1 };
void rig_set_kind(struct rig_spec *spec, int kind);

struct rig_layers {
    fp8_bundle *bundle;
    char path[256];
    int count;
    struct rig_layer *layer;
};

/* Builds a bundle from spec text for the rig's device ("none" on the host) and opens it. */
void rig_bundle_open(const char *spec_text, char path[256], fp8_bundle **bundle);
void rig_bundle_drop(const char *path, fp8_bundle *bundle);
/* Layers "l0", "l1", ... of one bundle. */
void rig_layers_open(struct rig_layers *layers, const struct rig_spec *specs, int count);
void rig_layers_close(struct rig_layers *layers);
/* Layers that the tests of a program share: opened by the setup of the first, closed by the
 * teardown of the last. */
extern struct rig_layers rig_shared;
int rig_shared_close(void **state);
size_t rig_bytes(const struct rig_layer *layer, int64_t tokens, fp8_bytes which);
/* A workspace for every one of the layers, and a call on rig.stream that has it. */
void rig_workspace_make(struct rig_scratch *workspace, const struct rig_layers *layers,
                        int64_t tokens, uint8_t poison);
fp8_call rig_call(const struct rig_scratch *workspace);

/* ---- a case: one layer, one M, all tensors, forward and backward ---- */

enum rig_name {
    RIG_X,
    RIG_W,
    RIG_BIAS,
    RIG_Y,
    RIG_DY,
    RIG_DX,
    RIG_DW,
    RIG_DBIAS,
    RIG_FOUND_INF,
    RIG_TENSORS
};

struct rig_case {
    /* set by rig_case_init, changed by the test before rig_case_make */
    const struct rig_layer *layer;
    int64_t tokens;
    uint64_t seed;
    uint8_t poison;
    int64_t offset[RIG_TENSORS]; /* elements */
    int64_t gap[RIG_TENSORS];    /* ld - cols */
    size_t workspace_shift;
    bool accumulate;   /* dw and dbias, which begin with what the seed gives */
    bool one_backward; /* fp8_layer_backward instead of three calls */
    bool level;        /* plain normal data: all rows and columns of one size */
    bool centred;      /* data are zero-mean (default); else their mean is their sigma */
    uint64_t version;  /* of the weight */
    fp8_stream stream; /* rig.stream */
    fp8_state *state;  /* made with the case; recipe "delayed" */
    float known[3];    /* the scales of x, w and dy that it holds by the reference */

    /* made */
    struct rig_tensor tensor[RIG_TENSORS];
    struct rig_operand saved, weight, grad;
    struct rig_scratch workspace;
    double error[3];                    /* of y, dx and dw, by rig_case_check */
    unsigned char *before[RIG_TENSORS]; /* images of dw and dbias when they are accumulated into */
};

void rig_case_init(struct rig_case *c, const struct rig_layer *layer, int64_t tokens,
                   uint64_t seed);
/* Allocates and fills: inputs lopsided and random, all else poison. The images may still be
 * changed. */
void rig_case_make(struct rig_case *c);
/* Pushes every image, then quantises the weight, runs forward and backward. With recipe "delayed"
 * there is a step before, so that the scales come from these tensors; it changes `version`. */
void rig_case_run(struct rig_case *c);
/* The parts of rig_case_run. */
void rig_case_push(struct rig_case *c);
fp8_call rig_case_call(const struct rig_case *c);
void rig_case_weight(struct rig_case *c);
void rig_case_fprop(struct rig_case *c);
void rig_case_backward(struct rig_case *c);
/* An optimizer step of recipe "delayed": the images are what was quantised since the last one. */
void rig_case_advance(struct rig_case *c);
/* Pulls everything and checks it: guards, FP8 bytes, scales and pads bit for bit, GEMMs and dbias
 * by the bounds, found_inf, inputs unchanged. */
void rig_case_check(struct rig_case *c);
/* Makes, runs and checks. */
void rig_case_complete(struct rig_case *c);
void rig_case_free(struct rig_case *c);
/* All of the above, from rig_case_init to rig_case_free, for one shape. */
void rig_case_all(const struct rig_layer *layer, int64_t tokens, uint64_t seed, uint8_t poison);

/* ---- the reference ---- */

/* One copy of a tensor: rows along which the product sums, a scale for each group. */
struct rig_copy {
    fp8_scaling scaling; /* FP8_SCALING_NONE: the recipe has no such copy */
    int64_t rows, cols;
    uint8_t *codes; /* [rows][cols] */
    float *inverse; /* scale_inv, [lines][ld] with the padding of its layout; tensor: one */
    int64_t lines, ld;
};

/* A tensor as the recipe quantises it. */
struct rig_quantized {
    int64_t rows, cols;
    bool e4m3;
    float amax, scale, scale_inv; /* tensor scaling */
    bool scale_is_known;          /* it came from elsewhere */
    bool found_inf;
    int64_t shard_rows; /* of the source, that share a scale; 0: by the copies' scaling */
    struct rig_copy row, transposed;
    const struct rig_tensor *source;
};

/* What a recipe gives the copy of an operand, and its format. */
fp8_scaling rig_scaling(const struct rig_spec *spec, fp8_role role, bool transposed);
bool rig_is_e4m3(const struct rig_spec *spec, fp8_role role);
/* Those of FP8_COPY_* that the recipe has for a role. */
uint32_t rig_copies(const struct rig_layer *layer, fp8_role role, uint32_t wanted);
/* One scale for the tensor. */
void rig_quantize(struct rig_quantized *q, const struct rig_tensor *source, bool e4m3,
                  bool power_of_two);
/* By the layer's recipe. known: the scale of a tensor that comes from a state, or NULL. */
void rig_quantize_role(struct rig_quantized *q, const struct rig_layer *layer, fp8_role role,
                       const struct rig_tensor *source, const float *known);
void rig_quantized_free(struct rig_quantized *q);
float rig_scale_inverse(const struct rig_copy *copy, int64_t row, int64_t k);
/* The operand's bytes are those of q, pads are zero; copies as in operand->op.copies. */
void rig_check_operand(const char *name, struct rig_operand *operand,
                       const struct rig_quantized *q);

struct rig_product {
    const char *name;
    const struct rig_quantized *a, *b;
    bool a_transposed, b_transposed; /* contraction along the rows of a (b) */
    bool bf16;                       /* of the tensors themselves */
    const struct rig_tensor *bias;   /* or NULL */
    const struct rig_tensor *out;    /* pulled */
    const unsigned char *before;     /* image of out before accumulation, or NULL */
    bool fast, centred, level;       /* as of the case */
};

/* Frobenius error over all elements, or a sample of them where they are many, and every element by
 * itself. Returns the relative Frobenius error. */
double rig_check_product(const struct rig_product *p);
void rig_check_dbias(const struct rig_case *c);

#endif
