/*
 * environment.c - every environment variable that has an effect on fp8gen, in one table.
 *
 * The table feeds the code (cli_environment) and the help page. Variables that the libraries read
 * themselves are listed so that the page is complete; the program does not read those, and what
 * they mean is decided in the library.
 */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/cli.h"

static const struct {
    const char *name;
    const char *doc;
} variables[CLI_ENV_COUNT] = {
    [CLI_ENV_TEMPLATE_DIR] = { "FP8GEN_TEMPLATE_DIR",
                               "folder of templates used instead of the built-in ones" },
    [CLI_ENV_CACHE_DIR] = { "FP8GEN_CACHE_DIR", "folder of the kernel cache (default "
                                                "$XDG_CACHE_HOME/fp8gen, ~/.cache/fp8gen)" },
    [CLI_ENV_CACHE_SIZE] = { "FP8GEN_CACHE_SIZE", "what the cache is kept within (default 1G)" },
    [CLI_ENV_LOG] = { "FP8_LOG", "runtime messages on stderr, with commas: error, warning, "
                                 "info, dispatch (each GEMM choice)" },
    [CLI_ENV_CUBLASLT_PATH] = { "FP8_CUBLASLT_PATH",
                                "libcublasLt, where the loader does not find it by itself" },
    [CLI_ENV_NVRTC_PATH] = { "FP8_NVRTC_PATH",
                             "libnvrtc, where the loader does not find it by itself" },
    [CLI_ENV_NCCL_PATH] = { "FP8_NCCL_PATH",
                            "libnccl, where the loader does not find it by itself" },
    [CLI_ENV_COMM_FILE] = { "FP8_COMM_FILE", "file through which ranks meet, seen by all nodes "
                                             "(default in TMPDIR)" },
    [CLI_ENV_PYTHON] = { "FP8GEN_PYTHON", "interpreter whose PyTorch bench host compares with" },
    [CLI_ENV_NO_COLOR] = { "NO_COLOR", "set to anything: no colours, unless --color always" },
    [CLI_ENV_TERM] = { "TERM", "\"dumb\": no colours and no progress line" },
    [CLI_ENV_TMPDIR] = { "TMPDIR", "folder for the bundle of run and bench (default /tmp)" },
};

const char *cli_environment(enum cli_variable variable)
{
    const char *value = getenv(variables[variable].name);
    return value && value[0] ? value : NULL;
}

const char *cli_environment_name(enum cli_variable variable)
{
    return variables[variable].name;
}

/* FP8_LOG is read by libfp8, which skips words that it does not know and has nobody to tell. */
void cli_check_environment(void)
{
    static const char *const words[] = { "error", "warning", "info", "dispatch" };
    const char *at = cli_environment(CLI_ENV_LOG);
    while (at && *at) {
        size_t length = strcspn(at, ","), known = length == 0;
        for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
            known |= strlen(words[i]) == length && memcmp(words[i], at, length) == 0;
        if (!known) {
            cli_warning("FP8_LOG: '%.*s' is no level; the words, with commas between them, are "
                        "error, warning, info and dispatch",
                        (int)length, at);
            return;
        }
        at += length + (at[length] == ',');
    }
}

bool cli_unused_library(enum cli_variable variable, const char *used, char *text, size_t size)
{
    const char *value = cli_environment(variable), *name = cli_environment_name(variable);
    char wanted[PATH_MAX], opened[PATH_MAX];
    if (!value)
        return false;
    if (!realpath(value, wanted))
        snprintf(text, size, "%s was not used: %s: %s; in use is %s", name, value, strerror(errno),
                 used);
    else if (strncmp(used, value, strlen(value)) != 0 && realpath(used, opened) &&
             strncmp(opened, wanted, strlen(wanted)) != 0)
        snprintf(text, size, "%s was not used: the loader knows a copy by itself, %s", name, used);
    else
        return false;
    return true;
}

void cli_print_environment(void)
{
    for (int i = 0; i < CLI_ENV_COUNT; i++)
        printf("  %-20s %s\n", variables[i].name, variables[i].doc);
}
