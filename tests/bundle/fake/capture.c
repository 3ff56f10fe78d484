/*
 * capture.c - captures and graphs of the fake libcuda.
 *
 * One capture at a time. Streams enter it by waiting for an event of it, and all that was enqueued
 * on them must be before the end of the first stream again, which is known from counts: every
 * stream counts its work and knows how much of every other stream's lies before it. Work is kept,
 * and done when the graph is launched, in the order in which it was enqueued. Threads beside the
 * one that captures ask, too: a lock is over the books.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "fake_driver.h"

#pragma GCC diagnostic ignored "-Wmissing-prototypes"

struct node {
    struct node *next;
    void (*run)(void *data);
    _Alignas(64) unsigned char data[];
};

struct graph {
    struct node *first, **last;
};

static _Thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static _Thread_local bool began; /* the capture that is going on, in this thread */
static struct graph *graph;      /* of that capture */
static uint64_t number;          /* of captures so far */
static struct {
    CUstream stream;
    unsigned clock[FAKE_MEMBERS];
} members[FAKE_MEMBERS]; /* the first began the capture */

static pthread_mutex_t books = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

static pthread_mutex_t *take_books(void)
{
    pthread_mutex_lock(&books);
    return &books;
}

static void give_books(pthread_mutex_t **held)
{
    pthread_mutex_unlock(*held);
}

/* Until the function returns. */
#define HOLD_BOOKS() pthread_mutex_t *held __attribute__((cleanup(give_books))) = take_books()

static int find(CUstream stream)
{
    for (int i = 0; fake_cuda_state()->captured && stream && i < FAKE_MEMBERS; i++) {
        if (members[i].stream == stream)
            return i;
    }
    return -1;
}

static CUresult broken(CUresult result)
{
    fake_cuda_state()->capture_broken = true;
    return result;
}

