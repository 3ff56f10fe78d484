/*
 * internal.h - what the rooms of libfp8gen share: memory, text, diagnostics, files, the Lua host.
 *
 * Memory: everything that a session hands out or keeps lives in its arena and goes with
 * fp8gen_close. Heap memory is asked for through gen_realloc alone, so that a test can make the
 * n-th request fail.
 * Text: struct buf grows and remembers its first failure; test it once, at the end.
 * Diagnostics: rendered when reported, in order. Report, then return the status.
 * Lua: one state per session, holding our modules (full string, table, math, utf8; no io, os,
 * debug) and, behind a whitelist, the spec. Lua's C API raises errors by longjmp: it is used only
 * inside a body that script_run protects. Bodies keep heap memory in the arena or in Lua.
 *
 * This header knows nothing of devices, NVRTC or JSON.
 */
#ifndef FP8GEN_INTERNAL_H
#define FP8GEN_INTERNAL_H

#include "gen/fp8gen.h"

#include <lua.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GEN_PRINTF(f, a) __attribute__((format(printf, f, a)))

/* ---- heap (buf.c) ---------------------------------------------------------------------------- */

/* realloc and free; size > 0. NULL when there is no memory or the hook says so. */
void *gen_realloc(void *memory, size_t size);
void gen_free(void *memory);

/* For tests, per thread: the n-th request from now on fails (1 = the next), and all after it if
 * `on` is set; 0 = none fails. gen_alloc_count: requests of this thread so far. */
void gen_alloc_fail(int64_t nth, bool on);
int64_t gen_alloc_count(void);

/* ---- arena (buf.c) --------------------------------------------------------------------------- */

struct arena_block;
struct arena {
    struct arena_block *first;
};

/* Zeroed memory, 16-byte aligned, freed with the arena; NULL when out of memory. */
void *arena_alloc(struct arena *arena, size_t size);
/* A copy of size bytes with a NUL after them. */
char *arena_copy(struct arena *arena, const void *data, size_t size);
char *arena_printf(struct arena *arena, const char *format, ...) GEN_PRINTF(2, 3);
void arena_free(struct arena *arena);

/* ---- string buffer (buf.c) ------------------------------------------------------------------- */

/* Start with {0}. data is NUL-terminated when size > 0. After a failed request `failed` stays set
 * and what was added since is lost. */
struct buf {
    char *data;
    size_t size;
    size_t capacity;
    bool failed;
};

void buf_put(struct buf *buf, const void *data, size_t size);
void buf_puts(struct buf *buf, const char *text);
void buf_printf(struct buf *buf, const char *format, ...) GEN_PRINTF(2, 3);
void buf_vprintf(struct buf *buf, const char *format, va_list args);
/* Text that came from outside: bytes that are not printable UTF-8 appear as \xNN. */
void buf_put_clean(struct buf *buf, const char *text, size_t size);
void buf_free(struct buf *buf);

/* Bytes of the UTF-8 character at text (1 to 4), 0 if it is none. */
size_t gen_utf8_length(const char *text, size_t size);

/* xxh128 of the bytes as 32 hex digits (canonical order) and a NUL. */
void gen_hash(const void *data, size_t size, char hex[33]);

/* ---- session (session.c) --------------------------------------------------------------------- */

/* What a spec may use while it is evaluated. */
struct script_limits {
    int64_t instructions;
    size_t memory_bytes; /* on top of what our own modules hold */
    int64_t wall_ms;
};

/* The whole of the Lua host's C state (script.c). */
struct script {
    lua_State *L;
    struct script_limits limits;
    size_t memory_used;
    size_t memory_limit;
    bool memory_hit;  /* the limit, not the machine, refused the last request */
    int memory_hits;  /* how often it did so while the spec ran */
    bool running;     /* the spec is being evaluated */
    const char *stop; /* the limit that ended it: "instructions", "time", "memory"; NULL = none */
    int64_t instructions; /* left to the spec */
    double deadline;      /* on fp8_clock */
    int line;             /* of the spec, where the last error was met; 0 = unknown */
};

struct gen_text {
    const char *name; /* as diagnostics show it; NULL = none yet */
    const char *data; /* NUL-terminated */
    size_t size;
};

struct gen_plan;  /* plan.c */
struct gen_nvrtc; /* nvrtc.c */

struct fp8gen {
    struct arena arena;
    bool color;
    const char *template_dir; /* NULL = built-in templates */
    struct buf diagnostics;
    int32_t errors;
    bool out_of_memory;
    struct script script;
    struct gen_text spec;
    bool loaded;              /* a load was tried */
    bool valid;               /* ... and the checked model is there */
    char spec_hash[33];       /* xxh128 of the model's canonical text */
    bool tuned;               /* a tuning file is loaded */
    char tuning_hash[33];     /* xxh128 of its canonical text */
    const char *schema;       /* text of fp8gen_schema, once made */
    const char *gemm_configs; /* text of fp8gen_gemm_configs, once made */
    struct gen_plan *plan;
    struct gen_nvrtc *nvrtc;
};

/* Refuses a session, or the place of a result, that is NULL. */
fp8gen_status gen_require(struct fp8gen *gen, bool has_places);
/* What is wrong with a struct of options, as the end of a sentence; NULL if nothing is. */
const char *gen_options_problem(uint32_t size, size_t ours, const uint64_t *reserved, int count);

