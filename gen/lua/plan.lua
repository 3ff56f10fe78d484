-- plan.lua - from a checked model to what runs: buffers, steps and kernels of every layer, with reasons.
--
-- In: the model table that spec.lua made (every value present and checked), and `format`, the facts of
-- the bundle format that C hands over so that they are written down once: the ops with their arguments
-- in order, the paddings, and the value that becomes JSON's null; the tuning entries, if any. Out: the
-- manifest of a bundle
-- (runtime/bundle_format.h) without what only C knows (versions, hashes, cubins, digest), and per layer
-- `cost` for people.
--
-- Policy lives in the files it puts together: plan_buffers.lua (memory), plan_steps.lua (quantising),
-- plan_gemms.lua (products and their outputs), plan_kernels.lua (variants and launches), choose.lua (what
-- computes each GEMM), cost.lua. Knows nothing of CUDA text or of a device; a pure function, in the order of
-- the spec.
local buffers = require "plan_buffers"
local choose = require "choose"
local cost = require "cost"
local gemms = require "plan_gemms"
local kernels = require "plan_kernels"
local shard = require "shard"
local steps = require "plan_steps"

local M = {}

local function passes_of(c)
    local layer = c.layer
    local n, k = layer.out_features, layer.in_features
    local weight = { steps.quantize(c, "w", layer.weight, n, k, false) }
    local fprop = { steps.quantize(c, "x", "bf16", "M", k, false) }
    fprop[#fprop + 1] = gemms.step(c, c.gemms.fprop)
    local quantize_dy = { steps.quantize(c, "dy", "bf16", "M", n, layer.bias) }
    return {
        weight = weight,
        fprop = fprop,
        quantize_dy = quantize_dy,
        wgrad = { gemms.step(c, c.gemms.wgrad) },
        dgrad = { gemms.step(c, c.gemms.dgrad) },
    }
end

local function dequantize_of(c)
    local kernels = {}
    for _, operand in ipairs { "x", "w", "dy" } do
        local format = c.formats[operand]
        kernels[format .. "_tensor"] = c.kernel("dequantize", {
            source_dtype = format,
            target_dtype = "fp32",
            scaling = "tensor",
        })
    end
    return kernels
end

-- How the weight is spread over the ranks of the mesh.
local function shard_of(c)
    local multiple = shard.multiple(c.layer.recipe)
    return {
        rows = shard.chunk(c.layer.out_features, c.ranks, multiple),
        multiple = multiple,
        gather_group = c.layer.gather_group or c.null,
    }
end

-- The collectives of one step with the layers' names and predicted seconds; nil for one rank.
local function collectives_of(model, format)
    local list = shard.collectives(model, format)
    for _, item in ipairs(list) do
        for at, index in ipairs(item.layers) do item.layers[at] = model.layers[index].name end
        item.seconds = cost.collective(item.op, item.bytes, model.mesh.fsdp) or format.null
    end
    return #list > 0 and list or nil
end

local function plan_layer(c)
    local layer = c.layer
    local record = {
        name = layer.name,
        in_features = layer.in_features,
        out_features = layer.out_features,
        tokens = layer.tokens,
        max_tokens = layer.max_tokens,
        count = layer.count,
        recipe = layer.recipe,
        compute = "fp8",
        bias = layer.bias,
        accumulation = layer.accumulation,
        shard = shard_of(c),
        buffers = buffers.buffers(layer, c.format),
        passes = passes_of(c),
        given = c.null,
        transpose = c.null,
        dequantize = dequantize_of(c),
    }
    record.cost = cost.layer(record, c.gemms)
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
            formats = buffers.formats(layer.recipe),
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
    }
end

return M
