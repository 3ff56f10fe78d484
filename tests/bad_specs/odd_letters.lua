return model "m" { layers = { linear "a" { in_features = 8, out_features = 8,
     tökens=5 } } }
