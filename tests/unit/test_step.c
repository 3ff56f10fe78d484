/*
 * test_step.c - gen/lua/step.lua: predicted seconds of collectives and of a step over ranks.
 *
 * Laws that hold whatever the fitted constants are: more bytes never take less time, a step takes
 * no less than its compute nor than its communication, gathering twice no less than once. Then the
 * order of events: steps whose exposed time can be said by hand. At last the kept measurements: the
 * constants are fitted to them, so the predictions must lie near every row.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/fp8gen.h"
#include "tests/unit/rig_lua.h"

#define PRELUDE                                                                                    \
    "local step = require 'step'\n"                                                                \
    "local function layers(count, fields)\n"                                                       \
    "    local list = {}\n"                                                                        \
    "    for i = 1, count do\n"                                                                    \
    "        local one = { group = i, count = 1, gather = 0.0, reduce = 0.0, amaxes = 1,\n"        \
    "            transpose = 0.0, sum = 0.0, grads = 'fp32', weight = 1e-4, rows = 5e-5, fprop = " \
    "1e-3, "                                                                                       \
    "quantize_dy = 1e-4,\n"                                                                        \
    "            wgrad = 1e-3, dgrad = 1e-3 }\n"                                                   \
    "        for name, value in pairs(fields) do one[name] = value end\n"                          \
    "        list[i] = one\n"                                                                      \
    "    end\n"                                                                                    \
    "    return list\n"                                                                            \
    "end\n"                                                                                        \
    "local function near(a, b) return math.abs(a - b) <= 1e-9 end\n"

static void test_collectives(void **state)
{
    (void)state;
    run_lua(PRELUDE
            "local ways = { all_gather = 'copy_engine kernels', all_to_all = 'copy_engine',\n"
            "    reduce_scatter = 'bf16 fp16 fp32', all_reduce_max = 'fp32' }\n"
            "for op, list in pairs(ways) do\n"
            "    for _, way in ipairs { 'copy_engine', 'kernels', 'bf16', 'fp16', 'fp32' } do\n"
            "        local known = list:find(way) ~= nil\n"
            "        for ranks = 2, 8 do\n"
            "            local before = 0\n"
            "            for bits = 0, 34 do\n"
            "                local seconds = step.collective(op, 2.0 ^ bits, ranks, way)\n"
            "                assert((seconds ~= nil) == known)\n"
            "                assert(not known or seconds >= before and seconds > 0)\n"
            "                before = seconds\n"
            "            end\n"
            "        end\n"
            "        assert(step.collective(op, 1.0, 9, way) == nil)\n"
            "    end\n"
            "    assert(step.collective(op, 1e6, 1) == 0)\n"
            "end\n"
            "assert(step.collective('broadcast', 1.0, 2) == nil)\n"
            "assert(step.crossing('all_gather', 10, 4) == 30)\n"
            "assert(step.crossing('reduce_scatter', 10, 4) == 30)\n"
            "assert(step.crossing('all_to_all', 10, 4) == 30)\n"
            "assert(step.crossing('all_reduce_max', 40, 4) == 60)\n");
}

static void test_laws(void **state)
{
    (void)state;
    run_lua(PRELUDE
            "for _, ranks in ipairs { 1, 2, 3, 4, 8 } do for _, count in ipairs { 1, 2, 7 } do\n"
            "    local before = 0\n"
            "    for _, bytes in ipairs { 0.0, 1e6, 1e8, 1e9 } do\n"
            "        local list = layers(count, { gather = bytes, reduce = 4 * bytes })\n"
            "        local once, twice = step.step(list, ranks, { keep = true }), step.step(list, "
            "ranks, {})\n"
            "        for _, s in ipairs { once, twice } do\n"
            "            assert(near(s.alone, count * 3.1e-3))\n"
            "            assert(s.step >= s.alone - 1e-12 and near(s.exposed, s.step - s.alone))\n"
            "            assert(s.step >= s.all_gather + s.reduce)\n"
            "            assert(s.step <= s.alone + 2 * (s.all_gather + s.reduce) + 1e-12)\n"
            "            assert(near(s.update_alone, count * 1e-4))\n"
            "            assert(s.update >= count * 5e-5)\n"
            "            assert(ranks > 1 or near(s.step, s.alone))\n"
            "        end\n"
            "        assert(twice.step >= once.step - 1e-12 and twice.step >= before)\n"
            "        before = twice.step\n"
            "    end\n"
            "end end\n"
            "assert(step.step(layers(2, {}), 9, {}) == nil)\n");
}

/* The first gather is waited for, the next ones run beside the layer before; the last sum is waited
 * for. */
