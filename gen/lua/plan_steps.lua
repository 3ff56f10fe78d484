-- plan_steps.lua - the quantise steps of a layer: which kernels make an operand, from what, with
-- which arguments.
--
-- In: the layer's plan in the making (plan.lua), an operand. Out: steps of the bundle format, with
-- reasons. How the copies of an operand are made is a word of its row in recipe.lua; `makers` says
-- what that is.
--
-- An operand here: name, dtype of its source, rows, cols, scaling (its entry in recipe.lua), dbias
-- (true: its column sums are wanted too), when (a buffer, or null).
--
-- Not obvious: dbias is added up by the ops quantize and line_scales where there is one; after the
-- others by column_sums.

local kernels = require "plan_kernels"
local recipe = require "recipe"

local M = {}

local PARTIALS = kernels.PARTIALS

local contractions = {
    x = { "fprop", "wgrad" },
    w = { "fprop", "dgrad" },
    dy = { "dgrad", "wgrad" },
}

-- ---- arguments ---------------------------------------------------------------------------------

local function merged(...)
    local all = {}
    for _, part in ipairs { ... } do
        for key, value in pairs(part) do all[key] = value end
    end
    return all
end

local function source_args(o)
    return {
        source = o.name,
        source_ld = o.name .. ".ld",
        rows = o.rows,
        cols = o.cols,
        when = o.when,
    }
end

-- The row or the transposed copy as a target; wanted = false: it is made by another step.
local function copy_args(c, o, copy, wanted)
    local buffer = wanted and o.scaling[copy] and o.name .. "_" .. copy
    return {
        [copy] = buffer or c.null,
        [copy .. "_ld"] = buffer and buffer .. ".ld" or 0,
        [copy .. "_rows"] = buffer and buffer .. ".rows" or 0,
    }
end

local function copies_args(c, o)
    return merged(copy_args(c, o, "row", true), copy_args(c, o, "transposed", true))
end

-- Where dbias partials go.
local function partial_args(c, o)
    return {
        dbias_partials = o.dbias and "dbias_partials" or c.null,
        dbias_ld = o.dbias and "dbias_partials.ld" or 0,
    }
end

local function semantics(c, o, more)
    return merged({
        source_dtype = o.dtype,
        target_dtype = c.formats[o.name],
        power_of_two = c.layer.recipe.power_of_two,
    }, more or {})
end

-- ---- steps -------------------------------------------------------------------------------------

local function what_of(c, o)
    local fields = c.layer.recipe
    return ("%s is %s in format %s%s"):format(o.name, c.formats[o.name], fields.format,
        fields.power_of_two and ", scales powers of two" or "")
end

