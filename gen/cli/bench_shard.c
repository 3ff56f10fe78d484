/*
 * bench_shard.c - `fp8gen bench shard`: what sharing the weights costs, on several GPUs of one
 * host.
 *
 * In: ranks as threads of this process, a GPU each (or the host, to try the flow). Out: rows of
 * bandwidths by size, of weight gathers, of a training step against the same compute alone.
 * Contenders run in turns between two events; the slowest rank counts, medians over rounds. Two
 * communicators serve the comparison: one whose registered memory copy engines gather, one that is
 * held to NCCL's kernels.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/bench_shard.h"
#include "gen/cli/plan.h"

static const char *const device_choices[] = { "cuda", "host", NULL };
static const char *const reduce_choices[] = { "auto", "collective", "exchange", NULL };
static const char *const dtype_choices[] = { "bf16", "fp32", NULL };

#define NUMBER(word, letter, text, low, high, value)                                               \
    {                                                                                              \
        .name = #word, .kind = CLI_NUMBER, .metavar = letter, .doc = text,                         \
        .offset = offsetof(struct shard_bench_values, word), .min = low, .max = high,              \
        .fallback = value                                                                          \
    }

static const struct cli_option options[] = {
    { .name = "shape",
      .kind = CLI_LIST,
      .metavar = "N,K",
      .doc = "out_features, in_features of a layer of the block; again for more",
      .offset = offsetof(struct shard_bench_values, shapes) },
    { .name = "case",
      .kind = CLI_LIST,
      .metavar = "NAME",
      .doc = "collectives, weights or step; again for more (default all)",
      .offset = offsetof(struct shard_bench_values, cases) },
    { .name = "ranks",
      .kind = CLI_LIST,
      .metavar = "F",
      .doc = "ranks, a GPU each; again for more (default 2)",
      .offset = offsetof(struct shard_bench_values, ranks) },
    NUMBER(tokens, "M", "tokens a rank (default 8192)", 1, 1 << 20, 8192),
    NUMBER(blocks, "B", "blocks of these layers in a step (default 6)", 1, 64, 6),
    { .name = "comm-sms",
      .kind = CLI_NUMBER,
      .metavar = "N",
      .doc = "SMs that dgrad leaves to a reduce-scatter in a step (default 0)",
      .offset = offsetof(struct shard_bench_values, comm_sms),
      .min = 0,
      .max = 128 },
    { .name = "reduce",
      .kind = CLI_CHOICE,
      .metavar = "HOW",
      .doc =
          "sum of dw in a step: auto, collective (NCCL's kernels) or exchange (copies, a kernel)",
      .offset = offsetof(struct shard_bench_values, reduce),
      .choices = reduce_choices },
    { .name = "transposed-shards",
      .kind = CLI_FLAG,
      .doc = "backward gathers transposed copies that the ranks made, instead of transposing",
      .offset = offsetof(struct shard_bench_values, transposed) },
    NUMBER(slots, "N", "weights gathered or in use at once in a step (default 2)", 1, 64, 2),
    NUMBER(mib, "N", "collectives with pieces of up to N MiB a rank (default 128)", 1, 1 << 12,
           128),
    NUMBER(rounds, "N", "medians of N rounds (default 15)", 1, 10000, 15),
    { .name = "device",
      .kind = CLI_CHOICE,
      .metavar = "WHERE",
      .doc = "cuda or host (default cuda; the host shows the flow, not speeds)",
      .offset = offsetof(struct shard_bench_values, device),
      .choices = device_choices },
    { .name = "grad-weight",
      .kind = CLI_CHOICE,
      .metavar = "DTYPE",
      .doc = "dtype of dw and of its sum over ranks: bf16 or fp32 (default bf16)",
      .offset = offsetof(struct shard_bench_values, grad_weight),
      .choices = dtype_choices },
    { .name = "trace",
      .kind = CLI_TEXT,
      .metavar = "FILE",
      .doc = "the timeline of one step as Chrome trace JSON",
      .offset = offsetof(struct shard_bench_values, trace) },
    { .name = "json",
      .kind = CLI_FLAG,
      .doc = "a header object, then one JSON object per row",
      .offset = offsetof(struct shard_bench_values, json) },
    { .name = "source-hash",
      .kind = CLI_TEXT,
      .metavar = "HASH",
      .doc = "hash of the measured sources, kept in the header object",
      .offset = offsetof(struct shard_bench_values, source_hash) },
    { .name = "template-dir",
      .kind = CLI_TEXT,
      .metavar = "DIR",
      .doc = "templates from DIR instead of the built-in ones",
      .offset = offsetof(struct shard_bench_values, template_dir) },
    CLI_OPTION_TUNING(struct shard_bench_values),
    CLI_OPTION_GEMM(struct shard_bench_values),
    { .name = NULL },
};

static const struct {
    const char *name;
    int (*run)(struct shard_bench_rank *r);
} cases[] = { { "collectives", shard_bench_gathers },
              { "weights", shard_bench_weights },
              { "step", shard_bench_step } };
enum { CASES = sizeof cases / sizeof cases[0] };

/* ---- measuring ------------------------------------------------------------------------------- */

