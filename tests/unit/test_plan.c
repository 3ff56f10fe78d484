/*
 * test_plan.c - what a plan must be whatever the spec: complete, consistent, minimal, deterministic.
 *
 * The exact text of some plans is in tests/golden. Here every plan is walked by the rules of
 * runtime/bundle_format.h, and each field of a spec is flipped once.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "gen/internal.h"
#include "runtime/bundle_format.h"

#define ONE_LAYER "in_features = 1000, out_features = 2556, bias = true, "

/* A model of one layer with these fields. */
static fp8gen *open_fields(const char *fields)
{
    char text[2048];
    fp8gen *gen;
    int size = snprintf(text, sizeof(text),
                        "return model \"m\" { layers = { linear \"a\" { %s } } }", fields);
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    if (fp8gen_load_text(gen, "test.lua", text, (size_t)size) != FP8GEN_OK)
        fail_msg("%s\n%s", text, fp8gen_diagnostics(gen));
    return gen;
}

static const char *plan_text(fp8gen *gen)
{
    const char *json;
    if (fp8gen_plan(gen, &json) != FP8GEN_OK)
        fail_msg("%s", fp8gen_diagnostics(gen));
    return json;
}

/* The caller frees it. */
static json_t *plan_of(const char *fields)
{
    fp8gen *gen = open_fields(fields);
    json_t *plan = json_loads(plan_text(gen), JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(plan);
    fp8gen_close(gen);
    return plan;
}

static json_t *first_layer(json_t *plan)
{
    return json_array_get(json_object_get(plan, "layers"), 0);
}

static json_t *named(const json_t *list, const char *name)
{
    size_t i;
    json_t *item;
    json_array_foreach(list, i, item) if (strcmp(json_string_value(json_object_get(item, "name")),
                                                 name) == 0) return item;
    return NULL;
}

static const char *string_of(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    if (text == NULL)
        fail_msg("no text '%s'", key);
    return text;
}

/* ---- the rules of the format ----------------------------------------------------------------------- */

struct arg {
    const char *name, *type;
};
#define TYPE_POINTER "pointer"
#define TYPE_INT64 "int64"
#define TYPE_INT32 "int32"
#define ARG(name, type) { #name, TYPE_##type },
#define OP(NAME, name, ARGS) { name, { ARGS(ARG){ NULL, NULL } } },
static const struct {
    const char *name;
    struct arg args[FP8_OP_MAX_ARGS + 1];
} ops[] = { FP8_OPS(OP) };

static const struct arg *args_of(const char *op)
{
    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++)
        if (strcmp(ops[i].name, op) == 0)
            return ops[i].args;
    fail_msg("unknown op %s", op);
    return NULL;
}

static size_t count_of(const struct arg *args)
{
    size_t n = 0;
    while (args[n].name != NULL)
        n++;
    return n;
}

static json_int_t integer_of(const json_t *object, const char *key)
{
    json_t *value = json_object_get(object, key);
    if (!json_is_integer(value))
        fail_msg("no number '%s'", key);
    return json_integer_value(value);
}

/* The arguments of the op, in its order; a template may leave some out. */
static void check_args(const json_t *kernel, const struct arg *args)
{
    json_t *list = json_object_get(kernel, "args");
    size_t at = 0;
    for (size_t i = 0; args[i].name != NULL && at < json_array_size(list); i++) {
        if (strcmp(string_of(json_array_get(list, at), "name"), args[i].name) != 0)
            continue;
        assert_string_equal(string_of(json_array_get(list, at), "type"), args[i].type);
        at++;
    }
    assert_int_equal(at, json_array_size(list));
    assert_in_range(at, count_of(args) - 2, count_of(args));
}

/* Parameter and box of a tensor map. */
static void check_box(const json_t *kernel, size_t arg, json_int_t inner, json_int_t outer)
{
    json_t *box = json_object_get(json_array_get(json_object_get(kernel, "args"), arg), "box");
    assert_int_equal(json_array_size(box), 2);
    assert_int_equal(json_integer_value(json_array_get(box, 0)), inner);
    assert_int_equal(json_integer_value(json_array_get(box, 1)), outer);
    assert_true(inner <= FP8_BOX_ROW_BYTES && outer <= FP8_BOX_ROWS);
}

