-- tile.lua - the configurations of the generated GEMM (templates/gemm_sm90.cu), and what each would
-- take.
--
-- In: a problem { rows, cols, depth, accumulation = "fast" | "split" | "256" | "512", out = dtype,
-- add = bool, sms }: the output's extents, the contraction, out += or out =. Out: the
-- configurations that serve it, and seconds for each of them and for cuBLASLt. Pure; what it is
-- wrong about, a tuning file corrects.
--
-- The model: clusters of CTAs take tiles in waves. A CTA spends `us` on every 128 of the
-- contraction, less when few SMs are at work. Then the tile leaves: in a cooperative kernel while
-- nothing multiplies; in a pingpong kernel under the next tile, of which it takes a little. In
-- large problems power, not the kernel, sets the speed. The constants are fitted to runs of `fp8gen
-- bench gemm` on one H200 SXM (random data, sustained clocks); tests/unit/test_tile.c replays the
-- one in tests/bench/results.

local M = {}

local function ceil_div(a, b) return (a + b - 1) // b end

M.SMS = 132 -- of the GPU that the constants describe

-- One row a configuration:
--   name                 <schedule><bm>x<bn>c<cluster>s<stages>[p<partials>][k<slices>][o<slabs>]
--                        [w<consumers>]g<group>[a]; schedule: pp pingpong, co cooperative; ex
--                        cooperative with an exchange between the CTAs of a cluster, sw the same
--                        with swapped operands: bm columns of out, bn rows
--   bm, bn               tile of a CTA          stages    of the ring, bm + bn rows of 128 bytes
--   cluster              CTAs below each other that share b
--   slices               CTAs of a cluster that share the contraction of a tile
--   group                rows of clusters in a raster group
--   consumers            warpgroups that multiply (2)
--   slabs                64 rows of 128 bytes, of a warpgroup, in which its output leaves (2)
--   scheduler            "static", or (a) "atomic": clusters take tiles from a counter
--   partials             0: fast accumulation; 1, 2: split, with that many partial sums
--   producer, consumer   registers a thread
--   wide, narrow         serves outputs that leave as fp32 (fp32, or sums into 16 bits), as 16 bits
--   us                   microseconds for one tile and 128 of the contraction, all SMs at work
local function row(name, producer, consumer, us, only)
    local schedule, bm, bn, cluster, stages, rest = name:match "^(%a+)(%d+)x(%d+)c(%d+)s(%d+)(.*)$"
    local function number(letter) return math.tointeger(rest:match(letter .. "(%d+)")) end
    return {
        name = name,
        bm = math.tointeger(bm),
        bn = math.tointeger(bn),
        stages = math.tointeger(stages),
        cluster = math.tointeger(cluster),
        group = number "g",
        pingpong = schedule == "pp",
        crowded = schedule == "pp" and name:find "x192" ~= nil, -- no registers for scales of rows
        exchange = schedule == "ex" or schedule == "sw",
        swapped = schedule == "sw",
        slices = number "k" or 1,
        partials = number "p" or 0,
        slabs = number "o" or 2,
        consumers = number "w" or 2,
        scheduler = rest:find "a$" and "atomic" or "static",
        producer_registers = producer,
        consumer_registers = consumer,
        wide = only ~= "narrow",
        narrow = only ~= "wide",
        us = us,
    }
end

