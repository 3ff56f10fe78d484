return model "m" {
    tokens := 5,
}
