-- What has no effect in bf16, and accumulations that a recipe leaves no choice for.
return model "m" {
    compute = "bf16", weight = "fp32",
    accumulation = { fprop = "fast", wgrad = "split" },
    layers = {
        linear "a" { in_features = 16, out_features = 16, recipe = recipe.delayed {} },
        linear "b" { in_features = 16, out_features = 16, compute = "fp8",
            recipe = recipe.block { power_of_two = false }, accumulation = { dgrad = "fast" } },
        linear "c" { in_features = 16, out_features = 16, compute = "fp8",
            recipe = recipe.rowwise_hp_wgrad {}, accumulation = { fprop = "fast", wgrad = "fast" } },
        linear "d" { in_features = 16, out_features = 16, compute = "fp16" },
        linear "e" { in_features = 16, out_features = 16, compute = "bf61" },
    },
}
