/*
 * plan.h - the plan of a session: the manifest as JSON and the expanded kernels.
 *
 * Made once, when first asked for, and kept by the session. build.c turns it into a bundle.
 */
#ifndef FP8GEN_PLAN_H
#define FP8GEN_PLAN_H

#include "gen/internal.h"

#include <jansson.h>

struct gen_kernel {
    const char *name;          /* "amax_bf16" */
    const char *template_name; /* "amax.cu" */
    const char *entry;         /* "fp8_amax_bf16"; of several kernels if they share a text */
    const char *unit;          /* "amax_bf16": of the text, and of what is compiled */
    const char *body;          /* what is compiled, under the template's name */
    const char *written;       /* the same with the provenance block on top */
    const json_t *archs;       /* names of those it exists for; NULL = all. The manifest's */
};

struct gen_plan {
    json_t *manifest;           /* with "cost", without cubins and digest */
    const char *json;           /* its text */
    struct gen_kernel *kernels; /* in manifest order; NULL before gen_expand_plan */
    int32_t count;
};

/* On success *plan belongs to the session. */
fp8gen_status gen_make_plan(struct fp8gen *gen, struct gen_plan **plan);
/* The same, with the kernels. */
fp8gen_status gen_expand_plan(struct fp8gen *gen, struct gen_plan **plan);

#endif
