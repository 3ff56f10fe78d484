return model "m" {
    tokns = 128,
    layers = { linear "a" { in_feature = 16, out_features = 32, sequence_parallel = true } },
}
