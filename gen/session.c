/*
 * session.c - a session of the generator: opening, overrides, loading a spec, diagnostics, schema.
 *
 * In: the calls of fp8gen.h up to the loaded spec. Out: a session whose Lua host holds a checked
 * model, or diagnostics. What follows (plan, expand, build) lies in plan.c and build.c and starts
 * with gen_require_model. The text of a spec is made plain here (UTF-8, no BOM, LF line ends)
 * before anyone counts lines in it. A load that fails leaves the session without a model for
 * good: one session, one spec.
 */
#include "gen/cache.h"

#include <lauxlib.h>
#include <string.h>

enum { SPEC_BYTES_MAX = 1 << 20 };

/* ---- arguments ------------------------------------------------------------------------------- */

fp8gen_status gen_require(struct fp8gen *gen, bool has_places)
{
    if (gen == NULL)
        return FP8GEN_ERR_ARGUMENT;
    if (has_places)
        return FP8GEN_OK;
    return gen_fail(gen, FP8GEN_ERR_ARGUMENT, NULL, "the place for a result is NULL");
}

const char *gen_options_problem(uint32_t size, size_t ours, const uint64_t *reserved, int count)
{
    if (size != ours)
        return "are of another version";
    for (int i = 0; i < count; i++)
        if (reserved[i] != 0)
            return "have a reserved word that is not 0";
    return NULL;
}

/* ---- open and close -------------------------------------------------------------------------- */

const char *fp8gen_version(void)
{
    return FP8GEN_VERSION_STRING; /* the build takes it from runtime/fp8.h */
}

fp8gen_status fp8gen_open(const fp8gen_options *options, fp8gen **result)
{
    if (result == NULL)
        return gen_jit_fail(FP8GEN_ERR_ARGUMENT, "error: the place for the session is NULL\n");
    *result = NULL;
    const char *problem = NULL;
    if (options != NULL)
        problem = gen_options_problem(options->size, sizeof(*options), options->reserved, 4);
    if (problem == NULL && options != NULL && options->color > 1)
        problem = "have a color that is neither 0 nor 1";
    if (problem != NULL)
        return gen_jit_fail(FP8GEN_ERR_ARGUMENT,
                            "error: the session's options %s\n"
                            "  hint: start from FP8GEN_OPTIONS_INIT\n",
                            problem);
    struct fp8gen *gen = gen_realloc(NULL, sizeof(*gen));
    if (gen == NULL)
        return FP8GEN_ERR_MACHINE;
    *gen = (struct fp8gen){ .color = options != NULL && options->color != 0 };
    fp8gen_status status = FP8GEN_OK;
    if (options != NULL && options->template_dir != NULL) {
        const char *dir = options->template_dir;
        gen->template_dir = arena_copy(&gen->arena, dir, strlen(dir));
        if (gen->template_dir == NULL)
            status = FP8GEN_ERR_MACHINE;
    }
    if (status == FP8GEN_OK)
        status = script_open(gen);
    if (status != FP8GEN_OK) {
        fp8gen_close(gen);
        return status;
    }
    *result = gen;
    return FP8GEN_OK;
}

void fp8gen_close(fp8gen *gen)
{
    if (gen == NULL)
        return;
    gen_plan_free(gen);
    gen_nvrtc_free(gen);
    script_close(gen);
    buf_free(&gen->diagnostics);
    arena_free(&gen->arena);
    gen_free(gen);
}

const char *fp8gen_diagnostics(const fp8gen *gen)
{
    if (gen == NULL)
        return "";
    if (gen->diagnostics.size > 0)
        return gen->diagnostics.data;
    return gen->out_of_memory ? GEN_OUT_OF_MEMORY : "";
}

/* ---- overrides and schema -------------------------------------------------------------------- */

struct override {
    const char *field;
    const char *value;
};

static int override_body(lua_State *L)
{
    const struct override *override = lua_touserdata(L, 1);
    script_push_function(L, "spec", "override");
    lua_pushstring(L, override->field);
    lua_pushstring(L, override->value);
    lua_call(L, 2, 0);
    return 0;
}

fp8gen_status fp8gen_override(fp8gen *gen, const char *field, const char *value)
{
    if (gen == NULL)
        return FP8GEN_ERR_ARGUMENT;
    if (field == NULL || value == NULL)
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, NULL, "an override needs a field and a value");
    if (gen->loaded)
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, "override before the spec is loaded",
                        "the spec is loaded already: '%s' comes too late", field);
    struct override override = { field, value };
    fp8gen_status status = script_run(gen, override_body, &override);
    return status == FP8GEN_ERR_SPEC ? FP8GEN_ERR_ARGUMENT : status;
}

static int schema_body(lua_State *L)
{
    struct fp8gen *gen = script_session(L);
    script_push_function(L, "schema", "text");
    lua_call(L, 0, 1);
    size_t size;
    const char *text = luaL_checklstring(L, -1, &size);
    gen->schema = arena_copy(&gen->arena, text, size);
    if (gen->schema == NULL)
        script_throw(L, gen_out_of_memory(gen));
    return 0;
}

fp8gen_status fp8gen_schema(fp8gen *gen, const char **text)
{
    fp8gen_status status = gen_require(gen, text != NULL);
    if (status != FP8GEN_OK)
        return status;
    *text = NULL;
    status = gen->schema == NULL ? script_run(gen, schema_body, NULL) : FP8GEN_OK;
    *text = gen->schema;
    return status;
}

/* ---- the text of a spec ---------------------------------------------------------------------- */

