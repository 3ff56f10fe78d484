return model "m" {
    layers = {
        linear "a" { in_features = 16 },
        linear "b" {},
    },
}
