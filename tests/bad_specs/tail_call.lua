local width = 99999
return string.format("%" .. width .. "d", 1)
