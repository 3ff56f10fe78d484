/*
 * test_shard.c - gen/lua/shard.lua: shards tile every tensor exactly once, whatever the dims and
 * the number of ranks, and all ranks issue the same collectives in the same order.
 *
 * The tests are Lua, run in a session's state; an `assert` that fails shows where. Dims are drawn
 * by a small generator with a fixed seed, beside those that are known to be awkward.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/rig_lua.h"

#define PRELUDE                                                                                    \
    "local shard = require 'shard'\n"                                                              \
    "local word = 20261129\n"                                                                      \
    "local function random(n)\n"                                                                   \
    "    word = (word * 6364136223846793005 + 1442695040888963407)\n"                              \
    "    return (word >> 33) % n + 1\n"                                                            \
    "end\n"                                                                                        \
    "local dims = { 1, 2, 3, 5, 7, 10, 63, 64, 65, 96, 127, 128, 129, 255, 256, 2556, 4096 }\n"    \
    "for i = 1, 12 do dims[#dims + 1] = random(9000) end\n"

static void test_parts_tile(void **state)
{
    (void)state;
    run_lua(
        PRELUDE
        "for _, n in ipairs(dims) do for ranks = 1, 64 do for _, multiple in ipairs { 1, 128 } do\n"
        "    local at, chunk = 0, shard.chunk(n, ranks, multiple)\n"
        "    assert(chunk % multiple == 0 and chunk * ranks >= n)\n"
        "    assert(multiple > 1 or chunk == (n + ranks - 1) // ranks)\n"
        "    for rank = 0, ranks - 1 do\n"
        "        local first, count = shard.part(n, ranks, rank, multiple)\n"
        "        assert(first == at and count >= 0 and count <= chunk)\n"
        "        assert(count == 0 or first == rank * chunk) -- where a gather puts it\n"
        "        assert(count == chunk or first + count == n)\n"
        "        at = at + count\n"
        "    end\n"
        "    assert(at == n)\n"
        "end end end\n");
}

static void test_known_parts(void **state)
{
    (void)state;
    run_lua("local shard = require 'shard'\n"
            "local function parts(n, ranks, multiple)\n"
            "    local text = {}\n"
            "    for rank = 0, ranks - 1 do\n"
            "        local first, count = shard.part(n, ranks, rank, multiple)\n"
            "        text[#text + 1] = first .. '+' .. count\n"
            "    end\n"
            "    return table.concat(text, ' ')\n"
            "end\n"
            "local function same(a, b) assert(a == b, a) end\n"
            "same(parts(4096, 3), '0+1366 1366+1366 2732+1364')\n"
            "same(parts(10, 8), '0+2 2+2 4+2 6+2 8+2 10+0 10+0 10+0')\n"
            "same(parts(5, 4), '0+2 2+2 4+1 5+0')\n"
            "same(parts(96, 5), '0+20 20+20 40+20 60+20 80+16')\n"
            "same(parts(4096, 3, 128), '0+1408 1408+1408 2816+1280')\n"
            "same(parts(129, 4, 128), '0+128 128+1 129+0 129+0')\n");
}

static void test_weights_tile(void **state)
{
    (void)state;
    run_lua(PRELUDE
            "for _, tensor in ipairs { 'none', 'column', 'row' } do\n"
            "for _, mesh in ipairs { { tensor = 1, fsdp = 5 }, { tensor = 2, fsdp = 3 },\n"
            "                        { tensor = 4, fsdp = 16 }, { tensor = 8, fsdp = 1 } } do\n"
            "for _, multiple in ipairs { 1, 128 } do for i = 1, 8 do\n"
            "    local layer = { out_features = random(300), in_features = random(40), tensor = "
            "tensor }\n"
            "    local ranks, owners = shard.ranks(mesh), {}\n"
            "    for rank = 0, ranks - 1 do\n"
            "        assert(shard.rank_at(mesh, shard.coordinates(mesh, rank)) == rank)\n"
            "        local w = shard.weight(layer, mesh, rank, multiple)\n"
            "        for r = w.first_row, w.first_row + w.rows - 1 do\n"
            "            for c = w.first_col, w.first_col + w.cols - 1 do\n"
            "                local key = r * layer.in_features + c\n"
            "                owners[key] = (owners[key] or 0) + 1\n"
            "            end\n"
            "        end\n"
            "    end\n"
            "    -- a layer that the tensor axis does not cut is there once for each of its ranks\n"
            "    local times = tensor == 'none' and mesh.tensor or 1\n"
            "    for key = 0, layer.out_features * layer.in_features - 1 do\n"
            "        assert(owners[key] == times)\n"
            "        owners[key] = nil\n"
            "    end\n"
            "    assert(next(owners) == nil)\n"
            "end end end end\n");
}

static void test_groups(void **state)
{
    (void)state;
    run_lua("local shard = require 'shard'\n"
            "local mesh = { tensor = 4, fsdp = 6 }\n"
            "for _, axis in ipairs(shard.axes) do\n"
            "    local seen = {}\n"
            "    for rank = 0, 23 do\n"
            "        local group = shard.group(mesh, axis, rank)\n"
            "        local at = shard.coordinates(mesh, rank)[axis]\n"
            "        assert(#group == mesh[axis] and group[at + 1] == rank)\n"
            "        for _, other in ipairs(group) do\n"
            "            local same = table.concat(shard.group(mesh, axis, other), ',')\n"
            "            assert(same == table.concat(group, ','))\n"
            "        end\n"
            "        seen[table.concat(group, ',')] = true\n"
            "    end\n"
            "    local count = 0\n"
            "    for _ in pairs(seen) do count = count + 1 end\n"
            "    assert(count == 24 // mesh[axis])\n"
            "end\n"
            "assert(table.concat(shard.group(mesh, 'tensor', 9), ',') == '8,9,10,11')\n"
            "assert(table.concat(shard.group(mesh, 'fsdp', 9), ',') == '1,5,9,13,17,21')\n");
}

static void test_pieces(void **state)
{
    (void)state;
    run_lua(PRELUDE "for i = 1, 400 do\n"
                    "    local rows, cols, ranks = random(9), random(9), random(64)\n"
                    "    local at = 0\n"
                    "    for rank = 0, ranks - 1 do\n"
                    "        local first, count = shard.part(rows * cols, ranks, rank)\n"
                    "        local pieces = shard.pieces(first, count, cols)\n"
                    "        assert(#pieces <= 3 and (#pieces > 0) == (count > 0))\n"
                    "        for _, p in ipairs(pieces) do\n"
                    "            assert(p.rows > 0 and p.cols > 0 and p.col + p.cols <= cols)\n"
                    "            assert(p.rows == 1 or p.cols == cols)\n"
                    "            assert(p.row * cols + p.col == at)\n"
                    "            at = at + p.rows * p.cols\n"
                    "        end\n"
                    "        assert(at == first + count)\n"
                    "    end\n"
                    "    assert(at == rows * cols)\n"
                    "end\n");
}

/* A model of random layers; what its ranks issue. */
#define COLLECTIVES                                                                                \
    "local format = { pad_ld = 128, part_align = 256 }\n"                                          \
    "local recipes = { 'current', 'rowwise', 'block', 'delayed', 'rowwise_hp_wgrad' }\n"           \
    "local function model_of(count, ranks)\n"                                                      \
    "    local layers = {}\n"                                                                      \
    "    for i = 1, count do\n"                                                                    \
    "        layers[i] = { out_features = random(3000), in_features = random(3000),\n"             \
    "            recipe = { name = recipes[random(#recipes)] }, bias = random(2) == 1,\n"          \
    "            compute = random(5) == 1 and 'bf16' or 'fp8',\n"                                  \
    "            grad_weight = random(2) == 1 and 'bf16' or 'fp32',\n"                             \
    "            gather_group = ({ 'a', 'b', false })[random(3)] or nil, count = 1 }\n"            \
    "    end\n"                                                                                    \
    "    return { layers = layers, mesh = { tensor = 1, fsdp = ranks },\n"                         \
    "        shard = { backward = random(2) == 1 and 'gather' or 'keep', reduce = 'sum' } }\n"     \
    "end\n"

