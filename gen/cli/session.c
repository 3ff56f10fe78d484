/*
 * session.c - calls into the two libraries, and what their failures mean for the exit code.
 *
 * A generator session owns its diagnostics, already worded and located; they are printed as they
 * are. A failed runtime call has a sentence (fp8_last_error) and a remedy from the status table.
 * Which exit code a status gives is decided here and nowhere else.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "gen/cli/cli.h"

int cli_gen_failed(const fp8gen *gen, fp8gen_status status, const char *what)
{
    const char *text = gen ? fp8gen_diagnostics(gen) : "";
    cli_progress_end();
    fflush(stdout);
    if (text[0])
        fputs(text, stderr);
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
                      { "max_tokens", spec->max_tokens },
                      { "recipe", spec->recipe },
                      { "gemm", spec->gemm } };
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

int cli_spec_open(const struct cli_spec *spec, const char *text, fp8gen **gen)
{
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
        return CLI_MACHINE;
    default:
        return CLI_BUG;
    }
}
