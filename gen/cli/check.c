/*
 * check.c - `fp8gen check SPEC...`: reads specs and reports all their errors.
 *
 * Every spec is read, whatever the ones before it gave; the exit code is the highest of theirs.
 * Prints nothing when all is right.
 */
#include "gen/cli/cli.h"

static int run(const void *values, int count, char **operands)
{
    (void)values;
    int worst = CLI_DONE;
    for (int i = 0; i < count; i++) {
        struct cli_spec spec = { .path = operands[i] };
        fp8gen *gen;
        int code = cli_spec_open(&spec, NULL, &gen);
        const char *json;
        if (!code) {
            fp8gen_status status = fp8gen_plan(gen, &json); /* what only the plan can refuse */
            if (status)
                code = cli_gen_failed(gen, status, operands[i]);
            fp8gen_close(gen);
        }
        if (code > worst)
            worst = code;
    }
    return worst;
}

const struct cli_command cli_check_command = {
    .name = "check",
    .operands = "SPEC...",
    .summary = "read layer specs and report all their errors",
    .details = "Prints nothing when all is right.",
    .min_operands = 1,
    .max_operands = -1,
    .run = run,
};