M.configurations = {
    row("pp128x192c2s4g8", 24, 240, 0.603, "narrow"),
    row("pp128x192c1s4g8", 24, 240, 0.604, "narrow"),
    row("pp128x160c2s5g8", 24, 240, 0.507, "wide"),
    row("pp128x128c2s6g8", 40, 232, 0.405),
    row("pp128x128c1s6g8", 40, 232, 0.399),
    row("pp128x128c1s5o4g8", 40, 232, 0.399),
    row("pp64x256c1s4g8", 40, 232, 0.413),
    row("pp64x128c1s8g8", 40, 232, 0.209),
    row("pp64x64c1s12g8", 40, 232, 0.149),
    row("co128x256c1s4g8", 40, 232, 0.820),
    row("co128x256c2s4g8", 40, 232, 0.830),
    row("co256x128c2s4g8", 40, 232, 0.823),
    row("co128x192c1s4g8", 40, 232, 0.602),
    row("co128x128c1s6p2g8", 40, 232, 0.388),
    row("co128x128c2s6p2g8", 40, 232, 0.391),
    row("co128x128c1s5p2o4g8", 40, 232, 0.388),
    row("co192x128c1s4p1w3g8", 32, 160, 0.586),
    row("co128x64c1s8p2g8", 40, 232, 0.222),
    row("co128x192c2s4p1g8", 40, 232, 0.589),
    row("co128x128c1s6p1g8", 40, 232, 0.427),
    row("ex128x128c1s4k2g8", 40, 232, 0.460),
    row("ex128x128c1s4k4g8", 40, 232, 0.460),
    row("ex128x128c1s4k8g8", 40, 232, 0.460),
    row("sw128x64c1s7k2g8", 40, 232, 0.240),
    row("sw128x64c1s7k4g8", 40, 232, 0.259),
    row("sw128x32c1s8k4g8", 40, 232, 0.140),
    row("sw128x16c1s8k4g8", 40, 232, 0.110),
    row("sw128x16c1s8k8g8", 40, 232, 0.110),
    row("ex128x128c1s4p2k2g8", 40, 232, 0.564),
    row("ex128x128c1s4p2k4g8", 40, 232, 0.564),
    row("ex128x128c1s4p2k8g8", 40, 232, 0.564),
    row("sw128x64c1s7p2k2g8", 40, 232, 0.324),
    row("sw128x64c1s7p2k4g8", 40, 232, 0.235),
    row("sw128x32c1s8p2k4g8", 40, 232, 0.133),
    row("sw128x16c1s8p2k4g8", 40, 232, 0.128),
    row("sw128x16c1s8p2k8g8", 40, 232, 0.110),
    row("pp128x128c2s6g8a", 40, 232, 0.412),
    row("pp128x128c1s5o4g8a", 40, 232, 0.404),
    row("co128x128c1s5p2o4g8a", 40, 232, 0.392),
    row("co192x128c1s4p1w3g8a", 32, 160, 0.592),
}

local by_name = {}
for _, c in ipairs(M.configurations) do by_name[c.name] = c end
function M.by_name(name) return by_name[name] end

local SIZE = { bf16 = 2, fp16 = 2, fp32 = 4 }

-- Bytes of an element on its way out: sums into 16 bits wait in shared memory as fp32.
local function slab_size(problem) return problem.add and 4 or SIZE[problem.out] end

-- Columns of a slab, the box in which the output leaves.
function M.slab_cols(out, add) return 128 // slab_size { out = out, add = add } end

local SLAB = 8192 -- bytes of shared memory, of a consumer, in which its output leaves
local SHARED = 232448 -- bytes that a CTA may have
local TILES = 80 -- bytes of the slots through which tiles are handed out

-- Bytes of shared memory, of a consumer: what the columns of its tile have of their own, a bias and
-- scales.
function M.vector_bytes(c, row_scaled, biased)
    if c.exchange then return 0 end
    return 4 * c.bn * ((row_scaled and 1 or 0) + (biased and 1 or 0))
end

-- Bytes of shared memory: the stages, their barriers, then what a tile leaves in.
function M.shared_bytes(c, row_scaled, biased)
    local out = c.consumers * c.slabs * SLAB
    if c.swapped then
        out = c.bn * (c.bm + 4) * 4
    elseif c.exchange then
        out = c.bm * (c.bn + 8) * 4
    end
    local tiles = c.scheduler == "atomic" and TILES or 0
    local ring = c.stages * ((c.bm + c.bn) * 128 + 16)
    local vectors = c.consumers * M.vector_bytes(c, row_scaled, biased)
    return ceil_div(ring + 16 + tiles + vectors, 1024) * 1024 + out
end

-- Blocks of 128 in a partial sum: an interval of accumulation, split being that of 128.
function M.run_of(accumulation) return (math.tointeger(accumulation) or 128) // 128 end

-- Whether a promotion of partial sums applies the scales of b's blocks (tile): all columns of a
-- tile are then of one block, and a partial sum is of 128.
local function applies_blocks(c, accumulation)
    return c.partials > 0 and not c.exchange and 128 % c.bn == 0 and M.run_of(accumulation) == 1
