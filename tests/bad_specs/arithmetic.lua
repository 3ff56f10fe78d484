local hidden = { 4096 }
return model "m" {
    layers = { linear "a" { in_features = hidden * 2, out_features = 16 } },
}
