/*
 * nvrtc_log.c - what NVRTC and ptxas said of a kernel, as diagnostics at the templates' lines.
 *
 * In: a finished job. Out: its verdict. The expanded text carries #line, so the compiler already
 * speaks of template lines; here its sentences are taken apart, files get the names that people
 * know, and a column is kept only where the compiler read exactly the template's line (a
 * substitution shifts it).
 *
 * A kernel that compiles can still be refused: a spill costs a factor of ten in a GEMM, and C7508
 * and C7510 mean that ptxas ignored setmaxnreg or serialised wgmma.
 */
#include "gen/compile.h"

#include <nvrtc.h>
#include <stdlib.h>
#include <string.h>

enum { ERRORS_SHOWN = 20 };

struct reader {
    struct fp8gen *gen;
    const struct gen_job *job;
    const char *note; /* which kernel, for the first diagnostic */
    struct buf *seen; /* what was reported of any job: variants of one template fail alike */
    int32_t errors;
};

struct line {
    const char *text;
    size_t size;
};

static bool next_line(const char **rest, struct line *line)
{
    if (**rest == '\0')
        return false;
    line->text = *rest;
    line->size = strcspn(*rest, "\n");
    *rest += line->size;
    if (**rest == '\n')
        (*rest)++;
    return true;
}

/* Where `word` begins in the line; NULL if it is not there. */
static const char *find(const struct line *line, const char *word)
{
    return memmem(line->text, line->size, word, strlen(word));
}

static const char *copy(struct reader *reader, const char *text, size_t size)
{
    const char *result = arena_copy(&reader->gen->arena, text, size);
    return result != NULL ? result : "";
}

/* Whether this error was reported before; notes it. */
static bool is_repeated(struct reader *reader, const struct gen_diag *diag)
{
    const char *key = arena_printf(&reader->gen->arena, "\n%s:%lld:%s\n", diag->file,
                                   (long long)diag->line, diag->message);
    if (key == NULL)
        return false;
    if (reader->seen->size > 0 && strstr(reader->seen->data, key) != NULL)
        return true;
    buf_puts(reader->seen, key);
    return false;
}

static void report(struct reader *reader, struct gen_diag *diag)
{
    if (reader->errors++ >= ERRORS_SHOWN || is_repeated(reader, diag))
        return;
    diag->note = reader->note;
    reader->note = NULL; /* once is enough */
    gen_report(reader->gen, diag);
}

/* ---- errors of the compiler: "amax.cu(12): error: identifier ..." ---------------------------- */

struct place {
    const char *file;
    size_t file_size;
    int64_t line;
    const char *message; /* after "error: " */
    size_t message_size;
};

/* Takes "file(line): [catastrophic ]error[ #123-D]: message" apart. */
static bool parse_error(const struct line *line, struct place *place)
{
    const char *word = find(line, "error");
    const char *open = memchr(line->text, '(', line->size);
    if (word == NULL || open == NULL || open > word)
        return false;
    char *end;
    place->line = strtoll(open + 1, &end, 10);
    if (end == open + 1 || strncmp(end, "): ", 3) != 0 || end > word)
        return false;
    const char *colon = memchr(word, ':', line->size - (size_t)(word - line->text));
    if (colon == NULL)
        return false;
    place->file = line->text;
    place->file_size = (size_t)(open - line->text);
    place->message = colon + 1 + strspn(colon + 1, " ");
    place->message_size = line->size - (size_t)(place->message - line->text);
    return true;
}

static const struct gen_text *known_file(const struct reader *reader, const struct place *place)
{
    const struct gen_sources *sources = reader->job->sources;
    for (int32_t i = 0; i < sources->count; i++) {
        const char *name = sources->files[i].name;
        if (strlen(name) == place->file_size && memcmp(name, place->file, place->file_size) == 0)
            return &sources->files[i].text;
    }
    return NULL;
}

/* Whether line `number` of the text is exactly these bytes. */
static bool line_is(const struct gen_text *text, int64_t number, const char *bytes, size_t size)
{
    const char *at = text->data;
    for (int64_t i = 1; i < number && at != NULL; i++) {
        at = strchr(at, '\n');
        if (at != NULL)
            at++;
    }
    return at != NULL && strcspn(at, "\n") == size && memcmp(at, bytes, size) == 0;
}

/* The compiler shows the line it read, two spaces in, and a caret below. 0 if that is not the line
 * of the template. */
static int64_t column_of(const char *rest, const struct gen_text *text, int64_t number)
{
    struct line shown, caret;
    if (!next_line(&rest, &shown) || !next_line(&rest, &caret) || shown.size < 2 || caret.size < 3)
        return 0;
    size_t at = strspn(caret.text, " ");
    if (caret.text[at] != '^' || at < 2)
        return 0;
    return line_is(text, number, shown.text + 2, shown.size - 2) ? (int64_t)at - 1 : 0;
}

