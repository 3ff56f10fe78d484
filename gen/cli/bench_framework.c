/*
 * bench_framework.c - the host time of a framework's bf16 linear layer, for a run of `bench host`.
 *
 * In: shapes. Out: microseconds of one forward call of torch.nn.Linear as training makes it
 * (autograd on), measured as ours is: the clock around one call, the device drained every few
 * calls. A Python interpreter of its own does it (FP8GEN_PYTHON, or python3); where that has no
 * PyTorch with CUDA, the reason is told and nothing is compared. Knows nothing of our layers.
 */
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gen/cli/bench_host.h"

extern char **environ;

/* Arguments: M,N,K,calls for each shape. Prints "is <name>", then microseconds for each, or "no
 * <reason>". */
static const char script[] =
    "import sys, time\n"
    "def measure(m, n, k, calls):\n"
    "    layer = torch.nn.Linear(k, n, bias=False, device='cuda', dtype=torch.bfloat16)\n"
    "    x = torch.randn(m, k, device='cuda', dtype=torch.bfloat16)\n"
    "    samples = []\n"
    "    for i in range(calls + calls // 10):\n"
    "        if i % 16 == 0:\n"
    "            torch.cuda.synchronize()\n"
    "        start = time.perf_counter()\n"
    "        y = layer(x)\n"
    "        samples.append(time.perf_counter() - start)\n"
    "    torch.cuda.synchronize()\n"
    "    return 1e6 * sorted(samples[calls // 10:])[calls // 2]\n"
    "try:\n"
    "    import torch\n"
    "    if not torch.cuda.is_available():\n"
    "        raise RuntimeError('its PyTorch sees no GPU')\n"
    "    shapes = [[int(part) for part in text.split(',')] for text in sys.argv[1:]]\n"
    "    print('is PyTorch', torch.__version__)\n"
    "    for shape in shapes:\n"
    "        print(measure(*shape), flush=True)\n"
    "except Exception as error:\n"
    "    print('no', str(error).split('\\n')[0], flush=True)\n";

static pid_t start(const char *python, const struct bench *bench, int *output)
{
    static char texts[BENCH_MAX_SHAPES][64];
    char *arguments[BENCH_MAX_SHAPES + 4] = { (char *)python, "-c", (char *)script };
    int ends[2], count = 3, error;
    pid_t process = -1;
    for (int i = 0; i < bench->shape_count; i++) {
        const struct bench_shape *s = &bench->shapes[i];
        snprintf(texts[i], sizeof texts[i], "%lld,%lld,%lld,%d", (long long)s->m, (long long)s->n,
                 (long long)s->k, bench_host_calls(s));
        arguments[count++] = texts[i];
    }
    if (pipe(ends) != 0)
        return -1;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_addclose(&actions, ends[0]);
    posix_spawn_file_actions_addclose(&actions, ends[1]);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    error = posix_spawnp(&process, python, &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    *output = ends[0];
    if (error != 0) {
        close(ends[0]);
        errno = error;
        return -1;
    }
    return process;
}

/* The lines of the script; false with the reason in name. */
static bool read_answer(FILE *file, int count, double *microseconds, char *name, size_t size)
{
    char line[256];
    snprintf(name, size, "it ended without a word");
    for (int i = -1; i < count; i++) {
        if (!fgets(line, sizeof line, file))
            return false;
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, "no ", 3) == 0) {
            snprintf(name, size, "%s", line + 3);
            return false;
        }
        if (i < 0 && strncmp(line, "is ", 3) == 0)
            snprintf(name, size, "%.100s bf16 linear", line + 3);
        else if (i >= 0)
            microseconds[i] = strtod(line, NULL);
    }
    return true;
}

bool bench_framework(const struct bench *bench, double *microseconds, char *name, size_t size)
{
    const char *python = cli_environment(CLI_ENV_PYTHON);
    char reason[256];
    int output, status;
    if (!python)
        python = "python3";
    pid_t process = start(python, bench, &output);
    if (process < 0) {
        cli_note("no framework to compare with: %s: %s", python, strerror(errno));
        return false;
    }
    FILE *file = fdopen(output, "r");
    bool good = file && read_answer(file, bench->shape_count, microseconds, reason, sizeof reason);
    if (file)
        fclose(file);
    else
        close(output);
    while (waitpid(process, &status, 0) < 0 && errno == EINTR)
        continue;
    if (!good)
        cli_note("no framework to compare with: %s: %s", python, file ? reason : "out of memory");
    else
        snprintf(name, size, "%s", reason);
    return good;
}
