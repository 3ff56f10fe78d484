return model "m"
