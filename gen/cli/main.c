/*
 * main.c - the fp8gen program: finds the command, parses its options, runs it.
 *
 * In: argv. Out: the exit code (0 done, 1 spec or template wrong, 2 command line wrong, 3 machine
 * wrong, 4 a bug of ours). The table of commands feeds lookup, help and the did-you-mean of errors.
 * A command's name may be two words ("bench layer"). Global options stand before or after the
 * command.
 */
#include <ctype.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/cli.h"
#include "gen/cli/ranks.h"

#define MAX_COMMANDS 32
#define PAGE_COLUMNS 96

static int run_help(const void *values, int count, char **operands);

const struct cli_command cli_help_command = {
    .name = "help",
    .operands = "[COMMAND]",
    .summary = "print this page, the page of a command, or with 'spec' the fields of a spec",
    .max_operands = 2,
    .run = run_help,
};

static const struct cli_command *const commands[] = {
    &cli_check_command,      &cli_plan_command,        &cli_expand_command,
    &cli_build_command,      &cli_run_command,         &cli_tune_command,
    &cli_bench_gemm_command, &cli_bench_layer_command, &cli_bench_quantize_command,
    &cli_bench_host_command, &cli_bench_shard_command, &cli_cache_path_command,
    &cli_cache_list_command, &cli_cache_trim_command,  &cli_cache_verify_command,
    &cli_doctor_command,     &cli_help_command,
};
enum { COMMAND_COUNT = sizeof commands / sizeof commands[0] };

/* ---- finding a command ----------------------------------------------------------------------- */

/* How many words of argv name the command; 0 if they do not. */
static int words_matched(const struct cli_command *command, int argc, char **argv)
{
    const char *space = strchr(command->name, ' ');
    size_t first = space ? (size_t)(space - command->name) : strlen(command->name);
    if (argc < 1 || strlen(argv[0]) != first || memcmp(argv[0], command->name, first) != 0)
        return 0;
    if (!space)
        return 1;
    return argc >= 2 && strcmp(argv[1], space + 1) == 0 ? 2 : 0;
}

static bool is_group(const struct cli_command *command, const char *word)
{
    const char *space = strchr(command->name, ' ');
    size_t first = space ? (size_t)(space - command->name) : 0;
    return space && strlen(word) == first && memcmp(word, command->name, first) == 0;
}

/* Collects the words that may follow: second words of the group argv[0], or all first words. */
static int possible_words(const char *group, const char *words[], char storage[][16])
{
    int count = 0;
    for (int i = 0; i < COMMAND_COUNT && count < MAX_COMMANDS; i++) {
        const char *name = commands[i]->name;
        const char *space = strchr(name, ' ');
        if (group && !is_group(commands[i], group))
            continue;
        if (group) {
            words[count++] = space + 1;
            continue;
        }
        snprintf(storage[count], 16, "%.*s", space ? (int)(space - name) : 15, name);
        words[count] = storage[count];
        if (count == 0 || strcmp(words[count - 1], words[count]) != 0)
            count++;
    }
    return count;
}

static int unknown_command(int argc, char **argv)
{
    const char *words[MAX_COMMANDS];
    char storage[MAX_COMMANDS][16];
    bool group = false;
    for (int i = 0; i < COMMAND_COUNT; i++)
        group = group || is_group(commands[i], argv[0]);
    int count = possible_words(group ? argv[0] : NULL, words, storage);
    char list[256] = "";
    for (int i = 0; i < count; i++) {
        size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "", words[i]);
    }
    const char *wrong = group ? (argc > 1 ? argv[1] : NULL) : argv[0];
    if (!wrong)
        cli_error("'%s' needs one of: %s", argv[0], list);
    else if (group)
        cli_error("unknown command '%s %s'", argv[0], wrong);
    else
        cli_error("unknown command '%s'", wrong);
    const char *nearest = wrong ? cli_nearest(wrong, words, count) : NULL;
    if (nearest)
        cli_hint("did you mean '%s%s%s'?", group ? argv[0] : "", group ? " " : "", nearest);
    else if (wrong)
        cli_hint("the commands are %s", list);
    return CLI_USAGE;
}

static const struct cli_command *find_command(int argc, char **argv, int *words)
{
    for (int i = 0; i < COMMAND_COUNT; i++) {
        *words = words_matched(commands[i], argc, argv);
        if (*words)
            return commands[i];
    }
    return NULL;
}

/* ---- help ------------------------------------------------------------------------------------ */

static void print_overview(void)
{
    printf("fp8gen %s: FP8 linear layers from a layer spec\n\n", fp8gen_version());
    printf("usage: fp8gen COMMAND [OPTIONS] ...\n\ncommands:\n");
    for (int i = 0; i < COMMAND_COUNT; i++) {
        char left[64];
        snprintf(left, sizeof left, "%s %s", commands[i]->name, commands[i]->operands);
        printf("  %-20s %s\n", left, commands[i]->summary);
    }
    printf("\noptions of every command:\n");
    cli_print_options(cli_global_options);
    printf("\nSPEC is a file, or - for standard input; 'fp8gen help spec' lists its fields.\n"
           "\nenvironment:\n");
    cli_print_environment();
    printf("\nexit codes:\n"
           "  0 done   1 spec or template wrong   2 command line wrong\n"
           "  3 machine wrong (no GPU, no NVRTC, disk full)\n"
           "  4 a bug of fp8gen, or a result out of its bounds\n\n"
           "'fp8gen help COMMAND' prints the options of a command.\n");
}

