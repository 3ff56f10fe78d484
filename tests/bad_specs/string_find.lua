return model(string.find("abc", "b")) {}
