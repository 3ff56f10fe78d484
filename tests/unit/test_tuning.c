/*
 * test_tuning.c - what decides a GEMM besides the model: forced choices and tuning files. A good
 * file (tuning.json) shows in the plan; each of its fields, wrong in some way, is answered with the
 * file, the entry, the field and the rule.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gen/internal.h"

#define GOOD "tests/unit/tuning.json"

static const char spec[] = "return model \"m\" { layers = { linear \"a\" { in_features = 4096, "
                           "out_features = 6144 } } }";

/* A session with this file (NULL: none) and this forced GEMM (NULL: none). */
static struct fp8gen *open_with(const char *file, const char *gemm)
{
    struct fp8gen *gen;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    if ((gemm != NULL && fp8gen_override(gen, "gemm", gemm) != FP8GEN_OK) ||
        (file != NULL && fp8gen_tuning_file(gen, file) != FP8GEN_OK) ||
        fp8gen_load_text(gen, "test.lua", spec, strlen(spec)) != FP8GEN_OK)
        fail_msg("%s", fp8gen_diagnostics(gen));
    return gen;
}

/* The caller frees it. */
static json_t *plan_with(const char *file, const char *gemm)
{
    struct fp8gen *gen = open_with(file, gemm);
    const char *text;
    if (fp8gen_plan(gen, &text) != FP8GEN_OK)
        fail_msg("%s", fp8gen_diagnostics(gen));
    json_t *plan = json_loads(text, 0, NULL);
    assert_non_null(plan);
    fp8gen_close(gen);
    return plan;
}

static const json_t *dispatch_of(const json_t *plan, const char *pass)
{
    json_t *layer = json_array_get(json_object_get(plan, "layers"), 0);
    json_t *steps = json_object_get(json_object_get(layer, "passes"), pass);
    return json_object_get(json_array_get(steps, json_array_size(steps) - 1), "dispatch");
}

/* The choices for this M. */
static const json_t *choices_of(const json_t *plan, const char *pass, json_int_t tokens)
{
    size_t i;
    json_t *range;
    json_array_foreach((json_t *)dispatch_of(plan, pass), i, range)
    {
        if (tokens <= json_integer_value(json_object_get(range, "max_tokens")))
            return json_object_get(range, "choices");
    }
    fail_msg("no range for %lld", (long long)tokens);
    return NULL;
}

static const char *text_of(const json_t *choices, size_t place, const char *key)
{
    const char *text = json_string_value(json_object_get(json_array_get(choices, place), key));
    if (text == NULL)
        fail_msg("choice %zu has no text '%s'", place, key);
    return text;
}

static void expect_part(const char *text, const char *part)
{
    if (strstr(text, part) == NULL)
        fail_msg("'%s' is not in: %s", part, text);
}

static void expect_end(const char *text, const char *end)
{
    size_t a = strlen(text), b = strlen(end);
    if (a < b || strcmp(text + a - b, end) != 0)
        fail_msg("'%s' does not end in '%s'", text, end);
}

/* ---- forced choices -------------------------------------------------------------------------- */

/* How many ranges of the pass have a generated kernel as their first choice. */
static size_t generated_ranges(const json_t *plan, const char *pass)
{
    size_t i, count = 0;
    json_t *range;
    json_array_foreach((json_t *)dispatch_of(plan, pass), i, range) count +=
        strcmp(text_of(json_object_get(range, "choices"), 0, "backend"), "generated") == 0;
    return count;
}

static size_t gemm_kernels(const json_t *plan)
{
    size_t i, count = 0;
    json_t *kernel;
    json_array_foreach(json_object_get(plan, "kernels"), i, kernel) count +=
        strcmp(json_string_value(json_object_get(kernel, "op")), "gemm") == 0;
    return count;
}

