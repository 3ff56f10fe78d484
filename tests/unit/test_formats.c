/*
 * test_formats.c - the codecs of fp8_format.h against two independent oracles.
 *
 * The first is tests/oracle/format_tables.h (numpy and ml_dtypes). The second is in this file: a
 * search over all codes for the nearest value, on values made with ldexp and compared with
 * midpoints that are exact in double, ties to the even code. Both get all 65,536 bf16 inputs at
 * every scale of the table and float32 inputs around every value, tie and limit.
 */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "runtime/fp8_format.h"
#include "tests/oracle/format_tables.h"
#include "tests/unit/crc.h"

static float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* ---- the oracle by search ---- */

struct format {
    const char *name;
    int mantissa_bits, bias;
    int finite; /* codes 0 .. finite are finite */
    bool has_infinity;
    uint8_t (*encode)(float x, float scale);
    float (*decode)(uint8_t code);
    const uint32_t *decoded, *bf16, *fp32, *fp32_inputs;
    int fp32_count;
};

static const struct format formats[2] = {
    { "e4m3", 3, 7, 0x7E, false, fp8_encode_e4m3, fp8_decode_e4m3, table_decode_e4m3,
      table_bf16_e4m3, table_fp32_e4m3, table_fp32_inputs_e4m3, TABLE_FP32_INPUTS_E4M3 },
    { "e5m2", 2, 15, 0x7B, true, fp8_encode_e5m2, fp8_decode_e5m2, table_decode_e5m2,
      table_bf16_e5m2, table_fp32_e5m2, table_fp32_inputs_e5m2, TABLE_FP32_INPUTS_E5M2 },
};

/* Value of a positive code by the definition of the format. */
static double value_of(const struct format *format, int code)
{
    int exponent = code >> format->mantissa_bits;
    int mantissa = code & ((1 << format->mantissa_bits) - 1);
    if (exponent == 0)
        return ldexp(mantissa, 1 - format->bias - format->mantissa_bits);
    return ldexp(mantissa + (1 << format->mantissa_bits),
                 exponent - format->bias - format->mantissa_bits);
}

static uint8_t search(const struct format *format, float x, float scale)
{
    if (isnan(x))
        return 0x7F;
    uint8_t sign = signbit(x) ? 0x80 : 0;
    if (isinf(x))
        return format->has_infinity ? (uint8_t)(0x7C | sign) : 0x7F;
    volatile float product = x * scale;
    double size = fabs((double)product);
    int code = 0;
    while (code < format->finite) {
        double middle = (value_of(format, code) + value_of(format, code + 1)) / 2;
        if (size < middle || (size == middle && code % 2 == 0))
            break;
        code++;
    }
    return (uint8_t)(code | sign);
}

static void check_one(const struct format *format, float x, float scale)
{
    uint8_t got = format->encode(x, scale), want = search(format, x, scale);
    if (got != want)
        fail_msg("%s: cast(%a * %a) is 0x%02X, nearest is 0x%02X", format->name, (double)x,
                 (double)scale, got, want);
}

/* ---- tests ---- */

static void decodes_all_codes(void **state)
{
    (void)state;
    for (int f = 0; f < 2; f++) {
        const struct format *format = &formats[f];
        for (int code = 0; code < 256; code++) {
            float got = format->decode((uint8_t)code);
            float want = from_bits(format->decoded[code]);
            if (isnan(want)) {
                assert_true(isnan(got));
                continue;
            }
            assert_int_equal(to_bits(got), format->decoded[code]);
            if ((code & 0x7F) <= format->finite) {
                double exact = value_of(format, code & 0x7F);
                assert_true((double)got == (code & 0x80 ? -exact : exact));
                assert_int_equal(format->encode(got, 1.0f), code);
            }
        }
    }
}

/* Values, ties and their neighbours, made here from value_of. */
static int ties_of(const struct format *format, float *x, int room)
{
    int count = 0;
    for (int code = 0; code <= format->finite + 1; code++) {
        double value = code <= format->finite
                           ? value_of(format, code)
                           : 2 * value_of(format, code - 1) - value_of(format, code - 2);
        double before = code == 0 ? 0 : value_of(format, code - 1);
        for (int part = code == 0; part < 2; part++) {
            uint32_t bits = to_bits((float)(part == 1 ? value : (before + value) / 2));
            for (int64_t step = -2; step <= 2; step++) {
                if ((int64_t)bits + step < 0)
                    continue;
                assert_true(count < room);
                x[count++] = from_bits((uint32_t)(bits + step));
            }
        }
    }
    static const uint32_t odd[] = { 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF,
                                    0x7F7FFFFF, 0x7F7FFFFE, 0x00000001, 0x007FFFFF,
                                    0x00800000, 0x4E6E6B28, 0x461C4000, 0x3F800000 };
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++)
        x[count++] = from_bits(odd[i]);
    for (int i = 0; i < count; i++)
        x[count + i] = from_bits(to_bits(x[i]) | 0x80000000u);
    return 2 * count;
}

