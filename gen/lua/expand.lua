-- expand.lua - the template engine: a CUDA template and its parameters in, CUDA text out.
--
--   //% code      Lua, if these are the first characters of a line that are not blank
--   $name         the value of a parameter or of a Lua local      $(expr)   of a Lua expression
--   $$            a dollar                                        all else  CUDA, copied as it is
--
-- Each template line becomes exactly one line of a Lua chunk that bears the template's name, so
-- Lua's own errors name the template's lines. In the output a #line stands only where its lines and
-- the template's are out of step, so the compiler's errors, -lineinfo and profilers name them as
-- well. Templates set no policy and hold no state: parameters come from the plan alone, a name that
-- the plan did not set is an error at its line, and so is an assignment to a global.
--
-- Knows nothing of layers or of NVRTC.

local M = {}

-- ---- values ------------------------------------------------------------------------------------

-- How a value stands in CUDA text; nil and the reason if it cannot.
local function spell(value)
    local kind = math.type(value) or type(value)
    if kind == "string" then return value end
    if kind == "integer" then return ("%d"):format(value) end
    if kind == "boolean" then return tostring(value) end
    if kind == "float" then
        if value ~= value or value == math.huge or value == -math.huge then
            return nil, "is not finite, which has no spelling in CUDA"
        end
        return ("%a"):format(value) -- exact
    end
    return nil, ("is a %s, not a string, number or boolean"):format(kind)
end

-- ---- errors ------------------------------------------------------------------------------------

-- ctx: name, shown, text and lines of the template; wanted: the name that was looked up in vain.
local function fail(ctx, line, message, column, length, hint)
    error({
        message = message,
        file = ctx.shown,
        line = line,
        column = column,
        length = length,
        hint = hint,
        source = ctx.text,
    }, 0)
end

-- Where a word stands in a line, as a whole word.
local function find_word(line, word)
    local first, last = (line or ""):find("%f[%w_]" .. word .. "%f[^%w_]")
    if first then return first, last - first + 1 end
end

