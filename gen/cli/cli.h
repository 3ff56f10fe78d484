/*
 * cli.h - what the files of the fp8gen program share.
 *
 * The program is a client of two libraries through their public headers and knows nothing else of
 * them. Results go to stdout; errors, warnings, notes and progress go to stderr. One process runs
 * one command, so the few settings of the terminal (colour, verbosity) are kept in terminal.c and
 * need not be handed around. Every command returns an exit code of `enum cli_exit`.
 */
#ifndef FP8GEN_CLI_H
#define FP8GEN_CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gen/fp8gen.h"
#include "runtime/fp8.h"
#include "runtime/fp8_device.h"

enum cli_exit {
    CLI_DONE = 0,
    CLI_SPEC = 1,    /* the spec or a template is wrong */
    CLI_USAGE = 2,   /* the command line is wrong */
    CLI_MACHINE = 3, /* no GPU, no NVRTC, unreadable file, disk full */
    CLI_BUG = 4,     /* a bug of fp8gen, or a bound on accuracy that was missed */
};

/* ---- options.c: one table per command feeds parsing, help and errors ------------------------- */

enum cli_kind {
    CLI_FLAG,   /* bool */
    CLI_COUNT,  /* int, one more each time */
    CLI_TEXT,   /* const char * */
    CLI_NUMBER, /* int64_t, min..max */
    CLI_CHOICE, /* const char *, one of choices */
    CLI_LIST,   /* struct cli_list, one more each time */
};

struct cli_list {
    const char **items;
    int count;
};

struct cli_option {
    const char *name; /* without the dashes; NULL ends a table */
    char letter;      /* 0 = none */
    enum cli_kind kind;
    const char *metavar;
    const char *doc;
    size_t offset; /* of the value in the command's struct */
    int64_t min, max;
    int64_t fallback;           /* of a number that is not given */
    const char *const *choices; /* NULL-terminated */
};

struct cli_command {
    const char *name; /* one word, or two: "bench layer" */
    const char *operands;
    const char *summary;
    const char *details;            /* more paragraphs of the help page; may be NULL */
    int min_operands, max_operands; /* max_operands -1 = any number */
    const struct cli_option *options;
    size_t values_size;
    int (*run)(const void *values, int count, char **operands);
};

extern const struct cli_option cli_global_options[];

/* The values of cli_global_options. */
struct cli_globals {
    bool help;
    bool version;
    int verbose;
    bool quiet;
    const char *color;
};

/* Parses argv[0..argc) into values and globals; *count operands are left in argv, in order.
 * command is NULL while only the global options count (before the command's name). */
int cli_parse(const struct cli_command *command, int argc, char **argv, void *values,
              struct cli_globals *globals, int *count);
/* Frees what the lists of `values` hold. */
void cli_release(const struct cli_command *command, void *values);
/* The name of `count` names nearest to `word`; NULL if none is near. */
const char *cli_nearest(const char *word, const char *const *names, int count);
/* The hint to a word that is none of the names: the nearest, else all of them after `all` ("the
 * cases are"). */
void cli_hint_names(const char *word, const char *const *names, int count, const char *all);
/* Where the word of an option stands among the names of a kind ("case"); -1 after an error was
 * printed. */
int cli_find_name(const char *option, const char *kind, const char *word, const char *const *names,
                  int count);
void cli_print_options(const struct cli_option *options);
/* Seconds of an option given as text: a number above 0, or `fallback` if text is NULL. Prints what
 * is wrong and returns an exit code. */
int cli_read_seconds(const char *option, const char *text, double fallback, double *seconds);

/* Options of several commands. */
#define CLI_OPTION_LAYER(type)                                                                     \
    {                                                                                              \
        .name = "layer", .kind = CLI_TEXT, .metavar = "NAME", .doc = "only this layer",            \
        .offset = offsetof(type, layer)                                                            \
    }
#define CLI_OPTION_RECIPE(type)                                                                    \
    {                                                                                              \
        .name = "recipe", .kind = CLI_TEXT, .metavar = "NAME",                                     \
        .doc = "recipe.NAME {} for every layer instead of the spec's recipes",                     \
        .offset = offsetof(type, recipe)                                                           \
    }
