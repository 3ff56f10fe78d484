/*
 * test_tile.c - gen/lua/tile.lua: the table of configurations keeps the limits of the hardware and of the
 * template, and the cost model is sane: ordered, monotonic, below the peak, near what was measured.
 *
 * The tests are Lua, run in a session's state; an `assert` that fails shows where.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <lauxlib.h>
#include <string.h>

#include "gen/internal.h"

static int lua_body(lua_State *L)
{
    const char *text = lua_touserdata(L, 1);
    if (luaL_loadbufferx(L, text, strlen(text), "=test", "t") != LUA_OK)
        lua_error(L);
    lua_call(L, 0, 0);
    return 0;
}

/* What the tests share. */
#define PRELUDE                                                                                    \
    "local tile = require 'tile'\n"                                                                \
    "local function problem(rows, cols, depth, accumulation, out, add, sms)\n"                     \
    "    return { rows = rows, cols = cols, depth = depth, accumulation = accumulation,\n"         \
    "        out = out, add = add or false, sms = sms or tile.SMS }\n"                             \
    "end\n"                                                                                        \
    "local function each_kind(f)\n"                                                                \
    "    for _, accumulation in ipairs { 'fast', 'split' } do\n"                                   \
    "        for _, out in ipairs { 'bf16', 'fp16', 'fp32' } do\n"                                 \
    "            for _, add in ipairs { false, true } do f(accumulation, out, add) end\n"          \
    "        end\n"                                                                                \
    "    end\n"                                                                                    \
    "end\n"

static void run_lua(const char *text)
{
    struct fp8gen *gen;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    if (script_run(gen, lua_body, (void *)text) != FP8GEN_OK)
        fail_msg("%s", fp8gen_diagnostics(gen));
    fp8gen_close(gen);
}

static void test_limits(void **state)
{
    (void)state;
    run_lua(
        PRELUDE
        "local seen = {}\n"
        "assert(#tile.configurations <= 40)\n"
        "for _, c in ipairs(tile.configurations) do\n"
        "    assert(not seen[c.name] and tile.by_name(c.name) == c, c.name)\n"
        "    seen[c.name] = true\n"
        "    local schedule = c.pingpong and 'pp' or c.swapped and 'sw' or c.exchange and 'ex' or 'co'\n"
        "    local name = ('%s%dx%dc%ds%d%s%sg%d'):format(schedule, c.bm, c.bn, c.cluster, c.stages,\n"
        "        c.partials > 0 and 'p' .. c.partials or '', c.exchange and 'k' .. c.slices or '',\n"
        "        c.group)\n"
        "    assert(name == c.name, name)\n"
        "    assert(tile.shared_bytes(c) <= 227 * 1024, c.name)\n"
        "    assert(c.producer_registers + 2 * c.consumer_registers <= 3 * 168, c.name)\n"
        "    assert(c.producer_registers % 8 == 0 and c.consumer_registers % 8 == 0)\n"
        "    assert(c.bm <= 256 and c.bn <= 256, c.name)\n" /* boxes of tensor maps */
        "    assert(c.bn // c.cluster % 8 == 0 and c.cluster <= 2, c.name)\n"
        "    assert(c.bm % (c.pingpong and 64 or 128) == 0, c.name)\n"
        "    local waves = c.bm // 64 // (c.pingpong and 1 or 2)\n"
        "    assert((waves + c.partials) * c.bn // 2 <= 208, c.name)\n"
        "    assert(c.partials < 2 or waves == 1, c.name)\n"
        "    assert(c.slices == 1 or c.exchange and c.cluster == 1 and c.slices <= 8, c.name)\n"
        "    assert(not c.swapped or c.exchange, c.name)\n"
        "    assert(not c.pingpong or c.partials == 0, c.name)\n"
        "    assert(c.wide or c.narrow, c.name)\n"
        "    each_kind(function(accumulation, out, add)\n"
        "        local p = problem(1, 1, 1, accumulation, out, add)\n"
        "        local whole = c.exchange or c.bn % tile.slab_cols(out, add) == 0\n"
        "        assert(not tile.fits(c, p) or whole, c.name)\n"
        "    end)\n"
        "end\n"
        "assert(tile.slab_cols('bf16', false) == 64 and tile.slab_cols('fp16', true) == 32)\n"
        "assert(tile.slab_cols('fp32', false) == 32 and tile.slab_cols('fp32', true) == 32)\n");
}

static void test_rank(void **state)
{
    (void)state;
    run_lua(PRELUDE
            "each_kind(function(accumulation, out, add)\n"
            "    for _, m in ipairs { 1, 16, 100, 2048, 8192 } do\n"
            "        local p = problem(m, 4096, 4096, accumulation, out, add)\n"
            "        local list = tile.rank(p)\n"
            "        assert(#list >= 3)\n" /* every kind is served, by several */
            "        for i, item in ipairs(list) do\n"
            "            assert(tile.fits(item.configuration, p))\n"
            "            assert((item.configuration.partials > 0) == (accumulation == 'split'))\n"
            "            assert(i == 1 or item.seconds >= list[i - 1].seconds)\n"
            "            assert(item.full > 0 and item.full <= 1 and item.waves >= 1)\n"
            "        end\n"
            "        local again = tile.rank(p)\n"
            "        for i, item in ipairs(list) do\n"
            "            assert(item.configuration == again[i].configuration)\n"
            "        end\n"
            "    end\n"
            "end)\n");
}

