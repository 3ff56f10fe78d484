-- sandbox.lua - what a spec sees: a whitelist of Lua and the three words model, linear, recipe.
--
-- In: the load (spec.lua). Out: the environment of the spec's chunk, the metatable that strings
-- have while it runs, and records of what its constructors were called with. It checks nothing
-- about fields.
--
-- The spec must give the same model every time and must not hang: no random, no clock, no
-- addresses (tostring, %p), pairs in a fixed order, and no C function of Lua that works long
-- without running Lua code, where the instruction hook cannot see it: table.move is written in
-- Lua, table.sort compares in Lua. Everything handed out is a fresh table, so that a spec can
-- spoil only its own.

local schema = require "schema"

local sandbox = {}

-- Methods of strings are the spec's few while it runs: this file calls functions by name.
local text_of = string.format

-- An error of the spec, found while it runs; spec.lua turns it into a diagnostic. `word`: what to
-- underline on the line; `near`: names to look for the one that was meant, and its prefix.
local function fail(word, message, hint, near, prefix)
    error({ word = word, message = message, hint = hint, near = near, prefix = prefix }, 0)
end

local function copy(list, from)
    local picked = {}
    for _, name in ipairs(list) do
        picked[name] = from[name]
    end
    return picked
end

local function names_of(t)
    local names = {}
    for name in next, t do
        names[#names + 1] = name
    end
    table.sort(names, host.less)
    return names
end

-- ---- functions that replace Lua's ---------------------------------------------------------------

local function less(a, b)
    if type(a) == "string" and type(b) == "string" then
        return host.less(a, b)
    end
    return a < b
end

-- Numbers first, then strings; by value.
local function key_less(a, b)
    if type(a) == type(b) then
        return less(a, b)
    end
    return type(a) == "number"
end

local function sorted_pairs(t)
    if type(t) ~= "table" then
        fail("pairs", text_of("pairs needs a table, not %s", type(t)))
    end
    local keys = {}
    for key in next, t do
        if type(key) ~= "string" and type(key) ~= "number" then
            fail("pairs", text_of("pairs goes over numbers and strings; a key here is a %s", 
                type(key)))
        end
        keys[#keys + 1] = key
    end
    table.sort(keys, key_less)
    local i = 0
    return function()
        i = i + 1
        local key = keys[i]
        if key ~= nil then
            return key, t[key]
        end
    end, t, nil
end

-- The comparison is always a Lua function, so that the hook counts it.
local function sort(list, compare)
    table.sort(list, function(a, b)
        if compare then
            return compare(a, b)
        end
        return less(a, b)
    end)
end

local function move(from, first, last, to, target)
    target = target or from
    if to > first then
        for i = last - first, 0, -1 do
            target[to + i] = from[first + i]
        end
    else
        for i = 0, last - first do
            target[to + i] = from[first + i]
        end
    end
    return target
end

-- Tables and functions as text would show addresses, which differ from run to run.
local function to_text(value)
    local kind = type(value)
    if kind == "table" or kind == "function" then
        return kind
    end
    return tostring(value)
end

local function format(text, ...)
    if type(text) ~= "string" or #text > 4096 then
        fail("format", "string.format needs a text of at most 4096 characters")
    end
    if string.find(string.gsub(text, "%%%%", ""), "%%[-+ #0%d.]*p") then
        fail("format", "'%p' is not available in a spec: addresses differ from run to run")
    end
    local args = table.pack(...)
    for i = 1, args.n do
        args[i] = type(args[i]) == "string" and args[i] or type(args[i]) == "number" and args[i]
            or to_text(args[i])
    end
    return string.format(text, table.unpack(args, 1, args.n))
end

-- A Lua function called last, as in `return f(x)`, would take the place of the spec's line in the
-- stack; behind a C function it does not, and an error has its line.
local function in_place(f)
    return host.located(function(_, ...)
        return f(...)
    end)
end

-- ---- guards: what is not there says so ----------------------------------------------------------

local output = "a spec gives a model and has no output"
local no_files = "a spec is one file and reads no other"
local no_load = "a spec does not load other code"
local no_errors = "a spec does not raise or catch errors; its fields are checked when it is read"
local no_meta = "a spec has no metatables and no access to the state of Lua"
local absent = {
    print = output, warn = output, io = no_files, os = "a spec gives the same model everywhere and "
        .. "does not see the machine", require = no_files, dofile = no_files, loadfile = no_files,
    load = no_load, loadstring = no_load, package = no_load, error = no_errors, assert = no_errors,
    pcall = no_errors, xpcall = no_errors, coroutine = "a spec has no coroutines",
    setmetatable = no_meta, getmetatable = no_meta, rawget = no_meta, rawset = no_meta,
    rawequal = no_meta, rawlen = no_meta, debug = no_meta, collectgarbage = no_meta, _G = no_meta,
    _VERSION = no_meta, next = "pairs goes over a table in a fixed order",
    utf8 = "names are plain ASCII",
}

local library_hint = {
    string = "string has format, lower, rep, sub, upper",
    math = "math has no random numbers: a spec gives the same model every time",
}

-- Reading a name that the library `of` does not have is an error that says what it has.
local function guard(library, of)
    return setmetatable(library, {
        __index = function(_, key)
            local shown = type(key) == "string" and key or type(key)
            local names = names_of(library)
            local hint = library_hint[of] or text_of("%s has %s", of, table.concat(names, ", "))
            -- A name that Lua knows is no slip of the pen.
            fail(shown, text_of("'%s.%s' is not available in a spec", of, shown), hint,
                not _G[of][key] and names or nil, of .. ".")
        end,
        __metatable = false,
    })
end

local function guard_globals(env)
    return setmetatable(env, {
        __index = function(_, key)
            local shown = type(key) == "string" and key or type(key)
            if absent[shown] then
                fail(shown, text_of("'%s' is not available in a spec", shown), absent[shown])
            end
            fail(shown, text_of("unknown name '%s'", shown),
                "a text needs quotes; a name of your own needs a value before", names_of(env), "")
        end,
        __metatable = false,
    })
end

-- ---- constructors -------------------------------------------------------------------------------

-- The fields as they are now: what the spec does to its table later changes nothing.
local function snapshot(fields)
    local kept = {}
    for key, value in next, fields do
        kept[key] = value
    end
    return kept
end

-- An object of the spec: it can be read, not changed.
local function make(state, record)
    local object = setmetatable({}, {
        __index = type(record.fields) == "table" and record.fields or nil,
        __newindex = function(_, key)
            fail(type(key) == "string" and key or nil,
                text_of("a %s cannot be changed after it is made", record.what),
                "give the field between its braces")
        end,
        __metatable = false,
    })
    state.records[object] = record
    state.made[#state.made + 1] = record
    return object
end

-- Keeps the record of one call with a table of fields.
local function finish(state, record, line, fields, ...)
    record.line = line or record.line
    if type(fields) == "table" and not state.records[fields] and select("#", ...) == 0 then
        record.fields = snapshot(fields)
    else
        record.bad_fields = { value = fields, count = 1 + select("#", ...) }
    end
    return make(state, record)
end

-- model "name" { ... } and linear "name" { ... }
local function named_constructor(state, path, what)
    return host.located(function(line, name, ...)
        local record = { path = path, what = what, name = name, line = line }
        if type(name) == "table" then
            record.name = nil
            return finish(state, record, line, name, ...)
        end
        local unfinished = { path = path, what = what, name = name, line = line, open = true }
        local open = host.located(function(inner_line, ...)
            local own = { path = path, what = what, name = name, line = line }
            unfinished.called = true
            return finish(state, own, inner_line or line, ...)
        end)
        state.records[open] = unfinished
        state.made[#state.made + 1] = unfinished
        return open
    end)
end

-- recipe.current { ... }. An unknown recipe is recorded and its call accepted, so that all errors
-- of the spec are met.
local function recipe_table(state)
    local function constructor(name, known)
        local open = host.located(function(line, ...)
            return finish(state, { path = "recipe." .. name, what = "recipe", recipe = name,
                known = known, line = line }, line, ...)
        end)
        state.records[open] = { path = "recipe." .. name, what = "recipe", recipe = name,
            known = known, open = true }
        return open
    end
    local recipes = {}
    for _, name in ipairs(schema.recipes) do
        recipes[name] = constructor(name, true)
    end
    local unknown = host.located(function(line, _, key)
        local name = type(key) == "string" and key or type(key)
        table.insert(state.unknown_recipes, { name = name, line = line })
        return constructor(name, false)
    end)
    return setmetatable(recipes, { __index = unknown, __metatable = false })
end

-- ---- the environment ----------------------------------------------------------------------------

local math_names = { "abs", "acos", "asin", "atan", "ceil", "cos", "deg", "exp", "floor", "fmod",
    "huge", "log", "max", "maxinteger", "min", "mininteger", "modf", "pi", "rad", "sin", "sqrt",
    "tan", "tointeger", "type", "ult" }
local table_names = { "concat", "insert", "pack", "remove", "unpack" }
local string_names = { "lower", "rep", "sub", "upper" }

local function string_library()
    local library = copy(string_names, string)
    library.format = in_place(format)
    return guard(library, "string")
end

-- state.records receives: object or unfinished constructor -> record; state.made the records of
-- models, layers and recipes in the order they were made. Returns the environment and
-- the metatable of strings.
function sandbox.open(state)
    local tables = copy(table_names, table)
    tables.sort, tables.move = in_place(sort), in_place(move)
    local env = copy({ "ipairs", "type", "tonumber", "select" }, _G)
    env.pairs = in_place(sorted_pairs)
    env.tostring = to_text
    env.math = guard(copy(math_names, math), "math")
    env.table = guard(tables, "table")
    env.string = string_library()
    env.model = named_constructor(state, "model", "model")
    env.linear = named_constructor(state, "linear", "layer")
    env.recipe = recipe_table(state)
    return guard_globals(env), { __index = string_library(), __metatable = false }
end

return sandbox
