return model "m" {
    tokens = 128,
}
