/*
 * test_spec.c - loading a spec: the checked model, defaults, overrides, files and sessions.
 *
 * What wrong specs are answered with is tests/bad_specs' subject; here is what right ones mean.
 */
#include "gen/internal.h"
#include "runtime/fp8.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sys/stat.h>
#include <unistd.h>

static fp8gen *open_session(void)
{
    fp8gen *gen = NULL;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_non_null(gen);
    return gen;
}

static fp8gen_status load(fp8gen *gen, const char *text)
{
    return fp8gen_load_text(gen, "test.lua", text, strlen(text));
}

static fp8gen *load_good(const char *text)
{
    fp8gen *gen = open_session();
    fp8gen_status status = load(gen, text);
    if (status != FP8GEN_OK)
        print_error("%s", fp8gen_diagnostics(gen));
    assert_int_equal(status, FP8GEN_OK);
    assert_string_equal(fp8gen_diagnostics(gen), "");
    return gen;
}

/* ---- reading the model ------------------------------------------------------------------------
 * A path is "layers.1.recipe.format"; values come back as text. */

struct query {
    const char *path;
    char value[128];
};

static int query_body(lua_State *L)
{
    struct query *query = lua_touserdata(L, 1);
    char path[128];
    snprintf(path, sizeof(path), "%s", query->path);
    script_push_model(L);
    char *rest = NULL;
    for (char *key = strtok_r(path, ".", &rest); key != NULL; key = strtok_r(NULL, ".", &rest)) {
        if (key[0] >= '0' && key[0] <= '9')
            lua_geti(L, -1, atoi(key));
        else
            lua_getfield(L, -1, key);
    }
    snprintf(query->value, sizeof(query->value), "%s",
             lua_isboolean(L, -1) ? lua_toboolean(L, -1) ? "true" : "false"
             : lua_isnil(L, -1)   ? "nil"
             : lua_istable(L, -1) ? "table"
                                  : lua_tostring(L, -1));
    return 0;
}

static void assert_value(fp8gen *gen, const char *path, const char *expected)
{
    struct query query = { .path = path };
    assert_int_equal(script_run(gen, query_body, &query), FP8GEN_OK);
    if (strcmp(query.value, expected) != 0)
        print_error("%s\n", path);
    assert_string_equal(query.value, expected);
}

#define LAYER "linear \"a\" { in_features = 48, out_features = 33 }"

/* ---- the model ------------------------------------------------------------------------------- */

static void test_defaults(void **state)
{
    (void)state;
    fp8gen *gen = load_good("return model \"m\" { layers = { " LAYER " } }");
    assert_value(gen, "name", "m");
    assert_value(gen, "mesh.tensor", "1");
    assert_value(gen, "mesh.fsdp", "1");
    assert_value(gen, "layers.1.name", "a");
    assert_value(gen, "layers.1.in_features", "48");
    assert_value(gen, "layers.1.out_features", "33");
    assert_value(gen, "layers.1.tokens", "8192");
    assert_value(gen, "layers.1.max_tokens", "8192");
    assert_value(gen, "layers.1.count", "1");
    assert_value(gen, "layers.1.bias", "false");
    assert_value(gen, "layers.1.weight", "bf16");
    assert_value(gen, "layers.1.output", "bf16");
    assert_value(gen, "layers.1.grad_input", "bf16");
    assert_value(gen, "layers.1.grad_weight", "fp32");
    assert_value(gen, "layers.1.recipe.name", "current");
    assert_value(gen, "layers.1.recipe.format", "hybrid");
    assert_value(gen, "layers.1.recipe.power_of_two", "false");
    assert_value(gen, "layers.1.accumulation.fprop", "fast");
    assert_value(gen, "layers.1.accumulation.dgrad", "split");
    assert_value(gen, "layers.1.accumulation.wgrad", "split");
    assert_value(gen, "layers.1.gather_group", "nil");
    assert_value(gen, "layers.2", "nil");
    assert_value(gen, "shard.backward", "gather");
    assert_value(gen, "shard.reduce", "average");
    fp8gen_close(gen);
}

