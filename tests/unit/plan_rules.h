/*
 * plan_rules.h - plans of one layer, and what every plan must be by runtime/bundle_format.h.
 */
#ifndef TESTS_UNIT_PLAN_RULES_H
#define TESTS_UNIT_PLAN_RULES_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "gen/internal.h"
#include "runtime/bundle_format.h"

/* A session with a model of one layer, "a", of these fields. */
fp8gen *open_fields(const char *fields);
const char *plan_text(fp8gen *gen);
/* The plan of such a model. The caller frees it. */
json_t *plan_of(const char *fields);
json_t *first_layer(json_t *plan);
/* The object of that name in an array; NULL if there is none. */
json_t *named(const json_t *list, const char *name);
/* Members that must be there. */
const char *string_of(const json_t *object, const char *key);
json_int_t integer_of(const json_t *object, const char *key);
/* Fails where the plan breaks a rule of the format. */
void check_plan(const json_t *plan);

#endif
