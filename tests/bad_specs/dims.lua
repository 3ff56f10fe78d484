-- C21: dims that are zero, negative, fractional or too large.
return model "m" {
    layers = {
        linear "zero" { in_features = 0, out_features = 0 },
        linear "negative" { in_features = -16, out_features = -1 },
        linear "fraction" { in_features = 11008 / 3, out_features = 16 },
        linear "huge" { in_features = 1 << 40, out_features = 2 ^ 70 },
        linear "not_a_number" { in_features = 0 / 0, out_features = math.huge },
        linear "text" { in_features = "4096", out_features = "many" },
        linear "other" { in_features = {}, out_features = true, count = 0, tokens = 0 },
    },
}