static void test_forced_backend(void **state)
{
    (void)state;
    static const char *const passes[] = { "fprop", "wgrad", "dgrad" };
    json_t *lt = plan_with(NULL, "cublaslt"), *generated = plan_with(NULL, "generated");
    assert_int_equal(gemm_kernels(lt), 0);
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(generated_ranges(lt, passes[i]), 0);
        size_t ranges = json_array_size(dispatch_of(generated, passes[i]));
        assert_int_equal(generated_ranges(generated, passes[i]), ranges);
        expect_part(text_of(choices_of(lt, passes[i], 100), 0, "reason"), "gemm = cublaslt");
        const json_t *choices = choices_of(generated, passes[i], 8192);
        assert_int_equal(json_array_size(choices), 2);
        expect_part(text_of(choices, 0, "reason"), "gemm = generated");
        assert_string_equal(text_of(choices, 1, "backend"), "cublaslt");
    }
    json_decref(lt);
    json_decref(generated);
}

static void test_forced_configuration(void **state)
{
    (void)state;
    json_t *plan = plan_with(NULL, "co128x256c2s4g8"); /* fast: fprop alone */
    expect_end(text_of(choices_of(plan, "fprop", 1), 0, "kernel"), "_co128x256c2s4g8");
    expect_end(text_of(choices_of(plan, "fprop", 8192), 0, "kernel"), "_co128x256c2s4g8");
    const json_t *other = choices_of(plan, "wgrad", 8192);
    assert_int_equal(json_array_size(other), 1);
    expect_part(text_of(other, 0, "reason"),
                "gemm = co128x256c2s4g8 is asked for, which does not serve split accumulation");
    assert_int_equal(gemm_kernels(plan), 1);
    json_decref(plan);
}

static void test_unknown_force(void **state)
{
    (void)state;
    static const char *const words[] = { "", "cublas", "pp128x192", "generated " };
    struct fp8gen *gen;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        assert_int_equal(fp8gen_override(gen, "gemm", words[i]), FP8GEN_ERR_ARGUMENT);
    expect_part(fp8gen_diagnostics(gen), "there is no GEMM 'pp128x192'");
    expect_part(fp8gen_diagnostics(gen), "'cublaslt', 'generated', or one of pp");
    fp8gen_close(gen);
}

/* Each listed configuration can be forced, and serves one accumulation. */
static void test_configs(void **state)
{
    (void)state;
    struct fp8gen *gen;
    const char *text, *again;
    size_t i;
    json_t *config;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(fp8gen_gemm_configs(gen, &text), FP8GEN_OK);
    assert_int_equal(fp8gen_gemm_configs(gen, &again), FP8GEN_OK);
    assert_ptr_equal(text, again);
    json_t *configs = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    assert_true(json_array_size(configs) > 8);
    json_array_foreach(configs, i, config)
    {
        json_t *plan = plan_with(NULL, json_string_value(json_object_get(config, "name")));
        bool split = json_integer_value(json_object_get(config, "partials")) > 0;
        size_t fprop = generated_ranges(plan, "fprop"), wgrad = generated_ranges(plan, "wgrad");
        assert_true(split ? fprop == 0 : wgrad == 0); /* fprop is fast, the others split */
        json_decref(plan);
    }
    json_decref(configs);
    fp8gen_close(gen);
}

/* wgrad adds to dw and overwrites it with one configuration: it must serve both, and sums of 16
 * bits leave as fp32 where they are added up. */
static void test_both_ways(void **state)
{
    (void)state;
    static const char halves[] =
        "return model \"m\" { layers = { linear \"a\" { in_features = 4096, "
        "out_features = 6144, grad_weight = \"bf16\", "
        "accumulation = { wgrad = \"fast\" } } } }";
    static const char *const forced[] = { "pp128x160c2s5g8", "pp128x192c2s4g8", "pp128x128c2s6g8" };
    for (size_t i = 0; i < 3; i++) {
        struct fp8gen *gen;
        const char *text;
        assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
        assert_int_equal(fp8gen_override(gen, "gemm", forced[i]), FP8GEN_OK);
        assert_int_equal(fp8gen_load_text(gen, "t.lua", halves, strlen(halves)), FP8GEN_OK);
        assert_int_equal(fp8gen_plan(gen, &text), FP8GEN_OK);
        json_t *plan = json_loads(text, 0, NULL);
        assert_int_equal(generated_ranges(plan, "wgrad") > 0, i == 2);
        json_decref(plan);
        fp8gen_close(gen);
    }
}

