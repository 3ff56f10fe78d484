pcall(function() end)
