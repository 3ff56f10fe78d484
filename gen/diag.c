/*
 * diag.c - diagnostics as compilers print them.
 *
 *     specs/mlp.lua:6:16: error: unknown value 'colum' for 'tensor'
 *           tensor = "colum",
 *                    ^~~~~~~
 *       note: ...
 *       hint: did you mean 'column'?
 *
 * Each is rendered into the session's text when it is reported, so that nothing of the reporter
 * has to outlive the call. Messages, names and source lines may hold what an untrusted spec put
 * there: bytes that are not printable UTF-8 are shown as \xNN, so that no terminal obeys them.
 * Columns come in as bytes and are shown as characters, which is what editors count; long lines
 * are cut around the caret.
 */
#include "gen/internal.h"

#include <string.h>

enum {
    LINE_CHARS_MAX = 160,  /* characters of a source line that are shown */
    LINE_CHARS_BEFORE = 60 /* of them before the caret when the line is cut */
};

static const char *color(const struct fp8gen *gen, const char *code)
{
    return gen->color ? code : "";
}

#define BOLD "\033[1m"
#define RED "\033[1;31m"
#define GREEN "\033[1;32m"
#define CYAN "\033[1;36m"
#define RESET "\033[0m"

/* The bytes of line `number` of the text, without its end; false if there is no such line. */
static bool find_line(const struct gen_text *text, int64_t number, const char **line, size_t *size)
{
    const char *at = text->data;
    const char *end = text->data + text->size;
    for (int64_t n = 1; at != NULL && n < number; n++) {
        at = memchr(at, '\n', (size_t)(end - at));
        at = at == NULL ? NULL : at + 1;
    }
    if (at == NULL)
        return false;
    const char *stop = memchr(at, '\n', (size_t)(end - at));
    stop = stop == NULL ? end : stop;
    if (stop > at && stop[-1] == '\r')
        stop--;
    *line = at;
    *size = (size_t)(stop - at);
    return true;
}

/* Characters in the first `bytes` bytes; a byte that is no UTF-8 counts as one. */
static size_t count_chars(const char *line, size_t size, size_t bytes)
{
    size_t chars = 0;
    for (size_t i = 0; i < size && i < bytes; chars++) {
        size_t length = gen_utf8_length(line + i, size - i);
        i += length == 0 ? 1 : length;
    }
    return chars;
}

/* One character of a source line: tabs and what cannot be shown become one cell, so that the caret
 * stands right. */
static size_t put_source_char(struct buf *out, const char *at, size_t size)
{
    size_t length = gen_utf8_length(at, size);
    unsigned char byte = (unsigned char)*at;
    if (length == 1 && byte == '\t')
        buf_puts(out, " ");
    else if (length == 0 || byte < 0x20 || byte == 0x7f ||
             (length == 2 && byte == 0xc2 && (unsigned char)at[1] < 0xa0))
        buf_puts(out, "?");
    else
        buf_put(out, at, length);
    return length == 0 ? 1 : length;
}

/* The source line and the caret line. first and count: characters to underline. */
static void put_source(struct fp8gen *gen, const char *line, size_t size, size_t first,
                       size_t count)
{
    struct buf *out = &gen->diagnostics;
    size_t total = count_chars(line, size, size);
    size_t skip = 0;
    if (total > LINE_CHARS_MAX && first > LINE_CHARS_BEFORE)
        skip = first - LINE_CHARS_BEFORE;
    size_t shown = total - skip > LINE_CHARS_MAX ? LINE_CHARS_MAX : total - skip;

    buf_puts(out, skip > 0 ? "    ..." : "    ");
    size_t at = 0;
    for (size_t i = 0; i < skip + shown; i++) {
        struct buf dropped = { .failed = true };
        at += put_source_char(i < skip ? &dropped : out, line + at, size - at);
    }
    buf_puts(out, skip + shown < total ? "...\n" : "\n");

    buf_printf(out, "%*s%s^", (int)((skip > 0 ? 7 : 4) + first - skip), "", color(gen, GREEN));
    for (size_t i = 1; i < count && first - skip + i < shown; i++)
        buf_puts(out, "~");
    buf_printf(out, "%s\n", color(gen, RESET));
}

/* "  hint: ..." once for each line of the text. */
static void put_lines(struct fp8gen *gen, const char *word, const char *text)
{
    while (text != NULL && *text != '\0') {
        size_t length = strcspn(text, "\n");
        buf_printf(&gen->diagnostics, "  %s%s:%s ", color(gen, CYAN), word, color(gen, RESET));
        buf_put_clean(&gen->diagnostics, text, length);
        buf_puts(&gen->diagnostics, "\n");
        text += length + (text[length] == '\n');
    }
}

void gen_report(struct fp8gen *gen, const struct gen_diag *diag)
{
    struct buf *out = &gen->diagnostics;
    size_t start = out->size;
    const char *line = NULL;
    size_t size = 0;
    bool has_line =
        diag->in != NULL && diag->line > 0 && find_line(diag->in, diag->line, &line, &size);
    size_t first = 0;
    size_t count = 1;
    if (has_line && diag->column > 0) {
        first = count_chars(line, size, (size_t)diag->column - 1);
        size_t end = (size_t)diag->column - 1 + (size_t)(diag->length > 0 ? diag->length : 1);
        count = count_chars(line, size, end) - first;
    }

    buf_puts(out, color(gen, BOLD));
    if (diag->file != NULL) {
        buf_put_clean(out, diag->file, strlen(diag->file));
        buf_puts(out, ":");
        if (diag->line > 0)
            buf_printf(out, "%lld:", (long long)diag->line);
        if (diag->line > 0 && diag->column > 0)
            buf_printf(out, "%lld:", (long long)(has_line ? (int64_t)first + 1 : diag->column));
        buf_puts(out, " ");
    }
    buf_printf(out, "%serror:%s%s ", color(gen, RED), color(gen, RESET), color(gen, BOLD));
    buf_put_clean(out, diag->message, strlen(diag->message));
    buf_printf(out, "%s\n", color(gen, RESET));
    if (has_line && diag->column > 0)
        put_source(gen, line, size, first, count);
    put_lines(gen, "note", diag->note);
    put_lines(gen, "hint", diag->hint);

    gen->errors++;
    if (out->failed) {
        /* Half a diagnostic helps nobody. */
        out->failed = false;
        out->size = start;
        if (out->data != NULL)
            out->data[start] = '\0';
        gen_out_of_memory(gen);
    }
}

fp8gen_status gen_fail(struct fp8gen *gen, fp8gen_status status, const char *hint,
                       const char *format, ...)
{
    struct buf message = { 0 };
    va_list args;
    va_start(args, format);
    buf_vprintf(&message, format, args);
    va_end(args);
    if (message.failed || message.size == 0)
        status = message.failed ? gen_out_of_memory(gen) : status;
    else
        gen_report(gen, &(struct gen_diag){ .message = message.data, .hint = hint });
    buf_free(&message);
    return status;
}

fp8gen_status gen_out_of_memory(struct fp8gen *gen)
{
    if (!gen->out_of_memory)
        buf_puts(&gen->diagnostics, GEN_OUT_OF_MEMORY);
    gen->diagnostics.failed = false; /* fp8gen_diagnostics says it if there was no room to */
    gen->out_of_memory = true;
    return FP8GEN_ERR_MACHINE;
}
