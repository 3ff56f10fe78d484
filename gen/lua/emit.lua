-- emit.lua - from a plan to CUDA: each kernel's template expanded, and with its provenance on top.
--
-- In: a manifest as plan.lua made it. Out: per kernel, in manifest order, { name, template, entry,
-- body, written }: `body` is what the compiler gets, `written` what people get.

local expand = require "expand"

local M = {}

-- Names of the layers that have a step or a query that uses the kernel; of a kernel of no layer's
-- passes what it is for.
local function users(manifest, kernel)
    local function mentions(value)
        if value == kernel then return true end
        if type(value) ~= "table" then return false end
        for _, part in pairs(value) do
            if mentions(part) then return true end
        end
        return false
    end
    local names, others, seen = {}, {}, {}
    local function other(part, what)
        if not mentions(part) or seen[what] then return end
        seen[what] = true
        others[#others + 1] = what
    end
    for _, layer in ipairs(manifest.layers) do
        if mentions(layer.passes) or mentions(layer.dequantize) then
            names[#names + 1] = layer.name
        end
        other(layer.roll, "the state of recipe " .. layer.recipe.name)
        other(layer.given, "operands whose amax the caller gives")
        other(layer.transpose, "weights that were gathered")
        other(layer.shard.sums, "sums over ranks")
        other(layer.shard.maxima, "amaxes over ranks")
    end
    return #names > 0 and names or others
end

function M.kernels(manifest)
    local list = {}
    for i, kernel in ipairs(manifest.kernels) do
        local text, shown = host.template(kernel.template)
        local body = expand.expand(kernel.template, text, kernel.parameters, shown)
        list[i] = {
            name = kernel.name,
            template = kernel.template,
            entry = kernel.entry,
            body = body,
            written = expand.provenance {
                generator = host.version,
                model = manifest.model,
                layers = users(manifest, kernel.name),
                kernel = kernel.name,
                template = kernel.template,
                parameters = kernel.parameters,
            } .. body,
        }
    end
    return list
end

return M
