return model "m" (5)
