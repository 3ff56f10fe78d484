-- schedule.lua - what every rank of a model enqueues in one step: gathers, passes, sums, in order.
--
-- In: layers in forward order, and whether weights are kept. Out: events. This is the rule of
-- runtime/model_gather.c and model_pass.c, said once for all that a plan tells of a step: two
-- slots, one group ahead, a group gathered again only if the copy that a pass reads is not there.
-- Like there, nothing depends on time or rank; seconds are step.lua's, bytes shard.lua's.
--
-- Of a layer it reads: count, gather_group; turned (its copies are not made of each other: a gather
-- for each pass, in one slot); hooked (a hook brings it, for every pass or, kept, once).

local M = {}

local SLOTS = 2
local MOST = 2000 -- layers that are played; of more, as many of each in proportion

-- ---- a model's layers ---------------------------------------------------------------------------

-- Whether a layer is gathered with the one before it.
local function joins(layer, before)
    return before and layer.gather_group and layer.gather_group == before.gather_group
        and not layer.hooked and not before.hooked
end

-- Every layer as often as it is there: blocks of all that are left, those that are rarer in the
-- last ones; each with its `index` in `layers` and its `group` (1, 2, ...). Also the share of all
-- that the list is.
function M.instances(layers)
    local total, most, list, group = 0, 0, {}, 0
    for _, layer in ipairs(layers) do total = total + layer.count end
    local share = math.min(1.0, MOST / total)
    local function count_of(layer) return math.max(1, math.floor(layer.count * share)) end
    for _, layer in ipairs(layers) do most = math.max(most, count_of(layer)) end
    for block = 1, most do
        local before
        for index, layer in ipairs(layers) do
            if block > most - count_of(layer) then
                if not joins(layer, before) then group = group + 1 end
                before = layer
                list[#list + 1] = setmetatable({ group = group, index = index },
                    { __index = layer })
            end
        end
    end
    return list, share
end

-- ---- slots --------------------------------------------------------------------------------------

-- Groups: { members (indices), slot, wanted (not read since it was asked for), readers, has (pass
-- whose copy is there) }.
local function new_play(layers, keep)
    local play = { events = {}, layers = layers, keep = keep, groups = {}, clock = 0, slots = {},
        transposed = {} }
    for i, layer in ipairs(layers) do
        local group = play.groups[layer.group]
        if not group then
            group = { members = {}, readers = 0, has = {}, hooked = layer.hooked }
            play.groups[layer.group] = group
        end
        group.turned = group.turned or layer.turned
        table.insert(group.members, i)
    end
    for i = 1, keep and #play.groups or SLOTS do play.slots[i] = { used = 0 } end
    return play
end

local function add(play, event) play.events[#play.events + 1] = event end

-- An empty slot, else that of the group that was used longest ago; only if it is needed now, one
-- that was gathered and not read yet. nil: all are wanted.
local function find_slot(play, needed)
    local best, best_rank
    for at, slot in ipairs(play.slots) do
        local group = slot.group
        local rank = not group and 2 or group.wanted and 0 or 1
        if not (group and group.readers > 0) and (rank > 0 or needed)
            and (not best or rank > best_rank
                or rank == best_rank and slot.used < play.slots[best].used) then
            best, best_rank = at, rank
        end
    end
    return best
end

local function take_slot(play, group, needed)
    if group.slot then return true end
    local at = find_slot(play, needed)
    if not at then return false end
    local slot = play.slots[at]
    if slot.group then slot.group.slot = nil end
    play.clock = play.clock + 1
    slot.group, slot.used = group, play.clock
    group.slot, group.has = at, {}
    return true
end

-- What of each member is sent: the turned copy, or rows unless they are there.
local function gather(play, group, pass)
    local sends = {}
    for _, i in ipairs(group.members) do
        local turned = play.layers[i].turned
        if turned or not next(group.has) then
            sends[#sends + 1] = { layer = i, turned = turned and pass == "dgrad" }
            play.transposed[i] = false
        end
    end
    add(play, { op = "gather", pass = pass, slot = group.slot, sends = sends })
    group.wanted = true
    if not play.keep then group.has = {} end
    group.has[pass] = true
    if not group.turned then group.has = { fprop = true, dgrad = true } end
end

-- fp8_model_bring: gathers a group unless the copy is there; ahead of time only into a free slot.
local function bring(play, index, pass, needed)
    local group = play.groups[index]
    if not group or group.hooked then return end
    if group.slot and group.has[pass] then
        group.wanted = true
    elseif group.slot and group.readers > 0 and not play.keep then
        assert(not needed, "a held weight is wanted for another pass")
    elseif take_slot(play, group, needed) then
        gather(play, group, pass)
    end
end

-- ---- passes -------------------------------------------------------------------------------------

-- Of a weight that a hook brings: into memory of its own.
local function hooked(play, i, pass)
    local group = play.groups[play.layers[i].group]
    if not (play.keep and group.has.fprop) then
        add(play, { op = "gather", pass = pass, hooked = i, sends = { { layer = i } } })
    end
    group.has.fprop = true
    add(play, { op = pass, layer = i, hooked = i })
end

-- A pass that reads a weight; `ahead`: the group that is gathered beside it.
local function with_weight(play, i, pass, ahead)
    local layer = play.layers[i]
    local group = play.groups[layer.group]
    if group.hooked then
        hooked(play, i, pass)
        if ahead then bring(play, ahead, pass, false) end
        return
    end
    bring(play, layer.group, pass, true)
    play.clock = play.clock + 1
    play.slots[group.slot].used = play.clock
    local transposes = pass == "dgrad" and not layer.turned and not play.transposed[i]
    if transposes then play.transposed[i] = true end
    group.readers = group.readers + 1
    if ahead then bring(play, ahead, pass, false) end
    add(play, { op = pass, layer = i, slot = group.slot, transposes = transposes })
    group.readers, group.wanted = group.readers - 1, false
end

-- The events of a step of `layers`, each with its `group`, in order:
--   { op = "gather", pass, slot, sends = { { layer, turned } } }  a collective, into a slot
--   { op = "fprop" or "dgrad", layer, slot, transposes }          reads the slot
--   { op = "grads", layer }                                       quantize_dy and wgrad
--   { op = "reduce", layer }                                      the sum of its gradients
-- layer: an index. Of a weight that a hook brings `hooked` is set, the layer's index, and no slot.
function M.step(layers, keep)
    local play = new_play(layers, keep)
    for i, layer in ipairs(layers) do with_weight(play, i, "fprop", layer.group + 1) end
    for i = #layers, 1, -1 do
        local layer = layers[i]
        if not layer.hooked then
            bring(play, layer.group, "dgrad", false)
            bring(play, layer.group - 1, "dgrad", false)
        end
        add(play, { op = "grads", layer = i })
        add(play, { op = "reduce", layer = i })
        with_weight(play, i, "dgrad", nil)
    end
    return play.events
end

return M
