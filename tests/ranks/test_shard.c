/*
 * test_shard.c - quantise my shard, gather by any means, unpack: the bytes of one GPU.
 */
#include <malloc.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/check.h"
#include "runtime/fp8_format.h"
#include "tests/ranks/model_rig.h"

/* Built for the host; one layer a case. */
struct shape {
    const char *name;
    int64_t n, k;
    const char *recipe;
};
static const struct shape shapes[] = {
    { "wide", 4096, 64, "current" },
    { "ten", 10, 128, "current" },
    { "five", 5, 64, "current" },
    { "square", 96, 128, "current" },
    { "odd", 129, 131, "current" },
    { "one", 1, 7, "current" },
    { "tiles", 300, 260, "block" },
    { "tile", 5, 64, "block" },
    { "long", 1000, 2000, "block" },
    { "before", 129, 131, "delayed" },
    { "rows", 300, 260, "rowwise" },
    { "columns", 5, 64, "rowwise" },
    { "half", 129, 131, "rowwise_hp_wgrad" },
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };
static char bundle_path[256];
static fp8_context *context;
static fp8_bundle *bundle;
static fp8_layer *layers[SHAPES];
static char workspace[1 << 21];

static int set_up(void **state)
{
    (void)state;
    (void)mallopt(M_PERTURB, 0x81); /* fresh memory holds 0x7e: pads are poisoned */
    char spec[2048] = "return model \"shapes\" { tokens = 16, layers = {\n";
    for (int i = 0; i < SHAPES; i++)
        sprintf(spec + strlen(spec),
                "linear \"%s\" { in_features = %d, out_features = %d, recipe = recipe.%s {} },\n",
                shapes[i].name, (int)shapes[i].k, (int)shapes[i].n, shapes[i].recipe);
    strcat(spec, "} }\n");
    ranks_bundle(spec, "none", bundle_path);
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    options.device = FP8_DEVICE_HOST;
    assert_int_equal(fp8_context_create(&options, &context), FP8_OK);
    assert_int_equal(fp8_bundle_open(context, bundle_path, &bundle), FP8_OK);
    for (int i = 0; i < SHAPES; i++)
        assert_int_equal(fp8_layer_create(bundle, shapes[i].name, &layers[i]), FP8_OK);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    for (int i = 0; i < SHAPES; i++)
        fp8_layer_destroy(layers[i]);
    fp8_bundle_close(bundle);
    fp8_context_destroy(context);
    ranks_bundle_drop(bundle_path);
    return 0;
}

static void *take(size_t bytes)
{
    void *memory = NULL;
    assert_int_equal(fp8_memory_alloc(context, bytes, &memory), FP8_OK);
    return memory;
}

static fp8_call call(void)
{
    fp8_call made = FP8_CALL_INIT;
    made.workspace = workspace;
    made.workspace_bytes = sizeof workspace;
    return made;
}

static fp8_operand operand_of(int i)
{
    fp8_operand operand = FP8_OPERAND_INIT;
    assert_int_equal(fp8_layer_bytes(layers[i], 0, FP8_BYTES_WEIGHT, &operand.bytes), FP8_OK);
    operand.data = take(operand.bytes);
    return operand;
}

/* The largest element lies in the last row. */
static uint16_t *weight_of(int i)
{
    const int64_t count = shapes[i].n * shapes[i].k;
    uint16_t *w = malloc((size_t)count * sizeof *w);
    for (int64_t j = 0; j < count; j++)
        w[j] = model_value(77 + (uint64_t)i, j);
    w[count - 1] = 0x42a0; /* 80 */
    return w;
}

static bool is_tile(int i)
{
    return strcmp(shapes[i].recipe, "block") == 0;
}

static bool has_rows(int i)
{
    return strncmp(shapes[i].recipe, "rowwise", 7) == 0;
}

/* The layer whose own quantisation a shape is compared with: a delayed weight with a given amax is
 * what current scaling makes of it. */
static int twin_of(int i)
{
    return strcmp(shapes[i].recipe, "delayed") == 0 ? 4 : i;
}

enum { AMAXES = 2048 };

