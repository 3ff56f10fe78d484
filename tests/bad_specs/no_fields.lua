return model "m" {
    layers = { linear "a" (), linear "b" (nil), linear "c" ({}, {}), linear "d" (linear "e" {}) },
}
