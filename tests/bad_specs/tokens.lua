return model "m" {
    max_tokens = 4096,
    layers = {
        linear "too_many" { in_features = 16, out_features = 16, tokens = 5000 },
        linear "default" { in_features = 16, out_features = 16 },
        linear "fits" { in_features = 16, out_features = 16, tokens = 100 },
        linear "own" { in_features = 16, out_features = 16, tokens = 100, max_tokens = 99 },
    },
}
