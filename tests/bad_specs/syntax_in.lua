return model "short" { layers = { linear "a" { in = 64, out = 64 } } }