static void check_gemm_kernel(const json_t *kernel)
{
    static const struct arg args[] = {
        { "a", "tensor_map" },
        { "b", "tensor_map" },
        { "out", "tensor_map" },
        { "a_scales", "pointer" },
        { "b_scales", "pointer" },
        { "bias", "pointer" },
        { "out", "pointer" },
        { "out_ld", "int64" },
        { "rows", "int64" },
        { "cols", "int64" },
        { "depth", "int64" },
        { FP8_ARG_OUT_BY_MAP, "int32" },
        { NULL, NULL },
    };
    json_t *parameters = json_object_get(kernel, "parameters");
    json_t *semantics = json_object_get(kernel, "semantics"),
           *grid = json_object_get(kernel, "grid");
    json_int_t bm = integer_of(parameters, "bm"), bn = integer_of(parameters, "bn");
    json_int_t cluster = integer_of(kernel, "cluster"), stages = integer_of(parameters, "stages");
    bool add = json_is_true(json_object_get(semantics, "accumulate"));
    bool wide = add || strcmp(string_of(semantics, "target_dtype"), "fp32") == 0;
    check_args(kernel, args);
    check_box(kernel, 0, 128, bm);
    check_box(kernel, 1, 128, bn / cluster);
    check_box(kernel, 2, wide ? 32 : 64, 64);
    assert_string_equal(string_of(grid, "rule"), "clusters");
    assert_int_equal(integer_of(grid, "tile_rows"), bm * cluster);
    assert_int_equal(integer_of(grid, "tile_cols"), bn);
    assert_int_equal(integer_of(parameters, "cluster"), cluster);
    assert_int_equal(integer_of(kernel, "block"), 384);
    json_int_t shared = integer_of(kernel, "shared_bytes");
    assert_int_equal(shared, stages * (bm + bn) * 128 + 32768 + 16 * stages + 16);
    assert_true(shared <= 227 * 1024);
    json_t *archs = json_object_get(kernel, "archs");
    assert_int_equal(json_array_size(archs), 1);
    assert_string_equal(json_string_value(json_array_get(archs, 0)), "sm_90a");
    assert_string_equal(string_of(parameters, "a_format"), string_of(semantics, "source_dtype"));
    assert_string_equal(string_of(parameters, "b_format"), string_of(semantics, "second_dtype"));
    assert_string_equal(string_of(parameters, "target"), string_of(semantics, "target_dtype"));
    assert_int_equal(json_is_true(json_object_get(parameters, "add")), add);
}

static void check_kernel(const json_t *kernels, const json_t *kernel)
{
    const char *name = string_of(kernel, "name");
    assert_ptr_equal(named(kernels, name), kernel); /* unique */
    const char *op = string_of(kernel, "op");
    json_t *grid = json_object_get(kernel, "grid");
    if (strcmp(op, "gemm") == 0) {
        check_gemm_kernel(kernel);
    } else {
        check_args(kernel, args_of(op));
        assert_int_equal(integer_of(kernel, "cluster"), 1);
        assert_null(json_object_get(kernel, "archs"));
        assert_true(json_is_boolean(json_object_get(grid, "persistent")));
    }
    char entry[128];
    snprintf(entry, sizeof(entry), "fp8_%s", name);
    assert_string_equal(string_of(kernel, "entry"), entry);
    assert_string_equal(string_of(json_object_get(kernel, "parameters"), "entry"), entry);
    assert_true(json_is_object(json_object_get(kernel, "semantics")));
}

/* A value of a step: a number, null, a word, or a buffer that is there. */
static void check_value(const json_t *buffers, const struct arg *arg, const json_t *value)
{
    bool pointer = strcmp(arg->type, TYPE_POINTER) == 0;
    assert_non_null(value);
    if (json_is_null(value)) {
        assert_true(pointer);
        return;
    }
    if (json_is_integer(value)) {
        assert_false(pointer);
        return;
    }
    const char *text = json_string_value(value);
    assert_non_null(text);
    if (strcmp(text, "M") == 0 || strcmp(text, "accumulate") == 0) {
        assert_false(pointer);
        return;
    }
    char name[128];
    snprintf(name, sizeof(name), "%s", text);
    char *dot = strchr(name, '.');
    assert_true(pointer == (dot == NULL));
    if (dot != NULL) {
        *dot = '\0';
        assert_true(strcmp(dot + 1, "ld") == 0 || strcmp(dot + 1, "rows") == 0);
    }
    if (named(buffers, name) == NULL)
        fail_msg("there is no buffer %s", name);
}