struct cut {
    fp8_shard_kind kind;
    int32_t ranks;
};

/* Shards of all ranks, one behind the other, as a gather leaves them. */
static char *shard_all(int i, const uint16_t *w, struct cut cut, size_t *bytes,
                       fp8_shard_piece *pieces)
{
    const bool rows = cut.kind == FP8_SHARD_ROWS;
    const int64_t unit = rows ? shapes[i].k : 1;
    fp8_sharding sharding = FP8_SHARDING_INIT;
    sharding.kind = cut.kind;
    sharding.ranks = cut.ranks;
    float amax[AMAXES] = { 0 }, mine[AMAXES], largest = 0;
    int64_t amaxes;
    assert_int_equal(fp8_shard_amaxes(layers[i], &amaxes), FP8_OK);
    assert_int_equal(amaxes, strcmp(shapes[i].recipe, "rowwise") == 0 ? shapes[i].k : 1);
    assert_int_equal(fp8_shard_bytes(layers[i], &sharding, bytes), FP8_OK);
    char *all = take(*bytes * (size_t)cut.ranks);
    memset(all, 0x7e, *bytes * (size_t)cut.ranks);
    for (int pass = 0; pass < 2; pass++) {
        for (int32_t rank = 0; rank < cut.ranks; rank++) {
            int64_t first, count, chunk;
            sharding.rank = rank;
            assert_int_equal(fp8_shard_range(layers[i], &sharding, &first, &count, &chunk), FP8_OK);
            assert_true(count <= chunk);
            const fp8_tensor source = { (void *)(uintptr_t)(w + first * unit),
                                        rows ? count : 1,
                                        rows ? unit : count,
                                        rows ? unit : count,
                                        FP8_DTYPE_BF16,
                                        0 };
            for (int64_t j = 0; j < amaxes; j++)
                mine[j] = -1;
            fp8_shard_args args = FP8_SHARD_ARGS_INIT;
            args.sharding = &sharding;
            args.count = count;
            args.source = &source;
            args.call = call();
            args.amax = pass == 0 ? mine : amax;
            args.shard = all + (size_t)rank * *bytes;
            args.shard_bytes = *bytes;
            if (pass == 0) {
                assert_int_equal(fp8_shard_amax(layers[i], &args), FP8_OK);
                for (int64_t j = 0; j < amaxes; j++) {
                    assert_true(mine[j] >= 0);
                    amax[j] = mine[j] > amax[j] ? mine[j] : amax[j];
                }
            } else {
                assert_int_equal(fp8_shard_quantize(layers[i], &args), FP8_OK);
                pieces[rank] = (fp8_shard_piece){ args.shard, first, count };
            }
        }
    }
    for (int64_t j = 0; j < amaxes; j++)
        largest = amax[j] > largest ? amax[j] : largest;
    assert_true(largest == (is_tile(i) ? 0.0f : 80.0f));
    return all;
}

