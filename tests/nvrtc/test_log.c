/*
 * test_log.c - errors planted in templates come back at the template's own file, line and column,
 * and kernels that compile badly are refused.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/compile.h"
#include "tests/nvrtc/rig.h"

static char folder[RIG_PATH];

static void path_of(char path[2 * RIG_PATH], const char *name)
{
    snprintf(path, 2 * RIG_PATH, "%s/%s", folder, name);
}

/* Builds rig_small from the templates in the folder; the diagnostics are the caller's to free. */
static char *build(fp8gen_status wanted)
{
    char output[2 * RIG_PATH];
    fp8gen_build_options options = FP8GEN_BUILD_OPTIONS_INIT;
    struct fp8gen *gen = rig_open(rig_small, folder);
    path_of(output, "bundle");
    options.output_dir = output;
    options.archs = "sm_90a";
    fp8gen_status status = fp8gen_build(gen, &options);
    if (status != wanted)
        fail_msg("status %d:\n%s", (int)status, fp8gen_diagnostics(gen));
    char *text = strdup(fp8gen_diagnostics(gen));
    fp8gen_close(gen);
    size_t size;
    char manifest[3 * RIG_PATH];
    snprintf(manifest, sizeof(manifest), "%s/manifest.json", output);
    char *there = rig_read(manifest, &size);
    assert_int_equal(there != NULL, wanted == FP8GEN_OK);
    free(there);
    return text;
}

static void expect_part(const char *text, const char *part)
{
    if (strstr(text, part) == NULL)
        fail_msg("'%s' is not in:\n%s", part, text);
}

static int count_parts(const char *text, const char *part)
{
    int count = 0;
    while ((text = strstr(text, part)) != NULL) {
        count++;
        text += strlen(part);
    }
    return count;
}

/* Puts lines before the first line of the template that holds `mark`; the templates beside it
 * become idle. Returns the line number of the first new line. */
static int plant(const char *name, const char *mark, const char *lines)
{
    char path[2 * RIG_PATH];
    size_t size;
    if (strstr(name, ".cuh") == NULL)
        rig_copy_templates(folder, name);
    path_of(path, name);
    char *text = rig_read(path, &size);
    assert_non_null(text);
    char *at = strstr(text, mark);
    assert_non_null(at);
    while (at > text && at[-1] != '\n')
        at--;
    int number = 1;
    for (const char *p = text; p < at; p++)
        number += *p == '\n';
    struct buf changed = { 0 };
    buf_put(&changed, text, (size_t)(at - text));
    buf_puts(&changed, lines);
    buf_puts(&changed, at);
    rig_write(path, changed.data);
    buf_free(&changed);
    free(text);
    return number;
}

static void expect_place(const char *text, const char *name, int line, const char *rest)
{
    char wanted[3 * RIG_PATH];
    snprintf(wanted, sizeof(wanted), "%s/%s:%d%s", folder, name, line, rest);
    expect_part(text, wanted);
}

static void test_templates_as_they_are(void **state)
{
    (void)state;
    rig_copy_templates(folder, NULL);
    free(build(FP8GEN_OK));
}

/* The proof of #line: Lua lines before the error put output and template out of step. */
static void test_error_after_lua_lines(void **state)
{
    (void)state;
    int line = plant("quantize.cu", "extern \"C\"",
                     "//% for i = 1, 7 do\n"
                     "constexpr int planted_$i = $i;\n"
                     "//% end\n"
                     "//% -- one more\n"
                     "constexpr int wrong = not_declared;\n");
    char *text = build(FP8GEN_ERR_SPEC);
    expect_place(text, "quantize.cu", line + 4,
                 ":23: error: identifier \"not_declared\" is undefined");
    expect_part(text, "constexpr int wrong = not_declared;");
    expect_part(text, "kernel quantize_bf16 for sm_90a, by NVRTC ");
    /* Both variants of the template fail alike: said once. */
    assert_int_equal(count_parts(text, "not_declared\" is undefined"), 1);
    free(text);
}

/* Inside a loop the line is the one of the template, whatever the iteration. */
static void test_error_inside_a_loop(void **state)
{
    (void)state;
    int line = plant("store.cu", "extern \"C\"",
                     "//% for i = 1, 3 do\n"
                     "constexpr int before_$i = $i;\n"
                     "constexpr int wrong_$i = absent_$i;\n"
                     "//% end\n");
    char *text = build(FP8GEN_ERR_SPEC);
    expect_place(text, "store.cu", line + 2, ": error: identifier \"absent_1\" is undefined");
    expect_place(text, "store.cu", line + 2, ": error: identifier \"absent_3\" is undefined");
    free(text);
}

