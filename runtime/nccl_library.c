/*
 * nccl_library.c - opens NCCL and fills the table of its functions, once a process.
 *
 * In: the environment, or the caller's way to look up functions. Out: a table with the version, or
 * a sentence that says what was searched. Also makes ids, which need nothing else.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "runtime/comm_nccl.h"
#include "runtime/dynlib.h"

/* ---- the library ---- */

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static struct fp8_nccl process_table;
static bool table_ready;

static void *find_in_library(void *user, const char *name)
{
    return dlsym(((const struct fp8_dynlib *)user)->handle, name);
}

fp8_status fp8_nccl_fill(struct fp8_nccl *table, fp8_comm_symbol find, void *user, const char *path)
{
    const struct {
        const char *name;
        void *slot;
        bool optional;
    } symbols[] = {
#define X(member, symbol, parameters) { symbol, &table->member, false },
        FP8_NCCL_TABLE(X)
#undef X
#define X(member, symbol, parameters) { symbol, &table->member, true },
            FP8_NCCL_OPTIONAL(X)
#undef X
                { "ncclGetErrorString", &table->error_string, false },
        { "ncclGetLastError", &table->last_error, true },
    };
    snprintf(table->path, sizeof table->path, "%s", path);
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        void *address = find(user, symbols[i].name);
        if (!address && !symbols[i].optional)
            return fp8_fail(
                FP8_ERR_LIBRARY,
                "%s has no symbol %s: it is too old (2.14 is the oldest that serves) or "
                "another library",
                *path ? path : "the caller's NCCL", symbols[i].name);
        memcpy(symbols[i].slot, &address, sizeof address);
    }
    int result = table->get_version(&table->version);
    if (result != FP8_NCCL_SUCCESS)
        return fp8_fail(FP8_ERR_LIBRARY, "%s: ncclGetVersion fails with %d", path, result);
    return FP8_OK;
}

fp8_status fp8_nccl_open(const struct fp8_nccl **table)
{
    const struct fp8_dynlib *lib = NULL;
    *table = NULL;
    pthread_mutex_lock(&table_lock);
    fp8_status status = table_ready ? FP8_OK : fp8_library_open(FP8_LIBRARY_NCCL, &lib);
    if (status == FP8_OK && !table_ready)
        status = fp8_nccl_fill(&process_table, find_in_library, (void *)(uintptr_t)lib, lib->path);
    table_ready = table_ready || status == FP8_OK;
    pthread_mutex_unlock(&table_lock);
    if (status == FP8_OK)
        *table = &process_table;
    return status;
}

fp8_status fp8_comm_id_create(fp8_comm_id *id)
{
    const struct fp8_nccl *table;
    fp8_nccl_id made;
    if (!id)
        return fp8_fail(FP8_ERR_ARGUMENT, "comm_id_create: id is NULL");
    FP8_TRY(fp8_nccl_open(&table));
    int result = table->get_unique_id(&made);
    if (result != FP8_NCCL_SUCCESS)
        return fp8_fail(FP8_ERR_COMM, "comm_id_create: ncclGetUniqueId: %s",
                        table->error_string(result));
    memcpy(id, &made, sizeof *id);
    return FP8_OK;
}
