/*
 * bundle_rig.h - bundles for tests: made by the generator, then changed on purpose.
 *
 * A manifest is taken from a built bundle (without cubins: NVRTC is not needed), changed as JSON,
 * sealed with a fresh digest and written to a folder of its own, with cubins that only the fake
 * driver understands if a test wants an arch.
 */
#ifndef BUNDLE_RIG_H
#define BUNDLE_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "runtime/check.h"
#include "runtime/fp8_device.h"
#include "runtime/fp8_primitives.h"
#include "runtime/fp8_jit.h"
#include "tests/bundle/fake/fake.h"

/* A new, empty folder below the system's temporary one, and its end. */
char *bundle_folder(void);
void bundle_remove(char *folder);

/* The manifest of the tests' model: layers "plain" (no bias), "bias", "wide" (fp32 outputs, bf16
 * dw), "e4m3" (power of two) and "half" (fp16 outputs). gemm: what computes its products, as
 * fp8gen_override takes it. */
json_t *bundle_manifest_by(const char *gemm);
json_t *bundle_manifest(void); /* by cublaslt */
/* A model with a layer of every recipe: "delayed" (calibrated), "rowwise", "hp", "block",
 * "bf16". */
extern const char bundle_recipes[];
/* The manifest of another model. */
json_t *bundle_manifest_of(const char *text_of_spec, const char *gemm);
/* Adds an arch with made-up cubins, written below the folder. */
void bundle_add_arch(json_t *manifest, const char *folder, const char *arch);
/* Sets the digest anew. */
void bundle_seal(json_t *manifest);
void bundle_write(const json_t *manifest, const char *folder);
void bundle_write_file(const char *folder, const char *name, const void *data, size_t size);
void *bundle_read_file(const char *folder, const char *name, size_t *size);

/* A value by a path like "layers.0.buffers.3.dtype"; numbers index arrays. NULL: not there. */
json_t *bundle_at(json_t *root, const char *path);
/* Replaces (or, with value NULL, removes) what a path names. Takes the reference. */
void bundle_set(json_t *root, const char *path, json_t *value);

/* The fakes of the CUDA libraries, opened before the runtime looks for them. */
struct fake_cuda *bundle_fake_cuda(void);
struct fake_lt *bundle_fake_lt(void);
/* Lets the fakes execute kernels and products with the host backend, as this manifest describes
 * them. */
void bundle_execute(const char *manifest);

/* The context, and the name of what failed when it did. */
fp8_context *bundle_context(int32_t device);
void bundle_expect(fp8_status got, fp8_status want, const char *part, const char *file, int line);
#define EXPECT_OK(call) bundle_expect((call), FP8_OK, "", __FILE__, __LINE__)
#define EXPECT_REFUSED(status, part, call)                                                         \
    bundle_expect((call), (status), (part), __FILE__, __LINE__)

#endif
