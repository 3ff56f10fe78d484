/*
 * absent_rig.c - see absent_rig.h. A copy engine that waits for the other GPU cannot be called off,
 * not even by NCCL's abort, and holds what frees memory on its device: so the ranks are processes,
 * whose end frees it.
 */
#include "tests/ranks/absent_rig.h"

#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "runtime/fp8_comm.h"
#include "runtime/fp8_device.h"

enum { TIMEOUT = 6, GRACE = 5, SKIPPED = 77, BYTES = 1 << 20 };

static const char word[] = "absent";

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int fault(int rank, const char *what)
{
    fprintf(stderr, "rank %d: %s (last error: %s)\n", rank, what, fp8_last_error());
    return 1;
}

/* All have come to a first gather; then this rank gathers alone. */
static int gather_alone(fp8_comm *comm, fp8_stream stream, void *memory)
{
    static const char *const words[] = { "rank 0 of 2 ('absent')",
                                         "all_gather of w of layer 'a' is not done after 6 s",
                                         NULL };
    const double start = now();
    const fp8_gather_part part = { memory, memory, BYTES / 2 };
    fp8_status status = fp8_comm_all_gather(comm, &part, 1, "w of layer 'a'", stream);
    if (status == FP8_OK)
        status = fp8_comm_wait(comm, stream);
    printf("alone in a gather by copy engines: %.2f s, %s\n", now() - start, fp8_last_error());
    if (status != FP8_ERR_TIMEOUT)
        return fault(0, "a gather that no other rank comes to is no FP8_ERR_TIMEOUT");
    for (int i = 0; words[i]; i++) {
        if (!strstr(fp8_last_error(), words[i]))
            return fault(0, words[i]);
    }
    if (fp8_comm_poll(comm) != FP8_ERR_TIMEOUT)
        return fault(0, "the communicator is well again");
    fp8_comm_free(comm, memory);
    fp8_comm_destroy(comm);
    printf("freed after %.2f s\n", now() - start);
    return now() - start < TIMEOUT + GRACE ? 0 : fault(0, "too late");
}

static int run_rank(int rank, const char *file)
{
    fp8_context *context = NULL;
    fp8_comm *comm = NULL;
    fp8_stream stream = NULL;
    void *memory = NULL;
    fp8_comm_info info = { .size = sizeof info };
    fp8_context_options device = FP8_CONTEXT_OPTIONS_INIT;
    fp8_comm_options options = FP8_COMM_OPTIONS_INIT;
    device.device = options.rank = rank;
    options.ranks = 2;
    options.file = file;
    options.name = word;
    options.timeout_seconds = TIMEOUT;
    if (fp8_context_create(&device, &context) != FP8_OK ||
        fp8_comm_create(context, &options, &comm) != FP8_OK ||
        fp8_stream_create(context, &stream) != FP8_OK ||
        fp8_comm_alloc(comm, BYTES, &memory) != FP8_OK || fp8_comm_describe(comm, &info) != FP8_OK)
        return fault(rank, "prepares");
    if (!info.is_copy_engine)
        return SKIPPED;
    const fp8_gather_part part = { (char *)memory + rank * (BYTES / 2), memory, BYTES / 2 };
    if (fp8_comm_all_gather(comm, &part, 1, "w", stream) != FP8_OK ||
        fp8_comm_wait(comm, stream) != FP8_OK)
        return fault(rank, "gathers");
    if (rank == 0)
        return gather_alone(comm, stream, memory);
    sleep(TIMEOUT + GRACE); /* and comes to nothing more; rank 0 is done before */
    return 0;
}

int absent_process(int count, char **arguments)
{
    if (count != 4 || strcmp(arguments[1], word) != 0)
        return -1;
    const int code = run_rank(atoi(arguments[2]), arguments[3]);
    fflush(NULL);
    _exit(code); /* nothing that would wait for the device */
}

/* The exit code of a child that is given some time, else it is killed. */
static int end_of(pid_t process, double seconds)
{
    const double end = now() + seconds;
    int status = 0;
    while (waitpid(process, &status, WNOHANG) == 0) {
        if (now() > end) {
            kill(process, SIGKILL);
            waitpid(process, &status, 0);
            fprintf(stderr, "a rank of '%s' hangs\n", word);
            return 1;
        }
        usleep(10000);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int absent_run(void)
{
    extern char **environ;
    char folder[] = "/tmp/fp8gen-test-XXXXXX", file[64], self[] = "/proc/self/exe";
    char ranks[2][2] = { "0", "1" };
    pid_t processes[2] = { 0 };
    if (!mkdtemp(folder))
        return fault(0, "a folder");
    snprintf(file, sizeof file, "%s/id", folder);
    for (int i = 0; i < 2; i++) {
        char name[sizeof word];
        memcpy(name, word, sizeof word);
        char *const arguments[] = { self, name, ranks[i], file, NULL };
        if (posix_spawn(&processes[i], self, NULL, NULL, arguments, environ) != 0)
            return fault(i, "does not start");
    }
    const int code = end_of(processes[0], 40);
    kill(processes[1], SIGKILL);
    waitpid(processes[1], NULL, 0);
    unlink(file);
    rmdir(folder);
    return code;
}