static void compare(int i, struct cut cut)
{
    uint16_t *w = weight_of(i);
    fp8_shard_piece pieces[64];
    size_t bytes;
    const fp8_tensor whole = { w, shapes[i].n, shapes[i].k, shapes[i].k, FP8_DTYPE_BF16, 0 };
    fp8_operand want = operand_of(i), got = operand_of(i);
    fp8_weight_args update = FP8_WEIGHT_ARGS_INIT;
    update.w = &whole;
    update.version = 3;
    update.weight = &want;
    update.call = call();
    memset(got.data, 0x7e, got.bytes);
    memset(want.data, 0x81, want.bytes);
    assert_int_equal(fp8_weight_update(layers[twin_of(i)], &update), FP8_OK);
    char *all = shard_all(i, w, cut, &bytes, pieces);
    fp8_sharding sharding = FP8_SHARDING_INIT;
    sharding.kind = cut.kind;
    sharding.ranks = cut.ranks;
    fp8_unpack_args args = FP8_UNPACK_ARGS_INIT;
    args.sharding = &sharding;
    args.pieces = pieces;
    args.piece_count = (size_t)cut.ranks;
    args.version = 3;
    args.weight = &got;
    args.call = call();
    assert_int_equal(fp8_shard_unpack(layers[i], &args), FP8_OK);
    fp8_operand_view a, b;
    assert_int_equal(fp8_operand_parts(&want, &a), FP8_OK);
    assert_int_equal(fp8_operand_parts(&got, &b), FP8_OK);
    const int64_t n16 = fp8_round_up(shapes[i].n, 16), k16 = fp8_round_up(shapes[i].k, 16);
    if (is_tile(i)) {
        const int64_t down = fp8_ceil_div(shapes[i].n, 128),
                      across = fp8_ceil_div(shapes[i].k, 128);
        assert_memory_equal(a.row_scales, b.row_scales, (size_t)(down * a.row_scales_ld) * 4);
        assert_memory_equal(a.transposed_scales, b.transposed_scales,
                            (size_t)(across * a.transposed_scales_ld) * 4);
    } else if (has_rows(i)) {
        assert_memory_equal(a.row_scales, b.row_scales, (size_t)n16 * 4);
        if (a.transposed_scales)
            assert_memory_equal(a.transposed_scales, b.transposed_scales, (size_t)k16 * 4);
        else
            assert_memory_equal(a.scales, b.scales, 64);
    } else {
        assert_memory_equal(a.scales, b.scales, 64);
    }
    assert_memory_equal(a.row, b.row, (size_t)(n16 * a.row_ld));
    assert_memory_equal(a.transposed, b.transposed, (size_t)(k16 * a.transposed_ld));
    assert_int_equal(got.version, 3);
    assert_int_equal(got.copies, FP8_COPY_BOTH);
    fp8_memory_free(context, all);
    fp8_memory_free(context, want.data);
    fp8_memory_free(context, got.data);
    free(w);
}

static void test_rows(void **state)
{
    (void)state;
    static const int32_t ranks[] = { 1, 2, 3, 4, 5, 8, 64 };
    for (int i = 0; i < SHAPES; i++) {
        for (size_t j = 0; j < sizeof ranks / sizeof ranks[0]; j++)
            compare(i, (struct cut){ FP8_SHARD_ROWS, ranks[j] });
    }
}

static void test_elements(void **state)
{
    (void)state;
    static const int32_t ranks[] = { 1, 2, 3, 7, 8, 64 };
    for (int i = 0; i < SHAPES; i++) {
        for (size_t j = 0; j < sizeof ranks / sizeof ranks[0] && !is_tile(i) && !has_rows(i); j++)
            compare(i, (struct cut){ FP8_SHARD_ELEMENTS, ranks[j] });
    }
}

/* ---- a scale for each shard ---- */

enum { OWN_N = 300, OWN_K = 260 };

/* A bundle of one layer whose w has a scale for each of `ranks` shards. */
static void open_own(int32_t ranks, char path[256], fp8_bundle **own, fp8_layer **layer)
{
    char spec[512];
    snprintf(spec, sizeof spec,
             "return model \"own\" { tokens = 16, mesh = { fsdp = %d }, layers = { linear \"a\" {\n"
             "in_features = %d, out_features = %d,\n"
             "recipe = recipe.current { weight_scale = \"shard\" } } } }\n",
             (int)ranks, OWN_K, OWN_N);
    ranks_bundle(spec, "none", path);
    assert_int_equal(fp8_bundle_open(context, path, own), FP8_OK);
    assert_int_equal(fp8_layer_create(*own, "a", layer), FP8_OK);
}

static fp8_operand own_operand(const fp8_layer *layer)
{
    fp8_operand operand = FP8_OPERAND_INIT;
    assert_int_equal(fp8_layer_bytes(layer, 0, FP8_BYTES_WEIGHT, &operand.bytes), FP8_OK);
    operand.data = take(operand.bytes);
    memset(operand.data, 0x7e, operand.bytes);
    return operand;
}

