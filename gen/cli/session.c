/*
 * session.c - calls into the two libraries, and what their failures mean for the exit code.
 *
 * A generator session owns its diagnostics, already worded and located; they are printed as they
 * are. A failed runtime call has a sentence (fp8_last_error) and a remedy from the status table.
 * Which exit code a status gives is decided here and nowhere else.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/plan.h"

int cli_gen_failed(const fp8gen *gen, fp8gen_status status, const char *what)
{
    const char *text = gen ? fp8gen_diagnostics(gen) : "";
    cli_wait_if_ending();
    cli_progress_end();
    fflush(stdout);
    if (text[0])
        cli_diagnostics(text);
    else if (!gen)
        cli_error("%s: out of memory", what);
    else
        cli_error("%s: failed without a message (status %d)", what, (int)status);
    return (int)status;
}

static const char *template_dir_of(const struct cli_spec *spec)
{
    return spec->template_dir ? spec->template_dir : cli_environment(CLI_ENV_TEMPLATE_DIR);
}

fp8gen_status cli_spec_load(const struct cli_spec *spec, const char *text, fp8gen **gen)
{
    const struct {
        const char *field, *value;
    } overrides[] = { { "tokens", spec->tokens },
                      { "recipe", spec->recipe },
                      { "gemm", spec->gemm },
                      { "fsdp", spec->fsdp },
                      { "shrink", spec->shrink } };
    fp8gen_options options = FP8GEN_OPTIONS_INIT;
    options.color = cli_color_stderr();
    options.template_dir = template_dir_of(spec);
    *gen = NULL;
    fp8gen_status status = fp8gen_open(&options, gen);
    for (size_t i = 0; !status && i < sizeof overrides / sizeof overrides[0]; i++) {
        if (overrides[i].value)
            status = fp8gen_override(*gen, overrides[i].field, overrides[i].value);
    }
    if (!status && spec->tuning)
        status = fp8gen_tuning_file(*gen, spec->tuning);
    if (!status)
        status = text ? fp8gen_load_text(*gen, spec->path, text, strlen(text))
                      : fp8gen_load_file(*gen, spec->path);
    return status;
}

void cli_note_nvrtc(fp8gen *gen, const char *archs)
{
    const char *path, *version;
    char text[1024];
    if (cli_verbosity() > 0 && (!archs || strcmp(archs, "none") != 0) &&
        fp8gen_nvrtc(gen, &path, &version) == FP8GEN_OK &&
        cli_unused_library(CLI_ENV_NVRTC_PATH, path, text, sizeof text))
        cli_note("%s", text);
}

/* All of standard input as one text, which the caller frees; NULL after an error was printed. */
static char *read_stdin(int *code)
{
    enum { LIMIT = 1 << 24 };
    char *text = malloc(LIMIT + 1);
    size_t size = text ? fread(text, 1, LIMIT, stdin) : 0;
    *code = CLI_MACHINE;
    if (!text)
        cli_error("out of memory");
    else if (ferror(stdin))
        cli_error("cannot read standard input");
    else if (size == LIMIT || memchr(text, 0, size)) {
        cli_error("standard input is no spec: it %s",
                  size == LIMIT ? "is too large" : "holds bytes of value 0");
        *code = CLI_SPEC;
    } else {
        text[size] = '\0';
        *code = CLI_DONE;
        return text;
    }
    free(text);
    return NULL;
}

/* --recipe: a layer with compute = "bf16" has none. */
static void note_recipe(const struct cli_spec *spec, fp8gen *gen)
{
    const char *text, *first = NULL;
    size_t index;
    int count = 0;
    json_t *layer, *plan = fp8gen_plan(gen, &text) == FP8GEN_OK ? json_loads(text, 0, NULL) : NULL;
    json_t *layers = json_object_get(plan, "layers");
    json_array_foreach(layers, index, layer)
    {
        if (plan_is_bf16(layer) && count++ == 0)
            first = plan_text(layer, "name");
    }
    if (count > 0)
        cli_note("--recipe %s leaves %d of %zu layers as they are: they compute in bf16 ('%s'%s)",
                 spec->recipe, count, json_array_size(layers), first ? first : "",
                 count > 1 ? ", ..." : "");
    json_decref(plan);
}

int cli_spec_open(const struct cli_spec *spec, const char *text, fp8gen **gen)
{
    if (!text && strcmp(spec->path, "-") == 0) {
        struct cli_spec named = *spec;
        int read_code;
        char *input = read_stdin(&read_code);
        named.path = "<stdin>";
        *gen = NULL;
        int code = input ? cli_spec_open(&named, input, gen) : read_code;
        free(input);
        return code;
    }
    const char *template_dir = template_dir_of(spec);
    *gen = NULL;
    if (template_dir && !cli_is_folder(template_dir)) {
        cli_error("%s: no folder '%s'",
                  spec->template_dir ? "--template-dir"
                                     : cli_environment_name(CLI_ENV_TEMPLATE_DIR),
                  template_dir);
        return CLI_USAGE;
    }
    fp8gen_status status = cli_spec_load(spec, text, gen);
    if (!status && spec->recipe)
        note_recipe(spec, *gen);
    if (!status)
        return CLI_DONE;
    int code = cli_gen_failed(*gen, status, spec->path);
    fp8gen_close(*gen);
    *gen = NULL;
    return code;
}

void cli_gen_log(void *user, int level, const char *message)
{
    (void)user;
    if (level <= FP8_LOG_WARNING)
        cli_warning("%s", message);
    else if (cli_verbosity() > 0)
        cli_note("%s", message);
}

int cli_fp8_failed(fp8_status status, const char *format, ...)
{
    char what[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    const char *sentence = fp8_last_error();
    cli_error("%s: %s", what, sentence[0] ? sentence : fp8_status_name(status));
    cli_hint("%s", fp8_status_remedy(status));
    switch (status) {
    case FP8_OK:
        return CLI_DONE;
    case FP8_ERR_LIBRARY:
    case FP8_ERR_DEVICE:
    case FP8_ERR_ARCH:
    case FP8_ERR_MEMORY:
    case FP8_ERR_COMM: /* a rank died, a network or a link failed */
    case FP8_ERR_TIMEOUT:
        return CLI_MACHINE;
    default:
        return CLI_BUG;
    }
}
