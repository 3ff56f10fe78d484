/*
 * test_delays.c - products whose warps come late at random: the race test of the generated GEMMs.
 *
 * racecheck does not follow mbarriers, so it has no verdict on these kernels. Here the templates
 * are built with a wait of random length (up to some microseconds) at every place where one warp
 * meets another (templates/stumble.cuh): before and after it waits for a stage, before it hands one
 * back, passes its turn, takes or publishes a tile, reuses a slab, sends one. Any order of events
 * that the barriers allow comes up over enough launches; all products must have the bits of the
 * kernels without waits. And the test can fail: with one barrier arrived at too early, which goes
 * unnoticed without waits more often than not, it does.
 */
#include <stdlib.h>
#include <string.h>

#include "gen/internal.h"
#include "tests/runtime/rig_exact.h"

/* In place of templates/stumble.cuh. One statement without a branch: ptxas would have every wgmma
 * finish before one. One wait in four is taken, of up to 2 us. */
static const char waits[] =
    "#pragma once\n"
    "__device__ __forceinline__ void stumble() {\n"
    "    unsigned h;\n"
    "    asm volatile(\"{\\n\\t.reg .b32 t;\\n\\t.reg .pred late;\\n\\t\"\n"
    "                 \"mov.u32 %0, %%clock;\\n\\tmov.u32 t, %%tid.x;\\n\\tshr.u32 t, t, "
    "5;\\n\\t\"\n"
    "                 \"mad.lo.u32 %0, t, 2654435769, %0;\\n\\tmul.lo.u32 %0, %0, "
    "2246822519;\\n\\t\"\n"
    "                 \"shr.u32 t, %0, 15;\\n\\txor.b32 %0, %0, t;\\n\\t\"\n"
    "                 \"mul.lo.u32 %0, %0, 3266489917;\\n\\tshr.u32 t, %0, 30;\\n\\t\"\n"
    "                 \"setp.eq.u32 late, t, 0;\\n\\tshr.u32 %0, %0, 8;\\n\\t\"\n"
    "                 \"and.b32 %0, %0, 2047;\\n\\t@late nanosleep.u32 %0;\\n\\t}\"\n"
    "                 : \"=r\"(h)::\"memory\");\n"
    "}\n";

/* A fault: the stage is handed back before it is multiplied, and not after. Each text of
 * mainloop.cuh and what takes its place; the waits behind it let the producer overwrite the
 * stage. */
static const char *const faults[2][2] = {
    { "        mbarrier_wait<barriers_offset>(base + 8 * at.stage, at.phase);\n",
      "        mbarrier_wait<barriers_offset>(base + 8 * at.stage, at.phase);\n"
      "        hand_back(at.stage);\n" },
    { "    __device__ __forceinline__ void release(int stage, bool there = true) const {\n",
      "    __device__ __forceinline__ void release(int, bool = true) const {}\n"
      "    __device__ __forceinline__ void hand_back(int stage, bool there = true) const {\n" },
};

/* One of each kind: schedules, clusters, partial sums, counters of tiles, exchanges. */
static const char *const watched[] = {
    "pp128x128c1s6g8",     "pp128x192c2s4g8",     "pp128x128c1s5o4g8a",   "pp128x128c2s6g8a",
    "co128x128c1s6p2g8",   "co192x128c1s4p1w3g8", "co192x128c1s4p1w3g8a", "co128x256c2s4g8",
    "ex128x128c1s4p2k4g8", "sw128x64c1s7k2g8",
};
enum { WATCHED = sizeof watched / sizeof watched[0] };

static void write_file(const char *folder, const char *name, const char *text, size_t bytes)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

/* The text with one part of it replaced; the caller frees it. */
static char *replaced(const char *text, const char *const part[2])
{
    const char *at = strstr(text, part[0]);
    char *result = malloc(strlen(text) + strlen(part[1]) + 1);
    assert_true(at != NULL && result != NULL);
    memcpy(result, text, (size_t)(at - text));
    strcpy(result + (at - text), part[1]);
    strcat(result, at + strlen(part[0]));
    return result;
}

/* The templates with waits, and with the fault. */
static void make_templates(char folder[256], bool with_fault)
{
    const char *temporary = getenv("TMPDIR");
    snprintf(folder, 256, "%s/fp8gen-delays-XXXXXX", temporary != NULL ? temporary : "/tmp");
    assert_non_null(mkdtemp(folder));
    for (const struct embedded_file *file = gen_embedded_files; file->name != NULL; file++) {
        const char *dot = strrchr(file->name, '.'), *text = (const char *)file->data;
        if (dot == NULL || (strcmp(dot, ".cu") != 0 && strcmp(dot, ".cuh") != 0))
            continue;
        if (strcmp(file->name, "stumble.cuh") == 0) {
            write_file(folder, file->name, waits, strlen(waits));
        } else if (with_fault && strcmp(file->name, "mainloop.cuh") == 0) {
            char *first = replaced(text, faults[0]), *second = replaced(first, faults[1]);
            write_file(folder, file->name, second, strlen(second));
            free(first), free(second);
        } else {
            write_file(folder, file->name, text, file->size);
        }
    }
}

static void drop_templates(const char *folder)
{
    char path[512];
    for (const struct embedded_file *file = gen_embedded_files; file->name != NULL; file++) {
        snprintf(path, sizeof path, "%s/%s", folder, file->name);
        remove(path);
    }
    remove(folder);
}

/* ---- one configuration, forward or the weight's gradient ---- */

