-- Fields of other recipes, formats and margins that a recipe does not have, words from elsewhere.
return model "m" {
    recipe = recipe.delayed { margin = 7, power_of_two = true, algo = "mean" },
    layers = {
        linear "a" { in_features = 16, out_features = 16, recipe = recipe.rowwise { format = "hybrid" } },
        linear "b" { in_features = 16, out_features = 16, recipe = recipe.block { format = "e5m2" } },
        linear "c" { in_features = 16, out_features = 16,
            recipe = recipe.rowwise_hp_wgrad { margin = 1, powers_of_two = true } },
        linear "d" { in_features = 16, out_features = 16, recipe = recipe.current { calibrate = true } },
        linear "e" { in_features = 16, out_features = 16,
            recipe = recipe.delayed { margin = 7, power_of_two = true } },
        linear "f" { in_features = 16, out_features = 16,
            recipe = recipe.delayed { history_length = 0, margin = -1, history = 5 } },
        linear "g" { in_features = 16, out_features = 16, recipe = recipe.mx {} },
        linear "h" { in_features = 16, out_features = 16, recipe = recipe.row_wise {} },
    },
}
