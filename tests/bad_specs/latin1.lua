-- café
return model "café" { layers = {} }
