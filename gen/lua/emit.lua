-- emit.lua - from a plan to CUDA: each kernel's template expanded, and with its provenance on top.
--
-- In: a manifest as plan.lua made it. Out: per kernel, in manifest order, { name, template, entry,
-- body, written }: `body` is what the compiler gets, `written` what people get.

local expand = require "expand"

local M = {}

-- Names of the layers that have a step, a store or a query that uses the kernel.
local function users(manifest, kernel)
    local function mentions(value)
        if value == kernel then return true end
        if type(value) ~= "table" then return false end
        for _, part in pairs(value) do
            if mentions(part) then return true end
        end
        return false
    end
    local names = {}
    for _, layer in ipairs(manifest.layers) do
        if mentions(layer.passes) or mentions(layer.dequantize) or mentions(layer.shard.add) then
            names[#names + 1] = layer.name
        end
    end
    return names
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
