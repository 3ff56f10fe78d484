local a = linear "a" { in_features = 8, out_features = 8 }
local b = linear "b" { in_features = 8, out_features = 8 }
linear "c" { in_features = 8, out_features = 8 }
linear "d"
for i = 1, 2 do
    linear("e" .. i) { in_features = 8, out_features = 8 }
end
return model "m" { layers = { a } }
