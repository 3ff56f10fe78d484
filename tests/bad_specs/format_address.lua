return model(string.format("m%p", {})) {}
