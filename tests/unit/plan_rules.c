/*
 * plan_rules.c - walks a plan by the rules of runtime/bundle_format.h: complete, consistent,
 * minimal.
 *
 * The facts of the format come from its header; what a plan chooses is not judged here.
 */
#include "tests/unit/plan_rules.h"

/* A model of one layer with these fields. */
fp8gen *open_fields(const char *fields)
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

const char *plan_text(fp8gen *gen)
{
    const char *json;
    if (fp8gen_plan(gen, &json) != FP8GEN_OK)
        fail_msg("%s", fp8gen_diagnostics(gen));
    return json;
}

/* The caller frees it. */
json_t *plan_of(const char *fields)
{
    fp8gen *gen = open_fields(fields);
    json_t *plan = json_loads(plan_text(gen), JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(plan);
    fp8gen_close(gen);
    return plan;
}

json_t *first_layer(json_t *plan)
{
    return json_array_get(json_object_get(plan, "layers"), 0);
}

json_t *named(const json_t *list, const char *name)
{
    size_t i;
    json_t *item;
    json_array_foreach(list, i, item) if (strcmp(json_string_value(json_object_get(item, "name")),
                                                 name) == 0) return item;
    return NULL;
}

const char *string_of(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    if (text == NULL)
        fail_msg("no text '%s'", key);
    return text;
}

/* ---- the rules of the format ----------------------------------------------------------------- */

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

json_int_t integer_of(const json_t *object, const char *key)
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
        { "a", "tensor_map" },     { "b", "tensor_map" },     { "out", "tensor_map" },
        { "a_scales", "pointer" }, { "b_scales", "pointer" }, { "bias", "pointer" },
        { "out", "pointer" },      { "out_ld", "int64" },     { "rows", "int64" },
        { "cols", "int64" },       { "depth", "int64" },      { FP8_ARG_OUT_BY_MAP, "int32" },
        { "tiles", "pointer" },    { "epoch", "int64" },      { NULL, NULL },
    };
    json_t *parameters = json_object_get(kernel, "parameters");
    json_t *semantics = json_object_get(kernel, "semantics"),
           *grid = json_object_get(kernel, "grid");
    json_int_t bm = integer_of(parameters, "bm"), bn = integer_of(parameters, "bn");
    json_int_t cluster = integer_of(kernel, "cluster"), stages = integer_of(parameters, "stages");
    bool add = json_is_true(json_object_get(semantics, "accumulate"));
    bool wide = add || strcmp(string_of(semantics, "target_dtype"), "fp32") == 0;
    check_args(kernel, args);
    bool swapped = json_is_true(json_object_get(parameters, "swapped"));
    bool exchange = strcmp(string_of(parameters, "flow"), "exchange") == 0;
    json_int_t slices = integer_of(parameters, "slices"), sharing = cluster / slices;
    check_box(kernel, 0, 128, swapped ? bn : bm);
    check_box(kernel, 1, 128, swapped ? bm : bn / sharing);
    check_box(kernel, 2, wide ? 32 : 64, 16);
    assert_string_equal(string_of(grid, "rule"), "clusters");
    assert_int_equal(integer_of(grid, "tile_rows"), swapped ? bn : bm * sharing);
    assert_int_equal(integer_of(grid, "tile_cols"), swapped ? bm : bn);
    assert_int_equal(integer_of(grid, "slices"), slices);
    assert_int_equal(integer_of(parameters, "cluster"), sharing);
    assert_true(json_is_true(json_object_get(kernel, "overlaps")));
    json_int_t consumers = integer_of(parameters, "consumers");
    assert_int_equal(integer_of(kernel, "block"), 128 * (consumers + 1));
    json_int_t shared = integer_of(kernel, "shared_bytes");
    bool atomic = strcmp(string_of(parameters, "scheduler"), "atomic") == 0;
    bool row_scaled = json_is_true(json_object_get(parameters, "a_row_scaled")) ||
                      json_is_true(json_object_get(parameters, "b_row_scaled"));
    json_int_t vectors = integer_of(parameters, "vectors");
    bool biased = json_is_true(json_object_get(parameters, "biased"));
    assert_int_equal(vectors, exchange ? 0 : 4 * bn * (row_scaled + biased));
    json_int_t fixed = 16 + (atomic ? 80 : 0) + vectors * consumers,
               slabs = integer_of(parameters, "slabs");
    assert_int_equal(json_array_size(json_object_get(kernel, "args")), atomic ? 14 : 12);
    json_int_t ring = (stages * ((bm + bn) * 128 + 16) + fixed + 1023) / 1024 * 1024;
    json_int_t out = !exchange ? slabs * consumers * 8192
                     : swapped ? bn * (bm + 4) * 4
                               : bm * (bn + 8) * 4;
    assert_int_equal(shared, ring + out);
    assert_true(shared <= 227 * 1024);
    json_t *archs = json_object_get(kernel, "archs");
    assert_int_equal(json_array_size(archs), 1);
    assert_string_equal(json_string_value(json_array_get(archs, 0)), "sm_90a");
    assert_string_equal(string_of(parameters, "a_format"), string_of(semantics, "source_dtype"));
    assert_string_equal(string_of(parameters, "b_format"), string_of(semantics, "second_dtype"));
    assert_string_equal(string_of(parameters, "target"), string_of(semantics, "target_dtype"));
    assert_int_equal(json_is_true(json_object_get(parameters, "add")), add);
}

/* The kernel's own, or that of a text for both formats, or for sums too, of which all else is the
 * same. */
