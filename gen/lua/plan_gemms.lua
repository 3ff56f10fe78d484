-- plan_gemms.lua - the three GEMMs of a layer: what multiplies what, by which kernels, how outputs
-- are written.
--
-- In: a checked layer; then, with the ranges that choose.lua set, the layer's plan in the making.
-- Out: GEMM records for choose.lua, gemm steps and gemm kernels of the bundle format.

local buffers = require "plan_buffers"
local dims = require "dims"
local recipe = require "recipe"
local tile = require "tile"

local M = {}

local SIZE, DW_STAGE = dims.SIZE, buffers.DW_STAGE

-- ---- kernels -----------------------------------------------------------------------------------

-- The arguments of templates/gemm_sm90.cu: tensor maps, then words.
local function gemm_args(c, slab_cols)
    local function map(name, inner, outer)
        return { name = name, type = "tensor_map", box = { inner, outer } }
    end
    local list = {
        map("a", 128, c.swapped and c.bn or c.bm),
        map("b", 128, c.swapped and c.bm or c.bn // c.cluster),
        map("out", slab_cols, 16),
    }
    for _, name in ipairs { "a_scales", "b_scales", "bias", "out" } do
        list[#list + 1] = { name = name, type = "pointer" }
    end
    for _, name in ipairs { "out_ld", "rows", "cols", "depth" } do
        list[#list + 1] = { name = name, type = "int64" }
    end
    list[#list + 1] = { name = "out_by_map", type = "int32" }
    if c.scheduler == "atomic" then
        list[#list + 1] = { name = "tiles", type = "pointer" }
        list[#list + 1] = { name = "epoch", type = "int64" }
    end
    return list
end

-- How a kernel's name tells the scales of a and b.
local scaling_names = {
    ["tensor tensor"] = "",
    ["row row"] = "_row",
    ["row tensor"] = "_arow",
    ["tensor row"] = "_brow",
    ["tensor tile"] = "_btile",
}

-- The generated GEMM of a configuration (tile.lua). semantics: source_dtype of a, second_dtype of
-- b, target_dtype, accumulate, a_scaling, b_scaling.
function M.kernel(c, semantics, accumulation, biased)
    local s, run = semantics, tile.run_of(accumulation)
    local row_scaled = s.a_scaling == "row" or s.b_scaling == "row"
    local tile_rows, tile_cols = tile.tile_of(c)
    return {
        name = ("gemm_%s_%s_%s%s%s%s%s_%s"):format(s.source_dtype, s.second_dtype, s.target_dtype,
                                               scaling_names[s.a_scaling .. " " .. s.b_scaling],
                                               s.accumulate and "_add" or "",
                                               biased and "_bias" or "",
                                               run > 1 and "_i" .. 128 * run or "", c.name),
        op = "gemm",
        template = "gemm_sm90.cu",
        archs = { "sm_90a" },
        parameters = {
            bm = c.bm,
            bn = c.bn,
            stages = c.stages,
            flow = c.exchange and "exchange" or "stream",
            cluster = c.cluster,
            slices = c.slices,
            swapped = c.swapped,
            group = c.group,
            pingpong = c.pingpong,
            partials = c.partials,
            slabs = c.slabs,
            vectors = tile.vector_bytes(c, row_scaled, biased),
            consumers = c.consumers,
            scheduler = c.scheduler,
            run = run,
            a_row_scaled = s.a_scaling == "row",
            b_row_scaled = s.b_scaling == "row",
            b_tile_scaled = s.b_scaling == "tile",
            add = s.accumulate,
            biased = biased or false,
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
            tile_rows = tile_rows,
            tile_cols = tile_cols,
            slices = c.slices,
        },
        overlaps = true,
        block = 128 * (c.consumers + 1),
        cluster = c.cluster * c.slices,
        shared_bytes = tile.shared_bytes(c, row_scaled, biased),
    }
end

-- ---- steps -------------------------------------------------------------------------------------

-- What the ranges of M get (choose.lua), with the names of kernels.
local function dispatch(c, gemm, dtype)
    local function kernel(configuration, accumulate)
        return c.add(M.kernel(configuration, {
            source_dtype = gemm.a_dtype,
            second_dtype = gemm.b_dtype,
            target_dtype = gemm.dtype,
            accumulate = accumulate,
            a_scaling = gemm.a_scaling,
            b_scaling = gemm.b_scaling,
        }, gemm.accumulation, gemm.bias))
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
        return out .. " in place if its address and ld are multiples of 16 bytes, else staged"
    end
    return ("%s staged where its rows are packed: %d bytes are no multiple of 16"):format(out,
        bytes)
end

-- The arguments and fields of one operand (side "a" or "b"): an FP8 copy with its scales, or the
-- caller's own tensor.
local function operand_args(c, g, side)
    local name, copy, scaling = g[side], g[side .. "_copy"], g[side .. "_scaling"]
    local buffer = copy and name .. "_" .. copy or name
    local scales = scaling == "tensor" and name .. "_scales"
        or copy and buffer .. "_scales" or c.null
    local args = {
        [side] = buffer,
        [side .. "_ld"] = buffer .. ".ld",
        [side .. "_scales"] = scales,
        [side .. "_scales_ld"] = scales ~= c.null and scales .. ".ld" or 0,
    }
    local fields = {
        [side .. "_dtype"] = g[side .. "_dtype"],
        [side .. "_scaling"] = scaling,
        [side .. "_transposed"] = g[side .. "_transposed"],
    }
    return args, fields
end

-- out[rows, cols] = a b^T over depth, as M.gemms says.
function M.step(c, g)
    local null = c.null
    local step = {
        op = "gemm",
        args = {
            bias = g.bias and "bias" or null,
            out = g.out,
            out_ld = g.out .. ".ld",
            rows = g.rows,
            cols = g.cols,
            depth = g.depth,
            accumulate = g.accumulates and "accumulate" or 0,
            tiles = g.plain and null or "tile_counter",
            epoch = g.plain and 0 or "epoch",
        },
        out_dtype = g.dtype,
        accumulation = g.accumulation,
        stage = g.out .. "_stage",
        stage_bias = g.bias and "bias_stage" or null,
        gemm_workspace = "gemm_workspace",
        store = store_of(c, g.dtype, g.stage_dtype, g.accumulates),
        dispatch = dispatch(c, g, ("%s x %s -> %s"):format(g.a_dtype, g.b_dtype, g.dtype)),
    }
    for _, side in ipairs { "a", "b" } do
        local args, fields = operand_args(c, g, side)
        for key, value in pairs(args) do step.args[key] = value end
        for key, value in pairs(fields) do step[key] = value end
    end
    return step
end

local scalings = {
    tensor = "",
    row = " with a scale a row",
    block = " with scales of blocks",
    tile = " with scales of blocks",
}

local function cublaslt_reason(g)
    local how
    if g.scaling == "tile" then
        return "cuBLASLt has no product of one scale a tensor by scales of blocks: a GPU without \z
the generated kernel is refused"
    elseif g.plain then
        how = g.plain .. ": the caller's tensors as they are"
    else
        local as = g.accumulation
        if tile.run_of(as) > 1 then
            as = ("split accumulation, since it has no interval of %s"):format(as)
        else
            as = as .. " accumulation, as the spec says"
        end
        how = ("FP8 %s x %s%s through cuBLASLt with %s; operands are \z
padded, so every M, N, K fits"):format(g.a_dtype, g.b_dtype, scalings[g.a_scaling], as)
    end
    local out = g.scaling == "row"
        and g.out .. " staged in fp32, from where the store applies the scales, the smaller of \z
two first"
        or output_reason(g.out, g.dtype, g.cols)
    return how .. "; " .. out
end

-- What the recipe says of a GEMM's operands: dtype, scaling, and the copy, or the caller's tensor,
-- which lies across the contraction where a copy would be transposed.
local function set_operands(layer, g)
    local row, format = recipe.of(layer), recipe.formats(layer)
    g.plain = row.plain and row.plain[g.pass]
    for _, side in ipairs { "a", "b" } do
        local name, copy = g[side], g[side .. "_copy"]
        g[side .. "_dtype"] = g.plain and "bf16" or format[name]
        g[side .. "_scaling"] = g.plain and "none" or row[name][copy]
        g[side .. "_transposed"] = g.plain ~= nil and copy == "transposed"
        if g.plain then g[side .. "_copy"] = nil end
    end
    g.scaling = g.b_scaling == "tensor" and g.a_scaling or g.b_scaling -- the finer one
    if g.a_scaling == "block" or g.b_scaling == "block" then g.scaling = "block" end
end

-- The GEMMs of a layer, by pass: out[rows, cols] = a b^T over depth.
function M.gemms(layer)
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
            stage_dtype = buffers.y_stage_dtype(layer),
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
            stage_dtype = buffers.dx_stage_dtype(layer),
        },
    }
    for pass, g in pairs(gemms) do
        g.pass, g.N, g.K = pass, n, k
        g.tokens, g.max_tokens = layer.tokens, layer.max_tokens
        set_operands(layer, g)
        g.accumulation = layer.accumulation[pass]
        g.accumulates = g.accumulates or false
        g.cublaslt_reason = cublaslt_reason(g)
    end
    return gemms
end

return M