static void casts_float32_around_every_tie(void **state)
{
    (void)state;
    static float x[8192];
    static uint8_t codes[8192];
    for (int f = 0; f < 2; f++) {
        const struct format *format = &formats[f];
        int count = ties_of(format, x, 4000);
        assert_int_equal(count, format->fp32_count);
        assert_int_equal(crc32_of(x, (size_t)count * sizeof *x), format->fp32_inputs[0]);
        for (int s = 0; s < TABLE_SCALES; s++) {
            float scale = from_bits(table_scales[s]);
            for (int i = 0; i < count; i++) {
                codes[i] = format->encode(x[i], scale);
                check_one(format, x[i], scale);
                /* the same tie reached through the scale */
                float moved = x[i] / scale;
                if (isfinite(moved) && isfinite(x[i]))
                    check_one(format, moved, scale);
            }
            assert_int_equal(crc32_of(codes, (size_t)count), format->fp32[s]);
        }
    }
}

static void casts_all_bf16(void **state)
{
    (void)state;
    static uint8_t codes[65536];
    for (int f = 0; f < 2; f++) {
        const struct format *format = &formats[f];
        for (int s = 0; s < TABLE_SCALES; s++) {
            float scale = from_bits(table_scales[s]);
            for (int half = 0; half < 65536; half++) {
                float x = fp8_bf16_to_float((uint16_t)half);
                assert_int_equal(to_bits(x), (uint32_t)half << 16);
                codes[half] = format->encode(x, scale);
                check_one(format, x, scale);
            }
            for (int block = 0; block < TABLE_BF16_BLOCKS; block++) {
                uint32_t crc = crc32_of(codes + block * 4096, 4096);
                if (crc != format->bf16[s * TABLE_BF16_BLOCKS + block])
                    fail_msg("%s, scale %a: inputs 0x%04X..0x%04X differ from ml_dtypes",
                             format->name, (double)scale, block * 4096, block * 4096 + 4095);
            }
        }
    }
}

static void casts_random_float32(void **state)
{
    (void)state;
    uint64_t seed = 0x9E3779B97F4A7C15u;
    for (int i = 0; i < 200000; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        float x = from_bits((uint32_t)(seed >> 32));
        float scale = from_bits((uint32_t)(seed >> 5) & 0x7FFFFFFFu);
        if (!isfinite(scale) || scale == 0.0f)
            scale = 1.0f;
        check_one(&formats[0], x, scale);
        check_one(&formats[1], x, scale);
    }
}

