return model "m" { layers = { linear "a" { in_features = "\z
  16", out_features = [[16]], ["bias"] = true; count = 0x10 } } }