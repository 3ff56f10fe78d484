/*
 * gemm_check.c - whether a contender's product is right, before its speed counts.
 *
 * In: a GEMM whose operands are on the device. Sums in float64 over the operands as quantised tell
 * at sampled places what must come out; the whole sampled rows are then compared with those of the
 * first contender that was right, so that every column is seen. out is filled with one byte before,
 * so that a tile that was not stored is found, and so that an accumulating GEMM has something to
 * add to. The bounds are twice those of the accuracy promise: a candidate is judged here, not the
 * promise.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/gemm.h"
#include "gen/cli/reference.h"

#define SAMPLED_ROWS 24
#define SAMPLED_COLS 44 /* more than a thousand products */
#define FILL 0x3c       /* bf16 and fp32: 0.0115; fp16: 1.06 */

struct gemm_check {
    const struct gemm_problem *problem;
    struct ref_sample rows, cols;
    double *exact, *value, *magnitude; /* [rows][cols] */
    uint8_t *raw;                      /* sampled rows of out, whole */
    float *first, *now; /* the same as numbers; first: of the first one that was right */
    double start;       /* what out holds before */
    bool has_first;
};

static int no_memory(void)
{
    cli_error("out of memory for the reference");
    return CLI_MACHINE;
}

/* Rows of a matrix on the device, one after the other. */
static int fetch_rows(const struct gemm_problem *p, const struct ref_sample *sample,
                      const uint8_t *data, size_t pitch, size_t bytes, uint8_t *target)
{
    const struct cli_device *device = &p->data->bench->device;
    fp8_status status = FP8_OK;
    for (int64_t i = 0; !status && i < sample->count; i++)
        status = fp8_memory_copy(device->context, target + (size_t)i * bytes,
                                 data + (size_t)sample->index[i] * pitch, bytes, device->stream);
    return status ? cli_fp8_failed(status, "reading sampled rows") : cli_device_synchronize(device);
}

/* The sampled vectors of one operand in host memory; *data must be freed. */
static int fetch_operand(const struct gemm_problem *p, bool second, const struct ref_sample *sample,
                         struct ref_source *source)
{
    struct baseline_gemm_shape shape = gemm_baseline_shape(p, true);
    const struct baseline_matrix *m = second ? &shape.b : &shape.a;
    const struct cli_device *device = &p->data->bench->device;
    float scale_inv = 0;
    uint8_t *bytes = malloc((size_t)sample->count * (size_t)p->depth + 1);
    if (!bytes)
        return no_memory();
    source->data = bytes;
    source->dtype = m->dtype;
    source->ld = p->depth;
    int code = fetch_rows(p, sample, m->data[0], (size_t)m->ld, (size_t)p->depth, bytes);
    if (code)
        return code;
    fp8_status status = fp8_memory_copy(device->context, &scale_inv, m->scale_inv[0],
                                        sizeof scale_inv, device->stream);
    code = status ? cli_fp8_failed(status, "reading a scale") : cli_device_synchronize(device);
    source->factor = (double)scale_inv;
    return code;
}

static int compute_exact(struct gemm_check *c)
{
    struct ref_source source[2] = { { 0 }, { 0 } };
    const struct ref_sample *samples[2] = { &c->rows, &c->cols };
    struct ref_sample place[2] = { { 0 }, { 0 } };
    int code = CLI_DONE;
    for (int i = 0; !code && i < 2; i++) {
        code = fetch_operand(c->problem, i == 1, samples[i], &source[i]);
        /* the gathered vectors lie one after the other */
        if (!code && !ref_sample_create(&place[i], samples[i]->count, samples[i]->count, 0))
            code = no_memory();
        for (int64_t j = 0; !code && j < place[i].count; j++)
            place[i].index[j] = j;
        source[i].sample = &place[i];
    }
    if (!code && !ref_products(&source[0], &source[1], c->problem->depth, c->exact, c->magnitude))
        code = no_memory();
    for (int i = 0; i < 2; i++) {
        ref_sample_destroy(&place[i]);
        free((void *)source[i].data);
    }
    return code;
}

