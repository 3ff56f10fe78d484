/*
 * device.c - opens the device that run and bench work on, and its buffers.
 *
 * The table of architectures says for which cubins a bundle is built when it is meant for this GPU
 * and nothing else. A mirrored buffer has a twin in host memory; on the host context the twin is
 * the same memory, so that nothing is copied and large layers fit.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/device.h"

static const struct {
    int arch; /* as fp8_device_info */
    const char *name;
} archs[] = { { 90, "sm_90a" }, { 100, "sm_100a" }, { 103, "sm_103a" }, { 120, "sm_120a" } };

static void log_line(void *user, fp8_log_level level, const char *message)
{
    (void)user;
    static const char *const names[] = { "", "error", "warning", "info", "dispatch" };
    const char *name = level >= 1 && level <= 4 ? names[level] : "log";
    fprintf(stderr, "libfp8: %s: %s\n", name, message);
}

static fp8_status create(struct cli_device *device, int ordinal, int threads)
{
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    options.device = ordinal;
    options.threads = threads;
    options.log = log_line;
    if (cli_verbosity() > 0)
        options.log_levels = 1u << FP8_LOG_WARNING | 1u << FP8_LOG_INFO | 1u << FP8_LOG_DISPATCH;
    device->is_host = ordinal == FP8_DEVICE_HOST;
    fp8_status status = fp8_context_create(&options, &device->context);
    const char *path;
    char text[1024];
    if (!status && !device->is_host && cli_verbosity() > 0 &&
        fp8_library_symbol(FP8_LIBRARY_CUBLASLT, NULL, NULL, &path) == FP8_OK &&
        cli_unused_library(CLI_ENV_CUBLASLT_PATH, path, text, sizeof text))
        cli_note("%s", text);
    return status;
}

static int choose_arch(struct cli_device *device)
{
    device->arch = device->is_host ? "none" : NULL;
    for (size_t i = 0; !device->arch && i < sizeof archs / sizeof archs[0]; i++) {
        if (archs[i].arch == device->info.arch)
            device->arch = archs[i].name;
    }
    if (device->arch)
        return CLI_DONE;
    cli_error(
        "no kernels for %s: its compute capability is %d.%d, and FP8 kernels need 9.0 or newer",
        device->info.name, device->info.arch / 10, device->info.arch % 10);
    cli_hint("--device host runs the same steps on the CPU");
    return CLI_MACHINE;
}

/* Whether it failed because there is no GPU, and not for what is beside it (cuBLASLt). */
static bool is_without_gpu(fp8_status status)
{
    return status == FP8_ERR_DEVICE ||
           (status == FP8_ERR_LIBRARY &&
            fp8_library_symbol(FP8_LIBRARY_CUDA, NULL, NULL, NULL) != FP8_OK);
}

static int refused(fp8_status status, const char *what)
{
    if (is_without_gpu(status)) {
        const char *sentence = fp8_last_error();
        const char *end = strstr(sentence, "; searched:"); /* doctor has the whole sentence */
        cli_error("%s needs a CUDA device, and this machine has none: %.*s", what,
                  (int)(end ? end - sentence : (long)strlen(sentence)), sentence);
        cli_hint(CLI_WITHOUT_GPU);
    } else if (cli_fp8_failed(status, "opening the device") != CLI_MACHINE) {
        return CLI_BUG;
    }
    cli_hint("'fp8gen doctor' says what this machine has and how to get the rest");
    return CLI_MACHINE;
}

int cli_device_open(const char *choice, const char *what, struct cli_device *device)
{
    return cli_device_open_at(choice, what, 0, 0, device);
}

int cli_device_open_at(const char *choice, const char *what, int ordinal, int threads,
                       struct cli_device *device)
{
    bool automatic = strcmp(choice, "auto") == 0;
    memset(device, 0, sizeof *device);
    fp8_status status =
        create(device, strcmp(choice, "host") == 0 ? FP8_DEVICE_HOST : ordinal, threads);
    if (automatic && (status == FP8_ERR_LIBRARY || status == FP8_ERR_DEVICE)) {
        cli_note("running on the host: no usable GPU ('fp8gen doctor' says what is missing)");
        status = create(device, FP8_DEVICE_HOST, threads);
    }
    if (status)
        return refused(status, what);
    device->info.size = sizeof device->info;
    int code = CLI_DONE;
    status = fp8_context_info(device->context, &device->info);
    if (!status)
        status = fp8_stream_create(device->context, &device->stream);
    if (status)
        code = cli_fp8_failed(status, "opening the device");
    if (!code)
        code = choose_arch(device);
    if (code)
        cli_device_close(device);
    return code;
}