/* A text in lines of at most PAGE_COLUMNS; a line that begins with a space is left as it is. */
static void print_wrapped(const char *text)
{
    for (size_t column = 0; *text;) {
        const bool is_laid_out = column == 0 && *text == ' ';
        size_t word = is_laid_out ? strcspn(text, "\n") : strcspn(text, " \n");
        if (column > 0 && column + 1 + word > PAGE_COLUMNS) {
            putchar('\n');
            column = 0;
        }
        printf("%s%.*s", column > 0 ? " " : "", (int)word, text);
        column += word + (column > 0);
        text += word;
        if (*text == '\n') {
            putchar('\n');
            column = 0;
        }
        text += *text != '\0';
    }
    putchar('\n');
}

static void print_page(const struct cli_command *command)
{
    printf("usage: fp8gen %s [OPTIONS]%s%s\n\n%c%s.\n", command->name,
           command->operands[0] ? " " : "", command->operands, toupper(command->summary[0]),
           command->summary + 1);
    if (command->details) {
        putchar('\n');
        print_wrapped(command->details);
    }
    if (command->options && command->options->name) {
        printf("\noptions:\n");
        cli_print_options(command->options);
    }
    printf("\noptions of every command:\n");
    cli_print_options(cli_global_options);
}

/* The pages of all commands whose first word is `word`; false: there are none. */
static bool print_group(const char *word)
{
    bool printed = false;
    for (int i = 0; i < COMMAND_COUNT; i++) {
        if (!is_group(commands[i], word))
            continue;
        if (printed)
            printf("\n\n");
        print_page(commands[i]);
        printed = true;
    }
    return printed;
}

static bool is_help(const char *word)
{
    return strcmp(word, "-h") == 0 || strcmp(word, "--help") == 0;
}

/* The fields of a spec, with ranges and defaults. */
static int print_schema(void)
{
    fp8gen *gen = NULL;
    const char *text;
    fp8gen_status status = fp8gen_open(NULL, &gen);
    if (!status)
        status = fp8gen_schema(gen, &text);
    if (!status)
        fputs(text, stdout);
    int code = status ? cli_gen_failed(gen, status, "the fields of a spec") : CLI_DONE;
    fp8gen_close(gen);
    return code;
}

static int run_help(const void *values, int count, char **operands)
{
    (void)values;
    if (count == 0) {
        print_overview();
        return CLI_DONE;
    }
    if (count == 1 && strcmp(operands[0], "spec") == 0)
        return print_schema();
    int words;
    const struct cli_command *command = find_command(count, operands, &words);
    if (command && words == count) {
        print_page(command);
        return CLI_DONE;
    }
    if (command) {
        cli_error("'help %s' takes no more words, but '%s' was given too", command->name,
                  operands[words]);
        return CLI_USAGE;
    }
    return count == 1 && print_group(operands[0]) ? CLI_DONE : unknown_command(count, operands);
}

/* ---- running --------------------------------------------------------------------------------- */

static int check_operands(const struct cli_command *command, int count, char **operands)
{
    if (count < command->min_operands) {
        cli_error("'%s' needs %s", command->name, command->operands);
        cli_hint("'fp8gen help %s' prints its page", command->name);
        return CLI_USAGE;
    }
    if (command->max_operands >= 0 && count > command->max_operands) {
        cli_error("'%s' takes %s%s, but '%s' was given too", command->name,
                  command->max_operands ? "only " : "no operands",
                  command->max_operands ? command->operands : "", operands[command->max_operands]);
        return CLI_USAGE;
    }
    return CLI_DONE;
}

static int run_command(const struct cli_command *command, int argc, char **argv,
                       struct cli_globals *globals)
{
    int count = 0;
    void *values = calloc(1, command->values_size ? command->values_size : 1);
    if (!values) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    int code = cli_parse(command, argc, argv, values, globals, &count);
    cli_terminal_init(globals->color, globals->quiet ? -1 : globals->verbose > 0);
    if (!code && globals->help)
        print_page(command);
    else if (!code && globals->version)
        printf("fp8gen %s\n", fp8gen_version());
    else if (!code && !(code = check_operands(command, count, argv))) {
        cli_check_environment();
        code = command->run(values, count, argv);
    }
    cli_release(command, values);
    free(values);
    return code;
}

/* Splits argv at the command's name: the options before it are global ones. */
static int leading_options(int argc, char **argv)
{
    int at = 1;
    while (at < argc && argv[at][0] == '-' && argv[at][1]) {
        bool value_follows = strcmp(argv[at], "--color") == 0;
        at += value_follows ? 2 : 1;
    }
    return at < argc ? at : argc;
}

int main(int argc, char **argv)
{
    struct cli_globals globals = { 0 };
    signal(SIGPIPE, SIG_IGN);
    cli_terminal_init(NULL, 0);
    int at = leading_options(argc, argv), rest, words = 0;
    int code = cli_parse(NULL, at - 1, argv + 1, NULL, &globals, &rest);
    cli_terminal_init(globals.color, globals.quiet ? -1 : globals.verbose > 0);
    if (code)
        return code;
    const struct cli_command *command = find_command(argc - at, argv + at, &words);
    if (command)
        code = run_command(command, argc - at - words, argv + at + words, &globals);
    else if (argc - at == 2 && is_help(argv[at + 1]) && print_group(argv[at]))
        code = CLI_DONE;
    else if (at < argc)
        code = globals.help ? run_help(NULL, argc - at, argv + at)
                            : unknown_command(argc - at, argv + at);
    else if (globals.version)
        printf("fp8gen %s\n", fp8gen_version());
    else if (globals.help)
        print_overview();
    else {
        cli_error("no command was given");
        cli_hint("'fp8gen help' lists the commands; 'fp8gen check SPEC' is a good first one");
        code = CLI_USAGE;
    }
    code = cli_output_close(code);
    if (cli_ranks_are_stuck())
        _Exit(code);
    return code;
}
