/*
 * nccl.c - the fake NCCL: see fake_nccl.h. An id is the path of a file that all ranks map.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "fake_nccl.h"
#include "runtime/fp8_format.h"
#include "runtime/nccl_abi.h"

#define EXPORT __attribute__((visibility("default")))
#pragma GCC diagnostic ignored "-Wmissing-prototypes"

enum { RANKS = 16, BUFFER = 1 << 20, COMMS = 8, WINDOWS = 8 };

struct shared {
    atomic_int joined;
    atomic_long posted[RANKS]; /* number of the last collective that is in the buffer */
    struct {
        int kind, dtype, op, kernel;
        uint64_t bytes;
    } what[RANKS][2];
    unsigned char data[RANKS][2][BUFFER];
};

struct comm {
    struct shared *shared;
    int rank, ranks;
    long number;
    bool is_blocking;
    atomic_bool hangs;
};

static struct fake_nccl state;
static fp8_nccl_window *coming, coming_window; /* a window is there two polls after the call */
static int polls_to_come;
static struct comm *comms[COMMS];
static pthread_mutex_t comms_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char *memory;
    size_t bytes;
} windows[WINDOWS];

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static bool busy(void)
{
    bool hangs = false;
    pthread_mutex_lock(&comms_lock);
    for (int i = 0; i < COMMS; i++)
        hangs = hangs || (comms[i] && comms[i]->hangs);
    pthread_mutex_unlock(&comms_lock);
    return hangs;
}

static void list(struct comm *comm)
{
    int i = 0;
    pthread_mutex_lock(&comms_lock);
    while (i < COMMS - 1 && comms[i])
        i++;
    comms[i] = comm;
    pthread_mutex_unlock(&comms_lock);
}

EXPORT struct fake_nccl *fake_nccl_state(void);
struct fake_nccl *fake_nccl_state(void)
{
    if (!state.version) {
        state.version = 23203;
        state.patience = 5;
        state.busy = busy;
    }
    return &state;
}

EXPORT int fake_version(int *version) __asm__("ncclGetVersion");
int fake_version(int *version)
{
    *version = fake_nccl_state()->version;
    return FP8_NCCL_SUCCESS;
}

EXPORT const char *fake_text(int result) __asm__("ncclGetErrorString");
const char *fake_text(int result)
{
    return result == FP8_NCCL_SUCCESS ? "no error" : "an error of the fake NCCL";
}

EXPORT int fake_id(fp8_nccl_id *id) __asm__("ncclGetUniqueId");
int fake_id(fp8_nccl_id *id)
{
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "/tmp/fake-nccl-XXXXXX");
    int file = mkstemp(id->bytes);
    int error = file < 0 || ftruncate(file, sizeof(struct shared)) != 0;
    if (file >= 0)
        close(file);
    return error ? 2 : FP8_NCCL_SUCCESS;
}

EXPORT int fake_init(fp8_nccl_comm *made, int ranks, fp8_nccl_id id, int rank,
                     fp8_nccl_config *config) __asm__("ncclCommInitRankConfig");
int fake_init(fp8_nccl_comm *made, int ranks, fp8_nccl_id id, int rank, fp8_nccl_config *config)
{
    if (config->magic != FP8_NCCL_MAGIC || ranks > RANKS || rank >= ranks)
        return FP8_NCCL_INVALID_ARGUMENT;
    state.last_policy = config->cta_policy;
    state.last_blocking = config->blocking;
    state.last_config_size = config->size;
    state.last_nvls = config->size == sizeof *config ? config->nvls_host_mode : 0;
    int file = open(id.bytes, O_RDWR);
    struct comm *comm = calloc(1, sizeof *comm);
    comm->shared = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (comm->shared == MAP_FAILED)
        return 2;
    comm->rank = rank;
    comm->ranks = ranks;
    if (atomic_fetch_add(&comm->shared->joined, 1) + 1 == ranks)
        unlink(id.bytes);
    list(comm);
    __atomic_add_fetch(&state.live, 1, __ATOMIC_RELAXED);
    *made = comm;
    return FP8_NCCL_IN_PROGRESS;
}

EXPORT int fake_split(fp8_nccl_comm parent, int color, int key, fp8_nccl_comm *made,
                      fp8_nccl_config *config) __asm__("ncclCommSplit");