/* Each shard by its own amax, which nobody else sees. */
static char *own_shards(const fp8_layer *layer, const uint16_t *w, int32_t ranks,
                        fp8_shard_piece *pieces)
{
    fp8_sharding sharding = FP8_SHARDING_INIT;
    size_t bytes;
    sharding.ranks = ranks;
    assert_int_equal(fp8_shard_bytes(layer, &sharding, &bytes), FP8_OK);
    char *all = take(bytes * (size_t)ranks);
    memset(all, 0x7e, bytes * (size_t)ranks);
    for (sharding.rank = 0; sharding.rank < ranks; sharding.rank++) {
        int64_t first, count;
        float amax = -1;
        assert_int_equal(fp8_shard_range(layer, &sharding, &first, &count, NULL), FP8_OK);
        assert_int_equal(first % 128 && count, 0);
        const fp8_tensor source = {
            (void *)(uintptr_t)(w + first * OWN_K), count, OWN_K, OWN_K, FP8_DTYPE_BF16, 0
        };
        fp8_shard_args args = FP8_SHARD_ARGS_INIT;
        args.sharding = &sharding;
        args.count = count;
        args.source = &source;
        args.amax = &amax;
        args.call = call();
        args.shard = all + (size_t)sharding.rank * bytes;
        args.shard_bytes = bytes;
        assert_int_equal(fp8_shard_amax(layer, &args), FP8_OK);
        float largest = 0;
        for (int64_t i = first * OWN_K; i < (first + count) * OWN_K; i++) {
            float value = fp8_bf16_to_float(w[i] & 0x7fff);
            largest = value > largest ? value : largest;
        }
        assert_true(amax == largest);
        assert_int_equal(fp8_shard_quantize(layer, &args), FP8_OK);
        pieces[sharding.rank] = (fp8_shard_piece){ args.shard, first, count };
    }
    return all;
}

static void compare_own(int32_t ranks)
{
    char path[256];
    fp8_bundle *own;
    fp8_layer *layer;
    fp8_shard_piece pieces[64];
    open_own(ranks, path, &own, &layer);
    uint16_t *w = malloc((size_t)(OWN_N * OWN_K) * sizeof *w);
    for (int64_t i = 0; i < OWN_N * OWN_K; i++)
        w[i] =
            fp8_float_to_bf16(fp8_bf16_to_float(model_value(5, i)) * (i / OWN_K < 128   ? 1.0f
                                                                      : i / OWN_K < 256 ? 1e-4f
                                                                                        : 1e-8f));
    const fp8_tensor whole = { w, OWN_N, OWN_K, OWN_K, FP8_DTYPE_BF16, 0 };
    fp8_operand want = own_operand(layer), got = own_operand(layer);
    fp8_weight_args update = FP8_WEIGHT_ARGS_INIT;
    update.w = &whole;
    update.version = 3;
    update.weight = &want;
    update.call = call();
    assert_int_equal(fp8_weight_update(layer, &update), FP8_OK);
    char *all = own_shards(layer, w, ranks, pieces);
    fp8_sharding sharding = FP8_SHARDING_INIT;
    sharding.ranks = ranks;
    fp8_unpack_args args = FP8_UNPACK_ARGS_INIT;
    args.sharding = &sharding;
    args.pieces = pieces;
    args.piece_count = (size_t)ranks;
    args.version = 3;
    args.weight = &got;
    args.call = call();
    assert_int_equal(fp8_shard_unpack(layer, &args), FP8_OK);
    fp8_operand_view a, b;
    assert_int_equal(fp8_operand_parts(&want, &a), FP8_OK);
    assert_int_equal(fp8_operand_parts(&got, &b), FP8_OK);
    assert_memory_equal(a.row_scales, b.row_scales, 304 * sizeof(float));
    assert_memory_equal(a.row, b.row, (size_t)(304 * a.row_ld));
    assert_memory_equal(a.transposed_scales, b.transposed_scales, 3 * 4 * sizeof(float));
    assert_memory_equal(a.transposed, b.transposed, (size_t)(272 * a.transposed_ld));
    assert_true(a.row_scales[0] > 1000 * a.row_scales[299]);
    fp8_memory_free(context, all);
    fp8_memory_free(context, want.data);
    fp8_memory_free(context, got.data);
    free(w);
    fp8_layer_destroy(layer);
    fp8_bundle_close(own);
    ranks_bundle_drop(path);
}

