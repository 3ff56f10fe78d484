-- plan_kernels.lua - the kernels of a bundle: each variant once, in the order of first use.
--
-- In: a kind and what it shall compute (semantics). Out: the kernel record of
-- runtime/bundle_format.h without hashes and cubins: template, parameters, launch. One table says
-- it for every kind but the GEMMs (plan_gemms.lua). Knows nothing of layers.

local M = {}

M.PARTIALS = 1024 -- amax: one a CTA, and that many CTAs at most
M.TILE = 128 -- quantise: rows and columns of a tile

local PARTIALS, TILE = M.PARTIALS, M.TILE
local SIZE = { bf16 = 2, fp32 = 4 }
local ROW_BYTES = 64 * 1024 -- of the rows that a CTA of quantize_row has in shared memory
local ALL = (1 << 31) - 1 -- rows or columns of a tile: as many as there are

local function name_of(...)
    local words = {}
    for _, word in ipairs { ... } do
        if word ~= "" then words[#words + 1] = word end
    end
    return table.concat(words, "_")
end

-- Name and parameters of the kernels that cast: source, format, scales that are powers of two.
local function cast_name(beginning)
    return function(s)
        return name_of(beginning, s.source_dtype, s.target_dtype, s.power_of_two and "pow2" or "")
    end
end

-- One text serves both formats where the format is an argument (and stores that add and those that
-- do not): half the compilations.
local function unit_name(beginning)
    return function(s)
        return name_of(beginning, s.source_dtype, s.power_of_two and "pow2" or "")
    end
end

local function unit_parameters(s)
    return { source = s.source_dtype, power_of_two = s.power_of_two }
end

local function cast_parameters(s)
    return {
        source = s.source_dtype,
        format = s.target_dtype,
        power_of_two = s.power_of_two,
    }
end

local function elements(tile_elements, ctas_per_sm, max_ctas)
    return {
        rule = "elements",
        tile_elements = tile_elements,
        ctas_per_sm = ctas_per_sm,
        max_ctas = max_ctas,
        persistent = true,
    }
end

-- persistent: no more CTAs than fit, which go on from tile to tile; else a CTA a tile, unless the
-- call leaves SMs free.
local function tiles(tile_rows, tile_cols, ctas_per_sm, persistent)
    return {
        rule = "tiles",
        tile_rows = tile_rows,
        tile_cols = tile_cols,
        ctas_per_sm = ctas_per_sm,
        max_ctas = 0,
        persistent = persistent or false,
    }
end

-- Kernels that take a tile through shared memory, which then takes the transposed one.
local function tile_bytes(s) return TILE * TILE * SIZE[s.source_dtype] end

M.FUSED_CTAS = 512 -- at most, of a cooperative launch

-- Tiles that each of the two teams of a fused CTA holds in shared memory; of bf16, one more in
-- registers.
function M.fused_held(s) return s.source_dtype == "bf16" and 3 or 1 end

-- Elements that it holds.
function M.fused_elements(s)
    local tiles_held = M.fused_held(s) + (s.source_dtype == "bf16" and 1 or 0)
    return 2 * tiles_held * TILE * TILE
end

-- What the plan says of each kind of kernel: op, template, launch, and how a variant is called.
-- `over`: the arguments of the op that are the grid's rows and cols, where these are not rows and
-- cols.
local kernel_kinds = {
    amax = {
        op = "amax",
        template = "amax.cu",
        name = function(s) return "amax_" .. s.source_dtype end,
        parameters = function(s) return { source = s.source_dtype } end,
        grid = elements(16384, 4, PARTIALS),
    },
    amax_dbias = { -- also the column sums of every TILE rows
        op = "amax",
        template = "amax_dbias.cu",
        name = function(s) return "amax_dbias_" .. s.source_dtype end,
        parameters = function(s) return { source = s.source_dtype } end,
        grid = {
            rule = "tiles",
            tile_rows = TILE,
            tile_cols = TILE,
            ctas_per_sm = 4,
            max_ctas = PARTIALS,
            persistent = true,
        },
    },
    quantize = {
        op = "quantize",
        template = "quantize.cu",
        name = cast_name "quantize",
        unit = unit_name "quantize",
        parameters = unit_parameters,
        shared_bytes = tile_bytes,
        grid = tiles(TILE, TILE, 3),
    },
    cast = {
        op = "cast",
        template = "cast.cu",
        name = function(s)
            return name_of(cast_name "cast" (s), s.margin and "margin" .. s.margin or "")
        end,
        unit = function(s)
            return name_of(unit_name "cast" (s), s.margin and "margin" .. s.margin or "")
        end,
        parameters = function(s)
            local parameters = unit_parameters(s)
            parameters.margin = s.margin or 0
            return parameters
        end,
        shared_bytes = tile_bytes,
        grid = tiles(TILE, TILE, 3),
    },
    fused = { -- amax and cast in one launch: what a CTA holds on chip is read once
        op = "fused",
        template = "fused.cu",
        name = cast_name "fused",
        unit = unit_name "fused",
        parameters = function(s)
            local parameters = unit_parameters(s)
            parameters.held = M.fused_held(s)
            return parameters
        end,
        block = 512,
        shared_bytes = function(s)
            return 2 * TILE * TILE * (M.fused_held(s) * (s.source_dtype == "bf16" and 2 or 4) + 1)
        end,
        cooperative = true,
        grid = {
            rule = "tiles",
            tile_rows = TILE,
            tile_cols = TILE,
            ctas_per_sm = 1,
            max_ctas = M.FUSED_CTAS,
            persistent = true,
        },
    },
    column_sums = {
        op = "column_sums",
        template = "column_sums.cu",
        name = function() return "column_sums" end,
        parameters = function() return {} end,
        grid = tiles(ALL, 32, 8, true), -- 32 columns a CTA
        over = { rows = "partial_rows", cols = "cols" },
    },
    column_maxima = {
        op = "column_maxima",
        template = "column_maxima.cu",
        name = function() return "column_maxima" end,
        parameters = function() return {} end,
        block = 128,
        grid = tiles(ALL, 128, 8, true),
        over = { rows = "partial_rows", cols = "cols" },
    },
    quantize_row = {
        op = "quantize_row",
        template = "quantize_row.cu",
        name = cast_name "quantize_row",
        parameters = function(s)
            local parameters = cast_parameters(s)
            parameters.shared_bytes = ROW_BYTES
            return parameters
        end,
        shared_bytes = function() return ROW_BYTES end,
        grid = tiles(1, ALL, 3, true), -- a CTA has whole rows
    },
    line_amax = {
        op = "line_amax",
        template = "line_amax.cu",
        name = function(s) return "line_amax_" .. s.source_dtype end,
        parameters = function(s) return { source = s.source_dtype } end,
        shared_bytes = tile_bytes,
        grid = tiles(TILE, TILE, 3, true),
    },
    line_scales = {
        op = "line_scales",
        template = "line_scales.cu",
        name = function(s)
            return name_of("line_scales", s.target_dtype, s.power_of_two and "pow2" or "")
        end,
        parameters = function(s)
            return { format = s.target_dtype, power_of_two = s.power_of_two }
        end,
        grid = elements(16384, 4, 0), -- 32 lines a CTA at a time
    },
    quantize_lines = {
        op = "quantize_lines",
        template = "quantize_lines.cu",
        name = cast_name "quantize_lines",
        parameters = cast_parameters,
        shared_bytes = tile_bytes,
        grid = tiles(TILE, TILE, 3),
    },
    quantize_block = { -- scales of 1 x 128
        op = "quantize_block",
        template = "quantize_block.cu",
        name = cast_name "quantize_block",
        parameters = cast_parameters,
        shared_bytes = tile_bytes,
        grid = tiles(TILE, TILE, 3),
    },
    quantize_tile = { -- scales of 128 x 128
        op = "quantize_block",
        template = "quantize_tile.cu",
        name = cast_name "quantize_tile",
        parameters = cast_parameters,
        shared_bytes = tile_bytes,
        grid = tiles(TILE, TILE, 3),
    },
    transpose = {
        op = "transpose",
        template = "transpose.cu",
        name = function() return "transpose" end,
        parameters = function() return {} end,
        grid = tiles(TILE, TILE, 4),
    },
    roll = {
        op = "roll",
        template = "roll.cu",
        name = function() return "roll" end,
        parameters = function() return {} end,
        grid = tiles(ALL, 32, 4, true), -- 32 tensors a CTA
        over = { rows = "length", cols = "tensors" },
    },
    store = {
        op = "store",
        template = "store.cu",
        name = function(s)
            return name_of("store", s.source_dtype, s.target_dtype, s.accumulate and "add" or "")
        end,
        unit = function(s) return name_of("store", s.source_dtype, s.target_dtype) end,
        parameters = function(s) return { source = s.source_dtype, target = s.target_dtype } end,
        grid = elements(8192, 8, 0),
    },
    sum = {
        op = "sum",
        template = "sum.cu",
        name = function(s) return name_of("sum", s.source_dtype, s.target_dtype) end,
        parameters = function(s) return { source = s.source_dtype, target = s.target_dtype } end,
        grid = elements(4096, 4, 0),
    },
    dequantize = {
        op = "dequantize",
        template = "dequantize.cu",
        name = function(s) return name_of("dequantize", s.source_dtype, s.scaling) end,
        unit = function(s) return name_of("dequantize", s.scaling) end,
        parameters = function(s) return { scaling = s.scaling } end,
        grid = elements(8192, 8, 0),
    },
}

-- A kernel of one kind; kernel_set adds what is the same for all.
local function plain_kernel(kind_name, semantics, format)
    local kind = kernel_kinds[kind_name]
    local over = kind.over or {}
    local grid = { rows = over.rows or "rows", cols = over.cols or "cols" }
    for key, value in pairs(kind.grid) do grid[key] = value end
    return {
        name = kind.name(semantics),
        entry = kind.unit and "fp8_" .. kind.unit(semantics),
        op = kind.op,
        template = kind.template,
        parameters = kind.parameters(semantics),
        semantics = semantics,
        args = format.ops[kind.op],
        grid = grid,
        block = kind.block or 256,
        cluster = 1,
        shared_bytes = kind.shared_bytes and kind.shared_bytes(semantics) or 0,
        cooperative = kind.cooperative,
        overlaps = not kind.cooperative or nil, -- start_kernel waits
    }
end
-- The kernels of one bundle. Returns the list, a function that adds a kernel of a kind, and one
-- that adds a finished record; both give its name.
function M.set(format)
    local list, by_name = {}, {}
    local function add(kernel)
        if not by_name[kernel.name] then
            kernel.entry = kernel.entry or "fp8_" .. kernel.name
            kernel.parameters.entry = kernel.entry
            by_name[kernel.name] = kernel
            list[#list + 1] = kernel
        end
        return kernel.name
    end
    local function plain(kind_name, semantics)
        return add(plain_kernel(kind_name, semantics, format))
    end
    return list, plain, add
end

return M