/* What a turn is timed with; `lead` keeps the stream busy while the host enqueues. */
struct clock {
    fp8_event *events[2];
    struct cli_buffer lead;
};
enum { LEAD_BYTES = 256 << 20, SHORT_REPEATS = 10 };

/* Device time that the host needs to get ahead, as it is within a step: fills of some 80 us, three
 * for each run, since a collective may take a busy host 200 us. A run of short ones behind it lets
 * the ranks meet on the device before the first event. */
static int run_ahead(struct shard_bench_rank *r, struct shard_bench_item *item, int repeats,
                     const struct clock *clock)
{
    const struct cli_device *device = &r->rank->device;
    fp8_status status = FP8_OK;
    for (int i = 0; !status && !device->is_host && i < 3 * repeats; i++)
        status = fp8_memory_fill(device->context, clock->lead.device, 0, clock->lead.bytes,
                                 device->stream);
    if (status)
        return cli_fp8_failed(status, "rank %d: measuring", r->rank->rank);
    return repeats >= SHORT_REPEATS ? item->run(item->user) : CLI_DONE;
}

/* All ranks begin together; the slowest counts. */
static int take_turn(struct shard_bench_rank *r, struct shard_bench_item *item, int repeats,
                     const struct clock *clock, double *seconds)
{
    const struct cli_device *device = &r->rank->device;
    fp8_event *const *events = clock->events;
    float slowest = 0;
    int code = cli_rank_max(r->rank, &slowest, 1);
    if (!code)
        code = run_ahead(r, item, repeats, clock);
    fp8_status status = code ? FP8_OK : fp8_event_record(events[0], device->stream);
    for (int i = 0; !code && !status && i < repeats; i++)
        code = item->run(item->user);
    if (!code && !status)
        status = fp8_event_record(events[1], device->stream);
    if (!code && !status)
        status = fp8_comm_wait(r->comm, device->stream);
    if (!code && !status)
        status = fp8_event_seconds(events[0], events[1], seconds);
    if (status)
        code = cli_fp8_failed(status, "rank %d: measuring", r->rank->rank);
    slowest = (float)*seconds;
    if (!code)
        code = cli_rank_max(r->rank, &slowest, 1);
    *seconds = (double)slowest / repeats;
    return code;
}

static int open_clock(const struct cli_device *device, struct clock *clock)
{
    fp8_status status = fp8_event_create(device->context, &clock->events[0]);
    if (!status)
        status = fp8_event_create(device->context, &clock->events[1]);
    if (status)
        return cli_fp8_failed(status, "creating an event");
    return device->is_host ? CLI_DONE : cli_buffer_create(device, LEAD_BYTES, false, &clock->lead);
}

static void close_clock(const struct cli_device *device, struct clock *clock)
{
    fp8_event_destroy(clock->events[0]);
    fp8_event_destroy(clock->events[1]);
    cli_buffer_destroy(device, &clock->lead);
}