static void check_entry(const json_t *kernels, const json_t *kernel, const char *name,
                        const char *entry)
{
    char own[128];
    size_t index;
    json_t *other;
    snprintf(own, sizeof(own), "fp8_%s", name);
    if (strcmp(entry, own) == 0)
        return;
    assert_true(strstr(name, "_e4m3") || strstr(name, "_e5m2") || strstr(name, "_add"));
    json_array_foreach(kernels, index, other)
    {
        if (strcmp(string_of(other, "entry"), entry) != 0)
            continue;
        static const char *const same[] = { "op",   "template", "parameters",   "args",
                                            "grid", "block",    "shared_bytes", "cluster" };
        for (size_t i = 0; i < sizeof(same) / sizeof(same[0]); i++)
            assert_true(
                json_equal(json_object_get(other, same[i]), json_object_get(kernel, same[i])));
    }
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
    const char *entry = string_of(kernel, "entry");
    assert_string_equal(string_of(json_object_get(kernel, "parameters"), "entry"), entry);
    check_entry(kernels, kernel, name, entry);
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
    if (strcmp(text, "M") == 0 || strcmp(text, "accumulate") == 0 || strcmp(text, "epoch") == 0) {
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
    assert_string_equal(string_of(semantics, "a_scaling"), string_of(step, "a_scaling"));
    assert_string_equal(string_of(semantics, "b_scaling"), string_of(step, "b_scaling"));
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

/* One side of a product: scales where the format has some, the caller's tensor where it is bf16. */
static void check_side(const json_t *layer, const json_t *step, const char *side)
{
    char key[32];
    json_t *args = json_object_get(step, "args");
    json_t *buffer = named(json_object_get(layer, "buffers"), string_of(args, side));
    snprintf(key, sizeof(key), "%s_dtype", side);
    const char *dtype = string_of(step, key);
    bool plain = strcmp(dtype, "bf16") == 0;
    assert_string_equal(string_of(buffer, "dtype"), dtype);
    assert_int_equal(strcmp(string_of(buffer, "object"), "caller") == 0, plain);
    snprintf(key, sizeof(key), "%s_scaling", side);
    const char *scaling = string_of(step, key);
    assert_int_equal(strcmp(scaling, "none") == 0, plain);
    snprintf(key, sizeof(key), "%s_scales", side);
    assert_int_equal(json_is_null(json_object_get(args, key)), plain);
    if (!plain) {
        char wanted[64];
        snprintf(wanted, sizeof(wanted), "%s_scales",
                 strcmp(scaling, "tensor") == 0 ? string_of(buffer, "object")
                                                : string_of(args, side));
        assert_string_equal(string_of(args, key), wanted);
    }
    snprintf(key, sizeof(key), "%s_transposed", side);
    json_t *transposed = json_object_get(step, key);
    assert_true(json_is_boolean(transposed) && (plain || !json_is_true(transposed)));
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
    check_side(layer, step, "a");
    check_side(layer, step, "b");
    check_store(kernels, json_object_get(step, "store"));
    check_dispatch(kernels, step, json_integer_value(json_object_get(layer, "max_tokens")));
}

/* `name`: the kernel; args: the values of all arguments of `op`. */
static void check_call(const json_t *kernels, const json_t *layer, const json_t *call,
                       const char *op)
{
    const struct arg *args = args_of(op);
    json_t *values = json_object_get(call, "args");
    assert_int_equal(json_object_size(values), count_of(args));
    for (size_t i = 0; args[i].name != NULL; i++)
        check_value(json_object_get(layer, "buffers"), &args[i],
                    json_object_get(values, args[i].name));
    if (strcmp(op, "gemm") == 0)
        return;
    json_t *kernel = named(kernels, string_of(call, "kernel"));
    assert_non_null(kernel);
    assert_string_equal(string_of(kernel, "op"), op);
}

static void check_step(const json_t *kernels, const json_t *layer, const json_t *step)
{
    const char *op = string_of(step, "op");
    check_call(kernels, layer, step, op);
    if (strcmp(op, "gemm") == 0) {
        check_gemm(kernels, layer, step);
        return;
    }
    assert_true(strlen(string_of(step, "reason")) > 20);
    json_t *alternative = json_object_get(step, "alternative");
    if (alternative != NULL) {
        check_call(kernels, layer, alternative, "fused");
        assert_true(integer_of(alternative, "elements_per_sm") > 0);
    }
}

static void check_steps(const json_t *kernels, const json_t *layer, const json_t *steps)
{
    size_t i;
    json_t *step;
    assert_true(json_is_array(steps));
    json_array_foreach(steps, i, step) check_step(kernels, layer, step);
}

static void check_layer(const json_t *kernels, const json_t *layer)
{
    static const char *const passes[] = { "weight", "fprop", "quantize_dy", "wgrad", "dgrad" };
    static const char *const operands[] = { "x", "w", "dy" };
    json_t *list = json_object_get(layer, "passes"), *buffers = json_object_get(layer, "buffers");
    json_t *given = json_object_get(layer, "given"), *item;
    bool plain = strcmp(string_of(layer, "compute"), "bf16") == 0;
    size_t i;
    assert_int_equal(json_object_size(list), 5);
    for (i = 0; i < 5; i++) {
        json_t *steps = json_object_get(list, passes[i]);
        assert_true(json_array_size(steps) > 0 || (plain && (i == 0 || i == 2)));
        check_steps(kernels, layer, steps);
        assert_true(json_is_object(json_object_get(json_object_get(layer, "cost"), passes[i])));
    }
    assert_non_null(given);
    for (i = 0; i < 3 && !json_is_null(given); i++)
        check_steps(kernels, layer, json_object_get(given, operands[i]));
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

void check_plan(const json_t *plan)
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
