return model "m" { layers = 5 }
