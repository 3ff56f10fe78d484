/*
 * bench_shard_gather.c - the cases "collectives" and "weights" of `fp8gen bench shard`.
 *
 * Bandwidths are those over one rank's links (bus): bytes a rank * (ranks - 1) / seconds for a
 * gather; for a reduce-scatter the same of what a rank receives. The bandwidth of the result
 * (algorithm) is beside it.
 */
#include <stdio.h>
#include <string.h>

#include "gen/cli/bench_shard.h"

/* A gather through one communicator, from and into memory of its own. */
struct gather {
    struct shard_bench_rank *r;
    fp8_comm *comm;
    void *memory; /* ranks * bytes; this rank's piece in its place */
    size_t bytes;
    /* of a weight: what makes it usable */
    const fp8_layer *layer;
    fp8_operand weight;
    struct cli_buffer weight_memory, workspace;
    uint64_t version;
};

static int failed(const struct gather *g, fp8_status status, const char *what)
{
    return cli_fp8_failed(status, "rank %d, %s", g->r->rank->rank, what);
}

/* times: of what one rank's pieces of all take. */
static int open_bytes(struct gather *g, struct shard_bench_rank *r, fp8_comm *comm, size_t bytes,
                      size_t times)
{
    *g = (struct gather){ .r = r, .comm = comm, .bytes = bytes };
    const size_t all = times * bytes * (size_t)r->rank->ranks;
    fp8_status status = fp8_comm_alloc(comm, all, &g->memory);
    if (!status) /* zeros are a valid shard */
        status =
            fp8_memory_fill(r->rank->device.context, g->memory, 0, all, r->rank->device.stream);
    return status ? failed(g, status, "memory of a gather") : CLI_DONE;
}

static int open_gather(struct gather *g, struct shard_bench_rank *r, fp8_comm *comm, size_t bytes)
{
    return open_bytes(g, r, comm, bytes, 1);
}

static void close_gather(struct gather *g)
{
    if (!g->r)
        return;
    fp8_comm_free(g->comm, g->memory);
    cli_buffer_destroy(&g->r->rank->device, &g->weight_memory);
    cli_buffer_destroy(&g->r->rank->device, &g->workspace);
}

static int run_gather(void *user)
{
    struct gather *g = user;
    fp8_gather_part part = { (char *)g->memory + (size_t)g->r->rank->rank * g->bytes, g->memory,
                             g->bytes };
    fp8_status status =
        fp8_comm_all_gather(g->comm, &part, 1, "a benchmark's bytes", g->r->rank->device.stream);
    return status ? failed(g, status, "gathering") : CLI_DONE;
}

static double bus(const struct shard_bench_rank *r, double bytes, double seconds)
{
    return seconds > 0 ? bytes * (r->rank->ranks - 1) / seconds * 1e-9 : 0;
}

static json_t *sizes(const struct shard_bench_rank *r, double bytes, double seconds)
{
    fp8_comm_info info = { .size = sizeof info };
    fp8_comm_describe(r->comm, &info);
    return json_pack(
        "{s:I, s:f, s:i, s:i, s:b}", "bytes_a_rank", (json_int_t)bytes, "algorithm_gbytes_per_s",
        seconds > 0 ? bytes * r->rank->ranks / seconds * 1e-9 : 0.0, "ranks", r->rank->ranks,
        "nccl_version", (int)info.version, "copy_engine", (int)info.is_copy_engine);
}

/* The way that gathers through the first communicator take. */
static const char *way(const struct shard_bench_rank *r)
{
    fp8_comm_info info = { .size = sizeof info };
    fp8_comm_describe(r->comm, &info);
    return info.is_copy_engine || !r->own_comms ? "copy_engine" : "kernels";
}

