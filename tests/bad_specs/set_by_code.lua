-- The text does not show which value is wrong: the constructor is shown.
local fields = {}
fields.in_features = 16
fields.out_features = "wide"
fields.colour = "red"
local L = linear
return model "m" {
    layers = { linear "a" (fields), L "b" (fields) },
}
