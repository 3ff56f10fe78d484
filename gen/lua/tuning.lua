-- tuning.lua - a tuning file: checked, and as the entries that choose.lua goes by.
--
-- In: the JSON of the file as tables (tuning.c; arrays have a metatable named "array", null is the
-- light userdata `null`). Out: M.entries, or all that is wrong with it as diagnostics: the entry,
-- the field, the value and the rule, in words of people who never wrote the file: `fp8gen tune`
-- did.
--
--   { format = "fp8gen-tuning", format_version = 1, gpu, cublaslt_version, entries = { {
--     pass, N, K, a_dtype, b_dtype, out_dtype, accumulation, accumulate,   which GEMM
--     min_tokens, max_tokens, measured_tokens,                              for which M
--     choice = { backend = "generated", config = { bm, ... } } | { backend = "cublaslt", algo,
--     version },
--     measured = { { name, microseconds, tflops } ... },                    all candidates
--     bf16_microseconds } } }                                               or null
--
-- Not obvious: an unknown field is an error too. The file decides what runs for months; a field
-- that one version writes and another ignores would decide nothing, silently.

local locate = require "locate"
local tile = require "tile"

local M = { entries = {} }

local FORMAT, VERSION = "fp8gen-tuning", 1
local ALGO_DIGITS = 128 -- 64 bytes
local PROBLEMS_MAX = 20 -- diagnostics shown of one file
local ENTRIES_MAX = 24 -- of a GEMM: each cuts its dispatch, of which a bundle takes 64 ranges

-- ---- values -------------------------------------------------------------------------------------

local function is_array(value)
    local meta = type(value) == "table" and getmetatable(value)
    return meta and meta.__name == "array"
end

local function show(value)
    if type(value) == "string" then
        local text = value:gsub("[%c\"\\]", function(c) return ("\\x%02x"):format(c:byte()) end)
        return #text > 40 and ("\"%s...\" (%d bytes)"):format(text:sub(1, 32), #value)
            or '"' .. text .. '"'
    elseif type(value) == "userdata" then
        return "null"
    elseif is_array(value) then
        return "an array"
    elseif type(value) == "table" then
        return "an object"
    elseif math.type(value) == "float" then
        return ("%.14g"):format(value)
    end
    return tostring(value)
end

-- A rule: words, and whether a value keeps it.
local function rule(words, keeps) return { words = words, keeps = keeps } end

local function one_of(...)
    local list = { ... }
    return rule('"' .. table.concat(list, '" or "') .. '"', function(value)
        for _, item in ipairs(list) do
            if value == item then return true end
        end
    end)
end

local function whole(min, max)
    return rule(("a whole number of %d to %d"):format(min, max), function(value)
        return math.type(value) == "integer" and value >= min and value <= max
    end)
end

local DIM_MAX = 1 << 28
local object = rule("an object", function(v) return type(v) == "table" and not is_array(v) end)
local array = rule("an array", is_array)
local text = rule("a text of 1 to 200 bytes, none a control character", function(v)
    return type(v) == "string" and #v > 0 and #v <= 200 and not v:find("%c") -- it is shown
end)
local boolean = rule("true or false", function(v) return type(v) == "boolean" end)
local dim = whole(1, DIM_MAX)
local version = whole(0, math.maxinteger)
local positive = rule("a number above 0 and up to 1e12", function(v)
    return type(v) == "number" and v > 0 and v <= 1e12
end)
local positive_or_null = rule(positive.words .. ", or null", function(v)
    return type(v) == "userdata" or positive.keeps(v)
end)
local hex = rule(("%d hexadecimal digits in lower case"):format(ALGO_DIGITS), function(v)
    return type(v) == "string" and #v == ALGO_DIGITS and not v:find("[^0-9a-f]")
end)
local formats = one_of("e4m3", "e5m2")

-- Fields in the order of messages; `optional` ones may be absent.
local root_fields = {
    { "format", one_of(FORMAT) },
    { "format_version", rule(tostring(VERSION), function(v) return v == VERSION end) },
    { "gpu", text },
    { "cublaslt_version", version },
    { "entries", array },
}
local entry_fields = {
    { "pass", one_of("fprop", "wgrad", "dgrad") },
    { "N", dim },
    { "K", dim },
    { "a_dtype", formats },
    { "b_dtype", formats },
    { "out_dtype", one_of("bf16", "fp16", "fp32") },
    { "accumulation", one_of("fast", "split") },
    { "accumulate", boolean },
    { "min_tokens", dim },
    { "max_tokens", dim },
    { "measured_tokens", dim },
    { "choice", object },
    { "measured", array },
    { "bf16_microseconds", positive_or_null },
}
local measured_fields = { { "name", text }, { "microseconds", positive }, { "tflops", positive } }
local choice_fields = {
    generated = { { "backend", text }, { "config", object } },
    cublaslt = { { "backend", text }, { "algo", hex },
        { "version", whole(1, math.maxinteger) } },
}
local config_fields = {
    { "name", text, optional = true },
    { "bm", dim },
    { "bn", dim },
    { "stages", dim },
    { "cluster", dim },
    { "group", dim },
    { "pingpong", boolean },
    { "partials", whole(0, 2) },
    { "slices", whole(1, 16), optional = true, default = 1 },
    { "swapped", boolean, optional = true, default = false },
    { "slabs", whole(1, 8), optional = true, default = 2 },
    { "consumers", whole(1, 3), optional = true, default = 2 },
    { "scheduler", text, optional = true, default = "static" },
}