static int measure_gather(struct shard_bench_rank *r, size_t bytes)
{
    struct gather engine = { 0 }, kernels = { 0 };
    struct bench_shape shape = { 0 };
    char pass[32];
    snprintf(pass, sizeof pass, "all_gather %zu MiB", bytes >> 20);
    int code = open_gather(&engine, r, r->comm, bytes);
    if (!code)
        code = open_gather(&kernels, r, r->kernels, bytes);
    struct shard_bench_item items[] = { { run_gather, &engine, 0 }, { run_gather, &kernels, 0 } };
    if (!code)
        code = shard_bench_measure(r, items, 2, bytes < (64u << 20) ? 40 : 10);
    if (!code) {
        struct bench_result result = {
            .bench = "shard",
            .name = "gather_copy_engine",
            .pass = pass,
            .shape = &shape,
            .unit = "GB/s",
            .value = bus(r, (double)bytes, items[0].seconds),
            .baseline = bus(r, (double)bytes, items[1].seconds),
            .baseline_name = r->own_comms ? "NCCL's default kernels, bus bandwidth" : "the same",
            .launches = -1,
        };
        struct shard_bench_times times = {
            { items[0].seconds, items[1].seconds },
            { shard_bench_collective(r, "all_gather", way(r), (double)bytes),
              shard_bench_collective(r, "all_gather", "kernels", (double)bytes) }
        };
        shard_bench_row(r, &result, &times, sizes(r, (double)bytes, items[0].seconds));
    }
    close_gather(&kernels);
    close_gather(&engine);
    return code;
}

/* ---- sums ------------------------------------------------------------------------------------ */

struct sum {
    struct gather memory;
    fp8_dtype dtype;
};

/* Every rank's part to every rank: what an exchange moves before the sum of our own. */
static int run_exchange(void *user)
{
    struct gather *g = user;
    fp8_exchange_part part = { g->memory, (char *)g->memory + (size_t)g->r->rank->ranks * g->bytes,
                               g->bytes };
    fp8_status status = fp8_comm_all_to_all(g->comm, &part, 1, "a benchmark's gradients",
                                            g->r->rank->device.stream);
    return status ? failed(g, status, "exchanging") : CLI_DONE;
}

static int run_sum(void *user)
{
    struct sum *s = user;
    struct gather *g = &s->memory;
    fp8_reduce_part part = { g->memory, (char *)g->memory + (size_t)g->r->rank->rank * g->bytes,
                             g->bytes / fp8_dtype_bytes(s->dtype), s->dtype, 0 };
    fp8_status status =
        fp8_comm_reduce_scatter(g->comm, &part, 1, "a benchmark's sums", g->r->rank->device.stream);
    return status ? failed(g, status, "reducing") : CLI_DONE;
}

/* In memory that is not registered, as sums want it: of the communicator without copy engines. */
static int open_sum(struct sum *s, struct shard_bench_rank *r, size_t bytes)
{
    return open_gather(&s->memory, r, r->kernels, bytes);
}

static int measure_sum(struct shard_bench_rank *r, size_t bytes, fp8_dtype dtype)
{
    struct sum sum = { .dtype = dtype };
    struct bench_shape shape = { 0 };
    char name[32], pass[48];
    int code = open_sum(&sum, r, bytes);
    struct shard_bench_item item = { run_sum, &sum, 0 };
    if (!code)
        code = shard_bench_measure(r, &item, 1, bytes < (64u << 20) ? 40 : 10);
    snprintf(pass, sizeof pass, "reduce_scatter %zu MiB", bytes >> 20);
    snprintf(name, sizeof name, "reduce_scatter_%s", fp8_dtype_name(dtype));
    if (!code) {
        struct bench_result result = {
            .bench = "shard",
            .name = name,
            .pass = pass,
            .shape = &shape,
            .unit = "GB/s",
            .value = bus(r, (double)bytes, item.seconds),
            .baseline = -1,
            .launches = -1,
        };
        struct shard_bench_times times = {
            { item.seconds, -1 },
            { shard_bench_collective(r, "reduce_scatter", fp8_dtype_name(dtype), (double)bytes),
              -1 }
        };
        shard_bench_row(r, &result, &times, sizes(r, (double)bytes, item.seconds));
    }
    close_gather(&sum.memory);
    return code;
}