static void check_store(const json_t *kernels, const json_t *store)
{
    const char *key;
    json_t *way;
    assert_int_equal(json_object_size(store), 2);
    json_object_foreach((json_t *)store, key, way)
    {
        if (json_is_null(way))
            continue;
        json_t *kernel = named(kernels, string_of(way, "kernel"));
        assert_non_null(kernel);
        json_t *semantics = json_object_get(kernel, "semantics");
        assert_string_equal(string_of(semantics, "source_dtype"), string_of(way, "stage_dtype"));
        assert_int_equal(json_is_true(json_object_get(semantics, "accumulate")),
                         strcmp(key, "accumulate") == 0);
    }
}

static void check_generated(const json_t *kernels, const json_t *step, const json_t *choice,
                            const char *key, bool accumulate)
{
    json_t *kernel = named(kernels, string_of(choice, key));
    assert_non_null(kernel);
    json_t *semantics = json_object_get(kernel, "semantics");
    json_t *partials = json_object_get(json_object_get(kernel, "parameters"), "partials");
    assert_string_equal(string_of(kernel, "op"), "gemm");
    assert_string_equal(string_of(semantics, "source_dtype"), string_of(step, "a_dtype"));
    assert_string_equal(string_of(semantics, "second_dtype"), string_of(step, "b_dtype"));
    assert_string_equal(string_of(semantics, "target_dtype"), string_of(step, "out_dtype"));
    assert_int_equal(json_is_true(json_object_get(semantics, "accumulate")), accumulate);
    assert_int_equal(json_integer_value(partials) == 0,
                     strcmp(string_of(step, "accumulation"), "fast") == 0);
}

/* cublaslt last and only there; a generated kernel for both ways where the pass has both. */
static void check_choices(const json_t *kernels, const json_t *step, const json_t *choices)
{
    size_t i, count = json_array_size(choices);
    json_t *choice;
    bool accumulates = json_is_string(json_object_get(json_object_get(step, "args"), "accumulate"));
    assert_true(count > 0);
    json_array_foreach(choices, i, choice)
    {
        bool last = i + 1 == count;
        assert_string_equal(string_of(choice, "backend"), last ? "cublaslt" : "generated");
        assert_true(strlen(string_of(choice, "reason")) > 20);
        assert_true(json_real_value(json_object_get(choice, "seconds")) > 0);
        if (last)
            continue;
        check_generated(kernels, step, choice, "kernel", false);
        if (accumulates)
            check_generated(kernels, step, choice, "accumulate_kernel", true);
        else
            assert_true(json_is_null(json_object_get(choice, "accumulate_kernel")));
    }
}

static void check_dispatch(const json_t *kernels, const json_t *step, json_int_t max_tokens)
{
    json_int_t next = 1;
    size_t i;
    json_t *range;
    json_array_foreach(json_object_get(step, "dispatch"), i, range)
    {
        assert_int_equal(json_integer_value(json_object_get(range, "min_tokens")), next);
        next = json_integer_value(json_object_get(range, "max_tokens")) + 1;
        assert_true(strlen(string_of(range, "dtype")) > 5);
        check_choices(kernels, step, json_object_get(range, "choices"));
    }
    assert_int_equal(next, max_tokens + 1);
}

static void check_gemm(const json_t *kernels, const json_t *layer, const json_t *step)
{
    static const char *const buffers[] = { "stage", "gemm_workspace" };
    json_t *list = json_object_get(layer, "buffers");
    for (size_t i = 0; i < 2; i++) {
        json_t *buffer = named(list, string_of(step, buffers[i]));
        assert_non_null(buffer);
        assert_string_equal(string_of(buffer, "object"), "workspace");
    }
    bool biased = json_is_string(json_object_get(json_object_get(step, "args"), "bias"));
    assert_int_equal(json_is_string(json_object_get(step, "stage_bias")), biased);
    json_t *out = named(list, string_of(json_object_get(step, "args"), "out"));
    assert_string_equal(string_of(out, "dtype"), string_of(step, "out_dtype"));
    check_store(kernels, json_object_get(step, "store"));
    check_dispatch(kernels, step, json_integer_value(json_object_get(layer, "max_tokens")));
}

