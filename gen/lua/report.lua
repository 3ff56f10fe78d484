-- report.lua - collects the problems of a spec, finds their places, folds and sorts them.
--
-- In: problems { message, hint, note } with what they are about: a field's key or value, a
-- constructor, a word on a line. Out: the list of diagnostics that script.c reports. Places come
-- from locate.lua; what it does not find (a value set by code) is reported at the constructor,
-- with a note. Problems that differ only in the layer they were met in (a loop makes layers)
-- become one, which names the layers. At most `max_shown` are kept: what follows is only counted,
-- so that a hostile spec costs little.

local locate = require "locate"

local report = {}
local methods = {}
local meta = { __index = methods }

local max_shown = 20 -- errors
local max_alike = 3 -- of them at one place: a loop that makes layers
local max_names = 4

-- A text of the spec, short and on one line, in quotes.
function report.quoted(text)
    local cut = #text
    if cut > 40 then
        cut = 37
        while cut > 0 and text:find("^[\128-\191]", cut + 1) do
            cut = cut - 1
        end
    end
    local shown = text:sub(1, cut):gsub("%c", function(char)
        return ("\\x%02x"):format(char:byte())
    end)
    return "'" .. shown .. (cut < #text and "..." or "") .. "'"
end

function report.new(source)
    return setmetatable({ source = source, list = {}, by_key = {}, at = {}, items = {},
        more = 0 }, meta)
end

function methods:full()
    return #self.list >= max_shown
end

function methods:empty()
    return #self.list == 0
end

function methods:index()
    if not self.text_index then
        self.text_index = locate.new(self.source.text)
    end
    return self.text_index
end

-- Adds a problem at tokens first..last, or at a line, or at the file. Notes are lines.
local function add(self, span, line, problem, note, owner)
    local column, length
    if span then
        line, column, length = self:index():place(span[1], span[2])
    end
    local key = table.concat({ line or 0, column or 0, length or 0, problem.message,
        problem.hint or "" }, "\0")
    local known = self.by_key[key]
    local place = table.concat({ line or 0, column or 0, length or 0 }, ":")
    local alike = self.at[place] or { count = 0 }
    if not known and (self:full() or alike.count == max_alike) then
        if alike.count == max_alike then
            alike.last.alike = (alike.last.alike or 0) + 1
        else
            self.more = self.more + 1
        end
        return
    end
    if not known then
        known = {
            message = problem.message, hint = problem.hint, file = self.source.name,
            source = self.source.text, line = line, column = column, length = length,
            notes = {}, names = {}, name_count = 0, order = #self.list + 1,
        }
        for _, text in ipairs({ problem.note or false, note or false }) do
            known.notes[#known.notes + 1] = text or nil
        end
        self.list[#self.list + 1] = known
        self.by_key[key] = known
        self.at[place] = { count = alike.count + 1, last = known }
    end
    if owner and not known.names[owner] then
        known.names[owner] = true
        known.name_count = known.name_count + 1
        if known.name_count <= max_names then
            known.names[known.name_count] = owner
        end
    end
end

-- ---- places -------------------------------------------------------------------------------------

-- What locate knows of an entry: a record of sandbox.lua or a nested table; nil if it is not found.
local function located(self, entry)
    if entry.place == nil then
        local place
        if entry.parent then
            local field = self:field(entry.parent, entry.key)
            place = field and self:index():table_at(field.value_at)
        elseif entry.line then
            place = self:index():entry(entry)
        end
        entry.place = place or false
    end
    return entry.place or nil
end

-- The layer or model to name in a note: only where the text alone does not show which it is.
local function owner_of(self, entry)
    while entry.parent do
        entry = entry.parent
    end
    local place = located(self, entry)
    if entry.path ~= "linear" or type(entry.name) ~= "string" then
        return nil
    end
    return not (place and place.name == entry.name) and entry.name or nil
end

-- The field as the text shows it: { key, key_at, value_at }; nil if it does not.
function methods:field(entry, key)
    local place = located(self, entry)
    if not place then
        return nil
    end
    if not place.by_key then
        place.by_key = {}
        for _, field in ipairs(self:index():fields(place)) do
            if field.key then
                place.by_key[field.key] = field
            end
        end
    end
    return place.by_key[key]
end

function methods:line(record)
    local place = located(self, record)
    return place and self:index():place(place.head) or record.line
end

local function at_head(self, entry, problem, note)
    local owner = owner_of(self, entry)
    while entry.parent and not located(self, entry) do
        local field = self:field(entry.parent, entry.key)
        if field then
            return add(self, field.value_at, nil, problem, note, owner)
        end
        entry = entry.parent
    end
    local place = located(self, entry)
    if place then
        return add(self, { place.head, place.head_last }, nil, problem, note, owner)
    end
    local first, last
    if entry.line then
        first, last = self:index():line_span(entry.line)
    end
    add(self, first and { first, last }, entry.line, problem, note, owner)
end

function methods:head(entry, problem)
    at_head(self, entry, problem)
end

function methods:name(record, problem)
    local place = located(self, record)
    if place and place.name_at then
        add(self, place.name_at, nil, problem, nil, owner_of(self, record))
    else
        at_head(self, record, problem)
    end
end

local function at_field(self, entry, key, problem, part)
    local field = self:field(entry, key)
    if field then
        add(self, field[part], nil, problem, nil, owner_of(self, entry))
    else
        at_head(self, entry, problem, report.quoted(key) .. " is set by code, not written here")
    end
end

function methods:key(entry, key, problem)
    at_field(self, entry, key, problem, "key_at")
end

function methods:value(entry, key, problem)
    at_field(self, entry, key, problem, "value_at")
end

-- The first value without a name between the braces of an entry.
function methods:unnamed(entry, problem)
    local place = located(self, entry)
    for _, field in ipairs(place and self:index():fields(place) or {}) do
        if field.key == nil then
            return add(self, field.value_at, nil, problem, nil, owner_of(self, entry))
        end
    end
    at_head(self, entry, problem)
end

-- The n-th value of the list that a field of the model holds.
function methods:item(entry, key, n, problem)
    local values = self.items[key]
    if not values then
        local list = located(self, { parent = entry, key = key })
        values = {}
        for _, field in ipairs(list and self:index():fields(list) or {}) do
            if field.key == nil then
                values[#values + 1] = field
            end
        end
        self.items[key] = values
    end
    if values[n] then
        add(self, values[n].value_at, nil, problem)
    else
        at_field(self, entry, key, problem, "value_at")
    end
end

-- A word on a line; the whole line if it is not there, the file if there is no line.
function methods:word(line, word, problem)
    local at = line and word and self:index():word_on(line, word)
    local first, last = at, at
    if line and not at then
        first, last = self:index():line_span(line)
    end
    add(self, first and { first, last }, line, problem)
end

-- Tokens of the text, by number.
function methods:tokens(first, last, problem)
    add(self, { first, last }, nil, problem)
end

-- The last token of the text.
function methods:last(problem)
    local count = self:index().count
    add(self, count > 0 and { count, count }, nil, problem)
end

-- The last place of a word in the text.
function methods:last_word(word, problem)
    local index = self:index()
    for n = index.count, 1, -1 do
        if index:token(n) == word then
            return add(self, { n, n }, nil, problem)
        end
    end
    self:last(problem)
end

function methods:nested(entry, key)
    return { parent = entry, key = key }
end

-- Lua keeps the last of two fields with one name; a spec must not drop one silently.
function methods:duplicates(entry)
    local place = located(self, entry)
    if not place or place.searched then
        return
    end
    place.searched = true
    local seen = {}
    for _, field in ipairs(self:index():fields(place)) do
        local first = field.key and seen[field.key]
        if first then
            local line = self:index():place(first.key_at[1])
            add(self, field.key_at, nil, {
                message = ("'%s' is given twice"):format(field.key),
                note = ("the first is at line %d"):format(line),
                hint = "leave one of them out",
            })
        elseif field.key then
            seen[field.key] = field
        end
    end
end

-- ---- result -------------------------------------------------------------------------------------

local function by_place(a, b)
    local a_line, b_line = a.line or 0, b.line or 0
    if a_line ~= b_line then
        return a_line < b_line
    end
    local a_column, b_column = a.column or 0, b.column or 0
    if a_column ~= b_column then
        return a_column < b_column
    end
    return a.order < b.order
end

-- The diagnostics, by place; nil if there are none.
function methods:result()
    if #self.list == 0 then
        return nil
    end
    table.sort(self.list, by_place)
    for _, diag in ipairs(self.list) do
        if diag.name_count > 0 then
            for i, name in ipairs(diag.names) do
                diag.names[i] = report.quoted(name)
            end
            local shown = table.concat(diag.names, ", ")
            local more = diag.name_count - max_names
            diag.notes[#diag.notes + 1] = (diag.name_count == 1 and "in layer " or "in layers ")
                .. shown .. (more > 0 and (" and %d more"):format(more) or "")
        end
        if diag.alike then
            diag.notes[#diag.notes + 1] = ("%d more errors at this place"):format(diag.alike)
        end
        diag.note = #diag.notes > 0 and table.concat(diag.notes, "\n") or nil
    end
    if self.more > 0 then
        self.list[#self.list + 1] = { file = self.source.name,
            message = ("%d more errors are not shown"):format(self.more) }
    end
    return self.list
end

return report