static void test_shard(void **state)
{
    (void)state;
    fp8gen *gen = open_session();
    assert_int_equal(fp8gen_override(gen, "fsdp", "4097"), FP8GEN_ERR_ARGUMENT);
    assert_int_equal(fp8gen_override(gen, "fsdp", "6"), FP8GEN_OK);
    assert_int_equal(load(gen,
                          "return model 'm' { mesh = { fsdp = 4 }, shard = { reduce = 'sum' },\n"
                          "  layers = { linear 'a' { in_features = 1, out_features = 2,\n"
                          "    gather_group = 'block' } } }"),
                     FP8GEN_OK);
    assert_value(gen, "mesh.fsdp", "6"); /* what was set goes before the spec */
    assert_value(gen, "mesh.tensor", "1");
    assert_value(gen, "shard.backward", "gather");
    assert_value(gen, "shard.reduce", "sum");
    assert_value(gen, "layers.1.gather_group", "block");
    fp8gen_close(gen);
}

static void test_inheritance(void **state)
{
    (void)state;
    fp8gen *gen = load_good(
        "return model 'm' { tokens = 100, max_tokens = 300, bias = true, output = 'fp32',\n"
        "  recipe = recipe.current { format = 'e4m3', power_of_two = true },\n"
        "  accumulation = { fprop = 'split', dgrad = 'fast' },\n"
        "  layers = {\n"
        "    linear 'a' { in_features = 1, out_features = 2 },\n"
        "    linear 'b' { in_features = 4096.0, out_features = 2, bias = false, tokens = 7,\n"
        "      output = 'bf16', recipe = recipe.current {}, accumulation = { wgrad = 'fast' },\n"
        "      count = 3, max_tokens = 7 } } }");
    assert_value(gen, "layers.1.tokens", "100");
    assert_value(gen, "layers.1.max_tokens", "300");
    assert_value(gen, "layers.1.bias", "true");
    assert_value(gen, "layers.1.output", "fp32");
    assert_value(gen, "layers.1.recipe.format", "e4m3");
    assert_value(gen, "layers.1.recipe.power_of_two", "true");
    assert_value(gen, "layers.1.accumulation.fprop", "split");
    assert_value(gen, "layers.1.accumulation.dgrad", "fast");
    assert_value(gen, "layers.1.accumulation.wgrad", "split");
    assert_value(gen, "layers.2.in_features", "4096"); /* a whole number, however it is written */
    assert_value(gen, "layers.2.tokens", "7");
    assert_value(gen, "layers.2.max_tokens", "7");
    assert_value(gen, "layers.2.bias", "false");
    assert_value(gen, "layers.2.output", "bf16");
    assert_value(gen, "layers.2.recipe.format", "hybrid");
    assert_value(gen, "layers.2.recipe.power_of_two", "false");
    assert_value(gen, "layers.2.accumulation.fprop", "split"); /* the model's, key by key */
    assert_value(gen, "layers.2.accumulation.wgrad", "fast");
    assert_value(gen, "layers.2.count", "3");
    fp8gen_close(gen);
}

static void test_snapshot(void **state)
{
    (void)state;
    fp8gen *gen = load_good("local f = { in_features = 16, out_features = 16 }\n"
                            "local a = linear 'a' (f)\n"
                            "f.in_features = 32\n"
                            "return model 'm' { layers = { a, linear 'b' (f) } }");
    assert_value(gen, "layers.1.in_features", "16");
    assert_value(gen, "layers.2.in_features", "32");
    fp8gen_close(gen);
}