static void test_collectives(void **state)
{
    (void)state;
    run_lua(
        PRELUDE COLLECTIVES
        "for i = 1, 60 do for _, ranks in ipairs { 1, 2, 3, 7, 8, 64 } do\n"
        "    local model = model_of(random(9), ranks)\n"
        "    local layers, list = model.layers, shard.collectives(model, format)\n"
        "    assert(ranks > 1 or #list == 0)\n"
        "    local gathered, again, reduced, amax, phase = {}, {}, {}, {}, 0\n"
        "    local order = { weight = 1, fprop = 2, dgrad = 3, wgrad = 3 }\n"
        "    for _, c in ipairs(list) do\n"
        "        assert(order[c.pass] >= phase)\n"
        "        phase = order[c.pass]\n"
        "        assert(math.type(c.bytes_a_rank) == 'integer' and c.bytes_a_rank > 0 and "
        "#c.layers > 0)\n"
        "        local set = c.op == 'all_reduce_max' and amax or c.op == 'reduce_scatter' and "
        "reduced\n"
        "            or c.pass == 'fprop' and gathered or again\n"
        "        for at, index in ipairs(c.layers) do\n"
        "            assert(not set[index] and c.times == 1) -- once a step\n"
        "            set[index] = true\n"
        "            local before = layers[c.layers[at - 1]]\n"
        "            assert(at == 1 or c.layers[at - 1] < index)\n"
        "            assert(at == 1 or c.op == 'all_reduce_max'\n"
        "                or before.gather_group == layers[index].gather_group)\n"
        "        end\n"
        "        if c.op == 'reduce_scatter' then -- rows for every rank, of the same size\n"
        "            local layer = layers[c.layers[1]]\n"
        "            local size = layer.grad_weight == 'bf16' and 2 or 4\n"
        "            assert(c.dtype == layer.grad_weight)\n"
        "            assert(c.bytes_a_rank * ranks >= layer.out_features * layer.in_features * "
        "size)\n"
        "        end\n"
        "    end\n"
        "    for index, layer in ipairs(ranks > 1 and layers or {}) do\n"
        "        assert(gathered[index] and reduced[index])\n"
        "        local own = shard.scheduled(layer).turned -- copies that are not made of rows\n"
        "        assert(not own or again[index])\n"
        "        assert(own or model.shard.backward ~= 'keep' or not again[index])\n"
        "        local last = index == #layers and layer.compute ~= 'bf16'\n"
        "        assert(own or not last or not again[index]) -- it lies in its slot still\n"
        "        local has = layer.compute ~= 'bf16' and layer.recipe.name ~= 'block'\n"
        "        assert((amax[index] or false) == has)\n"
        "    end\n"
        "end end\n");
}

