-- A small model with awkward dims: vocabulary 2556, odd features, biases, every option used once.
--
-- Numbers: made up, except 2556: a vocabulary that is no multiple of 16, as FP8 GEMMs want it, nor
-- of 8. Runs in seconds on the host, so it is the spec to try things with: `fp8gen run`.
-- The lesson: any dims work. Caller's tensors stay as they are, exact and unpadded; only our FP8
-- copies are padded. Each layer below shows one more field.

local hidden, ffn, vocab = 512, 1365, 2556 -- 1365 = 8/3 of 512, as gated networks have it

return model "debug_vocab2556" {
    tokens = 384,
    max_tokens = 1024,
    bias = true, -- for all layers that do not say otherwise
    layers = {
        linear "qkv" { in_features = hidden, out_features = 3 * hidden, count = 4 },
        linear "o" { in_features = hidden, out_features = hidden, count = 4,
            recipe = recipe.current { power_of_two = true } },
        linear "up" { in_features = hidden, out_features = ffn, count = 4,
            recipe = recipe.current { format = "e4m3" } },
        -- K = 1365 after an activation that is seldom negative: sums drift, so split in fprop too.
        linear "down" { in_features = ffn, out_features = hidden, count = 4,
            accumulation = { fprop = "split" } },
        -- A master weight in fp32, fp32 logits for the loss, and dw in the weight's half size.
        linear "head" { in_features = hidden, out_features = vocab, bias = false,
            weight = "fp32", output = "fp32", grad_input = "fp32", grad_weight = "bf16" },
        -- One feature in, one out: the smallest layer there is.
        linear "gate" { in_features = 1, out_features = 1, tokens = 17,
            recipe = recipe.current { format = "e4m3", power_of_two = true },
            accumulation = { fprop = "fast", dgrad = "fast", wgrad = "fast" } },
    },
}
