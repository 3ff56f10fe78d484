return model "m" { layers = {} }
