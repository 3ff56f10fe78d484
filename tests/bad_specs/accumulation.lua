return model "m" {
    accumulation = { fprop = 128, dgrad = "Split", forward = "fast" },
    layers = { linear "a" { in_features = 16, out_features = 16, accumulation = { wgrad = 3 } } },
}
