return model "m" {
    layers = {
        linear "a" { in_features = 16, out_features = 16 },
        linear "b" { in_features = 16, out_features = 16 },
        linear "a" { in_features = 32, out_features = 16 },
    },
}
