-- dims.lua - sizes of a layer's buffers: element sizes, rounding, and the dims of the bundle
-- format.
--
-- A dim is a number, or, where it depends on the tokens of a call, the record { of, div, pad, max }
-- that the runtime computes (runtime/bundle_format.h): min(roundup(ceil(of / div), pad), max).

local M = {}

M.SIZE = { e4m3 = 1, e5m2 = 1, uint8 = 1, bf16 = 2, fp16 = 2, fp32 = 4, uint32 = 4 }

function M.ceil_div(a, b) return (a + b - 1) // b end

function M.roundup(a, b) return M.ceil_div(a, b) * b end

-- The dim of `of` (a number, or "M") under a rule { div, pad, max }.
function M.dim(of, rule)
    rule = rule or {}
    if math.type(of) == "integer" then
        local n = M.roundup(M.ceil_div(of, rule.div or 1), rule.pad or 1)
        return math.min(n, rule.max or n)
    end
    return { of = of, div = rule.div, pad = rule.pad, max = rule.max }
end

-- What a dim is for so many tokens.
function M.extent(dim, tokens)
    if math.type(dim) == "integer" then return dim end
    local of = dim.of == "M" and tokens or dim.of
    local n = M.roundup(M.ceil_div(of, dim.div or 1), dim.pad or 1)
    return math.min(n, dim.max or n)
end

return M
