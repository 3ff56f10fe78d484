-- step.lua - what sharing weights over the GPUs of one host costs: a collective, and a whole step.
--
-- In: numbers. collective() takes an op, bytes of a rank's piece, and ranks; step() the seconds of
-- every pass, the bytes of every gather and sum, in the order of the model. Out: predicted seconds;
-- nil beyond one host. For people: nothing is chosen by it, and nothing here knows a spec, a kernel
-- or a device.
--
-- The step is played, not summed: one stream computes, one communicates, in the order of
-- schedule.lua, sums behind wgrad from two buffers. What runs beside a collective runs slower;
-- waiting and slowing together are what is exposed.

local schedule = require "schedule"

local M = {}

local HOST_RANKS = 8 -- more of them are not joined by NVLink alone

-- H200 SXM, NVLink without multicast, NCCL 2.28. Of every collective and way, by ranks: `least`,
-- what enqueueing takes however small it is, and lines { seconds to start, bytes/s over a rank's
-- links }, the lowest of which counts. Fitted to tests/bench/results/shard*.jsonl; those of 2 ranks
-- to calls that launch before they return, those of 4 to calls that do not, which cost the host
-- more. all_to_all of 4 is taken from all_gather: it was measured within steps alone. Between
-- measured ranks the smaller number counts.
local NETWORK = {
    all_gather = {
        copy_engine = {
            { ranks = 2, least = 19e-6, { 17e-6, 393e9 } },
            { ranks = 4, least = 64e-6, { 32e-6, 394e9 } },
        },
        kernels = {
            { ranks = 2, least = 15e-6, { 12e-6, 236e9 }, { 32e-6, 274e9 } },
            { ranks = 4, least = 62e-6, { 21e-6, 301e9 }, { 45e-6, 334e9 } },
        },
    },
    all_to_all = {
        copy_engine = {
            { ranks = 2, least = 30e-6, { 28e-6, 331e9 } },
            { ranks = 4, least = 64e-6, { 32e-6, 394e9 } },
        },
    },
    reduce_scatter = {
        bf16 = {
            { ranks = 2, least = 35e-6, { 10e-6, 220e9 }, { 23e-6, 240e9 } },
            { ranks = 4, least = 60e-6, { 5e-6, 209e9 } },
        },
        fp32 = {
            { ranks = 2, least = 35e-6, { 9e-6, 225e9 }, { 24e-6, 251e9 } },
            { ranks = 4, least = 60e-6, { 8e-6, 276e9 } },
        },
    },
    all_reduce_max = { fp32 = { { ranks = 2, least = 35e-6, { 35e-6, 100e9 } } } },
}

-- Share of a second that compute loses while such work runs beside it: fitted to the steps
-- measured. Copies take HBM and L2 from products; NCCL's sums take SMs, and a product whose CTAs
-- wait for one takes twice as long.
local SLOWED = { all_gather = 0.4, all_to_all = 0.4, sum = 0.65, reduce_scatter = 0.95 }

-- Bytes that cross a rank's links, in each direction. bytes: a rank's piece, which it sends to each
-- of the others in a gather or an exchange, and receives of a reduce_scatter; of an all_reduce all
-- numbers.
function M.crossing(op, bytes, ranks)
    return bytes * (ranks - 1.0) * (op == "all_reduce_max" and 2.0 / ranks or 1)
end

-- Seconds of a collective; bytes: as of crossing(). way: of all_gather and all_to_all "copy_engine"
-- (nil: this) or "kernels", of a sum the dtype of its numbers. nil: not known.
function M.collective(op, bytes, ranks, way)
    if way == "fp16" then way = "bf16" end
    local ways = NETWORK[op]
    local list = ways and ways[way or ways.copy_engine and "copy_engine" or "fp32"]
    if not list or ranks > HOST_RANKS then return nil end
    if ranks < 2 then return 0.0 end
    local by = list[1]
    for _, entry in ipairs(list) do
        if entry.ranks <= ranks then by = entry end
    end
    local seconds = math.huge
    for _, line in ipairs(by) do
        seconds = math.min(seconds, line[1] + M.crossing(op, bytes, ranks) / line[2])
    end
    return math.max(by.least, seconds)
end

-- ---- the play -----------------------------------------------------------------------------------

-- The stream of the collectives: when it is free, and what it did when.
local function new_network(ranks)
    return { ranks = ranks, free = 0.0, spans = {}, first = 1, all_gather = 0.0, reduce = 0.0 }
end

-- Work of so many seconds when the stream is free, and not before `after`. Returns its end.
local function occupy(network, what, seconds, after)
    local start = math.max(network.free, after)
    network.free = start + seconds
    network.spans[#network.spans + 1] = { start = start, finish = network.free,
        slowed = SLOWED[what] }
    return network.free
end

-- Sums of a gradient: an exchange and a kernel that adds, or the collective. Returns when dw is
-- free again.
local function reduce(network, layer, after, collective)
    local op = collective and "reduce_scatter" or "all_to_all"
    local way = collective and layer.grads or nil
    if layer.reduce == 0 then return after end
    local seconds = M.collective(op, layer.reduce, network.ranks, way)
    local free = occupy(network, op, seconds, after)
    network.reduce = network.reduce + seconds
    if not collective then
        occupy(network, "sum", layer.sum, free)
        network.reduce = network.reduce + layer.sum
    end
    return free
