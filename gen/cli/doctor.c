/*
 * doctor.c - `fp8gen doctor`: what this machine has and lacks, with the command that fixes it.
 *
 * Everything is looked up as build and run would: the same openers, the same paths. Needs nothing
 * to be there. Exit code 3 if something is missing, so that a script can ask; the host backend
 * always works, which the last line says.
 */
#include <stdio.h>
#include <string.h>

#include "gen/cli/cuda.h"

struct fault {
    char what[512];
    const char *fix;
};

struct faults {
    struct fault list[8];
    int count;
};

static void add_fault(struct faults *faults, const char *what, const char *fix)
{
    if (faults->count == 8)
        return;
    struct fault *fault = &faults->list[faults->count++];
    snprintf(fault->what, sizeof fault->what, "%s", what);
    size_t length = strlen(fault->what);
    while (length && fault->what[length - 1] == '\n')
        fault->what[--length] = '\0';
    fault->fix = fix;
}

static void line(const char *label, const char *value)
{
    printf("%s%-10s%s %s\n", cli_style_on(CLI_BOLD), label, cli_style_off(), value);
}

static void missing(const char *label)
{
    printf("%s%-10s%s %snot found%s\n", cli_style_on(CLI_BOLD), label, cli_style_off(),
           cli_style_on(CLI_RED), cli_style_off());
}

static void show_device(const struct cli_cuda *cuda, int device, struct faults *faults)
{
    char name[128] = "", text[256], memory[32];
    int major = 0, minor = 0, sms = 0;
    size_t bytes = 0;
    cli_cu_result result = cuda->device_name(name, sizeof name, device);
    if (!result)
        result = cuda->device_attribute(&major, CLI_CU_CAPABILITY_MAJOR, device);
    if (!result)
        result = cuda->device_attribute(&minor, CLI_CU_CAPABILITY_MINOR, device);
    if (!result)
        result = cuda->device_attribute(&sms, CLI_CU_MULTIPROCESSORS, device);
    if (!result)
        result = cuda->device_memory(&bytes, device);
    if (result) {
        snprintf(text, sizeof text, "GPU %d does not answer: %s", device,
                 cli_cuda_text(cuda, result));
        add_fault(faults, text, "nvidia-smi");
        return;
    }
    snprintf(text, sizeof text, "%d: %s, compute capability %d.%d, %d SMs, %s", device, name, major,
             minor, sms, cli_format_bytes(memory, (double)bytes));
    line("GPU", text);
    if (major < 9) {
        snprintf(text, sizeof text, "GPU %d has compute capability %d.%d; FP8 kernels need 9.0",
                 device, major, minor);
        add_fault(faults, text, "use a GPU of the Hopper generation or newer");
    }
}

static void look_for_driver(struct faults *faults)
{
    static const char *const fix =
        "install NVIDIA's driver (Debian, Ubuntu: apt-get install nvidia-driver), or start the "
        "container with --gpus all";
    struct cli_cuda cuda;
    char text[512];
    int version = 0, count = 0;
    if (cli_cuda_load(&cuda) != FP8_OK) {
        missing("driver");
        add_fault(faults, fp8_last_error(), fix);
        return;
    }
    cli_cu_result result = cuda.init(0);
    if (!result)
        result = cuda.driver_version(&version);
    if (!result)
        result = cuda.device_count(&count);
    snprintf(text, sizeof text, "for CUDA %d.%d, %s", version / 1000, version % 1000 / 10,
             cuda.path ? cuda.path : "");
    line("driver", text);
    if (result || count == 0) {
        missing("GPU");
        snprintf(text, sizeof text, "the driver finds no GPU%s%s", result ? ": " : "",
                 result ? cli_cuda_text(&cuda, result) : "");
        add_fault(faults, text, fix);
    }
    for (int device = 0; !result && device < count; device++)
        show_device(&cuda, device, faults);
}

