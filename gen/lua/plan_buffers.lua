-- plan_buffers.lua - the buffers of a layer: the caller's tensors, operands part by part, scratch.
--
-- In: a checked layer and the paddings of the bundle format. Out: buffer records
-- (runtime/bundle_format.h), in one fixed order. Knows no steps and no kernels.
--
-- Not obvious: the stage of an accumulating bf16 dw is fp32, because dw + sum is rounded once.

local dims = require "dims"
local kernels = require "plan_kernels"
local recipe = require "recipe"

local M = {}

local dim, roundup, SIZE = dims.dim, dims.roundup, dims.SIZE
local PARTIALS, TILE = kernels.PARTIALS, kernels.TILE

local MiB = 1024 * 1024
local STAGE_CAP = 64 * MiB -- larger outputs that cannot be written in place go in row chunks
local GEMM_WORKSPACE = 64 * MiB -- what cuBLASLt's heuristics want on Hopper

M.DW_STAGE = "fp32" -- dtype of dw's stage; see above

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
        { name = "when", dtype = "uint32", rows = one, cols = one },
        { name = "amax", dtype = "fp32", rows = one, cols = one },
    }
    if layer.bias then
        list[#list + 1] = { name = "bias", dtype = "bf16", rows = one, cols = n }
        list[#list + 1] = { name = "dbias", dtype = "fp32", rows = one, cols = n }
    end
    for _, buffer in ipairs(list) do buffer.object = "caller" end
    return list
end

-- Of delayed scaling: the places of the pass's tensor in the state.
local function state_buffers(list)
    for _, part in ipairs { "scale", "amax", "fresh" } do
        list[#list + 1] = {
            name = "state_" .. part,
            object = "state",
            part = part,
            dtype = part == "fresh" and "uint32" or "fp32",
            rows = 1,
            cols = 1,
        }
    end
end

-- Dims of the scales that go with a copy of `rows` rows along a contraction of `depth`.
local scale_dims = {
    row = function(f, rows) return 1, dim(rows, { pad = f.pad_row_scales }) end,
    block = function(f, rows, depth)
        return dim(depth, { div = f.block }), dim(rows, { pad = f.pad_block_scales })
    end,
    tile = function(f, rows, depth)
        return dim(rows, { div = f.block }), dim(depth, { div = f.block, pad = f.pad_tile_scales })
    end,
}

-- Scales and copies of one operand of rows x cols; each copy padded along its contraction. scaling:
-- the operand's entry in recipe.lua.
local function operand_buffers(list, format, scaling, name, dtype, rows, cols)
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
    local function copy(what, copy_rows, depth)
        local dims_of = scale_dims[scaling[what]]
        if dims_of then part(what .. "_scales", "fp32", dims_of(format, copy_rows, depth)) end
        if scaling[what] then part(what, dtype, dim(copy_rows, across), dim(depth, along)) end
    end
    part("scales", "fp32", 1, format.scales_count)
    copy("row", rows, cols)
    copy("transposed", cols, rows)
end

-- Rows of cols elements for an output that the backend cannot write in place; whole groups of
-- `group` rows.
local function stage_buffer(name, dtype, rows, cols, group)
    local width = roundup(cols, 128 // SIZE[dtype])
    local most = math.max(1, STAGE_CAP // (width * SIZE[dtype]) // group) * group
    local rule = { pad = group > 1 and group or nil, max = most }
    return { name = name, dtype = dtype, rows = dim(rows, rule), cols = width }
end

-- A bias is added when the stage is stored: cuBLASLt adds one to some dtypes and shapes only.
-- Scales of rows are applied there. And cuBLASLt has no product of bf16 that gives fp16.
local function stage_dtype(layer, pass, a, dtype)
    local row = recipe.of(layer)
    local plain = row.plain and row.plain[pass]
    local by_store = pass == "fprop" and layer.bias or dtype == "fp16" and plain
    local scales = not plain and (row[a].row == "row" or pass == "fprop" and row.w.row == "row")
    return (by_store or scales) and "fp32" or dtype
end

function M.y_stage_dtype(layer)
    return stage_dtype(layer, "fprop", "x", layer.output)
end

function M.dx_stage_dtype(layer)
    return stage_dtype(layer, "dgrad", "dy", layer.grad_input)
end

-- Amaxes of the rows and, if wanted, the columns of an operand: of each 128 elements, and of all.
local function line_buffers(list, name, extents, columns, format)
    for i, line in ipairs { "row", columns and "column" or nil } do
        local count, across = extents[i], extents[3 - i]
        list[#list + 1] = {
            name = ("%s_%s_partials"):format(name, line),
            dtype = "fp32",
            rows = dim(across, { div = format.line_elements }),
            cols = dim(count, { pad = TILE }),
        }
        list[#list + 1] = {
            name = ("%s_%s_maxima"):format(name, line),
            dtype = "fp32",
            rows = 1,
            cols = dim(count, { pad = TILE }),
        }
    end
end

-- What quantising leaves between its launches: amaxes of the tensor or of its lines, sums for
-- dbias.
local function quantise_buffers(list, layer, row, format, ranks)
    local n, k = layer.out_features, layer.in_features
    local extents = { x = { "M", k }, w = { n, k }, dy = { "M", n } }
    list[#list + 1] = { name = "amax_partials", dtype = "fp32", rows = 1, cols = PARTIALS }
    if row.w and row.w.make == "shards" then
        list[#list + 1] = { name = "shard_amaxes", dtype = "fp32", rows = 1, cols = ranks }
    end
    if row.x and row.x.make == "own" or row.w and row.w.make == "rows_and_tensor" then
        local words = 2 * (kernels.FUSED_CTAS + 1) -- 64 bits for each CTA, and one more
        list[#list + 1] = { name = "barrier", dtype = "uint32", rows = 1, cols = words }
    end
    for _, name in ipairs { "x", "w", "dy" } do
        local of = row[name]
        local summed = name == "dy" and layer.bias
        if of and (of.make == "rows" or of.make == "rows_alone" and summed) then
            line_buffers(list, name, extents[name], of.transposed ~= nil, format)
        end
    end
    if layer.bias then
        list[#list + 1] = {
            name = "dbias_partials",
            dtype = "fp32",
            rows = dim("M", { div = format.dbias_rows }),
            cols = dim(n, { pad = TILE }),
        }
    end
end

local function workspace_buffers(layer, row, format, ranks)
    local n, k = layer.out_features, layer.in_features
    -- cuBLASLt takes scales of blocks for whole groups of rows only
    local group = row.w and row.w.row == "tile" and format.pad_block_scales or 1
    local list = {
        stage_buffer("y_stage", M.y_stage_dtype(layer), "M", n, group),
        stage_buffer("dx_stage", M.dx_stage_dtype(layer), "M", k, group),
        stage_buffer("dw_stage", M.DW_STAGE, n, k, group),
        { name = "gemm_workspace", dtype = "uint8", rows = 1, cols = GEMM_WORKSPACE },
        { name = "tile_counter", dtype = "uint32", rows = 1, cols = 4 }, -- two words of 64 bits
    }
    if layer.bias then
        list[#list + 1] = { name = "bias_stage", dtype = "bf16", rows = 1, cols = roundup(n, 16) }
    end
    quantise_buffers(list, layer, row, format, ranks)
    for _, buffer in ipairs(list) do buffer.object = "workspace" end
    return list
end

-- ranks: over which w is spread.
function M.buffers(layer, format, ranks)
    local list, row = caller_buffers(layer), recipe.of(layer)
    local f, n, k = recipe.formats(layer), layer.out_features, layer.in_features
    local extents = { x = { "M", k }, w = { n, k }, dy = { "M", n } }
    for _, name in ipairs { "x", "w", "dy" } do
        if row[name] then
            operand_buffers(list, format, row[name], name, f[name], table.unpack(extents[name]))
        end
    end
    if row.history then state_buffers(list) end
    local workspace = workspace_buffers(layer, row, format, ranks)
    return table.move(workspace, 1, #workspace, #list + 1, list)
end

return M
