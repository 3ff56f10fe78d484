/*
 * test_nccl.c - ranks as real processes over the fake NCCL: what they compute, and that none hangs
 * when another dies, does not come, or calls something else.
 */
#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include "runtime/fp8_format.h"
#include "runtime/fp8_model.h"
#include "runtime/nccl_abi.h"
#include "tests/bundle/cuda_rig.h"
#include "tests/bundle/process_rig.h"

static char *folder; /* of the bundle */

static void run(int ranks, struct process start, process_body body, unsigned missing,
                unsigned killed)
{
    start.folder = folder;
    process_run(ranks, start, body, missing, killed);
}

/* ---- right ---- */

static int collectives(struct process *p)
{
    CHECK(process_join(p) == FP8_OK);
    unsigned char bytes[16 * 8], mine[8] = { 0x7f, 0x80, 0xff, 0, (unsigned char)p->rank, 1, 2, 3 };
    const fp8_gather_part parts[] = { { mine, bytes, 8 }, { mine, bytes, 8 }, { NULL, NULL, 0 } };
    CHECK(fp8_comm_all_gather(p->comm, parts, 3, "w", NULL) == FP8_OK);
    CHECK(fp8_comm_wait(p->comm, NULL) == FP8_OK);
    for (int i = 0; i < p->ranks; i++) {
        mine[4] = (unsigned char)i;
        CHECK(memcmp(bytes + i * 8, mine, 8) == 0);
    }
    float send[32], recv[2], most[3] = { (float)p->rank, -(float)p->rank, -1 };
    for (int i = 0; i < 2 * p->ranks; i++)
        send[i] = (float)(i + p->rank * 100);
    for (uint32_t average = 0; average < 2; average++) {
        const fp8_reduce_part part = { send, recv, 2, FP8_DTYPE_FP32, average };
        CHECK(fp8_comm_reduce_scatter(p->comm, &part, 1, "dw", NULL) == FP8_OK);
        float sum = 0;
        for (int i = 0; i < p->ranks; i++)
            sum += (float)(p->rank * 2 + 1 + i * 100);
        CHECK(recv[1] == (average ? sum / (float)p->ranks : sum));
    }
    unsigned char out[64], in[64];
    for (int i = 0; i < p->ranks * 4; i++)
        out[i] = (unsigned char)(p->rank * 64 + i);
    const fp8_exchange_part mail = { out, in, 4 };
    CHECK(fp8_comm_all_to_all(p->comm, &mail, 1, "dw", NULL) == FP8_OK);
    for (int i = 0; i < p->ranks * 4; i++)
        CHECK(in[i] == i / 4 * 64 + p->rank * 4 + i % 4);
    CHECK(fp8_comm_all_reduce_max(p->comm, most, 3, "amax", NULL) == FP8_OK);
    CHECK(most[0] == (float)(p->ranks - 1) && most[1] == 0 && most[2] == -1);
    const fp8_reduce_part fp8 = { send, recv, 2, FP8_DTYPE_E4M3, 0 };
    CHECK(fp8_comm_reduce_scatter(p->comm, &fp8, 1, "dw", NULL) == FP8_ERR_DTYPE);
    CHECK(fp8_comm_agree(p->comm, "the spec", "abc") == FP8_OK);
    fp8_comm_info info = { .size = sizeof info };
    CHECK(fp8_comm_describe(p->comm, &info) == FP8_OK);
    CHECK(strcmp(info.transport, "nccl") == 0 && info.version == fake_nccl()->version);
    CHECK(info.is_owned && info.rank == p->rank && strstr(info.path, "libnccl.so.2"));
    CHECK(fake_nccl()->last_blocking == 1);
    process_leave(p);
    CHECK(fake_nccl()->live == 0 && bundle_fake_cuda()->live == 0 &&
          bundle_fake_cuda()->misuse == 0);
    return 0;
}