/* Few SMs, so that each makes many tiles; edges in every extent, rows of y of 8 bytes beyond whole
 * 16. */
enum { M = 600, N = 652, K = 1160, SMS = 6 };

struct watch {
    struct rig_layers layers;
    fp8_operand x, w, dy;
};

static void watch_open(struct watch *v, const struct configuration *c)
{
    struct rig_spec spec = { .out_features = N, .in_features = K, .max_tokens = M };
    struct exact x, w, dy;
    spec.fprop_split = !c->fast, spec.wgrad_fast = c->fast;
    exact_open(c, &v->layers, &spec, 1);
    exact_make(&x, M, K, 31), exact_make(&w, N, K, 32), exact_make(&dy, M, N, 33);
    exact_quantize(&v->layers.layer[0], FP8_ROLE_X, &x, M, &exact_operands[0], &v->x);
    exact_quantize(&v->layers.layer[0], FP8_ROLE_W, &w, N, &exact_operands[1], &v->w);
    exact_quantize(&v->layers.layer[0], FP8_ROLE_DY, &dy, M, &exact_operands[2], &v->dy);
    exact_free(&x), exact_free(&w), exact_free(&dy);
}

static size_t output_bytes(fp8_pass pass)
{
    return pass == FP8_PASS_FPROP ? (size_t)M * N * 2 : (size_t)N * K * 4;
}

/* The product after `launches` of them, which add up in wgrad. */
static void multiply(struct watch *v, fp8_pass pass, int launches, unsigned char *bits)
{
    const struct rig_layer *layer = &v->layers.layer[0];
    bool fprop = pass == FP8_PASS_FPROP;
    size_t bytes = output_bytes(pass);
    exact_need(&exact_output, bytes);
    const fp8_tensor out = { exact_output.device,
                             fprop ? M : N,
                             fprop ? N : K,
                             fprop ? N : K,
                             fprop ? layer->info.y_dtype : layer->info.dw_dtype,
                             0 };
    fp8_gemm_args args = FP8_GEMM_ARGS_INIT;
    args.pass = pass;
    args.a = fprop ? &v->x : &v->dy;
    args.b = fprop ? &v->w : &v->x;
    args.out = &out;
    args.call = exact_call(layer, M, &exact_workspace);
    args.call.max_sms = SMS;
    for (int i = 0; i < launches; i++) {
        args.accumulate = !fprop && i > 0;
        RIG_OK(fp8_gemm(layer->handle, &args));
    }
    RIG_OK(fp8_memory_copy(rig.context, bits, exact_output.device, bytes, rig.stream));
    RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
}

/* How many of `rounds` products of one configuration differ from those of the sound templates. */
static int count_differences(const struct configuration *c, const char *templates, int rounds)
{
    static const fp8_pass passes[] = { FP8_PASS_FPROP, FP8_PASS_WGRAD };
    enum { LAUNCHES = 3 };
    unsigned char *want[2], *got = malloc(output_bytes(FP8_PASS_WGRAD));
    struct watch v;
    int differ = 0;
    assert_non_null(got);
    watch_open(&v, c);
    for (int i = 0; i < 2; i++) {
        want[i] = malloc(output_bytes(passes[i]));
        assert_non_null(want[i]);
        multiply(&v, passes[i], LAUNCHES, want[i]);
    }
    rig_layers_close(&v.layers);
    rig.templates = templates;
    watch_open(&v, c);
    rig.templates = NULL;
    for (int r = 0; r < rounds; r++) {
        for (int i = 0; i < 2; i++) {
            multiply(&v, passes[i], LAUNCHES, got);
            differ += memcmp(want[i], got, output_bytes(passes[i])) != 0;
        }
    }
    rig_layers_close(&v.layers);
    free(want[0]), free(want[1]), free(got);
    return differ;
}

static const struct configuration *find(const char *name)
{
    for (int i = 0; i < exact_configuration_count; i++) {
        if (strcmp(exact_configurations[i].name, name) == 0)
            return &exact_configurations[i];
    }
    return NULL;
}

static void late_warps_change_no_bit(void **state)
{
    (void)state;
    char templates[256];
    int rounds = (int)rig_cut("the number of launches", 60, 1), seen = 0;
    int count = (int)rig_cut("the number of configurations", WATCHED, 2);
    make_templates(templates, false);
    for (int i = 0; i < count; i++) {
        const struct configuration *c = find(watched[i]);
        if (!c)
            continue; /* FP8_TEST_CONFIGURATIONS names others */
        seen++;
        int differ = count_differences(c, templates, rounds);
        if (differ > 0)
            fail_msg("%s: %d of %d products with waits differ", c->name, differ, 2 * rounds);
    }
    drop_templates(templates);
    printf("%d configurations, %d products each\n", seen, 2 * rounds);
}

/* On the host no kernel runs. */
static void a_fault_is_seen(void **state)
{
    (void)state;
    char templates[256];
    if (!rig.cuda)
        skip();
    make_templates(templates, true);
    for (int i = 0; i < exact_configuration_count && i < 2; i++) {
        const struct configuration *c = &exact_configurations[i];
        if (count_differences(c, templates, 20) == 0)
            fail_msg("%s: stages handed back too early change nothing", c->name);
    }
    drop_templates(templates);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(late_warps_change_no_bit, exact_read_configurations),
        cmocka_unit_test_setup_teardown(a_fault_is_seen, exact_read_configurations,
                                        exact_release_all),
    };
    return RIG_RUN(tests);
}