/* A model of many shapes asks for few kernels: three configurations for each kind of GEMM at
 * most. */
static void test_few_kernels(void **state)
{
    (void)state;
    static const char *const files[] = { "specs/llama3_8b.lua", "specs/llama3_70b.lua",
                                         "specs/internlm2_7b.lua", "specs/qwen3_8b.lua" };
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        struct fp8gen *gen;
        const char *text;
        assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
        assert_int_equal(fp8gen_load_file(gen, files[i]), FP8GEN_OK);
        assert_int_equal(fp8gen_plan(gen, &text), FP8GEN_OK);
        json_t *plan = json_loads(text, 0, NULL);
        size_t count = gemm_kernels(plan);
        printf("%s: %zu GEMM kernels\n", files[i], count);
        assert_true(count >= 4 && count <= 8);
        json_decref(plan);
        fp8gen_close(gen);
    }
}

/* ---- a good file ----------------------------------------------------------------------------- */

static void test_fprop_as_measured(void **state)
{
    (void)state;
    json_t *plan = plan_with(GOOD, NULL);
    const json_t *middle = choices_of(plan, "fprop", 4096),
                 *large = choices_of(plan, "fprop", 8192);
    /* The ranges are cut where the entries begin and end. */
    assert_ptr_equal(choices_of(plan, "fprop", 2000), choices_of(plan, "fprop", 4000));
    assert_ptr_not_equal(choices_of(plan, "fprop", 1999), choices_of(plan, "fprop", 2000));
    assert_ptr_not_equal(choices_of(plan, "fprop", 5000), choices_of(plan, "fprop", 5001));
    expect_part(text_of(choices_of(plan, "fprop", 1999), 0, "reason"), "predicted");
    assert_int_equal(json_array_size(middle), 2);
    assert_string_equal(text_of(middle, 0, "kernel"), "gemm_e4m3_e4m3_bf16_co128x256c1s4g8");
    expect_part(text_of(middle, 0, "reason"),
                "tuned: 1370 TFLOP/s measured at M 4096, next cublaslt_7 1330");
    assert_null(strstr(text_of(middle, 0, "reason"), "bf16 is faster"));
    /* seconds are of the range's 5000 tokens, measured were 4096 */
    const json_t *end = json_array_get(choices_of(plan, "fprop", 5000), 0);
    const double seconds = json_real_value(json_object_get(end, "seconds"));
    assert_true(fabs(seconds / (150.5e-6 * 5000 / 4096) - 1) < 1e-3);
    assert_int_equal(json_array_size(large), 1);
    assert_string_equal(text_of(large, 0, "backend"), "cublaslt");
    assert_int_equal(strlen(text_of(large, 0, "algo")), 128);
    assert_int_equal(json_integer_value(json_object_get(json_array_get(large, 0), "version")),
                     130101);
    expect_part(text_of(large, 0, "reason"), "tuned: 1374 TFLOP/s measured at M 8192");
    expect_part(text_of(large, 0, "reason"), "bf16 is faster here: 1473");
    expect_part(text_of(choices_of(plan, "dgrad", 8192), 0, "reason"), "predicted");
    json_decref(plan);
}