static void test_collectives(void **state)
{
    (void)state;
    for (int ranks = 2; ranks <= 4; ranks++)
        run(ranks, (struct process){ .timeout = 10 }, collectives, 0, 0);
    fake_nccl()->version = 22304; /* before FP8 dtypes, windows and policies */
    run(3, (struct process){ .timeout = 10 }, collectives, 0, 0);
    fake_nccl()->version = 23203;
}

enum { ONE_WITHOUT_WINDOW = 6, ONE_WITHOUT_MEMORY, WINDOW_VARIANTS };

static int window(struct process *p)
{
    fake_nccl()->no_window = p->variant == 1 || (p->variant == ONE_WITHOUT_WINDOW && p->rank == 1);
    fake_nccl()->no_memory = p->variant == ONE_WITHOUT_MEMORY && p->rank == 1;
    if (p->variant == 2)
        fake_nccl()->version = 22704;
    if (p->variant == 3)
        p->flags = FP8_COMM_NO_COPY_ENGINE;
    if (p->variant == 4 || p->variant == 5)
        fake_nccl()->version = 22809;
    if (p->variant == 4)
        setenv("NCCL_NVLS_ENABLE", "1", 1);
    const bool asks = p->variant < 2 || p->variant >= 5,
               engine = p->variant == 0 || p->variant == 5;
    const bool is_new = p->variant != 2 && p->variant != 4 && p->variant != 5;
    CHECK(process_join(p) == FP8_OK);
    CHECK((fake_nccl()->last_policy == FP8_NCCL_CTA_POLICY_ZERO) == asks);
    CHECK(fake_nccl()->last_config_size ==
          (is_new ? sizeof(fp8_nccl_config) : offsetof(fp8_nccl_config, channels_per_net_peer)));
    CHECK(!is_new || fake_nccl()->last_nvls == FP8_NCCL_NVLS_DISABLE);
    void *memory = NULL;
    CHECK(fp8_comm_alloc(p->comm, 10000, &memory) == FP8_OK);
    memset(memory, p->rank, 10000);
    fp8_comm_info info = { .size = sizeof info };
    CHECK(fp8_comm_describe(p->comm, &info) == FP8_OK);
    CHECK(info.is_copy_engine == engine);
    CHECK(fake_nccl()->windows == engine);
    CHECK(fake_nccl()->allocations == asks);
    char *bytes = memory;
    const fp8_gather_part part = { bytes + p->rank * 100, bytes, 100 };
    CHECK(fp8_comm_all_gather(p->comm, &part, 1, "w", NULL) == FP8_OK);
    for (int i = 0; i < p->ranks; i++)
        CHECK(bytes[i * 100 + 99] == i);
    float own[8] = { 0 };
    const fp8_reduce_part sums[] = { { memory, own, 4, FP8_DTYPE_FP32, 0 },
                                     { own, bytes + 9996, 1, FP8_DTYPE_FP32, 0 } };
    for (int i = 0; i < 2; i++) {
        fp8_status status = fp8_comm_reduce_scatter(p->comm, &sums[i], 1, "dw", NULL);
        CHECK(status == (engine ? FP8_ERR_ARGUMENT : FP8_OK));
        CHECK(!engine ||
              process_says("reduce_scatter of dw: part 0 is in memory of fp8_comm_alloc"));
    }
    fp8_comm_free(p->comm, memory);
    process_leave(p);
    CHECK(fake_nccl()->live == 0 && bundle_fake_cuda()->live == 0);
    return 0;
}

static void test_windows(void **state)
{
    (void)state;
    unsetenv("NCCL_NVLS_ENABLE");
    for (int variant = 0; variant < WINDOW_VARIANTS; variant++)
        run(2, (struct process){ .timeout = 10, .variant = variant }, window, 0, 0);
}

/* ---- wrong ---- */