#define CLI_OPTION_FSDP(type)                                                                      \
    {                                                                                              \
        .name = "fsdp", .kind = CLI_TEXT, .metavar = "F",                                          \
        .doc = "F ranks share the weights, whatever the spec's mesh says",                         \
        .offset = offsetof(type, fsdp)                                                             \
    }
#define CLI_OPTION_TEMPLATE_DIR(type)                                                              \
    {                                                                                              \
        .name = "template-dir", .kind = CLI_TEXT, .metavar = "DIR",                                \
        .doc = "templates from DIR instead of the built-in ones",                                  \
        .offset = offsetof(type, template_dir)                                                     \
    }
#define CLI_OPTION_TUNING(type)                                                                    \
    {                                                                                              \
        .name = "tuning", .kind = CLI_TEXT, .metavar = "FILE",                                     \
        .doc = "choose GEMM kernels by this file of 'fp8gen tune'",                                \
        .offset = offsetof(type, tuning)                                                           \
    }
#define CLI_OPTION_GEMM(type)                                                                      \
    {                                                                                              \
        .name = "gemm", .kind = CLI_TEXT, .metavar = "CHOICE",                                     \
        .doc = "every GEMM by: generated, cublaslt, or a configuration's name",                    \
        .offset = offsetof(type, gemm)                                                             \
    }

/* The commands, ended by a NULL name (main.c). */
extern const struct cli_command cli_commands[];
extern const struct cli_command cli_check_command, cli_plan_command, cli_expand_command,
    cli_build_command, cli_run_command, cli_tune_command, cli_bench_gemm_command,
    cli_bench_layer_command, cli_bench_quantize_command, cli_bench_host_command,
    cli_bench_shard_command, cli_doctor_command, cli_help_command;
extern const struct cli_command cli_cache_path_command, cli_cache_list_command,
    cli_cache_trim_command, cli_cache_verify_command;

/* ---- environment.c --------------------------------------------------------------------------- */

enum cli_variable {
    CLI_ENV_TEMPLATE_DIR,
    CLI_ENV_CACHE_DIR,
    CLI_ENV_CACHE_SIZE,
    CLI_ENV_LOG,
    CLI_ENV_CUBLASLT_PATH,
    CLI_ENV_NVRTC_PATH,
    CLI_ENV_NCCL_PATH,
    CLI_ENV_COMM_FILE,
    CLI_ENV_PYTHON,
    CLI_ENV_NO_COLOR,
    CLI_ENV_TERM,
    CLI_ENV_TMPDIR,
    CLI_ENV_COUNT,
};

/* The variable's value; NULL if it is unset or empty. */
const char *cli_environment(enum cli_variable variable);
const char *cli_environment_name(enum cli_variable variable);
void cli_print_environment(void);
/* Warns once of a value that has no effect. */
void cli_check_environment(void);
/* Whether a variable that names a library (CLI_ENV_NVRTC_PATH) is set, but not to the copy in use;
 * text says why and which that is. */
bool cli_unused_library(enum cli_variable variable, const char *used, char *text, size_t size);

/* ---- terminal.c ------------------------------------------------------------------------------ */

enum cli_style { CLI_PLAIN, CLI_BOLD, CLI_DIM, CLI_GREEN, CLI_RED, CLI_YELLOW };

/* color is "auto", "always" or "never"; verbosity -1 (quiet), 0 or 1. */
void cli_terminal_init(const char *color, int verbosity);
bool cli_color_stderr(void);
int cli_verbosity(void);
/* Escape sequences for stdout, "" without colour. */
const char *cli_style_on(enum cli_style style);
const char *cli_style_off(void);

