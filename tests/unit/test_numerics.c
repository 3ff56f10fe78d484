/*
 * test_numerics.c - scale arithmetic: amax -> scale -> scale_inv, bit for bit.
 *
 * Against tests/oracle/format_tables.h (numpy's float32 division; floor to a power of two by frexp)
 * for listed amaxes and a walk over all exponents, and against the borders that the rules name.
 */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "runtime/fp8_format.h"
#include "tests/oracle/format_tables.h"
#include "tests/unit/crc.h"

struct rule {
    const char *name;
    float maximum;
    bool power_of_two;
    const uint32_t *listed, *walk;
};

static const struct rule rules[4] = {
    { "e4m3", FP8_E4M3_MAXIMUM, false, table_scale_e4m3, table_walk_e4m3 },
    { "e4m3 power of two", FP8_E4M3_MAXIMUM, true, table_scale_e4m3_pow2, table_walk_e4m3_pow2 },
    { "e5m2", FP8_E5M2_MAXIMUM, false, table_scale_e5m2, table_walk_e5m2 },
    { "e5m2 power of two", FP8_E5M2_MAXIMUM, true, table_scale_e5m2_pow2, table_walk_e5m2_pow2 },
};

static void scales_of_listed_amaxes(void **state)
{
    (void)state;
    for (int r = 0; r < 4; r++) {
        const struct rule *rule = &rules[r];
        for (int i = 0; i < TABLE_AMAXES; i++) {
            float amax = fp8_float_of_bits(table_amaxes[i]);
            float scale = fp8_scale_of_amax(amax, rule->maximum, rule->power_of_two);
            float inverse = fp8_scale_inverse(scale);
            if (fp8_bits_of_float(scale) != rule->listed[2 * i] ||
                fp8_bits_of_float(inverse) != rule->listed[2 * i + 1])
                fail_msg("%s: amax %a gives scale %a, scale_inv %a; numpy says %a, %a", rule->name,
                         (double)amax, (double)scale, (double)inverse,
                         (double)fp8_float_of_bits(rule->listed[2 * i]),
                         (double)fp8_float_of_bits(rule->listed[2 * i + 1]));
        }
    }
}

static void scales_of_every_exponent(void **state)
{
    (void)state;
    static uint32_t pairs[2 * TABLE_WALK];
    for (int r = 0; r < 4; r++) {
        size_t count = 0;
        for (uint32_t i = 0; i < 255 + 8192; i++) {
            uint32_t bits =
                i < 255 ? (i << 23 | 0x123456u) : ((i - 255) * 2654435761u & 0x7FFFFFFFu);
            if (bits >= 0x7F800000u)
                continue;
            float scale =
                fp8_scale_of_amax(fp8_float_of_bits(bits), rules[r].maximum, rules[r].power_of_two);
            pairs[count++] = fp8_bits_of_float(scale);
            pairs[count++] = fp8_bits_of_float(fp8_scale_inverse(scale));
            assert_true(scale > 0 && scale <= FLT_MAX);
        }
        assert_int_equal(count, 2 * TABLE_WALK);
        assert_int_equal(crc32_of(pairs, sizeof pairs), rules[r].walk[0]);
    }
}

/* The largest amax whose scale overflows, and the largest whose scale_inv is subnormal: by
 * bisection over the bits, compared with the figures in the rules. */
static float border(float maximum, bool (*below)(float scale))
{
    uint32_t low = 1, high = 0x7F7FFFFF;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (below(fp8_scale_of_amax(fp8_float_of_bits(middle), maximum, false)))
            low = middle;
        else
            high = middle;
    }
    return fp8_float_of_bits(high);
}

static bool is_clamped(float scale)
{
    return scale == FLT_MAX;
}

static bool has_subnormal_inverse(float scale)
{
    return fp8_scale_inverse(scale) < FLT_MIN;
}

static void borders_are_where_the_rules_say(void **state)
{
    (void)state;
    assert_true(fabs(border(448.0f, is_clamped) / 1.3166e-36 - 1) < 1e-4);
    assert_true(fabs(border(57344.0f, is_clamped) / 1.6852e-34 - 1) < 1e-4);
    assert_true(fabs(border(448.0f, has_subnormal_inverse) / 5.266e-36 - 1) < 1e-3);
    assert_true(fabs(border(57344.0f, has_subnormal_inverse) / 6.741e-34 - 1) < 1e-3);
}

static void scale_of_4_28125_is_not_made_in_bf16(void **state)
{
    (void)state;
    float scale = fp8_scale_of_amax(4.28125f, 448.0f, false);
    assert_true(fabsf(scale - 104.6423f) < 1e-4f);
    assert_int_equal(fp8_bits_of_float(scale), 0x42D148E0);
    assert_true(fp8_scale_of_amax(4.28125f, 448.0f, true) == 64.0f);
}

static void zero_amax_gives_scale_one(void **state)
{
    (void)state;
    for (int r = 0; r < 4; r++)
        assert_true(fp8_scale_of_amax(0.0f, rules[r].maximum, rules[r].power_of_two) == 1.0f);
}

/* amax * scale reaches the maximum and does not saturate: the cast of the largest element is the
 * largest code, at most one exponent below after rounding down to a power of two. */
static void largest_element_takes_the_largest_code(void **state)
{
    (void)state;
    for (uint32_t bits = 0x08000000u; bits < 0x7F800000u; bits += 0x00012345u) {
        float amax = fp8_float_of_bits(bits);
        assert_int_equal(fp8_encode_e4m3(amax, fp8_scale_of_amax(amax, 448.0f, false)), 0x7E);
        assert_int_equal(fp8_encode_e5m2(-amax, fp8_scale_of_amax(amax, 57344.0f, false)), 0xFB);
        uint8_t code = fp8_encode_e4m3(amax, fp8_scale_of_amax(amax, 448.0f, true));
        assert_true(code >= 0x7E - 8 && code <= 0x7E);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scales_of_listed_amaxes),
        cmocka_unit_test(scales_of_every_exponent),
        cmocka_unit_test(borders_are_where_the_rules_say),
        cmocka_unit_test(scale_of_4_28125_is_not_made_in_bf16),
        cmocka_unit_test(zero_amax_gives_scale_one),
        cmocka_unit_test(largest_element_takes_the_largest_code),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