static void test_order(void **state)
{
    (void)state;
    run_lua(PRELUDE
            "local gather = step.collective('all_gather', 1e7, 2)\n"
            "local function exposed(count, fields, keep)\n"
            "    return step.step(layers(count, fields), 2, { keep = keep }).exposed\n"
            "end\n"
            "local function gathers(count, keep)\n"
            "    local s = step.step(layers(count, { gather = 1e7 }), 2, { keep = keep })\n"
            "    return math.floor(s.all_gather / gather + 0.5)\n"
            "end\n"
            "-- two slots: backward begins with the last two groups in place\n"
            "assert(gathers(1) == 1 and gathers(2) == 2 and gathers(3) == 4 and gathers(6) == 10)\n"
            "assert(gathers(6, { keep = true }) == 6)\n"
            "local one = exposed(1, { gather = 1e7 })\n"
            "assert(near(one, gather))\n"
            "-- what runs beside compute costs a share of itself\n"
            "local two = exposed(2, { gather = 1e7 })\n"
            "assert(two > gather and two < 1.5 * gather)\n"
            "local sum = step.collective('all_to_all', 1e7, 2)\n"
            "local behind = exposed(1, { reduce = 1e7, dgrad = 0.0 })\n"
            "assert(near(behind, sum))\n"
            "behind = exposed(1, { reduce = 1e7, sum = 1e-3, dgrad = 0.0 })\n"
            "assert(near(behind, sum + 1e-3))\n"
            "local list = layers(1, { reduce = 1e7, sum = 1e-3, dgrad = 0.0, grads = 'bf16' })\n"
            "behind = step.step(list, 2, { collective = true }).exposed\n"
            "assert(near(behind, step.collective('reduce_scatter', 1e7, 2, 'bf16')))\n"
            "behind = exposed(1, { reduce = 1e7 })\n"
            "assert(behind > 0 and behind < sum)\n"
            "-- a transposed copy is made once a gather\n"
            "assert(near(exposed(2, { gather = 0.0, transpose = 1e-3 }), 2e-3))\n"
            "-- a turned copy is gathered too, and its pieces laid side by side behind that\n"
            "local own = { gather = 1e7, gather_turned = 1e7, turned = true, transpose = 1e-3 }\n"
            "assert(near(step.step(layers(1, own), 2, {}).all_gather, 2 * gather))\n"
            "assert(near(step.step(layers(3, own), 2, { keep = true }).all_gather, 6 * gather))\n"
            "local bare = { gather = 1e7, gather_turned = 1e7, turned = true }\n"
            "local turned = exposed(1, own) - exposed(1, bare)\n"
            "assert(turned > 0 and turned < 2e-3)\n"
            "-- a group is gathered as one\n"
            "list = layers(4, { gather = 1e7 })\n"
            "for i, layer in ipairs(list) do layer.group = (i + 1) // 2 end\n"
            "local s = step.step(list, 2, { keep = true })\n"
            "assert(near(s.all_gather, 2 * step.collective('all_gather', 2e7, 2)))\n");
}