static void check_step(const json_t *kernels, const json_t *layer, const json_t *step)
{
    const char *op = string_of(step, "op");
    const struct arg *args = args_of(op);
    json_t *values = json_object_get(step, "args");
    assert_int_equal(json_object_size(values), count_of(args));
    for (size_t i = 0; args[i].name != NULL; i++)
        check_value(json_object_get(layer, "buffers"), &args[i],
                    json_object_get(values, args[i].name));
    if (strcmp(op, "gemm") == 0) {
        check_gemm(kernels, layer, step);
        return;
    }
    assert_true(strlen(string_of(step, "reason")) > 20);
    json_t *kernel = named(kernels, string_of(step, "kernel"));
    assert_non_null(kernel);
    assert_string_equal(string_of(kernel, "op"), op);
}

static void check_layer(const json_t *kernels, const json_t *layer)
{
    static const char *const passes[] = { "weight", "fprop", "quantize_dy", "wgrad", "dgrad" };
    json_t *list = json_object_get(layer, "passes"), *buffers = json_object_get(layer, "buffers");
    size_t i, j;
    json_t *item;
    assert_int_equal(json_object_size(list), 5);
    for (i = 0; i < 5; i++) {
        json_t *steps = json_object_get(list, passes[i]);
        assert_true(json_array_size(steps) > 0);
        json_array_foreach(steps, j, item) check_step(kernels, layer, item);
        assert_true(json_is_object(json_object_get(json_object_get(layer, "cost"), passes[i])));
    }
    json_array_foreach(buffers, i, item)
        assert_ptr_equal(named(buffers, string_of(item, "name")), item);
}

/* Whether the name appears as a text anywhere in the value. */
static bool mentions(const json_t *value, const char *name)
{
    const char *key;
    size_t i;
    json_t *part;
    if (json_is_string(value))
        return strcmp(json_string_value(value), name) == 0;
    json_object_foreach((json_t *)value, key, part) if (mentions(part, name)) return true;
    json_array_foreach(value, i, part) if (mentions(part, name)) return true;
    return false;
}

static void check_plan(const json_t *plan)
{
    size_t i;
    json_t *item, *kernels = json_object_get(plan, "kernels");
    assert_string_equal(string_of(plan, "format"), FP8_BUNDLE_FORMAT);
    assert_int_equal(json_integer_value(json_object_get(plan, "format_version")),
                     FP8_BUNDLE_FORMAT_VERSION);
    assert_int_equal(strlen(string_of(plan, "spec_hash")), 32);
    json_array_foreach(kernels, i, item)
    {
        check_kernel(kernels, item);
        if (!mentions(json_object_get(plan, "layers"), string_of(item, "name")))
            fail_msg("no layer needs %s", string_of(item, "name"));
    }
    json_array_foreach(json_object_get(plan, "layers"), i, item) check_layer(kernels, item);
}

/* ---- tests ----------------------------------------------------------------------------------------- */

static const char *const variants[] = {
    ONE_LAYER,
    ONE_LAYER "weight = \"fp32\"",
    ONE_LAYER "output = \"fp32\", grad_input = \"fp32\", grad_weight = \"bf16\"",
    ONE_LAYER "recipe = recipe.current { format = \"e4m3\" }",
    ONE_LAYER "recipe = recipe.current { power_of_two = true }",
    ONE_LAYER "accumulation = { fprop = \"split\", dgrad = \"fast\", wgrad = \"fast\" }",
    ONE_LAYER "tokens = 17, max_tokens = 18",
    ONE_LAYER "count = 7",
    ONE_LAYER "output = \"fp16\", grad_input = \"fp16\", grad_weight = \"fp16\"",
    "in_features = 1000, out_features = 2556",
    "in_features = 1, out_features = 1, max_tokens = 8192",
    "in_features = 16384, out_features = 106496, tokens = 1, max_tokens = 1000000",
};
enum { VARIANTS = sizeof(variants) / sizeof(variants[0]) };

static void test_rules(void **state)
{
    (void)state;
    for (size_t i = 0; i < VARIANTS; i++) {
        json_t *plan = plan_of(variants[i]);
        check_plan(plan);
        json_decref(plan);
    }
}

