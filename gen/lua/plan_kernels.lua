-- plan_kernels.lua - the kernels of a bundle: each variant once, in the order of first use.
--
-- In: a kind and what it shall compute (semantics). Out: the kernel record of runtime/bundle_format.h
-- without hashes and cubins: template, parameters, launch. One table says it for every kind but the
-- GEMMs (plan_gemms.lua). Knows nothing of layers.

local M = {}

M.PARTIALS = 1024 -- amax: one a CTA, and that many CTAs at most
M.TILE = 128 -- quantise: rows and columns of a tile, and rows of a dbias partial

local PARTIALS, TILE = M.PARTIALS, M.TILE

-- What the plan says of each kind of kernel: op, template, launch, and how a variant is called.
local kernel_kinds = {
    amax = {
        op = "amax",
        template = "amax.cu",
        leaves_out = { when = true },
        name = function(s) return "amax_" .. s.source_dtype end,
        parameters = function(s) return { source = s.source_dtype } end,
        grid = {
            rule = "elements",
            tile_elements = 16384,
            ctas_per_sm = 4,
            max_ctas = PARTIALS,
            persistent = true,
        },
    },
    amax_dbias = { -- also the column sums of every TILE rows
        op = "amax",
        template = "amax_dbias.cu",
        leaves_out = { when = true },
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
        leaves_out = { when = true },
        name = function(s)
            return ("quantize_%s_%s%s"):format(s.source_dtype, s.target_dtype,
                                               s.power_of_two and "_pow2" or "")
        end,
        parameters = function(s)
            return {
                source = s.source_dtype,
                format = s.target_dtype,
                power_of_two = s.power_of_two,
            }
        end,
        grid = {
            rule = "tiles",
            tile_rows = TILE,
            tile_cols = TILE,
            ctas_per_sm = 3,
            max_ctas = 0,
            persistent = false, -- a CTA a tile, unless the call leaves SMs free
        },
    },
    store = {
        op = "store",
        template = "store.cu",
        name = function(s)
            return ("store_%s_%s%s"):format(s.source_dtype, s.target_dtype,
                                            s.accumulate and "_add" or "")
        end,
        parameters = function(s)
            return {
                source = s.source_dtype,
                target = s.target_dtype,
                accumulate = s.accumulate,
            }
        end,
        grid = {
            rule = "elements",
            tile_elements = 8192,
            ctas_per_sm = 8,
            max_ctas = 0,
            persistent = true,
        },
    },
    dequantize = {
        op = "dequantize",
        template = "dequantize.cu",
        leaves_out = { scales_ld = true },
        name = function(s) return "dequantize_" .. s.source_dtype end,
        parameters = function(s) return { format = s.source_dtype } end,
        grid = {
            rule = "elements",
            tile_elements = 8192,
            ctas_per_sm = 8,
            max_ctas = 0,
            persistent = true,
        },
    },
}

-- The op's arguments, without those that the template does not take.
local function args_of(kind, format)
    local list = {}
    for _, arg in ipairs(format.ops[kind.op]) do
        if not (kind.leaves_out and kind.leaves_out[arg.name]) then list[#list + 1] = arg end
    end
    return list
end

-- A kernel of one kind; kernel_set adds what is the same for all.
local function plain_kernel(kind_name, semantics, format)
    local kind = kernel_kinds[kind_name]
    local grid = { rows = "rows", cols = "cols" }
    for key, value in pairs(kind.grid) do grid[key] = value end
    return {
        name = kind.name(semantics),
        op = kind.op,
        template = kind.template,
        parameters = kind.parameters(semantics),
        semantics = semantics,
        args = args_of(kind, format),
        grid = grid,
        block = 256,
        cluster = 1,
        shared_bytes = 0,
    }
end
-- The kernels of one bundle. Returns the list, a function that adds a kernel of a kind, and one that adds
-- a finished record; both give its name.
function M.set(format)
    local list, by_name = {}, {}
    local function add(kernel)
        if not by_name[kernel.name] then
            kernel.entry = "fp8_" .. kernel.name
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
