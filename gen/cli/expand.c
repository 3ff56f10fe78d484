/*
 * expand.c - `fp8gen expand SPEC`: the CUDA text of the kernels that a spec needs.
 *
 * To stdout one after another, or with -o each into DIR/<kernel>.cu. All kernels are expanded
 * before the first is written, so that an error in a template leaves nothing behind.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "gen/cli/cli.h"

#define MAX_KERNELS 256

struct values {
    const char *output;
    const char *kernel;
    const char *template_dir;
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
    { .name = "template-dir",
      .kind = CLI_TEXT,
      .metavar = "DIR",
      .doc = "templates from DIR instead of the built-in ones",
      .offset = offsetof(struct values, template_dir) },
    { .name = NULL },
};

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
    const char *nearest = cli_nearest(wanted, names, count);
    if (nearest) {
        cli_hint("did you mean '%s'?", nearest);
        return CLI_USAGE;
    }
    char list[1024] = "";
    for (int i = 0; i < count; i++) {
        size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "", names[i]);
    }
    cli_hint("its kernels are %s", list);
    return CLI_USAGE;
}

static int run(const void *v, int count, char **operands)
{
    const struct values *values = v;
    struct cli_spec spec = { .path = operands[0], .template_dir = values->template_dir };
    const char *names[MAX_KERNELS], *texts[MAX_KERNELS];
    int kernels = 0, first = 0;
    (void)count;
    fp8gen *gen;
    int code = cli_spec_open(&spec, NULL, &gen);
    if (code)
        return code;
    while (!code && kernels < MAX_KERNELS) {
        fp8gen_status status = fp8gen_expand(gen, kernels, &names[kernels], &texts[kernels]);
        if (status)
            code = cli_gen_failed(gen, status, operands[0]);
        else if (!names[kernels])
            break;
        else
            kernels++;
    }
    int chosen = kernels;
    if (!code && values->kernel) {
        while (first < kernels && strcmp(names[first], values->kernel) != 0)
            first++;
        if (first == kernels)
            code = unknown_kernel(values->kernel, names, kernels);
        chosen = 1;
    }
    if (!code && values->output)
        code = write_all(values->output, names + first, texts + first, chosen);
    for (int i = 0; !code && !values->output && i < chosen; i++) {
        if (i > 0)
            putchar('\n');
        fputs(texts[first + i], stdout);
    }
    fp8gen_close(gen);
    return code;
}

const struct cli_command cli_expand_command = {
    .name = "expand",
    .operands = "SPEC",
    .summary = "write the CUDA text of the kernels that a spec needs",
    .min_operands = 1,
    .max_operands = 1,
    .options = options,
    .values_size = sizeof(struct values),
    .run = run,
};