/* C33: each flip of a field shows; and the same spec gives the same text every time. */
static void test_flips_and_determinism(void **state)
{
    (void)state;
    fp8gen *gens[VARIANTS];
    for (size_t i = 0; i < VARIANTS; i++) {
        gens[i] = open_fields(variants[i]);
        fp8gen *again = open_fields(variants[i]);
        assert_string_equal(plan_text(gens[i]), plan_text(again));
        fp8gen_close(again);
        for (size_t j = 0; j < i; j++)
            assert_string_not_equal(plan_text(gens[i]), plan_text(gens[j]));
    }
    for (size_t i = 0; i < VARIANTS; i++)
        fp8gen_close(gens[i]);
}

/* Kernels whose names begin so. */
static size_t count_named(const json_t *kernels, const char *beginning)
{
    size_t i, count = 0;
    json_t *kernel;
    json_array_foreach(kernels, i, kernel) count +=
        strncmp(string_of(kernel, "name"), beginning, strlen(beginning)) == 0;
    return count;
}

/* The name of a GEMM is a beginning: which configurations are best is not told here. */
static void expect_kernels(const char *fields, const char *const *names)
{
    json_t *plan = plan_of(fields), *kernels = json_object_get(plan, "kernels");
    size_t count = 0, wanted_gemms = 0;
    for (; names[count] != NULL; count++) {
        bool gemm = strncmp(names[count], "gemm_", 5) == 0;
        wanted_gemms += gemm;
        if (gemm ? count_named(kernels, names[count]) != 1 : named(kernels, names[count]) == NULL)
            fail_msg("no kernel %s", names[count]);
    }
    size_t gemms = count_named(kernels, "gemm_");
    assert_int_equal(json_array_size(kernels) - gemms, count - wanted_gemms);
    json_decref(plan);
}

static void test_only_what_is_needed(void **state)
{
    (void)state;
    const char *const biased[] = { "amax_bf16",
                                   "amax_dbias_bf16",
                                   "quantize_bf16_e4m3",
                                   "quantize_bf16_e5m2",
                                   "store_bf16_bf16",
                                   "store_fp32_fp32",
                                   "store_fp32_fp32_add",
                                   "dequantize_e4m3",
                                   "dequantize_e5m2",
                                   "gemm_e4m3_e4m3_bf16_",
                                   "gemm_e5m2_e4m3_bf16_",
                                   "gemm_e5m2_e4m3_fp32_add_",
                                   NULL };
    expect_kernels("in_features = 4096, out_features = 4096, bias = true", biased);
    const char *const small[] = { "amax_bf16",
                                  "quantize_bf16_e4m3_pow2",
                                  "store_bf16_bf16",
                                  "store_fp32_bf16",
                                  "store_fp32_bf16_add",
                                  "dequantize_e4m3",
                                  NULL };
    expect_kernels("in_features = 8, out_features = 8, grad_weight = \"bf16\", "
                   "recipe = recipe.current { format = \"e4m3\", power_of_two = true }",
                   small);
    json_t *plan = plan_of("in_features = 8, out_features = 8");
    json_t *buffers = json_object_get(first_layer(plan), "buffers");
    const char *const absent[] = { "bias", "dbias", "bias_stage", "dbias_partials" };
    for (size_t i = 0; i < 4; i++)
        assert_null(named(buffers, absent[i]));
    json_decref(plan);
}

static void test_equal_kernels_are_shared(void **state)
{
    (void)state;
    static const char text[] = "return model \"m\" { layers = {\n"
                               " linear \"a\" { in_features = 4096, out_features = 4096 },\n"
                               " linear \"b\" { in_features = 4000, out_features = 4095 } } }";
    fp8gen *gen;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(fp8gen_load_text(gen, "t.lua", text, sizeof(text) - 1), FP8GEN_OK);
    json_t *two = json_loads(plan_text(gen), 0, NULL);
    json_t *one = plan_of("in_features = 4096, out_features = 4096");
    assert_true(json_equal(json_object_get(two, "kernels"), json_object_get(one, "kernels")));
    assert_int_equal(json_array_size(json_object_get(two, "layers")), 2);
    json_decref(one);
    json_decref(two);
    fp8gen_close(gen);
}

static json_int_t number_of(const json_t *layer, const char *buffer, const char *key)
{
    json_t *dim = json_object_get(named(json_object_get(layer, "buffers"), buffer), key);
    assert_true(json_is_integer(dim));
    return json_integer_value(dim);
}

