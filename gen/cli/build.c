/*
 * build.c - `fp8gen build SPEC -o DIR`: compiles the kernels and writes the bundle.
 *
 * The library does the work and the writing; this file gives it the options and shows the progress.
 */
#include "gen/cli/cli.h"

struct values {
    const char *output;
    const char *arch;
    int64_t jobs;
    const char *template_dir;
    bool no_cache;
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
      .doc = "folder of the bundle (required); an older bundle there is replaced",
      .offset = offsetof(struct values, output) },
    { .name = "arch",
      .kind = CLI_TEXT,
      .metavar = "LIST",
      .doc = "GPU architectures, as sm_90a,sm_100a; none: host only (default sm_90a)",
      .offset = offsetof(struct values, arch) },
    { .name = "jobs",
      .letter = 'j',
      .kind = CLI_NUMBER,
      .metavar = "N",
      .doc = "compile N kernels at a time (default: all cores)",
      .offset = offsetof(struct values, jobs),
      .min = 1,
      .max = 1024 },
    CLI_OPTION_TEMPLATE_DIR(struct values),
    { .name = "no-cache",
      .kind = CLI_FLAG,
      .doc = "compile every kernel, whatever the cache holds, and keep none",
      .offset = offsetof(struct values, no_cache) },
    CLI_OPTION_RECIPE(struct values),
    CLI_OPTION_FSDP(struct values),
    CLI_OPTION_TUNING(struct values),
    CLI_OPTION_GEMM(struct values),
    { .name = NULL },
};

static void show(void *user, const char *kernel, int32_t done, int32_t total)
{
    (void)user;
    cli_progress("[%d/%d] %s", done, total, kernel ? kernel : "");
}

static int run(const void *v, int count, char **operands)
{
    const struct values *values = v;
    (void)count;
    if (!values->output) {
        cli_error("'build' needs the folder of the bundle");
        cli_hint("fp8gen build %s -o DIR", operands[0]);
        return CLI_USAGE;
    }
    struct cli_spec spec = { .path = operands[0],
                             .template_dir = values->template_dir,
                             .recipe = values->recipe,
                             .fsdp = values->fsdp,
                             .tuning = values->tuning,
                             .gemm = values->gemm };
    fp8gen *gen;
    int code = cli_spec_open(&spec, NULL, &gen);
    if (code)
        return code;
    fp8gen_build_options build = FP8GEN_BUILD_OPTIONS_INIT;
    build.output_dir = values->output;
    build.jobs = (int32_t)values->jobs;
    build.progress = show;
    build.guard = cli_temp_guard;
    build.log = cli_gen_log;
    if (values->no_cache)
        build.cache_dir = "";
    if (values->arch)
        build.archs = values->arch;
    fp8gen_status status = fp8gen_build(gen, &build);
    cli_progress_end();
    if (status)
        code = cli_gen_failed(gen, status, operands[0]);
    else
        cli_note_nvrtc(gen, build.archs);
    if (!status && cli_verbosity() > 0)
        cli_note("wrote the bundle %s for %s", values->output, build.archs);
    fp8gen_close(gen);
    return code;
}

const struct cli_command cli_build_command = {
    .name = "build",
    .operands = "SPEC",
    .summary = "compile the kernels of a spec and write a bundle",
    .details =
        "A bundle is a folder with manifest.json and the compiled kernels: all that a program "
        "with libfp8 needs of the layers. Kernels are compiled by NVRTC; no GPU is needed. With "
        "--arch none nothing is compiled, and the bundle runs on the host backend.",
    .min_operands = 1,
    .max_operands = 1,
    .options = options,
    .values_size = sizeof(struct values),
    .run = run,
};
