-- check.lua - a spec's records against the schema: the checked model, or all errors.
--
-- In: the record that the spec returned (sandbox.lua), the overrides. Out: the model table that
-- plan.lua reads (every default filled in, every value of its range), and problems in a report
-- (report.lua). Knows the meaning of fields only through schema.lua and the rules between fields
-- (rules.lua). A value that was refused is left out of later rules: one mistake
-- gives one error.

local locate = require "locate"
local report = require "report"
local rules = require "rules"
local schema = require "schema"

local check = {}

-- ---- values in messages -------------------------------------------------------------------------

local quoted = report.quoted

local function show(value)
    if type(value) == "string" then
        return quoted(value)
    elseif value ~= value then
        return "nan" -- printf gives some NaNs a sign
    elseif math.type(value) == "float" then
        return ("%.14g"):format(value)
    end
    return tostring(value)
end

local function a_kind(state, value)
    local record = value ~= nil and state.records[value]
    if value == nil then
        return "nothing"
    elseif record then
        return (record.open and "an unfinished " or "a ") .. record.what
    end
    local kind = type(value)
    return kind == "string" and "the text " .. show(value) or kind == "number" and show(value)
        or kind == "boolean" and tostring(value) or "a " .. kind
end

local function nearest_of(word, list)
    local near = locate.nearest(word, list)
    return near and ("did you mean '%s'?"):format(near)
end

local function quote_list(list)
    return "'" .. table.concat(list, "', '") .. "'"
end

-- ---- one value ----------------------------------------------------------------------------------
-- Each checker returns the value, or nil and a message and a hint.

local checkers = {}

function checkers.integer(state, field, value)
    local name = field.name
    if type(value) ~= "number" then
        local number = type(value) == "string" and math.tointeger(tonumber(value))
        return nil, ("'%s' must be a whole number, not %s"):format(name, a_kind(state, value)),
            number and ("write %d without quotes"):format(number)
    end
    local whole = math.tointeger(value)
    if not whole then
        local huge = value ~= value or value >= 2.0 ^ 63 or value <= -2.0 ^ 63
        return nil, ("'%s' must be a whole number, not %s"):format(name, show(value)),
            not huge and "use // to divide whole numbers" or nil
    end
    if whole < field.min then
        return nil, ("'%s' must be at least %d, not %d"):format(name, field.min, whole)
    elseif whole > field.max then
        return nil, ("'%s' must be at most %d, not %d"):format(name, field.max, whole)
    end
    return whole
end

function checkers.boolean(state, field, value)
    if type(value) ~= "boolean" then
        local quotes = value == "true" or value == "false"
        return nil, ("'%s' must be true or false, not %s"):format(field.name, a_kind(state, value)),
            quotes and ("write %s without quotes"):format(value) or nil
    end
    return value
end

function checkers.choice(state, field, value)
    local refused = field.refused and field.refused[value]
    if refused then
        return nil, refused[1], refused[2]
    end
    if field.numbers and math.type(value) == "integer" then value = ("%d"):format(value) end
    for _, choice in ipairs(field.choices) do
        if value == choice then
            return value
        end
    end
    local allowed = quote_list(field.choices):gsub(", ('[^']*')$", " or %1")
    if type(value) ~= "string" then
        return nil, ("'%s' must be a text, not %s"):format(field.name, a_kind(state, value)),
            "one of " .. allowed
    end
    local near = nearest_of(value, field.choices)
    return nil, ("unknown value %s for '%s'"):format(quoted(value), field.name),
        near and ("%s (%s)"):format(near, allowed) or "one of " .. allowed
end

function checkers.name(state, field, value)
    if type(value) ~= "string" then
        return nil, ("'%s' must be a name, not %s"):format(field.name, a_kind(state, value)),
            ('write %s = "name"'):format(field.name)
    elseif #value > schema.name_max or not value:find(schema.name_pattern) then
        return nil, ("%s is not a name for '%s'"):format(quoted(value), field.name),
            "a name is " .. schema.name_rule
    end
    return value
end

-- ---- fields of one scope ------------------------------------------------------------------------