static int says_word(const char *word);

/* FP8 bytes with a scale for each of two stretches: their cut is one of 128 rows, or the transposed
 * copy would have the first one's scale for rows of the other. */
static void test_own_scales_imported(void **state)
{
    (void)state;
    char path[256];
    fp8_bundle *own;
    fp8_layer *layer;
    open_own(3, path, &own, &layer);
    const size_t bytes = OWN_N * OWN_K;
    fp8_operand weight = own_operand(layer);
    uint8_t *q = take(bytes);
    memset(q, 0x38, bytes);
    const fp8_tensor dense = { q, OWN_N, OWN_K, OWN_K, FP8_DTYPE_E4M3, 0 };
    const float scales[] = { 2, 4 };
    int64_t rows[] = { 129, OWN_N - 129 };
    fp8_import_args args = FP8_IMPORT_ARGS_INIT;
    args.q = &dense;
    args.count = 2;
    args.scale_inv = scales;
    args.rows = rows;
    args.version = 1;
    args.weight = &weight;
    args.call = call();
    assert_int_equal(fp8_import(layer, &args), FP8_ERR_SHAPE);
    assert_true(says_word("rows[0] is 129"));
    assert_int_equal(weight.copies, 0);
    rows[0] = 128;
    rows[1] = OWN_N - 128;
    assert_int_equal(fp8_import(layer, &args), FP8_OK);
    fp8_transpose_args turn = FP8_TRANSPOSE_ARGS_INIT;
    turn.operand = &weight;
    turn.call = call();
    assert_int_equal(fp8_transpose(layer, &turn), FP8_OK);
    fp8_operand_view view;
    assert_int_equal(fp8_operand_parts(&weight, &view), FP8_OK);
    for (int64_t i = 0; i < OWN_N; i++) {
        const float want = i < 128 ? 2 : 4;
        assert_true(view.row_scales[i] == want && view.transposed_scales[i / 128] == want);
    }
    fp8_memory_free(context, q);
    fp8_memory_free(context, weight.data);
    fp8_layer_destroy(layer);
    fp8_bundle_close(own);
    ranks_bundle_drop(path);
}

static void test_own_scales(void **state)
{
    (void)state;
    static const int32_t ranks[] = { 2, 3, 8 };
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++)
        compare_own(ranks[i]);
}

static void test_own_scales_refused(void **state)
{
    (void)state;
    char path[256];
    fp8_bundle *own;
    fp8_layer *layer;
    int64_t count;
    size_t bytes;
    float amax = 1;
    open_own(3, path, &own, &layer);
    assert_int_equal(fp8_shard_amaxes(layer, &count), FP8_OK);
    assert_int_equal(count, 1);
    fp8_sharding sharding = FP8_SHARDING_INIT;
    sharding.ranks = 4; /* not those of the bundle */
    assert_int_equal(fp8_shard_bytes(layer, &sharding, &bytes), FP8_ERR_ARGUMENT);
    assert_true(says_word("each of 3 shards"));
    sharding.ranks = 3;
    sharding.kind = FP8_SHARD_ELEMENTS;
    assert_int_equal(fp8_shard_bytes(layer, &sharding, &bytes), FP8_ERR_UNSUPPORTED);
    assert_true(says_word("weight_scale shard"));
    sharding.kind = FP8_SHARD_ROWS;
    fp8_operand weight = own_operand(layer);
    static char shard[1 << 17] __attribute__((aligned(256)));
    const fp8_shard_piece pieces[] = { { shard, 0, 100 }, { shard, 100, 200 } };
    fp8_unpack_args args = FP8_UNPACK_ARGS_INIT;
    args.sharding = &sharding;
    args.pieces = pieces;
    args.piece_count = 2;
    args.version = 1;
    args.weight = &weight;
    args.call = call();
    assert_int_equal(fp8_shard_unpack(layer, &args), FP8_ERR_SHAPE);
    assert_true(says_word("inside a tile of 128 rows"));
    uint16_t *w = calloc((size_t)(OWN_N * OWN_K), sizeof *w);
    const fp8_tensor whole = { w, OWN_N, OWN_K, OWN_K, FP8_DTYPE_BF16, 0 };
    fp8_weight_args update = FP8_WEIGHT_ARGS_INIT;
    update.w = &whole;
    update.amax = &amax; /* of the whole: it has no scale of that */
    update.version = 1;
    update.weight = &weight;
    update.call = call();
    assert_int_equal(fp8_weight_update(layer, &update), FP8_ERR_ARGUMENT);
    assert_true(says_word("no scale of the whole tensor"));
    free(w);
    fp8_memory_free(context, weight.data);
    fp8_layer_destroy(layer);
    fp8_bundle_close(own);
    ranks_bundle_drop(path);
}

