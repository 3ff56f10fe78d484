return { layers = {} }
