return model "m {
    layers = {},
}
