return model "m" {
    layers = {
        linear "two words" { in_features = 16, out_features = 16 },
        linear "" { in_features = 16, out_features = 16 },
        linear "../../etc/passwd" { in_features = 16, out_features = 16 },
        linear(7) { in_features = 16, out_features = 16 },
        linear "a_name_of_more_than_sixty_four_characters_is_too_long_for_a_symbol" {
            in_features = 16, out_features = 16,
        },
        linear "größe" { in_features = "größer", out_features = 16 },
    },
}
