/*
 * rig.h - what the tests of the cache share: a fake NVRTC in a process of its own, scratch caches,
 * specs.
 */
#ifndef TESTS_CACHE_RIG_H
#define TESTS_CACHE_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "gen/fp8gen.h"
#include "runtime/fp8.h"
#include "runtime/fp8_device.h"
#include "runtime/fp8_jit.h"

enum { RIG_PATH = 512 };

/* What main returns: the tests, run by this program again with the fake NVRTC in the loader's path.
 * 77: no compiler for the fake. */
int rig_main(char **argv, const char *name, const struct CMUnitTest *tests, size_t count);
#define RIG_RUN(argv, tests) rig_main(argv, #tests, tests, sizeof(tests) / sizeof(tests)[0])
/* A test in a folder of its own. */
#define RIG_TEST(name) cmocka_unit_test_setup_teardown(name, rig_begin, rig_end)

/* Setup and teardown of cmocka. A folder for one test, removed with all in it by rig_end;
 * FP8GEN_CACHE_DIR is its folder "cache". The other variables of the rig are unset. */
int rig_begin(void **state);
int rig_end(void **state);
/* "<folder of the test>/<name>": four at a time. */
const char *rig_path(const char *name);

/* Lines of the fake's log that begin with `word` ("start"), since rig_begin. */
int rig_compiled(const char *word);

/* A spec of one layer; different numbers are different specs. Static, eight at a time. */
const char *rig_spec(int number);
/* fp8gen_jit_bundle of rig_spec(number) for sm_90a; path may be NULL. */
fp8gen_status rig_jit(const fp8gen_jit_options *options, int number, char path[RIG_PATH]);
/* Opens the bundle on a host context: every file of it is compared with the manifest. */
bool rig_opens(const char *path);

/* The built-in templates as files. */
void rig_templates(const char *folder);
/* Replaces `from` by `to` in a file, once. */
void rig_edit(const char *path, const char *from, const char *to);
/* The first entry of a kind ("kernels") whose name begins so: its folder. Fails the test if
 * none. */
const char *rig_entry(const char *kind, const char *name);
/* Entries of all kinds, and how many of them are damaged. */
int rig_entries(int *damaged);
/* Removes a folder and all below it. */
void rig_remove(const char *path);

/* What the log callback was told, as lines; emptied by rig_begin. Thread-safe. */
void rig_log(void *user, int level, const char *message);
int rig_logged(const char *part);
extern fp8gen_jit_options rig_logging;

#endif
