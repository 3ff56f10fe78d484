/*
 * plan.h - what the files of `fp8gen plan` share: looking into the plan's JSON, and the part about ranks.
 */
#ifndef FP8GEN_CLI_PLAN_H
#define FP8GEN_CLI_PLAN_H

#include <jansson.h>

#include "gen/cli/cli.h"

/* A member of an object; "?" or 0 where there is none. */
const char *plan_text(const json_t *object, const char *key);
int64_t plan_integer(const json_t *object, const char *key);
double plan_number(const json_t *object, const char *key);
/* The object of that name in a list, or NULL. */
const json_t *plan_find(const json_t *list, const char *name);

/* ---- plan_ranks.c --------------------------------------------------------------------------------- */

/* Who holds what of a layer's weight; rank -1: in general. Nothing for one rank. */
void plan_print_shards(const json_t *layer, int64_t ranks, int64_t rank);
/* The collectives of a step, and what they add to it. */
void plan_print_collectives(const json_t *plan);
void plan_print_step(const json_t *predicted, int64_t ranks);
/* Puts a rank and its rows into the plan. Returns an exit code. */
int plan_choose_rank(json_t *plan, int64_t rank);
/* --world: prints a row for each mesh of `world` GPUs and of its divisors. Returns an exit code. */
int plan_compare(const struct cli_spec *spec, int64_t world, bool json);

#endif
