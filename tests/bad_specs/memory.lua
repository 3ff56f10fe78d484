local t, long = {}, ("x"):rep(1000)
for i = 1, 1e9 do
    t[i] = long .. i
end