/* Gathers by hand: two slots, one group ahead; `x32` where it is not once. */
static void test_gathers(void **state)
{
    (void)state;
    run_lua(
        "local shard = require 'shard'\n"
        "local format = { pad_ld = 128, part_align = 256 }\n"
        "local function gathers(backward, names, fields)\n"
        "    local layers, text = {}, {}\n"
        "    for name in names:gmatch('%S+') do\n"
        "        local one = { name = name, out_features = 64, in_features = 64, count = 1,\n"
        "            recipe = { name = name:match '^r' and 'rowwise' or 'current' },\n"
        "            compute = name:match '^h' and 'bf16' or 'fp8', grad_weight = 'fp32' }\n"
        "        for key, value in pairs(fields and fields[name] or {}) do one[key] = value end\n"
        "        layers[#layers + 1] = one\n"
        "    end\n"
        "    local model = { layers = layers, mesh = { fsdp = 4 }, shard = { backward = backward } "
        "}\n"
        "    for _, c in ipairs(shard.collectives(model, format)) do\n"
        "        if c.op == 'all_gather' then\n"
        "            if c.pass == 'dgrad' and not text.back then\n"
        "                text[#text + 1], text.back = '|', true\n"
        "            end\n"
        "            local together = {}\n"
        "            for at, i in ipairs(c.layers) do together[at] = layers[i].name end\n"
        "            text[#text + 1] = table.concat(together, '+')\n"
        "                .. (c.times > 1 and 'x' .. c.times or '')\n"
        "        end\n"
        "    end\n"
        "    return table.concat(text, ' ')\n"
        "end\n"
        "local function same(a, b) assert(a == b, a) end\n"
        "same(gathers('gather', 'a'), 'a')\n"
        "same(gathers('gather', 'a b'), 'a b')\n"
        "same(gathers('gather', 'a b c d'), 'a b c d | b a')\n"
        "same(gathers('keep', 'a b c d'), 'a b c d')\n"
        "-- a turned copy takes the place of its rows, kept ones lie beside them\n"
        "same(gathers('gather', 'a b r'), 'a b r | r a')\n"
        "same(gathers('gather', 'a r c'), 'a r c | r a')\n"
        "same(gathers('keep', 'a r c'), 'a r c | r')\n"
        "-- of a group where the turned copy is there only the rows are missing\n"
        "local g = { gather_group = 'g' }\n"
        "same(gathers('gather', 'a b c d', { a = g, b = g }), 'a+b c d | a+b')\n"
        "same(gathers('gather', 'a r', { a = g, r = g }), 'a+r | r')\n"
        "-- a hook brings its weight for each pass and takes no slot\n"
        "same(gathers('gather', 'a h c'), 'a h c | h')\n"
        "same(gathers('keep', 'a h c'), 'a h c')\n"
        "-- blocks; more than are played\n"
        "local function counts(a, b, c)\n"
        "    return { a = { count = a }, b = { count = b }, c = { count = c } }\n"
        "end\n"
        "same(gathers('gather', 'a b c', counts(32, 32, 1)), 'ax32 bx32 c | ax32 bx31')\n"
        "same(gathers('gather', 'a b c', counts(5000, 5000, 1)), 'ax5000 bx5000 c | ax5000 "
        "bx4999')\n");
}

