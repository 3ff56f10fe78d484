/*
 * model_trace.c - what a model ran and when: pairs of events around its work, read out afterwards.
 *
 * In: the places in the streams where pieces of work begin and end. Out: spans in seconds from the
 * start of the trace. Costs nothing while no trace runs; a full trace drops what comes later, and
 * what is captured into a graph has no time.
 */
#include "runtime/model.h"

int fp8_model_begin(fp8_model *model, const char *what, int32_t layer, bool is_comm,
                    fp8_stream stream)
{
    if (model->record_count >= model->record_capacity || model->capture)
        return -1;
    struct fp8_model_record *record = &model->records[model->record_count];
    record->what = what;
    record->layer = layer;
    record->is_comm = is_comm;
    if (fp8_event_record(record->start, stream) != FP8_OK)
        return -1;
    return model->record_count++;
}

void fp8_model_end(fp8_model *model, int span, fp8_stream stream)
{
    if (span >= 0)
        (void)fp8_event_record(model->records[span].finish, stream);
}

void fp8_model_forget(fp8_model *model)
{
    for (int32_t i = 0; i < model->record_capacity; i++) {
        fp8_event_destroy(model->records[i].start);
        fp8_event_destroy(model->records[i].finish);
    }
    fp8_event_destroy(model->trace_start);
    fp8_release(model->records);
    model->records = NULL;
    model->trace_start = NULL;
    model->record_capacity = model->record_count = 0;
}

static fp8_status make_records(fp8_model *model, int32_t capacity)
{
    const size_t bytes = (size_t)capacity * sizeof *model->records;
    model->records = fp8_allocate(bytes);
    if (!model->records)
        return fp8_fail_memory("a trace", bytes);
    FP8_TRY(fp8_event_create(model->context, &model->trace_start));
    model->record_capacity = capacity;
    for (int32_t i = 0; i < capacity; i++) {
        FP8_TRY(fp8_event_create(model->context, &model->records[i].start));
        FP8_TRY(fp8_event_create(model->context, &model->records[i].finish));
    }
    return FP8_OK;
}

fp8_status fp8_model_trace(fp8_model *model, int32_t capacity, fp8_stream stream)
{
    FP8_TRY(fp8_model_check("model_trace", model, 0));
    if (capacity < 0 || capacity > 1 << 20)
        return fp8_fail(FP8_ERR_ARGUMENT, "model_trace: capacity is %d, not in 0..1048576",
                        capacity);
    fp8_model_forget(model);
    if (capacity == 0)
        return FP8_OK;
    fp8_status status = make_records(model, capacity);
    if (status == FP8_OK)
        status = fp8_event_record(model->trace_start, stream);
    if (status != FP8_OK)
        fp8_model_forget(model);
    return fp8_report(model->context, status);
}

fp8_status fp8_model_spans(fp8_model *model, fp8_model_span *spans, int32_t *count)
{
    FP8_TRY(fp8_model_check("model_spans", model, 0));
    if (!count || (!spans && *count > 0))
        return fp8_fail(FP8_ERR_ARGUMENT, "model_spans: %s is NULL", count ? "spans" : "count");
    if (*count < 0)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "model_spans: *count is %d; pass the spans there is room for", *count);
    int32_t wanted = *count < model->record_count ? *count : model->record_count;
    *count = 0;
    for (int32_t i = 0; i < wanted; i++) {
        const struct fp8_model_record *record = &model->records[i];
        spans[i] = (fp8_model_span){ .what = record->what,
                                     .layer = record->layer,
                                     .is_comm = record->is_comm };
        FP8_TRY(fp8_event_seconds(model->trace_start, record->start, &spans[i].start));
        FP8_TRY(fp8_event_seconds(model->trace_start, record->finish, &spans[i].finish));
    }
    *count = wanted;
    model->record_count = 0;
    return FP8_OK;
}