int fake_split(fp8_nccl_comm parent, int color, int key, fp8_nccl_comm *made,
               fp8_nccl_config *config)
{
    const struct comm *from = parent;
    if (color != 0 || key != from->rank)
        return FP8_NCCL_INVALID_ARGUMENT;
    state.last_blocking = config->blocking;
    struct comm *comm = calloc(1, sizeof *comm);
    *comm = *from;
    comm->is_blocking = config->blocking == 1;
    comm->shared =
        mremap(from->shared, 0, sizeof(struct shared), MREMAP_MAYMOVE); /* a second view */
    if (comm->shared == MAP_FAILED)
        return 2;
    list(comm);
    __atomic_add_fetch(&state.live, 1, __ATOMIC_RELAXED);
    *made = comm;
    return FP8_NCCL_IN_PROGRESS;
}

static int end_comm(struct comm *comm)
{
    pthread_mutex_lock(&comms_lock);
    for (int i = 0; i < COMMS; i++) {
        if (comms[i] == comm)
            comms[i] = NULL;
    }
    pthread_mutex_unlock(&comms_lock);
    munmap(comm->shared, sizeof(struct shared));
    free(comm);
    __atomic_add_fetch(&state.live, -1, __ATOMIC_RELAXED);
    return FP8_NCCL_SUCCESS;
}

EXPORT int fake_destroy(fp8_nccl_comm comm) __asm__("ncclCommDestroy");
int fake_destroy(fp8_nccl_comm comm)
{
    state.destroys++;
    return end_comm(comm);
}

EXPORT int fake_abort(fp8_nccl_comm comm) __asm__("ncclCommAbort");
int fake_abort(fp8_nccl_comm comm)
{
    __atomic_add_fetch(&state.aborts, 1, __ATOMIC_RELAXED);
    if (state.aborting)
        state.aborting();
    while (__atomic_load_n(&state.is_stuck, __ATOMIC_RELAXED))
        usleep(1000);
    return end_comm(comm);
}

EXPORT int fake_async(fp8_nccl_comm handle, int *error) __asm__("ncclCommGetAsyncError");
int fake_async(fp8_nccl_comm handle, int *error)
{
    struct comm *comm = handle;
    if (coming && --polls_to_come <= 0) {
        *coming = coming_window;
        coming = NULL;
    }
    *error = coming                                             ? FP8_NCCL_IN_PROGRESS
             : state.async_error                                ? state.async_error
             : atomic_load(&comm->shared->joined) < comm->ranks ? FP8_NCCL_IN_PROGRESS
                                                                : FP8_NCCL_SUCCESS;
    return FP8_NCCL_SUCCESS;
}

EXPORT int fake_count(fp8_nccl_comm comm, int *count) __asm__("ncclCommCount");
int fake_count(fp8_nccl_comm comm, int *count)
{
    *count = ((struct comm *)comm)->ranks;
    return FP8_NCCL_SUCCESS;
}

EXPORT int fake_device(fp8_nccl_comm comm, int *device) __asm__("ncclCommCuDevice");
int fake_device(fp8_nccl_comm comm, int *device)
{
    (void)comm;
    *device = 0;
    return FP8_NCCL_SUCCESS;
}

EXPORT int fake_rank(fp8_nccl_comm comm, int *rank) __asm__("ncclCommUserRank");
int fake_rank(fp8_nccl_comm comm, int *rank)
{
    *rank = ((struct comm *)comm)->rank;
    return FP8_NCCL_SUCCESS;
}

EXPORT int fake_group_start(void) __asm__("ncclGroupStart");
int fake_group_start(void)
{
    state.groups++;
    return FP8_NCCL_SUCCESS;
}

EXPORT int fake_group_end(void) __asm__("ncclGroupEnd");
int fake_group_end(void)
{
    return FP8_NCCL_SUCCESS;
}

/* ---- collectives ---- */

static size_t element_bytes(int dtype)
{
    return dtype == FP8_NCCL_UINT8 ? 1 : dtype == FP8_NCCL_FLOAT32 ? 4 : 2;
}

static bool in_window(const void *memory)
{
    for (int i = 0; i < WINDOWS; i++) {
        const uintptr_t offset = (uintptr_t)memory - (uintptr_t)windows[i].memory;
        if (windows[i].memory && offset < windows[i].bytes)
            return true;
    }
    return false;
}

/* A collective, as a graph keeps it. */
struct job {
    struct comm *comm;
    int kind, dtype, op;
    const void *send;
    void *recv;
    size_t count;
};

