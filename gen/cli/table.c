/*
 * table.c - aligned text tables and numbers with units for people.
 *
 * Cells are collected row by row and printed when all widths are known. A column whose name starts
 * with '>' is right-aligned. Widths count bytes: all text here is ASCII. Memory failures end in a
 * table that says so rather than in a broken one.
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

/* Spaces wait until a text follows, so that no line ends in them. */
static void print_text(const char *text, enum cli_style style, int *spaces)
{
    if (!text[0])
        return;
    printf("%*s%s%s%s", *spaces, "", cli_style_on(style), text,
           style == CLI_PLAIN ? "" : cli_style_off());
    *spaces = 0;
}

static void print_row(const struct cli_table *table, const struct cell *cells, const int *widths,
                      int indent)
{
    int spaces = indent;
    for (int i = 0; i < table->column_count; i++) {
        int pad = widths[i] - (int)strlen(cells[i].text);
        bool right = table->columns[i][0] == '>';
        spaces += right ? pad : 0;
        print_text(cells[i].text, cells[i].style, &spaces);
        spaces += (right ? 0 : pad) + 2;
    }
    putchar('\n');
}

void cli_table_print(struct cli_table *table, int indent)
{
    if (!table || table->failed) {
        cli_error("out of memory: a table is missing here");
        return;
    }
    int n = table->column_count;
    int *widths = calloc((size_t)n, sizeof *widths);
    struct cell *header = calloc((size_t)n, sizeof *header);
    if (!widths || !header) {
        free(widths);
        free(header);
        return;
    }
    for (int i = 0; i < n; i++)
        widths[i] = (int)strlen(table->columns[i] + (table->columns[i][0] == '>'));
    for (int i = 0; i < table->cell_count; i++) {
        int length = (int)strlen(table->cells[i].text);
        if (length > widths[i % n])
            widths[i % n] = length;
    }
    for (int i = 0; i < n; i++)
        header[i] =
            (struct cell){ (char *)table->columns[i] + (table->columns[i][0] == '>'), CLI_BOLD };
    print_row(table, header, widths, indent);
    for (int i = 0; i + n <= table->cell_count; i += n)
        print_row(table, table->cells + i, widths, indent);
    free(header);
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
    static const char *const units[] = { "B", "kB", "MB", "GB", "TB", "PB", "EB", "ZB" };
    return scaled(text, bytes, 1000, units, 8);
}

char *cli_format_flops(char text[32], double flops)
{
    static const char *const units[] = { "FLOP",  "kFLOP", "MFLOP", "GFLOP", "TFLOP",
                                         "PFLOP", "EFLOP", "ZFLOP", "YFLOP" };
    return scaled(text, flops, 1000, units, 9);
}

char *cli_format_seconds(char text[32], double seconds)
{
    static const char *const units[] = { "us", "ms", "s" };
    return scaled(text, seconds * 1e6, 1000, units, 3);
}
