/*
 * expand.c - `fp8gen expand SPEC`: the CUDA text of the kernels that a spec needs.
 *
 * To stdout one after another, or with -o each into DIR/<kernel>.cu. All kernels are expanded
 * before the first is written, so that an error in a template leaves nothing behind.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "gen/cli/cli.h"

struct values {
    const char *output;
    const char *kernel;
    const char *template_dir;
    const char *recipe;
    const char *fsdp;
    const char *tuning;
    const char *gemm;
};

static const struct cli_option options[] = {
    { .name = "output",
      .letter = 'o',
      .kind = CLI_TEXT,
      .metavar = "DIR",
      .doc = "write DIR/<kernel>.cu instead of standard output",
      .offset = offsetof(struct values, output) },
    { .name = "kernel",
      .kind = CLI_TEXT,
      .metavar = "NAME",
      .doc = "only this kernel",
      .offset = offsetof(struct values, kernel) },
    CLI_OPTION_TEMPLATE_DIR(struct values),
    CLI_OPTION_RECIPE(struct values),
    CLI_OPTION_FSDP(struct values),
    CLI_OPTION_TUNING(struct values),
    CLI_OPTION_GEMM(struct values),
    { .name = NULL },
};

/* The kernels of a spec; names and texts are the session's. */
struct kernels {
    const char **names, **texts;
    int count;
};

static int expand_all(fp8gen *gen, const char *path, struct kernels *all)
{
    for (int room = 0;; all->count++) {
        if (all->count == room) {
            room = 2 * room + 32;
            const char **names = realloc(all->names, sizeof *names * (size_t)room);
            all->names = names ? names : all->names;
            const char **texts = realloc(all->texts, sizeof *texts * (size_t)room);
            all->texts = texts ? texts : all->texts;
            if (!names || !texts) {
                cli_error("out of memory");
                return CLI_MACHINE;
            }
        }
        fp8gen_status status =
            fp8gen_expand(gen, all->count, &all->names[all->count], &all->texts[all->count]);
        if (status)
            return cli_gen_failed(gen, status, path);
        if (!all->names[all->count])
            return CLI_DONE;
    }
}

static int write_all(const char *folder, const char *const *names, const char *const *texts,
                     int count)
{
    if (mkdir(folder, 0755) != 0 && errno != EEXIST) {
        cli_error("cannot create '%s': %s", folder, strerror(errno));
        return CLI_MACHINE;
    }
    for (int i = 0; i < count; i++) {
        char path[4096];
        int length = snprintf(path, sizeof path, "%s/%s.cu", folder, names[i]);
        if (length < 0 || (size_t)length >= sizeof path) {
            cli_error("the path of '%s' in '%s' is too long", names[i], folder);
            return CLI_MACHINE;
        }
        int code = cli_write_file(path, texts[i], strlen(texts[i]));
        if (code)
            return code;
        if (cli_verbosity() > 0)
            cli_note("wrote %s", path);
    }
    return CLI_DONE;
}

static int unknown_kernel(const char *wanted, const char *const *names, int count)
{
    cli_error("the spec needs no kernel '%s'", wanted);
    cli_hint_names(wanted, names, count, "its kernels are");
    return CLI_USAGE;
}

static int run(const void *v, int count, char **operands)
{
    const struct values *values = v;
    struct cli_spec spec = { .path = operands[0],
                             .template_dir = values->template_dir,
                             .recipe = values->recipe,
                             .fsdp = values->fsdp,
                             .tuning = values->tuning,
                             .gemm = values->gemm };
    struct kernels all = { 0 };
    int first = 0;
    (void)count;
    fp8gen *gen;
    int code = cli_spec_open(&spec, NULL, &gen);
    if (code)
        return code;
    code = expand_all(gen, operands[0], &all);
    int chosen = all.count;
    if (!code && values->kernel) {
        while (first < all.count && strcmp(all.names[first], values->kernel) != 0)
            first++;
        if (first == all.count)
            code = unknown_kernel(values->kernel, all.names, all.count);
        chosen = 1;
    }
    if (!code && values->output)
        code = write_all(values->output, all.names + first, all.texts + first, chosen);
    for (int i = 0; !code && !values->output && i < chosen; i++) {
        if (i > 0)
            putchar('\n');
        fputs(all.texts[first + i], stdout);
    }
    free(all.names);
    free(all.texts);
    fp8gen_close(gen);
    return code;
}

const struct cli_command cli_expand_command = {
    .name = "expand",
    .operands = "SPEC",
    .summary = "write the CUDA text of the kernels that a spec needs",
    .details = "It is what 'fp8gen build' compiles for the same spec and options.",
    .min_operands = 1,
    .max_operands = 1,
    .options = options,
    .values_size = sizeof(struct values),
    .run = run,
};
