/*
 * nvrtc.c - a libnvrtc that compiles nothing: its cubin is a function of what it was given.
 *
 * Made by the tests' rig and found by the loader under NVRTC's own name. Variables:
 * FAKE_NVRTC_MINOR (the version is 13.<minor>), FAKE_NVRTC_DELAY_MS (how long a compilation takes),
 * FAKE_NVRTC_LOG (a file that gets a line per compilation: "start" and "end", the source's name,
 * the arch). A source with #error in it fails as it would with NVRTC.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CUBIN_BYTES = 3000 };

struct program {
    uint64_t hash;
    char name[64];
    int wrong; /* line of an #error */
};

static long number(const char *variable)
{
    const char *text = getenv(variable);
    return text ? atol(text) : 0;
}

static uint64_t mix(uint64_t hash, const char *text)
{
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3ull;
    return (hash ^ 0xff) * 0x100000001b3ull;
}

static void note(const char *what, const struct program *program, const char *arch)
{
    const char *path = getenv("FAKE_NVRTC_LOG");
    int fd = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
    char line[160];
    int size = snprintf(line, sizeof line, "%s %s %s\n", what, program->name, arch);
    if (fd >= 0 && write(fd, line, (size_t)size) != size)
        abort();
    if (fd >= 0)
        close(fd);
}

int nvrtcVersion(int *major, int *minor);
int nvrtcVersion(int *major, int *minor)
{
    *major = 13;
    *minor = (int)number("FAKE_NVRTC_MINOR");
    return 0;
}

int nvrtcGetNumSupportedArchs(int *count);
int nvrtcGetNumSupportedArchs(int *count)
{
    *count = 4;
    return 0;
}

int nvrtcGetSupportedArchs(int *archs);
int nvrtcGetSupportedArchs(int *archs)
{
    static const int known[] = { 90, 100, 103, 120 };
    memcpy(archs, known, sizeof known);
    return 0;
}

const char *nvrtcGetErrorString(int result);
const char *nvrtcGetErrorString(int result)
{
    return result == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR";
}

int nvrtcCreateProgram(void **made, const char *source, const char *name, int headers,
                       const char *const *texts, const char *const *names);
int nvrtcCreateProgram(void **made, const char *source, const char *name, int headers,
                       const char *const *texts, const char *const *names)
{
    struct program *program = calloc(1, sizeof *program);
    program->hash = mix(mix(1, name), source);
    for (int i = 0; i < headers; i++)
        program->hash = mix(mix(program->hash, names[i]), texts[i]);
    snprintf(program->name, sizeof program->name, "%s", name);
    int line = 1;
    for (const char *at = source; *at && !program->wrong; at++) {
        if (strncmp(at, "#error", 6) == 0)
            program->wrong = line;
        line += *at == '\n';
    }
    *made = program;
    return 0;
}

int nvrtcDestroyProgram(void **program);
int nvrtcDestroyProgram(void **program)
{
    free(*program);
    *program = NULL;
    return 0;
}

int nvrtcCompileProgram(void *p, int count, const char *const *options);
int nvrtcCompileProgram(void *p, int count, const char *const *options)
{
    struct program *program = p;
    const char *arch = "";
    bool no_cache = false; /* of its own, which NVRTC 13 would ask otherwise */
    for (int i = 0; i < count; i++) {
        program->hash = mix(program->hash, options[i]);
        if (strncmp(options[i], "--gpu-architecture=", 19) == 0)
            arch = options[i] + 19;
        no_cache |= strcmp(options[i], "--no-cache") == 0;
    }
    if (!no_cache)
        return 5;
    note("start", program, arch);
    usleep((useconds_t)number("FAKE_NVRTC_DELAY_MS") * 1000);
    note("end", program, arch);
    return program->wrong ? 6 : 0;
}

int nvrtcGetCUBINSize(void *p, size_t *size);
int nvrtcGetCUBINSize(void *p, size_t *size)
{
    (void)p;
    *size = CUBIN_BYTES;
    return 0;
}

int nvrtcGetCUBIN(void *p, char *cubin);
int nvrtcGetCUBIN(void *p, char *cubin)
{
    struct program *program = p;
    uint64_t state = program->hash;
    for (int i = 0; i < CUBIN_BYTES; i++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        cubin[i] = (char)(state >> 56);
    }
    return 0;
}

static int write_log(const struct program *program, char *log, size_t size)
{
    if (!program->wrong)
        return snprintf(log, size, "ptxas info    : Compiling entry function\n") + 1;
    return snprintf(log, size, "%s(%d): catastrophic error: #error directive: injected\n",
                    program->name, program->wrong) +
           1;
}

int nvrtcGetProgramLogSize(void *p, size_t *size);
int nvrtcGetProgramLogSize(void *p, size_t *size)
{
    *size = (size_t)write_log(p, NULL, 0);
    return 0;
}

int nvrtcGetProgramLog(void *p, char *log);
int nvrtcGetProgramLog(void *p, char *log)
{
    write_log(p, log, 256);
    return 0;
}