static void test_models(void **state)
{
    (void)state;
    run_lua(PRELUDE
            "local list = layers(3, { gather = 1e6, reduce = 1e6 })\n"
            "for _, layer in ipairs(list) do layer.group = nil end\n"
            "list[1].count, list[2].count, list[3].count = 32, 32, 1\n"
            "local s = step.model(list, 4, {})\n"
            "assert(near(s.alone, 65 * 3.1e-3))\n"
            "-- more than are played: in proportion\n"
            "for _, layer in ipairs(list) do layer.count = layer.count * 1000 end\n"
            "local many = step.model(list, 4, {})\n"
            "assert(math.abs(many.step / s.step / 1000 - 1) < 0.02)\n"
            "assert(math.abs(many.alone / s.alone / 1000 - 1) < 1e-6)\n"
            "list[1].gather_group, list[2].gather_group, list[3].gather_group = 'a', 'a', 'a'\n"
            "list[1].count, list[2].count, list[3].count = 2, 2, 2\n"
            "s = step.model(list, 4, { keep = true })\n"
            "assert(near(s.all_gather, 2 * step.collective('all_gather', 3e6, 4)))\n");
}

static void test_from_c(void **state)
{
    (void)state;
    struct fp8gen *gen;
    double seconds = -1, more = -1;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(
        fp8gen_collective_seconds(gen, "all_gather", "copy_engine", 64 << 20, 4, &seconds),
        FP8GEN_OK);
    assert_int_equal(
        fp8gen_collective_seconds(gen, "all_gather", "copy_engine", 128 << 20, 4, &more),
        FP8GEN_OK);
    assert_true(seconds > 1e-4 && more > 1.5 * seconds);
    static const struct {
        const char *op, *way;
        double bytes;
        int32_t ranks;
    } wrong[] = { { "all_gather", "kernels", 1, 9 },   { "gather", "kernels", 1, 2 },
                  { "all_gather", "wires", 1, 2 },     { "all_gather", "kernels", -1, 2 },
                  { "all_gather", "kernels", NAN, 2 }, { "all_gather", "kernels", 1, 0 },
                  { NULL, "kernels", 1, 2 },           { "all_gather", NULL, 1, 2 } };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        assert_int_equal(fp8gen_collective_seconds(gen, wrong[i].op, wrong[i].way, wrong[i].bytes,
                                                   wrong[i].ranks, &seconds),
                         FP8GEN_ERR_ARGUMENT);
    assert_int_equal(fp8gen_collective_seconds(gen, "all_gather", "kernels", 1, 2, NULL),
                     FP8GEN_ERR_ARGUMENT);
    assert_int_equal(fp8gen_collective_seconds(NULL, "all_gather", "kernels", 1, 2, &seconds),
                     FP8GEN_ERR_ARGUMENT);
    fp8gen_close(gen);
}

/* ---- the kept measurements ---- */

static double number(const json_t *row, const char *key)
{
    return json_number_value(json_object_get(row, key));
}

static double predicted_collective(const char *op, const char *way, double bytes, int32_t ranks)
{
    struct fp8gen *gen;
    double seconds = -1;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(fp8gen_collective_seconds(gen, op, way, bytes, ranks, &seconds), FP8GEN_OK);
    fp8gen_close(gen);
    return seconds;
}

static double predicted_step(const json_t *row, const char *name, const char *shapes)
{
    struct fp8gen *gen;
    const char *text;
    char spec[2048];
    int at =
        snprintf(spec, sizeof spec,
                 "return model 'kept' { tokens = %d, grad_weight = '%s', mesh = { fsdp = %d },\n"
                 "layers = {",
                 (int)number(row, "M"), json_string_value(json_object_get(row, "grad_weight")),
                 (int)number(row, "ranks"));
    for (int n, k, used, i = 0; sscanf(shapes, "%d,%d%n", &n, &k, &used) == 2; shapes += used, i++)
        at += snprintf(spec + at, sizeof spec - (size_t)at,
                       "linear 'l%d' { out_features = %d, in_features = %d, count = %d },", i, n, k,
                       (int)number(row, "blocks"));
    snprintf(spec + at, sizeof spec - (size_t)at, "} }");
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    if (fp8gen_load_text(gen, "kept.lua", spec, strlen(spec)) != FP8GEN_OK ||
        fp8gen_plan(gen, &text) != FP8GEN_OK)
        fail_msg("%s", fp8gen_diagnostics(gen));
    json_t *plan = json_loads(text, 0, NULL);
    double seconds = number(json_object_get(plan, "predicted"), name);
    json_decref(plan);
    fp8gen_close(gen);
    return seconds;
}

