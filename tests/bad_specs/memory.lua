local t = {}
for i = 1, 1e9 do
    t[i] = "some text of a layer " .. i
end