static int says_word(const char *word)
{
    return says(word, NULL);
}

static void test_refused(void **state)
{
    (void)state;
    fp8_sharding sharding = FP8_SHARDING_INIT;
    int64_t first;
    size_t bytes;
    sharding.ranks = 0;
    assert_int_equal(fp8_shard_range(layers[0], &sharding, &first, NULL, NULL), FP8_ERR_ARGUMENT);
    sharding.ranks = 4;
    sharding.rank = 4;
    assert_int_equal(fp8_shard_bytes(layers[0], &sharding, &bytes), FP8_ERR_ARGUMENT);
    assert_true(says_word("rank is 4 of 4"));
    sharding.rank = 0;
    sharding.kind = (fp8_shard_kind)2;
    assert_int_equal(fp8_shard_bytes(layers[0], &sharding, &bytes), FP8_ERR_ARGUMENT);
    sharding.kind = FP8_SHARD_ELEMENTS;
    assert_int_equal(fp8_shard_bytes(layers[6], &sharding, &bytes), FP8_ERR_UNSUPPORTED);
    assert_true(says_word("FP8_SHARD_ROWS"));
    assert_int_equal(fp8_shard_bytes(layers[10], &sharding, &bytes), FP8_ERR_UNSUPPORTED);
    assert_true(says_word("scales of rows"));
    sharding.kind = FP8_SHARD_ROWS;
    float amax = 0;
    uint16_t *w = weight_of(1);
    const fp8_tensor source = { w, 3, 128, 128, FP8_DTYPE_BF16, 0 };
    fp8_shard_args args = FP8_SHARD_ARGS_INIT;
    args.sharding = &sharding;
    args.source = &source;
    args.amax = &amax;
    args.call = call();
    args.count = 4; /* chunk is 3 */
    assert_int_equal(fp8_shard_amax(layers[1], &args), FP8_ERR_SHAPE);
    assert_true(says_word("0 to 3 rows"));
    args.count = 2;
    assert_int_equal(fp8_shard_amax(layers[1], &args), FP8_ERR_SHAPE);
    args.count = 3;
    args.amax = NULL;
    assert_int_equal(fp8_shard_amax(layers[1], &args), FP8_ERR_ARGUMENT);
    args.amax = &amax;
    char shard[1024];
    args.shard = shard;
    args.shard_bytes = 8;
    fp8_status status = fp8_shard_quantize(layers[1], &args);
    assert_true(status == FP8_ERR_SHAPE || status == FP8_ERR_ALIGNMENT);
    args.call.workspace_bytes = 16;
    assert_int_equal(fp8_shard_amax(layers[1], &args), FP8_ERR_WORKSPACE);
    args.call = call();
    args.call.state = (const fp8_state *)(const void *)&args; /* not looked into */
    assert_int_equal(fp8_shard_amax(layers[1], &args), FP8_ERR_ARGUMENT);
    assert_true(says_word("call.state is given, but shards"));
    free(w);
}

