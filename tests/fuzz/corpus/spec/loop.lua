local l = {} for i = 1, 3 do l[i] = linear("a" .. i) { in_features = i, out_features = 16, accumulation = { wgrad = "fast" } } end return model "m" { layers = l, mesh = { tensor = 1 } }
