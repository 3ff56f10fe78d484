return model "amaxes" {
    recipe = recipe.delayed { amax_group = "fsdp" },
    layers = {
        linear "a" { in_features = 16, out_features = 16 },
        linear "b" { in_features = 16, out_features = 16, recipe = recipe.delayed { amax_group = "tensor" } },
        linear "c" { in_features = 16, out_features = 16, recipe = recipe.delayed { amax_group = "world" } },
        linear "d" { in_features = 16, out_features = 16, recipe = recipe.current { amax_group = "fsdp" } },
        linear "e" { in_features = 16, out_features = 16, compute = "bf16" },
    },
}
