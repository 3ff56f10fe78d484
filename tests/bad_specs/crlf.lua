return model "m" {
    tokens = 128,
    layers = { linear "a" { in_features = 0, out_features = 16 } },
}
