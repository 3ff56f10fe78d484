local first = model "first" {
    layers = { linear "a" { in_features = 8, out_features = 8 } },
}
return model "second" {
    layers = { linear "a" { in_features = 8, out_features = 8 } },
}