-- Reports keys that the scope does not have, values without a key, and keys given twice. Returns
-- the names of fields that were probably meant: they are not missing as well.
local function check_keys(state, scope, entry, fields)
    local meant = {}
    state.report:duplicates(entry)
    local unknown, positional = {}, 0
    for key in next, fields do
        if type(key) ~= "string" then
            positional = positional + 1
        elseif not schema.field(scope, key) then
            unknown[#unknown + 1] = key
        end
    end
    table.sort(unknown, host.less)
    for _, key in ipairs(unknown) do
        if state.report:full() then
            break
        end
        local other = schema.other_fields[scope] and schema.other_fields[scope][key]
        local foreign = rules.foreign_field(scope, key)
        local near = locate.nearest(key, schema.names(scope))
        meant[near or ""] = true
        local known = "fields here: " .. table.concat(schema.names(scope), ", ")
        state.report:key(entry, key, foreign or {
            message = other and ("field '%s': %s"):format(key, other[1])
                or ("unknown field %s"):format(quoted(key)),
            hint = other and other[2]
                or near and ("did you mean '%s'?"):format(near) or known,
        })
    end
    if positional > 0 then
        meant.any = true
        state.report:unnamed(entry, {
            message = ("a value without a name in %s"):format(schema.scope_title[scope]),
            hint = scope == "model" and "layers stand in layers = { ... }; the rest is name = value"
                or "fields are written name = value: " .. table.concat(schema.names(scope), ", "),
        })
    end
    return meant
end

local check_value -- for nested tables

-- A nested table of fields: { tensor = 1 }. Fields that are not given are not in the result.
local function check_nested(state, field, value, entry)
    if type(value) ~= "table" or state.records[value] then
        local first = schema.scopes[field.fields][1]
        if first.min and first.min == first.max then -- nothing to choose there
            first = schema.scopes[field.fields][2]
        end
        local example = type(value) == "string" and ('"%s"'):format(value) or tostring(value)
        local simple = type(value) == "string" or type(value) == "number"
        return nil, ("'%s' must be a table, not %s"):format(field.name, a_kind(state, value)),
            ("write %s = { %s = %s }"):format(field.name, first.name, simple and example or "...")
    end
    local inner = state.report:nested(entry, field.name)
    check_keys(state, field.fields, inner, value)
    local result = {}
    for _, part in ipairs(schema.scopes[field.fields]) do
        if value[part.name] ~= nil then
            result[part.name] = check_value(state, part, value[part.name], inner)
        end
    end
    return result
end

checkers.table = check_nested

-- The recipe of that name; nil if there is none.
local function recipe_named(name)
    for _, recipe in ipairs(schema.recipes) do
        if recipe == name then
            return recipe
        end
    end
end

function checkers.recipe(state, field, value, entry)
    local record = state.records[value]
    if not record or record.what ~= "recipe" then
        return nil, ("'%s' must be a recipe, not %s"):format(field.name, a_kind(state, value)),
            ("write recipe = recipe.%s {}"):format(recipe_named(value) or "current")
    elseif not record.known then
        return nil -- reported where it was named
    elseif record.open then
        return nil, ("'recipe.%s' is not called"):format(record.recipe),
            ("write recipe.%s {}"):format(record.recipe)
    end
    if record.checked == nil then
        record.checked = check.recipe(state, record) or false
    end
    return record.checked or nil
end

-- The mesh has its own words: 1 is not a bound of the format but of this version.
local function mesh_problem(state, field, value)
    local whole = type(value) == "number" and math.tointeger(value)
    if whole and whole > 1 then
        local message = "mesh '%s' is %d, but this version does not cut layers along their features"
        local hint = "write %s = 1, or leave it out; fsdp shares the weight over ranks"
        return message:format(field.name, whole), hint:format(field.name)
    end
end

function check_value(state, field, value, entry)
    local result, message, hint
    if field.min == 1 and field.max == 1 then
        message, hint = mesh_problem(state, field, value)
    end
    if not message then
        result, message, hint = checkers[field.type](state, field, value, entry)
    end
    if message then
        state.report:value(entry, field.name, { message = message, hint = hint })
    end
    return result
end

-- What a record's own fields give: name -> value, or `refused` for a value that was reported;
-- second, what check_keys returns.
local refused = {}

local function check_scope(state, scope, record)
    local values = {}
    if record.bad_fields then
        local bad = record.bad_fields
        state.report:head(record, {
            message = ("a %s needs a table of fields, not %s"):format(record.what,
                bad.count > 1 and bad.count .. " arguments" or a_kind(state, bad.value)),
            hint = "write " .. schema.scope_title[scope],
        })
        return nil
    end
    local meant = check_keys(state, scope, record, record.fields)
    for _, field in ipairs(schema.scopes[scope]) do
        local value = record.fields[field.name]
        if value ~= nil and field.type ~= "layers" then
            local checked = check_value(state, field, value, record)
            if checked == nil then
                checked = refused
            end
            values[field.name] = checked
        end
    end
    return values, meant
end

-- ---- recipe, name, mesh -------------------------------------------------------------------------

function check.recipe(state, record)
    local scope = "recipe." .. record.recipe
    local values = check_scope(state, scope, record)
    if not values then
        return nil
    end
    local recipe = { name = record.recipe }
    for _, field in ipairs(schema.scopes[scope]) do
        local value = values[field.name]
        if value == refused then
            return nil
        end
        if value == nil then
            value = field.default
        end
        recipe[field.name] = value
    end
    return rules.recipe(state, record, recipe) and recipe or nil
end

local function default_recipe(name)
    local recipe = { name = name }
    for _, field in ipairs(schema.scopes["recipe." .. name]) do
        recipe[field.name] = field.default
    end
    return recipe
end

local function check_name(state, record)
    local name = record.name
    local form = ('write %s "name" { ... }'):format(record.path)
    if name == nil then
        state.report:head(record, { message = ("a %s without a name"):format(record.what),
            hint = form })
    elseif type(name) ~= "string" then
        state.report:head(record, {
            message = ("the name of a %s must be a text, not %s"):format(record.what,
                a_kind(state, name)),
            hint = form,
        })
    elseif #name > schema.name_max or not name:find(schema.name_pattern) then
        state.report:name(record, {
            message = ("%s is not a name for a %s"):format(quoted(name), record.what),
            hint = "a name is " .. schema.name_rule,
        })
    else
        return name
    end
end

-- ---- layers -------------------------------------------------------------------------------------

-- A value for a layer: its own, else the model's, else the default. Second result: who gave it.
local function resolve(field, own, model)
    if own[field.name] ~= nil then
        return own[field.name], "layer"
    elseif model[field.name] ~= nil then
        return model[field.name], "model"
    end
    return field.default, "default"
end

-- A table of fields, key by key: its own, else the model's, else the default.
local function fill_nested(scope, own, model)
    local result = {}
    for _, field in ipairs(schema.scopes[scope]) do
        result[field.name] = own and own[field.name] or model and model[field.name]
            or field.default
    end
    return result
end

local function apply_override(state, field, value, from)
    local override = state.overrides[field.name]
    if override == nil then
        return value, from
    elseif field.type == "recipe" then
        return default_recipe(override), "override"
    end
    return override, "override"
end

-- tokens and max_tokens may come from three places: the message says which.
local function check_tokens(state, record, layer, from)
    local tokens, max_tokens = layer.tokens, layer.max_tokens
    if tokens == refused or max_tokens == refused or tokens <= max_tokens then
        return
    end
    local places = {
        layer = record, model = state.model_record,
        default = record, override = record,
    }
    local words = { model = " (of the model)", default = " (the default)",
        override = " (an override)", layer = "" }
    local problem = {
        message = ("tokens %d%s is more than max_tokens %d%s"):format(tokens, words[from.tokens],
            max_tokens, words[from.max_tokens]),
        hint = ("max_tokens must be at least %d, or tokens at most %d"):format(tokens, max_tokens),
    }
    for _, name in ipairs({ "tokens", "max_tokens" }) do
        if from[name] == "layer" or from[name] == "model" then
            return state.report:value(places[from[name]], name, problem)
        end
    end
    state.report:head(record, problem)
end

local function check_layer(state, record, model)
    local name = check_name(state, record)
    local own, meant = check_scope(state, "layer", record)
    if not own then
        return nil
    end
    local layer, from = { name = name }, {}
    for _, field in ipairs(schema.scopes.layer) do
        local value, source = resolve(field, own, model)
        value, source = apply_override(state, field, value, source)
        if field.type == "table" then
            value = fill_nested(field.fields, own[field.name], model[field.name])
        elseif value == nil and not field.optional then
            if not meant.any and not meant[field.name] then
                state.report:head(record, {
                    message = ("'%s' is missing"):format(field.name),
                    hint = ("%s is %s"):format(field.name, field.doc),
                })
            end
            value = refused
        elseif source == "default" and type(value) == "table" and value.same_as then
            value = layer[value.same_as]
        elseif source == "default" and field.type == "recipe" then
            value = default_recipe(value)
        end
        layer[field.name], from[field.name] = value, source
    end
    check_tokens(state, record, layer, from)
    rules.layer(state, record, own, model, layer, refused)
    return layer
end

-- A layer's name is its key everywhere after this.
local function check_unique(state, record, seen)
    local first = seen[record.name]
    if not first then
        seen[record.name] = record
        return
    end
    local line = state.report:line(first)
    state.report:name(record, {
        message = ("a second layer '%s'"):format(record.name),
        note = line and ("the first is at line %d"):format(line) or nil,
        hint = "give it a name of its own, or use count for layers of the same shape",
    })
end

local function check_item(state, item, place, layers, model, seen)
    local record = state.records[item]
    if record and record.what == "layer" and record.open then
        state.report:head(record, {
            message = ("layer %s has no fields"):format(show(record.name)),
            hint = 'write linear "name" { in_features = ..., out_features = ... }',
        })
    elseif record and record.what == "layer" then
        layers[#layers + 1] = check_layer(state, record, model)
        if type(record.name) == "string" then
            check_unique(state, record, seen)
        end
    else
        state.report:item(state.model_record, "layers", place, {
            message = ("a layer must be made by linear, not %s"):format(a_kind(state, item)),
            hint = 'write linear "name" { in_features = ..., out_features = ... }',
        })
    end
end

-- Keys of `layers` in order: 1, 2, ... first; nil values leave holes, which are errors.
local function layer_places(state, list)
    local count, names = 0, {}
    for key in next, list do
        if math.type(key) == "integer" and key >= 1 then
            count = count + 1
        else
            names[#names + 1] = tostring(key)
        end
    end
    if #names > 0 then
        table.sort(names, host.less)
        state.report:value(state.model_record, "layers", {
            message = ("'layers' is a list, but has the key %s"):format(quoted(names[1])),
            hint = 'the name stands after linear: linear "name" { ... }',
        })
    end
    return count
end

local function check_layers(state, record, model, meant)
    local list = record.fields.layers
    local layers, seen = {}, {}
    local hint = 'write layers = { linear "name" { ... }, ... }'
    if list == nil then
        if not meant.any and not meant.layers then
            state.report:head(record, { message = "'layers' is missing", hint = hint })
        end
        return layers
    elseif type(list) ~= "table" or state.records[list] then
        state.report:value(record, "layers", {
            message = ("'layers' must be a list of layers, not %s"):format(a_kind(state, list)),
            hint = hint,
        })
        return layers
    end
    local count = layer_places(state, list)
    if count == 0 and next(list) == nil then
        state.report:value(record, "layers", { message = "'layers' is empty", hint = hint })
    elseif count > schema.max_layers then
        state.report:value(record, "layers", {
            message = ("%d layers; at most %d"):format(count, schema.max_layers),
            hint = "use count for layers of the same shape",
        })
        return layers
    end
    for place = 1, count do
        if list[place] == nil then
            state.report:value(record, "layers", {
                message = ("'layers' has no value at place %d of its list"):format(place),
                hint = "a value of nil leaves a hole; leave it out",
            })
            break
        end
        check_item(state, list[place], place, layers, model, seen)
    end
    return layers
end

-- ---- the model ----------------------------------------------------------------------------------

-- What to write instead of a recipe that there is not.
function check.recipe_hint(name)
    local known = "recipes of this version: " .. table.concat(schema.recipes, ", ")
    if name == "bf16" then
        return 'without a recipe: compute = "bf16", a field of the model or of a layer'
    end
    local near = nearest_of(name, schema.recipes)
    return near and ("%s (%s)"):format(near, known) or known
end

local function check_unknown_recipes(state)
    for _, use in ipairs(state.unknown_recipes) do
        local message = ("unknown recipe %s"):format(quoted(use.name))
        for _, other in ipairs(schema.other_recipes) do
            if use.name == other then
                message = ("recipe '%s' is not in this version"):format(other)
            end
        end
        state.report:word(use.line, use.name, {
            message = message,
            hint = check.recipe_hint(use.name),
        })
    end
end

-- What the spec made and then left out has no effect: layers in no list of layers, other models.
-- `returned`: the record of the spec's model.
function check.unused(state, returned)
    local placed = {}
    for _, record in ipairs(state.made) do
        local list = record.what == "model" and record.fields and record.fields.layers
        for _, item in next, type(list) == "table" and not state.records[list] and list or {} do
            placed[state.records[item] or false] = true
        end
    end
    for _, record in ipairs(state.made) do
        local name = type(record.name) == "string" and quoted(record.name) .. " " or ""
        if record.what == "layer" and not placed[record] and not record.called then
            state.report:head(record, {
                message = ("layer %sis in no model's layers"):format(name),
                hint = "put it into layers = { ... }, or leave it out",
            })
        elseif record.what == "model" and record ~= returned and not record.called then
            state.report:head(record, {
                message = ("model %sis not the one that is returned"):format(name),
                hint = "a spec has one model",
            })
        end
    end
end

-- The model of a record; only complete if nothing was reported.
function check.model(state, record)
    state.model_record = record
    check_unknown_recipes(state)
    local name = check_name(state, record)
    local values, meant = check_scope(state, "model", record)
    if not values then
        return nil
    end
    local mesh = fill_nested("mesh", state.overrides, values.mesh)
    local shard = fill_nested("shard", values.shard)
    state.ranks = mesh.fsdp
    local layers = check_layers(state, record, values, meant)
    rules.model(state, record, values, layers, refused)
    return { name = name, mesh = mesh, shard = shard, layers = layers }
end

return check
