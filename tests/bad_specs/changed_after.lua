local a = linear "a" { in_features = 16, out_features = 16 }
a.out_features = 32
return model "m" { layers = { a } }
