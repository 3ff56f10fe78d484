-- shrink.lua - a model with smaller dims that is hard in the same places.
--
-- In: the checked model. Out: the same table, dims cut. A dim keeps its remainder mod 128 (the
-- paddings and tails of every kernel). One that is spread over ranks also keeps its remainder mod
-- the ranks and stays so large that the same ranks are full, short and empty. Dims that are small
-- already stay as they are. For simulations on the host; nothing else is cut: recipes, dtypes,
-- biases, groups, counts stay.

local shard = require "shard"

local shrink = {}

local STEP = 128
local TOKENS = 96 -- at most so many and the remainder: a sum over tokens needs no more

local function gcd(a, b)
    while b > 0 do a, b = b, a % b end
    return a
end

-- The smallest n' >= least with n' = n mod `period`, or n where that is not smaller.
function shrink.dim(n, period, least)
    local cut = n % period
    if cut < least then cut = cut + (least - cut + period - 1) // period * period end
    return math.min(cut, n)
end

-- Of a dim that is cut over ranks at multiples of `multiple`. With q units a rank and m left over,
-- only the last rank alone is short if ranks - m, the units that are missing, are fewer than a
-- chunk's, q + 1.
function shrink.sharded(n, ranks, multiple)
    local unit, left = multiple * ranks, (n + multiple - 1) // multiple % ranks
    local q = left == 0 and 1 or ranks - left
    local least = (q * ranks + left - 1) * multiple + 1
    return shrink.dim(n, STEP // gcd(STEP, unit) * unit, math.max(STEP, least))
end

local function tokens(n) return math.min(n, TOKENS + n % 16) end

function shrink.model(model)
    for _, layer in ipairs(model.layers) do
        layer.in_features = shrink.dim(layer.in_features, STEP, 2 * STEP) -- no square weights
        layer.out_features = shrink.sharded(layer.out_features, model.mesh.fsdp,
            shard.multiple(layer.recipe))
        layer.tokens, layer.max_tokens = tokens(layer.tokens), tokens(layer.max_tokens)
    end
    return model
end

return shrink
