local text = ("x"):rep(1 << 30)
return model(text) {}
