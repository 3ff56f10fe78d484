/*
 * table.c - aligned text tables and numbers with units for people.
 *
 * Cells are collected row by row and printed when all widths are known. A column whose name starts with
 * '>' is right-aligned. Widths count bytes: all text here is ASCII. Memory failures end in a table that
 * says so rather than in a broken one.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/cli.h"

struct cell {
    char *text;
    enum cli_style style;
};

struct cli_table {
    const char *const *columns;
    int column_count;
    struct cell *cells;
    int cell_count, capacity;
    bool failed;
};

struct cli_table *cli_table_create(const char *const *columns, int count)
{
    struct cli_table *table = calloc(1, sizeof *table);
    if (!table)
        return NULL;
    table->columns = columns;
    table->column_count = count;
    return table;
}

void cli_table_cell(struct cli_table *table, enum cli_style style, const char *format, ...)
{
    if (!table)
        return;
    if (table->cell_count == table->capacity) {
        int capacity = table->capacity ? table->capacity * 2 : 64;
        struct cell *cells = realloc(table->cells, sizeof *cells * (size_t)capacity);
        if (!cells) {
            table->failed = true;
            return;
        }
        table->cells = cells;
        table->capacity = capacity;
    }
    char *text = NULL;
    va_list arguments;
    va_start(arguments, format);
    if (vasprintf(&text, format, arguments) < 0)
        text = NULL;
    va_end(arguments);
    table->failed = table->failed || !text;
    table->cells[table->cell_count++] = (struct cell){ text, style };
}

static void print_cell(const char *text, int width, bool right, bool last, enum cli_style style)
{
    int pad = width - (int)strlen(text);
    if (right)
        printf("%*s", pad, "");
    printf("%s%s%s", cli_style_on(style), text, style == CLI_PLAIN ? "" : cli_style_off());
    if (!right && !last)
        printf("%*s", pad, "");
    fputs(last ? "\n" : "  ", stdout);
}

void cli_table_print(struct cli_table *table, int indent)
{
    if (!table || table->failed) {
        cli_error("out of memory: a table is missing here");
        return;
    }
    int n = table->column_count;
    int *widths = calloc((size_t)n, sizeof *widths);
    if (!widths)
        return;
    for (int i = 0; i < n; i++)
        widths[i] = (int)strlen(table->columns[i] + (table->columns[i][0] == '>'));
    for (int i = 0; i < table->cell_count; i++) {
        int length = (int)strlen(table->cells[i].text);
        if (length > widths[i % n])
            widths[i % n] = length;
    }
    printf("%*s", indent, "");
    for (int i = 0; i < n; i++) {
        bool right = table->columns[i][0] == '>';
        print_cell(table->columns[i] + right, widths[i], right, i == n - 1, CLI_BOLD);
    }
    for (int i = 0; i < table->cell_count; i++) {
        if (i % n == 0)
            printf("%*s", indent, "");
        print_cell(table->cells[i].text, widths[i % n], table->columns[i % n][0] == '>',
                   i % n == n - 1, table->cells[i].style);
    }
    free(widths);
}

void cli_table_destroy(struct cli_table *table)
{
    if (!table)
        return;
    for (int i = 0; i < table->cell_count; i++)
        free(table->cells[i].text);
    free(table->cells);
    free(table);
}

/* Three significant digits with a unit of the given steps. */
static char *scaled(char text[32], double value, double step, const char *const *units, int count)
{
    int unit = 0;
    while (unit + 1 < count && fabs(value) >= 999.5) {
        value /= step;
        unit++;
    }
    int decimals = unit == 0 && value == floor(value) ? 0
                   : fabs(value) < 9.995              ? 2
                   : fabs(value) < 99.95              ? 1
                                                      : 0;
    snprintf(text, 32, "%.*f %s", decimals, value, units[unit]);
    return text;
}

char *cli_format_bytes(char text[32], double bytes)
{
    static const char *const units[] = { "B", "kB", "MB", "GB", "TB" };
    return scaled(text, bytes, 1000, units, 5);
}

char *cli_format_flops(char text[32], double flops)
{
    static const char *const units[] = { "FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP" };
    return scaled(text, flops, 1000, units, 6);
}

char *cli_format_seconds(char text[32], double seconds)
{
    static const char *const units[] = { "us", "ms", "s" };
    return scaled(text, seconds * 1e6, 1000, units, 3);
}