static void expect_dim(const json_t *layer, const char *buffer, const char *key, const char *dim)
{
    json_t *wanted = json_loads(dim, 0, NULL);
    assert_non_null(wanted);
    assert_true(
        json_equal(json_object_get(named(json_object_get(layer, "buffers"), buffer), key), wanted));
    json_decref(wanted);
}

static void test_sizes(void **state)
{
    (void)state;
    json_t *plan = plan_of(ONE_LAYER), *layer = first_layer(plan); /* K 1000, N 2556 */
    assert_int_equal(number_of(layer, "x_row", "cols"), 1024);
    expect_dim(layer, "x_row", "rows", "{\"of\": \"M\", \"pad\": 16}");
    assert_int_equal(number_of(layer, "x_transposed", "rows"), 1008);
    expect_dim(layer, "x_transposed", "cols", "{\"of\": \"M\", \"pad\": 128}");
    assert_int_equal(number_of(layer, "w_row", "rows"), 2560);
    assert_int_equal(number_of(layer, "w_row", "cols"), 1024);
    assert_int_equal(number_of(layer, "w_transposed", "rows"), 1008);
    assert_int_equal(number_of(layer, "w_transposed", "cols"), 2560);
    assert_int_equal(number_of(layer, "dy_row", "cols"), 2560);
    assert_int_equal(number_of(layer, "dy_scales", "cols"), FP8_SCALES_COUNT);
    expect_dim(layer, "dbias_partials", "rows", "{\"of\": \"M\", \"div\": 128}");
    assert_int_equal(number_of(layer, "dbias_partials", "cols"), 2560);
    assert_int_equal(number_of(layer, "bias_stage", "cols"), 2560);
    /* Rows of a stage are multiples of 128 bytes, and at most 64 MiB of them. */
    assert_int_equal(number_of(layer, "y_stage", "cols"), 2560);
    expect_dim(layer, "y_stage", "rows", "{\"of\": \"M\", \"max\": 13107}");
    assert_int_equal(number_of(layer, "dw_stage", "cols"), 1024);
    assert_int_equal(number_of(layer, "dw_stage", "rows"), 2556);
    json_decref(plan);
    plan = plan_of("in_features = 20000000, out_features = 3");
    expect_dim(first_layer(plan), "dx_stage", "rows", "{\"of\": \"M\", \"max\": 1}");
    json_decref(plan);
}

static void expect_ranges(const char *fields, size_t count)
{
    json_t *plan = plan_of(fields);
    json_t *step =
        json_array_get(json_object_get(json_object_get(first_layer(plan), "passes"), "dgrad"), 0);
    assert_int_equal(json_array_size(json_object_get(step, "dispatch")), count);
    check_plan(plan);
    json_decref(plan);
}

static void test_ranges(void **state)
{
    (void)state;
    expect_ranges("in_features = 8, out_features = 8, tokens = 1, max_tokens = 1", 1);
    expect_ranges("in_features = 8, out_features = 8, tokens = 1, max_tokens = 16", 1);
    expect_ranges("in_features = 8, out_features = 8, tokens = 1, max_tokens = 17", 2);
    expect_ranges("in_features = 8, out_features = 8, tokens = 1, max_tokens = 4096", 5);
    expect_ranges("in_features = 8, out_features = 8, tokens = 1, max_tokens = 4097", 6);
}

static void test_cost(void **state)
{
    (void)state;
    json_t *plan = plan_of("in_features = 1024, out_features = 2048, tokens = 256");
    json_t *cost = json_object_get(first_layer(plan), "cost");
    struct {
        const char *pass;
        json_int_t bytes, flops;
    } wanted[] = {
        { "weight", 6 * 2048 * 1024, 0 },
        { "fprop", 6 * 256 * 1024 + (256 + 2048) * 1024 + 2 * 256 * 2048, 2LL * 256 * 1024 * 2048 },
        { "quantize_dy", 6 * 256 * 2048, 0 },
        { "wgrad", (1024 + 2048) * 256 + 4 * 1024 * 2048, 2LL * 256 * 1024 * 2048 },
        { "dgrad", (256 + 1024) * 2048 + 2 * 256 * 1024, 2LL * 256 * 1024 * 2048 },
    };
    for (size_t i = 0; i < 5; i++) {
        json_t *pass = json_object_get(cost, wanted[i].pass);
        assert_int_equal(json_integer_value(json_object_get(pass, "bytes")), wanted[i].bytes);
        assert_int_equal(json_integer_value(json_object_get(pass, "flops")), wanted[i].flops);
        double seconds = json_real_value(json_object_get(pass, "seconds"));
        assert_true(seconds > 1e-6 && seconds < 1e-3);
    }
    json_decref(plan);
}