end

-- Runs `seconds` of compute from `now`, longer by what collectives beside it take. Returns the end.
local function compute(network, now, seconds)
    local spans, at = network.spans, network.first
    while spans[at] and spans[at].finish <= now do at = at + 1 end
    network.first = at -- compute never goes back
    while spans[at] and seconds > 0 do
        local span = spans[at]
        if span.start > now then -- alone until then
            local alone = math.min(seconds, span.start - now)
            now, seconds = now + alone, seconds - alone
        end
        local rate = 1 - span.slowed
        local beside = math.min(seconds, (span.finish - now) * rate)
        if beside > 0 then now, seconds = now + beside / rate, seconds - beside end
        at = at + 1
    end
    return now + seconds
end

local GRADS = 2 -- buffers of whole gradients

local do_event = {}

-- A gather, and behind it the pieces of turned copies laid side by side.
function do_event.gather(play, event)
    local bytes, placing, network = 0.0, 0.0, play.network
    for _, send in ipairs(event.sends) do
        local layer = play.layers[send.layer]
        bytes = bytes + (send.turned and layer.gather_turned or layer.gather)
        if send.turned then placing = placing + layer.transpose end -- moves as many bytes
    end
    local seconds = bytes > 0 and M.collective("all_gather", bytes, network.ranks) or 0.0
    local place = event.slot or -event.hooked
    play.arrived[place] = occupy(network, "all_gather", seconds, play.read[place] or 0.0)
    network.all_gather = network.all_gather + seconds
    if placing > 0 then play.arrived[place] = occupy(network, "sum", placing, network.free) end
end

-- A pass that reads what was gathered.
local function with_weight(play, event, seconds)
    local layer, place = play.layers[event.layer], event.slot or -event.hooked
    play.now = math.max(play.now, play.arrived[place])
    if event.transposes then play.now = compute(play.network, play.now, layer.transpose) end
    play.now = compute(play.network, play.now, seconds)
    play.read[place] = play.now
end

function do_event.fprop(play, event) with_weight(play, event, play.layers[event.layer].fprop) end
function do_event.dgrad(play, event) with_weight(play, event, play.layers[event.layer].dgrad) end

function do_event.grads(play, event)
    local layer = play.layers[event.layer]
    play.now = compute(play.network, math.max(play.now, play.free[play.grad]),
        layer.quantize_dy + layer.wgrad)
end

function do_event.reduce(play, event)
    play.free[play.grad] = reduce(play.network, play.layers[event.layer], play.now, play.collective)
    play.grad = play.grad % GRADS + 1
end

-- A step of `ranks`: layers in forward order, each { group, turned, hooked (of schedule.lua);
-- gather, gather_turned, reduce (bytes of a rank's piece); grads (dtype); fprop, quantize_dy,
-- wgrad, dgrad, transpose, sum, weight, rows (seconds, the last two of quantising w and a rank's
-- rows of it); amaxes }. options: keep (weights are gathered once, for forward
-- and backward), collective (gradients are summed by it, not exchanged and added). Returns seconds:
-- { alone (the same compute with whole weights), step, exposed, all_gather, reduce, update_alone,
-- update (quantising all weights, or this rank's rows with the amaxes of all) }, or nil: not known.
function M.step(layers, ranks, options)
    local alone, update, rows, amaxes = 0.0, 0.0, 0.0, 0
    for _, layer in ipairs(layers) do
        alone = alone + layer.fprop + layer.quantize_dy + layer.wgrad + layer.dgrad
        update, rows = update + layer.weight, rows + layer.rows
        amaxes = amaxes + layer.amaxes
    end
    local agreed = M.collective("all_reduce_max", 4.0 * amaxes, ranks)
    if not agreed then return nil end
    if amaxes == 0 then agreed = 0.0 end
    local play = { layers = layers, network = new_network(ranks), collective = options.collective,
        now = 0.0, arrived = {}, read = {}, free = { 0.0, 0.0 }, grad = 1 }
    local step = alone
    if ranks > 1 then
        for _, event in ipairs(schedule.step(layers, options.keep)) do
            do_event[event.op](play, event)
        end
        step = math.max(play.now, play.network.free)
    end
    return {
        alone = alone, step = step, exposed = step - alone,
        all_gather = play.network.all_gather, reduce = play.network.reduce,
        update_alone = update, update = rows + agreed,
    }
end

-- ---- a model ------------------------------------------------------------------------------------

-- step() of a model's layers, each with `count` and maybe `gather_group` in place of `group`.
function M.model(layers, ranks, options)
    local list, share = schedule.instances(layers)
    local seconds = M.step(list, ranks, options)
    if share == 1.0 or not seconds then return seconds end
    local alone = 0.0
    for _, layer in ipairs(layers) do
        alone = alone + layer.count * (layer.fprop + layer.quantize_dy + layer.wgrad + layer.dgrad)
    end
    local factor = alone / seconds.alone
    for name, value in pairs(seconds) do seconds[name] = factor * value end
    return seconds
end

return M
