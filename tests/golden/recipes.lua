-- Every recipe once, with options, a bias and both weights; one layer in bf16.
return model "recipes" {
    tokens = 40, max_tokens = 60, bias = true,
    recipe = recipe.block {},
    layers = {
        linear "block" { in_features = 264, out_features = 136, weight = "fp32" },
        linear "delayed" {
            in_features = 264, out_features = 136,
            recipe = recipe.delayed {
                format = "e4m3", history_length = 16, algo = "most_recent", margin = 1,
                calibrate = true, power_of_two = true,
            },
        },
        linear "rowwise" {
            in_features = 264, out_features = 136, recipe = recipe.rowwise { power_of_two = false },
        },
        linear "hp_wgrad" {
            in_features = 264, out_features = 136, recipe = recipe.rowwise_hp_wgrad {},
        },
        linear "bf16" { in_features = 264, out_features = 136, compute = "bf16" },
    },
}
