-- C21: layers are not cut along their features.
return model "m" {
    mesh = { tensor = 8, fsdp = 0, pipeline = 2, -1 },
    layers = { linear "a" { in_features = 16, out_features = 16, tensor = "column" } },
}
