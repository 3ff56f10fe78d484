-- Ranks: what stands where, and values that are not there.
return model "m" {
    fsdp = 4,
    mesh = { fsdp = 5000, data = 2 },
    shard = { backward = "regather", reduce = "max", dtype = "bf16" },
    layers = {
        linear "a" { in_features = 16, out_features = 16, fsdp = 2, gather_group = "block 1" },
        linear "b" { in_features = 16, out_features = 16, gather_group = 3 },
        linear "c" { in_features = 16, out_features = 16, shard = { reduce = "sum" } },
    },
}
