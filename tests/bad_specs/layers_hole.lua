local layers = {}
layers[1] = linear "a" { in_features = 16, out_features = 16 }
layers[3] = linear "b" { in_features = 16, out_features = 16 }
return model "m" { layers = layers }
