-- shard.lua - who holds what when layers are spread over ranks, and which collectives follow.
--
-- In: numbers (a dim, how many ranks, which rank), a mesh { tensor =, fsdp = }, a layer's shapes
-- and what its spec says under `shard`. Out: parts { first, count } of a dim, rectangles of the
-- weight, pieces of element ranges, and the list of collectives of one training step, in the order
-- in which every rank issues them. Pure arithmetic on whole numbers: it chooses nothing and prints
-- nothing; the runtime reads the chunks from the manifest.
--
-- Not obvious: all chunks of a dim have the same size, ceil(n / ranks) cut up to a multiple, so
-- that one collective of equal sends serves every dim; what is missing at the end is padding of the
-- last ranks, which may hold a short part or none. The tensor axis is the inner one: neighbours in
-- it are neighbours in rank.

local schedule = require "schedule"

local shard = {}

local function ceil_div(a, b) return (a + b - 1) // b end
local function roundup(a, b) return ceil_div(a, b) * b end

-- ---- one dim -----------------------------------------------------------------------------------

-- Elements of every rank's chunk, the pads among them. multiple: cuts fall on its multiples.
function shard.chunk(n, ranks, multiple) return roundup(ceil_div(n, ranks), multiple or 1) end

-- What `rank` (from 0) holds of 0..n-1: its first element and how many; an empty part starts at n.
function shard.part(n, ranks, rank, multiple)
    local chunk = shard.chunk(n, ranks, multiple)
    local first = math.min(n, rank * chunk)
    return first, math.min(n, first + chunk) - first
end

-- ---- ranks in a mesh ---------------------------------------------------------------------------

-- Axes from the inner to the outer one.
shard.axes = { "tensor", "fsdp" }

function shard.ranks(mesh)
    local count = 1
    for _, axis in ipairs(shard.axes) do count = count * mesh[axis] end
    return count
end

-- { tensor =, fsdp = }: where a rank stands along each axis.
function shard.coordinates(mesh, rank)
    local at = {}
    for _, axis in ipairs(shard.axes) do
        at[axis] = rank % mesh[axis]
        rank = rank // mesh[axis]
    end
    return at
end

function shard.rank_at(mesh, at)
    local rank, stride = 0, 1
    for _, axis in ipairs(shard.axes) do
        rank = rank + at[axis] * stride
        stride = stride * mesh[axis]
    end
    return rank
end

-- The ranks that share all coordinates but that of `axis` with `rank`, in the order of that axis.
function shard.group(mesh, axis, rank)
    local at, list = shard.coordinates(mesh, rank), {}
    for i = 0, mesh[axis] - 1 do
        at[axis] = i
        list[i + 1] = shard.rank_at(mesh, at)
    end
    return list
end

-- ---- the weight --------------------------------------------------------------------------------

-- The rectangle of w[N,K] that a rank keeps: { first_row, rows, first_col, cols }. `tensor` says
-- along which features the tensor axis cuts: "column" (out_features), "row" (in_features) or nil;
-- fsdp cuts the rows of what is left.
function shard.weight(layer, mesh, rank, multiple)
    local at = shard.coordinates(mesh, rank)
    local first_row, rows, first_col, cols = 0, layer.out_features, 0, layer.in_features
    if layer.tensor == "column" then
        first_row, rows = shard.part(rows, mesh.tensor, at.tensor, multiple)
    elseif layer.tensor == "row" then
        first_col, cols = shard.part(cols, mesh.tensor, at.tensor, multiple)
    end
    local inner, count = shard.part(rows, mesh.fsdp, at.fsdp, multiple)
    return { first_row = first_row + inner, rows = count, first_col = first_col, cols = cols }
end

-- ---- element ranges ----------------------------------------------------------------------------