/* The hash names the model, not its source text. */
static void test_hash(void **state)
{
    (void)state;
    fp8gen *a = load_good("return model 'm' { layers = { " LAYER " } }");
    fp8gen *b = load_good("-- other text\nlocal n = 6 * 8\nreturn model 'm' { bias = false,\n"
                          "layers = { linear 'a' { out_features = 33, in_features = n } } }");
    fp8gen *c = load_good("return model 'm' { layers = { " LAYER " }, tokens = 8191 }");
    assert_string_equal(a->spec_hash, b->spec_hash);
    assert_string_not_equal(a->spec_hash, c->spec_hash);
    assert_int_equal(strlen(a->spec_hash), 32);
    fp8gen_close(a);
    fp8gen_close(b);
    fp8gen_close(c);
}

/* Recipes and what they leave no choice for. */
static void test_recipes(void **state)
{
    (void)state;
    fp8gen *gen = load_good(
        "return model 'm' { recipe = recipe.delayed { margin = 2 }, layers = {\n"
        " linear 'a' { in_features = 1, out_features = 2 },\n"
        " linear 'b' { in_features = 1, out_features = 2, recipe = recipe.block {} },\n"
        " linear 'c' { in_features = 1, out_features = 2, recipe = recipe.rowwise_hp_wgrad {} },\n"
        " linear 'd' { in_features = 1, out_features = 2, compute = 'bf16' } } }");
    assert_value(gen, "layers.1.recipe.name", "delayed");
    assert_value(gen, "layers.1.recipe.format", "hybrid");
    assert_value(gen, "layers.1.recipe.history_length", "1024");
    assert_value(gen, "layers.1.recipe.algo", "max");
    assert_value(gen, "layers.1.recipe.margin", "2");
    assert_value(gen, "layers.1.recipe.calibrate", "false");
    assert_value(gen, "layers.1.recipe.power_of_two", "false");
    assert_value(gen, "layers.1.accumulation.fprop", "fast");
    assert_value(gen, "layers.1.compute", "fp8");
    assert_value(gen, "layers.2.recipe.format", "e4m3");
    assert_value(gen, "layers.2.recipe.power_of_two", "true");
    assert_value(gen, "layers.2.recipe.margin", "nil");
    assert_value(gen, "layers.2.accumulation.fprop", "split");
    assert_value(gen, "layers.3.accumulation.fprop", "fast");
    assert_value(gen, "layers.3.accumulation.wgrad", "split");
    assert_value(gen, "layers.4.compute", "bf16");
    assert_value(gen, "layers.4.accumulation.fprop", "split");
    fp8gen_close(gen);
}