/* wgrad was measured both ways, with another winner each. */
static void test_wgrad_as_measured(void **state)
{
    (void)state;
    json_t *plan = plan_with(GOOD, NULL);
    const json_t *choices = choices_of(plan, "wgrad", 8192);
    assert_string_equal(text_of(choices, 0, "kernel"), "gemm_e5m2_e4m3_fp32_co128x64c1s8p2g8");
    assert_string_equal(text_of(choices, 0, "accumulate_kernel"),
                        "gemm_e5m2_e4m3_fp32_add_co128x128c2s6p2g8");
    expect_part(text_of(choices_of(plan, "wgrad", 4096), 0, "reason"), "predicted");
    json_decref(plan);
}

/* What is forced goes first, and the hash still says that a file was there. */
static void test_force_before_tuning(void **state)
{
    (void)state;
    json_t *forced = plan_with(GOOD, "cublaslt"), *plain = plan_with(NULL, "cublaslt");
    assert_int_equal(gemm_kernels(forced), 0);
    assert_int_equal(strlen(json_string_value(json_object_get(forced, "tuning_hash"))), 32);
    assert_true(json_is_null(json_object_get(plain, "tuning_hash")));
    json_object_set(forced, "tuning_hash", json_object_get(plain, "tuning_hash"));
    assert_true(json_equal(forced, plain));
    json_decref(forced);
    json_decref(plain);
}

/* ---- files on their way ---------------------------------------------------------------------- */

static char folder[] = "/tmp/fp8gen_tuning_XXXXXX", file_path[64];

static int make_folder(void **state)
{
    (void)state;
    if (mkdtemp(folder) == NULL)
        return 1;
    snprintf(file_path, sizeof(file_path), "%s/t.json", folder);
    return 0;
}

static int drop_folder(void **state)
{
    (void)state;
    unlink(file_path);
    return rmdir(folder);
}

static void write_text(const char *text)
{
    FILE *file = fopen(file_path, "wb");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static json_t *good_json(void)
{
    json_t *root = json_load_file(GOOD, 0, NULL);
    assert_non_null(root);
    return root;
}

static void write_json(const json_t *root, size_t flags)
{
    assert_int_equal(json_dump_file(root, file_path, flags), 0);
}

/* Layout does not count; contents do. */
static void test_hash(void **state)
{
    (void)state;
    json_t *root = good_json(), *one = plan_with(GOOD, NULL);
    write_json(root, JSON_COMPACT);
    json_t *same = plan_with(file_path, NULL);
    assert_true(json_equal(one, same));
    json_object_set_new(root, "gpu", json_string("another"));
    write_json(root, 0);
    json_t *other = plan_with(file_path, NULL);
    assert_string_not_equal(json_string_value(json_object_get(one, "tuning_hash")),
                            json_string_value(json_object_get(other, "tuning_hash")));
    json_decref(root);
    json_decref(one);
    json_decref(same);
    json_decref(other);
}

/* An entry is of one GEMM alone: with another field it decides nothing here. */
static void test_other_gemms(void **state)
{
    (void)state;
    static const char *const others[][2] = {
        { "pass", "\"dgrad\"" },         { "N", "6145" },           { "K", "4095" },
        { "a_dtype", "\"e5m2\"" },       { "b_dtype", "\"e5m2\"" }, { "out_dtype", "\"fp32\"" },
        { "accumulation", "\"split\"" },
    };
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        json_t *root = good_json(), *entries = json_object_get(root, "entries");
        json_object_set_new(json_array_get(entries, 1), others[i][0],
                            json_loads(others[i][1], JSON_DECODE_ANY, NULL));
        write_json(root, 0);
        json_t *plan = plan_with(file_path, NULL);
        for (json_int_t m = 5001; m <= 8192; m += 3191)
            expect_part(text_of(choices_of(plan, "fprop", m), 0, "reason"), "predicted");
        json_decref(plan);
        json_decref(root);
    }
    /* and of one scale a tensor */
    struct fp8gen *gen;
    static const char rows[] = "return model \"m\" { layers = { linear \"a\" { in_features = 4096, "
                               "out_features = 6144, recipe = recipe.rowwise {} } } }";
    const char *text;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(fp8gen_tuning_file(gen, GOOD), FP8GEN_OK);
    assert_int_equal(fp8gen_load_text(gen, "rows.lua", rows, strlen(rows)), FP8GEN_OK);
    assert_int_equal(fp8gen_plan(gen, &text), FP8GEN_OK);
    assert_null(strstr(text, "tuned"));
    fp8gen_close(gen);
}