/* Products that 64 bits do not hold; the plan has six digits of them. */
static void test_cost_of_huge_layers(void **state)
{
    (void)state;
    json_t *plan =
        plan_of("in_features = 2097152, out_features = 2097152, tokens = 1048576, bias = true");
    json_t *cost = json_object_get(first_layer(plan), "cost");
    double flops = json_number_value(json_object_get(json_object_get(cost, "fprop"), "flops"));
    assert_true(fabs(flops / 0x1p63 - 1) < 1e-5);
    json_decref(plan);
    plan = plan_of("in_features = 268435456, out_features = 268435456, tokens = 268435456");
    cost = json_object_get(first_layer(plan), "cost");
    flops = json_number_value(json_object_get(json_object_get(cost, "wgrad"), "flops"));
    assert_true(fabs(flops / 0x1p85 - 1) < 1e-5);
    double bytes = json_number_value(json_object_get(json_object_get(cost, "wgrad"), "bytes"));
    assert_true(fabs(bytes / 0x1.8p58 - 1) < 1e-5);
    json_decref(plan);
}

static void test_expand(void **state)
{
    (void)state;
    fp8gen *gen = open_fields(ONE_LAYER);
    json_t *plan = json_loads(plan_text(gen), 0, NULL), *kernel;
    const char *name, *text;
    size_t i;
    json_array_foreach(json_object_get(plan, "kernels"), i, kernel)
    {
        assert_int_equal(fp8gen_expand(gen, (int32_t)i, &name, &text), FP8GEN_OK);
        assert_string_equal(name, string_of(kernel, "name"));
        assert_non_null(strstr(text, string_of(kernel, "entry")));
        assert_int_equal(strncmp(text, "// Made by fp8gen 0.1.0 from the template ", 42), 0);
        assert_non_null(strstr(text, "\n#line 1 \""));
        assert_null(strchr(text, '$'));
    }
    assert_int_equal(fp8gen_expand(gen, (int32_t)i, &name, &text), FP8GEN_OK);
    assert_null(name);
    assert_null(text);
    assert_int_equal(fp8gen_expand(gen, -1, &name, &text), FP8GEN_ERR_ARGUMENT);
    json_decref(plan);
    fp8gen_close(gen);
}

static void test_without_model(void **state)
{
    (void)state;
    fp8gen *gen;
    const char *json, *name, *text;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_not_equal(fp8gen_plan(gen, &json), FP8GEN_OK);
    assert_null(json);
    assert_int_not_equal(fp8gen_expand(gen, 0, &name, &text), FP8GEN_OK);
    assert_true(strlen(fp8gen_diagnostics(gen)) > 0);
    fp8gen_close(gen);
}

/* Every request for memory fails once, from some point on: a clean error and nothing lost. */
static void test_out_of_memory(void **state)
{
    (void)state;
    for (int64_t n = 1;; n += 1 + n / 16) {
        fp8gen *gen = open_fields(ONE_LAYER);
        const char *json, *name, *text;
        gen_alloc_fail(n, true);
        fp8gen_status status = fp8gen_plan(gen, &json);
        if (status == FP8GEN_OK)
            status = fp8gen_expand(gen, 0, &name, &text);
        gen_alloc_fail(0, false);
        if (status != FP8GEN_OK) {
            assert_int_equal(status, FP8GEN_ERR_MACHINE);
            assert_non_null(strstr(fp8gen_diagnostics(gen), "out of memory"));
        }
        fp8gen_close(gen);
        if (status == FP8GEN_OK)
            break;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rules),
        cmocka_unit_test(test_flips_and_determinism),
        cmocka_unit_test(test_only_what_is_needed),
        cmocka_unit_test(test_equal_kernels_are_shared),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_cost),
        cmocka_unit_test(test_cost_of_huge_layers),
        cmocka_unit_test(test_expand),
        cmocka_unit_test(test_without_model),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