/* C33: every field of every scope changes the model, or is refused. */
static void test_flip_every_field(void **state)
{
    (void)state;
    static const struct {
        const char *model, *layer;
        bool refused;
    } flips[] = {
        { "tokens = 8000,", "", false },
        { "max_tokens = 9000,", "", false },
        { "bias = true,", "", false },
        { "recipe = recipe.current { format = 'e4m3' },", "", false },
        { "recipe = recipe.current { power_of_two = true },", "", false },
        { "recipe = recipe.delayed {},", "", false },
        { "recipe = recipe.delayed { format = 'e4m3' },", "", false },
        { "recipe = recipe.delayed { history_length = 16 },", "", false },
        { "recipe = recipe.delayed { algo = 'most_recent' },", "", false },
        { "recipe = recipe.delayed { margin = 6 },", "", false },
        { "recipe = recipe.delayed { calibrate = true },", "", false },
        { "recipe = recipe.delayed { power_of_two = true },", "", false },
        { "recipe = recipe.delayed { power_of_two = true, margin = 7 },", "", true },
        { "recipe = recipe.rowwise {},", "", false },
        { "recipe = recipe.rowwise { power_of_two = false },", "", false },
        { "recipe = recipe.rowwise { format = 'hybrid' },", "", true },
        { "recipe = recipe.rowwise_hp_wgrad {},", "", false },
        { "recipe = recipe.rowwise_hp_wgrad { power_of_two = false },", "", false },
        { "recipe = recipe.rowwise_hp_wgrad {}, accumulation = { wgrad = 'fast' },", "", true },
        { "recipe = recipe.block {},", "", false },
        { "recipe = recipe.block { power_of_two = false },", "", false },
        { "recipe = recipe.block {}, accumulation = { fprop = 'fast' },", "", true },
        { "compute = 'bf16',", "", false },
        { "compute = 'bf16', weight = 'fp32',", "", true },
        { "compute = 'bf16', recipe = recipe.block {},", "", true },
        { "compute = 'bf16',", "recipe = recipe.block {},", true },
        { "accumulation = { fprop = 'split' },", "", false },
        { "accumulation = { dgrad = 'fast' },", "", false },
        { "accumulation = { wgrad = 'fast' },", "", false },
        { "weight = 'fp32',", "", false },
        { "output = 'fp32',", "", false },
        { "grad_input = 'fp32',", "", false },
        { "grad_weight = 'bf16',", "", false },
        { "mesh = { tensor = 2 },", "", true },
        { "mesh = { fsdp = 2 },", "", false },
        { "mesh = { fsdp = 4096 },", "", false },
        { "mesh = { fsdp = 4097 },", "", true },
        { "shard = { backward = 'keep' },", "", false },
        { "shard = { reduce = 'sum' },", "", false },
        { "shard = { reduce = 'max' },", "", true },
        { "", "shard = { reduce = 'sum' },", true },
        { "", "gather_group = 'block',", false },
        { "", "gather_group = 'a b',", true },
        { "", "tokens = 8001,", false },
        { "", "max_tokens = 9001,", false },
        { "", "bias = true, output = 'fp32',", false },
        { "", "recipe = recipe.current { format = 'e4m3', power_of_two = true },", false },
        { "", "accumulation = { fprop = 'split', dgrad = 'fast' },", false },
        { "", "weight = 'fp32', output = 'fp32',", false },
        { "", "grad_input = 'fp32', grad_weight = 'bf16',", false },
        { "", "count = 2,", false },
        { "layers = 5,", "", true },
        { "", "in_features = 49,", true }, /* given twice */
        { "", "tensor = 'column',", true },
    };
    enum { COUNT = sizeof(flips) / sizeof(flips[0]) };
    char hashes[COUNT + 1][33];
    int kept = 0;
    for (int i = -1; i < COUNT; i++) {
        char text[512];
        snprintf(text, sizeof(text),
                 "return model 'm' { %s layers = { linear 'a' { %s in_features = 48,"
                 "out_features = 33 } } }",
                 i < 0 ? "" : flips[i].model, i < 0 ? "" : flips[i].layer);
        fp8gen *gen = open_session();
        fp8gen_status status = load(gen, text);
        bool refused = i >= 0 && flips[i].refused;
        if (status != (refused ? FP8GEN_ERR_SPEC : FP8GEN_OK))
            print_error("%s\n%s", text, fp8gen_diagnostics(gen));
        assert_int_equal(status, refused ? FP8GEN_ERR_SPEC : FP8GEN_OK);
        for (int j = 0; !refused && j < kept; j++)
            assert_string_not_equal(hashes[j], gen->spec_hash);
        if (!refused)
            memcpy(hashes[kept++], gen->spec_hash, 33);
        fp8gen_close(gen);
    }
}

/* The names count too. */
static void test_names_count(void **state)
{
    (void)state;
    fp8gen *a = load_good("return model 'm' { layers = { " LAYER " } }");
    fp8gen *b = load_good("return model 'n' { layers = { " LAYER " } }");
    fp8gen *c = load_good(
        "return model 'm' { layers = { linear 'c' { in_features = 48, out_features = 33 } } }");
    assert_string_not_equal(a->spec_hash, b->spec_hash);
    assert_string_not_equal(a->spec_hash, c->spec_hash);
    fp8gen_close(a);
    fp8gen_close(b);
    fp8gen_close(c);
}

