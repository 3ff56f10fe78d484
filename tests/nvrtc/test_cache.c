/*
 * test_cache.c - the cache with the real NVRTC: what comes out of it is what NVRTC would give, a
 * cubin.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/nvrtc/rig.h"

static char folder[RIG_PATH];
static int compiled;

static void count(void *user, int level, const char *message)
{
    (void)user, (void)level;
    __atomic_add_fetch(&compiled, strncmp(message, "compiled ", 9) == 0, __ATOMIC_RELAXED);
}

/* Builds the small spec, kernels but one doing nothing; cache is a name in the folder, or "". */
static void build(const char *name, const char *cache)
{
    char output[2 * RIG_PATH], templates[2 * RIG_PATH], cache_dir[2 * RIG_PATH];
    fp8gen_build_options options = FP8GEN_BUILD_OPTIONS_INIT;
    snprintf(templates, sizeof(templates), "%s/templates", folder);
    snprintf(output, sizeof(output), "%s/%s", folder, name);
    snprintf(cache_dir, sizeof(cache_dir), "%s/%s", folder, cache);
    struct fp8gen *gen = rig_open(rig_small, templates);
    options.output_dir = output;
    options.archs = "sm_90";
    options.cache_dir = *cache != '\0' ? cache_dir : "";
    options.log = count;
    if (fp8gen_build(gen, &options) != FP8GEN_OK)
        fail_msg("%s", fp8gen_diagnostics(gen));
    fp8gen_close(gen);
}

static void a_cached_cubin_is_nvrtcs(void **state)
{
    (void)state;
    char path[4 * RIG_PATH], command[5 * RIG_PATH];
    size_t size;
    rig_scratch(folder);
    snprintf(command, sizeof(command), "mkdir %s/templates", folder);
    assert_int_equal(system(command), 0);
    snprintf(path, sizeof(path), "%s/templates", folder);
    rig_copy_templates(path, "dequantize.cu");
    build("plain", "");
    assert_int_equal(compiled, 0);
    build("cold", "cache");
    int kernels = compiled;
    assert_true(kernels > 0);
    build("warm", "cache");
    assert_int_equal(compiled, kernels);
    snprintf(command, sizeof(command), "diff -r %s/plain %s/cold && diff -r %s/plain %s/warm",
             folder, folder, folder, folder);
    assert_int_equal(system(command), 0);
    snprintf(path, sizeof(path), "%s/warm/kernels/dequantize_tensor.sm_90.cubin", folder);
    char *cubin = rig_read(path, &size);
    assert_non_null(cubin);
    assert_memory_equal(cubin, "\177ELF", 4); /* no PTX, that a driver would have to compile */
    free(cubin);
    rig_remove(folder);
}

int main(void)
{
    int missing = rig_nvrtc_missing();
    if (missing != 0)
        return missing;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_cached_cubin_is_nvrtcs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