void cli_device_close(struct cli_device *device)
{
    if (!device->context)
        return;
    if (device->stream)
        fp8_stream_destroy(device->context, device->stream);
    fp8_context_destroy(device->context);
    memset(device, 0, sizeof *device);
}

int cli_device_synchronize(const struct cli_device *device)
{
    fp8_status status = fp8_stream_synchronize(device->context, device->stream);
    return status ? cli_fp8_failed(status, "waiting for the device") : CLI_DONE;
}

static void show_progress(void *user, const char *kernel, int32_t done, int32_t total)
{
    (void)user;
    cli_progress("compiling [%d/%d] %s", done, total, kernel ? kernel : "");
}

int cli_device_build(const struct cli_device *device, fp8gen *gen, char **folder, char **path)
{
    *folder = *path = NULL;
    int code = cli_temp_create(NULL, "fp8gen", folder);
    if (code)
        return code;
    *path = cli_path_join(*folder, "bundle");
    if (!*path) {
        code = CLI_MACHINE;
        goto done;
    }
    fp8gen_build_options build = FP8GEN_BUILD_OPTIONS_INIT;
    build.archs = device->arch;
    build.output_dir = *path;
    build.progress = show_progress;
    build.log = cli_gen_log;
    fp8gen_status built = fp8gen_build(gen, &build);
    cli_progress_end();
    if (built)
        code = cli_gen_failed(gen, built, "building the bundle");
    else
        cli_note_nvrtc(gen, device->arch);
done:
    if (code)
        cli_device_built(folder, path);
    return code;
}

void cli_device_built(char **folder, char **path)
{
    free(*path);
    if (*folder)
        cli_temp_remove(*folder);
    *folder = *path = NULL;
}

int cli_device_bundle(const struct cli_device *device, fp8gen *gen, fp8_bundle **bundle)
{
    char *folder, *path;
    *bundle = NULL;
    int code = cli_device_build(device, gen, &folder, &path);
    if (code)
        return code;
    fp8_status status = fp8_bundle_open(device->context, path, bundle);
    if (status)
        code = cli_fp8_failed(status, "opening the bundle");
    cli_device_built(&folder, &path);
    return code;
}

/* ---- buffers --------------------------------------------------------------------------------- */

int cli_buffer_create(const struct cli_device *device, size_t bytes, bool mirrored,
                      struct cli_buffer *buffer)
{
    memset(buffer, 0, sizeof *buffer);
    fp8_status status = fp8_memory_alloc(device->context, bytes, &buffer->device);
    if (status)
        return cli_fp8_failed(status, "allocating %zu bytes", bytes);
    buffer->bytes = bytes;
    if (device->is_host)
        buffer->host = buffer->device;
    else if (mirrored && !(buffer->host = malloc(bytes ? bytes : 1))) {
        cli_error("out of memory: %zu bytes of host memory are needed", bytes);
        return CLI_MACHINE;
    }
    return CLI_DONE;
}

void cli_buffer_destroy(const struct cli_device *device, struct cli_buffer *buffer)
{
    if (!buffer->device)
        return;
    if (buffer->host != buffer->device)
        free(buffer->host);
    fp8_memory_free(device->context, buffer->device);
    memset(buffer, 0, sizeof *buffer);
}

int cli_buffer_upload(const struct cli_device *device, const struct cli_buffer *buffer)
{
    if (device->is_host || !buffer->bytes)
        return CLI_DONE;
    fp8_status status = fp8_memory_copy(device->context, buffer->device, buffer->host,
                                        buffer->bytes, device->stream);
    return status ? cli_fp8_failed(status, "copying to the device") : CLI_DONE;
}

int cli_buffer_download(const struct cli_device *device, const struct cli_buffer *buffer)
{
    if (device->is_host || !buffer->bytes)
        return cli_device_synchronize(device);
    fp8_status status = fp8_memory_copy(device->context, buffer->host, buffer->device,
                                        buffer->bytes, device->stream);
    if (status)
        return cli_fp8_failed(status, "copying from the device");
    return cli_device_synchronize(device);
}

int cli_buffer_fill(const struct cli_device *device, const struct cli_buffer *buffer, uint8_t value)
{
    if (!buffer->bytes)
        return CLI_DONE;
    fp8_status status =
        fp8_memory_fill(device->context, buffer->device, value, buffer->bytes, device->stream);
    return status ? cli_fp8_failed(status, "filling memory") : CLI_DONE;
}