/* NCCL before 2.28 has no all_to_all; the host's ranks have. */
static bool exchanges(const struct shard_bench_rank *r)
{
    fp8_comm_info info = { .size = sizeof info };
    fp8_comm_describe(r->comm, &info);
    return info.is_copy_engine || !r->own_comms;
}

/* Copies alone against the collective that sums bf16 over the same links. */
static int measure_exchange(struct shard_bench_rank *r, size_t bytes)
{
    struct gather both = { 0 };
    struct sum sum = { .dtype = FP8_DTYPE_BF16 };
    struct bench_shape shape = { 0 };
    char pass[48];
    int code = open_bytes(&both, r, r->comm, bytes, 2);
    if (!code)
        code = open_sum(&sum, r, bytes);
    struct shard_bench_item items[] = { { run_exchange, &both, 0 }, { run_sum, &sum, 0 } };
    if (!code)
        code = shard_bench_measure(r, items, 2, bytes < (64u << 20) ? 40 : 10);
    snprintf(pass, sizeof pass, "all_to_all %zu MiB", bytes >> 20);
    if (!code) {
        struct bench_result result = {
            .bench = "shard",
            .name = "exchange_copy_engine",
            .pass = pass,
            .shape = &shape,
            .unit = "GB/s",
            .value = bus(r, (double)bytes, items[0].seconds),
            .baseline = bus(r, (double)bytes, items[1].seconds),
            .baseline_name = "reduce_scatter of bf16, bus bandwidth",
            .launches = -1,
        };
        struct shard_bench_times times = {
            { items[0].seconds, items[1].seconds },
            { shard_bench_collective(r, "all_to_all", "copy_engine", (double)bytes),
              shard_bench_collective(r, "reduce_scatter", "bf16", (double)bytes) }
        };
        shard_bench_row(r, &result, &times, sizes(r, (double)bytes, items[0].seconds));
    }
    close_gather(&sum.memory);
    close_gather(&both);
    return code;
}

int shard_bench_gathers(struct shard_bench_rank *r)
{
    size_t most = (size_t)r->bench->values->mib << 20;
    int code = CLI_DONE;
    for (size_t bytes = 1 << 20; !code && bytes <= most; bytes *= 2)
        code = measure_gather(r, bytes);
    for (size_t bytes = 8 << 20; !code && bytes <= most; bytes *= 4) {
        code = measure_sum(r, bytes, FP8_DTYPE_BF16);
        if (!code)
            code = measure_sum(r, bytes, FP8_DTYPE_FP32);
        if (!code && exchanges(r))
            code = measure_exchange(r, bytes);
    }
    return code;
}

/* ---- weights --------------------------------------------------------------------------------- */

static fp8_sharding sharding_of(const struct shard_bench_rank *r)
{
    fp8_sharding sharding = FP8_SHARDING_INIT;
    sharding.rank = r->rank->rank;
    sharding.ranks = r->rank->ranks;
    return sharding;
}

/* Also makes the row and the transposed copy that the passes read. */
static int run_usable(void *user)
{
    struct gather *g = user;
    fp8_sharding sharding = sharding_of(g->r);
    fp8_shard_piece pieces[64] = { { 0 } };
    fp8_unpack_args args = FP8_UNPACK_ARGS_INIT;
    int code = run_gather(g);
    for (int i = 0; i < g->r->rank->ranks; i++) {
        sharding.rank = i;
        pieces[i].shard = (char *)g->memory + (size_t)i * g->bytes;
        fp8_status status =
            fp8_shard_range(g->layer, &sharding, &pieces[i].first, &pieces[i].count, NULL);
        if (!code && status)
            code = failed(g, status, "shards");
    }
    if (code)
        return code;
    args.sharding = &sharding;
    args.pieces = pieces;
    args.piece_count = (size_t)g->r->rank->ranks;
    args.version = ++g->version;
    args.weight = &g->weight;
    args.call.workspace = g->workspace.device;
    args.call.workspace_bytes = g->workspace.bytes;
    args.call.stream = g->r->rank->device.stream;
    fp8_status status = fp8_shard_unpack(g->layer, &args);
    return status ? failed(g, status, "unpacking the weight") : CLI_DONE;
}

