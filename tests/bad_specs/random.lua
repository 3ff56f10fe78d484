return model "m" { tokens = math.random(100) }
