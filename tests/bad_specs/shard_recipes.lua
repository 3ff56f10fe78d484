-- Recipes whose weights ranks do not share.
return model "m" {
    mesh = { fsdp = 4 },
    recipe = recipe.rowwise {},
    layers = {
        linear "a" { in_features = 16, out_features = 16 },
        linear "b" { in_features = 16, out_features = 16, recipe = recipe.rowwise_hp_wgrad {} },
        linear "d" { in_features = 16, out_features = 16, recipe = recipe.block {} },
        linear "e" { in_features = 16, out_features = 16, recipe = recipe.delayed {} },
        linear "f" { in_features = 16, out_features = 16, compute = "bf16" },
    },
}