/* This rank's contribution into the shared buffer, then a wait for the others'. As in NCCL each
 * rank alone chooses its kernel by where its memory lies, and different kernels do not meet. */
static bool meet(const struct job *job, size_t bytes)
{
    struct comm *comm = job->comm;
    struct shared *shared = comm->shared;
    if (comm->hangs)
        return false;
    const long number = ++comm->number;
    const int side = (int)(number & 1);
    if (bytes > BUFFER)
        abort();
    state.collectives++;
    memcpy(shared->data[comm->rank][side], job->send, bytes);
    shared->what[comm->rank][side].kind = job->kind;
    shared->what[comm->rank][side].dtype = job->dtype;
    shared->what[comm->rank][side].op = job->op;
    shared->what[comm->rank][side].kernel = in_window(job->send) && in_window(job->recv);
    shared->what[comm->rank][side].bytes = bytes;
    atomic_store(&shared->posted[comm->rank], number);
    const double end = now() + state.patience;
    for (int rank = 0; rank < comm->ranks; rank++) {
        while (atomic_load(&shared->posted[rank]) < number && now() < end)
            usleep(200);
        if (atomic_load(&shared->posted[rank]) < number ||
            memcmp(&shared->what[rank][side], &shared->what[comm->rank][side],
                   sizeof shared->what[0][0]) != 0)
            comm->hangs = true;
    }
    return !comm->hangs;
}

static float load(const void *data, size_t i, int dtype)
{
    if (dtype == FP8_NCCL_FLOAT32)
        return ((const float *)data)[i];
    uint16_t half = ((const uint16_t *)data)[i];
    return dtype == FP8_NCCL_BFLOAT16 ? fp8_bf16_to_float(half) : fp8_fp16_to_float(half);
}

static void store(void *data, size_t i, int dtype, float value)
{
    if (dtype == FP8_NCCL_FLOAT32)
        ((float *)data)[i] = value;
    else
        ((uint16_t *)data)[i] =
            dtype == FP8_NCCL_BFLOAT16 ? fp8_float_to_bf16(value) : fp8_float_to_fp16(value);
}

static void gather(const struct job *job)
{
    struct comm *comm = job->comm;
    if (!meet(job, job->count))
        return;
    for (int rank = 0; rank < comm->ranks; rank++)
        memcpy((char *)job->recv + (size_t)rank * job->count,
               comm->shared->data[rank][comm->number & 1], job->count);
}

static void reduce(const struct job *job)
{
    struct comm *comm = job->comm;
    if (!meet(job, job->count * (size_t)comm->ranks * element_bytes(job->dtype)))
        return;
    for (size_t i = 0; i < job->count; i++) {
        float sum = 0;
        for (int rank = 0; rank < comm->ranks; rank++)
            sum += load(comm->shared->data[rank][comm->number & 1],
                        (size_t)comm->rank * job->count + i, job->dtype);
        store(job->recv, i, job->dtype, job->op == FP8_NCCL_AVG ? sum / (float)comm->ranks : sum);
    }
}

static void maximum(const struct job *job)
{
    struct comm *comm = job->comm;
    if (!meet(job, job->count * sizeof(float)))
        return;
    for (size_t i = 0; i < job->count; i++) {
        float most = load(comm->shared->data[0][comm->number & 1], i, job->dtype);
        for (int rank = 1; rank < comm->ranks; rank++) {
            float value = load(comm->shared->data[rank][comm->number & 1], i, job->dtype);
            most = value > most ? value : most;
        }
        ((float *)job->recv)[i] = most;
    }
}

static void exchange(const struct job *job)
{
    struct comm *comm = job->comm;
    if (!meet(job, job->count * (size_t)comm->ranks))
        return;
    for (int rank = 0; rank < comm->ranks; rank++)
        memcpy((char *)job->recv + (size_t)rank * job->count,
               comm->shared->data[rank][comm->number & 1] + (size_t)comm->rank * job->count,
               job->count);
}

static void run_job(void *data)
{
    static void (*const kinds[])(const struct job *) = { gather, reduce, maximum, exchange };
    const struct job *job = data;
    kinds[job->kind](job);
}

static int enqueue(struct job job, void *stream)
{
    if (state.call)
        return state.call();
    if (!state.record || !state.record(stream, run_job, &job, sizeof job))
        run_job(&job);
    return FP8_NCCL_SUCCESS;
}

