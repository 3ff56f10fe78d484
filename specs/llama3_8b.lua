-- Llama-3 8B: the linear layers of all 32 blocks and the output head.
--
-- Numbers: config.json of meta-llama/Meta-Llama-3-8B: hidden_size 4096, intermediate_size 14336,
-- num_attention_heads 32, num_key_value_heads 8, num_hidden_layers 32, vocab_size 128256, no
-- biases.
-- The lesson: a spec lists shapes, not modules. Each distinct shape is one layer with a count;
-- fused projections (q, k, v; gate, up) are one layer with the sum of their features, since one
-- larger GEMM reads and quantises x once.

local hidden, ffn, vocab, blocks = 4096, 14336, 128256, 32
local heads, kv_heads = 32, 8
local head = hidden // heads -- 128: // keeps whole numbers whole
local qkv = (heads + 2 * kv_heads) * head

return model "llama3_8b" {
    tokens = 8192, -- one sequence of 8192
    recipe = recipe.current { format = "hybrid" },
    layers = {
        linear "qkv"     { in_features = hidden, out_features = qkv, count = blocks },
        linear "o"       { in_features = heads * head, out_features = hidden, count = blocks },
        linear "gate_up" { in_features = hidden, out_features = 2 * ffn, count = blocks },
        linear "down"    { in_features = ffn, out_features = hidden, count = blocks },
        linear "head"    { in_features = hidden, out_features = vocab },
    },
}
