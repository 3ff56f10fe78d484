/*
 * spec_target.h - what must hold for any bytes that are given as a spec.
 */
#ifndef SPEC_TARGET_H
#define SPEC_TARGET_H

#include <stddef.h>
#include <stdint.h>

/* Loads the bytes as a spec. NULL if all is well, else a sentence about what is not. */
const char *spec_target(const uint8_t *data, size_t size);

#endif