/* How far a prediction may lie off: above, and below what was measured. Where little is moved the
 * host's enqueueing counts, which a busy host makes slower by any amount. */
static void expect_near(const json_t *row, double predicted, double measured, bool is_small)
{
    const double error = predicted / measured - 1;
    if (error > 0.15 || (error < -0.15 && !is_small))
        fail_msg("%s, %s, %d ranks: predicted %g s, measured %g s",
                 json_string_value(json_object_get(row, "case")),
                 json_string_value(json_object_get(row, "pass")), (int)number(row, "ranks"),
                 predicted, measured);
}

/* A kept file. */
struct kept {
    const char *path, *shapes; /* of a block of the steps in it */
    bool has_other_sums; /* its reduce-scatters were in registered memory, where NCCL has other
                                * kernels; no sum is made there any more */
};

static void check_row(const json_t *row, const struct kept *kept, int *checked)
{
    const char *shapes = kept->shapes;
    const char *name = json_string_value(json_object_get(row, "case"));
    const double bytes = number(row, "bytes_a_rank"), ranks = number(row, "ranks");
    const double crossing = bytes * (ranks - 1), seconds = number(row, "seconds");
    const bool is_small = crossing < (64 << 20);
    const char *op = NULL, *way = "copy_engine";
    if (!name)
        return;
    if (strcmp(name, "step_fsdp") == 0) {
        expect_near(row, predicted_step(row, "alone", shapes), number(row, "baseline") * 1e-3,
                    false);
        const char *sum = json_string_value(json_object_get(row, "reduce"));
        const bool exchanged = sum && strcmp(sum, "collective") != 0;
        expect_near(row, predicted_step(row, exchanged ? "step" : "by_collective", shapes),
                    number(row, "value") * 1e-3, false);
        *checked += 2;
    } else if (strcmp(name, "gather_copy_engine") == 0 || strcmp(name, "gather_fp8_vs_bf16") == 0) {
        op = "all_gather";
    } else if (strncmp(name, "reduce_scatter_", 15) == 0 && !kept->has_other_sums) {
        op = "reduce_scatter", way = name + 15;
    } else if (strcmp(name, "exchange_copy_engine") == 0) {
        op = "all_to_all";
    }
    if (op) {
        expect_near(row, predicted_collective(op, way, bytes, (int32_t)ranks), seconds, is_small);
        ++*checked;
    }
    if (op && strcmp(name, "gather_copy_engine") == 0) {
        const double kernels = crossing / number(row, "baseline") * 1e-9;
        expect_near(row, predicted_collective(op, "kernels", bytes, (int32_t)ranks), kernels,
                    is_small);
        ++*checked;
    }
}

static void test_kept_rows(void **state)
{
    (void)state;
    static const struct kept files[] = {
        { "tests/bench/results/shard.jsonl", "6144,4096 4096,4096 28672,4096 4096,14336", false },
        { "tests/bench/results/shard_x4.jsonl",
          "10240,8192 8192,8192 28672,8192 28672,8192 8192,28672", true },
    };
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        static char line[8192];
        int checked = 0;
        FILE *file = fopen(files[i].path, "r");
        assert_non_null(file);
        while (fgets(line, sizeof line, file)) {
            json_t *row = json_loads(line, 0, NULL);
            assert_non_null(row);
            check_row(row, &files[i], &checked);
            json_decref(row);
        }
        fclose(file);
        assert_true(checked > 20);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_collectives), cmocka_unit_test(test_laws),
        cmocka_unit_test(test_order),       cmocka_unit_test(test_models),
        cmocka_unit_test(test_from_c),      cmocka_unit_test(test_kept_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