static void test_error_in_a_header(void **state)
{
    (void)state;
    int line = plant("types.cuh", "struct bf16", "int missing_semicolon\n");
    char *text = build(FP8GEN_ERR_SPEC);
    expect_place(text, "types.cuh", line + 1, ":");
    expect_part(text, "expected a \";\"");
    free(text);
}

/* C20: an injected #error. */
static void test_error_directive(void **state)
{
    (void)state;
    int line = plant("amax.cu", "extern \"C\"", "#error planted by a test\n");
    char *text = build(FP8GEN_ERR_SPEC);
    expect_place(text, "amax.cu", line, ":");
    expect_part(text, "#error directive: planted by a test");
    free(text);
}

static void test_missing_header(void **state)
{
    (void)state;
    plant("amax.cu", "extern \"C\"", "#include \"no/such.cuh\"\n");
    char *text = build(FP8GEN_ERR_SPEC);
    expect_part(text, "cannot open source file \"no/such.cuh\"");
    free(text);
    plant("amax.cu", "extern \"C\"", "#include \"no_such.cuh\"\n");
    text = build(FP8GEN_ERR_MACHINE);
    expect_part(text, "no_such.cuh");
    free(text);
}

static void test_wrong_instruction(void **state)
{
    (void)state;
    plant("dequantize.cu", "extern \"C\"",
          "extern \"C\" __global__ void bad(int *p) { asm(\"bogus.s32 %0;\" : \"=r\"(*p)); }\n");
    char *text = build(FP8GEN_ERR_SPEC);
    expect_part(text, "dequantize.cu: error: ptxas");
    expect_part(text, "bogus");
    free(text);
}

static void test_spills_are_refused(void **state)
{
    (void)state;
    plant("dequantize.cu", "extern \"C\"",
          "extern \"C\" __global__ void __launch_bounds__(1024, 2) spilling(float *p) {\n"
          "    float a[64];\n"
          "#pragma unroll\n"
          "    for (int i = 0; i < 64; i++) a[i] = p[i * threadIdx.x];\n"
          "    for (int j = 0; j < 100; j++) {\n"
          "#pragma unroll\n"
          "        for (int i = 0; i < 64; i++) a[i] = a[i] * a[(i + 1) % 64] + p[j];\n"
          "    }\n"
          "#pragma unroll\n"
          "    for (int i = 0; i < 64; i++) p[i + threadIdx.x] = a[i];\n"
          "}\n");
    char *text = build(FP8GEN_ERR_SPEC);
    expect_part(text, "dequantize.cu: error: spilling spills registers: ");
    expect_part(text, " bytes stored, ");
    free(text);
}

static void test_ignored_setmaxnreg_is_refused(void **state)
{
    (void)state;
    plant("dequantize.cu", "extern \"C\"",
          "extern \"C\" __global__ void ignored(int *p) {\n"
          "    asm volatile(\"setmaxnreg.inc.sync.aligned.u32 240;\");\n"
          "    *p = 1;\n"
          "}\n");
    char *text = build(FP8GEN_ERR_SPEC);
    expect_part(text, "C7508");
    free(text);
}

/* An error of the template language stops the build before NVRTC. */
static void test_error_of_the_template(void **state)
{
    (void)state;
    int line = plant("store.cu", "extern \"C\"", "constexpr int n = $not_set;\n");
    char *text = build(FP8GEN_ERR_SPEC);
    expect_place(text, "store.cu", line, ":20: error: 'not_set' is not set");
    expect_part(text, "set by the plan: entry, source, target");
    free(text);
}

static int make_templates(void **state)
{
    (void)state;
    rig_scratch(folder);
    rig_copy_templates(folder, "amax.cu"); /* includes most headers */
    return 0;
}

static int drop_templates(void **state)
{
    (void)state;
    rig_remove(folder);
    return 0;
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, make_templates, drop_templates)

int main(void)
{
    int missing = rig_nvrtc_missing();
    if (missing)
        return missing;
    const struct CMUnitTest tests[] = {
        CASE(test_templates_as_they_are),
        CASE(test_error_after_lua_lines),
        CASE(test_error_inside_a_loop),
        CASE(test_error_in_a_header),
        CASE(test_error_directive),
        CASE(test_missing_header),
        CASE(test_wrong_instruction),
        CASE(test_spills_are_refused),
        CASE(test_ignored_setmaxnreg_is_refused),
        CASE(test_error_of_the_template),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