static void test_pieces_refused(void **state)
{
    (void)state;
    fp8_sharding sharding = FP8_SHARDING_INIT;
    fp8_operand weight = operand_of(1);
    static char shard[4096] __attribute__((aligned(256)));
    fp8_shard_piece pieces[] = { { shard, 0, 5 }, { shard, 6, 4 } };
    fp8_unpack_args args = FP8_UNPACK_ARGS_INIT;
    sharding.ranks = 2;
    args.sharding = &sharding;
    args.pieces = pieces;
    args.piece_count = 2;
    args.version = 1;
    args.weight = &weight;
    args.call = call();
    assert_int_equal(fp8_shard_unpack(layers[1], &args), FP8_ERR_SHAPE);
    assert_true(says_word("end at 5 of 10"));
    args.piece_count = 1;
    assert_int_equal(fp8_shard_unpack(layers[1], &args), FP8_ERR_SHAPE);
    assert_true(says_word("hold 5 rows"));
    pieces[0].count = 10; /* more than a shard holds */
    assert_int_equal(fp8_shard_unpack(layers[1], &args), FP8_ERR_SHAPE);
    assert_true(says_word("over 2 ranks holds at most 5"));
    pieces[0].count = 5;
    pieces[1].first = 5;
    pieces[1].count = 5;
    args.piece_count = 2;
    args.version = 0;
    assert_int_equal(fp8_shard_unpack(layers[1], &args), FP8_ERR_ARGUMENT);
    assert_int_equal(weight.copies, 0);
    fp8_memory_free(context, weight.data);
}

/* A model whose creation runs out of memory anywhere leaves nothing behind; steps allocate
 * nothing. */
static void test_no_memory(void **state)
{
    (void)state;
    fp8_comm_options alone = FP8_COMM_OPTIONS_INIT;
    fp8_comm *comm = NULL;
    fp8_model_layer model_layers[2] = { FP8_MODEL_LAYER_INIT, FP8_MODEL_LAYER_INIT };
    fp8_model_options options = FP8_MODEL_OPTIONS_INIT;
    assert_int_equal(fp8_comm_create(context, &alone, &comm), FP8_OK);
    model_layers[0].layer = layers[1];
    model_layers[1].layer = layers[2];
    options.layer_count = 2;
    options.layers = model_layers;
    options.context = context;
    options.comm = comm;
    fp8_model *model = NULL;
    int failures = 0;
    for (int n = 1; n < 40 && !model; n++) {
        (void)fp8_allocation_fail_at(n);
        fp8_status status = fp8_model_create(&options, &model);
        (void)fp8_allocation_fail_at(0);
        assert_true(status == FP8_OK || (status == FP8_ERR_MEMORY && !model));
        failures += status != FP8_OK;
    }
    assert_non_null(model);
    assert_true(failures >= 6);
    uint16_t *w[] = { weight_of(1), weight_of(2) };
    const fp8_tensor tensors[] = { { w[0], 10, 128, 128, FP8_DTYPE_BF16, 0 },
                                   { w[1], 5, 64, 64, FP8_DTYPE_BF16, 0 } };
    fp8_model_update_args update = FP8_MODEL_UPDATE_ARGS_INIT;
    update.w = tensors;
    update.call = call();
    const fp8_call own = call();
    for (uint64_t step = 1; step < 4; step++) {
        const fp8_operand *weight;
        if (step == 2) /* the first may make what the backend keeps */
            (void)fp8_allocation_fail_at(0);
        update.version = step;
        assert_int_equal(fp8_model_update(model, &update), FP8_OK);
        assert_int_equal(fp8_model_acquire(model, 1, FP8_PASS_DGRAD, &own, &weight), FP8_OK);
        assert_int_equal(weight->copies, FP8_COPY_BOTH);
        assert_int_equal(fp8_model_update(model, &update), FP8_OK); /* the same version */
        update.version = step + 1;
        assert_int_equal(fp8_model_update(model, &update), FP8_ERR_ARGUMENT);
        assert_true(says_word("release it first"));
        assert_int_equal(fp8_model_release(model, 1, NULL), FP8_OK);
        assert_int_equal(fp8_model_release(model, 1, NULL), FP8_ERR_ARGUMENT);
    }
    assert_int_equal(fp8_allocation_fail_at(0), 0);
    fp8_model_destroy(model);
    fp8_comm_destroy(comm);
    free(w[0]);
    free(w[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_elements),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_pieces_refused),
        cmocka_unit_test(test_own_scales),
        cmocka_unit_test(test_own_scales_refused),
        cmocka_unit_test(test_own_scales_imported),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
