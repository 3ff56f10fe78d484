-- Every field away from its default, over two layers that share kernels.
return model "options" {
    tokens = 8192,
    max_tokens = 16384,
    layers = {
        linear "up" {
            in_features = 2048, out_features = 2556, count = 3,
            weight = "fp32", output = "fp32", grad_input = "fp32", grad_weight = "bf16",
            recipe = recipe.current { format = "e4m3", power_of_two = true },
            accumulation = { fprop = "split", dgrad = "fast", wgrad = "fast" },
        },
        linear "down" { in_features = 2556, out_features = 2048, tokens = 100 },
    },
}
