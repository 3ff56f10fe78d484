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
    if recipe == "rowwise" or recipe == "rowwise_hp_wgrad" then
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
    local bytes, recipe = shard.payload(layer, ranks, format, "fprop"), layer.recipe.name
    if layer.compute == "bf16" or recipe ~= "rowwise" and recipe ~= "rowwise_hp_wgrad" then
        return bytes
    end
    return bytes + shard.payload(layer, ranks, format, "dgrad")
end

-- Bytes that each rank receives of the sum of a layer's gradients: dw and dbias of its rows.
function shard.gradient(layer, ranks)
    local rows = shard.chunk(layer.out_features, ranks, shard.multiple(layer.recipe))
    local size = layer.grad_weight == "fp32" and 4 or 2
    return rows * layer.in_features * size + (layer.bias and rows * 4 or 0)
end

-- Neighbours with one group's name are gathered together: lists of indices, in order.
local function gather_groups(layers)
    local groups = {}
    for i, layer in ipairs(layers) do
        local name, before = layer.gather_group, layers[i - 1]
        if name and before and before.gather_group == name then
            table.insert(groups[#groups], i)
        else
            groups[#groups + 1] = { i }
        end
    end
    return groups
end

-- The collectives of one step over the fsdp axis, in order: a list of { op, pass, layers,
-- bytes_a_rank, dtype }: of a rank's piece, which it sends of a gather and receives of a sum (of a
-- maximum all ranks have all numbers); layers are indices. Nothing in it depends on the rank:
-- chunks are equal, and an empty shard sends pads.
function shard.collectives(model, format)
    local list, layers, ranks = {}, model.layers, model.mesh.fsdp
    local groups = gather_groups(layers)
    if ranks == 1 then return list end
    local function add(op, pass, indices, bytes, dtype)
        list[#list + 1] = {
            op = op,
            pass = pass,
            layers = indices,
            bytes_a_rank = bytes,
            dtype = dtype,
        }
    end
    local function gather(pass, group)
        local bytes = 0
        for _, i in ipairs(group) do
            bytes = bytes + shard.payload(layers[i], ranks, format, pass)
        end
        local dtype = #group == 1 and layers[group[1]].compute == "bf16" and "bf16" or "uint8"
        add("all_gather", pass, table.move(group, 1, #group, 1, {}), bytes, dtype)
    end
    local function reduce(i)
        local layer = layers[i]
        add("reduce_scatter", "wgrad", { i }, shard.gradient(layer, ranks), layer.grad_weight)
    end
    local amaxes, with_amax = 0, {}
    for i, layer in ipairs(layers) do
        local count = shard.amaxes(layer)
        if count > 0 then with_amax[#with_amax + 1] = i end
        amaxes = amaxes + count
    end
    if amaxes > 0 then add("all_reduce_max", "weight", with_amax, amaxes * 4, "fp32") end
    for _, group in ipairs(groups) do gather("fprop", group) end
    for g = #groups, 1, -1 do
        if model.shard.backward == "gather" then gather("dgrad", groups[g]) end
        for at = #groups[g], 1, -1 do reduce(groups[g][at]) end
    end
    local histories = {} -- x, w and dy of each
    for i, layer in ipairs(layers) do
        if layer.compute ~= "bf16" and layer.recipe.amax_group == "fsdp" then
            histories[#histories + 1] = i
        end
    end
    if #histories > 0 then
        add("all_reduce_max", "advance", histories, #histories * 3 * 4, "fp32")
    end
    return list
end

return shard