-- "row copy for fprop and transposed copy for wgrad"
local function copies_of(o)
    local passes, words = contractions[o.name], {}
    if o.scaling.row then words[#words + 1] = "row copy for " .. passes[1] end
    if o.scaling.transposed then words[#words + 1] = "transposed copy for " .. passes[2] end
    return table.concat(words, " and ")
end

-- when, if given: another step, which always runs, reports what is not finite.
local function amax_step(c, o, reason, when)
    return {
        op = "amax",
        kernel = c.kernel(o.dbias and "amax_dbias" or "amax",
                          { source_dtype = o.dtype, target_dtype = "fp32" }),
        args = merged(source_args(o), partial_args(c, o), {
            partials = "amax_partials",
            n_partials = PARTIALS,
            found_inf = when and c.null or "found_inf",
            when = when or o.when,
        }),
        reason = reason,
    }
end

-- The format as an argument.
local function is_e5m2(c, o) return c.formats[o.name] == "e5m2" and 1 or 0 end

-- wanted: the copies that this step makes.
local function quantize_step(c, o, wanted, reason)
    return {
        op = "quantize",
        kernel = c.kernel("quantize", semantics(c, o)),
        args = merged(source_args(o), partial_args(c, o), copy_args(c, o, "row", wanted.row),
            copy_args(c, o, "transposed", wanted.transposed), {
                partials = "amax_partials",
                n_partials = PARTIALS,
                scales = o.name .. "_scales",
                dbias = o.dbias and "dbias" or c.null,
                accumulate = o.dbias and "accumulate" or 0,
                e5m2 = is_e5m2(c, o),
            }),
        reason = reason,
    }
end

-- Both at once, where the tensor fits on chip: an alternative to the pair.
local function fused_alternative(c, o, wanted)
    local how = semantics(c, o)
    return {
        kernel = c.kernel("fused", how),
        elements_per_sm = kernels.fused_elements(how),
        args = merged(source_args(o), partial_args(c, o), copy_args(c, o, "row", wanted.row),
            copy_args(c, o, "transposed", wanted.transposed), {
                barrier = "barrier",
                epoch = "epoch",
                partials = "amax_partials",
                n_partials = PARTIALS,
                scales = o.name .. "_scales",
                found_inf = "found_inf",
                dbias = o.dbias and "dbias" or c.null,
                accumulate = o.dbias and "accumulate" or 0,
                e5m2 = is_e5m2(c, o),
            }),
    }
end

-- The scale is known before: from a state, or from an amax that is handed over.
local function cast_step(c, o, known, reason)
    local margin = c.layer.recipe.margin or 0
    return {
        op = "cast",
        kernel = c.kernel("cast", semantics(c, o, { margin = margin > 0 and margin or nil })),
        args = merged(source_args(o), copies_args(c, o), partial_args(c, o), {
            known = known.buffer,
            known_is_amax = known.is_amax and 1 or 0,
            fresh = known.fresh or c.null,
            partials = known.fresh and "amax_partials" or c.null,
            n_partials = known.fresh and PARTIALS or 0,
            scales = o.name .. "_scales",
            row_scales = c.null,
            amax = known.amax or c.null,
            found_inf = "found_inf",
            e5m2 = is_e5m2(c, o),
        }),
        reason = reason,
    }
end

local function sums_step(c)
    return {
        op = "column_sums",
        kernel = c.kernel("column_sums", { source_dtype = "fp32", target_dtype = "fp32" }),
        args = {
            partials = "dbias_partials",
            partials_ld = "dbias_partials.ld",
            partial_rows = "dbias_partials.rows",
            cols = c.layer.out_features,
            dbias = "dbias",
            accumulate = "accumulate",
        },
        reason = "adds up dbias from the sums of bands of rows, in one fixed order",
    }
end

-- The row copy with a scale a row.
local function row_step(c, o)
    return {
        op = "quantize_row",
        kernel = c.kernel("quantize_row", semantics(c, o)),
        args = merged(source_args(o), copy_args(c, o, "row", true), {
            row_scales = o.name .. "_row_scales",
            found_inf = "found_inf",
        }),
        reason = ("%s; row copy for %s with a scale a row, from one read"):format(what_of(c, o),
            contractions[o.name][1]),
    }
end

-- A buffer of lines where the operand has the copy that they are of.
local function of_lines(c, o, copy, name)
    local line = copy == "row" and "row" or "column"
    return o.scaling[copy] and ("%s_%s_%s"):format(o.name, line, name) or c.null
end

local function line_partials(c, o)
    local row, column = of_lines(c, o, "row", "partials"), of_lines(c, o, "transposed", "partials")
    return {
        row_partials = row,
        row_partials_ld = row ~= c.null and row .. ".ld" or 0,
        column_partials = column,
        column_partials_ld = column ~= c.null and column .. ".ld" or 0,
    }
end

local function line_maxima(c, o)
    return {
        row_maxima = of_lines(c, o, "row", "maxima"),
        column_maxima = of_lines(c, o, "transposed", "maxima"),
    }
end

-- A scale for every row of the row copy and every column of the source, from the amaxes of all of
-- these.
local function line_steps(c, o)
    local passes = contractions[o.name]
    local both = o.scaling.transposed ~= nil
    local how = semantics(c, o)
    return {
        {
            op = "line_amax",
            kernel = c.kernel("line_amax", { source_dtype = o.dtype, target_dtype = "fp32" }),
            args = merged(source_args(o), partial_args(c, o), line_partials(c, o),
                { found_inf = "found_inf" }),
            reason = ("%s scaling: one read gives the amaxes of the rows%s of %s%s"):format(
                c.layer.recipe.name, both and " and columns" or "", o.name,
                o.dbias and " and the column sums of dbias" or ""),
        },
        {
            op = "line_scales",
            kernel = c.kernel("line_scales", {
                source_dtype = "fp32",
                target_dtype = how.target_dtype,
                power_of_two = how.power_of_two,
            }),
            args = merged(line_partials(c, o), line_maxima(c, o), partial_args(c, o), {
                rows = o.rows,
                cols = o.cols,
                row_scales = o.name .. "_row_scales",
                transposed_scales = both and o.name .. "_transposed_scales" or c.null,
                dbias = o.dbias and "dbias" or c.null,
                accumulate = o.dbias and "accumulate" or 0,
                when = o.when,
            }),
            reason = ("one amax and scale for each of them%s"):format(
                o.dbias and "; adds up dbias" or ""),
        },
        {
            op = "quantize_lines",
            kernel = c.kernel("quantize_lines", how),
            args = merged(source_args(o), copies_args(c, o), line_maxima(c, o)),
            reason = ("%s; row copy for %s with a scale a row%s, from one read"):format(
                what_of(c, o), passes[1],
                both and (" and transposed copy for %s with a scale a column of %s"):format(
                    passes[2], o.name) or ""),
        },
    }
end

local function block_step(c, o)
    local block = o.scaling.row == "tile" and "128x128" or "1x128"
    return {
        op = "quantize_block",
        kernel = c.kernel(block == "128x128" and "quantize_tile" or "quantize_block",
                          semantics(c, o, { block = block })),
        args = merged(source_args(o), copies_args(c, o), partial_args(c, o), {
            row_scales = o.name .. "_row_scales",
            row_scales_ld = o.name .. "_row_scales.ld",
            transposed_scales = o.name .. "_transposed_scales",
            transposed_scales_ld = o.name .. "_transposed_scales.ld",
            found_inf = "found_inf",
        }),
        reason = ("%s; %s from one read, a scale for each %s of %s"):format(
            what_of(c, o), copies_of(o),
            block, block == "1x128" and "the contraction" or o.name),
    }
end

-- ---- makers ------------------------------------------------------------------------------------

local makers = {}

-- The scale is that of the tensor itself: its amax comes first, or both in one launch.
local function own_pair(c, o, wanted, amax_reason, cast_reason)
    local amax = amax_step(c, o, amax_reason)
    amax.alternative = fused_alternative(c, o, wanted)
    return amax, quantize_step(c, o, wanted, cast_reason)
end

function makers.own(c, o)
    return { own_pair(c, o, { row = true, transposed = true },
        ("%s scaling takes the scale of %s from %s itself, so its amax comes first%s"):format(
            c.layer.recipe.name, o.name, o.name,
            o.dbias and "; the same read gives the column sums of dbias" or ""),
        ("%s; %s from one read%s"):format(what_of(c, o), copies_of(o),
            o.dbias and "; adds up dbias" or "")) }
end

function makers.known(c, o)
    local list = {}
    local calibrate = c.layer.recipe.calibrate
    if calibrate then
        local plain = merged(o, { dbias = false })
        list[1] = amax_step(c, plain,
            ("calibrate: while %s has no history, its scale comes from its own amax"):format(
                o.name),
            "state_fresh")
    end
    list[#list + 1] = cast_step(c, o, {
        buffer = "state_scale",
        amax = "state_amax",
        fresh = calibrate and "state_fresh",
    }, ("%s; %s from one read with the scale of the history; its amax enters the history%s"):format(
        what_of(c, o), copies_of(o), o.dbias and ", and the sums of dbias" or ""))
    return list
end

function makers.rows(c, o) return line_steps(c, o) end

-- The column sums of dbias need a pass over tiles, which finds the amaxes of the rows too.
function makers.rows_alone(c, o)
    return o.dbias and line_steps(c, o) or { row_step(c, o) }
end

function makers.rows_and_tensor(c, o)
    return {
        row_step(c, o),
        own_pair(c, o, { transposed = true },
            ("the transposed copy of %s has one scale, whose amax comes first"):format(o.name),
            ("transposed copy of %s for %s with one scale, from the source again"):format(o.name,
                contractions[o.name][2])),
    }
end

function makers.blocks(c, o) return { block_step(c, o) } end

-- Scales of rows, the same within 128, as those of the transposed copy's blocks.
local function turn_scales_step(c, o, reason)
    return {
        op = "transpose",
        kernel = c.kernel("transpose", { source_dtype = "uint8", target_dtype = "uint8" }),
        args = merged(copy_args(c, o, "transposed", false), {
            source = c.null,
            source_ld = 0,
            rows = o.rows,
            cols = o.cols,
            scales = o.name .. "_row_scales",
            scales_ld = 0,
            transposed_scales = o.name .. "_transposed_scales",
            transposed_scales_ld = o.name .. "_transposed_scales.ld",
            when = o.when,
        }),
        reason = reason,
    }
end

-- Each of the first two steps runs for every shard by itself (runtime/frame.c). The amax is that of
-- a cast which casts nothing: a rank that has its shard alone runs the same kernels.
function makers.shards(c, o)
    local known = { buffer = "shard_amaxes", is_amax = true }
    local cast = cast_step(c, o, known,
        ("%s; %s from one read, with one scale for all rows of a shard"):format(what_of(c, o),
            copies_of(o)))
    local amax = cast_step(c, o, merged(known, { amax = "shard_amaxes" }),
        "weight_scale shard: the scale of each shard comes from its own amax, so that comes first")
    for _, copy in ipairs { "row", "transposed" } do
        amax.args = merged(amax.args, copy_args(c, o, copy, false))
    end
    cast.args.row_scales, cast.args.found_inf = o.name .. "_row_scales", c.null
    return { amax, cast, turn_scales_step(c, o,
        "the scales of the shards once more, for the blocks of the transposed copy") }
end

-- Whether the last step adds up dbias itself.
local function adds_up(list)
    return list[#list].op == "quantize" or list[#list].op == "quantize_lines"
end

function M.quantize(c, o)
    local list = makers[o.scaling.make](c, o)
    if o.dbias and not adds_up(list) then list[#list + 1] = sums_step(c) end
    return list
end

-- The same operand where the caller hands its amax over; nil where scales are not of tensors, no
-- steps where they are of shards.
function M.given(c, o)
    if o.scaling.make == "shards" then return {} end
    if o.scaling.row ~= "tensor" then return nil end
    local list = { cast_step(c, o, {
        buffer = "amax",
        is_amax = true,
        amax = recipe.of(c.layer).history and "state_amax",
    }, ("%s; %s from one read: its amax is known"):format(what_of(c, o), copies_of(o))) }
    if o.dbias then list[2] = sums_step(c) end
    return list
end

-- dbias of a layer whose dy is not quantised.
function M.sums_alone(c, o)
    return {
        amax_step(c, o, "dy stays bf16; one read gives the column sums of dbias"),
        sums_step(c),
    }
end

return M
