-- Every rank's rows of w keep a scale of their own: the ranks agree on nothing before weights are
-- gathered.
return model "shard_scale" {
  mesh = { fsdp = 3 },
  tokens = 96,
  recipe = recipe.current { weight_scale = "shard" },
  layers = {
    linear "up"   { in_features = 300,  out_features = 1100, bias = true }, -- 384, 384 and 332 rows
    linear "down" { in_features = 1100, out_features = 300 },               -- 128, 128 and 44
    linear "head" { in_features = 300,  out_features = 130 },               -- 128, 2 and none
  },
}