/* ---- overrides ------------------------------------------------------------------------------- */

static void test_overrides(void **state)
{
    (void)state;
    fp8gen *gen = open_session();
    assert_int_equal(fp8gen_override(gen, "tokens", "17"), FP8GEN_OK);
    assert_int_equal(fp8gen_override(gen, "max_tokens", "64"), FP8GEN_OK);
    assert_int_equal(fp8gen_override(gen, "recipe", "current"), FP8GEN_OK);
    assert_int_equal(load(gen, "return model 'm' { tokens = 5, layers = { linear 'a' { tokens = 9,"
                               "max_tokens = 9, recipe = recipe.current { format = 'e4m3' },"
                               "in_features = 48, out_features = 33 }, linear 'b' {"
                               "in_features = 1, out_features = 1 } } }"),
                     FP8GEN_OK);
    assert_value(gen, "layers.1.tokens", "17");
    assert_value(gen, "layers.1.max_tokens", "64");
    assert_value(gen, "layers.1.recipe.format", "hybrid"); /* recipe.current {}, not the spec's */
    assert_value(gen, "layers.2.tokens", "17");
    assert_int_equal(fp8gen_override(gen, "tokens", "18"), FP8GEN_ERR_ARGUMENT);
    assert_non_null(strstr(fp8gen_diagnostics(gen), "comes too late"));
    fp8gen_close(gen);
}

static void test_bad_overrides(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        { "bias", "true" },        { "", "" },           { "tokens", "" },
        { "tokens", "0" },         { "tokens", "-1" },   { "tokens", "1e3" },
        { "tokens", " 5" },        { "tokens", "0x10" }, { "tokens", "99999999999999999999" },
        { "recipe", "Current" },   { "recipe", "" },     { "max_tokens", "268435457" },
        { "recipe", "delayed\n" }, { NULL, "1" },        { "tokens", NULL },
    };
    fp8gen *gen = open_session();
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(fp8gen_override(gen, bad[i][0], bad[i][1]), FP8GEN_ERR_ARGUMENT);
    /* They leave the session as it was. */
    assert_int_equal(load(gen, "return model 'm' { layers = { " LAYER " } }"), FP8GEN_OK);
    assert_value(gen, "layers.1.tokens", "8192");
    fp8gen_close(gen);
}

static void test_override_conflict(void **state)
{
    (void)state;
    fp8gen *gen = open_session();
    assert_int_equal(fp8gen_override(gen, "tokens", "500"), FP8GEN_OK);
    assert_int_equal(load(gen, "return model 'm' { max_tokens = 100, layers = { " LAYER " } }"),
                     FP8GEN_ERR_SPEC);
    assert_non_null(
        strstr(fp8gen_diagnostics(gen), "tokens 500 (an override) is more than max_tokens 100"));
    fp8gen_close(gen);
}

/* ---- sessions and files ---------------------------------------------------------------------- */