/* More of anything takes no less; fewer SMs take longer; nothing beats the peak. */
static void test_monotonic(void **state)
{
    (void)state;
    run_lua(PRELUDE "local sizes = { 1, 100, 128, 129, 1000, 2048, 4096, 8192, 30000 }\n"
                    "local function check(c, accumulation, out, add)\n"
                    "    local function at(rows, cols, depth, sms)\n"
                    "        local p = problem(rows, cols, depth, accumulation, out, add, sms)\n"
                    "        local seconds = c and tile.seconds(c, p) or tile.cublaslt_seconds(p)\n"
                    "        assert(tile.flops(p) / seconds < 1.979e15, c and c.name)\n"
                    "        return seconds\n"
                    "    end\n"
                    "    for i = 2, #sizes do\n"
                    "        local a, b = sizes[i - 1], sizes[i]\n"
                    "        assert(at(a, 4096, 4096) <= at(b, 4096, 4096))\n"
                    "        assert(at(4096, a, 4096) <= at(4096, b, 4096))\n"
                    "        assert(at(4096, 4096, a) <= at(4096, 4096, b))\n"
                    "    end\n"
                    "    assert(at(4096, 4096, 4096, 66) > 1.3 * at(4096, 4096, 4096))\n"
                    "    assert(at(1 << 28, 1 << 28, 1 << 28) < math.huge)\n"
                    "end\n"
                    "each_kind(function(accumulation, out, add)\n"
                    "    check(nil, accumulation, out, add)\n"
                    "    for _, c in ipairs(tile.configurations) do\n"
                    "        if tile.fits(c, problem(1, 1, 1, accumulation, out, add)) then\n"
                    "            check(c, accumulation, out, add)\n"
                    "        end\n"
                    "    end\n"
                    "end)\n");
}

/* TFLOP/s measured on one H200: each within a quarter, all together within 8 %. */
static void test_measurements(void **state)
{
    (void)state;
    run_lua(PRELUDE
            "local sum, count = 0, 0\n"
            "local function near(predicted, measured, what)\n"
            "    local error = math.abs(math.log(predicted / measured))\n"
            "    assert(error < math.log(1.25), ('%s: %.0f, measured %d'):format(what, predicted,\n"
            "        measured))\n"
            "    sum, count = sum + error, count + 1\n"
            "end\n"
            "local function measured(accumulation, out, add, names, list)\n"
            "    for _, row in ipairs(list) do\n"
            "        local p = problem(row[1], row[2], row[3], accumulation, out, add)\n"
            "        local what = ('%d %d %d'):format(row[1], row[2], row[3])\n"
            "        local flops = tile.flops(p) / 1e12\n"
            "        near(flops / tile.cublaslt_seconds(p), row[4], what .. ' cublaslt')\n"
            "        for i, name in ipairs(names) do\n"
            "            local seconds = tile.seconds(tile.by_name(name), p)\n"
            "            near(flops / seconds, row[4 + i], what .. ' ' .. name)\n"
            "        end\n"
            "    end\n"
            "end\n"
            "measured('fast', 'bf16', false, { 'pp128x128c2s6g8', 'co128x256c1s4g8' }, {\n"
            "    { 8192, 28672, 4096, 1376, 1328, 1241 }, { 4096, 7168, 2048, 1372, 1282, 1207 },\n"
            "    { 2048, 2048, 2048, 884, 916, 939 }, { 16384, 8192, 1280, 1407, 1217, 1075 },\n"
            "    { 8192, 8192, 28672, 1288, 1296, 1300 }, { 128, 4096, 4096, 323, 251, 168 } })\n"
            "measured('fast', 'bf16', false, { 'pp128x192c2s4g8' }, {\n"
            "    { 8192, 4096, 4096, 1428, 1442 }, { 8192, 8192, 8192, 1257, 1341 } })\n"
            "measured('split', 'bf16', false, { 'co128x128c2s6p2g8', 'co128x128c1s6p2g8' }, {\n"
            "    { 8192, 4096, 4096, 1285, 1265, 1276 }, { 8192, 4096, 28672, 1269, 1173, 1247 },\n"
            "    { 4096, 2048, 7168, 1330, 1322, 1364 }, { 2048, 2048, 2048, 800, 854, 913 },\n"
            "    { 16384, 1280, 8192, 1233, 1180, 1239 }, { 128, 4096, 4096, 347, 249, 269 } })\n"
            "measured('split', 'fp32', true, { 'co128x128c2s6p2g8', 'co128x128c1s6p2g8' }, {\n"
            "    { 4096, 4096, 8192, 1130, 1123, 1132 }, { 28672, 4096, 8192, 1150, 1111, 1077 },\n"
            "    { 7168, 2048, 4096, 1118, 1068, 1084 }, { 8192, 1280, 16384, 1222, 1195, 1192 },\n"
            "    { 2048, 2048, 2048, 612, 611, 679 } })\n"
            "measured('fast', 'fp32', true, { 'pp128x128c2s6g8', 'pp128x128c1s6g8' }, {\n"
            "    { 4096, 4096, 8192, 1358, 1336, 1255 }, { 7168, 2048, 4096, 1231, 1256, 1204 },\n"
            "    { 2048, 2048, 2048, 664, 667, 717 } })\n"
            "assert(sum / count < math.log(1.08))\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_rank),
        cmocka_unit_test(test_monotonic),
        cmocka_unit_test(test_measurements),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
