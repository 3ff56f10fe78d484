/*
 * test_versions.c - a toolkit that is newer than the driver: the driver refuses a cubin, the
 * sentence names both versions. On the fake driver, which is for CUDA 13.0.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>
#include <string.h>

#include "tests/bundle/cuda_rig.h"
#include "tests/bundle/fake/fake.h"

static struct fake_cuda *cuda;

/* Opens with every call failing once; returns how often it was the loading of a cubin. */
static int fail_loads(fp8_context *context, const char *folder, const char *wanted,
                      const char *unwanted)
{
    int loads = 0;
    fp8_status status = FP8_ERR_CUDA;
    for (int64_t at = 1; status != FP8_OK; at++) {
        fp8_bundle *bundle;
        cuda->fail_code = 222; /* CUDA_ERROR_UNSUPPORTED_PTX_VERSION */
        cuda->fail_at = cuda->calls + at;
        status = fp8_bundle_open(context, folder, &bundle);
        const char *sentence = fp8_last_error();
        if (status != FP8_OK && strstr(sentence, "loading the cubin of kernel")) {
            loads++;
            assert_int_equal(status, FP8_ERR_CUDA);
            if (strstr(sentence, wanted) == NULL || strstr(sentence, unwanted) != NULL)
                fail_msg("%s", sentence);
        }
        cuda->fail_at = 0;
        fp8_bundle_close(bundle);
    }
    return loads;
}

static void both_versions_are_named(void **state)
{
    (void)state;
    fp8_context *context = bundle_context(0);
    json_t *manifest = bundle_manifest();
    size_t kernels = json_array_size(json_object_get(manifest, "kernels"));
    json_object_set_new(manifest, "nvrtc", json_string("13.9"));
    char *folder = cuda_bundle(manifest);
    int loads = fail_loads(
        context, folder, "the cubin was compiled by NVRTC 13.9, the driver is for CUDA 13.0", "\n");
    assert_int_equal(loads, kernels);
    bundle_remove(folder);

    folder = cuda_bundle(bundle_manifest()); /* not known what compiled it */
    assert_true(fail_loads(context, folder, "CUDA_ERROR", "NVRTC") > 0);
    bundle_remove(folder);
    fp8_context_destroy(context);
    assert_int_equal(cuda->live, 0);
}

int main(void)
{
    cuda = bundle_fake_cuda();
    bundle_fake_lt();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_versions_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