end

-- Whether the configuration serves problems of this accumulation, output and scaling (nil:
-- "tensor").
function M.fits(c, problem)
    if problem.scaling == "block" or problem.scaling == "none" then return false end
    if problem.scaling == "tile" and not applies_blocks(c, problem.accumulation) then
        return false
    end
    local long = M.run_of(problem.accumulation) > 1
    local row = problem.scaling == "row"
    if row and (c.crowded or long and c.bn > 128) then return false end
    if M.shared_bytes(c, row, true) > SHARED then return false end
    if (c.partials == 0) ~= (problem.accumulation == "fast") then return false end
    if long and (c.partials > 1 or c.exchange or c.consumers > 2) then return false end
    if slab_size(problem) == 4 then return c.wide end
    return c.narrow
end

-- Rows and columns of out that the CTAs of a cluster work on together.
function M.tile_of(c)
    if c.swapped then return c.bn, c.bm end
    return c.bm * c.cluster, c.bn
end

-- ---- time ---------------------------------------------------------------------------------------

local START = 3.9e-6 -- s, from launch to the first multiplication
local FIRST = 1.03e-6 -- s, latencies of a tile's way out
-- s an element of a CTA's tile: what is added finds its lines in L2, cuBLASLt's (`cold`) does not.
local OUT = { narrow = 4.24e-11, wide = 1.31e-10, add = 1.1e-10, cold = 1.66e-10 }
local PARKED = 0.85 -- share of the way out that shows where no slab is waited for
local OVERLAPPED = 0.14 -- share of the way out that still shows under pingpong
local EXCHANGE = 9.2e-7 -- s a slice, of the partial tiles through shared memory, and the barriers
local ROOM = 16 -- of so many SMs one is left over by clusters of more than two CTAs
local IDLE = 0.31 -- share of a block's time that goes when nearly all other SMs are idle
local READ = 5.50e12 -- bytes/s of operands
local WRITE = { narrow = 2.72e12, wide = 2.72e12, add = 3.5e12, cold = 2.72e12 } -- of output
-- FLOP/s of all SMs under the power limit; outputs that are read and written again cost power too.
-- It sets in from the first to the second number of FLOPs.
local SUSTAINED = { fast = 1.672e15, split = 1.490e15 }
local SUSTAINED_ADD = { add = 0.87, cold = 0.849 }
local SHORT, LONG = 1.36e11, 2.98e11
local SOFT = 9.2 -- how softly the two limits meet

-- Intervals cost about what split does.
local function kind_of(p) return p.accumulation == "fast" and "fast" or "split" end

local function flops_of(p) return 2.0 * p.rows * p.cols * p.depth end

-- The way out of a problem's output; `sums` is how what is added leaves.
local function way_out(p, sums)
    if p.add then return sums end
    return SIZE[p.out] == 4 and "wide" or "narrow"
end

-- Seconds in which memory delivers the operands and takes the output.
local function copy_seconds(p, way)
    local out = SIZE[p.out] * (p.add and 2 or 1)
    return (p.rows + p.cols) * p.depth / READ + p.rows * p.cols * out / WRITE[way]
end

-- Seconds of a problem that would take `free` if neither power nor memory limited it.
local function limited(free, p, sustained, way)
    local flops = flops_of(p)
    local limit = flops / (sustained * (SUSTAINED_ADD[way] or 1) * p.sms / M.SMS)
    local share = math.log(flops / SHORT) / math.log(LONG / SHORT)
    share = math.max(0, math.min(1, share))
    return (free ^ SOFT + (share * limit) ^ SOFT + copy_seconds(p, way) ^ SOFT) ^ (1 / SOFT)
end

-- Seconds of the blocks of one tile, `us` each when all SMs are at work.
local function blocks_seconds(us, blocks, busy)
    return blocks * us * 1e-6 * (1 - IDLE * (1 - busy))
end