static void look_for_cublaslt(struct faults *faults)
{
    size_t (*get_version)(void) = NULL;
    void *address = NULL;
    const char *path = NULL;
    char text[1024];
    if (fp8_library_symbol(FP8_LIBRARY_CUBLASLT, "cublasLtGetVersion", &address, &path) != FP8_OK) {
        missing("cuBLASLt");
        add_fault(faults, fp8_last_error(),
                  "apt-get install libcublas-13-0 (NVIDIA's repository), or set FP8_CUBLASLT_PATH");
        return;
    }
    memcpy(&get_version, &address, sizeof address);
    size_t version = get_version();
    snprintf(text, sizeof text, "%zu.%zu.%zu, %s", version / 10000, version / 100 % 100,
             version % 100, path ? path : "");
    line("cuBLASLt", text);
    if (cli_unused_library(CLI_ENV_CUBLASLT_PATH, path ? path : "", text, sizeof text))
        line("", text);
}

/* Only several GPUs need it: no fault where it is missing. */
static void look_for_nccl(void)
{
    int (*get_version)(int *) = NULL;
    void *address = NULL;
    const char *path = NULL;
    char text[1024];
    int version = 0;
    if (fp8_library_symbol(FP8_LIBRARY_NCCL, "ncclGetVersion", &address, &path) != FP8_OK) {
        line("NCCL", "not found; ranks on several GPUs need it (FP8_NCCL_PATH)");
        return;
    }
    memcpy(&get_version, &address, sizeof address);
    (void)get_version(&version);
    snprintf(text, sizeof text, "%d.%d.%d, %s", version / 10000, version / 100 % 100, version % 100,
             path ? path : "");
    line("NCCL", text);
    if (cli_unused_library(CLI_ENV_NCCL_PATH, path ? path : "", text, sizeof text))
        line("", text);
}

static void look_for_nvrtc(struct faults *faults)
{
    fp8gen *gen = NULL;
    const char *path = "", *version = "";
    char text[1024];
    fp8gen_status status = fp8gen_open(NULL, &gen);
    if (!status)
        status = fp8gen_nvrtc(gen, &path, &version);
    if (status) {
        missing("NVRTC");
        add_fault(faults, gen ? fp8gen_diagnostics(gen) : "out of memory",
                  "apt-get install cuda-nvrtc-13-0 (NVIDIA's repository), or set FP8_NVRTC_PATH");
    } else {
        snprintf(text, sizeof text, "%s, %s", version, path);
        line("NVRTC", text);
        if (cli_unused_library(CLI_ENV_NVRTC_PATH, path, text, sizeof text))
            line("", text);
    }
    fp8gen_close(gen);
}

static int run(const void *values, int count, char **operands)
{
    struct faults faults = { .count = 0 };
    char text[128];
    (void)values;
    (void)count;
    (void)operands;
    snprintf(text, sizeof text, "%s (libfp8gen %s, libfp8 %s)", FP8_VERSION_STRING,
             fp8gen_version(), fp8_version());
    line("fp8gen", text);
    snprintf(text, sizeof text, "%d", cli_cores());
    line("cores", text);
    look_for_driver(&faults);
    look_for_cublaslt(&faults);
    look_for_nvrtc(&faults);
    look_for_nccl();
    for (int i = 0; i < faults.count; i++)
        printf("\n%sproblem:%s %s\n    fix: %s\n", cli_style_on(CLI_RED), cli_style_off(),
               faults.list[i].what, faults.list[i].fix);
    if (!faults.count)
        printf("\nAll is there: bundles are built with kernels and run on the GPU.\n");
    else
        printf("\nWithout these: check, plan, expand, 'build --arch none', 'run --device host' and "
               "'bench shard --device host' work.\n");
    return faults.count ? CLI_MACHINE : CLI_DONE;
}

const struct cli_command cli_doctor_command = {
    .name = "doctor",
    .operands = "",
    .summary = "say what this machine has and what is missing",
    .details = "Exit code 3 if something is missing for building and running on a GPU.",
    .run = run,
};
