return model "m" {
    layers = {
        qkv = linear "a" { in_features = 16, out_features = 16 },
        linear "b" { in_features = 16, out_features = 16 },
        "c",
        model "d" { layers = {} },
        recipe.current {},
        linear,
        4096,
    },
}
