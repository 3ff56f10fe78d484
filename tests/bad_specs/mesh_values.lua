local ranks = 3
return model "m" {
    mesh = { tensor = ranks, fsdp = -2 },
    layers = { linear "a" { in_features = 16, out_features = 16 } },
}
