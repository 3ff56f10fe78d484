-- C21: an FP8 tensor without a scale.
return model "m" {
    layers = {
        linear "a" { in_features = 16, out_features = 16, output = "fp8", grad_input = "e5m2" },
        linear "b" { in_features = 16, out_features = 16, grad_weight = "e4m3", weight = "fp16" },
        linear "d" { in_features = 16, out_features = 16, output = "half" },
        linear "c" { in_features = 16, out_features = 16, output = "bfloat16" },
    },
}
