-- plan_steps.lua - the quantise steps of a layer: which kernels make an operand, from what, with which arguments.
--
-- In: the layer's plan in the making (plan.lua). Out: steps of the bundle format, with reasons.

local kernels = require "plan_kernels"

local M = {}

local PARTIALS = kernels.PARTIALS

local contractions = { x = { "fprop", "wgrad" }, w = { "fprop", "dgrad" }, dy = { "dgrad", "wgrad" } }

-- amax and cast of one operand. dbias: also the column sums (dy of a layer with a bias).
function M.quantize(c, name, dtype, rows, cols, dbias)
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
        when = null,
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
        when = null,
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

return M
