--[==[ linear "a" { in_features = "not this one" } ]==]
return model "m" { -- linear "a" { in_features = 0 }
    layers = {
        linear [[a]] { --[[ in_features = 1 ]] in_features --[[ } ]] = [==[
text]==], out_features = (function() local x, y = 1, 2; return { x, y } end)() },
        linear 'b' { out_features = 16; in_features = ("}"):rep(2), },
    },
}
