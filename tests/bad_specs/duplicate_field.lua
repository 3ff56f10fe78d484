return model "m" {
    layers = {
        linear "a" { in_features = 16, out_features = 16, ["in_features"] = 32 },
    },
    recipe = recipe.current { format = "e4m3", format = "hybrid" },
}