/* FP8GEN_OK if a spec is loaded and right; else reports what is missing. */
fp8gen_status gen_require_model(struct fp8gen *gen);

/* ---- diagnostics (diag.c) -------------------------------------------------------------------- */

/* One error. Only message is needed. Lines and columns count from 1; columns and length count bytes
 * of the source here, characters when shown. */
struct gen_diag {
    const char *file;
    int64_t line;   /* 0 = the file as a whole */
    int64_t column; /* 0 = the line as a whole */
    int64_t length; /* bytes to underline; 0 = 1 */
    const char *message;
    const char *note;          /* may be NULL; several lines become several notes */
    const char *hint;          /* may be NULL; likewise */
    const struct gen_text *in; /* the file's text, to show the line; NULL = not shown */
};

void gen_report(struct fp8gen *gen, const struct gen_diag *diag);

/* Reports an error without a place (hint may be NULL) and returns status. */
fp8gen_status gen_fail(struct fp8gen *gen, fp8gen_status status, const char *hint,
                       const char *format, ...) GEN_PRINTF(4, 5);

/* Reports it, once; needs no memory. Returns FP8GEN_ERR_MACHINE. */
#define GEN_OUT_OF_MEMORY "error: out of memory\n"
fp8gen_status gen_out_of_memory(struct fp8gen *gen);

/* ---- files (files.c) ------------------------------------------------------------------------- */

/* Made by embed.cmake from gen/lua and templates: "plan.lua", "quantize.cu"; data[size] = 0; the
 * last entry has a NULL name. */
struct embedded_file {
    const char *name;
    const unsigned char *data;
    size_t size;
};
extern const struct embedded_file gen_embedded_files[];

/* NULL if there is no such file. */
const struct embedded_file *gen_embedded(const char *name);

/* Reads a regular file of at most limit bytes into the arena. Reports and returns
 * FP8GEN_ERR_MACHINE when it cannot (missing, directory, device, unreadable, too large: the message
 * says which). */
fp8gen_status gen_read_file(struct fp8gen *gen, const char *path, size_t limit,
                            struct gen_text *text);

/* Reads until the end of the file or until `capacity` is full: bytes, or -1 with errno set. */
int64_t gen_read_bytes(int fd, char *data, size_t capacity);
/* A new file in an open folder (AT_FDCWD: a path), on the disk when this returns 0; else an errno
 * value, and perhaps a part of the file is there. */
int gen_write_file(int folder, const char *name, unsigned mode, const void *data, size_t size);
/* The names in a folder down to the disk; 0 or an errno value. */
int gen_sync_folder(int fd);

/* The text of a template ("quantize.cu", "types.cuh"), from template_dir if that is set; text->name
 * is what diagnostics show. Reports and returns FP8GEN_ERR_MACHINE when it is not there. */
fp8gen_status gen_template(struct fp8gen *gen, const char *name, struct gen_text *text);

/* ---- Lua host (script.c) --------------------------------------------------------------------- */

/* Our modules see, besides the standard library of the header comment:
 *   require "name"          name.lua of the embedded files, run once
 *   host.version            "0.1.0"
 *   host.xxh128(text)       32 hex digits
 *   host.template(name)     text and name to show, or an error; goes through gen_template
 *   host.less(a, b)         a < b for strings, by bytes in any locale
 *   host.located(f)         a function that calls f(line, ...): the line of the spec that calls it
 *                           (nil if none does), true for tail calls as well
 * An error of a module is either a string (a bug of ours: FP8GEN_ERR_INTERNAL, with a traceback)
 * or a table: { message=, hint=?, note=?, file=?, line=?, column=?, length=?, source=? (the
 * file's text) }, or a list of such: reported in order, FP8GEN_ERR_SPEC. */

/* Runs body in protected mode, with user as a light userdata at index 1; what it leaves on the
 * stack is dropped. Reports errors as said above. Out of memory: FP8GEN_ERR_MACHINE. */
fp8gen_status script_run(struct fp8gen *gen, lua_CFunction body, void *user);

/* Inside a body: */
struct fp8gen *script_session(lua_State *L);
/* Pushes what the module returned (loads it first if need be). */
void script_push_module(lua_State *L, const char *name);
/* Pushes the field of a module's table: script_push_function(L, "plan", "plan"). */
void script_push_function(lua_State *L, const char *module, const char *field);
/* Pushes the checked model table; only after a spec was loaded (gen_require_model). */
void script_push_model(lua_State *L);
/* Raises the status of a C call that already reported its error; script_run returns that status. */
_Noreturn void script_throw(lua_State *L, fp8gen_status status);

/* session.c's use: */
fp8gen_status script_open(struct fp8gen *gen);
void script_close(struct fp8gen *gen);
/* Evaluates and checks gen->spec; on success the model is kept and gen->spec_hash set. */
fp8gen_status script_load_spec(struct fp8gen *gen);

/* ---- owners of parts of a session; NULL-safe ------------------------------------------------- */

void gen_plan_free(struct fp8gen *gen);  /* plan.c: gen->plan */
void gen_nvrtc_free(struct fp8gen *gen); /* nvrtc.c: gen->nvrtc */

#endif
