/*
 * state.c - the state of delayed scaling: device memory, the roll, plain data.
 *
 * In: layers of recipe "delayed". The state is five arrays over tensors and a history in one piece
 * of device memory; passes get addresses into it (frame.c), the op roll makes a step of it. Saving
 * copies the piece to the host and puts each ring in order; loading checks, then makes the piece
 * anew.
 */
#include "runtime/fp8_state.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "runtime/fp8_format.h"
#include "runtime/internal.h"

enum { DATA_VERSION = 1 };
static const char magic[8] = { 'f', 'p', '8', 's', 't', 'a', 't', 'e' };

struct data_header {
    char magic[8];
    uint32_t version;
    uint32_t reserved;
    int64_t tensors;
    int64_t length;
};

/* ---- the piece of memory ---- */

static size_t memory_bytes(const struct fp8_state *state)
{
    return (size_t)(state->tensors * (5 + state->length)) * sizeof(float);
}

/* Points the arrays into a piece at `memory`: of the device, or its image on the host. */
static void place(struct fp8_state *state, void *memory)
{
    float *at = memory;
    state->memory = memory;
    state->scale = at;
    state->running = at += state->tensors;
    state->maxima = at += state->tensors;
    state->counts = (int32_t *)(void *)(at += state->tensors);
    state->fresh = (uint32_t *)(void *)(at += state->tensors);
    state->history = at + state->tensors;
}

static float maximum_of(const struct fp8_layer_plan *plan, fp8_role role)
{
    float maximum = plan->formats[role] == FP8_DTYPE_E5M2 ? 57344.0f : 448.0f;
    return ldexpf(maximum, -plan->recipe.margin);
}

static void set_empty(const struct fp8_state *state, struct fp8_state *image)
{
    for (int64_t i = 0; i < state->tensors; i++) {
        image->scale[i] = 1.0f;
        image->running[i] = -1.0f;
        image->fresh[i] = 1;
    }
}

static void set_maxima(const struct fp8_state *state, struct fp8_state *image)
{
    for (int32_t i = 0; i < state->layer_count; i++) {
        for (int role = FP8_ROLE_X; role <= FP8_ROLE_DY; role++)
            image->maxima[fp8_state_tensor(i, (fp8_role)role)] =
                maximum_of(state->layers[i]->plan, (fp8_role)role);
    }
}

/* Zeroed host memory laid out as the state's. */
static fp8_status make_image(const struct fp8_state *state, struct fp8_state *image)
{
    void *memory = fp8_allocate(memory_bytes(state));
    if (!memory)
        return fp8_fail_memory("the image of a state", memory_bytes(state));
    *image = *state;
    place(image, memory);
    return FP8_OK;
}

/* To the device (upload) or from it; blocks. */
static fp8_status move(const struct fp8_state *state, const struct fp8_state *image, bool upload,
                       fp8_stream stream)
{
    void *target = upload ? state->memory : image->memory;
    const void *source = upload ? image->memory : state->memory;
    FP8_TRY(fp8_memory_copy(state->context, target, source, memory_bytes(state), stream));
    return fp8_stream_synchronize(state->context, stream);
}

/* ---- creation ---- */

static fp8_status check_layer(const struct fp8_layer *first, const struct fp8_layer *layer,
                              int32_t index)
{
    if (!layer)
        return fp8_fail(FP8_ERR_ARGUMENT, "state_create: layers[%d] is NULL", index);
    const struct fp8_layer_plan *plan = layer->plan;
    const struct fp8_recipe *a = &first->plan->recipe, *b = &plan->recipe;
    if (!plan->roll)
        return fp8_fail(
            FP8_ERR_ARGUMENT,
            "state_create: layers[%d], '%s', has %s, which keeps no state; leave it out", index,
            plan->name, fp8_plan_recipe_name(plan));
    if (layer->context != first->context)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "state_create: layers[%d] is of another context than layers[0]; make a "
                        "state for each",
                        index);
    if (a->history_length != b->history_length || a->most_recent != b->most_recent ||
        a->power_of_two != b->power_of_two || a->shares_amaxes != b->shares_amaxes)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "state_create: layers[%d], '%s', has another history_length, algo, "
                        "power_of_two or amax_group than layers[0], '%s'; make a state for each",
                        index, plan->name, first->plan->name);
    return FP8_OK;
}

