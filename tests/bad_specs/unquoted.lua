return model "m" {
    output = bf16,
    layers = { linear "a" { in_features = 16, out_features = 16 } },
}
