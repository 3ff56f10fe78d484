-- What a spec writes never reaches the terminal as it is.
return model "\27[31mred\7\200" {
    ["\27[2J"] = 1,
    layers = { linear "a" { in_features = "\27]0;title\7\0", out_features = 16 } },
}