int shard_bench_measure(struct shard_bench_rank *r, struct shard_bench_item *items, int count,
                        int repeats)
{
    enum { WARM_UPS = 3 };
    int rounds = (int)r->bench->values->rounds;
    double *samples = calloc((size_t)(count * rounds), sizeof *samples), ignored = 0;
    struct clock clock = { { NULL, NULL }, { 0 } };
    int code = open_clock(&r->rank->device, &clock);
    if (!code && !samples) {
        cli_error("out of memory");
        code = CLI_MACHINE;
    }
    for (int round = -WARM_UPS; !code && round < rounds; round++)
        for (int i = 0; !code && i < count; i++)
            code = take_turn(r, &items[i], repeats, &clock,
                             round < 0 ? &ignored : &samples[i * rounds + round]);
    for (int i = 0; !code && i < count; i++)
        items[i].seconds = cli_median(samples + i * rounds, rounds);
    close_clock(&r->rank->device, &clock);
    free(samples);
    return code;
}

/* ---- the ranks ------------------------------------------------------------------------------- */

static int open_comms(struct shard_bench_rank *r)
{
    fp8_comm_options wanted = FP8_COMM_OPTIONS_INIT;
    r->comm = r->kernels = r->rank->comm;
    if (r->rank->device.is_host)
        return CLI_DONE;
    r->own_comms = true;
    r->comm = r->kernels = NULL;
    wanted.rank = r->rank->rank;
    wanted.ranks = r->rank->ranks;
    wanted.id = &r->bench->ids[0];
    fp8_status status = fp8_comm_create(r->rank->device.context, &wanted, &r->comm);
    wanted.id = &r->bench->ids[1];
    wanted.flags = FP8_COMM_NO_COPY_ENGINE;
    wanted.name = "kernels";
    if (!status)
        status = fp8_comm_create(r->rank->device.context, &wanted, &r->kernels);
    return status ? cli_fp8_failed(status, "rank %d: joining the others", r->rank->rank) : CLI_DONE;
}

static void close_comms(struct shard_bench_rank *r, int code)
{
    fp8_comm *comms[] = { r->comm, r->kernels };
    for (int i = 0; r->own_comms && i < 2; i++) {
        if (code && comms[i])
            fp8_comm_abort(comms[i], "the rank ended with an error");
        fp8_comm_destroy(comms[i]);
    }
}

static bool wanted_case(const struct shard_bench_values *values, const char *name)
{
    for (int i = 0; i < values->cases.count; i++) {
        if (strcmp(values->cases.items[i], name) == 0)
            return true;
    }
    return values->cases.count == 0;
}

static int work(struct cli_rank *rank, void *user)
{
    struct shard_bench_rank r = { .bench = user, .rank = rank };
    int code = open_comms(&r);
    for (int i = 0; !code && i < CASES; i++) {
        if (wanted_case(r.bench->values, cases[i].name))
            code = cases[i].run(&r);
    }
    close_comms(&r, code);
    return code;
}

/* ---- the command ----------------------------------------------------------------------------- */

static const struct bench_shape standard[] = { { 6144, 4096, 4096, "" },
                                               { 4096, 4096, 4096, "" },
                                               { 28672, 4096, 4096, "" },
                                               { 4096, 14336, 14336, "" } };

static int check_cases(const struct shard_bench_values *values)
{
    const char *names[CASES];
    bool steps = values->cases.count == 0;
    for (int i = 0; i < CASES; i++)
        names[i] = cases[i].name;
    for (int i = 0; i < values->cases.count; i++) {
        if (cli_find_name("case", "case", values->cases.items[i], names, CASES) < 0)
            return CLI_USAGE;
        steps = steps || strcmp(values->cases.items[i], "step") == 0;
    }
    if (values->trace && !steps) {
        cli_error("--trace keeps the timeline of case 'step', which these cases leave out");
        cli_hint("give --case step too");
        return CLI_USAGE;
    }
    return CLI_DONE;
}