static void test_payload(void **state)
{
    (void)state;
    run_lua("local shard = require 'shard'\n"
            "local format = { pad_ld = 128, part_align = 256 }\n"
            "local function payload(ranks, n, k, recipe, compute, bias)\n"
            "    return shard.payload({ out_features = n, in_features = k, recipe = { name = "
            "recipe },\n"
            "        compute = compute or 'fp8', bias = bias }, ranks, format)\n"
            "end\n"
            "assert(payload(2, 4096, 1024, 'current') == 256 + 2048 * 1024)\n"
            "assert(payload(8, 10, 100, 'current') == 256 + 2 * 128)\n"
            "assert(payload(8, 10, 100, 'current', 'fp8', true) == 256 + 2 * 128 + 2 * 2)\n"
            "assert(shard.payload({ out_features = 300, in_features = 100, recipe = { name = "
            "'rowwise' },\n"
            "    compute = 'fp8' }, 2, format, 'dgrad') == 256 + 512 + 112 * 256)\n"
            "assert(payload(2, 4096, 1024, 'rowwise') == 256 + 2048 * 1024 + 2048 * 4)\n"
            "assert(payload(2, 256, 1000, 'block') == 256 + 256 + 128 * 1024)\n"
            "-- FP8 is never more than bf16 where rows are not short\n"
            "for _, k in ipairs { 128, 1000, 4096 } do\n"
            "    assert(payload(4, 512, k, 'rowwise') < payload(4, 512, k, 'rowwise', 'bf16'))\n"
            "end\n"
            "assert(shard.multiple { name = 'block' } == 128)\n"
            "assert(shard.multiple { name = 'current' } == 1)\n"
            "-- a scale a shard: for each of its rows, cut at blocks, and nothing to agree on\n"
            "local own = { out_features = 300, in_features = 100, compute = 'fp8',\n"
            "    recipe = { name = 'current', weight_scale = 'shard' } }\n"
            "assert(shard.multiple(own.recipe) == 128)\n"
            "assert(shard.payload(own, 2, format) == 256 + 1024 + 256 * 128)\n"
            "assert(shard.amaxes(own) == 0)\n"
            "own.recipe.weight_scale = 'tensor'\n"
            "assert(shard.multiple(own.recipe) == 1)\n"
            "assert(shard.payload(own, 2, format) == 256 + 19200)\n"
            "assert(shard.amaxes(own) == 1)\n"
            "for name, count in pairs { delayed = 1, rowwise = 100, rowwise_hp_wgrad = 1, block = "
            "0 } do\n"
            "    own.recipe = { name = name }\n"
            "    assert(shard.amaxes(own) == count)\n"
            "end\n"
            "own.compute = 'bf16'\n"
            "assert(shard.amaxes(own) == 0)\n");
}

static void test_shrink(void **state)
{
    (void)state;
    run_lua(PRELUDE
            "local shrink = require 'shrink'\n"
            "for _, n in ipairs { 28672, 128256, 151936, 4097, 14336, 6144, 7168, 576 } do\n"
            "    dims[#dims + 1] = n\n"
            "end\n"
            "for _, n in ipairs(dims) do\n"
            "    local k = shrink.dim(n, 128, 128)\n"
            "    assert(k <= n and k < 256 and k % 128 == n % 128)\n"
            "    for ranks = 1, 16 do for _, multiple in ipairs { 1, 128 } do\n"
            "        local cut = shrink.sharded(n, ranks, multiple)\n"
            "        assert(cut <= n and cut % 128 == n % 128 and cut % ranks == n % ranks)\n"
            "        assert(cut < 128 * ranks * (multiple == 1 and 2 or ranks + 1), cut)\n"
            "        local chunk, small = shard.chunk(n, ranks, multiple), shard.chunk(cut, ranks, "
            "multiple)\n"
            "        for rank = 0, ranks - 1 do\n"
            "            local _, had = shard.part(n, ranks, rank, multiple)\n"
            "            local _, has = shard.part(cut, ranks, rank, multiple)\n"
            "            assert((had == 0) == (has == 0) and (had == chunk) == (has == small),\n"
            "                ('%d -> %d on %d of %d'):format(n, cut, rank, ranks))\n"
            "        end\n"
            "    end end\n"
            "end\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parts_tile),   cmocka_unit_test(test_known_parts),
        cmocka_unit_test(test_weights_tile), cmocka_unit_test(test_groups),
        cmocka_unit_test(test_pieces),       cmocka_unit_test(test_collectives),
        cmocka_unit_test(test_gathers),      cmocka_unit_test(test_payload),
        cmocka_unit_test(test_shrink),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
