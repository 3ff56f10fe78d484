-- locate.lua - where in the text of a spec something stands.
--
-- Lua's debug info gives only the line of a call. For a place to underline, a small lexer splits
-- the text into tokens (comments dropped; strings whole), finds the call on that line, the brace
-- that opens its fields, and inside it each field's key and value. Nothing is evaluated: what the
-- text does not show (a value set by code, a constructor under another name) is simply not found,
-- and the caller falls back to the constructor or the line. Runs only to report, on text of at
-- most 1 MiB.
--
--   locate.new(text) -> index;  index:entry(record) -> entry | nil
--   index:fields(entry) -> list of { key, key_at = span, value_at = span }
--   A span is a pair of token numbers; index:place(first, last) -> line, column, length.

local locate = {}
local index_methods = {}
local max_on_line = 16 -- calls of one name that are compared: a hostile spec costs little
local index_meta = { __index = index_methods }

-- ---- tokens -------------------------------------------------------------------------------------

-- End of a quoted string that starts at `at`: its closing quote, or the end of its line.
local function quoted_end(text, at)
    local quote = text:sub(at, at)
    local i = at + 1
    while true do
        i = text:find("[\\\n" .. quote .. "]", i)
        if not i then
            return #text
        end
        local char = text:sub(i, i)
        if char == quote then
            return i
        elseif char == "\n" then
            return i - 1
        elseif text:sub(i + 1, i + 1) == "z" then
            i = text:find("%S", i + 2) or #text + 1
        else
            i = i + 2
        end
    end
end

-- End of a long bracket that starts at `at`, or nil if none does.
local function long_end(text, at)
    local level = text:match("^%[(=*)%[", at)
    if level then
        local _, stop = text:find("]" .. level .. "]", at, true)
        return stop or #text
    end
end

