-- cost.lua - what a pass costs: bytes moved, FLOPs, and the seconds that follow on an H200.
--
-- In: a layer as plan.lua made it. Out: per pass { bytes, flops, seconds } for one call at the layer's
-- usual tokens with contiguous, aligned tensors and without accumulation. For people: nothing is
-- chosen by it. It reads the plan's own steps and buffers, so it cannot disagree with what runs.
--
-- The seconds are a model, not a measurement: quantise kernels move their bytes at a share of what a
-- plain copy reaches; a GEMM takes the longer of its arithmetic and its bytes; a launch costs its gap.

local M = {}

-- One H200 SXM, measured on random data; sustained clocks.
local COPY = 4.25e12 -- bytes/s, read + write, of a plain device copy
local COPY_SHARE = 0.88 -- of that, reached by amax, quantise and store kernels
local FLOPS = { fast = 1.30e15, split = 1.22e15 } -- cuBLASLt FP8, large shapes
local TILE_ROWS, TILE_COLS, SMS = 128, 256, 132 -- a GEMM's output tile, for whole waves
local LAUNCH = 3e-6 -- seconds from one kernel's end to the next one's full speed

local SIZE = { e4m3 = 1, e5m2 = 1, uint8 = 1, bf16 = 2, fp32 = 4, uint32 = 4 }

local function ceil_div(a, b) return (a + b - 1) // b end

-- A dim of the bundle format for M tokens.
local function extent(dim, tokens)
    if math.type(dim) == "integer" then return dim end
    local of = dim.of == "M" and tokens or dim.of
    local pad = dim.pad or 1
    local n = ceil_div(ceil_div(of, dim.div or 1), pad) * pad
    return math.min(n, dim.max or n)
end

local function number(value, tokens) return value == "M" and tokens or value end

-- Bytes of the buffers that the named arguments of a step point to.
local function bytes_of(step, names, sizes)
    local sum = 0
    for _, name in ipairs(names) do
        sum = sum + (sizes[step.args[name]] or 0) -- null: nothing is read or written
    end
    return sum
end

local function gemm_seconds(step, flops, bytes, tokens)
    local rows, cols = number(step.args.rows, tokens), number(step.args.cols, tokens)
    local waves = ceil_div(rows, TILE_ROWS) * ceil_div(cols, TILE_COLS) / SMS
    local fill = waves / math.ceil(waves)
    return math.max(flops / (FLOPS[step.accumulation] * fill), bytes / COPY)
end

-- Bytes, FLOPs and seconds of one step. sizes: name of a buffer -> its bytes.
local function step_cost(step, sizes, tokens)
    if step.op == "gemm" then
        local args = step.args
        local rows, cols = number(args.rows, tokens), number(args.cols, tokens)
        local flops = 2 * rows * cols * number(args.depth, tokens)
        local bytes = bytes_of(step, { "a", "b", "out", "bias" }, sizes)
        if cols * SIZE[step.out_dtype] % 16 ~= 0 then -- into the stage, and from there to out
            bytes = bytes + 2 * rows * cols * SIZE[step.out_dtype]
        end
        return bytes, flops, gemm_seconds(step, flops, bytes, tokens) + LAUNCH
    end
    local bytes = bytes_of(step, { "source", "row", "transposed", "dbias" }, sizes)
    return bytes, 0, bytes / (COPY * COPY_SHARE) + LAUNCH
end

-- Four digits are more than the model deserves, and read well.
local function rounded(seconds) return tonumber(("%.4g"):format(seconds)) end

function M.layer(layer)
    local sizes = {}
    for _, buffer in ipairs(layer.buffers) do
        sizes[buffer.name] = extent(buffer.rows, layer.tokens) * extent(buffer.cols, layer.tokens)
            * SIZE[buffer.dtype]
    end
    local costs = {}
    for pass, steps in pairs(layer.passes) do
        local total = { bytes = 0, flops = 0, seconds = 0.0 }
        for _, step in ipairs(steps) do
            local bytes, flops, seconds = step_cost(step, sizes, layer.tokens)
            total.bytes = total.bytes + bytes
            total.flops = total.flops + flops
            total.seconds = total.seconds + seconds
        end
        total.seconds = rounded(total.seconds)
        costs[pass] = total
    end
    return costs
end

return M
