return model "m" {
	layers = {
		linear "a" {	in_features = 1.5, out_features = 16 } } }