-- Weights over three ranks: a scale for each shard, a gather group, uneven and empty shards.
return model "shards" {
    tokens = 40,
    mesh = { fsdp = 3 },
    shard = { backward = "keep", reduce = "sum" },
    recipe = recipe.current { weight_scale = "shard" },
    layers = {
        linear "uneven" { in_features = 264, out_features = 300, bias = true, gather_group = "g" },
        linear "empty" { in_features = 136, out_features = 130, gather_group = "g" },
        linear "tensor" { in_features = 264, out_features = 136, recipe = recipe.current {} },
    },
}