static fp8_status check_create(const fp8_layer *const *layers, int32_t count)
{
    enum { MOST = 1 << 24 };
    if (!layers || count < 1 || count > MOST)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "state_create: layers is %p and count is %d; pass 1 to %d layers",
                        (const void *)layers, count, MOST);
    for (int32_t i = 0; i < count; i++) {
        if (!layers[0])
            return fp8_fail(FP8_ERR_ARGUMENT, "state_create: layers[0] is NULL");
        FP8_TRY(check_layer(layers[0], layers[i], i));
    }
    return FP8_OK;
}

static fp8_status fill(struct fp8_state *state)
{
    struct fp8_state image;
    void *memory = NULL;
    FP8_TRY(make_image(state, &image));
    set_empty(state, &image);
    set_maxima(state, &image);
    fp8_status status = fp8_memory_alloc(state->context, memory_bytes(state), &memory);
    if (status == FP8_OK) {
        place(state, memory);
        status = move(state, &image, true, NULL);
    }
    fp8_release(image.memory);
    return status;
}

fp8_status fp8_state_create(const fp8_layer *const *layers, int32_t count, fp8_state **state)
{
    if (!state)
        return fp8_fail(FP8_ERR_ARGUMENT, "state_create: state is NULL");
    *state = NULL;
    fp8_status status = check_create(layers, count);
    if (status != FP8_OK)
        return layers && layers[0] ? fp8_report(layers[0]->context, status) : status;
    const struct fp8_layer_plan *plan = layers[0]->plan;
    struct fp8_state *made = fp8_allocate(sizeof *made);
    if (!made)
        return fp8_report(layers[0]->context, fp8_fail_memory("a state", sizeof *made));
    made->context = layers[0]->context;
    made->roll = plan->roll;
    made->layer_count = count;
    made->tensors = FP8_STATE_ROLES * (int64_t)count;
    made->length = plan->recipe.history_length;
    made->most_recent = plan->recipe.most_recent;
    made->power_of_two = plan->recipe.power_of_two;
    made->shares_amaxes = plan->recipe.shares_amaxes;
    size_t bytes = (size_t)count * sizeof *made->layers;
    made->layers = fp8_allocate(bytes);
    if (made->layers) {
        memcpy(made->layers, layers, bytes);
        status = fill(made);
    } else {
        status = fp8_fail_memory("a state", bytes);
    }
    if (status != FP8_OK) {
        fp8_context *context = made->context;
        fp8_state_destroy(made);
        return fp8_report(context, status);
    }
    *state = made;
    return FP8_OK;
}

void fp8_state_destroy(fp8_state *state)
{
    if (!state)
        return;
    if (state->memory)
        fp8_memory_free(state->context, state->memory);
    fp8_release(state->layers);
    fp8_release(state);
}

/* ---- steps ---- */

fp8_status fp8_state_advance(fp8_state *state, fp8_stream stream)
{
    if (!state)
        return fp8_fail(FP8_ERR_ARGUMENT, "state_advance: state is NULL");
    const fp8_value values[FP8_ROLL_ARG_COUNT] = {
        [FP8_ROLL_scale].p = state->scale,
        [FP8_ROLL_running].p = state->running,
        [FP8_ROLL_history].p = state->history,
        [FP8_ROLL_counts].p = state->counts,
        [FP8_ROLL_fresh].p = state->fresh,
        [FP8_ROLL_maxima].p = state->maxima,
        [FP8_ROLL_tensors].i = state->tensors,
        [FP8_ROLL_length].i = state->length,
        [FP8_ROLL_most_recent].i = state->most_recent,
        [FP8_ROLL_power_of_two].i = state->power_of_two,
    };
    bool pushed;
    fp8_status status = fp8_context_enter(state->context, &pushed);
    if (status == FP8_OK)
        status = fp8_kernel_run(state->context, state->roll, values, stream,
                                fp8_sms_of_call(state->context, 0));
    fp8_context_leave(state->context, pushed);
    return fp8_report(state->context, status);
}

fp8_status fp8_state_running(const fp8_state *state, float **running, int64_t *count)
{
    if (running)
        *running = NULL;
    if (count)
        *count = 0;
    if (!state || !running || !count)
        return fp8_fail(FP8_ERR_ARGUMENT, "state_running: %s is NULL",
                        !state     ? "state"
                        : !running ? "running"
                                   : "count");
    *running = state->running;
    *count = state->tensors;
    return FP8_OK;
}

