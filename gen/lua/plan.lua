-- plan.lua - from a checked model to what runs: buffers, steps and kernels of every layer, with
-- reasons.
--
-- In: the model table that spec.lua made (every value present and checked), and `format`, the facts
-- of the bundle format that C hands over so that they are written down once: the ops with their
-- arguments in order, the paddings, and the value that becomes JSON's null; the tuning entries, if
-- any. Out: the manifest of a bundle (runtime/bundle_format.h) without what only C knows (versions,
-- hashes, cubins, digest), and for people `cost` and `memory` of every layer, a rank's where there
-- are several, and what is `predicted` of a step.
--
-- Policy lives in the files it puts together: plan_buffers.lua (memory), plan_steps.lua
-- (quantising), plan_gemms.lua (products and their outputs), plan_kernels.lua (variants and
-- launches), choose.lua (what computes each GEMM), cost.lua. Knows nothing of CUDA text or of a
-- device; a pure function, in the order of the spec.

local buffers = require "plan_buffers"
local choose = require "choose"
local cost = require "cost"
local dims = require "dims"
local gemms = require "plan_gemms"
local kernels = require "plan_kernels"
local recipe = require "recipe"
local shard = require "shard"
local step = require "step"
local steps = require "plan_steps"

local M = {}

local OPERANDS = { "x", "w", "dy" }

-- A list that may be empty and is a JSON array all the same (plan.c).
local function array(list) return setmetatable(list or {}, {}) end

-- What plan_steps.lua wants to know of each operand that the recipe makes.
local function operands_of(c)
    local layer, row = c.layer, recipe.of(c.layer)
    local n, k = layer.out_features, layer.in_features
    local all = {
        x = { dtype = "bf16", rows = "M", cols = k, when = c.null },
        w = { dtype = layer.weight, rows = n, cols = k, when = "when" },
        dy = { dtype = "bf16", rows = "M", cols = n, when = c.null, dbias = layer.bias },
    }
    for name, operand in pairs(all) do operand.name, operand.scaling = name, row[name] end
    return all
end

local function quantise(c, operand)
    if operand.scaling then return steps.quantize(c, operand) end
    return operand.dbias and steps.sums_alone(c, operand) or {}
end

