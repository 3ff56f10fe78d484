-- InternLM2-7B: the linear layers of all 32 blocks and the output head.
--
-- Numbers: config.json of internlm/internlm2-7b: hidden_size 4096, intermediate_size 14336,
-- num_attention_heads 32, num_key_value_heads 8, num_hidden_layers 32, vocab_size 92544, bias
-- false. InternLM names them wqkv, wo, w1 (gate), w3 (up), w2 (down) and output.
-- The lesson: values of the model are defaults of its layers. main_grad of the blocks is fp32 (the
-- default); the output layer asks for a bf16 dw, which halves the largest gradient of the model.

local hidden, ffn, vocab, blocks = 4096, 14336, 92544, 32
local heads, kv_heads = 32, 8
local head = hidden // heads
local qkv = (heads + 2 * kv_heads) * head

return model "internlm2_7b" {
    tokens = 4096,
    max_tokens = 8192,
    grad_weight = "fp32",
    layers = {
        linear "wqkv" { in_features = hidden, out_features = qkv, count = blocks },
        linear "wo"   { in_features = heads * head, out_features = hidden, count = blocks },
        linear "w1"   { in_features = hidden, out_features = ffn, count = blocks },
        linear "w3"   { in_features = hidden, out_features = ffn, count = blocks },
        linear "w2"   { in_features = ffn, out_features = hidden, count = blocks },
        linear "output" { in_features = hidden, out_features = vocab, grad_weight = "bf16" },
    },
}