static char *write_spec(const struct shard_bench *b)
{
    const struct shard_bench_values *v = b->values;
    char *text = NULL;
    size_t size;
    FILE *file = open_memstream(&text, &size);
    if (!file)
        return NULL;
    fprintf(file,
            "return model \"bench\" { mesh = { fsdp = %d }, tokens = %d, grad_weight = \"%s\", "
            "layers = {\n",
            b->ranks, (int)v->tokens, v->grad_weight ? v->grad_weight : "bf16");
    for (int i = 0; i < b->shape_count; i++)
        fprintf(file, "  linear \"%s\" { out_features = %lld, in_features = %lld, count = %d },\n",
                b->rows.shapes[i].name, (long long)b->rows.shapes[i].m,
                (long long)b->rows.shapes[i].n, (int)v->blocks);
    fprintf(file, "} }\n");
    if (fclose(file) == 0)
        return text;
    free(text);
    return NULL;
}

/* Leaves the session open: it predicts. */
static int build(struct shard_bench *b, const struct cli_ranks *all, char **folder, char **path)
{
    const struct shard_bench_values *v = b->values;
    struct cli_spec spec = {
        .path = "bench", .template_dir = v->template_dir, .tuning = v->tuning, .gemm = v->gemm
    };
    char *text = write_spec(b);
    if (!text) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    int code = cli_spec_open(&spec, text, &b->gen);
    free(text);
    if (!code)
        code = cli_device_build(&all->lead, b->gen, folder, path);
    const bool predicts = !code && !all->lead.is_host; /* of a GPU */
    json_t *whole = predicts ? plan_read(b->gen, "the plan", &code) : NULL;
    b->predicted = json_incref(json_object_get(whole, "predicted"));
    json_decref(whole);
    return code;
}

