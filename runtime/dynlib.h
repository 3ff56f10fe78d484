/*
 * dynlib.h - the one opener of shared libraries: libcuda, NVRTC, cuBLASLt, NCCL.
 *
 * In: what a library is called. Out: a handle and the path it came from, or one sentence that lists
 * everything that was searched. Shared by gen/ and runtime/, knows neither: no status values, no
 * diagnostics, no state of its own, so any thread may call it at any time. Not public.
 *
 * The order, and why: (1) a copy that is already in the process, because two copies of one library
 * (NCCL above all) must never meet; (2) the sonames, newest first, as the loader finds them; (3)
 * the file or folder in the environment variable, for libraries that the loader does not find by
 * itself; (4) the usual toolkit folders.
 */
#ifndef FP8_DYNLIB_H
#define FP8_DYNLIB_H

#include <stdbool.h>
#include <stddef.h>

/* A buffer of this size holds any sentence of this header. */
enum { FP8_DYNLIB_MESSAGE_SIZE = 2048 };

struct fp8_dynlib_spec {
    const char *name;           /* for people: "NVRTC" */
    const char *variable;       /* "FP8_NVRTC_PATH": a file, or the folder with it; NULL = none */
    const char *const *sonames; /* newest first, ends in NULL */
    bool toolkit;               /* also look into the usual folders of the CUDA toolkit */
};

struct fp8_dynlib {
    void *handle;
    char path[1024]; /* of the file in use */
};

struct fp8_dynlib_symbol {
    const char *name;
    void *slot;    /* address of the function pointer to set */
    bool optional; /* NULL if the library lacks it */
};

/* On failure *lib is all zero, and message (may be NULL) holds the sentence. */
bool fp8_dynlib_open(const struct fp8_dynlib_spec *spec, struct fp8_dynlib *lib, char *message,
                     size_t message_size);

/* Sets every slot. A missing symbol is named in the message with the library's path. */
bool fp8_dynlib_symbols(const struct fp8_dynlib *lib, const struct fp8_dynlib_symbol *symbols,
                        size_t count, char *message, size_t message_size);

/* Takes a zeroed lib. */
void fp8_dynlib_close(struct fp8_dynlib *lib);

#endif
