/*
 * log.c - the log: levels, the variable FP8_LOG, one line at a time into the context's callback.
 *
 * The library never prints. An error is returned with its sentence, so that it is logged only where
 * that is asked for. A line is formatted into a fixed buffer only if its level is wanted, so
 * that an unwanted line costs one test on the hot path.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/internal.h"

/* FP8_LOG is a list of levels between commas; unknown words are skipped. */
static uint32_t levels_of_environment(void)
{
    static const struct {
        const char *name;
        fp8_log_level level;
    } words[] = { { "error", FP8_LOG_ERROR },
                  { "warning", FP8_LOG_WARNING },
                  { "info", FP8_LOG_INFO },
                  { "dispatch", FP8_LOG_DISPATCH } };
    uint32_t levels = 0;
    const char *at = getenv("FP8_LOG");
    while (at && *at) {
        size_t length = strcspn(at, ",");
        for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
            if (strlen(words[i].name) == length && memcmp(words[i].name, at, length) == 0)
                levels |= 1u << words[i].level;
        }
        at += length + (at[length] == ',');
    }
    return levels;
}

void fp8_log_setup(struct fp8_log *log, const fp8_context_options *options)
{
    log->callback = options->log;
    log->user = options->log_user;
    log->levels = options->log_levels;
    if (!log->levels)
        log->levels = 1u << FP8_LOG_WARNING | levels_of_environment();
}

void fp8_log_write(const struct fp8_log *log, fp8_log_level level, const char *format, ...)
{
    if (!fp8_log_wanted(log, level))
        return;
    char line[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    log->callback(log->user, level, line);
}
