-- “these” and 'ü' are fine here
return model "ü" { layers = {
    linear “a” { in_features = 8, out_features = 8 },
} }
