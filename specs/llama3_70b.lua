-- Llama-3 70B: the linear layers of all 80 blocks and the output head.
--
-- Numbers: config.json of meta-llama/Meta-Llama-3-70B: hidden_size 8192, intermediate_size 28672,
-- num_attention_heads 64, num_key_value_heads 8, num_hidden_layers 80, vocab_size 128256, no
-- biases.
-- The lesson: tokens and max_tokens. Kernels are chosen for M = tokens but serve any M up to
-- max_tokens without a new build; the default of max_tokens is tokens. The gate and up projections
-- stand apart here: frameworks that keep two weights run the same shape twice a block.

local hidden, ffn, vocab, blocks = 8192, 28672, 128256, 80
local heads, kv_heads = 64, 8
local head = hidden // heads
local qkv = (heads + 2 * kv_heads) * head

return model "llama3_70b" {
    tokens = 8192,
    max_tokens = 16384,
    recipe = recipe.current { format = "hybrid" },
    layers = {
        linear "qkv"  { in_features = hidden, out_features = qkv, count = blocks },
        linear "o"    { in_features = heads * head, out_features = hidden, count = blocks },
        linear "gate" { in_features = hidden, out_features = ffn, count = blocks },
        linear "up"   { in_features = hidden, out_features = ffn, count = blocks },
        linear "down" { in_features = ffn, out_features = hidden, count = blocks },
        -- The logits of all 8192 tokens are 2 GiB of bf16: a head is usually run in slices.
        linear "head" { in_features = hidden, out_features = vocab,
            tokens = 2048, max_tokens = 4096 },
    },
}
