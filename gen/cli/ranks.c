/*
 * ranks.c - starts the ranks of a command and joins them.
 *
 * In: how many ranks, and where. On the host they are threads of this process, any number of them;
 * on GPUs threads with a GPU each, or, started by torchrun, mpirun or srun, this process is one
 * rank. Out: every rank with a device, the bundle and a communicator. Devices and bundles are
 * opened by all before any joins: then a rank that cannot start ends the command instead of keeping
 * the others waiting, and no module is loaded while a collective runs.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/cuda.h"
#include "gen/cli/ranks.h"

/* ---- who runs where -------------------------------------------------------------------------- */

/* GPUs that this process sees; 0 if there is no driver. */
static int gpu_count(void)
{
    struct cli_cuda cuda;
    int count = 0;
    if (cli_cuda_load(&cuda) != FP8_OK || cuda.init(0) || cuda.device_count(&count))
        return 0;
    return count;
}

static int place_launched(struct cli_ranks *all, const fp8_comm_place *place)
{
    if (place->ranks != all->ranks) {
        cli_error("%s started %d ranks, but the weights are shared by %d", place->launcher,
                  (int)place->ranks, all->ranks);
        cli_hint("start %d, or say --fsdp %d", all->ranks, (int)place->ranks);
        return CLI_USAGE;
    }
    if (!place->file[0]) {
        cli_error("the ranks are on several nodes and need a file that all of them see");
        cli_hint("set FP8_COMM_FILE to a path on a shared file system");
        return CLI_USAGE;
    }
    all->launcher = place->launcher;
    all->first = place->rank;
    all->here = 1;
    all->ordinal = place->local_rank;
    snprintf(all->file, sizeof all->file, "%s", place->file);
    return CLI_DONE;
}

/* Enough GPUs for the ranks of this node, or the numbers. */
static int check_gpus(const struct cli_ranks *all, int gpus)
{
    int needed = all->launcher ? all->ordinal + 1 : all->here;
    if (gpus >= needed)
        return CLI_DONE;
    cli_error("%d rank%s, but there %s %d", needed,
              needed == 1 ? " needs a GPU" : "s need a GPU each", gpus == 1 ? "is" : "are", gpus);
    cli_hint("--device host runs any number of ranks on the CPU");
    return CLI_MACHINE;
}

int cli_ranks_open(const char *choice, int ranks, double timeout, struct cli_ranks *all)
{
    fp8_comm_place place = FP8_COMM_PLACE_INIT;
    *all = (struct cli_ranks){ .ranks = ranks, .here = ranks, .timeout = timeout };
    int gpus = strcmp(choice, "host") == 0 ? 0 : gpu_count(), code = CLI_DONE;
    bool host = strcmp(choice, "host") == 0 || (strcmp(choice, "auto") == 0 && gpus == 0);
    all->device = host ? "host" : "cuda";
    fp8_status status = fp8_comm_environment(&place);
    if (status && status != FP8_ERR_NOT_FOUND)
        return cli_fp8_failed(status, "reading the launcher's variables");
    if (!status && place.ranks > 1) {
        if (host) {
            cli_error("%s started %d processes, but on the host the ranks are threads of one",
                      place.launcher, (int)place.ranks);
            cli_hint("run 'fp8gen run SPEC --fsdp %d --device host' by itself", ranks);
            return CLI_USAGE;
        }
        code = place_launched(all, &place);
    }
    if (!code && !host)
        code = check_gpus(all, gpus);
    if (code)
        return code;
    int threads = all->here < cli_cores() ? cli_cores() / all->here : 1;
    if (host && strcmp(choice, "auto") == 0)
        cli_note("running on the host: no usable GPU ('fp8gen doctor' says what is missing)");
    return cli_device_open_at(all->device, "a rank", all->ordinal, threads, &all->lead);
}

void cli_ranks_close(struct cli_ranks *all)
{
    cli_device_close(&all->lead);
}

/* ---- at work --------------------------------------------------------------------------------- */

/* What the threads share. */
struct crew {
    struct cli_ranks *all;
    const char *path; /* of the bundle */
    int (*work)(struct cli_rank *rank, void *user);
    void *user;
    fp8_comm_group *group; /* NULL: launched */
    pthread_barrier_t ready;
    pthread_mutex_t lock;
    int code; /* the first that is not CLI_DONE */
};

struct member {
    struct crew *crew;
    struct cli_rank rank;
    pthread_t thread;
};

static void note_code(struct crew *crew, int code)
{
    pthread_mutex_lock(&crew->lock);
    if (code && !crew->code)
        crew->code = code;
    pthread_mutex_unlock(&crew->lock);
}

static int open_rank(struct crew *crew, struct cli_rank *rank)
{
    struct cli_ranks *all = crew->all;
    int at = rank->rank - all->first, code = CLI_DONE;
    int threads = all->here < cli_cores() ? cli_cores() / all->here : 1;
    if (at == 0)
        rank->device = all->lead;
    else
        code = cli_device_open_at(all->device, "a rank", all->ordinal + at, threads, &rank->device);
    if (code)
        return code;
    fp8_status status = fp8_bundle_open(rank->device.context, crew->path, &rank->bundle);
    return status ? cli_fp8_failed(status, "rank %d: opening the bundle", rank->rank) : CLI_DONE;
}

