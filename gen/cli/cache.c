/*
 * cache.c - `fp8gen cache path|list|trim|verify`: the folder of compiled kernels and JIT bundles.
 *
 * The library finds, checks and removes; this file prints. The folder is the one that build and the
 * JIT use: FP8GEN_CACHE_DIR, else $XDG_CACHE_HOME/fp8gen, else ~/.cache/fp8gen. A cache that is not
 * there yet is an empty one.
 */
#include <stdio.h>
#include <time.h>

#include "gen/cli/cli.h"

struct values {
    const char *max_size;
};

static int failed(fp8gen_status status)
{
    fflush(stdout);
    cli_diagnostics(fp8gen_jit_error());
    return (int)status;
}

/* ---- path ------------------------------------------------------------------------------------ */

static int run_path(const void *v, int count, char **operands)
{
    (void)v, (void)count, (void)operands;
    char path[4096];
    fp8gen_status status = fp8gen_cache_path(NULL, path, sizeof path);
    if (status)
        return failed(status);
    printf("%s\n", path);
    return CLI_DONE;
}

/* ---- list and verify ------------------------------------------------------------------------- */

struct listing {
    struct cli_table *table;
    int count, damaged;
    double bytes;
    time_t now;
};

static const char *format_age(char text[32], int64_t seconds)
{
    if (seconds < 120)
        snprintf(text, 32, "now");
    else if (seconds < 2 * 3600)
        snprintf(text, 32, "%d min ago", (int)(seconds / 60));
    else if (seconds < 48 * 3600)
        snprintf(text, 32, "%d h ago", (int)(seconds / 3600));
    else
        snprintf(text, 32, "%d days ago", (int)(seconds / 86400));
    return text;
}

static void list_entry(void *user, const fp8gen_cache_entry *entry)
{
    struct listing *listing = user;
    char bytes[32], age[32];
    listing->count++;
    listing->bytes += (double)entry->bytes;
    cli_table_cell(listing->table, CLI_PLAIN, "%s", entry->kind);
    cli_table_cell(listing->table, CLI_PLAIN, "%s", entry->name);
    cli_table_cell(listing->table, CLI_PLAIN, "%s", cli_format_bytes(bytes, (double)entry->bytes));
    cli_table_cell(listing->table, CLI_DIM, "%s", format_age(age, listing->now - entry->used));
}

static int run_list(const void *v, int count, char **operands)
{
    (void)v, (void)count, (void)operands;
    static const char *const columns[] = { "kind", "entry", ">size", "used" };
    struct listing listing = { .table = cli_table_create(columns, 4), .now = time(NULL) };
    char bytes[32];
    if (!listing.table) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    fp8gen_status status = fp8gen_cache_list(NULL, 0, list_entry, &listing);
    if (status == FP8GEN_OK && listing.count > 0)
        cli_table_print(listing.table, 0);
    if (status == FP8GEN_OK)
        printf("%d entries, %s\n", listing.count, cli_format_bytes(bytes, listing.bytes));
    cli_table_destroy(listing.table);
    return status ? failed(status) : CLI_DONE;
}

static void verify_entry(void *user, const fp8gen_cache_entry *entry)
{
    struct listing *listing = user;
    listing->count++;
    if (!entry->damaged)
        return;
    listing->damaged++;
    printf("damaged: %s/%s\n", entry->kind, entry->name);
}

static int run_verify(const void *v, int count, char **operands)
{
    (void)v, (void)count, (void)operands;
    struct listing listing = { 0 };
    fp8gen_status status = fp8gen_cache_list(NULL, 1, verify_entry, &listing);
    if (status)
        return failed(status);
    printf("%d entries, %d damaged\n", listing.count, listing.damaged);
    if (!listing.damaged)
        return CLI_DONE;
    fflush(stdout);
    cli_hint("damaged entries are never used; they are rebuilt when next needed");
    return CLI_MACHINE;
}

/* ---- trim ------------------------------------------------------------------------------------ */

static int run_trim(const void *v, int count, char **operands)
{
    const struct values *values = v;
    (void)count, (void)operands;
    uint64_t removed;
    fp8gen_status status = fp8gen_cache_trim(NULL, values->max_size, &removed);
    char bytes[32];
    if (status == FP8GEN_OK || removed > 0)
        printf("removed %s\n", cli_format_bytes(bytes, (double)removed));
    fflush(stdout);
    return status ? failed(status) : CLI_DONE;
}

static const struct cli_option trim_options[] = {
    { .name = "max-size",
      .kind = CLI_TEXT,
      .metavar = "SIZE",
      .doc = "leave at most SIZE, as 512M; 0: nothing (default: FP8GEN_CACHE_SIZE or 1G)",
      .offset = offsetof(struct values, max_size) },
    { .name = NULL },
};

const struct cli_command cli_cache_path_command = {
    .name = "cache path",
    .summary = "print the folder of the cache",
    .operands = "",
    .run = run_path,
};

const struct cli_command cli_cache_list_command = {
    .name = "cache list",
    .summary = "list what the cache holds",
    .details =
        "The kinds: 'kernels', compiled; 'bundles', of layers described at run time; 'failed', the "
        "sources and logs of kernels that did not compile, kept to be looked at.",
    .operands = "",
    .run = run_list,
};

const struct cli_command cli_cache_trim_command = {
    .name = "cache trim",
    .summary = "remove what was used longest ago",
    .details = "Builds keep the cache within its size by themselves; this does it now, and removes "
               "what killed processes left.",
    .operands = "",
    .options = trim_options,
    .values_size = sizeof(struct values),
    .run = run_trim,
};

const struct cli_command cli_cache_verify_command = {
    .name = "cache verify",
    .summary = "read every file of the cache and compare it with its sum",
    .operands = "",
    .run = run_verify,
};
