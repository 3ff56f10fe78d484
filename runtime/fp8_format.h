/*
 * fp8_format.h - number formats and scale arithmetic on the CPU, bit for bit as NUMERICS section 2.
 *
 * In: float32 or bf16 values, a scale. Out: E4M3 and E5M2 bytes, bf16 halves, scales. Pure
 * functions on values; no memory, no state, no knowledge of tensors. Everything that must agree
 * with the kernels to the last bit is here once, branch-free where a loop has to vectorise.
 *
 * Whether an element is finite is judged on x, not on x * scale: a finite x whose product overflows
 * saturates, an infinite x does not. Code that includes this is compiled with -ffp-contract=off and
 * runs in the default floating-point environment (round to nearest, subnormals kept).
 */
#ifndef FP8_FORMAT_H
#define FP8_FORMAT_H

#include <float.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define FP8_E4M3_MAXIMUM 448.0f
#define FP8_E5M2_MAXIMUM 57344.0f

static inline uint32_t fp8_bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float fp8_float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- bf16 ---- */

static inline float fp8_bf16_to_float(uint16_t half)
{
    return fp8_float_of_bits((uint32_t)half << 16);
}

/* Round to nearest even; a NaN keeps its sign and upper payload and stays a NaN. */
static inline uint16_t fp8_float_to_bf16(float value)
{
    uint32_t bits = fp8_bits_of_float(value);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x0040u;
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

/* A float that the rounding to 16 bits takes where it would take the double: one rounded to odd has
 * enough spare bits that the second step is the only rounding. */
static inline float fp8_double_to_odd(double value)
{
    float near = (float)value;
    double back = (double)near;
    if (back == value || value != value)
        return near;
    uint32_t bits = fp8_bits_of_float(near);
    bool away = value < 0 ? back < value : back > value;
    return fp8_float_of_bits((bits - (away ? 1u : 0u)) | 1u);
}

static inline uint16_t fp8_double_to_bf16(double value)
{
    return fp8_float_to_bf16(fp8_double_to_odd(value));
}

/* ---- fp16 ---- */

static inline float fp8_fp16_to_float(uint16_t half)
{
    uint32_t size = half & 0x7FFFu;
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    float value = fp8_float_of_bits(size << 13) * 0x1p112f;
    uint32_t bits = size >= 0x7C00u ? 0x7F800000u | size << 13 : fp8_bits_of_float(value);
    return fp8_float_of_bits(bits | sign);
}

/* Round to nearest even, beyond 65504 to infinity; a NaN keeps its sign and stays a NaN. */
static inline uint16_t fp8_float_to_fp16(float value)
{
    uint32_t bits = fp8_bits_of_float(value);
    uint32_t size = bits & 0x7FFFFFFFu, sign = bits >> 16 & 0x8000u;
    if (size > 0x7F800000u)
        return (uint16_t)(sign | 0x7E00u);
    if (size >= 0x477FF000u) /* halfway from 65504 to 65536 */
        return (uint16_t)(sign | 0x7C00u);
    if (size < 0x38800000u) { /* below 2^-14: whole steps of 2^-24 */
        float steps = fp8_float_of_bits(size) + 0x1p-1f;
        return (uint16_t)(sign | (fp8_bits_of_float(steps) - 0x3F000000u));
    }
    return (uint16_t)(sign | ((size - 0x38000000u + 0xFFFu + (size >> 13 & 1u)) >> 13));
}

static inline uint16_t fp8_double_to_fp16(double value)
{
    return fp8_float_to_fp16(fp8_double_to_odd(value));
}

/* ---- FP8 ---- */

/* All ones where the condition holds: selections by mask keep loops free of branches. */
static inline uint32_t fp8_mask(bool condition)
{
    return 0u - (uint32_t)condition;
}

static inline uint32_t fp8_select(uint32_t mask, uint32_t where_set, uint32_t elsewhere)
{
    return (where_set & mask) | (elsewhere & ~mask);
}

/* What distinguishes the two formats for the encoder. */
struct fp8_encoding {
    uint32_t mantissa_bits;
    uint32_t rebias;   /* difference of the exponent biases, in the target's exponent field */
    uint32_t infinity; /* code of +inf; 0x7F where the format has none */
    float maximum;
    float magic; /* 2^23 subnormal steps: adding it rounds a subnormal to whole steps */
};

static const struct fp8_encoding fp8_encoding_e4m3 = { 3u, 120u << 3, 0x7Fu, FP8_E4M3_MAXIMUM,
                                                       0x1p14f };
static const struct fp8_encoding fp8_encoding_e5m2 = { 2u, 112u << 2, 0x7Cu, FP8_E5M2_MAXIMUM,
                                                       0x1p7f };

/* Code of product = x * scale for a finite x, the bits of which are x_bits. */
static inline uint32_t fp8_encode_finite(uint32_t x_bits, float product, struct fp8_encoding to)
{
    uint32_t shift = 23u - to.mantissa_bits;
    uint32_t size = fp8_bits_of_float(product) & 0x7FFFFFFFu;
    uint32_t limit = fp8_bits_of_float(to.maximum);
    size = size < limit ? size : limit;

    uint32_t half = (1u << (shift - 1u)) - 1u + ((size >> shift) & 1u);
    uint32_t normal = ((size + half) >> shift) - to.rebias;
    uint32_t tiny =
        fp8_bits_of_float(fp8_float_of_bits(size) + to.magic) - fp8_bits_of_float(to.magic);
    uint32_t smallest_normal = (to.rebias + (1u << to.mantissa_bits)) << shift;
    uint32_t code = fp8_select(fp8_mask(size < smallest_normal), tiny, normal);
    return code | ((x_bits >> 24) & 0x80u);
}

static inline bool fp8_is_finite(uint32_t x_bits)
{
    return (x_bits & 0x7FFFFFFFu) < 0x7F800000u;
}

static inline uint8_t fp8_encode_product(uint32_t x_bits, float product, struct fp8_encoding to)
{
    if (fp8_is_finite(x_bits))
        return (uint8_t)fp8_encode_finite(x_bits, product, to);
    /* a NaN, and an infinity where the format has none, is 0x7F without a sign */
    bool is_infinity = (x_bits & 0x7FFFFFFFu) == 0x7F800000u;
    if (!is_infinity || to.infinity == 0x7Fu)
        return 0x7Fu;
    return (uint8_t)(to.infinity | ((x_bits >> 24) & 0x80u));
}

/* cast(x * scale). scale is finite and positive. */
static inline uint8_t fp8_encode_e4m3(float x, float scale)
{
    const struct fp8_encoding e4m3 = { 3u, 120u << 3, 0x7Fu, FP8_E4M3_MAXIMUM, 0x1p14f };
    return fp8_encode_product(fp8_bits_of_float(x), x * scale, e4m3);
}

static inline uint8_t fp8_encode_e5m2(float x, float scale)
{
    const struct fp8_encoding e5m2 = { 2u, 112u << 2, 0x7Cu, FP8_E5M2_MAXIMUM, 0x1p7f };
    return fp8_encode_product(fp8_bits_of_float(x), x * scale, e5m2);
}

static inline float fp8_decode_e4m3(uint8_t code)
{
    uint32_t size = code & 0x7Fu;
    uint32_t sign = (uint32_t)(code & 0x80u) << 24;
    float value = fp8_float_of_bits(size << 20) * 0x1p120f;
    uint32_t bits = size == 0x7Fu ? 0x7FC00000u : fp8_bits_of_float(value);
    return fp8_float_of_bits(bits | sign);
}

static inline float fp8_decode_e5m2(uint8_t code)
{
    uint32_t size = code & 0x7Fu;
    uint32_t sign = (uint32_t)(code & 0x80u) << 24;
    float value = fp8_float_of_bits(size << 21) * 0x1p112f;
    uint32_t bits = size > 0x7Cu    ? 0x7FC00000u
                    : size == 0x7Cu ? 0x7F800000u
                                    : fp8_bits_of_float(value);
    return fp8_float_of_bits(bits | sign);
}

/* ---- scales ---- */

/* maximum / amax; 1 for amax = 0, FLT_MAX where the quotient overflows, then rounded down to a
 * power of two if asked. amax is finite and not negative. */
static inline float fp8_scale_of_amax(float amax, float maximum, bool power_of_two)
{
    if (amax == 0.0f)
        return 1.0f;
    float scale = maximum / amax;
    if (scale > FLT_MAX)
        scale = FLT_MAX;
    if (power_of_two)
        scale = fp8_float_of_bits(fp8_bits_of_float(scale) & 0xFF800000u);
    return scale;
}

static inline float fp8_scale_inverse(float scale)
{
    return 1.0f / scale;
}

#endif
