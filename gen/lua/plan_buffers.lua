-- plan_buffers.lua - the buffers of a layer: the caller's tensors, operands part by part, scratch.
--
-- In: a checked layer and the paddings of the bundle format. Out: buffer records
-- (runtime/bundle_format.h), in one fixed order. Knows no steps and no kernels.
--
-- Not obvious: the stage of an accumulating bf16 dw is fp32, because dw + sum is rounded once.

local dims = require "dims"
local kernels = require "plan_kernels"

local M = {}

local dim, roundup, SIZE = dims.dim, dims.roundup, dims.SIZE
local PARTIALS, TILE = kernels.PARTIALS, kernels.TILE

local MiB = 1024 * 1024
local STAGE_CAP = 64 * MiB -- larger outputs that cannot be written in place go in row chunks
local GEMM_WORKSPACE = 64 * MiB -- what cuBLASLt's heuristics want on Hopper

M.DW_STAGE = "fp32" -- dtype of dw's stage; see above

-- The FP8 format of each operand.
function M.formats(recipe)
    return { x = "e4m3", w = "e4m3", dy = recipe.format == "hybrid" and "e5m2" or "e4m3" }
end

local function caller_buffers(layer)
    local n, k, one = layer.out_features, layer.in_features, 1
    local m = dim("M")
    local list = {
        { name = "x", dtype = "bf16", rows = m, cols = k },
        { name = "w", dtype = layer.weight, rows = n, cols = k },
        { name = "y", dtype = layer.output, rows = m, cols = n },
        { name = "dy", dtype = "bf16", rows = m, cols = n },
        { name = "dx", dtype = layer.grad_input, rows = m, cols = k },
        { name = "dw", dtype = layer.grad_weight, rows = n, cols = k },
        { name = "found_inf", dtype = "uint32", rows = one, cols = one },
    }
    if layer.bias then
        list[#list + 1] = { name = "bias", dtype = "bf16", rows = one, cols = n }
        list[#list + 1] = { name = "dbias", dtype = "fp32", rows = one, cols = n }
    end
    for _, buffer in ipairs(list) do buffer.object = "caller" end
    return list
end

-- Scales and both copies of one operand of rows x cols; each copy padded along its contraction.
local function operand_buffers(list, format, name, dtype, rows, cols)
    local function part(what, part_dtype, part_rows, part_cols)
        list[#list + 1] = {
            name = name .. "_" .. what,
            object = name,
            part = what,
            dtype = part_dtype,
            rows = part_rows,
            cols = part_cols,
        }
    end
    local along, across = { pad = format.pad_ld }, { pad = format.pad_rows }
    part("scales", "fp32", 1, format.scales_count)
    part("row", dtype, dim(rows, across), dim(cols, along))
    part("transposed", dtype, dim(cols, across), dim(rows, along))
end

-- Rows of cols elements for an output that the backend cannot write in place.
local function stage_buffer(name, dtype, rows, cols)
    local width = roundup(cols, 128 // SIZE[dtype])
    local most = math.max(1, STAGE_CAP // (width * SIZE[dtype]))
    return { name = name, dtype = dtype, rows = dim(rows, { max = most }), cols = width }
end

-- cuBLASLt adds a bf16 bias to bf16 and fp32, not to fp16.
function M.y_stage_dtype(layer)
    return layer.output == "fp16" and layer.bias and "fp32" or layer.output
end

local function workspace_buffers(layer)
    local n, k = layer.out_features, layer.in_features
    local list = {
        { name = "amax_partials", dtype = "fp32", rows = 1, cols = PARTIALS },
        stage_buffer("y_stage", M.y_stage_dtype(layer), "M", n),
        stage_buffer("dx_stage", layer.grad_input, "M", k),
        stage_buffer("dw_stage", M.DW_STAGE, n, k),
        { name = "gemm_workspace", dtype = "uint8", rows = 1, cols = GEMM_WORKSPACE },
    }
    if layer.bias then
        list[#list + 1] = { name = "bias_stage", dtype = "bf16", rows = 1, cols = roundup(n, 16) }
        list[#list + 1] = {
            name = "dbias_partials",
            dtype = "fp32",
            rows = dim("M", { div = TILE }),
            cols = dim(n, { pad = TILE }),
        }
    end
    for _, buffer in ipairs(list) do buffer.object = "workspace" end
    return list
end

function M.buffers(layer, format)
    local list = caller_buffers(layer)
    local f, n, k = M.formats(layer.recipe), layer.out_features, layer.in_features
    operand_buffers(list, format, "x", f.x, "M", k)
    operand_buffers(list, format, "w", f.w, n, k)
    operand_buffers(list, format, "dy", f.dy, "M", n)
    local workspace = workspace_buffers(layer)
    return table.move(workspace, 1, #workspace, #list + 1, list)
end

return M
