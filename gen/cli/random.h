/*
 * random.h - seeded normal data for run and bench.
 */
#ifndef FP8GEN_CLI_RANDOM_H
#define FP8GEN_CLI_RANDOM_H

#include "gen/cli/cli.h"

/* Fills `count` elements of bf16 or fp32 with normal data of mean 0 and the given sigma. Element i
 * depends only on (seed, stream, i): the same on every machine and with every number of threads. */
void cli_random_fill(void *target, fp8_dtype dtype, int64_t count, double sigma, uint64_t seed,
                     uint64_t stream);
/* Element `at` = value, a finite one, rounded to the dtype: bf16, fp16 or fp32. */
void cli_store(void *data, fp8_dtype dtype, int64_t at, float value);
uint64_t cli_random_word(uint64_t seed, uint64_t stream, uint64_t counter);

#endif