static int open_weight(struct gather *g, struct shard_bench_rank *r, const fp8_layer *layer)
{
    fp8_sharding sharding = sharding_of(r);
    size_t bytes = 0, weight = 0, workspace = 0;
    fp8_status status = fp8_shard_bytes(layer, &sharding, &bytes);
    if (!status)
        status = fp8_layer_bytes(layer, 0, FP8_BYTES_WEIGHT, &weight);
    if (!status)
        status = fp8_layer_bytes(layer, 0, FP8_BYTES_WORKSPACE, &workspace);
    if (status)
        return cli_fp8_failed(status, "rank %d, sizes of a weight", r->rank->rank);
    int code = open_gather(g, r, r->comm, bytes);
    if (!code)
        code = cli_buffer_create(&r->rank->device, weight, false, &g->weight_memory);
    if (!code)
        code = cli_buffer_create(&r->rank->device, workspace, false, &g->workspace);
    g->layer = layer;
    g->weight = (fp8_operand)FP8_OPERAND_INIT;
    g->weight.data = g->weight_memory.device;
    g->weight.bytes = weight;
    return code;
}

static int measure_weight(struct shard_bench_rank *r, const struct bench_shape *layer_shape)
{
    static const char *const names[] = { "gather_fp8_vs_bf16", "gather_fp8_usable_vs_bf16" };
    struct gather fp8 = { 0 }, bf16 = { 0 };
    struct bench_shape shape = { 0, layer_shape->m, layer_shape->n, "" };
    int64_t chunk = (shape.n + r->rank->ranks - 1) / r->rank->ranks;
    fp8_layer *layer = NULL;
    fp8_status status = fp8_layer_create(r->rank->bundle, layer_shape->name, &layer);
    int code = status ? cli_fp8_failed(status, "layer '%s'", layer_shape->name)
                      : open_weight(&fp8, r, layer);
    if (!code)
        code = open_gather(&bf16, r, r->kernels, (size_t)(chunk * shape.k * 2));
    struct shard_bench_item items[] = { { run_gather, &fp8, 0 },
                                        { run_usable, &fp8, 0 },
                                        { run_gather, &bf16, 0 } };
    if (!code)
        code = shard_bench_measure(r, items, 3, 20);
    for (int i = 0; !code && i < 2; i++) {
        struct bench_result result = {
            .bench = "shard",
            .name = names[i],
            .pass = i == 0 ? "all_gather" : "all_gather + unpack",
            .shape = &shape,
            .unit = "us",
            .value = 1e6 * items[i].seconds,
            .baseline = 1e6 * items[2].seconds,
            .baseline_name = "bf16 weight by NCCL's default kernels",
            .lower_is_better = true,
            .launches = -1,
        };
        double predicted = shard_bench_collective(r, "all_gather", way(r), (double)fp8.bytes);
        struct shard_bench_times times = { { items[i].seconds, items[2].seconds },
                                           { i == 0 ? predicted : -1,
                                             shard_bench_collective(r, "all_gather", "kernels",
                                                                    (double)bf16.bytes) } };
        shard_bench_row(r, &result, &times, sizes(r, (double)fp8.bytes, items[i].seconds));
    }
    close_gather(&bf16);
    close_gather(&fp8);
    fp8_layer_destroy(layer);
    return code;
}

int shard_bench_weights(struct shard_bench_rank *r)
{
    int code = CLI_DONE;
    for (int i = 0; !code && i < r->bench->shape_count; i++)
        code = measure_weight(r, &r->bench->rows.shapes[i]);
    return code;
}
