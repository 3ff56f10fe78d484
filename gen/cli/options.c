/*
 * options.c - the command line: one table of options per command feeds parsing, help and errors.
 *
 * In: argv and a table. Out: the command's struct of values, the operands, or a sentence about the
 * first mistake with the nearest right word. Long options take `--name value` and `--name=value`,
 * letters `-j4`, `-j 4` and `-vq`; `--` ends the options; options and operands may be mixed. The
 * last of several equal options counts, except for lists. Nothing here knows what a command does.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/cli.h"

#define MAX_WORDS 64

static const char *const color_choices[] = { "auto", "always", "never", NULL };

const struct cli_option cli_global_options[] = {
    { .name = "help",
      .letter = 'h',
      .kind = CLI_FLAG,
      .doc = "print the help page of the command",
      .offset = offsetof(struct cli_globals, help) },
    { .name = "version",
      .kind = CLI_FLAG,
      .doc = "print the version",
      .offset = offsetof(struct cli_globals, version) },
    { .name = "verbose",
      .letter = 'v',
      .kind = CLI_COUNT,
      .doc = "say more on stderr (GEMM choices, files written)",
      .offset = offsetof(struct cli_globals, verbose) },
    { .name = "quiet",
      .letter = 'q',
      .kind = CLI_FLAG,
      .doc = "no notes and no progress on stderr",
      .offset = offsetof(struct cli_globals, quiet) },
    { .name = "color",
      .kind = CLI_CHOICE,
      .metavar = "WHEN",
      .doc = "colours: auto, always or never",
      .offset = offsetof(struct cli_globals, color),
      .choices = color_choices },
    { .name = NULL },
};

/* ---- nearest word ---------------------------------------------------------------------------- */

/* Edit distance with swaps of neighbours; words over 31 characters are far from everything. */
static int word_distance(const char *a, const char *b)
{
    int d[33][33];
    int n = (int)strlen(a), m = (int)strlen(b);
    if (n > 31 || m > 31)
        return 99;
    for (int i = 0; i <= n; i++)
        d[i][0] = i;
    for (int j = 0; j <= m; j++)
        d[0][j] = j;
    for (int i = 1; i <= n; i++) {
        for (int j = 1; j <= m; j++) {
            int best = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            if (d[i - 1][j] + 1 < best)
                best = d[i - 1][j] + 1;
            if (d[i][j - 1] + 1 < best)
                best = d[i][j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                d[i - 2][j - 2] + 1 < best)
                best = d[i - 2][j - 2] + 1;
            d[i][j] = best;
        }
    }
    return d[n][m];
}

const char *cli_nearest(const char *word, const char *const *names, int count)
{
    const char *nearest = NULL;
    int length = (int)strlen(word);
    int best = length <= 2 ? 1 : length <= 5 ? 2 : 3;
    for (int i = 0; i < count; i++) {
        int distance = word_distance(word, names[i]);
        if (distance > best || (distance == best && nearest))
            continue;
        if (distance >= (int)strlen(names[i])) /* nothing in common */
            continue;
        nearest = names[i];
        best = distance;
    }
    return nearest;
}

void cli_hint_names(const char *word, const char *const *names, int count, const char *all)
{
    const char *nearest = cli_nearest(word, names, count);
    char list[1024] = "";
    if (nearest) {
        cli_hint("did you mean '%s'?", nearest);
        return;
    }
    for (int i = 0; i < count; i++) {
        size_t used = strlen(list);
        bool fits = used + strlen(names[i]) + 8 < sizeof list;
        snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "", fits ? names[i] : "...");
        if (!fits)
            break;
    }
    cli_hint("%s %s", all, list);
}

int cli_find_name(const char *option, const char *kind, const char *word, const char *const *names,
                  int count)
{
    char all[64];
    for (int i = 0; i < count; i++)
        if (strcmp(names[i], word) == 0)
            return i;
    snprintf(all, sizeof all, "the %ss are", kind);
    cli_error("--%s: there is no %s '%s'", option, kind, word);
    cli_hint_names(word, names, count, all);
    return -1;
}

/* ---- parsing --------------------------------------------------------------------------------- */

