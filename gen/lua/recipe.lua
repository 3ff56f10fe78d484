-- recipe.lua - what each recipe means: one row of a table, which the plan and the rules of a spec
-- go by.
--
-- A row says, for each operand (x, w, dy):
--   row, transposed  the scaling of that copy: "tensor" one scale; "row" one a row of the copy;
--                    "block" one a row and 128 of the contraction; "tile" one each 128 x 128;
--                    nil = no such copy
--   make             how the copies are made (plan_steps.lua): "own" its own amax first; "known" a
--                    scale from before; "shards" the same for each shard; "rows",
--                    "rows_and_tensor", "rows_alone", "blocks"
-- and of the whole recipe:
--   history          true: scales come from a state (delayed scaling)
--   plain            passes whose product is of bf16 on the caller's own tensors: pass -> reason
--   fixed            passes whose accumulation is not a choice: pass -> reason; it is "split" then
-- `none` is the row of a layer that computes in bf16. Fields, ranges and defaults are schema.lua's.

local M = {}

local function tensor(make)
    return { row = "tensor", transposed = "tensor", make = make }
end

local rows = { row = "row", transposed = "row", make = "rows" }
local blocks = { row = "block", transposed = "block", make = "blocks" }

local promoted = "recipe block applies its scales to partial sums of 128, so its sums are always \z
split"
local in_fp32 = "the product is of bf16, which always adds up in fp32"

M.rows = {
    current = { x = tensor "own", w = tensor "own", dy = tensor "own" },
    delayed = { x = tensor "known", w = tensor "known", dy = tensor "known", history = true },
    rowwise = { x = rows, w = rows, dy = rows },
    rowwise_hp_wgrad = {
        x = { row = "row", make = "rows_alone" },
        w = { row = "row", transposed = "tensor", make = "rows_and_tensor" },
        dy = { row = "row", make = "rows_alone" },
        plain = { wgrad = "recipe rowwise_hp_wgrad keeps the weight gradient in high precision" },
        fixed = { wgrad = in_fp32 },
    },
    block = {
        x = blocks,
        w = { row = "tile", transposed = "tile", make = "blocks" },
        dy = blocks,
        fixed = { fprop = promoted, dgrad = promoted, wgrad = promoted },
    },
}

-- recipe.current with a scale for each shard of w: all rows of the row copy that are of one shard
-- have the same scale, and so have all blocks of the transposed copy. Shards end at multiples of
-- 128.
M.shards = {
    x = tensor "own",
    w = { row = "row", transposed = "tile", make = "shards" },
    dy = tensor "own",
    fixed = { dgrad = "w has a scale a shard, which dgrad applies to partial sums of 128" },
}

local bf16 = 'the layer computes in bf16 (compute = "bf16")'
M.none = {
    plain = { fprop = bf16, dgrad = bf16, wgrad = bf16 },
    fixed = { fprop = in_fp32, dgrad = in_fp32, wgrad = in_fp32 },
}

-- The row of a checked layer.
function M.of(layer)
    if layer.compute == "bf16" then return M.none end
    return M.by_shard(layer) and M.shards or M.rows[layer.recipe.name]
end

-- Whether every shard of w has a scale of its own.
function M.by_shard(layer)
    return layer.compute ~= "bf16" and layer.recipe.weight_scale == "shard"
end

-- The FP8 format of each operand.
function M.formats(layer)
    return {
        x = "e4m3",
        w = "e4m3",
        dy = layer.recipe.format == "hybrid" and "e5m2" or "e4m3",
    }
end

return M