/* Rank 2 is killed between two collectives. */
static int dies(struct process *p)
{
    float value = 1;
    CHECK(process_join(p) == FP8_OK);
    CHECK(fp8_comm_all_reduce_max(p->comm, &value, 1, "amax", NULL) == FP8_OK);
    if (p->rank == 2)
        raise(SIGKILL);
    const double start = process_now();
    unsigned char bytes[64] = { 0 };
    const fp8_gather_part part = { bytes, bytes + 8, 8 };
    CHECK(fp8_comm_all_gather(p->comm, &part, 1, "w of layer 'qkv'", NULL) == FP8_OK);
    CHECK(fp8_comm_wait(p->comm, NULL) == FP8_ERR_TIMEOUT);
    CHECK(process_says("rank") && process_says("of 4 ('fsdp')") &&
          process_says("all_gather of w of layer 'qkv'"));
    CHECK(process_now() - start < p->timeout * 3);
    CHECK(fake_nccl()->aborts == 1);
    CHECK(fp8_comm_all_gather(p->comm, &part, 1, "w", NULL) == FP8_ERR_TIMEOUT);
    CHECK(fp8_stream_synchronize(p->context, NULL) == FP8_OK);
    process_leave(p);
    CHECK(fake_nccl()->aborts == 1 && fake_nccl()->live == 0);
    return 0;
}

static void test_killed(void **state)
{
    (void)state;
    run(4, (struct process){ .timeout = 1.5 }, dies, 0, 1u << 2);
    run(4, (struct process){ .timeout = 1.5, .flags = FP8_COMM_NO_WATCHDOG }, dies, 0, 1u << 2);
    /* the next run starts clean */
    run(4, (struct process){ .timeout = 10 }, collectives, 0, 0);
}

static int waits(struct process *p)
{
    CHECK(process_join(p) == FP8_ERR_TIMEOUT);
    CHECK(strstr(fp8_last_error(), "joining") ||
          process_says(p->rank == 0 ? "for rank 2" : "for rank 0"));
    process_leave(p);
    return 0;
}

static int waits_for_zero(struct process *p)
{
    CHECK(process_join(p) == FP8_ERR_TIMEOUT && process_says("for rank 0"));
    process_leave(p);
    return 0;
}

static void test_never_came(void **state)
{
    (void)state;
    run(3, (struct process){ .timeout = 0.5 }, waits_for_zero, 1u << 0, 0);
    run(3, (struct process){ .timeout = 0.5 }, waits, 1u << 2, 0);
    run(3, (struct process){ .timeout = 10 }, collectives, 0, 0);
}

static int other_call(struct process *p)
{
    float values[2] = { 1, 2 };
    unsigned char bytes[64] = { 0 };
    const fp8_gather_part part = { bytes, bytes + 8, 8 };
    CHECK(process_join(p) == FP8_OK);
    fp8_status status = p->rank == 1
                            ? fp8_comm_all_reduce_max(p->comm, values, 2, "amax", NULL)
                            : fp8_comm_all_gather(p->comm, &part, 1, "w of layer 'b'", NULL);
    CHECK(status == FP8_OK);
    CHECK(fp8_comm_wait(p->comm, NULL) == FP8_ERR_TIMEOUT);
    CHECK(process_says(p->rank == 1 ? "all_reduce_max of amax" : "all_gather of w of layer 'b'"));
    process_leave(p);
    return 0;
}

static void test_other_calls(void **state)
{
    (void)state;
    run(3, (struct process){ .timeout = 0.5 }, other_call, 0, 0);
}

static int async(struct process *p)
{
    float value = 1;
    CHECK(process_join(p) == FP8_OK);
    fake_nccl()->async_error = 6;
    while (p->variant == 1 && fp8_comm_poll(p->comm) == FP8_OK)
        usleep(1000);
    CHECK(fp8_comm_all_reduce_max(p->comm, &value, 1, "amax", NULL) == FP8_ERR_COMM);
    CHECK(process_says("an error of the fake NCCL") && process_says("(6)"));
    CHECK(fake_nccl()->aborts == 1);
    process_leave(p);
    return 0;
}

static void test_async_errors(void **state)
{
    (void)state;
    run(2, (struct process){ .timeout = 5 }, async, 0, 0);
    run(2, (struct process){ .timeout = 5, .variant = 1 }, async, 0, 0);
}