static int join(struct crew *crew, struct cli_rank *rank)
{
    fp8_status status;
    if (crew->group) {
        status = fp8_comm_join(crew->group, rank->device.context, rank->rank, "fsdp", &rank->comm);
    } else {
        fp8_comm_options options = FP8_COMM_OPTIONS_INIT;
        options.rank = rank->rank;
        options.ranks = rank->ranks;
        options.timeout_seconds = crew->all->timeout;
        options.file = crew->all->file;
        status = fp8_comm_create(rank->device.context, &options, &rank->comm);
    }
    return status ? cli_fp8_failed(status, "rank %d: joining the others", rank->rank) : CLI_DONE;
}

/* A rank's GPU waits for another that has gone. */
static atomic_bool stuck;

bool cli_ranks_are_stuck(void)
{
    return stuck;
}

static void close_rank(struct crew *crew, struct cli_rank *rank)
{
    fp8_device_info info = { .size = sizeof info };
    fp8_comm_destroy(rank->comm);
    if (rank->device.context && fp8_context_info(rank->device.context, &info) == FP8_OK &&
        info.is_stuck)
        stuck = true;
    fp8_bundle_close(rank->bundle);
    if (rank->rank != crew->all->first) /* that device is the command's */
        cli_device_close(&rank->device);
}

static void *run_member(void *argument)
{
    struct member *member = argument;
    struct crew *crew = member->crew;
    struct cli_rank *rank = &member->rank;
    note_code(crew, open_rank(crew, rank));
    if (crew->group)
        pthread_barrier_wait(&crew->ready);
    pthread_mutex_lock(&crew->lock);
    bool all_open = crew->code == CLI_DONE;
    pthread_mutex_unlock(&crew->lock);
    if (all_open) {
        int code = join(crew, rank);
        if (!code)
            code = crew->work(rank, crew->user);
        if (code && rank->comm)
            fp8_comm_abort(rank->comm, "the rank ended with an error");
        note_code(crew, code);
    }
    close_rank(crew, rank);
    return NULL;
}

/* The calling thread is the first rank. */
static void start_threads(struct crew *crew, struct member *members)
{
    int started = 1, here = crew->all->here;
    for (; started < here; started++) {
        if (pthread_create(&members[started].thread, NULL, run_member, &members[started]) != 0)
            break;
    }
    if (started < here) { /* the others wait at the barrier for ranks that will not come */
        cli_error("rank %d: no thread could be started", started);
        _Exit(CLI_MACHINE);
    }
    run_member(&members[0]);
    for (int i = 1; i < started; i++)
        pthread_join(members[i].thread, NULL);
}

int cli_ranks_run(struct cli_ranks *all, const char *path,
                  int (*work)(struct cli_rank *rank, void *user), void *user)
{
    struct crew crew = { .all = all, .path = path, .work = work, .user = user };
    struct member *members = calloc((size_t)all->here, sizeof *members);
    if (!members) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    pthread_mutex_init(&crew.lock, NULL);
    pthread_barrier_init(&crew.ready, NULL, (unsigned)all->here);
    fp8_status status = FP8_OK;
    if (!all->launcher)
        status = fp8_comm_group_create(all->ranks, all->timeout, &crew.group);
    if (status)
        crew.code = cli_fp8_failed(status, "making a group of %d rank%s", all->ranks,
                                   all->ranks == 1 ? "" : "s");
    for (int i = 0; i < all->here; i++) {
        members[i].crew = &crew;
        members[i].rank.rank = all->first + i;
        members[i].rank.ranks = all->ranks;
    }
    if (!status)
        start_threads(&crew, members);
    fp8_comm_group_destroy(crew.group);
    pthread_barrier_destroy(&crew.ready);
    pthread_mutex_destroy(&crew.lock);
    free(members);
    return crew.code;
}

/* ---- numbers between ranks ------------------------------------------------------------------- */

int cli_rank_max(struct cli_rank *rank, float *values, int count)
{
    struct cli_buffer buffer;
    size_t bytes = (size_t)count * sizeof *values;
    int code = cli_buffer_create(&rank->device, bytes, true, &buffer);
    if (code)
        return code;
    memcpy(buffer.host, values, bytes);
    code = cli_buffer_upload(&rank->device, &buffer);
    if (!code) {
        fp8_status status = fp8_comm_all_reduce_max(rank->comm, buffer.device, (size_t)count,
                                                    "results", rank->device.stream);
        if (!status)
            status = fp8_comm_wait(rank->comm, rank->device.stream);
        if (status)
            code = cli_fp8_failed(status, "rank %d: collecting results", rank->rank);
    }
    if (!code)
        code = cli_buffer_download(&rank->device, &buffer);
    if (!code)
        memcpy(values, buffer.host, bytes);
    cli_buffer_destroy(&rank->device, &buffer);
    return code;
}

int cli_rank_gather(struct cli_rank *rank, const void *mine, size_t bytes, void *all)
{
    struct cli_buffer buffer;
    size_t ranks = (size_t)rank->ranks, here = (size_t)rank->rank * bytes;
    int code = cli_buffer_create(&rank->device, ranks * bytes, true, &buffer);
    if (code)
        return code;
    memcpy((char *)buffer.host + here, mine, bytes);
    code = cli_buffer_upload(&rank->device, &buffer);
    if (!code) {
        fp8_gather_part part = { (char *)buffer.device + here, buffer.device, bytes };
        fp8_status status =
            fp8_comm_all_gather(rank->comm, &part, 1, "results to compare", rank->device.stream);
        if (!status)
            status = fp8_comm_wait(rank->comm, rank->device.stream);
        if (status)
            code = cli_fp8_failed(status, "rank %d: collecting results", rank->rank);
    }
    if (!code)
        code = cli_buffer_download(&rank->device, &buffer);
    if (!code)
        memcpy(all, buffer.host, ranks * bytes);
    cli_buffer_destroy(&rank->device, &buffer);
    return code;
}
