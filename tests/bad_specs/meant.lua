-- Words of other tools, and shorter ones: the hints name what was probably meant.
return model "meant" {
    mesh = 8,
    recipe = "block",
    layers = {
        linear "a" { in_features = 64, out_features = 64, name = "a", max = 8 },
        linear "b" { in_features = 64, out_features = 64, recipe = recipe.delayed { history = 16 } },
    },
}
