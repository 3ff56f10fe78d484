/*
 * store.h - the folder of the cache and its entries; what they mean, cache.c and jit.c know.
 *
 *     <cache>/kernels/<kernel>.<32 hex digits>/   source.cu  kernel.cubin  log.txt  sums
 *     <cache>/bundles/<name>.<32 hex digits>/     key.txt    bundle/...             sums
 *     <cache>/failed/<kernel>.<32 hex digits>/    source.cu  log.txt                sums
 *     <cache>/locks/<32 hex digits>               taken while an entry is being made
 *
 * An entry is a pure function of its key, which lies in it byte for byte. It is written aside,
 * synced and renamed, so that it is there whole or not at all; `sums` has the length and xxh128 of
 * every file, so that damage shows. Everything here may be called from any thread and needs no
 * session.
 */
#ifndef FP8GEN_STORE_H
#define FP8GEN_STORE_H

#include "gen/internal.h"

#define GEN_CACHE_VERSION 1
#define GEN_LOCKS "locks" /* the folder of the locks */

/* As fp8_log_level, so that one callback serves both libraries. */
enum { GEN_LOG_WARNING = 2, GEN_LOG_INFO = 3 };

typedef void (*gen_log_callback)(void *user, int level, const char *message);

struct gen_log {
    gen_log_callback callback; /* may be NULL */
    void *user;
};

void gen_log(const struct gen_log *log, int level, const char *format, ...) GEN_PRINTF(3, 4);

struct gen_store {
    int fd;     /* of the folder; -1: none can be used, everything stays in memory */
    char *path; /* absolute */
    struct gen_log log;
    int64_t commits; /* of this process when it was opened */
};

enum gen_kind { GEN_KERNELS, GEN_BUNDLES, GEN_FAILED, GEN_KIND_COUNT };
extern const char *const gen_kind_names[GEN_KIND_COUNT];

struct gen_entry {
    enum gen_kind kind;
    const char *stem; /* before the hash; a plain file name */
    char hash[33];    /* of the key */
    const char *key;
    size_t key_bytes;
};

/* The cache's folder: dir if that is given, else $FP8GEN_CACHE_DIR, $XDG_CACHE_HOME/fp8gen,
 * ~/.cache/fp8gen. A new heap string; NULL: no memory, or none of these is there (errno =
 * ENOENT). */
char *gen_store_default(const char *dir);
/* Opens the folder, made if need be. Where that cannot be, warns (once a process and folder) and
 * leaves fd = -1. gen_store_close in any case. */
void gen_store_open(struct gen_store *store, const char *dir, struct gen_log log);
/* Trims it first if this process has put something into it since. */
void gen_store_close(struct gen_store *store);
/* Warns once a process and folder that what is made stays in memory, and why. */
void gen_store_warn(const struct gen_store *store, const char *what, int error);

/* "<cache>/kernels/<stem>.<hash>[/file]" as a heap string, NULL when out of memory. */
char *gen_entry_path(const struct gen_store *store, const struct gen_entry *entry,
                     const char *file);

/* Damaged, with errno: 0 = its files are not as they were written, else why they cannot be read. */
enum gen_found { GEN_MISSING, GEN_DAMAGED, GEN_FOUND };

/* Is handed every file of an entry, checked. Data is heap memory that the callee takes over. */
typedef void (*gen_take)(void *user, const char *file, void *data, size_t size);
/* Looks an entry up: compares the key byte for byte and checks all files. A found entry counts as
 * used. take may be NULL. After GEN_DAMAGED what was taken must be dropped. */
enum gen_found gen_entry_find(const struct gen_store *store, const struct gen_entry *entry,
                              gen_take take, void *user);
/* The same for an entry that is only known by its folder (a name of `kind`): does it hold what sums
 * says? */
enum gen_found gen_entry_verify(const struct gen_store *store, enum gen_kind kind,
                                const char *name);

/* Logs that an entry was GEN_DAMAGED, with that errno, and is made again. */
void gen_entry_log_damage(const struct gen_store *store, const struct gen_entry *entry, int error);

/* An entry under construction. */
struct gen_writer {
    const struct gen_store *store;
    const struct gen_entry *entry;
    char *path; /* of the temporary folder; NULL: none */
    int fd;
    struct buf sums;
};

/* All return 0 or an errno value. Abandon may be called at any time, also after a commit. */
int gen_writer_begin(struct gen_writer *writer, const struct gen_store *store,
                     const struct gen_entry *entry);
int gen_writer_put(struct gen_writer *writer, const char *file, const void *data, size_t size);
/* A file that is already there ("bundle/manifest.json"). */
int gen_writer_adopt(struct gen_writer *writer, const char *file);
/* Puts the entry in its place. If another process was faster, its entry stays and ours is dropped;
 * a damaged one is replaced. */
int gen_writer_commit(struct gen_writer *writer);
void gen_writer_abandon(struct gen_writer *writer);

/* turns.c, inside the flight of the entry: waits until no other process makes it, or until it is
 * there, or for two minutes at most; so look for it again afterwards. The lock ends with the
 * process, or with gen_store_unlock, which does nothing if there is none. */
void gen_store_lock(const struct gen_store *store, const struct gen_entry *entry);
void gen_store_unlock(const struct gen_store *store, const struct gen_entry *entry);

/* Removes a folder and what is in it, two levels deep; follows no links. */
void gen_remove_tree(int parent, const char *name);
/* Whether name is that of an entry: "<stem>.<32 hex digits>". */
bool gen_is_entry(const char *name);

/* What of the cache could not be read or removed; all 0 if all could. */
struct gen_refusal {
    int count;
    int error;        /* of the first, as an errno ... */
    const char *what; /* ... what was to be done with it: "read", "remove" ... */
    char name[320];   /* ... and which that is: "bundles/<name>.<hash>" */
};

/* store_trim.c: removes the entries that were used longest ago until at most `limit` bytes are
 * left, those used within the last `grace` seconds excepted, and what killed processes left. */
void gen_store_trim(const struct gen_store *store, uint64_t limit, int64_t grace, uint64_t *removed,
                    struct gen_refusal *refusal);
/* $FP8GEN_CACHE_SIZE, or 1 GiB; warns of a value that is no size. */
uint64_t gen_store_limit(const struct gen_store *store);
/* Reads "512M"; false if it is no size. */
bool gen_parse_size(const char *text, uint64_t *bytes);

#endif
