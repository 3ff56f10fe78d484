/*
 * capture.c - calls that may block, load or allocate, while a stream of the program is captured.
 *
 * In: a call's name and, where it has one, its stream. Out: a refusal that leaves the capture whole
 * (FP8_ERR_CAPTURE), or the device current and this thread in the relaxed capture mode, in which
 * the driver takes such calls and no capture of another thread suffers from them.
 *
 * What can be known: of a stream given, whether it is captured; of none, whether any blocking
 * stream of the device is, which the legacy stream tells. A capture on a non-blocking stream that
 * the call does not name cannot be seen; the relaxed mode keeps it whole. Passes need none of this:
 * they only enqueue.
 */
#include "runtime/driver.h"
#include "runtime/internal.h"

/* Calls within calls: the outermost has checked for all. */
static _Thread_local int depth;

fp8_status fp8_capture_check(const struct fp8_context *context, const char *call, fp8_stream stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = context->driver->stream_is_capturing(stream, &status);
    if (result == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_NONE)
        return FP8_OK;
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        return fp8_fail_cuda(context->driver, result, "%s: asking whether a stream is captured",
                             call);
    return fp8_fail(FP8_ERR_CAPTURE,
                    "%s: %s is being captured into a CUDA graph, and this call loads, allocates or "
                    "waits; make it before the capture begins (fp8_context_prepare makes layers)",
                    call, stream ? "the stream" : "a blocking stream of this device");
}

fp8_status fp8_capture_of(const struct fp8_context *context, const char *call, fp8_stream stream,
                          uint64_t *capture)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    cuuint64_t number = 0;
    *capture = 0;
    CUresult result =
        context->driver->stream_capture_info(stream, &status, &number, NULL, NULL, NULL);
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        return fp8_fail(
            FP8_ERR_CAPTURE,
            "%s: the stream is the legacy stream, which cannot be used while a blocking "
            "stream of this device is being captured into a CUDA graph; name a stream",
            call);
    if (result != CUDA_SUCCESS)
        return fp8_fail_cuda(context->driver, result, "%s: asking whether a stream is captured",
                             call);
    if (status == CU_STREAM_CAPTURE_STATUS_INVALIDATED)
        return fp8_fail(FP8_ERR_CAPTURE,
                        "%s: the capture of the stream into a CUDA graph was broken by an earlier "
                        "call; end it and begin anew",
                        call);
    *capture = status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? (uint64_t)number + 1 : 0;
    return FP8_OK;
}

fp8_status fp8_uncaptured_enter(const struct fp8_context *context, const char *call,
                                fp8_stream stream, struct fp8_uncaptured *entered)
{
    *entered = (struct fp8_uncaptured){ .pushed = false };
    if (context->is_host)
        return FP8_OK;
    FP8_TRY(fp8_context_enter(context, &entered->pushed));
    bool check = call && depth == 0;
    fp8_status status = check ? fp8_capture_check(context, call, stream) : FP8_OK;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (status == FP8_OK) {
        CUresult result = context->driver->exchange_capture_mode(&mode);
        if (result != CUDA_SUCCESS)
            status = fp8_fail_cuda(context->driver, result, "the capture mode of this thread");
    }
    if (status != FP8_OK) {
        fp8_context_leave(context, entered->pushed);
        return status;
    }
    depth++;
    entered->relaxed = true;
    entered->mode = (int)mode;
    return FP8_OK;
}

bool fp8_release_enter(const struct fp8_context *context, struct fp8_uncaptured *entered)
{
    *entered = (struct fp8_uncaptured){ .pushed = false };
    if (context->is_host)
        return true;
    if (fp8_context_is_stuck(context) ||
        fp8_context_push(context, &entered->pushed) != CUDA_SUCCESS)
        return false;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (context->driver->exchange_capture_mode(&mode) == CUDA_SUCCESS) {
        depth++;
        entered->relaxed = true;
        entered->mode = (int)mode;
    }
    return true;
}

void fp8_uncaptured_leave(const struct fp8_context *context, const struct fp8_uncaptured *entered)
{
    CUstreamCaptureMode mode = (CUstreamCaptureMode)entered->mode;
    if (entered->relaxed) {
        depth--;
        (void)context->driver->exchange_capture_mode(&mode);
    }
    fp8_context_leave(context, entered->pushed);
}
