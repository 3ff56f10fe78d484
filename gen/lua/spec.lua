-- spec.lua - reading a spec: the door that script.c knocks at.
--
--   begin(source) -> load, environment, string metatable      before the spec runs
--   syntax_error(load, message) -> diagnostics                the text is no Lua
--   runtime_error(load, raised, line, stop) -> diagnostics    it stopped; stop: the limit, or nil
--   finish(load, count, value) -> model, canonical text       it returned; raises diagnostics
--   override(field, value)                                    before that; raises a diagnostic
--   forced_gemm() -> value of the override "gemm", or nil
--
-- source = { name, text, instructions, memory_bytes, wall_ms }. The canonical text names every
-- value of the model in one fixed order; its hash identifies the spec in a bundle, whatever its
-- source looked like.

local check = require "check"
local choose = require "choose"
local locate = require "locate"
local report = require "report"
local sandbox = require "sandbox"
local schema = require "schema"
local shrink = require "shrink"

local spec = {}

local overrides = {}
local forced_gemm
local shrunk = false

function spec.begin(source)
    local load = {
        source = source,
        report = report.new(source),
        overrides = overrides,
        records = {},
        made = {},
        unknown_recipes = {},
    }
    return load, sandbox.open(load)
end

-- ---- errors of Lua ------------------------------------------------------------------------------

