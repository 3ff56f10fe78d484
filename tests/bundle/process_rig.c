/*
 * process_rig.c - see process_rig.h.
 */
#include "tests/bundle/process_rig.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct fake_nccl *fake_nccl(void)
{
    static struct fake_nccl *nccl;
    if (!nccl) {
        char path[1024];
        const char *build = getenv("FP8_TEST_BUILD");
        snprintf(path, sizeof path, "%s/fake/libnccl.so.2", build ? build : "build");
        void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!handle)
            fail_msg("%s", dlerror());
        fake_nccl_getter getter;
        *(void **)&getter = dlsym(handle, "fake_nccl_state");
        nccl = getter();
    }
    return nccl;
}

/* ---- processes ---- */

bool process_says(const char *word)
{
    if (strstr(fp8_last_error(), word))
        return true;
    fprintf(stderr, "the error does not say '%s': %s\n", word, fp8_last_error());
    return false;
}

fp8_status process_join(struct process *p)
{
    char file[1024];
    fp8_context_options context = FP8_CONTEXT_OPTIONS_INIT;
    fp8_status status = fp8_context_create(&context, &p->context);
    if (status != FP8_OK)
        return status;
    snprintf(file, sizeof file, "%s/id%d", p->folder, p->stage);
    fp8_comm_options options = FP8_COMM_OPTIONS_INIT;
    options.rank = p->rank;
    options.ranks = p->ranks;
    options.file = file;
    options.timeout_seconds = p->timeout;
    options.flags = p->flags;
    return fp8_comm_create(p->context, &options, &p->comm);
}

void process_leave(struct process *p)
{
    fp8_comm_destroy(p->comm);
    fp8_context_destroy(p->context);
}

double process_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

void process_run(int ranks, struct process start, process_body body, unsigned missing,
                 unsigned killed)
{
    pid_t pids[16] = { 0 };
    (void)fake_nccl();
    fflush(NULL);
    for (int rank = 0; rank < ranks; rank++) {
        if (missing >> rank & 1)
            continue;
        pids[rank] = fork();
        assert_true(pids[rank] >= 0);
        if (pids[rank] == 0) {
            struct process p = start;
            p.rank = rank;
            p.ranks = ranks;
            fake_nccl()->patience = p.timeout / 4;
            fake_nccl()->record = bundle_fake_cuda()->record;
            bundle_fake_cuda()->busy = fake_nccl()->busy;
            int code = body(&p);
            fflush(NULL);
            _exit(code);
        }
    }
    const double end = process_now() + 20;
    int faults = 0;
    for (int rank = 0; rank < ranks; rank++) {
        int status = 0;
        while (pids[rank] && waitpid(pids[rank], &status, WNOHANG) == 0) {
            if (process_now() > end) {
                fprintf(stderr, "rank %d hangs\n", rank);
                kill(pids[rank], SIGKILL);
                waitpid(pids[rank], &status, 0);
                break;
            }
            usleep(1000);
        }
        if (!pids[rank] || killed >> rank & 1)
            continue;
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            fprintf(stderr, "rank %d of %d failed (%x)\n", rank, ranks, (unsigned)status), faults++;
    }
    assert_int_equal(faults, 0);
}
