return model "m" {
    layers = { liner "a" { in_features = 16, out_features = 16 } },
}
