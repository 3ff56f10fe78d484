return model "m" {
    tokens = 128
    layers = { linear "a" { in_features = 16, out_features = 16 } },
}
