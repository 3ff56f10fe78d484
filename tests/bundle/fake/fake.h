/*
 * fake.h - libcuda and cuBLASLt for machines without a GPU, as far as the runtime uses them.
 *
 * Device memory is host memory, streams do their work at once, and kernels and matrix products are
 * handed to the test, which executes them with the host backend. So the whole CUDA path of the
 * runtime (packing of arguments, staging, chunks, descriptors, clean-up after errors) runs under
 * sanitizers on any machine. The fakes are strict where the real libraries are: a launch without a
 * current context, an unaligned pointer, a product that cuBLASLt has no algorithm for are refused.
 *
 * Both are shared objects with the real sonames; a test opens them before the runtime does.
 */
#ifndef FAKE_H
#define FAKE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A launch: parameters as cuLaunchKernel takes them. */
typedef void (*fake_launch)(const char *entry, unsigned grid, unsigned block, void **parameters);

/* What the fake driver writes into the 128 bytes of a tensor map; all zero: never encoded. */
struct fake_map {
    uint64_t magic; /* FAKE_MAP_MAGIC */
    void *data;
    int64_t cols, rows, pitch; /* elements, bytes */
    int32_t type;              /* CUtensorMapDataType */
    int32_t box_cols, box_rows;
};
#define FAKE_MAP_MAGIC 0x70616d20656b6166u

/* Multiprocessors; a cooperative grid may have two CTAs on each, a cluster lies within a group of
 * them. */
#define FAKE_SMS 132
#define FAKE_GPCS 6

/* Bytes of a kernel's parameter, 0 past the end. */
typedef size_t (*fake_parameter)(const char *entry, size_t index);

struct fake_cuda {
    fake_launch launch;
    int device_count; /* 1 */
    int major, minor; /* 9, 0 */
    int64_t fail_at;  /* the call of this number fails (calls are counted from 1), 0 = none */
    int fail_code;    /* a CUresult */
    int64_t calls;    /* of functions that may fail */
    int64_t launches, memsets, copies;
    int64_t live;   /* modules, streams, events, allocations and retained contexts */
    int64_t maps;   /* tensor maps encoded */
    int64_t rules;  /* tensor maps refused because they break a rule of TMA */
    int64_t misuse; /* launches, fills and copies without the right current context */
    int64_t depth;  /* pushed and not popped */
    fake_parameter parameter;
    bool (*busy)(void); /* streams hang: NULL = never */
    /* One capture at a time: what CUDA forbids while it lasts breaks it (in relaxed mode nothing
     * does). What is captured is done when the graph is launched. */
    void *captured;        /* the stream; NULL: none */
    bool captured_blocks;  /* it is a blocking stream */
    int capture_mode;      /* a CUstreamCaptureMode */
    int64_t captured_work; /* launches, fills and copies on it */
    bool capture_broken;
    bool (*may)(
        void); /* may this thread load, allocate or wait now? What it does breaks a capture */
    /* For the other fakes: is the stream captured? Then a copy of `data` is kept for `run`. */
    bool (*record)(void *stream, void (*run)(void *data), const void *data, size_t bytes);
    unsigned last_grid, last_cluster, last_shared;
    bool last_overlaps;   /* programmatic stream serialization was asked for */
    int64_t cooperative;  /* launches whose CTAs wait for each other */
    char last_entry[128]; /* of a kernel */
};

/* A product in the library's terms: D[m x n], column-major, = op(A)^T op(B), contraction along the
 * columns of op(A) and op(B); rows of D contiguous. */
struct fake_product {
    int a_type, b_type, d_type; /* cudaDataType */
    int64_t m, n, k, lda, ldb, ldd;
    const void *a, *b;
    void *d;
    const float *a_scale, *b_scale; /* NULL of bf16, and for 1 */
    int a_mode, b_mode;             /* cublasLtMatmulMatrixScale_t */
    bool a_across, b_across;        /* m (n) runs along the columns in memory, not k; bf16 */
    const void *bias;               /* bf16, or NULL */
    bool accumulate, fast;
    int sms;
};
typedef void (*fake_multiply)(const struct fake_product *product);

#define FAKE_LT_VERSION 130100
/* Algorithms are numbers below this, in their first 8 bytes. */
#define FAKE_ALGORITHMS 50

struct fake_lt {
    fake_multiply multiply;
    int offered;       /* algorithms that a heuristic query gives, */
    int first;         /* numbered from this */
    int refusing;      /* algorithms numbered below this refuse to run */
    bool no_bias;      /* no algorithm takes a bias */
    bool no_algorithm; /* queries give none */
    int64_t queries, checks, products, refusals;
    int64_t rules; /* products refused because they break a rule of cuBLASLt */
    int last_algorithm;
    int live;         /* handles */
    uint64_t version; /* FAKE_LT_VERSION */
    int64_t by_block, unscaled,
        of_bf16; /* products with scales of blocks, of FP8 without, of bf16 */
    /* as fake_cuda.record; NULL: products are done at once */
    bool (*record)(void *stream, void (*run)(void *data), const void *data, size_t bytes);
    bool (*load)(void); /* asked when an algorithm runs for the first time; false: it cannot run */
    uint64_t loaded;    /* bit = algorithm */
};

/* fake_cuda_state and fake_lt_state of the two objects. */
typedef struct fake_cuda *(*fake_cuda_getter)(void);
typedef struct fake_lt *(*fake_lt_getter)(void);

#endif