static int gives_up(struct process *p)
{
    CHECK(process_join(p) == FP8_OK);
    fp8_comm_abort(p->comm, "no memory for layer 'c'");
    CHECK(fp8_comm_poll(p->comm) == FP8_ERR_COMM && process_says("no memory for layer 'c'"));
    CHECK(fake_nccl()->aborts == 1);
    process_leave(p);
    return 0;
}

static void test_abort(void **state)
{
    (void)state;
    run(2, (struct process){ .timeout = 5 }, gives_up, 0, 0);
}

/* ---- adoption ---- */

static void *own_symbol(void *user, const char *name)
{
    return strcmp(name, (const char *)user) == 0 ? NULL
                                                 : dlsym(dlopen("libnccl.so.2", RTLD_NOW), name);
}

static int adopts(struct process *p)
{
    CHECK(process_join(p) == FP8_OK);
    const int64_t destroys = fake_nccl()->destroys; /* what was split to make ours */
    struct {                                        /* the caller's own communicator */
        int (*id)(fp8_nccl_id *);
        int (*init)(fp8_nccl_comm *, int, fp8_nccl_id, int, fp8_nccl_config *);
        int (*abort)(fp8_nccl_comm);
    } call;
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    CHECK(library);
    *(void **)&call.id = dlsym(library, "ncclGetUniqueId");
    *(void **)&call.init = dlsym(library, "ncclCommInitRankConfig");
    *(void **)&call.abort = dlsym(library, "ncclCommAbort");
    fp8_nccl_id ids[4];
    if (p->rank == 0)
        CHECK(call.id(&ids[0]) == 0);
    const fp8_gather_part part = { ids, ids, sizeof ids[0] };
    fp8_nccl_id first = ids[0];
    const fp8_gather_part apart = { &first, ids, sizeof first };
    (void)part;
    CHECK(fp8_comm_all_gather(p->comm, &apart, 1, "id", NULL) == FP8_OK);
    fp8_nccl_config config = { .size = sizeof config, .magic = FP8_NCCL_MAGIC };
    fp8_nccl_comm handle = NULL;
    CHECK(call.init(&handle, p->ranks, ids[0], p->rank, &config) == FP8_NCCL_IN_PROGRESS);
    fp8_comm *comm = NULL;
    fp8_comm_adopt_args args = FP8_COMM_ADOPT_ARGS_INIT;
    CHECK(fp8_comm_adopt(p->context, &args, &comm) == FP8_ERR_ARGUMENT &&
          process_says("nccl_comm is NULL"));
    args.nccl_comm = handle;
    args.nccl_version = 22000;
    CHECK(fp8_comm_adopt(p->context, &args, &comm) == FP8_ERR_LIBRARY && process_says("22000") &&
          process_says("23203"));
    args.nccl_version = 23203;
    args.symbol = own_symbol;
    args.symbol_user = (void *)(uintptr_t) "ncclAllGather";
    CHECK(fp8_comm_adopt(p->context, &args, &comm) == FP8_ERR_LIBRARY &&
          process_says("ncclAllGather"));
    args.symbol_user = (void *)(uintptr_t) "none";
    args.timeout_seconds = p->timeout;
    CHECK(fp8_comm_adopt(p->context, &args, &comm) == FP8_OK);
    fp8_comm_info info = { .size = sizeof info };
    CHECK(fp8_comm_describe(comm, &info) == FP8_OK);
    CHECK(!info.is_owned && info.rank == p->rank && info.ranks == p->ranks);
    float value = (float)p->rank;
    CHECK(fp8_comm_all_reduce_max(comm, &value, 1, "amax", NULL) == FP8_OK);
    CHECK(value == (float)(p->ranks - 1));
    void *memory = NULL;
    CHECK(fp8_comm_alloc(comm, 100, &memory) == FP8_OK && fake_nccl()->windows == 0);
    fp8_comm_free(comm, memory);
    if (p->rank == 0) { /* alone: runs out of time, in the call too, and is not aborted */
        fake_nccl()->patience = p->timeout + 1;
        CHECK(fp8_comm_all_reduce_max(comm, &value, 1, "amax", NULL) == FP8_OK);
        CHECK(fp8_comm_wait(comm, NULL) == FP8_ERR_TIMEOUT && process_says("must abort it"));
    }
    CHECK(fake_nccl()->aborts == 0);
    fp8_comm_destroy(comm);
    CHECK(fake_nccl()->aborts == 0 && fake_nccl()->destroys == destroys);
    CHECK(call.abort(handle) == 0);
    process_leave(p);
    CHECK(fake_nccl()->live == 0);
    return 0;
}

