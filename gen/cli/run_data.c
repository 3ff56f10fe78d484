/*
 * run_data.c - the random data that a run goes through: normal, or normal with what real tensors
 * have.
 *
 * In: a layer with its tensors, a seed, the kind of data. Out: x, w, bias and dy on the device and
 * in host memory, the same on every machine. Kinds: one column of x times a factor, and that of w
 * divided by it, so that y stays as it is (outliers); x after an activation (silu); x and w around
 * a mean as large as their sigma, whose sums grow with the depth.
 */
#include <math.h>

#include "gen/cli/random.h"
#include "gen/cli/reference.h"
#include "gen/cli/run.h"

static const double dy_sigma = 0.001;

static void scale_column(const fp8_tensor *t, void *data, int64_t column, float factor)
{
    for (int64_t i = 0; i < t->rows; i++) {
        int64_t at = i * t->cols + column;
        cli_store(data, t->dtype, at, ref_load(data, t->dtype, at) * factor);
    }
}

static void change_all(const fp8_tensor *t, void *data, enum run_data_kind kind, float sigma)
{
    for (int64_t at = 0; at < t->rows * t->cols; at++) {
        float value = ref_load(data, t->dtype, at);
        cli_store(data, t->dtype, at,
                  kind == RUN_DATA_MEAN ? value + sigma : value / (1 + expf(-value)));
    }
}

static void change(const struct run_layer *run, enum run_buffer b, float sigma)
{
    const fp8_tensor *t = &run->tensors[b];
    void *data = run->buffers[b].host;
    if (b != RUN_X && b != RUN_W)
        return;
    if (run->data.kind == RUN_DATA_OUTLIER && t->cols > 0)
        scale_column(t, data, t->cols / 3, b == RUN_X ? run->data.factor : 1 / run->data.factor);
    else if (run->data.kind == RUN_DATA_MEAN || (run->data.kind == RUN_DATA_SILU && b == RUN_X))
        change_all(t, data, run->data.kind, sigma);
}

int run_make_data(struct run_layer *run)
{
    const double sigmas[] = { [RUN_X] = 1.0,
                              [RUN_W] = 1 / sqrt((double)run->info.in_features),
                              [RUN_BIAS] = 0.1,
                              [RUN_DY] = dy_sigma };
    for (int b = RUN_X; b <= RUN_DY; b++) {
        const fp8_tensor *t = &run->tensors[b];
        int code = cli_device_synchronize(run->device);
        if (code)
            return code;
        /* another sigma for each tensor, so that scales differ in all their bits */
        double u = (double)(cli_random_word(run->seed, 9, (uint64_t)b) >> 11) * 0x1p-53;
        double sigma = sigmas[b] * (0.8 + 0.4 * u);
        cli_random_fill(run->buffers[b].host, t->dtype, t->rows * t->cols, sigma, run->seed,
                        (uint64_t)b);
        change(run, b, (float)sigma);
        code = cli_buffer_upload(run->device, &run->buffers[b]);
        if (code)
            return code;
    }
    return CLI_DONE;
}

/* A quarter of the size of dw: a product that is rounded before it is added to numbers of its own
 * size would pass for one that is not. */
int run_fill_dw(struct run_layer *run)
{
    const fp8_tensor *dw = &run->tensors[RUN_DW];
    double sigma = 0.25 * dy_sigma * sqrt((double)(run->m ? run->m : 1));
    int code = cli_device_synchronize(run->device);
    if (code)
        return code;
    cli_random_fill(run->buffers[RUN_DW].host, dw->dtype, dw->rows * dw->cols, sigma, run->seed,
                    RUN_DW);
    return cli_buffer_upload(run->device, &run->buffers[RUN_DW]);
}
