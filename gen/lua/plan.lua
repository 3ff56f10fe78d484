-- plan.lua - from a checked model to what runs: buffers, steps and kernels of every layer, with reasons.
--
-- In: the model table that spec.lua made (every value present and checked), and `format`, the facts of
-- the bundle format that C hands over so that they are written down once: the ops with their arguments
-- in order, the paddings, and the value that becomes JSON's null; the tuning entries, if any. Out: the
-- manifest of a bundle
-- (runtime/bundle_format.h) without what only C knows (versions, hashes, cubins, digest), and per layer
-- `cost` for people.
--
-- Policy lives here: which copy in which format, which kernel, how outputs are staged; and in choose.lua:
-- what computes each GEMM. Knows nothing of CUDA text or of a device; a pure function, in the order of the
-- spec.
--
-- Not obvious: the stage of an accumulating bf16 dw is fp32, because dw + sum is rounded once.

local choose = require "choose"
local cost = require "cost"
local tile = require "tile"

local M = {}

local MiB = 1024 * 1024
local STAGE_CAP = 64 * MiB -- larger outputs that cannot be written in place go in row chunks
local GEMM_WORKSPACE = 64 * MiB -- what cuBLASLt's heuristics want on Hopper
local PARTIALS = 1024 -- amax: one a CTA, and that many CTAs at most
local TILE = 128 -- quantise: rows and columns of a tile, and rows of a dbias partial

local DW_STAGE = "fp32" -- dtype of dw's stage; see above

local SIZE = { e4m3 = 1, e5m2 = 1, uint8 = 1, bf16 = 2, fp16 = 2, fp32 = 4, uint32 = 4 }

local function ceil_div(a, b) return (a + b - 1) // b end
local function roundup(a, b) return ceil_div(a, b) * b end

-- A dim of the format: known numbers are computed here, those of M by the runtime.
local function dim(of, rule)
    rule = rule or {}
    if math.type(of) == "integer" then
        local n = roundup(ceil_div(of, rule.div or 1), rule.pad or 1)
        return math.min(n, rule.max or n)
    end
    return { of = of, div = rule.div, pad = rule.pad, max = rule.max }
end

-- ---- kernels -----------------------------------------------------------------------------------

