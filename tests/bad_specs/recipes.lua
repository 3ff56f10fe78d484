-- C21: unknown, later and wrongly written recipes.
return model "m" {
    recipe = recipe.Current {},
    layers = {
        linear "a" { in_features = 16, out_features = 16, recipe = recipe.delayed { length = 4 } },
        linear "b" { in_features = 16, out_features = 16, recipe = recipe.current },
        linear "c" { in_features = 16, out_features = 16, recipe = "current" },
        linear "d" { in_features = 16, out_features = 16, recipe = recipe.current "e4m3" },
        linear "e" { in_features = 16, out_features = 16, recipe = recipe.mxfp8 {} },
        linear "f" { in_features = 16, out_features = 16,
            recipe = recipe.current { format = "Hybrid", margin = 2, power_of_two = "yes" } },
        linear "g" { in_features = 16, out_features = 16, recipe = recipe.bf16 {} },
    },
}
