/*
 * dump.c - `fp8gen run --dump DIR`: every tensor of a run as .npy, so that anyone can check it.
 *
 * In: a layer's buffers in host memory. Out: DIR/index.json and DIR/<number>_<layer>/<tensor>.npy.
 * The folder is filled under a temporary name beside DIR and renamed at the end: a dump is whole or
 * absent. An existing DIR is replaced only if it is empty or a dump. The index says what each file
 * holds and by which rules it can be recomputed; tests/oracle/check_dump.py does that.
 */
#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gen/cli/npy.h"
#include "gen/cli/run.h"

#define FORMAT "fp8gen-dump"

struct run_dump {
    char *target, *temp, *folder; /* folder: of the current layer, below temp */
    json_t *index, *layers, *layer;
};

static const char *const notes[] = {
    "All arrays are row-major and exactly as the library left them. bf16 is stored as uint16, FP8 "
    "as "
    "uint8.",
    "y[M,N] = x[M,K] w[N,K]^T + bias[N]; dx[M,K] = dy[M,N] w[N,K]; dw[N,K] = dy[M,N]^T x[M,K]; "
    "dbias[N] = column sums of dy.",
    "<t>_scales is float32[16]: [0] scale, [4] scale_inv, [8] amax (0: the scale was known "
    "before), of the "
    "copies with one scale a tensor. <t>_row holds cast(t * scale), <t>_transposed its transpose, "
    "both with "
    "zero padding.",
    "<t>_row_scales and <t>_transposed_scales hold scale_inv in float32 where a copy of r rows and "
    "depth d has "
    "more than one: row [1][r], block [d / 128][r], tile [r / 128][d / 128]; pads are zero.",
};

/* An existing folder may be replaced if it is empty or holds a dump. */
static bool may_replace(const char *path)
{
    char *index = cli_path_join(path, "index.json");
    json_t *json = index ? json_load_file(index, 0, NULL) : NULL;
    const char *format = json_string_value(json_object_get(json, "format"));
    bool may = format && strcmp(format, FORMAT) == 0;
    DIR *folder = may ? NULL : opendir(path);
    if (folder) {
        int entries = 0;
        while (readdir(folder))
            entries++;
        closedir(folder);
        may = entries <= 2; /* . and .. */
    }
    json_decref(json);
    free(index);
    return may;
}

