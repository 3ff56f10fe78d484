/*
 * rig.c - see rig.h.
 */
#include "tests/nvrtc/rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LAYER(name, fields)                                                                        \
    " linear \"" name "\" { in_features = 64, out_features = 48, " fields "},\n"

/* clang-format off */
const char rig_every_variant[] = "return model \"variants\" { mesh = { fsdp = 2 }, layers = {\n"
    /* bf16 and fp32 weights, all outputs; hybrid and e4m3; power of two or not; with and without
     * bias. */
    LAYER("a", "bias = true")
    LAYER("b", "bias = true, recipe = recipe.current { power_of_two = true }, weight = \"fp32\", "
               "grad_weight = \"bf16\"")
    LAYER("c", "recipe = recipe.current { format = \"e4m3\" }, "
               "weight = \"fp32\", output = \"fp32\"")
    LAYER("d", "recipe = recipe.current { format = \"e4m3\", power_of_two = true }, "
               "grad_input = \"fp32\", output = \"fp16\", grad_weight = \"fp16\"")
    LAYER("m", "recipe = recipe.current { weight_scale = \"shard\" }")
    LAYER("e", "bias = true, recipe = recipe.delayed {}")
    LAYER("f", "recipe = recipe.delayed { power_of_two = true }, weight = \"fp32\"")
    LAYER("l", "recipe = recipe.delayed { calibrate = true, margin = 2 }")
    LAYER("g", "bias = true, recipe = recipe.rowwise {}")
    LAYER("h", "recipe = recipe.rowwise { power_of_two = false }, weight = \"fp32\"")
    LAYER("i", "recipe = recipe.rowwise_hp_wgrad {}, weight = \"fp32\"")
    LAYER("j", "bias = true, recipe = recipe.block {}")
    LAYER("k", "recipe = recipe.block { power_of_two = false }, weight = \"fp32\"")
    "} }\n";
/* clang-format on */

const char rig_small[] = "return model \"small\" { layers = {\n" LAYER("a", "bias = true") "} }\n";

int rig_nvrtc_missing(void)
{
    struct fp8gen *gen;
    const char *path, *version, *require = getenv("FP8_TEST_REQUIRE");
    if (fp8gen_open(NULL, &gen) != FP8GEN_OK)
        return 1;
    int code = 0;
    if (fp8gen_nvrtc(gen, &path, &version) != FP8GEN_OK) {
        printf("skip: %s", fp8gen_diagnostics(gen));
        code = require != NULL && strstr(require, "nvrtc") != NULL ? 1 : 77;
    } else {
        printf("NVRTC %s, %s\n", version, path);
    }
    fp8gen_close(gen);
    return code;
}

void rig_scratch(char path[RIG_PATH])
{
    const char *base = getenv("TMPDIR");
    snprintf(path, RIG_PATH, "%s/fp8gen_test_XXXXXX", base != NULL && *base ? base : "/tmp");
    if (mkdtemp(path) == NULL)
        fail_msg("cannot make the folder %s", path);
}

static int remove_entry(const char *path, const struct stat *info, int type, struct FTW *where)
{
    (void)info, (void)type, (void)where;
    return remove(path);
}

void rig_remove(const char *path)
{
    nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

struct fp8gen *rig_open(const char *spec, const char *template_dir)
{
    return rig_open_gemm(spec, template_dir, NULL);
}

struct fp8gen *rig_open_gemm(const char *spec, const char *template_dir, const char *gemm)
{
    fp8gen_options options = FP8GEN_OPTIONS_INIT;
    struct fp8gen *gen;
    options.template_dir = template_dir;
    assert_int_equal(fp8gen_open(&options, &gen), FP8GEN_OK);
    fp8gen_status status = gemm != NULL ? fp8gen_override(gen, "gemm", gemm) : FP8GEN_OK;
    if (status != FP8GEN_OK || fp8gen_load_text(gen, "test.lua", spec, strlen(spec)) != FP8GEN_OK)
        fail_msg("%s", fp8gen_diagnostics(gen));
    return gen;
}

struct fp8gen *rig_make_jobs(const char *spec, const char *gemm, const char *const *archs,
                             struct gen_plan **plan, struct gen_jobs *jobs)
{
    struct fp8gen *gen = rig_open_gemm(spec, NULL, gemm);
    assert_int_equal(gen_expand_plan(gen, plan), FP8GEN_OK);
    assert_int_equal(gen_nvrtc_open(gen), FP8GEN_OK);
    assert_int_equal(gen_make_jobs(gen, *plan, archs, jobs), FP8GEN_OK);
    return gen;
}

void rig_compile(struct fp8gen *gen, struct gen_jobs *jobs)
{
    if (gen_run_jobs(gen, jobs, 0, NULL, NULL) != FP8GEN_OK)
        fail_msg("%s", fp8gen_diagnostics(gen));
}

void rig_copy_templates(const char *folder, const char *only)
{
    for (const struct embedded_file *file = gen_embedded_files; file->name != NULL; file++) {
        const char *dot = strrchr(file->name, '.');
        if (dot == NULL || (strcmp(dot, ".cu") != 0 && strcmp(dot, ".cuh") != 0))
            continue;
        char path[2 * RIG_PATH];
        snprintf(path, sizeof(path), "%s/%s", folder, file->name);
        bool idle = only != NULL && strcmp(dot, ".cu") == 0 && strcmp(file->name, only) != 0;
        rig_write(path,
                  idle ? "extern \"C\" __global__ void $entry() {}\n" : (const char *)file->data);
    }
}

char *rig_read(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return NULL;
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    char *text = malloc(*size + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, *size, file), *size);
    text[*size] = '\0';
    fclose(file);
    return text;
}

void rig_write(const char *path, const char *text)
{
    FILE *file = fopen(path, "wb");
    if (file == NULL)
        fail_msg("cannot write %s", path);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}
