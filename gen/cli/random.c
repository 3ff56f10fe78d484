/*
 * random.c - fast, seeded, counter-based normal data.
 *
 * A 64-bit mix of (seed, stream, counter) gives four 16-bit indices into a table of 65,536
 * quantiles of the normal distribution (largest 4.2 sigma). That is as fine as bf16 can show, needs
 * no logarithm for each number, and element i never depends on another, so that all cores fill at
 * once. fp32 data interpolates between neighbours of the table with further bits, so that all
 * mantissa bits are used.
 */
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "gen/cli/random.h"

#define TABLE 65536
#define CHUNK 65536 /* elements of one parallel step; a multiple of 4 */

static double quantiles[TABLE];
static pthread_once_t quantiles_once = PTHREAD_ONCE_INIT;

/* Newton's method on the distribution function, each start from its neighbour's solution. */
static void make_quantiles(void)
{
    double x = 0;
    for (int i = TABLE / 2; i < TABLE; i++) {
        double tail = 1 - (i + 0.5) / TABLE;
        for (int step = 0; step < 6; step++) {
            double error = 0.5 * erfc(x / sqrt(2)) - tail;
            x += error / (exp(-0.5 * x * x) / sqrt(2 * 3.14159265358979323846));
        }
        quantiles[i] = x;
        quantiles[TABLE - 1 - i] = -x;
    }
}

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t cli_random_word(uint64_t seed, uint64_t stream, uint64_t counter)
{
    uint64_t key = mix(seed + 0x9e3779b97f4a7c15u) ^ mix(mix(stream + 0x632be59bd9b4e019u));
    return mix(key + (counter + 1) * 0x9e3779b97f4a7c15u);
}

static uint16_t round_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static uint16_t round_fp16(float value)
{
    int exponent;
    float magnitude = fabsf(value);
    (void)frexpf(magnitude, &exponent);
    exponent =
        exponent - 1 > -14 ? exponent - 1 : -14; /* of the binade; the subnormals' is the last */
    int units = (int)rintf(ldexpf(magnitude, 10 - exponent));
    int code = ((exponent + 14) << 10) + units;
    return (uint16_t)((code < 0x7bff ? code : 0x7bff) | (value < 0 ? 0x8000 : 0));
}

void cli_store(void *data, fp8_dtype dtype, int64_t at, float value)
{
    if (dtype == FP8_DTYPE_FP32)
        ((float *)data)[at] = value;
    else
        ((uint16_t *)data)[at] = dtype == FP8_DTYPE_FP16 ? round_fp16(value) : round_bf16(value);
}

struct fill {
    void *target;
    fp8_dtype dtype;
    int64_t count;
    double sigma;
    uint64_t key;
    uint16_t halves[TABLE]; /* the quantiles as bf16 or fp16 */
};

static void fill_halves(const struct fill *fill, int64_t first, int64_t end)
{
    uint16_t *target = fill->target;
    int64_t i = first;
    for (; i + 4 <= end; i += 4) {
        uint64_t word = mix(fill->key + (uint64_t)(i / 4 + 1) * 0x9e3779b97f4a7c15u);
        target[i] = fill->halves[word & 0xffff];
        target[i + 1] = fill->halves[word >> 16 & 0xffff];
        target[i + 2] = fill->halves[word >> 32 & 0xffff];
        target[i + 3] = fill->halves[word >> 48];
    }
    uint64_t word = mix(fill->key + (uint64_t)(i / 4 + 1) * 0x9e3779b97f4a7c15u);
    for (; i < end; i++, word >>= 16)
        target[i] = fill->halves[word & 0xffff];
}

static void fill_fp32(const struct fill *fill, int64_t first, int64_t end)
{
    float *target = fill->target;
    for (int64_t i = first; i < end; i++) {
        uint64_t word = mix(fill->key + (uint64_t)(i + 1) * 0x9e3779b97f4a7c15u);
        uint32_t index = (uint32_t)word & 0xffff;
        uint32_t next = index + 1 < TABLE ? index + 1 : index;
        double fraction = (double)(word >> 32) * 0x1p-32;
        double value = quantiles[index] + (quantiles[next] - quantiles[index]) * fraction;
        target[i] = (float)(value * fill->sigma);
    }
}

static void fill_chunk(void *user, int64_t index)
{
    const struct fill *fill = user;
    int64_t first = index * CHUNK;
    int64_t end = first + CHUNK < fill->count ? first + CHUNK : fill->count;
    if (fill->dtype != FP8_DTYPE_FP32)
        fill_halves(fill, first, end);
    else
        fill_fp32(fill, first, end);
}

void cli_random_fill(void *target, fp8_dtype dtype, int64_t count, double sigma, uint64_t seed,
                     uint64_t stream)
{
    struct fill fill = { .target = target, .dtype = dtype, .count = count, .sigma = sigma };
    pthread_once(&quantiles_once, make_quantiles);
    fill.key = cli_random_word(seed, stream, 0);
    for (int i = 0; i < TABLE; i++)
        fill.halves[i] = dtype == FP8_DTYPE_FP16 ? round_fp16((float)(quantiles[i] * sigma))
                                                 : round_bf16((float)(quantiles[i] * sigma));
    cli_parallel((count + CHUNK - 1) / CHUNK, fill_chunk, &fill);
}
