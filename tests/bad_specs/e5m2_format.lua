-- C21: E5M2 x E5M2 is refused when the spec is read.
return model "m" {
    recipe = recipe.current { format = "e5m2" },
    layers = { linear "a" { in_features = 16, out_features = 16 } },
}