int gemm_check_create(const struct gemm_problem *problem, struct gemm_check **check)
{
    struct gemm_check *c = calloc(1, sizeof *c);
    int64_t rows = problem->rows < SAMPLED_ROWS ? problem->rows : SAMPLED_ROWS;
    int64_t cols = problem->cols < SAMPLED_COLS ? problem->cols : SAMPLED_COLS;
    int code = CLI_DONE;
    *check = NULL;
    if (!c)
        return no_memory();
    c->problem = problem;
    if (!ref_sample_create(&c->rows, problem->rows, rows, 11) ||
        !ref_sample_create(&c->cols, problem->cols, cols, 12))
        code = no_memory();
    size_t count = (size_t)(rows * cols) + 1, whole = (size_t)rows * (size_t)problem->cols + 1;
    c->exact = calloc(count, sizeof *c->exact);
    c->value = calloc(count, sizeof *c->value);
    c->magnitude = calloc(count, sizeof *c->magnitude);
    c->raw = malloc(whole * 4);
    c->first = malloc(whole * sizeof *c->first);
    c->now = malloc(whole * sizeof *c->now);
    if (!code && !(c->exact && c->value && c->magnitude && c->raw && c->first && c->now))
        code = no_memory();
    uint8_t fill[4] = { FILL, FILL, FILL, FILL };
    c->start = problem->accumulate ? (double)ref_load(fill, problem->out, 0) : 0;
    if (!code)
        code = compute_exact(c);
    if (code)
        gemm_check_destroy(c);
    else
        *check = c;
    return code;
}

void gemm_check_destroy(struct gemm_check *c)
{
    if (!c)
        return;
    ref_sample_destroy(&c->rows);
    ref_sample_destroy(&c->cols);
    free(c->exact);
    free(c->value);
    free(c->magnitude);
    free(c->raw);
    free(c->first);
    free(c->now);
    free(c);
}

int gemm_check_prepare(const struct gemm_check *c)
{
    const struct gemm_data *data = c->problem->data;
    struct cli_buffer out = data->out.set[0];
    out.bytes =
        (size_t)c->problem->rows * (size_t)c->problem->cols * fp8_dtype_bytes(c->problem->out);
    return cli_buffer_fill(&data->bench->device, &out, FILL);
}

static double bound_of(const struct gemm_problem *p)
{
    if (!p->split)
        return 2e-2;
    return fp8_dtype_bytes(p->out) == 4 ? 2e-3 : 5e-3;
}

/* Relative error of now against first, and whether all are numbers. */
static double compare_rows(const struct gemm_check *c)
{
    double difference = 0, norm = 0;
    size_t count = (size_t)c->rows.count * (size_t)c->problem->cols;
    for (size_t i = 0; i < count; i++) {
        double now = (double)c->now[i], first = c->has_first ? (double)c->first[i] : now;
        difference += (now - first) * (now - first);
        norm += first * first;
    }
    return norm > 0 ? sqrt(difference / norm) : difference == 0 ? 0 : INFINITY;
}

int gemm_check_verify(struct gemm_check *c, double *error, char why[96])
{
    const struct gemm_problem *p = c->problem;
    size_t size = fp8_dtype_bytes(p->out), pitch = (size_t)p->cols * size;
    why[0] = '\0';
    int code = fetch_rows(p, &c->rows, p->data->out.set[0].device, pitch, pitch, c->raw);
    if (code)
        return code;
    for (int64_t i = 0; i < c->rows.count; i++)
        for (int64_t j = 0; j < p->cols; j++)
            c->now[i * p->cols + j] = ref_load(c->raw + (size_t)i * pitch, p->out, j);
    for (int64_t i = 0; i < c->rows.count; i++)
        for (int64_t j = 0; j < c->cols.count; j++)
            c->value[i * c->cols.count + j] =
                (double)c->now[i * p->cols + c->cols.index[j]] - c->start;
    int64_t count = c->rows.count * c->cols.count;
    double bound = bound_of(p);
    *error = ref_error(c->value, c->exact, count < 1000 ? c->magnitude : NULL, count);
    double apart = compare_rows(c);
    if (!(*error <= bound))
        snprintf(why, 96, "wrong: relative error %.1e, bound %.0e", *error, bound);
    else if (!(apart <= 2 * bound))
        snprintf(why, 96, "wrong: %.1e apart from the first one, bound %.0e", apart, 2 * bound);
    else if (!c->has_first) {
        float *swap = c->first;
        c->first = c->now;
        c->now = swap;
        c->has_first = true;
    }
    return CLI_DONE;
}
