/*
 * terminal.c - what the program says: errors, hints, notes, the progress line, and colours.
 *
 * In: --color, NO_COLOR, TERM and whether stdout and stderr are terminals. Out: text on stderr,
 * escape sequences for the tables on stdout. A closed stdout (`fp8gen plan x.lua | head`) is not an
 * error: the signal is ignored in main.c, so that temporary folders are still removed, and the end
 * of the program is silent; any other failure to write the results is reported, because a truncated
 * result must not look like a whole one.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "gen/cli/cli.h"

static struct {
    bool color_out, color_err, progress, progress_shown;
    int verbosity;
} terminal;

static bool wants_color(const char *color, int fd)
{
    if (strcmp(color, "always") == 0)
        return true;
    if (strcmp(color, "never") == 0 || cli_environment(CLI_ENV_NO_COLOR) || !isatty(fd))
        return false;
    const char *term = cli_environment(CLI_ENV_TERM);
    return term && strcmp(term, "dumb") != 0;
}

void cli_terminal_init(const char *color, int verbosity)
{
    if (!color)
        color = "auto";
    const char *term = cli_environment(CLI_ENV_TERM);
    terminal.color_out = wants_color(color, STDOUT_FILENO);
    terminal.color_err = wants_color(color, STDERR_FILENO);
    terminal.verbosity = verbosity;
    terminal.progress =
        verbosity >= 0 && isatty(STDERR_FILENO) && term && strcmp(term, "dumb") != 0;
}

bool cli_color_stderr(void)
{
    return terminal.color_err;
}

int cli_verbosity(void)
{
    return terminal.verbosity;
}

static const char *escape(enum cli_style style)
{
    static const char *const codes[] = {
        [CLI_PLAIN] = "",         [CLI_BOLD] = "\033[1m", [CLI_DIM] = "\033[2m",
        [CLI_GREEN] = "\033[32m", [CLI_RED] = "\033[31m", [CLI_YELLOW] = "\033[33m",
    };
    return codes[style];
}

const char *cli_style_on(enum cli_style style)
{
    return terminal.color_out ? escape(style) : "";
}

const char *cli_style_off(void)
{
    return terminal.color_out ? "\033[0m" : "";
}

static void say(enum cli_style style, const char *label, const char *format, va_list arguments)
{
    cli_wait_if_ending();
    cli_progress_end();
    fflush(stdout);
    const char *on = terminal.color_err ? escape(style) : "";
    const char *off = terminal.color_err ? "\033[0m" : "";
    fprintf(stderr, "%s%s%s ", on, label, off);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
}

void cli_error(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say(CLI_RED, "fp8gen: error:", format, arguments);
    va_end(arguments);
}

void cli_diagnostics(const char *text)
{
    static const char bare[] = "error: ";
    if (strncmp(text, bare, sizeof bare - 1) == 0) {
        text += sizeof bare - 1;
        int length = (int)strcspn(text, "\n");
        cli_error("%.*s", length, text);
        text += length + (text[length] == '\n');
    }
    fputs(text, stderr);
}

void cli_warning(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say(CLI_YELLOW, "fp8gen: warning:", format, arguments);
    va_end(arguments);
}

void cli_hint(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say(CLI_PLAIN, "  hint:", format, arguments);
    va_end(arguments);
}

void cli_note(const char *format, ...)
{
    if (terminal.verbosity < 0)
        return;
    va_list arguments;
    va_start(arguments, format);
    say(CLI_BOLD, "fp8gen: note:", format, arguments);
    va_end(arguments);
}

void cli_progress(const char *format, ...)
{
    if (!terminal.progress)
        return;
    va_list arguments;
    va_start(arguments, format);
    fputs("\r\033[K", stderr);
    vfprintf(stderr, format, arguments);
    fflush(stderr);
    va_end(arguments);
    terminal.progress_shown = true;
}

void cli_progress_end(void)
{
    if (!terminal.progress_shown)
        return;
    fputs("\r\033[K", stderr);
    fflush(stderr);
    terminal.progress_shown = false;
}

bool cli_output_broken(void)
{
    return fflush(stdout) != 0 || ferror(stdout);
}

int cli_output_close(int code)
{
    cli_wait_if_ending();
    cli_progress_end();
    errno = 0;
    bool failed = fflush(stdout) != 0;
    int reason = errno;
    /* An earlier failure leaves only the flag; another write tells the reason. */
    if (!failed && ferror(stdout)) {
        failed = true;
        reason = write(STDOUT_FILENO, "\n", 1) == 1 ? EIO : errno;
    }
    if (!failed || reason == EPIPE)
        return code;
    cli_error("cannot write the results to standard output: %s", strerror(reason));
    return code == CLI_DONE ? CLI_MACHINE : code;
}
