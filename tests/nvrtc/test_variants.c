/*
 * test_variants.c - every template and every variant that a plan can ask for, compiled for sm_90a
 * and for one more of the archs that this NVRTC knows, in turn; of GEMMs see test_gemm.c. Needs no
 * GPU. No error, no spill, no warning.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "gen/compile.h"
#include "tests/nvrtc/rig.h"

static const char *const every_arch[] = {
    "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103a", "sm_120", "sm_120a",
};
enum { ARCHS = sizeof(every_arch) / sizeof(every_arch[0]) };

/* The archs of the list that this NVRTC knows; an old one lacks the newest. */
static void known_archs(const char *archs[ARCHS + 1])
{
    int count = 0;
    for (size_t i = 0; i < ARCHS; i++) {
        struct fp8gen *gen = rig_open(rig_small, NULL);
        assert_int_equal(gen_nvrtc_open(gen), FP8GEN_OK);
        if (gen_nvrtc_check_arch(gen, every_arch[i]) == FP8GEN_OK)
            archs[count++] = every_arch[i];
        else
            printf("left out: %s", fp8gen_diagnostics(gen));
        fp8gen_close(gen);
    }
    archs[count] = NULL;
    assert_true(count > 0);
}

/* Of the jobs for a kernel those for sm_90a and for one other arch remain. */
static void keep_two_archs(struct gen_jobs *jobs, const char *const *archs)
{
    int32_t kept = 0, kernels = 0;
    int count = 0;
    while (archs[count] != NULL)
        count++;
    for (int32_t i = 0; i < jobs->count; i++) {
        kernels += i > 0 && jobs->list[i].kernel != jobs->list[i - 1].kernel;
        if (strcmp(jobs->list[i].arch, "sm_90a") == 0 ||
            strcmp(jobs->list[i].arch, archs[kernels % count]) == 0)
            jobs->list[kept++] = jobs->list[i];
    }
    jobs->count = kept;
}

static void test_every_variant(void **state)
{
    (void)state;
    const char *archs[ARCHS + 1];
    struct gen_plan *plan;
    struct gen_jobs jobs = { 0 };
    known_archs(archs);
    struct fp8gen *gen = rig_make_jobs(rig_every_variant, "cublaslt", archs, &plan, &jobs);
    keep_two_archs(&jobs, archs);
    rig_compile(gen, &jobs);
    for (int32_t i = 0; i < jobs.count; i++) {
        const struct gen_job *job = &jobs.list[i];
        if (job->cubin_bytes < 1000 || memcmp(job->cubin, "\177ELF", 4) != 0)
            fail_msg("%s for %s: no cubin", job->kernel->name, job->arch);
        if (strstr(job->log, "warning") != NULL)
            fail_msg("%s for %s:\n%s", job->kernel->name, job->arch, job->log);
        if (memmem(job->cubin, job->cubin_bytes, job->kernel->entry, strlen(job->kernel->entry)) ==
            NULL)
            fail_msg("%s for %s: no entry %s", job->kernel->name, job->arch, job->kernel->entry);
    }
    printf("%d kernels compiled\n", (int)jobs.count);
    gen_jobs_free(&jobs);
    fp8gen_close(gen);
}

/* Kernels are launched while the one before may still run, so each must wait for it. */
static void check_waits(const struct gen_kernel *kernel)
{
    if (strstr(kernel->body, "start_kernel(") == NULL &&
        strstr(kernel->body, "wait_for_previous_kernel(") == NULL)
        fail_msg("%s does not wait for the kernel before it", kernel->template_name);
}

/* The spec above covers every template that there is. */
static void test_every_template(void **state)
{
    (void)state;
    struct gen_plan *plan;
    struct fp8gen *gen = rig_open_gemm(rig_every_variant, NULL, "generated");
    assert_int_equal(gen_expand_plan(gen, &plan), FP8GEN_OK);
    for (int32_t i = 0; i < plan->count; i++)
        check_waits(&plan->kernels[i]);
    for (const struct embedded_file *file = gen_embedded_files; file->name != NULL; file++) {
        size_t length = strlen(file->name);
        if (length < 3 || strcmp(file->name + length - 3, ".cu") != 0)
            continue;
        bool used = false;
        for (int32_t i = 0; i < plan->count; i++)
            used = used || strcmp(plan->kernels[i].template_name, file->name) == 0;
        if (!used)
            fail_msg("no kernel uses the template %s", file->name);
    }
    fp8gen_close(gen);
}

int main(void)
{
    int missing = rig_nvrtc_missing();
    if (missing)
        return missing;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_template),
        cmocka_unit_test(test_every_variant),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
