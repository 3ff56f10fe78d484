-- Qwen3-8B: the linear layers of all 36 blocks and the output head.
--
-- Numbers: config.json of Qwen/Qwen3-8B: hidden_size 4096, intermediate_size 12288,
-- num_attention_heads 32, num_key_value_heads 8, head_dim 128, num_hidden_layers 36, vocab_size
-- 151936, attention_bias false, tie_word_embeddings false (so the head has a weight of its own).
-- The first lesson: a spec is a small program. A function makes the layers of a block; names that
-- code makes are as good as literal ones, and errors in such layers name them.
-- The second: recipe.delayed takes the scale from the amaxes of earlier steps, so a tensor is read
-- once: 4 bytes an element instead of 6. It costs a state (three numbers and a history for each of
-- x, w and dy of each layer), which rolls once an optimizer step. 1024 steps with `max` ride out a
-- spike; margin = 1 would leave twice the room for what no step has seen yet.

local hidden, ffn, vocab, blocks = 4096, 12288, 151936, 36
local heads, kv_heads, head = 32, 8, 128

local layers = {}

local function add(name, in_features, out_features, count)
    table.insert(layers, linear(name) {
        in_features = in_features, out_features = out_features, count = count,
    })
end

add("q", hidden, heads * head, blocks)
add("k", hidden, kv_heads * head, blocks)
add("v", hidden, kv_heads * head, blocks)
add("o", heads * head, hidden, blocks)
add("gate_up", hidden, 2 * ffn, blocks)
add("down", ffn, hidden, blocks)
add("head", hidden, vocab, 1)

return model "qwen3_8b" {
    tokens = 8192,
    recipe = recipe.delayed { history_length = 1024, algo = "max" },
    layers = layers,
}
