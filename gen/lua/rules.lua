-- rules.lua - rules between the fields of a recipe or a layer, beyond what schema.lua says of each
-- alone.
--
-- In: the state of a check (check.lua), the record of a recipe or layer, the values that it and the
-- model gave, and the layer with all defaults. Out: problems in the report, at the place that gave
-- the value; and fields that a recipe leaves no choice for, set. `refused`: what stands for a value
-- that was reported.
--
-- Not obvious: a value that is given and would have no effect is an error, wherever it was given; a
-- default that has none is silent.

local recipes = require "recipe"
local schema = require "schema"

local M = {}

-- The record whose braces hold the value: the layer's, else the model's; nil = a default.
local function giver(state, record, own, model, name)
    if own[name] ~= nil then return record end
    if model[name] ~= nil then return state.model_record end
end

-- ---- recipes ------------------------------------------------------------------------------------

local function delayed(state, record, recipe)
    local most = schema.power_of_two_margin
    if recipe.power_of_two and recipe.margin > most then
        state.report:value(record, "margin", {
            message = ("margin %d is more than %d, the most with scales that are powers of \z
two"):format(recipe.margin, most),
            hint = "a power of two leaves up to twice the room by itself",
        })
        return false
    end
    return true
end

local of_recipe = { delayed = delayed }

-- Whether a recipe's values go together.
function M.recipe(state, record, recipe)
    local rule = of_recipe[recipe.name]
    return not rule or rule(state, record, recipe)
end

-- A field that another recipe has: a problem that says so, or nil.
function M.foreign_field(scope, key)
    local owners = {}
    for _, name in ipairs(schema.recipes) do
        if scope:find("^recipe%.") and schema.field("recipe." .. name, key) then
            owners[#owners + 1] = "recipe." .. name
        end
    end
    if #owners == 0 then return nil end
    return {
        message = ("'%s' has no field '%s'"):format(scope, key),
        hint = ("it is a field of %s; fields here: %s"):format(table.concat(owners, ", "),
            table.concat(schema.names(scope), ", ")),
    }
end

-- ---- layers -------------------------------------------------------------------------------------

local function bf16_layer(state, record, own, model, layer, refused)
    if own.recipe ~= nil and own.recipe ~= refused then
        state.report:value(record, "recipe", {
            message = "a recipe has no effect in a layer that computes in bf16",
            hint = 'leave the recipe out, or give the layer compute = "fp8"',
        })
    end
    if layer.weight == "fp32" then
        local place = giver(state, record, own, model, "weight")
        state.report:value(place, "weight", {
            message = "a layer that computes in bf16 multiplies the caller's own weight, which \z
must be bf16, not fp32",
            hint = 'use weight = "bf16", or compute = "fp8", which quantises fp32 weights',
        })
    end
end

-- A recipe that is not the spec's own takes the choice silently.
local function fixed_accumulation(state, record, own, model, layer, refused)
    local fixed = recipes.of(layer).fixed or {}
    local foreign = state.overrides.recipe ~= nil and layer.compute ~= "bf16"
    for _, field in ipairs(schema.scopes.accumulation) do
        local name, why = field.name, fixed[field.name]
        local place = why and not foreign and giver(state, record, own, model, "accumulation")
        local given = place and (place == record and own or model).accumulation
        if place == record and given ~= refused and given[name] == nil and model.accumulation
            and model.accumulation ~= refused then
            place, given = state.model_record, model.accumulation
        end
        if place and given ~= refused and given[name] and given[name] ~= "split" then
            state.report:value(state.report:nested(place, "accumulation"), name, {
                message = ("%s cannot be '%s' here: %s"):format(name, given[name], why),
                hint = 'use "split", or leave it out',
            })
        end
        if why then layer.accumulation[name] = "split" end
    end
end

-- One rank has no others to share its amaxes with. A mesh that is not the spec's own may be that
-- small.
local function lone_amaxes(state, record, own, model, layer)
    local may = state.ranks > 1 or state.overrides.fsdp ~= nil
    if may or layer.compute == "bf16" or layer.recipe.amax_group ~= "fsdp" then return end
    state.report:value(giver(state, record, own, model, "recipe"), "recipe", {
        message = ("layer '%s' shares its amaxes over fsdp, which has one rank"):format(
            layer.name or "?"),
        hint = "give the model mesh = { fsdp = ... }, or leave amax_group out; other ranks of \z
yours share amaxes by an all-reduce of fp8_state_running",
    })
end

-- A shard of one rank is the tensor. A mesh that is not the spec's own may be that small.
local function lone_shards(state, record, own, model, layer)
    if layer.compute == "bf16" or state.ranks > 1 or layer.recipe.weight_scale ~= "shard" then
        return
    end
    if state.overrides.fsdp == nil then
        state.report:value(giver(state, record, own, model, "recipe"), "recipe", {
            message = ("layer '%s' has a scale for each shard of w, but fsdp has one rank"):format(
                layer.name or "?"),
            hint = "give the model mesh = { fsdp = ... }, or leave weight_scale out",
        })
    end
    layer.recipe.weight_scale = "tensor"
end

-- own, model: the values that the layer and the model gave; layer: with defaults and overrides.
function M.layer(state, record, own, model, layer, refused)
    if layer.compute == refused or layer.recipe == refused or not layer.recipe then return end
    if layer.compute == "bf16" then bf16_layer(state, record, own, model, layer, refused) end
    lone_shards(state, record, own, model, layer)
    fixed_accumulation(state, record, own, model, layer, refused)
    lone_amaxes(state, record, own, model, layer)
end

-- A recipe of the model that no layer follows.
function M.model(state, record, model, layers, refused)
    if model.recipe == nil or model.recipe == refused then return end
    for _, layer in ipairs(layers) do
        if layer.compute ~= "bf16" then return end
    end
    if #layers > 0 then
        state.report:value(record, "recipe", {
            message = "a recipe has no effect in a model whose layers all compute in bf16",
            hint = 'leave the recipe out, or give a layer compute = "fp8"',
        })
    end
end

return M
