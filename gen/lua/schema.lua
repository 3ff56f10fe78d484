-- schema.lua - every field of a spec: the one table.
--
-- Validation (check.lua), the list that fp8gen_schema returns and the README's table all come
-- from it: a field that is not here does not exist. Each field:
--   name, doc
--   type      "integer" (min, max) | "boolean" | "choice" (choices) | "name" | "recipe" | "layers"
--             | "table" (fields, a scope's name)
--   default   a value; or the name of another field: { same_as = "tokens" }; absent = required,
--             unless optional
--   optional  true: a layer may be without it
--   layer     true: a layer may give it too; what the model gives is then the default of its layers
--   refused   value -> { message, hint }: values that people try, with the reason why not
-- Lists keep their order: it is the order of messages and of the printed list. Rules between fields
-- are rules.lua's.

local schema = { max_ranks = 4096 }

local dim_max = 1 << 28 -- bytes of a tensor of two such sizes fit 64 bits; FLOPs are floats
local weights = { "bf16", "fp32" }
local outputs = { "bf16", "fp16", "fp32" }

local function refuse(list, message, hint)
    local refused = {}
    for _, value in ipairs(list) do
        refused[value] = { message, hint }
    end
    return refused
end

local function merge(...)
    local all = {}
    for _, part in ipairs({ ... }) do
        for key, value in pairs(part) do
            all[key] = value
        end
    end
    return all
end

local fp8_names = { "fp8", "e4m3", "e5m2", "float8", "fp8_e4m3", "fp8_e5m2" }
local fp16_refused = refuse({ "fp16", "float16", "half" },
    "a weight is quantised from bf16 or fp32, not from fp16", 'use "bf16" or "fp32"')
local fp16_names = merge(
    refuse({ "float16" }, "unknown dtype 'float16'", "did you mean 'fp16'?"),
    refuse({ "half" }, "unknown dtype 'half'", "did you mean 'fp16'?"))
local long_names = merge(
    refuse({ "bfloat16" }, "unknown dtype 'bfloat16'", "did you mean 'bf16'?"),
    refuse({ "float32", "float" }, "unknown dtype 'float32'", "did you mean 'fp32'?"))

local function dtype_field(name, choices, default, doc, fp8_message, fp8_hint)
    return {
        name = name, type = "choice", choices = choices, default = default, layer = true, doc = doc,
        refused = merge(choices == outputs and fp16_names or fp16_refused, long_names,
            refuse(fp8_names, fp8_message, fp8_hint)),
    }
end

local no_fp8_output = "whoever reads it quantises it, by the recipe of its own layer"

local common = {
    {
        name = "tokens", type = "integer", min = 1, max = dim_max, default = 8192, layer = true,
        doc = "usual M: rows of x in one call; what predictions and runs use",
    },
    {
        name = "max_tokens", type = "integer", min = 1, max = dim_max,
        default = { same_as = "tokens" }, layer = true,
        doc = "largest M; any M up to it runs without a new build",
    },
    {
        name = "bias", type = "boolean", default = false, layer = true,
        doc = "y has a bias, and backward gives dbias",
    },
    {
        name = "recipe", type = "recipe", default = "current", layer = true,
        doc = "how tensors are scaled to FP8",
    },
    {
        name = "compute", type = "choice", choices = { "fp8", "bf16" }, default = "fp8",
        layer = true, doc = "bf16: the layer's products are of bf16, without scales",
        refused = merge(
            refuse({ "fp16", "float16", "half", "fp32", "float32", "tf32" },
                "a layer computes in FP8 or in bf16",
                'use "bf16" for layers that FP8 does not suit'),
            refuse({ "e4m3", "e5m2", "float8" }, "the format of FP8 is a field of the recipe",
                'use compute = "fp8" and recipe = recipe.current { format = ... }'),
            refuse({ "bfloat16" }, "unknown dtype 'bfloat16'", "did you mean 'bf16'?")),
    },
    {
        name = "accumulation", type = "table", fields = "accumulation", layer = true,
        doc = "per pass: how partial sums are kept; block and bf16 always split",
    },
    dtype_field("weight", weights, "bf16", "dtype of the weight that is quantised",
        "a weight is quantised from bf16 or fp32; FP8 weights are not an input",
        'give the dtype of the master weight: "bf16" or "fp32"'),
    dtype_field("output", outputs, "bf16", "dtype of y",
        "FP8 output is not supported: " .. no_fp8_output,
        'use output = "bf16"; the layer that reads y quantises it'),
    dtype_field("grad_input", outputs, "bf16", "dtype of dx",
        "FP8 gradients are not an output: " .. no_fp8_output, 'use grad_input = "bf16"'),
    dtype_field("grad_weight", outputs, "fp32", "dtype of dw, in the sum over ranks too",
        "FP8 gradients are not an output: " .. no_fp8_output,
        'use grad_weight = "fp32", or "bf16" for half the memory'),
}

local function with_common(first, after)
    local fields = {}
    table.move(first, 1, #first, 1, fields)
    table.move(common, 1, #common, #fields + 1, fields)
    table.move(after, 1, #after, #fields + 1, fields)
    return fields
end

local every_block = {
    "the interval of 128 is called 'split'",
    'use "split", or 256, 512 or "fast" (never promoted) for less work',
}

local function accumulation_field(name, default, doc)
    return {
        name = name, type = "choice", choices = { "fast", "split", "256", "512" },
        default = default, doc = doc,
        numbers = true, -- a sum is promoted every 256 or 512 of the contraction
        refused = { [128] = every_block },
    }
end

local no_e5m2 = {
    "format 'e5m2' would multiply E5M2 by E5M2, which no cuBLASLt routine does",
    'use "hybrid": E5M2 for dy alone',
}

local function hybrid_format()
    return {
        name = "format", type = "choice", choices = { "hybrid", "e4m3" }, default = "hybrid",
        doc = "hybrid: x and w E4M3, dy E5M2; e4m3: all E4M3", refused = { e5m2 = no_e5m2 },
    }
end

local function by_recipe(scale, recipe)
    return {
        ("scales of a %s are another recipe"):format(scale),
        ("use recipe = recipe.%s {}"):format(recipe),
    }
end

local tensor_amaxes = {
    "layers cut along their features are not in this version: there is no tensor axis",
    'use "fsdp"; ranks that you cut yourself share amaxes by an all-reduce of fp8_state_running',
}

-- Of recipes whose scales are so many that no tensor needs the range of E5M2.
local function e4m3_format(recipe)
    local why = ("recipe '%s' has E4M3 alone: its many scales give the range that E5M2 is for, \z
and E4M3 has a bit more of precision"):format(recipe)
    return {
        name = "format", type = "choice", choices = { "e4m3" }, default = "e4m3",
        doc = "x, w and dy are E4M3",
        refused = refuse({ "hybrid", "e5m2" }, why,
            'leave it out, or use recipe.current or recipe.delayed for "hybrid"'),
    }
end

local function power_of_two(default)
    return {
        name = "power_of_two", type = "boolean", default = default,
        doc = "round scales down to powers of two",
    }
end

-- The scopes: which fields may stand in which braces.
schema.scopes = {
    model = with_common({
        {
            name = "layers", type = "layers",
            doc = 'the layers: linear "name" { ... }, one or more',
        },
        {
            name = "mesh", type = "table", fields = "mesh",
            doc = "ranks along each axis",
        },
        {
            name = "shard", type = "table", fields = "shard",
            doc = "with mesh fsdp: how weights are gathered and gradients reduced",
        },
    }, {}),
    layer = with_common({
        { name = "in_features", type = "integer", min = 1, max = dim_max,
            doc = "K, the columns of x and w" },
        { name = "out_features", type = "integer", min = 1, max = dim_max,
            doc = "N, the columns of y, the rows of w" },
    }, {
        {
            name = "count", type = "integer", min = 1, max = 1000000, default = 1,
            doc = "how many layers of the model have this shape; weighs the totals of a plan",
        },
        {
            name = "gather_group", type = "name", optional = true,
            doc = "neighbours of one group share the collective that gathers them",
        },
    }),
    mesh = {
        {
            name = "tensor", type = "integer", min = 1, max = 1, default = 1,
            doc = "ranks that share a layer's features; 1: layers are not cut along their features",
        },
        {
            name = "fsdp", type = "integer", min = 1, max = schema.max_ranks, default = 1,
            doc = "ranks that share a layer's weight: each keeps a chunk of its rows",
        },
    },
    shard = {
        {
            name = "backward", type = "choice", choices = { "gather", "keep" }, default = "gather",
            doc = "weights in backward: gathered again, or kept from forward",
        },
        {
            name = "reduce", type = "choice", choices = { "average", "sum" }, default = "average",
            doc = "what dw and dbias are over the ranks",
        },
    },
    accumulation = {
        accumulation_field("fprop", "fast", "sum over in_features"),
        accumulation_field("dgrad", "split", "sum over out_features"),
        accumulation_field("wgrad", "split", "sum over tokens"),
    },
    ["recipe.current"] = {
        hybrid_format(),
        power_of_two(false),
        {
            name = "weight_scale", type = "choice", choices = { "tensor", "shard" },
            default = "tensor",
            doc = "one scale for w, or for each rank's rows of it: no all_reduce of amaxes",
            refused = {
                row = by_recipe("row", "rowwise"),
                block = by_recipe("block", "block"),
            },
        },
    },
    ["recipe.delayed"] = {
        hybrid_format(),
        {
            name = "history_length", type = "integer", min = 1, max = 65536, default = 1024,
            doc = "amaxes that are kept of every tensor, one an optimizer step",
        },
        {
            name = "algo", type = "choice", choices = { "max", "most_recent" }, default = "max",
            doc = "the scale comes from the largest amax of the history, or from the last",
        },
        {
            name = "margin", type = "integer", min = 0, max = 8, default = 0,
            doc = "leaves 2^margin of room above the amax; up to 8 every scale has a finite \z
inverse",
        },
        {
            name = "calibrate", type = "boolean", default = false,
            doc = "a tensor without a history takes its own amax, not scale 1",
        },
        {
            name = "amax_group", type = "choice", choices = { "rank", "fsdp" }, default = "rank",
            doc = "ranks whose amaxes become one history, by a maximum once a step: each its own, \z
or all of fsdp",
            refused = {
                tensor = tensor_amaxes,
                world = { "the world is the fsdp axis in this version", 'write "fsdp"' },
                none = {
                    "unknown value 'none' for 'amax_group'",
                    'write "rank": each rank has its own',
                },
            },
        },
        power_of_two(false),
    },
    ["recipe.rowwise"] = { e4m3_format("rowwise"), power_of_two(true) },
    ["recipe.rowwise_hp_wgrad"] = { e4m3_format("rowwise_hp_wgrad"), power_of_two(true) },
    ["recipe.block"] = { e4m3_format("block"), power_of_two(true) },
}

-- Largest margin of delayed scaling with scales that are powers of two.
schema.power_of_two_margin = 6

schema.recipes = { "current", "delayed", "rowwise", "rowwise_hp_wgrad", "block" }
schema.scope_order = { "model", "layer", "mesh", "shard", "accumulation" }
schema.scope_title = {
    model = 'model "name" { ... }',
    layer = 'linear "name" { ... }',
    mesh = "mesh = { ... }",
    shard = "shard = { ... }",
    accumulation = "accumulation = { ... }",
}
for _, name in ipairs(schema.recipes) do
    local scope = "recipe." .. name
    table.insert(schema.scope_order, scope)
    schema.scope_title[scope] = scope .. " { ... }"
end

schema.other_recipes = { "mx" }

-- Fields that stand elsewhere, or in no spec of this version: { message, hint }.
local tensor_parallel = {
    "layers cut along their features are not in this version: it shares weights alone",
    "leave it out; mesh = { fsdp = ... } shares the weight",
}
local ranks = { "the number of ranks stands in the model's mesh", "write mesh = { fsdp = ... }" }
local function elsewhere(word)
    return {
        tensor = tensor_parallel,
        sequence_parallel = tensor_parallel,
        fsdp = ranks,
        name = {
            "the name stands in front of the braces",
            ('write %s "name" { ... }'):format(word),
        },
    }
end
schema.other_fields = { layer = elsewhere "linear", model = elsewhere "model" }

-- Values that fp8gen_override may set.
schema.overrides = { "tokens", "max_tokens", "recipe", "gemm", "fsdp", "shrink" }

schema.max_layers = 4096
schema.name_max = 64
-- Names become symbols, keys and parts of file names.
schema.name_pattern = "^[%a_][%w_.%-]*$"
schema.name_rule = "a letter or '_', then letters, digits, '_', '.' or '-', at most 64 characters"

-- ---- queries ------------------------------------------------------------------------------------

local by_name = {}
for scope, fields in pairs(schema.scopes) do
    by_name[scope] = {}
    for _, field in ipairs(fields) do
        by_name[scope][field.name] = field
    end
end

function schema.field(scope, name)
    return by_name[scope][name]
end

function schema.names(scope)
    local names = {}
    for i, field in ipairs(schema.scopes[scope]) do
        names[i] = field.name
    end
    return names
end

-- What a field accepts, in a few words.
function schema.range(field)
    if field.type == "integer" and field.min == field.max then
        return tostring(field.min)
    elseif field.type == "integer" then
        return ("%d..%d"):format(field.min, field.max)
    elseif field.type == "choice" then
        return '"' .. table.concat(field.choices, '" | "') .. '"'
    elseif field.type == "boolean" then
        return "true | false"
    elseif field.type == "name" then
        return '"name"'
    elseif field.type == "recipe" then
        return "a recipe, see below"
    elseif field.type == "layers" then
        return ("1..%d layers"):format(schema.max_layers)
    end
    return "{ " .. table.concat(schema.names(field.fields), ", ") .. " }"
end

-- The default, as the list shows it.
function schema.default(field)
    local default = field.default
    if field.type == "table" then
        return "see below"
    elseif field.optional then
        return "none"
    elseif default == nil then
        return "required"
    elseif type(default) == "table" then
        return default.same_as
    elseif field.type == "recipe" then
        return "recipe." .. default .. " {}"
    end
    return type(default) == "string" and '"' .. default .. '"' or tostring(default)
end

-- The list of all fields, for people: one line each, grouped by the braces they stand in.
function schema.text()
    local lines = {}
    local width = { 0, 0, 0 }
    local rows = {}
    for _, scope in ipairs(schema.scope_order) do
        rows[#rows + 1] = schema.scope_title[scope]
        for _, field in ipairs(schema.scopes[scope]) do
            local default = schema.default(field)
            if scope == "layer" and schema.field("model", field.name) then
                default = "the model's"
            end
            local row = { field.name, schema.range(field), default, field.doc }
            for i = 1, 3 do
                width[i] = math.max(width[i], #row[i])
            end
            rows[#rows + 1] = row
        end
    end
    local format = ("  %%-%ds  %%-%ds  %%-%ds  %%s"):format(width[1], width[2], width[3])
    for i, row in ipairs(rows) do
        if type(row) == "string" then
            lines[#lines + 1] = (i > 1 and "\n" or "") .. row
        else
            lines[#lines + 1] = format:format(table.unpack(row))
        end
    end
    return table.concat(lines, "\n") .. "\n"
end

return schema