/* Line and column (bytes, from 1) of a byte of the text. */
static void place_of(const struct gen_text *text, size_t offset, struct gen_diag *diag)
{
    diag->line = 1;
    size_t start = 0;
    for (size_t i = 0; i < offset; i++) {
        if (text->data[i] == '\n') {
            diag->line++;
            start = i + 1;
        }
    }
    diag->column = (int64_t)(offset - start) + 1;
}

static fp8gen_status fail_text(struct fp8gen *gen, const struct gen_text *text, size_t offset,
                               const char *message, const char *hint)
{
    struct gen_diag diag = { .file = text->name, .message = message, .hint = hint, .in = text };
    place_of(text, offset, &diag);
    gen_report(gen, &diag);
    return FP8GEN_ERR_SPEC;
}

static fp8gen_status fail_whole(struct fp8gen *gen, const struct gen_text *text,
                                const char *message, const char *hint)
{
    gen_report(gen, &(struct gen_diag){ .file = text->name, .message = message, .hint = hint });
    return FP8GEN_ERR_SPEC;
}

/* Refuses what is no text. */
static fp8gen_status check_text(struct fp8gen *gen, const struct gen_text *text)
{
    const char *data = text->data;
    if (text->size >= 2 && (memcmp(data, "\xff\xfe", 2) == 0 || memcmp(data, "\xfe\xff", 2) == 0))
        return fail_whole(gen, text, "the file is UTF-16", "save it as UTF-8");
    if (text->size >= 4 && memcmp(data, LUA_SIGNATURE, 4) == 0)
        return fail_whole(gen, text, "the file is a compiled Lua chunk",
                          "give the text of the spec; compiled chunks are not loaded");
    bool blank = true;
    for (size_t i = 0; i < text->size;) {
        size_t length = gen_utf8_length(data + i, text->size - i);
        if (data[i] == '\0')
            return fail_text(gen, text, i, "a NUL byte",
                             "a spec is plain text; is this a binary file?");
        if (length == 0)
            return fail_text(
                gen, text, i,
                arena_printf(&gen->arena, "the byte 0x%02x is not UTF-8", (unsigned char)data[i]),
                "save the file as UTF-8");
        blank = blank && strchr(" \t\n\r\v\f", data[i]) != NULL;
        i += length;
    }
    if (blank)
        return fail_whole(gen, text, "the file is empty",
                          "a spec is: return model \"name\" { layers = { ... } }");
    return FP8GEN_OK;
}

/* Drops a BOM and turns CR LF, LF CR and CR into LF, as Lua counts lines. */
static void make_plain(struct gen_text *text, char *data)
{
    size_t from = text->size >= 3 && memcmp(data, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    size_t to = 0;
    while (from < text->size) {
        char byte = data[from++];
        if (byte == '\r' || byte == '\n') {
            bool pair = from < text->size && (data[from] == '\r' || data[from] == '\n') &&
                        data[from] != byte;
            from += pair;
            byte = '\n';
        }
        data[to++] = byte;
    }
    data[to] = '\0';
    text->data = data;
    text->size = to;
}

/* Takes over text, whose bytes are the session's own. */
static fp8gen_status load(struct fp8gen *gen, struct gen_text text, char *data)
{
    make_plain(&text, data);
    gen->spec = text;
    fp8gen_status status = check_text(gen, &gen->spec);
    if (status == FP8GEN_OK)
        status = script_load_spec(gen);
    if (gen->out_of_memory)
        status = FP8GEN_ERR_MACHINE;
    gen->valid = status == FP8GEN_OK;
    return status;
}

/* ---- loading --------------------------------------------------------------------------------- */

static fp8gen_status start_load(struct fp8gen *gen)
{
    if (gen->loaded)
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, "open another session for another spec",
                        "this session has loaded a spec already");
    gen->loaded = true;
    return FP8GEN_OK;
}

fp8gen_status fp8gen_load_file(fp8gen *gen, const char *path)
{
    if (gen == NULL)
        return FP8GEN_ERR_ARGUMENT;
    if (path == NULL)
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, NULL, "the path of the spec is NULL");
    struct gen_text text = { 0 };
    fp8gen_status status = start_load(gen);
    if (status == FP8GEN_OK)
        status = gen_read_file(gen, path, SPEC_BYTES_MAX, &text);
    if (status == FP8GEN_OK)
        status = load(gen, text, (char *)text.data);
    return status;
}

fp8gen_status fp8gen_load_text(fp8gen *gen, const char *name, const char *data, size_t length)
{
    if (gen == NULL)
        return FP8GEN_ERR_ARGUMENT;
    if (name == NULL || (data == NULL && length > 0))
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, NULL, "the %s of the spec is NULL",
                        name == NULL ? "name" : "text");
    fp8gen_status status = start_load(gen);
    if (status != FP8GEN_OK)
        return status;
    if (length > SPEC_BYTES_MAX)
        return gen_fail(gen, FP8GEN_ERR_SPEC, NULL,
                        "the spec is too large: %zu bytes; at most %d are read", length,
                        SPEC_BYTES_MAX);
    struct gen_text text = { .size = length };
    text.name = arena_copy(&gen->arena, name, strlen(name));
    char *copy = arena_copy(&gen->arena, data, length);
    if (text.name == NULL || copy == NULL)
        return gen_out_of_memory(gen);
    return load(gen, text, copy);
}

fp8gen_status gen_require_model(struct fp8gen *gen)
{
    if (gen->valid)
        return FP8GEN_OK;
    return gen_fail(gen, FP8GEN_ERR_ARGUMENT, NULL,
                    gen->loaded ? "the spec has errors: there is nothing to plan"
                                : "no spec is loaded");
}