static void test_session(void **state)
{
    (void)state;
    fp8gen_close(NULL);
    fp8gen *gen = (fp8gen *)1;
    fp8gen_options options = FP8GEN_OPTIONS_INIT;
    static const struct {
        size_t place;
        uint32_t value;
        const char *sentence;
    } wrong[] = {
        { offsetof(fp8gen_options, size), 4, "are of another version" },
        { offsetof(fp8gen_options, size), sizeof(options) + 8, "are of another version" },
        { offsetof(fp8gen_options, reserved[3]), 1, "have a reserved word that is not 0" },
        { offsetof(fp8gen_options, color), 2, "have a color that is neither 0 nor 1" },
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        options = (fp8gen_options)FP8GEN_OPTIONS_INIT;
        memcpy((char *)&options + wrong[i].place, &wrong[i].value, sizeof(wrong[i].value));
        gen = (fp8gen *)1;
        assert_int_equal(fp8gen_open(&options, &gen), FP8GEN_ERR_ARGUMENT);
        assert_null(gen);
        assert_non_null(strstr(fp8gen_jit_error(), wrong[i].sentence));
    }
    assert_string_equal(fp8gen_version(), FP8_VERSION_STRING);

    gen = open_session();
    assert_string_equal(fp8gen_diagnostics(gen), "");
    assert_int_equal(gen_require_model(gen), FP8GEN_ERR_ARGUMENT);
    assert_non_null(strstr(fp8gen_diagnostics(gen), "no spec is loaded"));
    assert_int_equal(load(gen, "return 5"), FP8GEN_ERR_SPEC);
    assert_int_equal(gen_require_model(gen), FP8GEN_ERR_ARGUMENT);
    assert_int_equal(load(gen, "return model 'm' { layers = { " LAYER " } }"), FP8GEN_ERR_ARGUMENT);
    assert_non_null(strstr(fp8gen_diagnostics(gen), "has loaded a spec already"));
    fp8gen_close(gen);
}

/* NULL where something is needed is refused, by every call; what there is of a session goes on. */
static void test_null(void **state)
{
    (void)state;
    fp8gen_build_options build = FP8GEN_BUILD_OPTIONS_INIT;
    fp8gen *gen = open_session();
    const char *text;
    char path[8];
    fp8gen_status got[] = {
        fp8gen_open(NULL, NULL),
        fp8gen_override(NULL, "tokens", "1"),
        fp8gen_override(gen, NULL, NULL),
        fp8gen_tuning_file(NULL, "x"),
        fp8gen_tuning_file(gen, NULL),
        fp8gen_gemm_configs(NULL, &text),
        fp8gen_gemm_configs(gen, NULL),
        fp8gen_load_file(NULL, "x"),
        fp8gen_load_file(gen, NULL),
        fp8gen_load_text(NULL, "x", "x", 1),
        fp8gen_load_text(gen, NULL, "x", 1),
        fp8gen_load_text(gen, "x", NULL, 1),
        fp8gen_plan(NULL, &text),
        fp8gen_plan(gen, NULL),
        fp8gen_expand(NULL, 0, &text, &text),
        fp8gen_expand(gen, 0, NULL, &text),
        fp8gen_expand(gen, 0, &text, NULL),
        fp8gen_build(NULL, &build),
        fp8gen_build(gen, NULL),
        fp8gen_schema(NULL, &text),
        fp8gen_schema(gen, NULL),
        fp8gen_nvrtc(NULL, &text, &text),
        fp8gen_nvrtc(gen, NULL, &text),
        fp8gen_nvrtc(gen, &text, NULL),
        fp8gen_jit_bundle(NULL, NULL, "x", 1, path, sizeof(path)),
        fp8gen_jit_bundle(NULL, "x", NULL, 1, path, sizeof(path)),
        fp8gen_jit_bundle(NULL, "x", "x", 1, NULL, 0),
        fp8gen_cache_path("/tmp", NULL, 0),
        fp8gen_cache_list("/nonexistent", 0, NULL, NULL),
        fp8gen_cache_trim("/nonexistent", NULL, NULL),
    };
    for (size_t i = 0; i < sizeof(got) / sizeof(got[0]); i++) {
        if (got[i] != FP8GEN_ERR_ARGUMENT)
            print_error("call %zu: status %d\n", i, (int)got[i]);
        assert_int_equal(got[i], FP8GEN_ERR_ARGUMENT);
    }
    assert_string_equal(fp8gen_diagnostics(NULL), "");
    assert_non_null(strstr(fp8gen_diagnostics(gen), "the place for a result is NULL"));
    assert_int_equal(load(gen, "return model 'm' { layers = { " LAYER " } }"), FP8GEN_OK);
    assert_int_equal(fp8gen_plan(gen, &text), FP8GEN_OK);
    assert_int_equal(fp8gen_cache_path("/tmp", path, sizeof(path)), FP8GEN_OK);
    fp8gen_close(gen);
}

