/*
 * plan.h - looking into a plan's JSON, for every command, and what the files of `fp8gen plan`
 * share.
 */
#ifndef FP8GEN_CLI_PLAN_H
#define FP8GEN_CLI_PLAN_H

#include <jansson.h>

#include "gen/cli/cli.h"

/* ---- plan_read.c ----------------------------------------------------------------------------- */

/* The plan of the loaded spec, for the caller to decref; NULL after an error was printed, with its
 * exit code. path: what the spec is called in messages. */
json_t *plan_read(fp8gen *gen, const char *path, int *code);
/* A member of an object; "?" or 0 where there is none. */
const char *plan_text(const json_t *object, const char *key);
int64_t plan_integer(const json_t *object, const char *key);
double plan_number(const json_t *object, const char *key);
/* The object of that name in a list, or NULL. */
json_t *plan_find(const json_t *list, const char *name);
/* The step of a pass that multiplies, or NULL. */
json_t *plan_gemm_step(const json_t *layer, const char *pass);
/* Whether the layer computes in bf16: it has no recipe, and shares no FP8 bytes. */
bool plan_is_bf16(const json_t *layer);
/* Says that none of the layers has that name, and which one is near. Returns CLI_USAGE. */
int plan_unknown_layer(const json_t *layers, const char *wanted);

/* ---- plan_ranks.c ---------------------------------------------------------------------------- */

/* Who holds what of a layer's weight; rank -1: in general. Nothing for one rank. */
void plan_print_shards(const json_t *layer, int64_t ranks, int64_t rank);
/* The collectives of a step, and what they add to it. */
void plan_print_collectives(const json_t *plan);
void plan_print_step(const json_t *predicted, int64_t ranks);
/* The same of one layer, which is all that is in the plan: what is exposed is not known of it. */
void plan_print_carried(const json_t *plan);
/* Puts a rank and its rows into the plan. Returns an exit code. */
int plan_choose_rank(json_t *plan, int64_t rank);
/* --world: prints a row for each mesh of `world` GPUs and of its divisors. Returns an exit code. */
int plan_compare(const struct cli_spec *spec, int64_t world, bool json);

#endif
