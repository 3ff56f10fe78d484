return model "m" { layers = {
    linear "a" { in_features = 8, out_features = 8, recipe = recipe.current { format = recipe.current {} } },
    linear "b" { in_features = 8, out_features = 8, recipe = recipe.current { format = recipe.current { format = "x" } } },
    linear "c" { in_features = 8, out_features = 8, ["a\nb"] = 1, ["\x74\111kens"] = 0, [ [[back\slash]] ] = 2 },
    linear "d" { in_features = 8, out_features = 0 }, linear "d" { in_features = 0, out_features = 8 },
    linear "\u{65}" { in_features = 8, out_features = "\z
        8" },
} }