static void test_build_options(void **state)
{
    (void)state;
    fp8gen *gen = open_session();
    fp8gen_build_options build = FP8GEN_BUILD_OPTIONS_INIT;
    build.size += 8;
    assert_int_equal(fp8gen_build(gen, &build), FP8GEN_ERR_ARGUMENT);
    assert_non_null(strstr(fp8gen_diagnostics(gen), "the build options are of another version"));
    build = (fp8gen_build_options)FP8GEN_BUILD_OPTIONS_INIT;
    build.reserved[1] = 1;
    assert_int_equal(fp8gen_build(gen, &build), FP8GEN_ERR_ARGUMENT);
    assert_non_null(strstr(fp8gen_diagnostics(gen), "have a reserved word that is not 0"));
    fp8gen_close(gen);
    fp8gen_jit_options jit = FP8GEN_JIT_OPTIONS_INIT;
    char path[8];
    jit.reserved[0] = 1;
    assert_int_equal(fp8gen_jit_bundle(&jit, "x", "x", 1, path, sizeof(path)), FP8GEN_ERR_ARGUMENT);
    assert_non_null(strstr(fp8gen_jit_error(), "have a reserved word that is not 0"));
}

static void assert_file_error(const char *path, fp8gen_status expected, const char *part)
{
    fp8gen *gen = open_session();
    assert_int_equal(fp8gen_load_file(gen, path), expected);
    if (strstr(fp8gen_diagnostics(gen), part) == NULL)
        print_error("%s", fp8gen_diagnostics(gen));
    assert_non_null(strstr(fp8gen_diagnostics(gen), part));
    fp8gen_close(gen);
}

static void test_files(void **state)
{
    (void)state;
    char dir[] = "/tmp/fp8gen_spec_XXXXXX";
    char path[64];
    assert_non_null(mkdtemp(dir));
    assert_file_error("/nonexistent/spec.lua", FP8GEN_ERR_MACHINE,
                      "/nonexistent/spec.lua: error: cannot open the file: No such file");
    assert_file_error("", FP8GEN_ERR_MACHINE, "No such file");
    assert_file_error(dir, FP8GEN_ERR_MACHINE, "this is a directory, not a file");
    assert_file_error("/dev/zero", FP8GEN_ERR_MACHINE, "not a regular file");
    snprintf(path, sizeof(path), "%s/fifo", dir);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_file_error(path, FP8GEN_ERR_MACHINE, "not a regular file");
    unlink(path);

    snprintf(path, sizeof(path), "%s/huge.lua", dir);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(ftruncate(fileno(file), (off_t)1 << 40), 0);
    fclose(file);
    assert_file_error(path, FP8GEN_ERR_MACHINE,
                      "the file is too large: 1099511627776 bytes; at most 1048576 are read");
    unlink(path);
    rmdir(dir);

    fp8gen *gen = open_session();
    assert_int_equal(fp8gen_load_file(gen, NULL), FP8GEN_ERR_ARGUMENT);
    assert_int_equal(fp8gen_load_text(gen, "x", NULL, 5), FP8GEN_ERR_ARGUMENT);
    assert_int_equal(fp8gen_load_text(gen, NULL, "x", 1), FP8GEN_ERR_ARGUMENT);
    fp8gen_close(gen);
}