-- What the plan says of each kind of kernel: op, template, launch, and how a variant is called.
local kernel_kinds = {
    amax = {
        op = "amax",
        template = "amax.cu",
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
        args = format.ops[kind.op],
        grid = grid,
        block = 256,
        cluster = 1,
        shared_bytes = 0,
    }
end

-- The arguments of templates/gemm_sm90.cu: tensor maps, then words.
local function gemm_args(c, slab_cols)
    local function map(name, inner, outer)
        return { name = name, type = "tensor_map", box = { inner, outer } }
    end
    local list = {
        map("a", 128, c.bm),
        map("b", 128, c.bn // c.cluster),
        map("out", slab_cols, 64),
    }
    for _, name in ipairs { "a_scales", "b_scales", "bias", "out" } do
        list[#list + 1] = { name = name, type = "pointer" }
    end
    for _, name in ipairs { "out_ld", "rows", "cols", "depth" } do
        list[#list + 1] = { name = name, type = "int64" }
    end
    list[#list + 1] = { name = "out_by_map", type = "int32" }
    return list
end

-- The generated GEMM of a configuration (tile.lua). semantics: source_dtype of a, second_dtype of b,
-- target_dtype, accumulate.
local function gemm_kernel(c, semantics)
    local s = semantics
    return {
        name = ("gemm_%s_%s_%s%s_%s"):format(s.source_dtype, s.second_dtype, s.target_dtype,
                                             s.accumulate and "_add" or "", c.name),
        op = "gemm",
        template = "gemm_sm90.cu",
        archs = { "sm_90a" },
        parameters = {
            bm = c.bm,
            bn = c.bn,
            stages = c.stages,
            cluster = c.cluster,
            group = c.group,
            pingpong = c.pingpong,
            partials = c.partials,
            add = s.accumulate,
            target = s.target_dtype,
            a_format = s.source_dtype,
            b_format = s.second_dtype,
            producer_registers = c.producer_registers,
            consumer_registers = c.consumer_registers,
        },
        semantics = semantics,
        args = gemm_args(c, tile.slab_cols(s.target_dtype, s.accumulate)),
        grid = {
            rule = "clusters",
            rows = "rows",
            cols = "cols",
            tile_rows = c.bm * c.cluster,
            tile_cols = c.bn,
        },
        block = 384,
        cluster = c.cluster,
        shared_bytes = tile.shared_bytes(c),
    }
end

-- The kernels of a bundle: each variant once, in the order of first use.
local function kernel_set(format)
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
    local function gemm(configuration, semantics) return add(gemm_kernel(configuration, semantics)) end
    return list, plain, gemm
end

-- ---- buffers -----------------------------------------------------------------------------------

-- The FP8 format of each operand.
local function formats(recipe)
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
local function y_stage_dtype(layer)
    return layer.output == "fp16" and layer.bias and "fp32" or layer.output
end

local function workspace_buffers(layer)
    local n, k = layer.out_features, layer.in_features
    local list = {
        { name = "amax_partials", dtype = "fp32", rows = 1, cols = PARTIALS },
        stage_buffer("y_stage", y_stage_dtype(layer), "M", n),
        stage_buffer("dx_stage", layer.grad_input, "M", k),
        stage_buffer("dw_stage", DW_STAGE, n, k),
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

local function buffers_of(layer, format)
    local list = caller_buffers(layer)
    local f, n, k = formats(layer.recipe), layer.out_features, layer.in_features
    operand_buffers(list, format, "x", f.x, "M", k)
    operand_buffers(list, format, "w", f.w, n, k)
    operand_buffers(list, format, "dy", f.dy, "M", n)
    local workspace = workspace_buffers(layer)
    return table.move(workspace, 1, #workspace, #list + 1, list)
end

-- ---- steps -------------------------------------------------------------------------------------

local contractions = { x = { "fprop", "wgrad" }, w = { "fprop", "dgrad" }, dy = { "dgrad", "wgrad" } }

-- amax and cast of one operand. dbias: also the column sums (dy of a layer with a bias).
local function quantize_steps(c, name, dtype, rows, cols, dbias)
    local format, null = c.formats[name], c.null
    local recipe = c.layer.recipe
    local function part(what) return name .. "_" .. what end
    local source = { source = name, source_ld = name .. ".ld", rows = rows, cols = cols }
    local amax = {
        partials = "amax_partials",
        n_partials = PARTIALS,
        found_inf = "found_inf",
        dbias_partials = dbias and "dbias_partials" or null,
        dbias_ld = dbias and "dbias_partials.ld" or 0,
    }
    local cast = {
        partials = "amax_partials",
        n_partials = PARTIALS,
        scales = part "scales",
        row = part "row",
        row_ld = part "row.ld",
        row_rows = part "row.rows",
        transposed = part "transposed",
        transposed_ld = part "transposed.ld",
        transposed_rows = part "transposed.rows",
        dbias = dbias and "dbias" or null,
        dbias_partials = dbias and "dbias_partials" or null,
        dbias_ld = dbias and "dbias_partials.ld" or 0,
        accumulate = dbias and "accumulate" or 0,
    }
    for key, value in pairs(source) do amax[key], cast[key] = value, value end
    return {
        op = "amax",
        kernel = c.kernel(dbias and "amax_dbias" or "amax",
                          { source_dtype = dtype, target_dtype = "fp32" }),
        args = amax,
        reason = ("%s scaling takes the scale of %s from %s itself, so its amax comes first%s"):format(
            recipe.name, name, name, dbias and "; the same read gives the column sums of dbias" or ""),
    },
        {
            op = "quantize",
            kernel = c.kernel("quantize", {
                source_dtype = dtype,
                target_dtype = format,
                power_of_two = recipe.power_of_two,
            }),
            args = cast,
            reason = ("%s is %s in format %s%s; row copy for %s and transposed copy for %s from one read%s")
                :format(name, format, recipe.format,
                        recipe.power_of_two and ", scale a power of two" or "", contractions[name][1],
                        contractions[name][2], dbias and "; adds up dbias" or ""),
        }
end

-- What the ranges of M get (choose.lua), with the names of kernels.
local function dispatch(c, gemm, dtype)
    local function kernel(configuration, accumulate)
        return c.gemm_kernel(configuration, {
            source_dtype = gemm.a_dtype,
            second_dtype = gemm.b_dtype,
            target_dtype = gemm.dtype,
            accumulate = accumulate,
        })
    end
    local function record(choice)
        local result = {
            backend = choice.backend,
            reason = choice.reason,
            seconds = tonumber(("%.4g"):format(choice.seconds)),
        }
        if choice.backend == "generated" then
            result.kernel = kernel(choice.configuration, false)
            result.accumulate_kernel = gemm.accumulates
                    and kernel(choice.accumulate_configuration, true)
                or c.null
        else
            result.algo, result.version = choice.algo, choice.version
        end
        return result
    end
    local list = {}
    for i, range in ipairs(gemm.ranges) do
        local choices = {}
        for j, choice in ipairs(range.choices) do choices[j] = record(choice) end
        list[i] = {
            min_tokens = range.min_tokens,
            max_tokens = range.max_tokens,
            dtype = dtype,
            choices = choices,
        }
    end
    return list
end

-- How an output of the caller's is written: in place where the backend can, else through the stage.
local function store_of(c, dtype, stage_dtype, accumulates)
    local function variant(accumulate)
        return {
            kernel = c.kernel("store", {
                source_dtype = stage_dtype,
                target_dtype = dtype,
                accumulate = accumulate,
            }),
            stage_dtype = stage_dtype,
        }
    end
    return { overwrite = variant(false), accumulate = accumulates and variant(true) or c.null }
end

local function output_reason(out, dtype, cols)
    local bytes = cols * SIZE[dtype]
    if bytes % 16 == 0 then
        return ("%s in place if its address and ld are multiples of 16 bytes, else staged"):format(out)
    end
    return ("%s staged where its rows are packed: %d bytes are no multiple of 16"):format(out, bytes)
end

-- out[rows, cols] = a b^T over depth, as gemms_of says.
local function gemm_step(c, g)
    local null = c.null
    local a, b = g.a .. "_" .. g.a_copy, g.b .. "_" .. g.b_copy
    return {
        op = "gemm",
        args = {
            a = a,
            a_ld = a .. ".ld",
            b = b,
            b_ld = b .. ".ld",
            a_scales = g.a .. "_scales",
            b_scales = g.b .. "_scales",
            bias = g.bias and "bias" or null,
            out = g.out,
            out_ld = g.out .. ".ld",
            rows = g.rows,
            cols = g.cols,
            depth = g.depth,
            accumulate = g.accumulates and "accumulate" or 0,
        },
        a_dtype = g.a_dtype,
        b_dtype = g.b_dtype,
        out_dtype = g.dtype,
        accumulation = g.accumulation,
        stage = g.out .. "_stage",
        stage_bias = g.bias and "bias_stage" or null,
        gemm_workspace = "gemm_workspace",
        store = store_of(c, g.dtype, g.stage_dtype or g.dtype, g.accumulates),
        dispatch = dispatch(c, g, ("%s x %s -> %s"):format(g.a_dtype, g.b_dtype, g.dtype)),
    }
end

local function cublaslt_reason(g)
    return ("FP8 %s x %s through cuBLASLt with %s accumulation, as the spec says; operands are padded, so \z
every M, N, K fits; %s"):format(g.a_dtype, g.b_dtype, g.accumulation,
                               output_reason(g.out, g.dtype, g.cols))
end

-- The GEMMs of a layer, by pass: out[rows, cols] = a b^T over depth.
local function gemms_of(layer)
    local n, k = layer.out_features, layer.in_features
    local gemms = {
        fprop = {
            a = "x",
            a_copy = "row",
            b = "w",
            b_copy = "row",
            out = "y",
            dtype = layer.output,
            rows = "M",
            cols = n,
            depth = k,
            bias = layer.bias,
            stage_dtype = y_stage_dtype(layer),
        },
        wgrad = {
            a = "dy",
            a_copy = "transposed",
            b = "x",
            b_copy = "transposed",
            out = "dw",
            dtype = layer.grad_weight,
            rows = n,
            cols = k,
            depth = "M",
            stage_dtype = DW_STAGE,
            accumulates = true,
        },
        dgrad = {
            a = "dy",
            a_copy = "row",
            b = "w",
            b_copy = "transposed",
            out = "dx",
            dtype = layer.grad_input,
            rows = "M",
            cols = k,
            depth = n,
        },
    }
    local format = formats(layer.recipe)
    for pass, g in pairs(gemms) do
        g.pass, g.N, g.K = pass, n, k
        g.tokens, g.max_tokens = layer.tokens, layer.max_tokens
        g.a_dtype, g.b_dtype = format[g.a], format[g.b]
        g.accumulation = layer.accumulation[pass]
        g.accumulates = g.accumulates or false
        g.cublaslt_reason = cublaslt_reason(g)
    end
    return gemms
end

local function passes_of(c)
    local layer = c.layer
    local n, k = layer.out_features, layer.in_features
    local weight = { quantize_steps(c, "w", layer.weight, n, k, false) }
    local fprop = { quantize_steps(c, "x", "bf16", "M", k, false) }
    fprop[#fprop + 1] = gemm_step(c, c.gemms.fprop)
    local quantize_dy = { quantize_steps(c, "dy", "bf16", "M", n, layer.bias) }
    return {
        weight = weight,
        fprop = fprop,
        quantize_dy = quantize_dy,
        wgrad = { gemm_step(c, c.gemms.wgrad) },
        dgrad = { gemm_step(c, c.gemms.dgrad) },
    }
end

-- ---- layers and the manifest -------------------------------------------------------------------

local function dequantize_of(c)
    local kernels = {}
    for _, operand in ipairs { "x", "w", "dy" } do
        local format = c.formats[operand]
        kernels[format] = c.kernel("dequantize", { source_dtype = format, target_dtype = "fp32" })
    end
    return kernels
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
        buffers = buffers_of(layer, c.format),
        passes = passes_of(c),
        dequantize = dequantize_of(c),
    }
    record.cost = cost.layer(record, c.gemms)
    return record
end

-- options: force (a GEMM for all, or nil), tuning (checked entries, or nil).
function M.plan(model, format, options)
    local kernels, kernel, gemm = kernel_set(format)
    local layers, gemms, all = {}, {}, {}
    for i, layer in ipairs(model.layers) do
        gemms[i] = gemms_of(layer)
        for _, pass in ipairs { "fprop", "wgrad", "dgrad" } do all[#all + 1] = gemms[i][pass] end
    end
    choose.choose(all, { force = options.force, tuning = options.tuning or {} })
    for i, layer in ipairs(model.layers) do
        layers[i] = plan_layer {
            layer = layer,
            gemms = gemms[i],
            kernel = kernel,
            gemm_kernel = gemm,
            format = format,
            formats = formats(layer.recipe),
            null = format.null,
        }
    end
    return {
        model = model.name,
        mesh = model.mesh,
        rank = 0,
        kernels = kernels,
        layers = layers,
    }
end

return M
