/*
 * cuda.h - the few driver calls that doctor and bench make themselves.
 *
 * Everything else goes through libfp8. The functions come from the same library that libfp8 opened
 * (fp8_library_symbol); their types are written out here, so that no CUDA header is needed to build
 * the program's own driver calls.
 */
#ifndef FP8GEN_CLI_CUDA_H
#define FP8GEN_CLI_CUDA_H

#include "gen/cli/cli.h"

typedef int cli_cu_result; /* CUresult: 0 is success */
typedef struct CUctx_st *cli_cu_context;

struct cli_cuda {
    cli_cu_result (*init)(unsigned flags);
    cli_cu_result (*driver_version)(int *version);
    cli_cu_result (*device_count)(int *count);
    cli_cu_result (*device_name)(char *name, int size, int device);
    cli_cu_result (*device_attribute)(int *value, int attribute, int device);
    cli_cu_result (*device_memory)(size_t *bytes, int device);
    cli_cu_result (*retain)(cli_cu_context *context, int device);
    cli_cu_result (*release)(int device);
    cli_cu_result (*push)(cli_cu_context context);
    cli_cu_result (*pop)(cli_cu_context *context);
    cli_cu_result (*copy)(unsigned long long target, unsigned long long source, size_t bytes,
                          fp8_stream stream);
    cli_cu_result (*error_string)(cli_cu_result result, const char **text);
    const char *path;
};

enum {
    CLI_CU_MULTIPROCESSORS = 16,
    CLI_CU_CAPABILITY_MAJOR = 75,
    CLI_CU_CAPABILITY_MINOR = 76,
};

/* FP8_ERR_LIBRARY: no driver, or one without these functions; fp8_last_error() says which. */
fp8_status cli_cuda_load(struct cli_cuda *cuda);
/* "out of memory", ...; never NULL. */
const char *cli_cuda_text(const struct cli_cuda *cuda, cli_cu_result result);

#endif
