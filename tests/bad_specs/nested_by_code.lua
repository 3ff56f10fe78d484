local acc = { fprop = "slow" }
local mesh = { tensor = 2 }
return model "m" {
    mesh = mesh,
    layers = { linear "a" { in_features = 16, out_features = 16, accumulation = acc } },
}
