-- A loop gives the same error many times: it is shown once and names its layers.
local layers = {}
for i = 1, 40 do
    layers[i] = linear("block" .. i) { in_features = 4096, out_features = 16 - 16, bia = true }
end
return model "m" { layers = layers }