struct parser {
    const struct cli_command *command;
    void *values;
    struct cli_globals *globals;
    int argc, next;
    char **argv;
};

static const struct cli_option *find_in(const struct cli_option *options, const char *name,
                                        size_t length, char letter)
{
    for (; options && options->name; options++) {
        if (letter ? options->letter == letter
                   : strlen(options->name) == length && memcmp(options->name, name, length) == 0)
            return options;
    }
    return NULL;
}

static const struct cli_option *find(const struct parser *p, const char *name, size_t length,
                                     char letter, void **base)
{
    const struct cli_option *option = NULL;
    *base = p->values;
    if (p->command)
        option = find_in(p->command->options, name, length, letter);
    if (!option) {
        *base = p->globals;
        option = find_in(cli_global_options, name, length, letter);
    }
    return option;
}

static void for_command(const struct parser *p, char text[64])
{
    text[0] = '\0';
    if (p->command)
        snprintf(text, 64, " for '%s'", p->command->name);
}

static int unknown_option(const struct parser *p, const char *word)
{
    const char *names[MAX_WORDS];
    int count = 0;
    const struct cli_option *tables[] = { p->command ? p->command->options : NULL,
                                          cli_global_options };
    for (int t = 0; t < 2; t++)
        for (const struct cli_option *o = tables[t]; o && o->name && count < MAX_WORDS; o++)
            names[count++] = o->name;
    char where[64];
    for_command(p, where);
    cli_error("unknown option '%s'%s", word, where);
    char bare[64];
    snprintf(bare, sizeof bare, "%s", word + strspn(word, "-"));
    bare[strcspn(bare, "=")] = '\0';
    const char *nearest = bare[0] && bare[1] ? cli_nearest(bare, names, count) : NULL;
    if (nearest)
        cli_hint("did you mean '--%s'?", nearest);
    else if (p->command)
        cli_hint("'fp8gen help %s' lists the options", p->command->name);
    else
        cli_hint("'fp8gen help' lists the commands and options");
    return CLI_USAGE;
}

static int set_number(const struct cli_option *option, const char *value, void *place)
{
    char *end;
    errno = 0;
    long long number = strtoll(value, &end, 10);
    if (end == value || *end || errno || number < option->min || number > option->max) {
        if (option->max == INT64_MAX)
            cli_error("--%s takes a whole number from %" PRId64 ", not '%s'", option->name,
                      option->min, value);
        else
            cli_error("--%s takes a whole number from %" PRId64 " to %" PRId64 ", not '%s'",
                      option->name, option->min, option->max, value);
        return CLI_USAGE;
    }
    *(int64_t *)place = number;
    return CLI_DONE;
}

static int set_choice(const struct cli_option *option, const char *value, void *place)
{
    char list[256] = "";
    int count = 0;
    for (; option->choices[count]; count++) {
        if (strcmp(option->choices[count], value) == 0) {
            *(const char **)place = option->choices[count];
            return CLI_DONE;
        }
        size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s%s", count ? ", " : "",
                 option->choices[count]);
    }
    cli_error("--%s takes one of %s, not '%s'", option->name, list, value);
    const char *nearest = cli_nearest(value, option->choices, count);
    if (nearest)
        cli_hint("did you mean '%s'?", nearest);
    return CLI_USAGE;
}

static int add_to_list(struct cli_list *list, const char *value)
{
    const char **items = realloc(list->items, sizeof *items * (size_t)(list->count + 1));
    if (!items) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    items[list->count] = value;
    list->items = items;
    list->count++;
    return CLI_DONE;
}

static int set_value(const struct cli_option *option, const char *value, void *base)
{
    void *place = (char *)base + option->offset;
    switch (option->kind) {
    case CLI_FLAG:
        *(bool *)place = true;
        return CLI_DONE;
    case CLI_COUNT:
        ++*(int *)place;
        return CLI_DONE;
    case CLI_NUMBER:
        return set_number(option, value, place);
    case CLI_CHOICE:
        return set_choice(option, value, place);
    case CLI_LIST:
        return add_to_list(place, value);
    case CLI_TEXT:
        break;
    }
    if (!value[0]) {
        cli_error("--%s takes a value (%s) that is not empty", option->name, option->metavar);
        return CLI_USAGE;
    }
    *(const char **)place = value;
    return CLI_DONE;
}

