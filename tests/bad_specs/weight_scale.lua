return model "scales" {
    recipe = recipe.current { weight_scale = "shard" },
    layers = {
        linear "a" { in_features = 16, out_features = 16 },
        linear "b" { in_features = 16, out_features = 16, recipe = recipe.current { weight_scale = "row" } },
        linear "c" { in_features = 16, out_features = 16, recipe = recipe.current { weight_scale = "rank" } },
        linear "d" { in_features = 16, out_features = 16, recipe = recipe.delayed { weight_scale = "shard" } },
        linear "e" { in_features = 16, out_features = 16, recipe = recipe.block { weight_scale = "shard" } },
        linear "f" { in_features = 16, out_features = 16, compute = "bf16" },
    },
}