static void report_place(struct reader *reader, const struct place *place, const char *rest)
{
    const struct gen_text *file = known_file(reader, place);
    struct gen_diag diag = {
        .file = file != NULL ? file->name : copy(reader, place->file, place->file_size),
        .line = place->line,
        .message = copy(reader, place->message, place->message_size),
        .in = file,
    };
    if (file != NULL)
        diag.column = column_of(rest, file, place->line);
    report(reader, &diag);
}

/* ---- errors of ptxas and of NVRTC itself ----------------------------------------------------- */

static void report_plain(struct reader *reader, const struct line *line)
{
    struct gen_diag diag = {
        .file = reader->job->sources->files[0].text.name,
        .message = copy(reader, line->text, line->size),
    };
    report(reader, &diag);
}

static bool is_plain_error(const struct line *line)
{
    return find(line, "ptxas fatal") != NULL || find(line, "nvrtc: error") != NULL ||
           (find(line, "ptxas") == line->text && find(line, "error ") != NULL);
}

static void read_errors(struct reader *reader)
{
    const char *rest = reader->job->log != NULL ? reader->job->log : "";
    struct line line;
    while (next_line(&rest, &line)) {
        struct place place;
        if (parse_error(&line, &place))
            report_place(reader, &place, rest);
        else if (is_plain_error(&line))
            report_plain(reader, &line);
    }
}

/* ---- kernels that compiled but are refused --------------------------------------------------- */

/* The number before `word` in the line, 0 if it is not there. */
static long number_before(const struct line *line, const char *word)
{
    const char *at = find(line, word);
    if (at == NULL)
        return 0;
    while (at > line->text && strchr("0123456789", at[-1]) != NULL)
        at--;
    return strtol(at, NULL, 10);
}

static void refuse(struct reader *reader, const char *hint, const char *message)
{
    struct gen_diag diag = {
        .file = reader->job->sources->files[0].text.name,
        .message = message != NULL ? message : "the kernel is refused",
        .hint = hint,
    };
    report(reader, &diag);
}

static void read_refusals(struct reader *reader)
{
    const char *rest = reader->job->log != NULL ? reader->job->log : "";
    struct line line, function = { "", 0 };
    struct arena *arena = &reader->gen->arena;
    static const char properties[] = "Function properties for ";
    while (next_line(&rest, &line)) {
        const char *at = find(&line, properties);
        if (at != NULL) {
            function.text = at + sizeof(properties) - 1;
            function.size = line.size - (size_t)(function.text - line.text);
        }
        long stores = number_before(&line, " bytes spill stores");
        long loads = number_before(&line, " bytes spill loads");
        if (stores != 0 || loads != 0)
            refuse(reader, "fewer values alive at once, or fewer CTAs in __launch_bounds__",
                   arena_printf(arena, "%.*s spills registers: %ld bytes stored, %ld bytes loaded",
                                (int)function.size, function.text, stores, loads));
        if (find(&line, "C7508") != NULL || find(&line, "C7510") != NULL)
            refuse(reader, NULL, arena_printf(arena, "%.*s", (int)line.size, line.text));
    }
}

/* ---- the verdict ----------------------------------------------------------------------------- */

/* Failures that no text can cause. */
static fp8gen_status machine_failure(struct reader *reader)
{
    const struct gen_job *job = reader->job;
    if (job->out_of_memory || job->result == NVRTC_ERROR_OUT_OF_MEMORY)
        return gen_out_of_memory(reader->gen);
    if (job->result == NVRTC_ERROR_BUILTIN_OPERATION_FAILURE)
        return gen_fail(reader->gen, FP8GEN_ERR_MACHINE,
                        "libnvrtc-builtins must lie beside libnvrtc",
                        "NVRTC cannot open its builtins: %s", job->log != NULL ? job->log : "");
    return FP8GEN_OK;
}

fp8gen_status gen_check_job(struct fp8gen *gen, const struct gen_job *job, struct buf *seen)
{
    struct reader reader = { .gen = gen, .job = job, .seen = seen };
    fp8gen_status status = machine_failure(&reader);
    if (status != FP8GEN_OK)
        return status;
    reader.note = arena_printf(&gen->arena, "kernel %s for %s, by NVRTC %s%s%s", job->kernel->unit,
                               job->arch, gen_nvrtc_version(gen->nvrtc),
                               job->kept_at != NULL ? "\nsource and log are in " : "",
                               job->kept_at != NULL ? job->kept_at : "");
    if (job->result == NVRTC_SUCCESS)
        read_refusals(&reader);
    else
        read_errors(&reader);
    if (job->result != NVRTC_SUCCESS && reader.errors == 0)
        refuse(&reader, NULL,
               arena_printf(&gen->arena, "the kernel does not compile: %s",
                            gen_nvrtc_error(gen->nvrtc, job->result)));
    if (reader.errors == 0)
        return FP8GEN_OK;
    /* The built-in templates are ours; others are the user's. */
    return gen->template_dir != NULL ? FP8GEN_ERR_SPEC : FP8GEN_ERR_INTERNAL;
}
