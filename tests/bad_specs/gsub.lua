local name = ("layer-1"):gsub("-", "_")
return model "m" {}
