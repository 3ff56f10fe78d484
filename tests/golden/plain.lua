-- The defaults, with a bias and dims that are multiples of nothing.
return model "plain" {
    tokens = 50,
    max_tokens = 300,
    bias = true,
    layers = {
        linear "odd" { in_features = 712, out_features = 1000 },
    },
}
