return model "m" { layers = { linear "a" { in_features = 16, out_features = 16 } } }