static void test_adopted(void **state)
{
    (void)state;
    run(2, (struct process){ .timeout = 1.5 }, adopts, 0, 0);
}

/* ---- models ---- */

static const char *const layer_names[] = { "plain", "bias" };

/* Forward of two layers; variant 1: rank 1 leaves the first out in step 2; 3: the second; 2:
 * another spec. */
static int model(struct process *p)
{
    fp8_bundle *bundle = NULL;
    fp8_layer *layers[2];
    fp8_layer_info info[2] = { { .size = sizeof info[0] }, { .size = sizeof info[0] } };
    fp8_model_layer model_layers[2];
    CHECK(process_join(p) == FP8_OK);
    CHECK(fp8_bundle_open(p->context, folder, &bundle) == FP8_OK);
    size_t workspace = 0, bytes;
    for (int i = 0; i < 2; i++) {
        CHECK(fp8_layer_create(bundle, layer_names[i], &layers[i]) == FP8_OK);
        CHECK(fp8_layer_describe(layers[i], &info[i]) == FP8_OK);
        CHECK(fp8_layer_bytes(layers[i], info[i].max_tokens, FP8_BYTES_WORKSPACE, &bytes) ==
              FP8_OK);
        workspace = bytes > workspace ? bytes : workspace;
        model_layers[i] = (fp8_model_layer)FP8_MODEL_LAYER_INIT;
        model_layers[i].layer = layers[i];
    }
    fp8_call call = FP8_CALL_INIT;
    void *memory = NULL;
    CHECK(fp8_memory_alloc(p->context, workspace, &memory) == FP8_OK);
    call.workspace = memory;
    call.workspace_bytes = workspace;
    fp8_model_options options = FP8_MODEL_OPTIONS_INIT;
    options.layer_count = 2;
    options.layers = model_layers;
    options.context = p->context;
    options.comm = p->comm;
    options.hash = p->variant == 2 && p->rank == 1 ? "other" : "one";
    fp8_model *model = NULL;
    fp8_status status = fp8_model_create(&options, &model);
    if (p->variant == 2) {
        CHECK(status == FP8_ERR_COMM && process_says("rank 1 has spec other") &&
              process_says("rank 0 has spec one"));
        return 0;
    }
    CHECK(status == FP8_OK);
    for (uint64_t step = 1; step < 4; step++) {
        fp8_tensor w[2], bias[2];
        for (int i = 0; i < 2; i++) {
            int64_t first, count;
            CHECK(fp8_model_rows(model, i, &first, &count) == FP8_OK);
            w[i] = cuda_tensor(count, info[i].in_features, info[i].in_features, info[i].w_dtype, 0)
                       .tensor;
            memset(w[i].data, 0,
                   (size_t)(count * info[i].in_features) * fp8_dtype_bytes(w[i].dtype));
            bias[i] = cuda_tensor(1, count, count, FP8_DTYPE_BF16, 0).tensor;
            for (int64_t j = 0; j < count; j++)
                ((uint16_t *)bias[i].data)[j] = fp8_float_to_bf16((float)(first + j));
        }
        fp8_model_update_args update = FP8_MODEL_UPDATE_ARGS_INIT;
        update.w = w;
        update.bias = bias;
        update.version = step;
        update.call = call;
        CHECK(fp8_model_update(model, &update) == FP8_OK);
        for (int i = 0; i < 2; i++) {
            const int64_t tokens = p->rank; /* rank 0 has none */
            fp8_tensor x =
                cuda_tensor(tokens, info[i].in_features, info[i].in_features, info[i].x_dtype, 0)
                    .tensor;
            fp8_tensor y =
                cuda_tensor(tokens, info[i].out_features, info[i].out_features, info[i].y_dtype, 0)
                    .tensor;
            memset(x.data, 0, (size_t)(tokens * info[i].in_features) * 2);
            fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
            args.x = &x;
            args.y = &y;
            args.call = call;
            if (p->rank == 1 && step == 2 &&
                ((p->variant == 1 && i == 0) || (p->variant == 3 && i == 1)))
                continue;
            status = fp8_model_fprop(model, i, &args);
            if (p->variant == 1 && status != FP8_OK) {
                CHECK(status == FP8_ERR_TIMEOUT && process_says("layer"));
                return 0;
            }
            CHECK(status == FP8_OK);
            /* w = 0: y is the bias, which came from all ranks */
            for (int64_t j = 0;
                 j < tokens * info[i].out_features && info[i].has_bias && p->variant != 1; j++)
                CHECK(((uint16_t *)y.data)[j] ==
                      fp8_float_to_bf16((float)(j % info[i].out_features)));
        }
        status = fp8_comm_wait(p->comm, NULL);
        if (p->variant == 1 && status != FP8_OK) {
            CHECK(status == FP8_ERR_TIMEOUT && process_says("rank"));
            return 0;
        }
        CHECK(status == FP8_OK);
    }
    CHECK(p->variant != 1);
    fp8_model_destroy(model);
    fp8_memory_free(p->context, memory);
    for (int i = 0; i < 2; i++)
        fp8_layer_destroy(layers[i]);
    fp8_bundle_close(bundle);
    process_leave(p);
    CHECK(fake_nccl()->live == 0 && bundle_fake_cuda()->live == 0 &&
          bundle_fake_cuda()->misuse == 0);
    return 0;
}

