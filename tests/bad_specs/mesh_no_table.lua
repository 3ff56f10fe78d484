return model "m" {
    mesh = 8,
    layers = { linear "a" { in_features = 16, out_features = 16, accumulation = "fast" } },
}