/* The inputs that were met in the wild, with the codes written out. */
static void casts_listed_limits(void **state)
{
    (void)state;
    static const struct {
        int format;
        float x;
        uint8_t code;
    } rows[] = {
        { 0, 448.0f, 0x7E },    { 0, 464.0f, 0x7E },    { 0, 465.0f, 0x7E },
        { 0, 480.0f, 0x7E },    { 0, 1e9f, 0x7E },      { 0, -1e9f, 0xFE },
        { 0, INFINITY, 0x7F },  { 0, -INFINITY, 0x7F }, { 0, NAN, 0x7F },
        { 0, 0x1p-9f, 0x01 },   { 0, 0x1p-10f, 0x00 },  { 0, 0x1.000002p-10f, 0x01 },
        { 0, -0x1p-10f, 0x80 }, { 0, 0x1.8p-9f, 0x02 }, { 0, 0.0f, 0x00 },
        { 0, -0.0f, 0x80 },     { 1, 57344.0f, 0x7B },  { 1, 61439.0f, 0x7B },
        { 1, 61440.0f, 0x7B },  { 1, 65536.0f, 0x7B },  { 1, -65536.0f, 0xFB },
        { 1, INFINITY, 0x7C },  { 1, -INFINITY, 0xFC }, { 1, NAN, 0x7F },
        { 1, 0x1p-16f, 0x01 },  { 1, 0x1p-17f, 0x00 },  { 1, 0x1.000002p-17f, 0x01 },
        { 1, FLT_MAX, 0x7B },   { 0, FLT_MAX, 0x7E },   { 0, FLT_TRUE_MIN, 0x00 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        assert_int_equal(formats[rows[i].format].encode(rows[i].x, 1.0f), rows[i].code);
    /* judged on x, not on the product */
    assert_int_equal(fp8_encode_e4m3(2.0f, FLT_MAX), 0x7E);
    assert_int_equal(fp8_encode_e5m2(-2.0f, FLT_MAX), 0xFB);
    assert_int_equal(fp8_encode_e5m2(from_bits(0xFFC00000), 1.0f), 0x7F);
    assert_int_equal(fp8_encode_e4m3(from_bits(0xFFC00000), 1.0f), 0x7F);
}

static void rounds_float32_to_bf16(void **state)
{
    (void)state;
    uint16_t *halves = malloc(TABLE_BF16_WALK * sizeof *halves);
    assert_non_null(halves);
    size_t count = 0;
    for (uint32_t i = 0; i < TABLE_BF16_WALK; i++) {
        float value = from_bits(i * 2654435761u);
        uint16_t half = fp8_float_to_bf16(value);
        if (isnan(value))
            assert_true(isnan(fp8_bf16_to_float(half)));
        else
            halves[count++] = half;
    }
    assert_int_equal(crc32_of(halves, count * sizeof *halves), table_bf16_rounding[0]);
    free(halves);
    assert_true(isnan(fp8_bf16_to_float(fp8_float_to_bf16(from_bits(0x7F800001)))));
    assert_true(isnan(fp8_bf16_to_float(fp8_float_to_bf16(from_bits(0xFFFFFFFF)))));
}

/* bf16 neighbours of a double, by comparison with exact midpoints. */
static void rounds_double_to_bf16_once(void **state)
{
    (void)state;
    for (uint32_t half = 0; half < 0x7F7F; half++) {
        double low = (double)from_bits(half << 16), high = (double)from_bits((half + 1) << 16);
        double middle = (low + high) / 2;
        uint16_t even = (uint16_t)(half % 2 == 0 ? half : half + 1);
        assert_int_equal(fp8_double_to_bf16(middle), even);
        assert_int_equal(fp8_double_to_bf16(-middle), even | 0x8000);
        assert_int_equal(fp8_double_to_bf16(nextafter(middle, 0)), half);
        assert_int_equal(fp8_double_to_bf16(nextafter(middle, INFINITY)), half + 1);
        assert_int_equal(fp8_double_to_bf16(-nextafter(middle, INFINITY)), (half + 1) | 0x8000);
        assert_int_equal(fp8_double_to_bf16(high), half + 1);
    }
    double limit = 0x1.FFp127; /* the tie between the largest bf16 and infinity */
    assert_int_equal(fp8_double_to_bf16(nextafter(limit, 0)), 0x7F7F);
    assert_int_equal(fp8_double_to_bf16(limit), 0x7F80);
    assert_int_equal(fp8_double_to_bf16(DBL_MAX), 0x7F80);
    assert_int_equal(fp8_double_to_bf16(-INFINITY), 0xFF80);
    assert_int_equal(fp8_double_to_bf16(-0.0), 0x8000);
    assert_int_equal(fp8_double_to_bf16(5e-324), 0x0000);
    assert_true(isnan(fp8_bf16_to_float(fp8_double_to_bf16(NAN))));
}

/* Every fp16 comes back; between neighbours the nearer is taken, at the midpoint the even one. */
static void rounds_to_fp16_once(void **state)
{
    (void)state;
    assert_float_equal(fp8_fp16_to_float(0x3C00), 1.0f, 0);
    assert_float_equal(fp8_fp16_to_float(0x7BFF), 65504.0f, 0);
    assert_float_equal(fp8_fp16_to_float(0x0001), 0x1p-24f, 0);
    assert_float_equal(fp8_fp16_to_float(0x83FF), -0x3FFp-24f, 0);
    for (uint32_t half = 0; half < 0x7C00; half++) {
        float low = fp8_fp16_to_float((uint16_t)half);
        double high = half == 0x7BFF ? 65536.0 : (double)fp8_fp16_to_float((uint16_t)(half + 1));
        double middle = ((double)low + high) / 2;
        uint32_t even = half + (half & 1);
        assert_int_equal(fp8_float_to_fp16(low), half);
        assert_int_equal(fp8_float_to_fp16(-low), half | 0x8000);
        assert_int_equal(fp8_float_to_fp16((float)middle), even);
        assert_int_equal(fp8_float_to_fp16(nextafterf((float)middle, 0)), half);
        assert_int_equal(fp8_float_to_fp16(nextafterf((float)middle, INFINITY)), half + 1);
        assert_int_equal(fp8_double_to_fp16(middle), even);
        assert_int_equal(fp8_double_to_fp16(-middle), even | 0x8000);
        assert_int_equal(fp8_double_to_fp16(nextafter(middle, 0)), half);
        assert_int_equal(fp8_double_to_fp16(nextafter(middle, INFINITY)), half + 1);
    }
    assert_int_equal(fp8_float_to_fp16(FLT_MAX), 0x7C00);
    assert_int_equal(fp8_double_to_fp16(-DBL_MAX), 0xFC00);
    assert_int_equal(fp8_double_to_fp16(5e-324), 0x0000);
    assert_int_equal(fp8_double_to_fp16(-0.0), 0x8000);
    assert_true(isinf(fp8_fp16_to_float(0xFC00)) && fp8_fp16_to_float(0xFC00) < 0);
    assert_true(isnan(fp8_fp16_to_float(0x7C01)) && isnan(fp8_fp16_to_float(0xFFFF)));
    assert_true(isnan(fp8_fp16_to_float(fp8_float_to_fp16(from_bits(0x7F800001)))));
    assert_true(isnan(fp8_fp16_to_float(fp8_double_to_fp16(NAN))));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decodes_all_codes),
        cmocka_unit_test(casts_float32_around_every_tie),
        cmocka_unit_test(casts_all_bf16),
        cmocka_unit_test(casts_random_float32),
        cmocka_unit_test(casts_listed_limits),
        cmocka_unit_test(rounds_float32_to_bf16),
        cmocka_unit_test(rounds_double_to_bf16_once),
        cmocka_unit_test(rounds_to_fp16_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