fp8_status fp8_state_describe(const fp8_state *state, fp8_state_view *view)
{
    if (!state)
        return fp8_fail(FP8_ERR_ARGUMENT, "state_describe: state is NULL");
    FP8_TRY(fp8_check_answer("state_describe", "view", view, sizeof *view));
    *view = (fp8_state_view){
        .size = sizeof *view,
        .tensors = state->tensors,
        .history_length = state->length,
        .scale = state->scale,
        .running = state->running,
        .history = state->history,
        .counts = state->counts,
    };
    return FP8_OK;
}

/* ---- plain data ---- */

/* The arrays of saved data, behind its header; any alignment. */
struct data {
    const struct data_header *header;
    size_t scale, running, entries, history; /* offsets in bytes */
    size_t bytes;
};

static struct data data_of(const struct data_header *header)
{
    size_t array = (size_t)header->tensors * sizeof(float);
    struct data d = { .header = header, .scale = sizeof *header };
    d.running = d.scale + array;
    d.entries = d.running + array;
    d.history = d.entries + array;
    d.bytes = d.history + array * (size_t)header->length;
    return d;
}

static struct data_header header_of(const struct fp8_state *state)
{
    struct data_header header = { .version = DATA_VERSION,
                                  .tensors = state->tensors,
                                  .length = state->length };
    memcpy(header.magic, magic, sizeof magic);
    return header;
}

static float float_at(const unsigned char *data, size_t offset, int64_t index)
{
    float value;
    memcpy(&value, data + offset + (size_t)index * sizeof value, sizeof value);
    return value;
}

static int32_t word_at(const unsigned char *data, size_t offset, int64_t index)
{
    int32_t value;
    memcpy(&value, data + offset + (size_t)index * sizeof value, sizeof value);
    return value;
}

fp8_status fp8_state_bytes(const fp8_state *state, size_t *bytes)
{
    if (!bytes)
        return fp8_fail(FP8_ERR_ARGUMENT, "state_bytes: bytes is NULL");
    *bytes = 0;
    if (!state)
        return fp8_fail(FP8_ERR_ARGUMENT, "state_bytes: state is NULL");
    struct data_header header = header_of(state);
    *bytes = data_of(&header).bytes;
    return FP8_OK;
}

/* Row `age` of a tensor's entries, oldest first, of `entries` in all. */
static int64_t ring_row(const struct fp8_state *image, int64_t tensor, int64_t entries, int64_t age)
{
    return (image->counts[tensor] - entries + age) % image->length;
}

static void write_data(const struct fp8_state *image, unsigned char *data)
{
    struct data_header header = header_of(image);
    const struct data d = data_of(&header);
    size_t array = (size_t)image->tensors * sizeof(float);
    memset(data, 0, d.bytes);
    memcpy(data, &header, sizeof header);
    memcpy(data + d.scale, image->scale, array);
    memcpy(data + d.running, image->running, array);
    for (int64_t t = 0; t < image->tensors; t++) {
        int32_t entries = (int32_t)fp8_min_i64(image->counts[t], image->length);
        memcpy(data + d.entries + (size_t)t * sizeof entries, &entries, sizeof entries);
        for (int64_t age = 0; age < entries; age++)
            memcpy(data + d.history + (size_t)(age * image->tensors + t) * sizeof(float),
                   &image->history[ring_row(image, t, entries, age) * image->tensors + t],
                   sizeof(float));
    }
}

fp8_status fp8_state_save(const fp8_state *state, void *data, size_t bytes, fp8_stream stream)
{
    size_t needed = 0;
    FP8_TRY(fp8_state_bytes(state, &needed));
    if (!data || bytes < needed)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "state_save: data is %p with %zu bytes, but the state takes %zu "
                        "(fp8_state_bytes)",
                        data, bytes, needed);
    struct fp8_state image;
    FP8_TRY(fp8_report(state->context, make_image(state, &image)));
    fp8_status status = move(state, &image, false, stream);
    if (status == FP8_OK)
        write_data(&image, data);
    fp8_release(image.memory);
    return fp8_report(state->context, status);
}