-- ---- checking -----------------------------------------------------------------------------------

local function add(state, where, message, hint)
    state.count = state.count + 1
    if state.count > PROBLEMS_MAX then return end
    table.insert(state.problems, {
        file = state.file,
        message = where == "" and message or where .. ": " .. message,
        hint = hint,
    })
end

local function names_of(fields)
    local names = {}
    for i, field in ipairs(fields) do names[i] = field[1] end
    return names
end

-- Whether the object has exactly these fields, each with a value that keeps its rule.
local function check_fields(state, where, value, fields)
    local before, known = state.count, {}
    for _, field in ipairs(fields) do
        local name, expected = field[1], field[2]
        known[name] = true
        if value[name] == nil then
            if not field.optional then add(state, where, ("'%s' is missing"):format(name)) end
        elseif not expected.keeps(value[name]) then
            add(state, where, ("'%s' must be %s, not %s"):format(name, expected.words,
                show(value[name])))
        end
    end
    local unknown = {}
    for name in pairs(value) do
        if not known[name] then unknown[#unknown + 1] = name end
    end
    table.sort(unknown, host.less)
    for _, name in ipairs(unknown) do
        local near = locate.nearest(name, names_of(fields))
        add(state, where, ("unknown field %s"):format(show(name)),
            near and ("did you mean '%s'?"):format(near)
                or "fields here: " .. table.concat(names_of(fields), ", "))
    end
    return state.count == before
end

-- The configuration that a choice names; nil after a report.
local function check_config(state, where, entry)
    local config = entry.choice.config
    if not check_fields(state, where .. ": choice.config", config, config_fields) then
        return nil
    end
    local found
    for _, c in ipairs(tile.configurations) do
        local same = config.name == nil or config.name == c.name
        for _, field in ipairs(config_fields) do
            local name, value = field[1], config[field[1]]
            if value == nil then value = field.default end
            same = same and (name == "name" or value == c[name])
        end
        found = found or same and c
    end
    local problem = {
        accumulation = entry.accumulation,
        out = entry.out_dtype,
        add = entry.accumulate,
    }
    if not found then
        add(state, where, ("choice.config is no configuration of this version: bm %d, bn %d, \z
stages %d, cluster %d, group %d, pingpong %s, partials %d, slices %d, swapped %s, slabs %d, \z
consumers %d, scheduler %s"):format(config.bm, config.bn, config.stages, config.cluster,
            config.group, config.pingpong, config.partials, config.slices or 1,
            config.swapped or false, config.slabs or 2, config.consumers or 2,
            config.scheduler or "static"),
            "run fp8gen tune again")
    elseif not tile.fits(found, problem) then
        add(state, where, ("choice.config %s does not serve %s accumulation into %s%s"):format(
            found.name, entry.accumulation, entry.out_dtype,
            entry.accumulate and " that is added to" or ""))
        found = nil
    end
    return found
end

local function check_choice(state, where, entry)
    local choice = entry.choice
    local fields = choice_fields[choice.backend]
    if not fields then
        add(state, where, ("choice.backend must be \"generated\" or \"cublaslt\", not %s"):format(
            show(choice.backend)))
    elseif check_fields(state, where .. ": choice", choice, fields)
        and choice.backend == "generated" then
        return check_config(state, where, entry)
    end
end

-- Sets the entry's microseconds, and `second`: the fastest candidate that was not chosen.
local function read_measured(state, where, entry)
    local wanted = entry.configuration and entry.configuration.name
    local function is_chosen(name)
        if wanted then return name == wanted or name:sub(-#wanted - 1) == "_" .. wanted end
        return name:find("^cublaslt") ~= nil
    end
    local chosen
    for _, item in ipairs(entry.measured) do
        if is_chosen(item.name) and (not chosen or item.microseconds < chosen.microseconds) then
            chosen = item
        end
    end
    if not chosen then
        add(state, where, ("'measured' lacks the chosen %s"):format(wanted or "cublaslt"))
        return
    end
    entry.microseconds = chosen.microseconds
    for _, item in ipairs(entry.measured) do
        local second = entry.second
        if item ~= chosen and (not second or item.microseconds < second.microseconds) then
            entry.second = item
        end
    end
end

local function check_measured(state, where, entry)
    local good = #entry.measured > 0
    if not good then add(state, where, "'measured' is empty") end
    for i, item in ipairs(entry.measured) do
        local at = ("%s: measured %d"):format(where, i)
        if not object.keeps(item) then
            add(state, at, ("must be an object, not %s"):format(show(item)))
            good = false
        else
            good = check_fields(state, at, item, measured_fields) and good
        end
    end
    return good
end

local function check_numbers(state, where, entry)
    if entry.max_tokens < entry.min_tokens then
        add(state, where, ("'max_tokens' must be at least min_tokens (%d), not %d"):format(
            entry.min_tokens, entry.max_tokens))
    elseif entry.measured_tokens < entry.min_tokens or entry.measured_tokens > entry.max_tokens then
        add(state, where, ("'measured_tokens' must lie in %d to %d, not at %d"):format(
            entry.min_tokens, entry.max_tokens, entry.measured_tokens))
    end
    if entry.accumulate and entry.pass ~= "wgrad" then
        add(state, where, ("'accumulate' must be false: %s never accumulates"):format(entry.pass))
    end
end

-- The entry, ready for choose.lua; nil after a report.
local function check_entry(state, index, value)
    local where, before = "entry " .. index, state.count
    if not object.keeps(value) then
        add(state, where, ("must be an object, not %s"):format(show(value)))
        return nil
    end
    if not check_fields(state, where, value, entry_fields) then return nil end
    local entry = {}
    for _, field in ipairs(entry_fields) do entry[field[1]] = value[field[1]] end
    check_numbers(state, where, entry)
    entry.configuration = check_choice(state, where, entry)
    if check_measured(state, where, entry) and state.count == before then
        read_measured(state, where, entry)
    end
    entry.algo, entry.version = entry.choice.algo, entry.choice.version
    entry.bf16 = type(entry.bf16_microseconds) == "number" and entry.bf16_microseconds or nil
    return state.count == before and entry or nil
end

local function gemm_of(e)
    local fields = { e.pass, e.N, e.K, e.a_dtype, e.b_dtype, e.out_dtype, e.accumulation }
    return table.concat(fields, " ")
end

local function check_counts(state, entries)
    local counts = {}
    for i = 1, #entries do
        local gemm = gemm_of(entries[i])
        counts[gemm] = (counts[gemm] or 0) + 1
        if counts[gemm] == ENTRIES_MAX + 1 then
            add(state, "entry " .. i,
                ("it is the %dth for the same GEMM (%s); at most %d are taken"):format(
                    ENTRIES_MAX + 1, gemm, ENTRIES_MAX))
        end
    end
end

-- Two entries for one M of one GEMM: which would count?
local function check_overlaps(state, entries)
    local seen = {}
    for i, entry in pairs(entries) do
        local key = gemm_of(entry) .. tostring(entry.accumulate)
        seen[key] = seen[key] or {}
        table.insert(seen[key], { index = i, entry = entry })
    end
    local found = {}
    for _, list in pairs(seen) do
        table.sort(list, function(a, b)
            if a.entry.min_tokens ~= b.entry.min_tokens then
                return a.entry.min_tokens < b.entry.min_tokens
            end
            return a.index < b.index
        end)
        for i = 2, #list do
            if list[i].entry.min_tokens <= list[i - 1].entry.max_tokens then
                found[#found + 1] = { list[i - 1], list[i] }
            end
        end
    end
    table.sort(found, function(a, b) return a[2].index < b[2].index end)
    for _, pair in ipairs(found) do
        local a, b = pair[1], pair[2]
        add(state, "entry " .. b.index, ("its tokens %d to %d overlap those of entry %d, %d to \z
%d, for the same GEMM"):format(b.entry.min_tokens, b.entry.max_tokens, a.index, a.entry.min_tokens,
            a.entry.max_tokens))
    end
end

-- Checks the file and keeps its entries; raises all that is wrong.
function M.load(file, root)
    local state = { file = file, problems = {}, count = 0 }
    local entries = {}
    if not object.keeps(root) then
        add(state, "", ("a tuning file is an object, not %s"):format(show(root)))
    elseif root.format ~= FORMAT then
        add(state, "", ("'format' must be \"%s\", not %s"):format(FORMAT, show(root.format)),
            "a tuning file is written by fp8gen tune")
    elseif root.format_version ~= VERSION then
        add(state, "", ("'format_version' must be %d, not %s"):format(VERSION,
            show(root.format_version)), "run fp8gen tune of this version")
    elseif check_fields(state, "", root, root_fields) then
        for i, value in ipairs(root.entries) do entries[i] = check_entry(state, i, value) end
        check_overlaps(state, entries)
        if state.count == 0 then check_counts(state, entries) end
    end
    if state.count > PROBLEMS_MAX then
        table.insert(state.problems, {
            file = file,
            message = ("%d more errors"):format(state.count - PROBLEMS_MAX),
        })
    end
    if state.count > 0 then error(state.problems, 0) end
    M.entries = entries
end

return M