static void test_models(void **state)
{
    (void)state;
    run(2, (struct process){ .timeout = 10 }, model, 0, 0);
    run(3, (struct process){ .timeout = 10 }, model, 0, 0);
}

static void test_a_layer_left_out(void **state)
{
    (void)state;
    run(2, (struct process){ .timeout = 1.5, .variant = 1 }, model, 0, 0);
    /* its weight was on the way already: the ranks' collectives are the same */
    run(2, (struct process){ .timeout = 10, .variant = 3 }, model, 0, 0);
}

/* Two stages of two ranks; layers are on the first alone, whose rank 1 leaves one out in step 2:
 * its neighbour is told, the other stage goes on. */
static int two_stages(struct process *p)
{
    p->stage = p->rank / 2;
    p->rank %= 2;
    p->ranks = 2;
    if (p->stage == 0)
        return model(p);
    p->variant = 0;
    return collectives(p) || collectives(p);
}

static void test_stages(void **state)
{
    (void)state;
    run(4, (struct process){ .timeout = 1.5, .variant = 1 }, two_stages, 0, 0);
    run(4, (struct process){ .timeout = 10 }, two_stages, 0, 0);
}

static void test_other_specs(void **state)
{
    (void)state;
    run(3, (struct process){ .timeout = 5, .variant = 2 }, model, 0, 0);
}

static int set_up(void **state)
{
    (void)state;
    (void)bundle_fake_cuda();
    (void)bundle_fake_lt();
    folder = cuda_bundle(bundle_manifest());
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    bundle_remove(folder);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_collectives), cmocka_unit_test(test_windows),
        cmocka_unit_test(test_killed),      cmocka_unit_test(test_never_came),
        cmocka_unit_test(test_other_calls), cmocka_unit_test(test_async_errors),
        cmocka_unit_test(test_abort),       cmocka_unit_test(test_adopted),
        cmocka_unit_test(test_models),      cmocka_unit_test(test_a_layer_left_out),
        cmocka_unit_test(test_stages),      cmocka_unit_test(test_other_specs),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
