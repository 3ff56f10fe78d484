local hidden = 4096
print(hidden)
return model "m" {}
