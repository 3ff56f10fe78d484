-- A recipe that no layer follows.
return model "m" {
    recipe = recipe.block {},
    layers = {
        linear "a" { in_features = 16, out_features = 16, compute = "bf16" },
        linear "b" { in_features = 16, out_features = 16, compute = "bf16" },
    },
}
