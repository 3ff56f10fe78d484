-- Weights that ranks share have recipe current.
return model "m" {
    mesh = { fsdp = 4 },
    recipe = recipe.block {},
    layers = {
        linear "a" { in_features = 16, out_features = 16 },
        linear "b" { in_features = 16, out_features = 16, recipe = recipe.rowwise {} },
        linear "c" { in_features = 16, out_features = 16, compute = "bf16" },
        linear "d" { in_features = 16, out_features = 16, recipe = recipe.current {} },
    },
}