static fp8_status check_header(const struct fp8_state *state, const struct data_header *header,
                               size_t bytes)
{
    if (memcmp(header->magic, magic, sizeof magic) != 0 || header->version != DATA_VERSION ||
        header->reserved)
        return fp8_fail(FP8_ERR_ARGUMENT, "state_load: the data is no saved state of version %d",
                        DATA_VERSION);
    if (header->tensors != state->tensors)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "state_load: the data is of %lld tensors, the state has %lld; load it into "
                        "a state of the same layers",
                        (long long)header->tensors, (long long)state->tensors);
    int64_t limit = (int64_t)1 << 32;
    if (header->length < 1 || header->length > limit || bytes != data_of(header).bytes)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "state_load: %zu bytes are no state of %lld tensors and length %lld", bytes,
                        (long long)header->tensors, (long long)header->length);
    return FP8_OK;
}

static bool is_amax(float value)
{
    return value >= 0.0f && value <= FLT_MAX;
}

static fp8_status check_tensor_data(const struct data *d, const unsigned char *data, int64_t t)
{
    float scale = float_at(data, d->scale, t), running = float_at(data, d->running, t);
    int32_t entries = word_at(data, d->entries, t);
    bool good = is_amax(scale) && is_amax(1.0f / scale) && (running == -1.0f || is_amax(running)) &&
                entries >= 0 && entries <= d->header->length;
    for (int64_t age = 0; good && age < d->header->length; age++) {
        const float amax = float_at(data, d->history, age * d->header->tensors + t);
        good = age < entries ? is_amax(amax) : amax == 0.0f;
    }
    return good ? FP8_OK
                : fp8_fail(FP8_ERR_ARGUMENT,
                           "state_load: the data of tensor %lld holds a number that no state has",
                           (long long)t);
}

/* A tensor's amax by its saved entries, all of them or the newest; 0: not known. */
static float amax_of_data(const struct data *d, const unsigned char *data, int64_t t,
                          bool most_recent)
{
    const int32_t entries = word_at(data, d->entries, t);
    float amax = 0.0f;
    for (int64_t age = most_recent && entries ? entries - 1 : 0; age < entries; age++)
        amax = fmaxf(amax, float_at(data, d->history, age * d->header->tensors + t));
    return amax;
}

/* The saved scale, unless the amaxes saved with it would not fit this state's format: then it is of
 * another format, and is made of them anew. */
static float scale_of_data(const struct data *d, const unsigned char *data,
                           const struct fp8_state *image, int64_t t)
{
    const float scale = float_at(data, d->scale, t), maximum = image->maxima[t];
    const float amax = amax_of_data(d, data, t, image->most_recent);
    const float most = fp8_scale_of_amax(amax, maximum, false);
    const int margin = image->layers[t / FP8_STATE_ROLES]->plan->recipe.margin;
    return amax > 0.0f && scale > ldexpf(most, margin)
               ? fp8_scale_of_amax(amax, maximum, image->power_of_two)
               : scale;
}

static void read_data(const struct data *d, const unsigned char *data, struct fp8_state *image)
{
    for (int64_t t = 0; t < image->tensors; t++) {
        int32_t entries = word_at(data, d->entries, t);
        int32_t kept = (int32_t)fp8_min_i64(entries, image->length);
        image->scale[t] = scale_of_data(d, data, image, t);
        image->running[t] = float_at(data, d->running, t);
        image->counts[t] = kept;
        image->fresh[t] = kept == 0;
        for (int64_t i = 0; i < kept; i++)
            image->history[i * image->tensors + t] =
                float_at(data, d->history, (entries - kept + i) * image->tensors + t);
    }
}

fp8_status fp8_state_load(fp8_state *state, const void *data, size_t bytes, fp8_stream stream)
{
    struct data_header header;
    if (!state || !data || bytes < sizeof header)
        return fp8_fail(FP8_ERR_ARGUMENT, "state_load: %s",
                        !state  ? "state is NULL"
                        : !data ? "data is NULL"
                                : "the data is shorter than its header");
    memcpy(&header, data, sizeof header);
    fp8_status status = check_header(state, &header, bytes);
    const struct data d = data_of(&header);
    for (int64_t t = 0; status == FP8_OK && t < state->tensors; t++)
        status = check_tensor_data(&d, data, t);
    struct fp8_state image;
    if (status == FP8_OK)
        status = make_image(state, &image);
    if (status != FP8_OK)
        return fp8_report(state->context, status);
    set_maxima(state, &image);
    read_data(&d, data, &image);
    status = move(state, &image, true, stream);
    fp8_release(image.memory);
    return fp8_report(state->context, status);
}