local function skip_comment(text, at)
    return long_end(text, at + 2) or (text:find("\n", at, true) or #text + 1) - 1
end

local pairs_of_chars = { ["=="] = true, ["~="] = true, ["<="] = true, [">="] = true, [".."] = true,
    ["//"] = true, ["::"] = true, ["<<"] = true, [">>"] = true }

-- Kind and end of the token at `at`.
local function token_at(text, at)
    local char = text:sub(at, at)
    if char:find("[%a_\128-\255]") then -- Lua refuses the latter; report.lua shows them as one word
        return "name", select(2, text:find("^[%w_\128-\255]*", at))
    elseif char:find("%d") or text:find("^%.%d", at) then
        local stop = select(2, text:find("^[%w.]*", at))
        while text:find("^[eEpP][+-]", stop) do
            stop = select(2, text:find("^[%w.]*", stop + 2))
        end
        return "number", stop
    elseif char == '"' or char == "'" then
        return "string", quoted_end(text, at)
    elseif char == "[" and long_end(text, at) then
        return "string", long_end(text, at)
    end
    return "op", pairs_of_chars[text:sub(at, at + 1)] and at + 1 or at
end

function locate.new(text)
    local index = { text = text, count = 0, kind = {}, first = {}, last = {}, lines = { 1 },
        call_lists = {} }
    for at in text:gmatch("\n()") do
        index.lines[#index.lines + 1] = at
    end
    local at = 1
    while true do
        at = text:find("%S", at)
        if not at then
            break
        elseif text:find("^%-%-", at) then
            at = skip_comment(text, at) + 1
        else
            local kind, stop = token_at(text, at)
            local n = index.count + 1
            index.count, index.kind[n], index.first[n], index.last[n] = n, kind, at, stop
            at = stop + 1
        end
    end
    return setmetatable(index, index_meta)
end

function index_methods:token(n)
    return n >= 1 and n <= self.count and self.text:sub(self.first[n], self.last[n]) or nil
end

-- The number of the line that holds a byte.
function index_methods:line_of(at)
    local low, high = 1, #self.lines
    while low < high do
        local middle = (low + high + 1) // 2
        if self.lines[middle] <= at then
            low = middle
        else
            high = middle - 1
        end
    end
    return low
end

function index_methods:place(first, last)
    local at = self.first[first]
    local line = self:line_of(at)
    local line_end = (self.lines[line + 1] or #self.text + 2) - 2
    return line, at - self.lines[line] + 1, math.min(self.last[last or first], line_end) - at + 1
end

-- The first token of a line or after it; count + 1 if there is none.
function index_methods:first_on(line)
    local at = self.lines[line]
    if not at then
        return self.count + 1
    end
    local low, high = 1, self.count + 1
    while low < high do
        local middle = (low + high) // 2
        if self.first[middle] >= at then
            high = middle
        else
            low = middle + 1
        end
    end
    return low
end

-- First and last token of a line; nil if it has none.
function index_methods:line_span(line)
    local first = self:first_on(line)
    local after = self:first_on(line + 1)
    if first < after then
        return first, after - 1
    end
end

-- The token of a line whose text is `word`; nil if there is none.
function index_methods:word_on(line, word)
    local first, last = self:line_span(line)
    for n = first or 1, last or 0 do
        if self:token(n) == word then
            return n
        end
    end
end

-- The first token of a line that is a name with characters beyond ASCII; nil if there is none.
function index_methods:odd_on(line)
    local first, last = self:line_span(line)
    for n = first or 1, last or 0 do
        if self.kind[n] == "name" and self:token(n):find("[\128-\255]") then
            return n
        end
    end
end

-- ---- entries ------------------------------------------------------------------------------------

local closers = { ["("] = ")", ["{"] = "}", ["["] = "]" }

-- The bracket that closes the one at token n; count if the text ends before.
function index_methods:match(n)
    local depth = 0
    for i = n, self.count do
        if self.kind[i] == "op" then
            local token = self:token(i)
            if closers[token] then
                depth = depth + 1
            elseif token == ")" or token == "}" or token == "]" then
                depth = depth - 1
                if depth == 0 then
                    return i
                end
            end
        end
    end
    return self.count
end

-- Does the call `a.b.c` start at token n? Its last token.
function index_methods:path_at(n, path)
    local i = n
    for word in path:gmatch("[^.]+") do
        if self:token(i) ~= word then
            return nil
        end
        i = i + 2
    end
    local before = self:token(n - 1)
    if before == "." or before == ":" or before == "function" then
        return nil
    end
    return i - 2
end

-- One argument of a call, which starts at token n: its first and last token without parentheses,
-- and the token after it. nil if no call goes on here.
function index_methods:argument(n)
    local token = self:token(n)
    if token == "(" then
        local close = self:match(n)
        return n + 1, close - 1, close + 1
    elseif token == "{" then
        local close = self:match(n)
        return n, close, close + 1
    elseif self.kind[n] == "string" then
        return n, n, n + 1
    end
end

local simple_escapes = { a = "\a", b = "\b", f = "\f", n = "\n", r = "\r", t = "\t", v = "\v" }

-- The text between the quotes of a string that Lua has read.
local function unescaped(inner)
    local parts, at = {}, 1
    while true do
        local slash = inner:find("\\", at, true)
        parts[#parts + 1] = inner:sub(at, (slash or #inner + 1) - 1)
        if not slash then
            return table.concat(parts)
        end
        local char = inner:sub(slash + 1, slash + 1)
        local digits = inner:match("^%d%d?%d?", slash + 1)
        local hex = inner:match("^x(%x%x)", slash + 1)
        local point = inner:match("^u{(%x+)}", slash + 1)
        if char == "z" then
            at = inner:find("%S", slash + 2) or #inner + 1
        elseif digits then
            parts[#parts + 1] = string.char(math.min(tonumber(digits), 255))
            at = slash + 1 + #digits
        elseif hex then
            parts[#parts + 1] = string.char(tonumber(hex, 16))
            at = slash + 4
        elseif point then
            parts[#parts + 1] = utf8.char(math.min(tonumber(point, 16), 0x7fffffff))
            at = slash + 4 + #point
        else
            parts[#parts + 1] = simple_escapes[char] or char -- a quote, a backslash, a line's end
            at = slash + 2
        end
    end
end

local function literal_of(index, first, last)
    if first == last and index.kind[first] == "string" then
        local token = index:token(first)
        return token:match("^%[=*%[\n?(.*)%]=*%]$") or unescaped(token:sub(2, -2))
    end
end

-- The call at token n: { head, name, name_at, open, close }; `named`: its first argument is a name.
function index_methods:call_at(n, last, named)
    local entry = { head = n, head_last = last }
    local first, stop, after = self:argument(last + 1)
    if named and first and self:token(first) ~= "{" then
        entry.name, entry.name_at = literal_of(self, first, stop), { first, stop }
        entry.head_last = after - 1
        first, stop, after = self:argument(after)
    end
    if first and self:token(first) == "{" and self:match(first) == stop then
        entry.open, entry.close = first, stop
    end
    return entry
end

-- All calls of `path` in the text, by name ("" = not a literal), in order; made once.
function index_methods:calls(path, named)
    local calls = self.call_lists[path]
    if not calls then
        calls = {}
        local word = path:match("^[^.]+")
        for n = 1, self.count do
            local last = self:token(n) == word and self:path_at(n, path)
            if last then
                local entry = self:call_at(n, last, named)
                entry.line = self:line_of(self.first[n])
                entry.open_line = self:line_of(self.first[entry.open or entry.head_last])
                local key = entry.name or ""
                calls[key] = calls[key] or {}
                table.insert(calls[key], entry)
            end
        end
        self.call_lists[path] = calls
    end
    return calls
end

-- How well the fields that the text shows between the braces of an entry are those of a record.
function index_methods:likeness(entry, fields)
    local score, shown = 0, {}
    entry.listed = entry.listed or self:fields(entry)
    for _, field in ipairs(entry.listed) do
        local value = field.key and fields[field.key]
        if field.key then
            local first, last = field.value_at[1], field.value_at[2]
            local text = literal_of(self, first, last)
            local number = first == last and self.kind[first] == "number"
                and tonumber(self:token(first))
            shown[field.key] = true
            score = score + (value ~= nil and 1 or -1)
            if text or number then
                score = score + (value == (text or number) and 1 or -1)
            end
        end
    end
    for key in next, fields do
        score = score - (type(key) == "string" and not shown[key] and 1 or 0)
    end
    return score
end

-- The call that made a record { path, name, line, fields }, where debug info places it on `line`;
-- calls of a path without a dot have a name (nil = none or not a literal). Versions of Lua differ
-- in what they call the line: that of the callee, of the name or of the brace. A call with just
-- this name goes before one whose name is computed; of several on one line the one most like the
-- record.
function index_methods:entry(record)
    local line = record.line
    local calls = self:calls(record.path, not record.path:find(".", 1, true))
    for _, key in ipairs({ record.name or "", "" }) do
        local found = {}
        for _, entry in ipairs(calls[key] or {}) do
            if entry.line <= line and line <= entry.open_line then
                found[#found + 1] = entry
            end
        end
        local best, best_score = found[#found], nil
        for i = #found, 1, -1 do
            local several = #found > 1 and #found <= max_on_line
            local score = several and record.fields and self:likeness(found[i], record.fields)
            if score and (not best_score or score > best_score) then
                best, best_score = found[i], score
            end
        end
        if best then
            return best
        end
    end
end

-- ---- fields -------------------------------------------------------------------------------------

local block_open = { ["function"] = true, ["if"] = true, ["do"] = true, ["repeat"] = true }
local block_close = { ["end"] = true, ["until"] = true }

-- The last token of the value that starts at n, inside a table that closes at `close`.
function index_methods:value_end(n, close)
    local depth = 0
    while n < close do
        local token = self:token(n)
        if self.kind[n] == "op" and closers[token] then
            n = self:match(n)
        elseif self.kind[n] == "name" and block_open[token] then
            depth = depth + 1
        elseif self.kind[n] == "name" and block_close[token] then
            depth = depth - 1
        elseif depth <= 0 and (token == "," or token == ";") then
            break
        end
        n = n + 1
    end
    return n - 1
end

-- The key that starts at token n, and the first token of its value; nil for a value without a key.
function index_methods:key_at(n)
    if self.kind[n] == "name" and self:token(n + 1) == "=" then
        return self:token(n), n, n, n + 2
    elseif self:token(n) == "[" then
        local close = self:match(n)
        if self:token(close + 1) == "=" then
            return literal_of(self, n + 1, close - 1) or false, n, close, close + 2
        end
    end
end

-- The fields that the text shows between the braces of an entry, in order; key = nil for a value
-- without a key, false for a computed one.
function index_methods:fields(entry)
    local fields = {}
    local n = entry.open and entry.open + 1 or 1
    while entry.open and n < entry.close do
        local key, key_first, key_last, value = self:key_at(n)
        value = value or n
        local stop = self:value_end(value, entry.close)
        if stop >= value then
            fields[#fields + 1] = {
                key = key,
                key_at = key_first and { key_first, key_last },
                value_at = { value, stop },
            }
        end
        n = math.max(stop, n) + 1
        while n < entry.close and (self:token(n) == "," or self:token(n) == ";") do
            n = n + 1
        end
    end
    return fields
end

-- The table constructor that is the whole value of a field, as an entry; nil if it is none.
function index_methods:table_at(value_at)
    if self:token(value_at[1]) == "{" and self:match(value_at[1]) == value_at[2] then
        return { head = value_at[1], head_last = value_at[1], open = value_at[1],
            close = value_at[2] }
    end
end

-- ---- spelling -----------------------------------------------------------------------------------

-- Edits (insert, delete, replace, swap neighbours) that turn a into b.
local function distance(a, b)
    local before, row = {}, {}
    for j = 0, #b do
        row[j] = j
    end
    for i = 1, #a do
        local next_row = { [0] = i }
        for j = 1, #b do
            local same = a:byte(i) == b:byte(j)
            local best = math.min(row[j] + 1, next_row[j - 1] + 1, row[j - 1] + (same and 0 or 1))
            if i > 1 and j > 1 and a:byte(i) == b:byte(j - 1) and a:byte(i - 1) == b:byte(j) then
                best = math.min(best, before[j - 2] + 1)
            end
            next_row[j] = best
        end
        before, row = row, next_row
    end
    return row[#b]
end

-- The only word of the list that goes on where this one ends: "history" of "history_length".
local function beginning_with(word, list)
    local found
    for _, candidate in ipairs(list) do
        if #word > 1 and candidate:sub(1, #word + 1) == word:lower() .. "_" then
            if found then
                return nil
            end
            found = candidate
        end
    end
    return found
end

-- The word of the list that was probably meant; nil if none is near.
function locate.nearest(word, list)
    local best, best_distance
    if #word > 40 then
        return nil
    end
    for _, candidate in ipairs(list) do
        local d = distance(word:lower(), candidate:lower())
        local near = d <= math.max(1, math.max(#word, #candidate) // 3) and d < #candidate
        if near and (not best or d < best_distance) then
            best, best_distance = candidate, d
        end
    end
    return best or beginning_with(word, list)
end

return locate