void cli_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* What the generator says, as it says it; what names no place in a spec gets the program's name. */
void cli_diagnostics(const char *text);
void cli_warning(const char *format, ...) __attribute__((format(printf, 1, 2)));
void cli_hint(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Not printed with -q. */
void cli_note(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Replaces the progress line; only where stderr is a terminal and -q was not given. */
void cli_progress(const char *format, ...) __attribute__((format(printf, 1, 2)));
void cli_progress_end(void);
/* True once stdout cannot be written any more: a command that runs long may stop. */
bool cli_output_broken(void);
/* Flushes stdout; returns code, or CLI_MACHINE if the results could not be written. A closed pipe
 * is not an error and says nothing. */
int cli_output_close(int code);

/* ---- session.c: calls into libfp8gen, its diagnostics ---------------------------------------- */

struct cli_spec {
    const char *path;
    const char *template_dir; /* NULL: FP8GEN_TEMPLATE_DIR, or the built-in ones */
    const char *tokens;       /* overrides; NULL = as the spec says */
    const char *recipe;
    const char *tuning; /* a tuning file; NULL = none */
    const char *gemm;   /* --gemm: what every GEMM is computed by; NULL = the plan's choice */
    const char *fsdp;   /* ranks; NULL = as the spec says */
    const char *shrink; /* "true": dims cut (shrink.lua); NULL = as the spec says */
};

/* Opens a session and loads the spec, and prints nothing. *gen is left open for its diagnostics
 * where it could be opened at all. text, if not NULL, is the spec itself and path its name. */
fp8gen_status cli_spec_load(const struct cli_spec *spec, const char *text, fp8gen **gen);
/* Opens a session and loads the spec; path "-" is standard input. On failure the diagnostics are
 * printed, *gen is NULL and the exit code is returned. */
int cli_spec_open(const struct cli_spec *spec, const char *text, fp8gen **gen);
/* With -v, after a build for `archs`: says so if FP8_NVRTC_PATH was set and not used. */
void cli_note_nvrtc(fp8gen *gen, const char *archs);
/* Prints the session's diagnostics and returns the exit code of a failed call. */
int cli_gen_failed(const fp8gen *gen, fp8gen_status status, const char *what);
/* The log callback of builds: warnings, and with -v what was compiled. */
void cli_gen_log(void *user, int level, const char *message);
/* Prints "what: " and the sentence of the last failed libfp8 call, and returns its exit code. */
int cli_fp8_failed(fp8_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* ---- files.c --------------------------------------------------------------------------------- */

/* A new private folder in `parent` (NULL: TMPDIR or /tmp) that is removed by cli_temp_remove, and
 * if a signal ends the program. prefix is the start of its name. */
int cli_temp_create(const char *parent, const char *prefix, char **path);
void cli_temp_remove(const char *path);
/* The guard of fp8gen_build_options: the build's folder goes too if a signal ends the program. */
void cli_temp_guard(void *user, int32_t hold, const char *path);
/* Does not return once a signal is ending the program: what failed since then failed because of
 * it. */
void cli_wait_if_ending(void);
/* The folder is finished and becomes `path`. An existing folder there is replaced. */
int cli_temp_publish(const char *temp, const char *path);
/* "%s/%s"; NULL if out of memory. */
char *cli_path_join(const char *folder, const char *name);
/* Writes a whole file through a temporary name beside it, where a link leads if it is one; a
 * device, a pipe or what the program's output goes to is written itself. */
int cli_write_file(const char *path, const void *data, size_t bytes);
/* Whether that could be done, said before the work whose result it is. */
int cli_try_file(const char *path);
bool cli_is_folder(const char *path);

/* ---- watchdog.c: work on the device that may never end --------------------------------------- */

/* From now on `what` must be over within so many seconds; else the program says so and ends with
 * CLI_BUG: a kernel that hangs blocks every call that waits for it. what lives until the disarm. */
int cli_watchdog_arm(const char *what, double seconds);
void cli_watchdog_disarm(void);

/* ---- measure.c ------------------------------------------------------------------------------- */

/* Of a clock that only runs forward. */
double cli_seconds(void);
/* Sorts the samples; of an even number the upper one. */
double cli_median(double *samples, int count);

/* ---- table.c: aligned text tables ------------------------------------------------------------ */

struct cli_table;
/* columns: names; a name that starts with '>' is right-aligned. */
struct cli_table *cli_table_create(const char *const *columns, int count);
/* One cell of the current row; the row ends after the last column. */
void cli_table_cell(struct cli_table *table, enum cli_style style, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void cli_table_print(struct cli_table *table, int indent);
void cli_table_destroy(struct cli_table *table);
/* "12.3 MB", "1.23 TFLOP", "45.6 us" into text[32]; returns text. */
char *cli_format_bytes(char text[32], double bytes);
char *cli_format_flops(char text[32], double flops);
char *cli_format_seconds(char text[32], double seconds);

/* ---- parallel.c ------------------------------------------------------------------------------ */

int cli_cores(void);
/* Calls run(user, index) for index 0..count on all cores. */
void cli_parallel(int64_t count, void (*run)(void *user, int64_t index), void *user);

#endif