int run_dump_create(const char *path, const char *model, uint64_t seed, struct run_dump **dump)
{
    struct stat status;
    *dump = NULL;
    if (stat(path, &status) == 0 && !(S_ISDIR(status.st_mode) && may_replace(path))) {
        cli_error("--dump: '%s' exists and is not a dump", path);
        cli_hint("name a new folder, or remove it first");
        return CLI_USAGE;
    }
    struct run_dump *d = calloc(1, sizeof *d);
    char *target = strdup(path);
    if (!d || !target) {
        free(d);
        free(target);
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    d->target = target;
    for (size_t n = strlen(target); n > 1 && target[n - 1] == '/'; n--)
        target[n - 1] = '\0';
    const char *slash = strrchr(target, '/');
    char *parent = !slash            ? strdup(".")
                   : slash == target ? strdup("/")
                                     : strndup(target, (size_t)(slash - target));
    int code = parent ? cli_temp_create(parent, ".fp8gen-dump", &d->temp) : CLI_MACHINE;
    free(parent);
    d->index =
        json_pack("{s:s, s:i, s:s, s:s, s:I, s:[ssss], s:[]}", "format", FORMAT, "format_version",
                  2, "generator", fp8gen_version(), "model", model, "seed", (json_int_t)seed,
                  "notes", notes[0], notes[1], notes[2], notes[3], "layers");
    d->layers = json_object_get(d->index, "layers");
    if (!code && !d->index) {
        cli_error("out of memory");
        code = CLI_MACHINE;
    }
    if (code)
        run_dump_finish(d, code);
    else
        *dump = d;
    return code;
}

int run_dump_layer(struct run_dump *dump, const struct run_layer *run)
{
    const fp8_layer_info *i = &run->info;
    char name[128];
    snprintf(name, sizeof name, "%02zu_%.100s", json_array_size(dump->layers), i->name);
    for (char *c = name; *c; c++) {
        if (!strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.", *c))
            *c = '_';
    }
    free(dump->folder);
    dump->folder = cli_path_join(dump->temp, name);
    dump->layer = json_pack(
        "{s:s, s:s, s:I, s:I, s:I, s:s, s:b, s:i, s:b, s:{s:s, s:s, s:s}, s:{}}", "name", i->name,
        "folder", name, "M", (json_int_t)run->m, "N", (json_int_t)i->out_features, "K",
        (json_int_t)i->in_features, "recipe", run->recipe.name, "power_of_two",
        run->recipe.power_of_two, "margin", run->recipe.margin, "bias", (int)i->has_bias,
        "accumulation", "fprop", run->recipe.split[FP8_PASS_FPROP] ? "split" : "fast", "dgrad",
        run->recipe.split[FP8_PASS_DGRAD] ? "split" : "fast", "wgrad",
        run->recipe.split[FP8_PASS_WGRAD] ? "split" : "fast", "arrays");
    if (!dump->folder || !dump->layer || json_array_append_new(dump->layers, dump->layer) != 0) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    if (mkdir(dump->folder, 0755) != 0) {
        cli_error("cannot create '%s': %s", dump->folder, strerror(errno));
        return CLI_MACHINE;
    }
    return CLI_DONE;
}

static int add(struct run_dump *dump, const char *name, const fp8_tensor *tensor)
{
    char file[64];
    snprintf(file, sizeof file, "%s.npy", name);
    char *path = cli_path_join(dump->folder, file);
    if (!path)
        return CLI_MACHINE;
    int code =
        cli_npy_write(path, tensor->data, tensor->dtype, tensor->rows, tensor->cols, tensor->ld);
    free(path);
    json_t *entry = json_pack("{s:s, s:s, s:s, s:[I,I]}", "file", file, "dtype",
                              fp8_dtype_name(tensor->dtype), "stored", cli_npy_dtype(tensor->dtype),
                              "shape", (json_int_t)tensor->rows, (json_int_t)tensor->cols);
    if (!code && json_object_set_new(json_object_get(dump->layer, "arrays"), name, entry) != 0) {
        cli_error("out of memory");
        code = CLI_MACHINE;
    }
    return code;
}

static int64_t padded(int64_t value)
{
    return (value + 15) / 16 * 16;
}

/* The copy of r rows and depth d, with scales of its own if it has some. */
static int add_copy(struct run_dump *dump, const char *name, const fp8_operand *operand,
                    bool transposed)
{
    fp8_operand_view view;
    char text[48];
    fp8_status status = fp8_operand_parts(operand, &view);
    if (status)
        return cli_fp8_failed(status, "dumping the operand of %s", name);
    const char *copy = transposed ? "transposed" : "row";
    fp8_scaling scaling = transposed ? operand->transposed_scaling : operand->row_scaling;
    int64_t r = transposed ? operand->cols : operand->rows;
    int64_t d = transposed ? operand->rows : operand->cols;
    int64_t lines = scaling == FP8_SCALING_ROW     ? 1
                    : scaling == FP8_SCALING_BLOCK ? (d + 127) / 128
                                                   : (r + 127) / 128;
    void *bytes = transposed ? view.transposed : view.row;
    int64_t ld = transposed ? view.transposed_ld : view.row_ld;
    float *scales = transposed ? view.transposed_scales : view.row_scales;
    int64_t scales_ld = transposed ? view.transposed_scales_ld : view.row_scales_ld;
    int code = CLI_DONE;
    if (!bytes)
        return code;
    if (scales) {
        const fp8_tensor tensor = { scales, lines, scales_ld, scales_ld, FP8_DTYPE_FP32, 0 };
        snprintf(text, sizeof text, "%s_%s_scales", name, copy);
        code = add(dump, text, &tensor);
    }
    const fp8_tensor tensor = { bytes, padded(r), ld, ld, operand->dtype, 0 };
    snprintf(text, sizeof text, "%s_%s", name, copy);
    return code ? code : add(dump, text, &tensor);
}

static int add_operand(struct run_dump *dump, const char *name, const fp8_operand *operand)
{
    fp8_operand_view view;
    char text[48];
    bool whole = operand->row_scaling == FP8_SCALING_TENSOR ||
                 operand->transposed_scaling == FP8_SCALING_TENSOR;
    fp8_status status = fp8_operand_parts(operand, &view);
    if (status)
        return cli_fp8_failed(status, "dumping the operand of %s", name);
    int code = CLI_DONE;
    if (whole) {
        const fp8_tensor scales = { view.scales, 1, 16, 16, FP8_DTYPE_FP32, 0 };
        snprintf(text, sizeof text, "%s_scales", name);
        code = add(dump, text, &scales);
    }
    if (!code)
        code = add_copy(dump, name, operand, false);
    return code ? code : add_copy(dump, name, operand, true);
}

int run_dump_buffer(struct run_dump *dump, const struct run_layer *run, enum run_buffer buffer)
{
    static const char *const names[RUN_BUFFER_COUNT] = { "x",  "w",  "bias",  "dy", "y",
                                                         "dx", "dw", "dbias", "x",  "saved",
                                                         "w",  "dy", "" };
    if (buffer >= RUN_X_QUANTIZED) {
        fp8_operand operand = run_host_operand(run, buffer);
        return add_operand(dump, names[buffer], &operand);
    }
    fp8_tensor tensor = run_host_tensor(run, buffer);
    return add(dump, names[buffer], &tensor);
}

int run_dump_finish(struct run_dump *dump, int code)
{
    if (!dump)
        return code;
    bool keep = code == CLI_DONE || code == CLI_BUG;
    int written = CLI_DONE;
    char *text = keep ? json_dumps(dump->index, JSON_INDENT(2) | JSON_SORT_KEYS) : NULL;
    char *path = text ? cli_path_join(dump->temp, "index.json") : NULL;
    if (keep)
        written = path ? cli_write_file(path, text, strlen(text)) : CLI_MACHINE;
    if (keep && !written)
        written = cli_temp_publish(dump->temp, dump->target);
    else
        cli_temp_remove(dump->temp);
    if (keep && !written)
        cli_note("wrote the dump %s", dump->target);
    json_decref(dump->index);
    free(text);
    free(path);
    free(dump->folder);
    free(dump->target);
    free(dump);
    return written ? written : code;
}
