local layers = {}
for i = 1, 5000 do
    layers[i] = linear("l" .. i) { in_features = 16, out_features = 16 }
end
return model "m" { layers = layers }