-- Waves of clusters of `cluster` CTAs that share a tile, and the share of the SMs that the average
-- wave keeps busy. The SMs of a GPC are no multiple of four everywhere: some are left over.
local function waves_of(tile_rows, tile_cols, cluster, p)
    local clusters = ceil_div(p.rows, tile_rows) * ceil_div(p.cols, tile_cols)
    local sms = cluster > 2 and p.sms - p.sms // ROOM or p.sms
    local at_once = math.max(1, sms // cluster)
    local waves = ceil_div(clusters, at_once)
    return waves, clusters / (waves * at_once), clusters
end

-- Seconds that a tile takes on its way out; less of it shows where the whole tile finds room in the
-- slabs.
local function out_seconds(c, p, way)
    local tile = c.bm * c.bn
    local waiting = tile // (64 * c.consumers * M.slab_cols(p.out, p.add)) > c.slabs
    return FIRST + tile * OUT[way] * (waiting and 1 or PARKED)
end

-- Predicted seconds of a configuration, waves of clusters, and how full they are (with edges of
-- tiles).
function M.seconds(c, p)
    local rows, cols = M.tile_of(c)
    local ctas = c.cluster * c.slices
    local waves, busy = waves_of(rows, cols, ctas, p)
    local multiply = blocks_seconds(c.us, ceil_div(ceil_div(p.depth, 128), c.slices), busy)
    local way = way_out(p, c.exchange and "cold" or "add")
    local out = out_seconds(c, p, way)
    local total
    if c.exchange then
        total = waves * (multiply + EXCHANGE * c.slices + out / c.slices)
    elseif c.pingpong then
        local each = multiply + OVERLAPPED * out
        total = waves * math.max(each, (multiply + out) / 2) + out -- two warpgroups in turn
    else
        total = waves * (multiply + out)
    end
    local full = p.rows * p.cols / (waves * math.max(1, p.sms // ctas) * rows * cols)
    return START + limited(total, p, SUSTAINED[kind_of(p)], way), waves, full
end

-- What cuBLASLt's best algorithm takes: fitted in the same way, over the tiles that it has.
local LT_TILES = {
    { 128, 256, 0.775 }, { 128, 128, 0.373 }, { 64, 128, 0.290 }, { 64, 64, 0.140 },
    { 16, 64, 0.100 },
}
local LT_OUT = 0.74 -- share of a tile's way out that shows
local LT_SPLIT = 1.196 -- blocks of split accumulation take that much longer
local LT_SUSTAINED = { fast = 1.352e15, split = 4.196e15 }
local LT_START = { fast = 5.3e-6, split = 4.6e-6 }
-- Operands of bf16 ("none") and scales of blocks: an estimate, not measured here.
local LT_SLOWER = { tensor = 1, row = 1, block = 1.2, tile = 1.2, none = 1.85 }

-- Scales of rows: its sums go to a stage of fp32, and from there through the kernel that scales
-- them.
local STAGE_START = 3e-6
local function stage_seconds(p)
    local out = SIZE[p.out] * (p.add and 2 or 1)
    return STAGE_START + p.rows * p.cols * (8 + out) / WRITE.cold
end

function M.cublaslt_seconds(p)
    local best, way = math.huge, way_out(p, "cold")
    for _, t in ipairs(LT_TILES) do
        local waves, busy = waves_of(t[1], t[2], 1, p)
        local us = p.accumulation ~= "fast" and t[3] * LT_SPLIT or t[3]
        local each = blocks_seconds(us, ceil_div(p.depth, 128), busy)
        each = each + LT_OUT * t[1] * t[2] * OUT[way]
        best = math.min(best, waves * each)
    end
    local slower = LT_SLOWER[p.scaling or "tensor"]
    local stage = p.scaling == "row" and stage_seconds(p) or 0
    local sustained = LT_SUSTAINED[kind_of(p)] / slower
    return stage + LT_START[kind_of(p)] + limited(best * slower, p, sustained, way)
end

function M.flops(p) return flops_of(p) end

-- The configurations that fit, best first: { { configuration, seconds, waves, full }, ... }. Equal
-- times keep the table's order.
function M.rank(p)
    local list = {}
    for i, c in ipairs(M.configurations) do
        if M.fits(c, p) then
            local seconds, waves, full = M.seconds(c, p)
            list[#list + 1] =
                { configuration = c, seconds = seconds, waves = waves, full = full, place = i }
        end
    end
    table.sort(list, function(a, b)
        if a.seconds ~= b.seconds then return a.seconds < b.seconds end
        return a.place < b.place
    end)
    return list
end

return M
