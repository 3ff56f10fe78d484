-- Different errors at one place: a few are enough.
local layers = {}
for i = 1, 90 do
    layers[i] = linear("l" .. i) { in_features = -i, out_features = 16 }
end
return model "m" { layers = layers }