static bool takes_value(const struct cli_option *option)
{
    return option->kind != CLI_FLAG && option->kind != CLI_COUNT;
}

static int need_value(const struct parser *p, const struct cli_option *option)
{
    char where[64];
    for_command(p, where);
    cli_error("option '--%s'%s needs a value (%s)", option->name, where, option->metavar);
    return CLI_USAGE;
}

static int parse_long(struct parser *p, const char *word)
{
    size_t length = strcspn(word + 2, "=");
    const char *value = word[2 + length] ? word + 2 + length + 1 : NULL;
    void *base;
    const struct cli_option *option = find(p, word + 2, length, 0, &base);
    if (!option)
        return unknown_option(p, word);
    if (!takes_value(option)) {
        if (value) {
            cli_error("option '--%s' takes no value, but '%s' was given", option->name, value);
            return CLI_USAGE;
        }
        return set_value(option, NULL, base);
    }
    if (!value) {
        if (p->next >= p->argc)
            return need_value(p, option);
        value = p->argv[p->next++];
    }
    return set_value(option, value, base);
}

static int parse_letters(struct parser *p, const char *word)
{
    for (const char *letter = word + 1; *letter; letter++) {
        char shown[3] = { '-', *letter, '\0' };
        void *base;
        const struct cli_option *option = find(p, NULL, 0, *letter, &base);
        if (!option)
            return unknown_option(p, shown);
        if (!takes_value(option)) {
            int code = set_value(option, NULL, base);
            if (code)
                return code;
            continue;
        }
        const char *value = letter + 1;
        if (!*value) {
            if (p->next >= p->argc)
                return need_value(p, option);
            value = p->argv[p->next++];
        }
        return set_value(option, value, base);
    }
    return CLI_DONE;
}

int cli_parse(const struct cli_command *command, int argc, char **argv, void *values,
              struct cli_globals *globals, int *count)
{
    struct parser p = { command, values, globals, argc, 0, argv };
    bool options_end = false;
    *count = 0;
    for (const struct cli_option *o = command ? command->options : NULL; o && o->name; o++) {
        if (o->kind == CLI_NUMBER)
            *(int64_t *)((char *)values + o->offset) = o->fallback;
    }
    while (p.next < argc) {
        char *word = argv[p.next++];
        int code = CLI_DONE;
        if (options_end || word[0] != '-' || !word[1])
            argv[(*count)++] = word;
        else if (strcmp(word, "--") == 0)
            options_end = true;
        else if (word[1] == '-')
            code = parse_long(&p, word);
        else
            code = parse_letters(&p, word);
        if (code)
            return code;
    }
    return CLI_DONE;
}

void cli_release(const struct cli_command *command, void *values)
{
    for (const struct cli_option *o = command->options; o && o->name; o++) {
        if (o->kind == CLI_LIST)
            free(((struct cli_list *)((char *)values + o->offset))->items);
    }
}

int cli_read_seconds(const char *option, const char *text, double fallback, double *seconds)
{
    char *end = NULL;
    *seconds = text ? strtod(text, &end) : fallback;
    if (!text || (end != text && !*end && *seconds > 0 && *seconds <= 3600))
        return CLI_DONE;
    cli_error("--%s takes a number of seconds above 0 and up to 3600, not '%s'", option, text);
    return CLI_USAGE;
}

/* ---- help ------------------------------------------------------------------------------------ */

void cli_print_options(const struct cli_option *options)
{
    for (; options && options->name; options++) {
        char left[48];
        int used = options->letter ? snprintf(left, sizeof left, "-%c, ", options->letter)
                                   : snprintf(left, sizeof left, "    ");
        snprintf(left + used, sizeof left - (size_t)used, "--%s%s%s", options->name,
                 takes_value(options) ? " " : "", takes_value(options) ? options->metavar : "");
        printf("  %-24s %s\n", left, options->doc);
    }
}
