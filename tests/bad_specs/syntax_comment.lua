# a comment of another language
return model "m" {}