EXPORT int fake_all_gather(const void *send, void *recv, size_t count, int dtype,
                           fp8_nccl_comm handle, void *stream) __asm__("ncclAllGather");
int fake_all_gather(const void *send, void *recv, size_t count, int dtype, fp8_nccl_comm handle,
                    void *stream)
{
    if (dtype != FP8_NCCL_UINT8) /* any NCCL knows bytes, not any FP8 */
        return FP8_NCCL_INVALID_ARGUMENT;
    return enqueue((struct job){ handle, 0, dtype, 0, send, recv, count }, stream);
}

EXPORT int fake_all_to_all(const void *send, void *recv, size_t count, int dtype,
                           fp8_nccl_comm handle, void *stream) __asm__("ncclAlltoAll");
int fake_all_to_all(const void *send, void *recv, size_t count, int dtype, fp8_nccl_comm handle,
                    void *stream)
{
    if (dtype != FP8_NCCL_UINT8)
        return FP8_NCCL_INVALID_ARGUMENT;
    return enqueue((struct job){ handle, 3, dtype, 0, send, recv, count }, stream);
}

EXPORT int fake_reduce(const void *send, void *recv, size_t count, int dtype, int op,
                       fp8_nccl_comm handle, void *stream) __asm__("ncclReduceScatter");
int fake_reduce(const void *send, void *recv, size_t count, int dtype, int op, fp8_nccl_comm handle,
                void *stream)
{
    return enqueue((struct job){ handle, 1, dtype, op, send, recv, count }, stream);
}

EXPORT int fake_all_reduce(const void *send, void *recv, size_t count, int dtype, int op,
                           fp8_nccl_comm handle, void *stream) __asm__("ncclAllReduce");
int fake_all_reduce(const void *send, void *recv, size_t count, int dtype, int op,
                    fp8_nccl_comm handle, void *stream)
{
    if (op != FP8_NCCL_MAX || dtype != FP8_NCCL_FLOAT32)
        return FP8_NCCL_INVALID_ARGUMENT;
    return enqueue((struct job){ handle, 2, dtype, op, send, recv, count }, stream);
}

/* ---- memory ---- */

EXPORT int fake_mem_alloc(void **memory, size_t bytes) __asm__("ncclMemAlloc");
int fake_mem_alloc(void **memory, size_t bytes)
{
    state.allocations++;
    if (state.no_memory || posix_memalign(memory, 4096, bytes) != 0)
        return 2;
    __atomic_add_fetch(&state.live, 1, __ATOMIC_RELAXED);
    return FP8_NCCL_SUCCESS;
}

EXPORT int fake_mem_free(void *memory) __asm__("ncclMemFree");
int fake_mem_free(void *memory)
{
    free(memory);
    __atomic_add_fetch(&state.live, -1, __ATOMIC_RELAXED);
    return FP8_NCCL_SUCCESS;
}

EXPORT int fake_window(fp8_nccl_comm comm, void *memory, size_t bytes, fp8_nccl_window *window,
                       int flags) __asm__("ncclCommWindowRegister");
int fake_window(fp8_nccl_comm comm, void *memory, size_t bytes, fp8_nccl_window *window, int flags)
{
    if ((uintptr_t)memory % FP8_NCCL_WINDOW_ALIGNMENT || bytes % FP8_NCCL_WINDOW_ALIGNMENT ||
        flags != FP8_NCCL_WIN_COLL_SYMMETRIC)
        return FP8_NCCL_INVALID_ARGUMENT;
    coming = window;
    coming_window = state.no_window ? NULL : memory;
    if (((struct comm *)comm)->is_blocking) {
        *window = coming_window;
        coming = NULL;
    }
    polls_to_come = 3;
    state.windows += !state.no_window;
    for (int i = 0; i < WINDOWS && !state.no_window; i++) {
        if (!windows[i].memory) {
            windows[i].memory = memory;
            windows[i].bytes = bytes;
            break;
        }
    }
    return FP8_NCCL_SUCCESS;
}

EXPORT int fake_unwindow(fp8_nccl_comm comm,
                         fp8_nccl_window window) __asm__("ncclCommWindowDeregister");
int fake_unwindow(fp8_nccl_comm comm, fp8_nccl_window window)
{
    (void)comm;
    state.windows -= window != NULL;
    for (int i = 0; i < WINDOWS; i++) {
        if (windows[i].memory == (char *)window)
            windows[i].memory = NULL;
    }
    return FP8_NCCL_SUCCESS;
}
