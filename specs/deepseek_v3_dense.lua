-- DeepSeek-V3: the three dense blocks (attention and feed-forward) and the output head.
--
-- Numbers: config.json of deepseek-ai/DeepSeek-V3: hidden_size 7168, q_lora_rank 1536,
-- kv_lora_rank 512, num_attention_heads 128, qk_nope_head_dim 128, qk_rope_head_dim 64, v_head_dim
-- 128, intermediate_size 18432, first_k_dense_replace 3, vocab_size 129280, no biases. The experts
-- of the other 58 blocks are grouped GEMMs, which are not linear layers of one weight.
-- The first lesson: latent attention makes narrow layers (N = 576 and 1536, K = 512) beside wide
-- ones. At 576 x 7168 the time goes into reading and quantising x, not into the GEMM; see the
-- predicted times of `fp8gen plan`.
-- The second: recipe.block is how the model was trained: x and dy with a scale for each 1 x 128, w
-- for each 128 x 128, everything E4M3, sums promoted every 128. One read makes both copies, and an
-- outlier costs precision in its own 128 alone. The head stays in bf16, as it did there.

local hidden, ffn, vocab, blocks = 7168, 18432, 129280, 3
local q_rank, kv_rank, heads = 1536, 512, 128
local nope, rope, v = 128, 64, 128 -- per head: without position, with position, value

return model "deepseek_v3_dense" {
    tokens = 4096,
    recipe = recipe.block {},
    layers = {
        linear "q_a"  { in_features = hidden, out_features = q_rank, count = blocks },
        linear "q_b"  { in_features = q_rank, out_features = heads * (nope + rope),
            count = blocks },
        linear "kv_a" { in_features = hidden, out_features = kv_rank + rope, count = blocks },
        linear "kv_b" { in_features = kv_rank, out_features = heads * (nope + v), count = blocks },
        linear "o"    { in_features = heads * v, out_features = hidden, count = blocks },
        linear "gate_up" { in_features = hidden, out_features = 2 * ffn, count = blocks },
        linear "down" { in_features = ffn, out_features = hidden, count = blocks },
        linear "head" { in_features = hidden, out_features = vocab, compute = "bf16" },
    },
}
