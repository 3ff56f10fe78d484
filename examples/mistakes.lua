-- Three mistakes, for a look at what `fp8gen check` says about them.
return model "mistakes" {
  tokens = 8192,
  layers = {
    linear "up"   { in_features = 4096, out_features = 14336, bais = true },
    linear "down" { in_features = 14336, out_features = 0,
                    recipe = recipe.current { format = "hybird" } },
  },
}