-- The elements [first, first + count) of a row-major tensor with so many columns, as rectangles
-- { row, col, rows, cols }: the end of a row, whole rows, the beginning of one; at most three.
function shard.pieces(first, count, cols)
    local list = {}
    local function add(rows, width)
        list[#list + 1] = { row = first // cols, col = first % cols, rows = rows, cols = width }
        first, count = first + rows * width, count - rows * width
    end
    if first % cols > 0 and count > 0 then add(1, math.min(count, cols - first % cols)) end
    if count >= cols then add(count // cols, cols) end
    if count > 0 then add(1, count) end
    return list
end

-- ---- collectives -------------------------------------------------------------------------------

-- Cuts of w fall on multiples of this: where a scale belongs to a block of rows, or is applied to
-- one, on the block's.
function shard.multiple(recipe)
    return (recipe.name == "block" or recipe.weight_scale == "shard") and 128 or 1
end

-- Numbers of fp32 that the ranks' maximum is taken of before w is cast: one a tensor; where the
-- transposed copy has a scale a row, one for each column of w; none where no scale crosses a cut.
function shard.amaxes(layer)
    local recipe = layer.recipe.name
    if layer.compute == "bf16" or recipe == "block" or layer.recipe.weight_scale == "shard" then
        return 0
    elseif recipe == "rowwise" then
        return layer.in_features
    end
    return 1 -- also the tensor scale of rowwise_hp_wgrad's transposed copy
end

-- Whether w's two copies have scales of their own, so that each is gathered for its pass.
local function is_turned(layer)
    local recipe = layer.recipe.name
    return layer.compute ~= "bf16" and (recipe == "rowwise" or recipe == "rowwise_hp_wgrad")
end

-- Bytes of a chunk of w's transposed copy: [K][rows] behind its scales.
local function transposed_payload(layer, chunk, format)
    local k, scales = roundup(layer.in_features, 16), 0
    if layer.recipe.name == "rowwise" then scales = roundup(k * 4, format.part_align) end
    return format.part_align + scales
        + roundup(k * roundup(chunk, format.pad_ld), format.part_align)
end

-- Bytes that each rank sends of a layer for a pass: a piece with its scales, its chunk of rows,
-- padded to the FP8 copy's leading dim, and with rows that have scales of their own those; its
-- chunk of the bias in bf16. Where rows have scales of their own, dgrad gathers the transposed copy
-- instead. The whole weight as bf16 where the layer computes in it.
function shard.payload(layer, ranks, format, pass)
    local recipe, k = layer.recipe.name, layer.in_features
    local chunk = shard.chunk(layer.out_features, ranks, shard.multiple(layer.recipe))
    local bias = layer.bias and chunk * 2 or 0
    if layer.compute == "bf16" then return chunk * k * 2 + bias end
    local scales = format.part_align -- float32[16], to the next part
    if is_turned(layer) then
        if pass == "dgrad" then return transposed_payload(layer, chunk, format) end
        scales = scales + chunk * 4
    elseif layer.recipe.weight_scale == "shard" then
        scales = scales + chunk * 4 -- one for each row
    elseif recipe == "block" then
        local tiles = chunk // 128 * roundup(ceil_div(k, 128), 4) * 4
        scales = scales + roundup(tiles, format.part_align)
    end
    return roundup(scales + chunk * roundup(k, format.pad_ld), format.part_align) + bias
end

-- Bytes of w that a rank has between steps: what it sends, and with it the transposed piece where
-- dgrad gathers that.
function shard.kept(layer, ranks, format)
    local bytes = shard.payload(layer, ranks, format, "fprop")
    if not is_turned(layer) then return bytes end
    return bytes + shard.payload(layer, ranks, format, "dgrad")
end

-- Bytes that each rank receives of the sum of a layer's gradients: dw and dbias of its rows.
function shard.gradient(layer, ranks)
    local rows = shard.chunk(layer.out_features, ranks, shard.multiple(layer.recipe))
    local size = layer.grad_weight == "fp32" and 4 or 2
    return rows * layer.in_features * size + (layer.bias and rows * 4 or 0)
end

-- What schedule.lua reads of a layer. The model gathers FP8 alone: a w in bf16 is a hook's.
function shard.scheduled(layer)
    return {
        count = layer.count,
        gather_group = layer.gather_group,
        turned = is_turned(layer),
        hooked = layer.compute == "bf16",
    }
end

-- The list of a step's collectives while it is made; of equal ones the first, and how `often`.
local function new_list(model)
    local list, known, self = {}, {}, {}
    function self.add(item)
        local key = ("%s %s %s"):format(item.op, item.pass, table.concat(item.layers, " "))
        if item.op == "all_gather" then key = key .. " " .. item.bytes_a_rank end
        local first = known[key] or item
        if not known[key] then list[#list + 1], known[key] = item, item end
        first.times = (first.times or 0) + 1
    end
    -- Of more layers than were played every one is there as often again as it was not played.
    function self.finish(played)
        for _, item in ipairs(list) do
            local index = item.layers[1]
            if played[index] and item.op ~= "all_reduce_max" then
                item.times = item.times + model.layers[index].count - played[index]
            end
        end
        return list
    end
    return self
end

-- The collectives of one step over the fsdp axis, in the order in which they first come: a list of
-- { op, pass, layers, bytes_a_rank, dtype, times }: of a rank's piece, which it sends of a gather
-- and receives of a sum (of a maximum all ranks have all numbers); layers are indices; times: in
-- the whole step. Nothing in it depends on the rank: chunks are equal, an empty shard sends pads.
function shard.collectives(model, format)
    local layers, ranks, list = model.layers, model.mesh.fsdp, new_list(model)
    if ranks == 1 then return {} end
    local function maximum(pass, indices, numbers)
        if #indices == 0 then return end
        list.add { op = "all_reduce_max", pass = pass, layers = indices,
            bytes_a_rank = numbers * 4, dtype = "fp32" }
    end
    local scheduled, amaxes, with_amax = {}, 0, {}
    for i, layer in ipairs(layers) do
        local count = shard.amaxes(layer)
        if count > 0 then with_amax[#with_amax + 1] = i end
        amaxes = amaxes + count
        scheduled[i] = shard.scheduled(layer)
    end
    maximum("weight", with_amax, amaxes)
    local instances, played = schedule.instances(scheduled), {}
    for _, layer in ipairs(instances) do played[layer.index] = (played[layer.index] or 0) + 1 end
    for _, event in ipairs(schedule.step(instances, model.shard.backward == "keep")) do
        if event.op == "gather" then
            local bytes, indices = 0, {}
            for at, send in ipairs(event.sends) do
                local index = instances[send.layer].index
                indices[at] = index
                bytes = bytes + shard.payload(layers[index], ranks, format,
                    send.turned and "dgrad" or "fprop")
            end
            list.add { op = "all_gather", pass = event.pass, layers = indices,
                bytes_a_rank = bytes, dtype = event.hooked and "bf16" or "uint8" }
        elseif event.op == "reduce" then
            local index = instances[event.layer].index
            list.add { op = "reduce_scatter", pass = "wgrad", layers = { index },
                bytes_a_rank = shard.gradient(layers[index], ranks),
                dtype = layers[index].grad_weight }
        end
    end
    local histories = {} -- x, w and dy of each
    for i, layer in ipairs(layers) do
        if layer.compute ~= "bf16" and layer.recipe.amax_group == "fsdp" then
            histories[#histories + 1] = i
        end
    end
    maximum("advance", histories, #histories * 3)
    return list.finish(played)
end

return shard