/* The text need not end in NUL, and no byte after it is read. */
static void test_text_length(void **state)
{
    (void)state;
    static const char text[] = "return model 'm' { layers = { " LAYER " } }";
    char *exact = malloc(sizeof(text) - 1);
    assert_non_null(exact);
    memcpy(exact, text, sizeof(text) - 1);
    fp8gen *gen = open_session();
    assert_int_equal(fp8gen_load_text(gen, "t", exact, sizeof(text) - 1), FP8GEN_OK);
    free(exact);
    fp8gen_close(gen);
    gen = open_session();
    assert_int_equal(fp8gen_load_text(gen, "t", NULL, 0), FP8GEN_ERR_SPEC);
    fp8gen_close(gen);
    char *large = calloc(1, (1 << 20) + 1);
    assert_non_null(large);
    gen = open_session();
    assert_int_equal(fp8gen_load_text(gen, "t", large, (1 << 20) + 1), FP8GEN_ERR_SPEC);
    assert_non_null(strstr(fp8gen_diagnostics(gen), "too large"));
    free(large);
    fp8gen_close(gen);
}

static void test_shipped_specs(void **state)
{
    (void)state;
    static const char *const specs[] = { "llama3_8b",         "llama3_70b", "internlm2_7b",
                                         "deepseek_v3_dense", "qwen3_8b",   "debug_vocab2556" };
    for (size_t i = 0; i < sizeof(specs) / sizeof(specs[0]); i++) {
        char path[64];
        snprintf(path, sizeof(path), "specs/%s.lua", specs[i]);
        fp8gen *gen = open_session();
        assert_int_equal(fp8gen_load_file(gen, path), FP8GEN_OK);
        assert_string_equal(fp8gen_diagnostics(gen), "");
        assert_value(gen, "name", specs[i]);
        fp8gen_close(gen);
    }
}

/* Weights of the shipped specs, from the models' published sizes. */
static void test_shipped_shapes(void **state)
{
    (void)state;
    fp8gen *gen = open_session();
    assert_int_equal(fp8gen_load_file(gen, "specs/llama3_8b.lua"), FP8GEN_OK);
    assert_value(gen, "layers.1.out_features", "6144");
    assert_value(gen, "layers.3.out_features", "28672");
    assert_value(gen, "layers.5.out_features", "128256");
    fp8gen_close(gen);
    gen = open_session();
    assert_int_equal(fp8gen_load_file(gen, "specs/deepseek_v3_dense.lua"), FP8GEN_OK);
    assert_value(gen, "layers.2.out_features", "24576");
    assert_value(gen, "layers.3.out_features", "576");
    assert_value(gen, "layers.4.out_features", "32768");
    assert_value(gen, "layers.5.in_features", "16384");
    fp8gen_close(gen);
}

static void test_schema(void **state)
{
    (void)state;
    static const char *const words[] = { "in_features", "max_tokens",   "power_of_two", "\"e4m3\"",
                                         "fsdp",        "1..268435456", "required",     "wgrad" };
    fp8gen *gen = open_session();
    const char *text = NULL, *again = NULL;
    assert_int_equal(fp8gen_schema(gen, &text), FP8GEN_OK);
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        assert_non_null(strstr(text, words[i]));
    assert_int_equal(load(gen, "return 5"), FP8GEN_ERR_SPEC); /* works beside a wrong spec */
    assert_int_equal(fp8gen_schema(gen, &again), FP8GEN_OK);
    assert_ptr_equal(text, again);
    fp8gen_close(gen);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_shard),
        cmocka_unit_test(test_inheritance),
        cmocka_unit_test(test_snapshot),
        cmocka_unit_test(test_hash),
        cmocka_unit_test(test_recipes),
        cmocka_unit_test(test_flip_every_field),
        cmocka_unit_test(test_names_count),
        cmocka_unit_test(test_overrides),
        cmocka_unit_test(test_bad_overrides),
        cmocka_unit_test(test_override_conflict),
        cmocka_unit_test(test_session),
        cmocka_unit_test(test_null),
        cmocka_unit_test(test_build_options),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_text_length),
        cmocka_unit_test(test_shipped_specs),
        cmocka_unit_test(test_shipped_shapes),
        cmocka_unit_test(test_schema),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