local function passes_of(c, operands)
    local fprop = quantise(c, operands.x)
    fprop[#fprop + 1] = gemms.step(c, c.gemms.fprop)
    return {
        weight = array(quantise(c, operands.w)),
        fprop = fprop,
        quantize_dy = array(quantise(c, operands.dy)),
        wgrad = { gemms.step(c, c.gemms.wgrad) },
        dgrad = { gemms.step(c, c.gemms.dgrad) },
    }
end

-- The steps for operands whose amax the caller knows; null where scales are not of tensors. A w
-- with scales of shards has none.
local function given_of(c, operands)
    local given = {}
    for _, name in ipairs(OPERANDS) do
        local list = operands[name].scaling and steps.given(c, operands[name])
        if not list then return c.null end
        given[name] = array(list)
    end
    return given
end

local function dequantize_of(c, operands)
    local list = {}
    for _, name in ipairs(OPERANDS) do
        for _, copy in ipairs { "row", "transposed" } do
            local scaling = operands[name].scaling and operands[name].scaling[copy]
            if scaling then
                local format = c.formats[name]
                list[format .. "_" .. scaling] = c.kernel("dequantize",
                    { source_dtype = format, target_dtype = "fp32", scaling = scaling })
            end
        end
    end
    return list
end

-- w's transposed copy can be made of its row copy where both have the same scales, or scales of
-- shards.
local function transpose_of(c, operands)
    local w = operands.w.scaling
    if not w or w.make ~= "shards" and (w.row ~= w.transposed or w.row == "row") then
        return c.null
    end
    return c.kernel("transpose", { source_dtype = "uint8", target_dtype = "uint8" })
end

-- The kernels that add up dw and dbias over the ranks, as they are or into fp32 sums over
-- micro-batches; nil for one rank.
local function sums_of(c)
    if c.ranks == 1 then return nil end
    local list, seen = {}, {}
    local function add(from, to)
        if seen[from .. to] then return end
        seen[from .. to] = true
        list[#list + 1] = c.kernel("sum", { source_dtype = from, target_dtype = to })
    end
    for _, dtype in ipairs { c.layer.grad_weight, c.layer.bias and "fp32" or nil } do
        add(dtype, dtype)
        add(dtype, "fp32")
    end
    return list
end

-- The kernel for the amaxes of a shard's columns, where w's rows or columns have scales of their
-- own.
local function maxima_of(c, operands)
    local w = operands.w.scaling
    if c.ranks == 1 or not w or w.row ~= "row" or w.make == "shards" then return nil end
    return c.kernel("column_maxima", { source_dtype = "fp32", target_dtype = "fp32" })
end

-- How the weight is spread over the ranks of the mesh.
local function shard_of(c, operands)
    local multiple = shard.multiple(c.layer.recipe)
    return {
        sums = sums_of(c),
        maxima = maxima_of(c, operands),
        rows = shard.chunk(c.layer.out_features, c.ranks, multiple),
        multiple = multiple,
        gather_group = c.layer.gather_group or c.null,
    }
end

-- Seconds of the kernel that adds what an exchange brought: a piece of every rank, and the sum.
local function adding(bytes, ranks) return cost.moving(bytes * (ranks + 1.0)) end

-- Predicted seconds of a collective as a model runs it: a reduce_scatter is an exchange and our
-- sum.
local function seconds_of(item, ranks)
    local sums = item.op == "reduce_scatter"
    local bytes = item.bytes_a_rank
    local seconds = step.collective(sums and "all_to_all" or item.op, bytes, ranks)
    return seconds and seconds + (sums and adding(bytes, ranks) or 0.0)
end

-- The collectives of one step with the layers' names and predicted seconds; nil for one rank.
local function collectives_of(model, format)
    local list = shard.collectives(model, format)
    for _, item in ipairs(list) do
        for at, index in ipairs(item.layers) do item.layers[at] = model.layers[index].name end
        local seconds = seconds_of(item, model.mesh.fsdp)
        item.seconds = seconds and cost.rounded(seconds) or format.null
    end
    return #list > 0 and list or nil
end

-- What step.lua is told of a layer, seconds of its passes and bytes that its ranks exchange.
local function timed(layer, record, ranks, format)
    local timing = shard.scheduled(layer)
    timing.gather = 1.0 * shard.payload(layer, ranks, format, "fprop")
    timing.gather_turned = 1.0 * shard.payload(layer, ranks, format, "dgrad")
    timing.reduce = 1.0 * shard.gradient(layer, ranks)
    timing.grads = layer.grad_weight
    timing.sum = adding(shard.gradient(layer, ranks), ranks)
    timing.rows = cost.SUSTAINED * record.cost.weight.seconds
    timing.amaxes = shard.amaxes(layer)
    for pass, total in pairs(record.cost) do timing[pass] = cost.SUSTAINED * total.seconds end
    timing.transpose = layer.compute == "bf16" and 0.0 or cost.transposing(layer).seconds
    timing.weight = cost.SUSTAINED * cost.weight(record, 1).seconds
    return timing
end

-- Predicted seconds of one training step of all layers, each as often as the model has it; null:
-- not known.
local function predicted_of(model, layers, format)
    local list, ranks = {}, model.mesh.fsdp
    for i, layer in ipairs(model.layers) do list[i] = timed(layer, layers[i], ranks, format) end
    local options = { keep = model.shard.backward == "keep" }
    local seconds = step.model(list, ranks, options)
    if not seconds then return format.null end
    options.collective = true
    seconds.by_collective = step.model(list, ranks, options).step
    for name, value in pairs(seconds) do seconds[name] = cost.rounded(value) end
    return seconds
end

-- Bytes of what a layer keeps at its usual tokens: the quantised w, what x leaves for backward, the
-- quantised dy; of several ranks also a rank's shard of w.
local function memory_of(c, record)
    local memory = { weight = 0, saved = 0, grad = 0 }
    local objects = { w = "weight", x = "saved", dy = "grad" }
    for _, buffer in ipairs(record.buffers) do
        local name, tokens = objects[buffer.object], record.tokens
        if name and not (name == "saved" and buffer.part:find("^row")) then
            local bytes = dims.extent(buffer.rows, tokens) * dims.extent(buffer.cols, tokens)
                * dims.SIZE[buffer.dtype]
            memory[name] = memory[name] + dims.roundup(bytes, c.format.part_align)
        end
    end
    if c.ranks > 1 then memory.shard = shard.kept(c.layer, c.ranks, c.format) end
    return memory
end

local function plan_layer(c)
    local layer, operands = c.layer, operands_of(c)
    local record = {
        name = layer.name,
        in_features = layer.in_features,
        out_features = layer.out_features,
        tokens = layer.tokens,
        max_tokens = layer.max_tokens,
        count = layer.count,
        recipe = layer.recipe,
        compute = layer.compute,
        bias = layer.bias,
        accumulation = layer.accumulation,
        shard = shard_of(c, operands),
        buffers = buffers.buffers(layer, c.format, c.ranks),
        passes = passes_of(c, operands),
        given = given_of(c, operands),
        dequantize = dequantize_of(c, operands),
        transpose = transpose_of(c, operands),
    }
    if recipe.of(layer).history then
        record.roll = c.kernel("roll", { source_dtype = "fp32", target_dtype = "fp32" })
    end
    record.cost = cost.layer(record, c.gemms, math.min(1, record.shard.rows / layer.out_features))
    if c.ranks > 1 and record.transpose ~= c.null then
        record.cost.transpose = cost.transposing(layer)
    end
    record.memory = memory_of(c, record)
    return record
end

-- options: force (a GEMM for all, or nil), tuning (checked entries, or nil).
function M.plan(model, format, options)
    local list, kernel, add = kernels.set(format)
    local layers, products, all = {}, {}, {}
    for i, layer in ipairs(model.layers) do
        products[i] = gemms.gemms(layer)
        for _, pass in ipairs { "fprop", "wgrad", "dgrad" } do all[#all + 1] = products[i][pass] end
    end
    choose.choose(all, { force = options.force, tuning = options.tuning or {} })
    for i, layer in ipairs(model.layers) do
        layers[i] = plan_layer {
            layer = layer,
            gemms = products[i],
            kernel = kernel,
            add = add,
            format = format,
            formats = recipe.formats(layer),
            null = format.null,
            ranks = model.mesh.fsdp,
        }
    end
    return {
        model = model.name,
        mesh = model.mesh,
        shard = model.shard,
        rank = 0,
        kernels = list,
        layers = layers,
        collectives = collectives_of(model, format),
        predicted = predicted_of(model, layers, format),
    }
end

return M