static void expect_refused(fp8gen_status status, const char *const *parts)
{
    struct fp8gen *gen;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    fp8gen_status got = fp8gen_tuning_file(gen, file_path);
    if (got != status)
        fail_msg("status %d, not %d: %s\n%s", (int)got, (int)status, parts[0],
                 fp8gen_diagnostics(gen));
    for (size_t i = 0; parts[i] != NULL; i++)
        expect_part(fp8gen_diagnostics(gen), parts[i]);
    fp8gen_close(gen);
}

struct change {
    const char *path;  /* "entries.0.choice.config.bm" */
    const char *value; /* JSON; NULL: removed */
    const char *wanted;
};

static json_t *child(json_t *value, const char *key)
{
    return json_is_array(value) ? json_array_get(value, (size_t)atoi(key))
                                : json_object_get(value, key);
}

static void apply(json_t *root, const struct change *change)
{
    char path[128];
    snprintf(path, sizeof(path), "%s", change->path);
    char *key = path, *dot;
    while ((dot = strchr(key, '.')) != NULL) {
        *dot = '\0';
        root = child(root, key);
        assert_non_null(root);
        key = dot + 1;
    }
    if (change->value == NULL) {
        assert_int_equal(json_object_del(root, key), 0);
        return;
    }
    json_t *value = json_loads(change->value, JSON_DECODE_ANY, NULL);
    assert_non_null(value);
    assert_int_equal(json_is_array(root) ? json_array_set_new(root, (size_t)atoi(key), value)
                                         : json_object_set_new(root, key, value),
                     0);
}

