/*
 * graph_rig.h - steps of a model as CUDA graphs, compared bit by bit with the same calls without
 * one.
 *
 * Every rank captures update, forward and backward of all layers of a bundle, in every capture
 * mode, and forward and backward alone with the update outside; each graph is launched with other
 * inputs and weights than those of the capture. The host has no graphs: there a launch is the same
 * calls again.
 */
#ifndef GRAPH_RIG_H
#define GRAPH_RIG_H

#include <pthread.h>

#include "tests/ranks/rig.h"

struct graph_case {
    const char *bundle;
    int64_t tokens;
    uint32_t keep;
    pthread_barrier_t meet; /* of all ranks */
};

void graph_body(struct rank *rank); /* rank->user is a graph_case */

#endif