-- An error that Lua raised in the chunk ("quantize.cu:12: ..."), told as an error of the template.
local function retell(ctx, raised, hint)
    if type(raised) ~= "string" then error(raised, 0) end
    local prefix = ctx.name .. ":"
    local number, message
    if raised:sub(1, #prefix) == prefix then
        number, message = raised:sub(#prefix + 1):match("^(%d+): (.*)$")
    end
    if not number then error(raised, 0) end -- out of memory, or a bug of this module
    number = math.min(math.tointeger(number), #ctx.lines)
    if message:find("near '__line'", 1, true) then -- Lua code was not complete before this text
        while number > 1 and not ctx.lines[number]:find("^%s*//%%") do number = number - 1 end
    end
    message = message:gsub("'__line'", "the CUDA text that follows")
    local column, length
    if ctx.wanted then column, length = find_word(ctx.lines[number], ctx.wanted) end
    fail(ctx, number, message, column, length, hint)
end

-- ---- template to Lua ---------------------------------------------------------------------------

-- Index of the parenthesis that closes the one at `open`, Lua strings skipped; nil if none does.
local function closing(line, open)
    local depth, i = 0, open
    while i <= #line do
        local c = line:sub(i, i)
        if c == '"' or c == "'" then
            repeat
                i = line:find("[\\" .. c .. "]", i + 1)
                if not i then return nil end
                local escaped = line:sub(i, i) == "\\"
                if escaped then i = i + 1 end
            until not escaped
        elseif c == "(" then
            depth = depth + 1
        elseif c == ")" then
            depth = depth - 1
            if depth == 0 then return i end
        end
        i = i + 1
    end
end

-- The expression of "$(...)" compiles by itself, so that a wrong one is found at its own place and
-- cannot swallow what follows it.
local function check_expression(ctx, number, column, expression)
    local chunk, problem = load("return (" .. expression .. ")", "=e", "t", {})
    if not chunk then
        problem = problem:gsub("^e:%d+: ", "")
        fail(ctx, number,
             ("'$(%s)' is not a Lua expression: %s"):format(expression, problem), column,
             #expression + 3)
    end
end

-- One substitution that begins with the dollar at `at`: the Lua that gives its text, and where to
-- go on.
local function substitution(ctx, number, line, at)
    local after = line:sub(at + 1, at + 1)
    if after == "$" then return '"$"', at + 2 end
    if after == "(" then
        local last = closing(line, at + 1)
        if not last then fail(ctx, number, "'$(' is not closed on its line", at, 2) end
        local expression = line:sub(at + 2, last - 1)
        check_expression(ctx, number, at, expression)
        return ("__value((%s),%q)"):format(expression, "$(" .. expression .. ")"), last + 1
    end
    local name = line:match("^[%a_][%w_]*", at + 1)
    if not name then
        fail(ctx, number, "'$' stands before neither a name nor '('", at, 1,
             "write $$ for a dollar")
    end
    if not load("return " .. name, "=e", "t", {}) then
        fail(ctx, number, ("'%s' is a word of Lua, not a name"):format(name), at, #name + 1)
    end
    return ("__value(%s,%q)"):format(name, "$" .. name), at + 1 + #name
end

-- A line of CUDA as one Lua statement that emits it.
local function text_line(ctx, number, line)
    local pieces, from = {}, 1
    while true do
        local at = line:find("$", from, true)
        if not at then break end
        if at > from then pieces[#pieces + 1] = ("%q"):format(line:sub(from, at - 1)) end
        pieces[#pieces + 1], from = substitution(ctx, number, line, at)
    end
    if from <= #line then pieces[#pieces + 1] = ("%q"):format(line:sub(from)) end
    return ("__line(%d,{%s});"):format(number, table.concat(pieces, ","))
end

local function to_lua(ctx)
    local code = {}
    for number, line in ipairs(ctx.lines) do
        code[number] = line:match("^%s*//%%(.*)$") or text_line(ctx, number, line)
    end
    code[1] = "local __line,__value = ...; " .. (code[1] or "")
    return table.concat(code, "\n")
end

local function split(text)
    local lines = {}
    for line in text:gmatch("([^\n]*)\n") do lines[#lines + 1] = line end
    local rest = text:match("[^\n]*$")
    if rest ~= "" then lines[#lines + 1] = rest end
    return lines
end

-- ---- output ------------------------------------------------------------------------------------

-- Whether the text ends inside /* */; `inside`: whether it begins there.
local function ends_in_comment(text, inside)
    local i = 1
    while true do
        if inside then
            local _, last = text:find("*/", i, true)
            if not last then return true end
            inside, i = false, last + 1
        end
        local at = text:find("[/\"']", i)
        if not at then return false end
        local two, c = text:sub(at, at + 1), text:sub(at, at)
        if two == "/*" then
            inside, i = true, at + 2
        elseif two == "//" then
            i = text:find("\n", at, true)
            if not i then return false end
        elseif c == "/" or (c == "'" and text:find("^%w", at - 1)) then -- 1'000
            i = at + 1
        else
            i = at + 1
            while text:find("^[^" .. c .. "]", i) do
                i = i + (text:sub(i, i) == "\\" and 2 or 1)
            end
            i = i + 1
        end
    end
end

-- Collects the output and keeps it in step with the template. Inside a comment or after a backslash
-- a #line would not be one, so it waits.
local function writer(ctx)
    local parts, expected, waits, inside = {}, 1, false, false
    local function line(number, pieces)
        local text = table.concat(pieces)
        if number ~= expected and not waits then
            parts[#parts + 1] = ('#line %d "%s"'):format(number, ctx.name)
            expected = number
        end
        parts[#parts + 1] = text
        local _, newlines = text:gsub("\n", "")
        expected = expected + 1 + newlines
        inside = ends_in_comment(text, inside)
        waits = inside or text:find("\\\r?$") ~= nil
    end
    local function result()
        parts[#parts + 1] = ""
        return table.concat(parts, "\n")
    end
    return line, result
end

-- ---- names that a template sees ----------------------------------------------------------------

local function sorted_names(t)
    local names = {}
    for name in pairs(t) do names[#names + 1] = name end
    table.sort(names, function(a, b)
        if math.type(a) and math.type(b) then return a < b end
        return tostring(a) < tostring(b)
    end)
    return names
end

local function sorted_pairs(t)
    local names, i = sorted_names(t), 0
    return function()
        i = i + 1
        if names[i] ~= nil then return names[i], t[names[i]] end
    end
end

local function checked(value, message)
    if not value then error(message or "assertion failed", 2) end
    return value
end

local plain_math = {}
for name, value in pairs(math) do plain_math[name] = value end
plain_math.random, plain_math.randomseed = nil, nil -- the same text every time

local library = {
    assert = checked,
    error = error,
    ipairs = ipairs,
    math = plain_math,
    pairs = sorted_pairs,
    select = select,
    string = string,
    table = table,
    tonumber = tonumber,
    tostring = tostring,
    type = type,
}

local function environment(ctx, params)
    return setmetatable({}, {
        __index = function(_, name)
            local value = params[name]
            if value == nil then value = library[name] end
            if value == nil then
                ctx.wanted = name
                error(("'%s' is not set"):format(name), 2)
            end
            return value
        end,
        __newindex = function(_, name)
            ctx.wanted = name
            error(("'%s' is assigned to but not a local"):format(name), 2)
        end,
        __metatable = false,
    })
end

-- ---- the module --------------------------------------------------------------------------------

-- name: of the template, for #line; text: the template; params: name -> string, number or boolean;
-- shown: the template's name in errors (default: name). The output is to be compiled under `name`:
-- it begins in step with line 1 of the template.
function M.expand(name, text, params, shown)
    local ctx = { name = name, shown = shown or name, text = text, lines = split(text) }
    local nul = text:find("\0", 1, true)
    if nul then -- the compiler would stop reading there
        local _, newlines = text:sub(1, nul):gsub("\n", "")
        fail(ctx, newlines + 1, "a NUL byte in the template")
    end
    local chunk, problem = load(to_lua(ctx), "@" .. name, "t", environment(ctx, params))
    if not chunk then retell(ctx, problem) end
    local line, result = writer(ctx)
    local function value(v, what)
        local spelled, reason = spell(v)
        if not spelled then error(("%s %s"):format(what, reason), 2) end
        return spelled
    end
    local good, raised = pcall(chunk, line, value)
    if not good then
        local hint = ctx.wanted and "set by the plan: " .. table.concat(sorted_names(params), ", ")
        retell(ctx, raised, hint)
    end
    return result()
end

-- Words joined by ", " in comment lines of at most 96 characters.
local function comment_list(out, head, words)
    local line = head
    for i, word in ipairs(words) do
        word = word:gsub("[%c\\]", "?") .. (i < #words and "," or "")
        if #line + 1 + #word > 96 and line ~= head then
            out[#out + 1] = line
            line = "//" .. (" "):rep(#head - 2)
        end
        line = line .. " " .. word
    end
    out[#out + 1] = line
end

-- The block on top of a written kernel: what it is and how to make it again. It holds no time, host
-- or path, and is no part of what is compiled, so that equal kernels of different models stay
-- equal. info: generator, model, layers (list of names), kernel, template, parameters.
function M.provenance(info)
    local out = {
        ("// Made by fp8gen %s from the template %s; edit that, not this."):format(info.generator,
                                                                              info.template),
    }
    comment_list(out, "//   again:     ", { "fp8gen expand <spec of model " .. info.model .. ">" })
    comment_list(out, "//   kernel:    ", { info.kernel })
    comment_list(out, "//   used by:   ", info.layers)
    for i, name in ipairs(sorted_names(info.parameters)) do
        local value = info.parameters[name]
        local shown = type(value) == "string" and ("%q"):format(value) or spell(value)
        comment_list(out, i == 1 and "//   parameters:" or "//              ",
                     { ("%s = %s"):format(name, shown) })
    end
    out[#out + 1] = ('#line 1 "%s"'):format(info.template)
    out[#out + 1] = ""
    return table.concat(out, "\n")
end

return M