static const struct change changes[] = {
    { "format", "\"fp8gen\"", "'format' must be \"fp8gen-tuning\", not \"fp8gen\"" },
    { "format", NULL, "'format' must be \"fp8gen-tuning\", not nil" },
    { "format_version", "2", "'format_version' must be 1, not 2" },
    { "gpu", "7", "'gpu' must be a text of 1 to 200 bytes, none a control character, not 7" },
    { "gpu", "\"H200\\u001b[31m\"", "none a control character, not \"H200\\x1b[31m\"" },
    { "cublaslt_version", "-1", "'cublaslt_version' must be a whole number of 0 to" },
    { "entries", "{}", "'entries' must be an array, not an object" },
    { "entries", NULL, "'entries' is missing" },
    { "date", "1", "unknown field \"date\"" },
    { "entries.0", "[]", "entry 1: must be an object, not an array" },
    { "entries.0.pass", "\"forward\"", "entry 1: 'pass' must be \"fprop\" or \"wgrad\" or" },
    { "entries.1.N", "0", "entry 2: 'N' must be a whole number of 1 to 268435456, not 0" },
    { "entries.0.K", "4096.5",
      "entry 1: 'K' must be a whole number of 1 to 268435456, not 4096.5" },
    { "entries.0.a_dtype", "\"fp8\"", "'a_dtype' must be \"e4m3\" or \"e5m2\", not \"fp8\"" },
    { "entries.0.b_dtype", "null", "'b_dtype' must be \"e4m3\" or \"e5m2\", not null" },
    { "entries.0.out_dtype", "\"fp64\"", "'out_dtype' must be \"bf16\" or \"fp16\" or \"fp32\"" },
    { "entries.0.accumulation", "128", "'accumulation' must be \"fast\" or \"split\", not 128" },
    { "entries.0.accumulate", "1", "'accumulate' must be true or false, not 1" },
    { "entries.0.accumulate", "true", "'accumulate' must be false: fprop never accumulates" },
    { "entries.0.max_tokens", "1999", "'max_tokens' must be at least min_tokens (2000), not 1999" },
    { "entries.0.measured_tokens", "9", "'measured_tokens' must lie in 2000 to 5000, not at 9" },
    { "entries.1.min_tokens", "5000",
      "entry 2: its tokens 5000 to 8192 overlap those of entry 1, 2000 to 5000, for the same "
      "GEMM" },
    { "entries.0.bf16_microseconds", "0",
      "'bf16_microseconds' must be a number above 0 and up to 1e12, or null, not 0" },
    { "entries.0.choise", "{}", "unknown field \"choise\"" },
    { "entries.0.choise", "{}", "did you mean 'choice'?" },
    { "entries.0.choice.backend", "\"cutlass\"", "choice.backend must be \"generated\" or" },
    { "entries.0.choice.config.bm", "96",
      "choice.config is no configuration of this version: bm 96" },
    { "entries.0.choice.config.bm", NULL, "entry 1: choice.config: 'bm' is missing" },
    { "entries.0.choice.config.pingpong", "\"no\"",
      "'pingpong' must be true or false, not \"no\"" },
    { "entries.3.choice.config.name", "\"other\"", "entry 4: choice.config is no configuration" },
    { "entries.2.choice.config.partials", "0", "entry 3: choice.config is no configuration" },
    { "entries.0.accumulation", "\"split\"",
      "choice.config co128x256c1s4g8 does not serve split accumulation into bf16" },
    { "entries.1.choice.algo", "\"12\"",
      "'algo' must be 128 hexadecimal digits in lower case, not \"12\"" },
    { "entries.1.choice.algo",
      "\"0123456789ABCDEF0123456789abcdef0123456789abcdef0123456789abcdef"
      "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\"",
      "in lower case, not \"0123456789ABCDEF" },
    { "entries.1.choice.version", "0", "'version' must be a whole number of 1 to" },
    { "entries.1.choice.version", NULL, "entry 2: choice: 'version' is missing" },
    { "entries.1.choice.tile", "3", "unknown field \"tile\"" },
    { "entries.0.measured", "[]", "entry 1: 'measured' is empty" },
    { "entries.0.measured", "[1]", "entry 1: measured 1: must be an object, not 1" },
    { "entries.0.measured.1.microseconds", "-1",
      "entry 1: measured 2: 'microseconds' must be a number above 0 and up to 1e12, not -1" },
    { "entries.0.measured.1.microseconds", "1e308", "above 0 and up to 1e12, not 1e+308" },
    { "entries.0.measured.0.name", "\"x\\ny\"", "measured 1: 'name' must be a text of 1 to 200" },
    { "entries.0.measured.1.name", "\"x\"",
      "entry 1: 'measured' lacks the chosen co128x256c1s4g8" },
};

static void test_bad_fields(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
        json_t *root = good_json();
        apply(root, &changes[i]);
        write_json(root, 0);
        expect_refused(FP8GEN_ERR_SPEC,
                       (const char *const[]){ changes[i].wanted, "/t.json: error: ", NULL });
        json_decref(root);
    }
}

/* Each entry cuts a dispatch, of which a bundle takes so many ranges. */
static void test_many_entries(void **state)
{
    (void)state;
    for (int count = 24; count <= 25; count++) {
        json_t *root = good_json(), *entries = json_array();
        for (int i = 0; i < count; i++) {
            json_t *entry = json_deep_copy(json_array_get(json_object_get(root, "entries"), 0));
            json_object_set_new(entry, "min_tokens", json_integer(100 * i + 1));
            json_object_set_new(entry, "measured_tokens", json_integer(100 * i + 30));
            json_object_set_new(entry, "max_tokens", json_integer(100 * i + 50));
            json_array_append_new(entries, entry);
        }
        json_object_set_new(root, "entries", entries);
        write_json(root, 0);
        json_decref(root);
        if (count == 24) {
            json_t *plan = plan_with(file_path, NULL);
            assert_in_range(json_array_size(dispatch_of(plan, "fprop")), 48, 64);
            json_decref(plan);
        } else {
            expect_refused(
                FP8GEN_ERR_SPEC,
                (const char *const[]){
                    "entry 25: it is the 25th for the same GEMM (fprop 6144 4096", NULL });
        }
    }
}