local escaped = { ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t" }

-- A hint for what people do wrong most often.
local function syntax_hint(message, near)
    if message:find("^'}' expected") and near and near:find("^[%w_\"']") then
        return "is a comma missing before it?"
    elseif message:find("unfinished string") then
        return "a text ends on the line it starts on, with the same quote"
    elseif near == "in" then
        return "'in' is a word of Lua; the field is in_features"
    elseif near == "=" or near == "==" or near == ":" then
        return "a field is written name = value"
    elseif near == "-" or near == "/" or near == "#" then
        return "a comment starts with --"
    end
end

-- Lua stops at a nesting of 200 without saying where: the shortest beginning of the text at which
-- it does so ends there.
local function nesting_error(load)
    local index = load.report:index()
    local low, high = 1, index.count
    while low < high do
        local middle = (low + high) // 2
        local _, message = _G.load(index.text:sub(1, index.last[middle]), "=spec", "t")
        if message and message:find("C stack overflow", 1, true) then
            high = middle
        else
            low = middle + 1
        end
    end
    load.report:tokens(low, low, {
        message = "nested too deeply (limit 200)",
        hint = "a bracket, a function, an operator in front or .. opens a level",
    })
end

-- The hint for a name with characters that no name has.
local function odd_hint(word)
    local names = schema.names("layer")
    table.move(schema.names("model"), 1, #schema.names("model"), #names + 1, names)
    local near = locate.nearest(word, names)
    return near and ("did you mean '%s'?"):format(near)
        or "names are ASCII letters, digits and _; a text has plain quotes"
end

-- Lua names one byte of it.
local function odd_character(load, line)
    local at = load.report:index():odd_on(line)
    if not at then
        return false
    end
    local word = load.report:index():token(at)
    local character = word:match(utf8.charpattern, word:find("[\128-\255]"))
    load.report:tokens(at, at, {
        message = ("the character %s (U+%04X) outside quotes and comments"):format(
            report.quoted(character), utf8.codepoint(character)),
        hint = odd_hint(word),
    })
    return true
end

function spec.syntax_error(load, message)
    if message:find("C stack overflow", 1, true) == 1 then
        nesting_error(load)
        return load.report:result()
    end
    local line, text = message:match("^spec:(%d+): (.*)$")
    line, text = tonumber(line), text or message
    local near = text:match(" near '(.*)'$")
    local problem = {
        message = text:gsub("[\n\r\t]", escaped):gsub(" near <eof>$", " at the end of the file"),
        hint = syntax_hint(text, near),
    }
    local odd = line and near and near:find("^<\\%d+>$") and odd_character(load, line)
    if text:find("<eof>$") then
        load.report:last(problem)
    elseif not odd then
        load.report:word(line, near, problem)
    end
    return load.report:result()
end

local limit_messages = {
    instructions = function(source)
        return ("the spec ran for more than %d instructions"):format(source.instructions)
    end,
    time = function(source)
        return ("the spec ran for more than %d ms"):format(source.wall_ms)
    end,
    memory = function(source)
        local mib = source.memory_bytes / (1 << 20)
        return ("the spec used more than %.14g MiB of memory"):format(mib)
    end,
}

local function plain_error(load, raised, line)
    local text = tostring(raised):match("^[^\n]*")
    text = text:gsub("^spec:%d+: ", ""):gsub("^gen/lua/[%w_]+%.lua:%d+: ", "")
    local word = text:match("%(%a+ '([^']*)'%)")
    local hint
    if text:find("^stack overflow") or text:find("C stack overflow", 1, true) then
        text = "the spec calls itself too deeply"
    elseif text:find("attempt to call a table value") or text:find("attempt to call a nil") then
        hint = "is a comma missing between two fields or layers?"
    elseif text:find("arithmetic on a string") then
        hint = "numbers are written without quotes"
    end
    load.report:word(line, word, { message = text, hint = hint })
end

function spec.runtime_error(load, raised, line, stop)
    line = line and line > 0 and line or nil
    if stop then
        load.report:word(line, nil, {
            message = limit_messages[stop](load.source),
            hint = "a spec only lists layers; is there a loop without end?",
        })
    elseif type(raised) == "table" then
        local near = raised.near and raised.word and locate.nearest(raised.word, raised.near)
        local is_field = raised.near and near == nil and schema.field("layer", raised.word)
        load.report:word(line, raised.word, {
            message = raised.message,
            hint = near and ("did you mean '%s%s'?"):format(raised.prefix, near)
                or is_field and ("write %s = ... between braces"):format(raised.word)
                or raised.hint,
        })
    else
        plain_error(load, raised, line)
    end
    return load.report:result()
end

-- ---- the result ---------------------------------------------------------------------------------

local form = 'a spec ends with: return model "name" { ... }'

-- The line of the first model that was made; nil if none was.
local function made_model(load)
    local line
    for _, record in pairs(load.records) do
        if record.what == "model" and not record.open and record.line then
            line = math.min(line or record.line, record.line)
        end
    end
    return line
end

local function check_result(load, count, value)
    local record = load.records[value]
    if count == 0 then
        local made = made_model(load)
        load.report:last({
            message = "the spec returns nothing",
            note = made and ("a model is made at line %d, but not returned"):format(made),
            hint = form,
        })
    elseif count > 1 then
        load.report:last_word("return", {
            message = ("the spec returns %d values, not one model"):format(count), hint = form })
    elseif not record or record.what ~= "model" then
        local kind = record and record.what or type(value)
        load.report:last_word("return", {
            message = ("the spec returns a %s, not a model"):format(kind), hint = form })
    elseif record.open then
        load.report:last_word("return", { message = "the model has no fields", hint = form })
    else
        local model = check.model(load, record)
        if load.report:empty() then
            check.unused(load, record)
        end
        return model
    end
end

-- Every value in a fixed order, one line each.
local function canonical(value, path, lines)
    if type(value) ~= "table" then
        lines[#lines + 1] = path .. "=" .. tostring(value)
        return
    end
    local keys = {}
    for key in pairs(value) do
        keys[#keys + 1] = key
    end
    table.sort(keys, function(a, b)
        if type(a) == "number" and type(b) == "number" then
            return a < b
        end
        return host.less(tostring(a), tostring(b))
    end)
    for _, key in ipairs(keys) do
        canonical(value[key], path .. "." .. key, lines)
    end
end

function spec.finish(load, count, value)
    local model = check_result(load, count, value)
    local problems = load.report:result()
    if problems then
        error(problems, 0)
    end
    if shrunk then
        shrink.model(model)
    end
    local lines = {}
    canonical(model, "model", lines)
    return model, table.concat(lines, "\n") .. "\n"
end

-- ---- overrides ----------------------------------------------------------------------------------

local function one_of(list)
    return "one of '" .. table.concat(list, "', '") .. "'"
end

local function contains(list, value)
    for _, item in ipairs(list) do
        if item == value then
            return true
        end
    end
end

function spec.override(name, text)
    if not contains(schema.overrides, name) then
        error({ message = ("'%s' cannot be overridden"):format(name),
            hint = one_of(schema.overrides) }, 0)
    end
    if name == "gemm" then
        local problem, hint = choose.force_problem(text)
        if problem then
            local near = locate.nearest(text, { "cublaslt", "generated" })
            hint = near and ("did you mean '%s'?"):format(near) or hint
            error({ message = problem, hint = hint }, 0)
        end
        forced_gemm = text
        return
    elseif name == "shrink" then
        if text ~= "true" then
            error({ message = ("'shrink' must be 'true', not '%s'"):format(text) }, 0)
        end
        shrunk = true
        return
    end
    local field = schema.field("layer", name) or schema.field("mesh", name)
    if field.type == "recipe" then
        if not contains(schema.recipes, text) then
            error({ message = ("unknown recipe '%s'"):format(text),
                hint = check.recipe_hint(text) }, 0)
        end
        overrides[name] = text
        return
    end
    local value = text:find("^%d+$") and #text <= 18 and math.tointeger(tonumber(text))
    if not value or value < field.min or value > field.max then
        error({ message = ("'%s' must be a whole number of %s, not '%s'"):format(name,
            schema.range(field), text) }, 0)
    end
    overrides[name] = value
end

-- What every GEMM shall be computed by; nil = as the plan finds best.
function spec.forced_gemm()
    return forced_gemm
end

return spec
