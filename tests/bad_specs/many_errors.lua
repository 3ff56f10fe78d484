-- All errors of a spec are reported at once, in the order of the text.
local n = 3 / 2
local shape = { in_features = -4, out_features = 5 }
return model "bad name" {
    tokens = 8192, max_tokens = 4096,
    weight = "fp8",
    tokens = 5000,
    layers = {
        linear "qkv" { in_features = n, out_features = 0, bias = "false" },
        linear "qkv" (shape),
        linear("l" .. 1) { in_features = 16, out_features = -1 },
        linear "unfinished",
        5,
        linear { in_features = 16, out_features = 16 },
        linear "positional" { 4096, 5 },
    },
}