static void test_bad_texts(void **state)
{
    (void)state;
    static const struct {
        const char *text, *wanted;
    } bad[] = {
        { "", "not JSON" },
        { "{\n  \"format\": ", "t.json:2:" },
        { "{\"format\": 1, \"format\": 2}", "not JSON: duplicate object key" },
        { "[1, 2]", "a tuning file is an object, not an array" },
        { "{}", "'format' must be" },
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        write_text(bad[i].text);
        expect_refused(FP8GEN_ERR_SPEC, (const char *const[]){ bad[i].wanted, "error: ", NULL });
    }
    unlink(file_path);
    expect_refused(FP8GEN_ERR_MACHINE, (const char *const[]){ "t.json", NULL });
}

/* All errors of a file, up to a number. */
static void test_many_errors(void **state)
{
    (void)state;
    json_t *root = good_json(), *entries = json_object_get(root, "entries");
    for (int i = 0; i < 30; i++)
        json_array_append_new(entries, json_integer(i));
    write_json(root, 0);
    expect_refused(FP8GEN_ERR_SPEC, (const char *const[]){ "entry 5: must", "entry 24: must",
                                                           "10 more errors", NULL });
    json_decref(root);
}

static void test_order_of_calls(void **state)
{
    (void)state;
    const char *text;
    struct fp8gen *gen = open_with(GOOD, NULL);
    assert_int_equal(fp8gen_tuning_file(gen, GOOD), FP8GEN_ERR_ARGUMENT);
    expect_part(fp8gen_diagnostics(gen), "has a tuning file already");
    assert_int_equal(fp8gen_tuning_file(gen, NULL), FP8GEN_ERR_ARGUMENT);
    fp8gen_close(gen);
    gen = open_with(NULL, NULL); /* after the spec is early enough, after the plan is not */
    assert_int_equal(fp8gen_plan(gen, &text), FP8GEN_OK);
    assert_int_equal(fp8gen_tuning_file(gen, GOOD), FP8GEN_ERR_ARGUMENT);
    expect_part(fp8gen_diagnostics(gen), "comes too late");
    fp8gen_close(gen);
}

static void test_out_of_memory(void **state)
{
    (void)state;
    for (int64_t n = 1;; n += 1 + n / 16) {
        struct fp8gen *gen;
        const char *text;
        assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
        gen_alloc_fail(n, true);
        fp8gen_status status = fp8gen_tuning_file(gen, GOOD);
        if (status == FP8GEN_OK)
            status = fp8gen_gemm_configs(gen, &text);
        gen_alloc_fail(0, false);
        if (status != FP8GEN_OK)
            assert_int_equal(status, FP8GEN_ERR_MACHINE);
        fp8gen_close(gen);
        if (status == FP8GEN_OK)
            break;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forced_backend),      cmocka_unit_test(test_forced_configuration),
        cmocka_unit_test(test_unknown_force),       cmocka_unit_test(test_configs),
        cmocka_unit_test(test_both_ways),           cmocka_unit_test(test_few_kernels),
        cmocka_unit_test(test_fprop_as_measured),   cmocka_unit_test(test_wgrad_as_measured),
        cmocka_unit_test(test_force_before_tuning), cmocka_unit_test(test_hash),
        cmocka_unit_test(test_bad_fields),          cmocka_unit_test(test_other_gemms),
        cmocka_unit_test(test_many_entries),        cmocka_unit_test(test_bad_texts),
        cmocka_unit_test(test_many_errors),         cmocka_unit_test(test_order_of_calls),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, make_folder, drop_folder);
}
