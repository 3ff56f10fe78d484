/*
 * bench_host.h - the parts of `fp8gen bench host`: passes, a framework beside them, the start of a
 * model.
 */
#ifndef FP8GEN_CLI_BENCH_HOST_H
#define FP8GEN_CLI_BENCH_HOST_H

#include "gen/cli/bench_layer.h"

/* How often a call on this shape is timed: the GPU has to do all of them. */
int bench_host_calls(const struct bench_shape *shape);

/* Microseconds of a framework's bf16 linear on each shape of the bench, and its name; false after a
 * note that says why there are none. */
bool bench_framework(const struct bench *bench, double *microseconds, char *name, size_t size);

/* Rows of the cold and the warm start of the model of a spec file, and of a look-up of its
 * layers. */
int bench_start(struct bench *bench, const char *spec);

#endif
