return model "sums" {
    mesh = { fsdp = 2 },
    recipe = recipe.current { weight_scale = "shard" },
    accumulation = { fprop = "256", dgrad = "512" },
    layers = {
        linear "a" { in_features = 16, out_features = 16 },
        linear "b" { in_features = 16, out_features = 16, accumulation = { dgrad = "fast" } },
        linear "c" { in_features = 16, out_features = 16, accumulation = { dgrad = "split" } },
    },
}
