-- cost.lua - what a pass costs: bytes moved, FLOPs, and the seconds that follow on an H200.
--
-- In: a layer as plan.lua made it, and its GEMMs with the seconds that choose.lua gave them. Out:
-- per pass { bytes, flops, seconds } for one call at the layer's usual tokens with contiguous,
-- aligned tensors. For people: nothing is chosen by it. It reads the plan's own steps and buffers,
-- so it cannot disagree with what runs. Bytes and FLOPs are floats: products of a legal spec's
-- sizes pass 2^63.
--
-- The seconds are a model, not a measurement: quantise kernels move their bytes at a share of what
-- a plain copy reaches; a launch costs its gap; tile.lua knows the GEMMs.

local dims = require "dims"
local tile = require "tile"

local M = {}

local extent, SIZE = dims.extent, dims.SIZE

-- One H200 SXM, measured on random data; sustained clocks.
local COPY = 4.25e12 -- bytes/s, read + write, of a plain device copy
local COPY_SHARE = 0.88 -- of that, reached by amax, quantise and store kernels
local LAUNCH = 3e-6 -- seconds from one kernel's end to the next one's full speed

-- A step of many layers takes longer than its passes one by one: the card stays at its power limit.
-- Measured over the predicted passes: six blocks of Llama-3 8B 1.07 to 1.11, two of Llama-3 70B
-- 1.09.
M.SUSTAINED = 1.09

-- Seconds of a kernel that moves so many bytes.
function M.moving(bytes) return bytes / (COPY * COPY_SHARE) + LAUNCH end

-- Arguments whose buffers a step moves once. Partial amaxes of whole tensors are not worth a word.
local moved = { "source", "row", "row_scales", "transposed", "transposed_scales", "row_partials",
    "column_partials", "dbias_partials", "dbias" }
local summed = { "partials", "dbias" } -- of column_sums

local function number(value, tokens) return value == "M" and tokens or value end

-- Bytes of the buffers that the named arguments of a step point to.
local function bytes_of(step, names, sizes)
    local sum = 0.0
    for _, name in ipairs(names) do
        sum = sum + (sizes[step.args[name]] or 0.0) -- null: nothing is read or written
    end
    return sum
end

-- Whether cuBLASLt is the first choice for this many tokens.
local function by_cublaslt(step, tokens)
    for _, range in ipairs(step.dispatch) do
        if tokens <= range.max_tokens then return range.choices[1].backend == "cublaslt" end
    end
end

-- Bytes into the stage and from there to out, and the seconds that they take. Those of scales a row
-- are in the seconds of the product already.
local function stage_cost(step, rows, cols)
    local bytes = 2.0 * rows * cols * SIZE[step.store.overwrite.stage_dtype]
    if step.a_scaling == "row" or step.b_scaling == "row" then return bytes, 0.0 end
    if cols * SIZE[step.out_dtype] % 16 == 0 then return 0.0, 0.0 end
    return bytes, bytes / (COPY * COPY_SHARE) + LAUNCH
end

-- Bytes, FLOPs and seconds of one step. sizes: name of a buffer -> its bytes; gemm: of choose.lua.
local function step_cost(step, sizes, tokens, gemm)
    if step.op == "gemm" then
        local args = step.args
        local rows, cols = number(args.rows, tokens), number(args.cols, tokens)
        local flops = 2.0 * rows * cols * number(args.depth, tokens)
        local bytes = bytes_of(step, { "a", "b", "out", "bias" }, sizes)
        local seconds = gemm.seconds
        if by_cublaslt(step, tokens) then
            local staged, more = stage_cost(step, rows, cols)
            bytes, seconds = bytes + staged, seconds + more
        end
        return bytes, flops, seconds
    end
    if step.args.when == "state_fresh" then return 0.0, 0.0, 0.0 end -- of the first step alone
    local bytes = bytes_of(step, step.op == "column_sums" and summed or moved, sizes)
    return bytes, 0.0, M.moving(bytes)
end

-- A pair of steps that one kernel takes the place of where the tensor fits on chip: its cost, else
-- nil.
local function alternative_cost(step, sizes, tokens)
    local other = step.alternative
    if not other then return nil end
    local elements = 1.0 * number(step.args.rows, tokens) * number(step.args.cols, tokens)
    if elements > other.elements_per_sm * tile.SMS then return nil end
    return step_cost({ op = "fused", args = other.args }, sizes, tokens)
end

-- Bytes and seconds of w's steps on a rank's rows of it, `share` of all. Its amax goes over the
-- ranks before it is cast, so no kernel does both.
local function rows_cost(steps, sizes, share)
    local total = { bytes = 0.0, flops = 0.0, seconds = 0.0 }
    for _, item in ipairs(steps) do
        local bytes = item.op ~= "transpose" and share * step_cost(item, sizes) or 0.0
        total.bytes = total.bytes + bytes
        total.seconds = total.seconds + (bytes > 0 and M.moving(bytes) or 0.0)
    end
    return total
end

-- The bytes, FLOPs and seconds of a list of steps.
local function steps_cost(steps, sizes, tokens, gemm)
    local total = { bytes = 0.0, flops = 0.0, seconds = 0.0 }
    local at = 1
    while at <= #steps do
        local bytes, flops, seconds = alternative_cost(steps[at], sizes, tokens)
        local taken = bytes and 2 or 1 -- the next step is in it
        if not bytes then bytes, flops, seconds = step_cost(steps[at], sizes, tokens, gemm) end
        total.bytes = total.bytes + bytes
        total.flops = total.flops + flops
        total.seconds = total.seconds + seconds
        at = at + taken
    end
    return total
end

-- Four digits are more than the model deserves, and read well.
function M.rounded(seconds) return tonumber(("%.4g"):format(seconds)) end

local function sizes_of(layer)
    local sizes = {}
    for _, buffer in ipairs(layer.buffers) do
        sizes[buffer.name] = 1.0 * extent(buffer.rows, layer.tokens)
            * extent(buffer.cols, layer.tokens) * SIZE[buffer.dtype]
    end
    return sizes
end

local function finished(total)
    total.seconds = M.rounded(total.seconds)
    total.bytes = math.tointeger(total.bytes) or total.bytes -- whole numbers while they fit
    total.flops = math.tointeger(total.flops) or total.flops
    return total
end

-- The cost of quantising w, or the share of its rows that a rank has. layer: with its `transpose`.
function M.weight(layer, share)
    local sizes, steps = sizes_of(layer), layer.passes.weight
    if share < 1 and type(layer.transpose) == "string" then
        sizes.w_transposed = 0.0 -- it is made of what was gathered
    end
    return finished(share < 1 and rows_cost(steps, sizes, share)
        or steps_cost(steps, sizes, layer.tokens))
end

-- The cost of making the transposed copy of a w that was gathered.
function M.transposing(layer)
    local bytes = 2.0 * layer.in_features * layer.out_features
    return finished { bytes = bytes, flops = 0.0, seconds = M.moving(bytes) }
end

-- Of every pass; of w the share of its rows that a rank has.
function M.layer(layer, gemms, share)
    local sizes, costs = sizes_of(layer), {}
    for pass, steps in pairs(layer.passes) do
        costs[pass] = pass == "weight" and M.weight(layer, share)
            or finished(steps_cost(steps, sizes, layer.tokens, gemms[pass]))
    end
    return costs
end

return M