/* Chrome's trace format: a complete event a span, a process a rank, a thread a stream. */
static int write_trace(const struct shard_bench *b)
{
    const char *path = b->values->trace;
    char *text = NULL;
    size_t size = 0, places = (size_t)b->ranks * SHARD_BENCH_SPANS;
    FILE *file = open_memstream(&text, &size);
    const char *before = "";
    if (!file) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    fprintf(file, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
    for (size_t i = 0; i < places; i++) {
        const fp8_model_span *s = &b->spans[i].span;
        if (!s->what)
            continue;
        fprintf(file,
                "%s\n{\"name\":\"%s %d\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":\"%s\","
                "\"ts\":%.3f,\"dur\":%.3f}",
                before, s->what, (int)s->layer, s->is_comm ? "communication" : "compute",
                b->spans[i].rank, s->is_comm ? "communication" : "compute", 1e6 * s->start,
                1e6 * (s->finish - s->start));
        before = ",";
    }
    fprintf(file, "\n]}\n");
    int code = CLI_MACHINE;
    if (fclose(file) == 0)
        code = cli_write_file(path, text, size);
    free(text);
    return code;
}

/* NCCL's version, from the copy that libfp8 opens. */
static fp8_status read_version(struct shard_bench *b)
{
    int (*get_version)(int *version) = NULL;
    void *address = NULL;
    int version = 0;
    fp8_status status = fp8_library_symbol(FP8_LIBRARY_NCCL, "ncclGetVersion", &address, NULL);
    if (status)
        return status;
    memcpy(&get_version, &address, sizeof address);
    if (get_version(&version) == 0)
        snprintf(b->rows.nccl, sizeof b->rows.nccl, "%d.%d.%d", version / 10000,
                 version / 100 % 100, version % 100);
    return FP8_OK;
}

static int open_rows(struct shard_bench *b, struct bench_values *shown, const struct cli_ranks *all)
{
    *shown = (struct bench_values){ .rounds = b->values->rounds,
                                    .json = b->values->json,
                                    .source_hash = b->values->source_hash };
    b->rows.values = shown;
    b->rows.device = all->lead;
    int code = shard_bench_open_rows(b);
    if (code)
        return code;
    fp8_status status = all->lead.is_host ? FP8_OK : read_version(b);
    if (!status)
        bench_print_header(&b->rows, "shard");
    return status ? cli_fp8_failed(status, "opening NCCL") : CLI_DONE;
}

/* The timeline's places, and the communicators' names. */
static int prepare(struct shard_bench *b, const struct cli_ranks *all)
{
    fp8_status status = FP8_OK;
    for (int i = 0; !all->lead.is_host && !status && i < 2; i++)
        status = fp8_comm_id_create(&b->ids[i]);
    if (status)
        return cli_fp8_failed(status, "opening NCCL");
    free(b->spans);
    b->spans =
        b->values->trace ? calloc((size_t)b->ranks * SHARD_BENCH_SPANS, sizeof *b->spans) : NULL;
    if (b->spans || !b->values->trace)
        return CLI_DONE;
    cli_error("out of memory");
    return CLI_MACHINE;
}

/* All cases over so many ranks. shown: of the table, opened with the first. */
static int run_part(struct shard_bench *b, struct bench_values *shown, bool first)
{
    struct cli_ranks all = { 0 };
    char *folder = NULL, *path = NULL;
    int code = cli_ranks_open(b->values->device ? b->values->device : "cuda", b->ranks, 60, &all);
    if (!code)
        code = build(b, &all, &folder, &path);
    if (!code && first)
        code = open_rows(b, shown, &all);
    if (!code)
        code = prepare(b, &all);
    if (!code)
        code = cli_ranks_run(&all, path, work, b);
    if (!code)
        shard_bench_errors(b);
    fp8gen_close(b->gen);
    json_decref(b->predicted);
    b->gen = NULL;
    b->predicted = NULL;
    cli_device_built(&folder, &path);
    cli_ranks_close(&all);
    return code;
}

/* The numbers of --ranks. */
static int read_ranks(const struct cli_list *list, int ranks[SHARD_BENCH_PARTS], int *count)
{
    if (list->count > SHARD_BENCH_PARTS) {
        cli_error("--ranks is given %d times, at most %d are taken", list->count,
                  SHARD_BENCH_PARTS);
        return CLI_USAGE;
    }
    *count = list->count ? list->count : 1;
    ranks[0] = 2;
    for (int i = 0; i < list->count; i++) {
        char *end;
        long number = strtol(list->items[i], &end, 10);
        if (end == list->items[i] || *end || number < 2 || number > 64) {
            cli_error("--ranks takes a whole number from 2 to 64, not '%s'", list->items[i]);
            return CLI_USAGE;
        }
        ranks[i] = (int)number;
    }
    return CLI_DONE;
}

static int run(const void *v, int count, char **operands)
{
    struct shard_bench b = { .values = v };
    struct bench_values shapes = { .shapes = b.values->shapes }, shown;
    int ranks[SHARD_BENCH_PARTS], parts = 0;
    (void)count;
    (void)operands;
    b.rows.values = &shapes;
    int code = check_cases(b.values);
    if (!code)
        code = read_ranks(&b.values->ranks, ranks, &parts);
    if (!code)
        code = bench_read_shapes(&b.rows, 2, standard, sizeof standard / sizeof standard[0]);
    if (!code && b.values->trace)
        code = cli_try_file(b.values->trace);
    b.shape_count = b.rows.shape_count;
    for (int i = 0; !code && i < parts; i++) {
        b.ranks = ranks[i];
        code = run_part(&b, &shown, i == 0);
    }
    cli_progress_end();
    if (b.rows.rows && b.rows.table)
        cli_table_print(b.rows.table, 0);
    if (!code && b.values->trace)
        code = write_trace(&b);
    cli_table_destroy(b.rows.table);
    free(b.spans);
    return code;
}

const struct cli_command cli_bench_shard_command = {
    .name = "bench shard",
    .operands = "",
    .summary = "gathers, reductions and a training step over ranks that share weights",
    .details = "Needs a GPU for each rank. collectives: bandwidths over a rank's links (bus) by "
               "size, of gathers by copy engines against NCCL's kernels, and of reduce-scatters. "
               "Sizes (bytes_a_rank with --json) are of a rank's piece: what it sends of a gather, "
               "receives of a reduce-scatter. weights: the gather of a layer's FP8 bytes against "
               "bf16's by NCCL's kernels. step: forward and backward over all blocks with gathers "
               "ahead and reduce-scatters behind, against the same compute with no communication. "
               "The slowest rank counts. A ratio above 1 is better than the baseline. predicted: "
               "how far off 'plan' is there, in per cent of what was measured. --trace keeps the "
               "step of the last --ranks.",
    .options = options,
    .values_size = sizeof(struct shard_bench_values),
    .run = run,
};