bool fake_may(void)
{
    HOLD_BOOKS();
    struct fake_cuda *state = fake_cuda_state();
    if (!state->captured || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return true;
    bool bound = began ? state->capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED
                       : thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                             state->capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (bound)
        state->capture_broken = true;
    return !bound;
}

bool fake_breaks(CUstream stream)
{
    HOLD_BOOKS();
    if (find(stream) < 0)
        return false;
    (void)broken(CUDA_SUCCESS);
    return true;
}

CUresult fake_enqueued(CUstream stream)
{
    HOLD_BOOKS();
    struct fake_cuda *state = fake_cuda_state();
    int member = find(stream);
    if (!state->captured)
        return CUDA_SUCCESS;
    if (member >= 0) {
        members[member].clock[member]++;
        __atomic_add_fetch(&state->captured_work, 1, __ATOMIC_RELAXED);
        return CUDA_SUCCESS;
    }
    if (stream || !state->captured_blocks)
        return CUDA_SUCCESS;
    return broken(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
}

bool fake_keep(void *stream, void (*run)(void *data), const void *data, size_t bytes)
{
    HOLD_BOOKS();
    int member = find((CUstream)stream);
    if (member < 0)
        return false;
    members[member].clock[member]++;
    struct node *node = NULL;
    if (posix_memalign((void **)&node, 64, sizeof *node + bytes) != 0)
        abort();
    *node = (struct node){ .run = run };
    memcpy(node->data, data, bytes);
    *graph->last = node;
    graph->last = &node->next;
    return true;
}

void fake_mark(CUstream stream, struct fake_event *event)
{
    HOLD_BOOKS();
    const struct fake_cuda *state = fake_cuda_state();
    int member = find(stream);
    event->busy = state->busy && state->busy();
    event->capture = member >= 0 ? number : 0;
    if (member >= 0)
        memcpy(event->clock, members[member].clock, sizeof event->clock);
}

CUresult fake_wait(CUstream stream, const struct fake_event *event)
{
    HOLD_BOOKS();
    int member = find(stream);
    const bool running = fake_cuda_state()->captured && event->capture == number;
    if (event->capture && !running)
        return member >= 0 ? broken(CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
                           : CUDA_ERROR_CAPTURED_EVENT;
    if (!event->capture && member >= 0)
        return broken(CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    if (!event->capture)
        return fake_enqueued(stream);
    if (!stream)
        return broken(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    for (int i = 0; member < 0 && i < FAKE_MEMBERS; i++) {
        if (!members[i].stream) {
            members[i].stream = stream;
            member = i;
        }
    }
    if (member < 0)
        abort();
    for (int i = 0; i < FAKE_MEMBERS; i++) {
        if (members[member].clock[i] < event->clock[i])
            members[member].clock[i] = event->clock[i];
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_begin_capture(CUstream stream,
                                   CUstreamCaptureMode mode) __asm__("cuStreamBeginCapture_v2");
CUresult fake_begin_capture(CUstream stream, CUstreamCaptureMode mode)
{
    HOLD_BOOKS();
    struct fake_cuda *state = fake_cuda_state();
    if (!stream || state->captured)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    graph = calloc(1, sizeof *graph);
    if (!graph)
        return CUDA_ERROR_OUT_OF_MEMORY;
    graph->last = &graph->first;
    memset(members, 0, sizeof members);
    members[0].stream = stream;
    number++;
    state->captured = stream;
    state->capture_mode = (int)mode;
    state->captured_work = 0;
    state->capture_broken = false;
    began = true;
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_destroy_graph(CUgraph given) __asm__("cuGraphDestroy");
CUresult fake_destroy_graph(CUgraph given)
{
    struct graph *ended = (struct graph *)given;
    while (ended->first) {
        struct node *next = ended->first->next;
        free(ended->first);
        ended->first = next;
    }
    free(ended);
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_end_capture(CUstream stream, CUgraph *ended) __asm__("cuStreamEndCapture");
CUresult fake_end_capture(CUstream stream, CUgraph *ended)
{
    HOLD_BOOKS();
    struct fake_cuda *state = fake_cuda_state();
    CUresult result = CUDA_SUCCESS;
    *ended = NULL;
    if (!state->captured || stream != (CUstream)state->captured || !began)
        return CUDA_ERROR_ILLEGAL_STATE;
    for (int i = 0; i < FAKE_MEMBERS; i++) {
        if (members[0].clock[i] < members[i].clock[i])
            result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    }
    state->captured = NULL;
    began = false;
    if (state->capture_broken)
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (result == CUDA_SUCCESS)
        *ended = (CUgraph)(void *)graph;
    else
        (void)fake_destroy_graph((CUgraph)(void *)graph);
    return result;
}

/* A graph is its executable twin; launches do its work at once. */
EXPORT CUresult fake_launch_graph(CUgraph given, CUstream stream) __asm__("cuGraphLaunch");
CUresult fake_launch_graph(CUgraph given, CUstream stream)
{
    (void)stream;
    NEEDS_CONTEXT();
    for (struct node *node = ((struct graph *)given)->first; node; node = node->next)
        node->run(node->data);
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_capture_info(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                  CUgraph *made, const CUgraphNode **nodes,
                                  size_t *count) __asm__("cuStreamGetCaptureInfo_v2");
CUresult fake_capture_info(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                           CUgraph *made, const CUgraphNode **nodes, size_t *count)
{
    HOLD_BOOKS();
    const struct fake_cuda *state = fake_cuda_state();
    MAY_FAIL();
    NEEDS_CONTEXT();
    if (made || nodes || count)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!stream && state->captured && state->captured_blocks)
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *status = find(stream) < 0        ? CU_STREAM_CAPTURE_STATUS_NONE
              : state->capture_broken ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                      : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (id)
        *id = number;
    return CUDA_SUCCESS;
}

EXPORT CUresult fake_is_capturing(CUstream stream,
                                  CUstreamCaptureStatus *status) __asm__("cuStreamIsCapturing");
CUresult fake_is_capturing(CUstream stream, CUstreamCaptureStatus *status)
{
    return fake_capture_info(stream, status, NULL, NULL, NULL, NULL);
}

EXPORT CUresult
fake_exchange(CUstreamCaptureMode *mode) __asm__("cuThreadExchangeStreamCaptureMode");
CUresult fake_exchange(CUstreamCaptureMode *mode)
{
    MAY_FAIL();
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
