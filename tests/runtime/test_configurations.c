/*
 * test_configurations.c - every configuration of the generated GEMM over shapes that meet its
 * tails.
 *
 * Outputs are compared bit for bit, all of them, and canaries around and between their rows, at
 * leading dims and addresses of every kind. On the host, which has one way to multiply, a few
 * shapes show that the test itself is right.
 */
#include "runtime/fp8_format.h"
#include "tests/runtime/rig_exact.h"

enum { GUARD = 512 };

/* ---- one product ---- */

struct product {
    const struct rig_layer *layer;
    fp8_pass pass;
    const fp8_operand *a, *b;
    const int32_t *sums; /* [rows][cols] */
    int64_t rows, cols;
    int64_t gap, offset; /* elements */
    bool accumulate;
    int32_t max_sms;  /* few: every CTA has many tiles; 0: all */
    const char *name; /* of the configuration */
};

static fp8_dtype out_dtype(const struct product *p)
{
    const fp8_layer_info *info = &p->layer->info;
    return p->pass == FP8_PASS_FPROP   ? info->y_dtype
           : p->pass == FP8_PASS_DGRAD ? info->dx_dtype
                                       : info->dw_dtype;
}

static void put_bits(unsigned char *at, size_t element, uint32_t bits)
{
    memcpy(at, &bits, element); /* the low bytes come first */
}

/* What an accumulating product begins with. */
static float before_value(int64_t i, int64_t j)
{
    return (float)((i + 3 * j) % 5 - 2);
}

static void prepare_output(const struct product *p, size_t total)
{
    size_t element = fp8_dtype_bytes(out_dtype(p));
    memset(exact_output.host, 0xFF, total);
    unsigned char *data = exact_output.host + GUARD + (size_t)p->offset * element;
    for (int64_t i = 0; p->accumulate && i < p->rows; i++) {
        for (int64_t j = 0; j < p->cols; j++)
            put_bits(data + (size_t)(i * (p->cols + p->gap) + j) * element, element,
                     rig_rounded(out_dtype(p), before_value(i, j)));
    }
    RIG_OK(fp8_memory_copy(rig.context, exact_output.device, exact_output.host, total, rig.stream));
}

static void check_output(const struct product *p, size_t total)
{
    size_t element = fp8_dtype_bytes(out_dtype(p));
    unsigned char *want = malloc(total);
    assert_non_null(want);
    memset(want, 0xFF, total);
    unsigned char *data = want + GUARD + (size_t)p->offset * element;
    for (int64_t i = 0; i < p->rows; i++) {
        for (int64_t j = 0; j < p->cols; j++) {
            float value = (float)p->sums[i * p->cols + j];
            if (p->accumulate)
                value += before_value(i, j);
            put_bits(data + (size_t)(i * (p->cols + p->gap) + j) * element, element,
                     rig_rounded(out_dtype(p), value));
        }
    }
    bool same = memcmp(exact_output.host, want, total) == 0;
    for (size_t at = 0; at < total && !same; at++) {
        if (exact_output.host[at] == want[at])
            continue;
        int64_t index = ((int64_t)at - GUARD) / (int64_t)element - p->offset;
        int64_t ld = p->cols + p->gap;
        fail_msg("%s, %s, %lld x %lld, M %lld, ld %lld, offset %lld, accumulate %d: byte %zu, at "
                 "[%lld, %lld], is 0x%02X, not 0x%02X",
                 p->name, fp8_pass_name(p->pass), (long long)p->rows, (long long)p->cols,
                 (long long)p->a->rows, (long long)ld, (long long)p->offset, p->accumulate, at,
                 (long long)(index / ld), (long long)(index % ld), exact_output.host[at], want[at]);
    }
    free(want);
}

static void check_product(struct product product)
{
    const struct product *p = &product;
    if (product.gap < 0)
        product.gap = 15 - (product.cols + 15) % 16;
    size_t element = fp8_dtype_bytes(out_dtype(p));
    size_t total = 2 * GUARD + (size_t)(p->offset + p->rows * (p->cols + p->gap)) * element;
    exact_need(&exact_output, total);
    prepare_output(p, total);
    const fp8_tensor out = { (char *)exact_output.device + GUARD + (size_t)p->offset * element,
                             p->rows,
                             p->cols,
                             p->cols + p->gap,
                             out_dtype(p),
                             0 };
    fp8_gemm_args args = FP8_GEMM_ARGS_INIT;
    args.pass = p->pass;
    args.accumulate = p->accumulate;
    args.a = p->a;
    args.b = p->b;
    args.out = &out;
    args.call =
        exact_call(p->layer, p->pass == FP8_PASS_WGRAD ? p->a->rows : p->rows, &exact_workspace);
    args.call.max_sms = p->max_sms;
    RIG_OK(fp8_gemm(p->layer->handle, &args));
    RIG_OK(fp8_memory_copy(rig.context, exact_output.host, exact_output.device, total, rig.stream));
    RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
    check_output(p, total);
}

/* ---- the sweep ---- */

static const int64_t all_tokens[] = { 1, 7, 8, 63, 64, 65, 127, 128, 129, 192, 257 };
static const int64_t all_n[] = { 16, 24, 40, 72, 576, 768, 1000, 2112 };
static const int64_t all_k[] = { 16, 32, 48, 64, 112, 128, 144, 576 };
/* Rows that end within a step of 16 bytes. */
static const int64_t odd_shapes[][2] = { { 75, 33 }, { 37, 129 }, { 1003, 50 }, { 130, 575 } };
enum { TOKENS = 11, SIDE = 8, EVEN = SIDE * SIDE, SHAPES = EVEN + 4 };

static int64_t n_of(int shape)
{
    return shape < EVEN ? all_n[shape / SIDE] : odd_shapes[shape - EVEN][0];
}

static int64_t k_of(int shape)
{
    return shape < EVEN ? all_k[shape % SIDE] : odd_shapes[shape - EVEN][1];
}

/* Outputs of all dtypes, so that each configuration meets those that it serves. */
static struct rig_spec sweep_spec(const struct configuration *c, int shape)
{
    static const fp8_dtype outputs[] = { FP8_DTYPE_BF16, FP8_DTYPE_FP16, FP8_DTYPE_FP32 };
    return (struct rig_spec){
        .out_features = n_of(shape),
        .in_features = k_of(shape),
        .max_tokens = 257,
        .output = outputs[shape % 3],
        .grad_input = outputs[(shape + 1) % 3],
        .grad_weight = outputs[(shape + 2) % 3],
        .fprop_split = !c->fast,
        .dgrad_fast = c->fast,
        .wgrad_fast = c->fast,
    };
}

static int served[EXACT_CONFIGURATIONS]; /* products that ran with the configuration */

static void count_served(int index, const struct rig_layer *layer, fp8_pass pass, int64_t tokens)
{
    fp8_dispatch dispatch = FP8_DISPATCH_INIT;
    RIG_OK(fp8_layer_dispatch(layer->handle, pass, tokens, &dispatch));
    served[index] += strstr(dispatch.kernel, exact_configurations[index].name) != NULL;
}

struct shape_data {
    struct exact x, w, dy;
    int32_t *y, *dx, *dw; /* sums; those of dw up to `rows` */
    int64_t rows;
    fp8_operand x_operand, w_operand, dy_operand;
};

static void shape_make(struct shape_data *s, int64_t n, int64_t k, int64_t most)
{
    memset(s, 0, sizeof *s);
    exact_make(&s->x, most, k, 1);
    exact_make(&s->w, n, k, 2);
    exact_make(&s->dy, most, n, 3);
    s->y = malloc((size_t)(most * n) * sizeof *s->y);
    s->dx = calloc((size_t)(most * k), sizeof *s->dx);
    s->dw = calloc((size_t)(n * k), sizeof *s->dw);
    assert_true(s->y != NULL && s->dx != NULL && s->dw != NULL);
    for (int64_t i = 0; i < most; i++) {
        for (int64_t j = 0; j < n; j++) {
            s->y[i * n + j] = exact_dot(s->x.values + i * k, 1, s->w.values + j * k, 1, k);
            int32_t factor = s->dy.values[i * n + j];
            for (int64_t l = 0; l < k; l++)
                s->dx[i * k + l] += factor * s->w.values[j * k + l];
        }
    }
}

static void shape_free(struct shape_data *s)
{
    exact_free(&s->x), exact_free(&s->w), exact_free(&s->dy);
    free(s->y), free(s->dx), free(s->dw);
}

/* Both exact_operands of M rows, and the sums of dw over them. */
static void shape_tokens(struct shape_data *s, const struct rig_layer *layer, int64_t tokens)
{
    exact_add_rows(s->dw, &s->dy, &s->x, s->rows, tokens);
    s->rows = tokens;
    exact_quantize(layer, FP8_ROLE_X, &s->x, tokens, &exact_operands[0], &s->x_operand);
    exact_quantize(layer, FP8_ROLE_DY, &s->dy, tokens, &exact_operands[2], &s->dy_operand);
}

static void check_configuration(int index, const struct rig_layer *layer,
                                const struct shape_data *s, int64_t tokens)
{
    enum { TO_STEP = -1 }; /* ld is the next multiple of 16 */
    static const int64_t gaps[] = { 0, TO_STEP, 8, 1, TO_STEP, 3, 16 };
    static const int64_t offsets[] = { 0, 8, 0, 1, 4, 2 };
    static const int32_t sms[] = { 0, 1, 0, 5, 2 };
    int64_t n = layer->info.out_features, k = layer->info.in_features, turn = index + tokens;
    struct product p = { .layer = layer,
                         .pass = FP8_PASS_FPROP,
                         .a = &s->x_operand,
                         .b = &s->w_operand,
                         .sums = s->y,
                         .rows = tokens,
                         .cols = n,
                         .gap = gaps[turn % 7],
                         .offset = offsets[turn % 6],
                         .max_sms = sms[turn % 5],
                         .name = exact_configurations[index].name };
    check_product(p);
    p.pass = FP8_PASS_DGRAD, p.a = &s->dy_operand, p.sums = s->dx, p.cols = k;
    check_product(p);
    p.pass = FP8_PASS_WGRAD, p.b = &s->x_operand, p.sums = s->dw, p.rows = n;
    check_product(p);
    p.accumulate = true;
    check_product(p);
    count_served(index, layer, FP8_PASS_FPROP, tokens);
    count_served(index, layer, FP8_PASS_DGRAD, tokens);
}

static void every_configuration_on_every_shape(void **state)
{
    (void)state;
    static struct rig_layers layers[EXACT_CONFIGURATIONS];
    int count = (int)rig_cut("the number of configurations", exact_configuration_count, 2);
    for (int c = 0; c < count; c++) {
        struct rig_spec specs[SHAPES];
        for (int s = 0; s < SHAPES; s++)
            specs[s] = sweep_spec(&exact_configurations[c], s);
        exact_open(&exact_configurations[c], &layers[c], specs, SHAPES);
    }
    for (int shape = 0; shape < SHAPES; shape += rig.cuda ? 1 : 11) {
        struct shape_data s;
        shape_make(&s, n_of(shape), k_of(shape), 257);
        exact_quantize(&layers[0].layer[shape], FP8_ROLE_W, &s.w, s.w.rows, &exact_operands[1],
                       &s.w_operand);
        for (int t = 0; t < TOKENS; t++) {
            shape_tokens(&s, &layers[0].layer[shape], all_tokens[t]);
            for (int c = 0; c < count; c++)
                check_configuration(c, &layers[c].layer[shape], &s, all_tokens[t]);
        }
        shape_free(&s);
    }
    for (int c = 0; c < count; c++) {
        if (rig.cuda) {
            print_message("%s: %d products\n", exact_configurations[c].name, served[c]);
            assert_true(served[c] > 0);
        }
        rig_layers_close(&layers[c]);
    }
}

/* Intervals of accumulation, in the configurations that promote after several blocks. */
static void intervals_on_some_shapes(void **state)
{
    (void)state;
    static const int shapes[] = { 7, 39, 61, 65, 67 };
    static const int64_t tokens[] = { 1, 129, 257 };
    static struct rig_layers layers;
    for (int turn = 0; turn < 2 * exact_configuration_count; turn++) {
        const struct configuration *c = &exact_configurations[turn / 2];
        if (c->fast || strstr(c->name, "p2") || strstr(c->name, "w3"))
            continue;
        struct rig_spec specs[5];
        for (int s = 0; s < 5; s++) {
            specs[s] = sweep_spec(c, shapes[s]);
            specs[s].interval = turn % 2 ? 256 : 512;
        }
        exact_open(c, &layers, specs, 5);
        for (int s = 0; s < (rig.cuda ? 5 : 2); s++) {
            fp8_dispatch dispatch = FP8_DISPATCH_INIT;
            const struct rig_layer *layer = &layers.layer[s];
            struct shape_data data;
            shape_make(&data, n_of(shapes[s]), k_of(shapes[s]), 257);
            exact_quantize(layer, FP8_ROLE_W, &data.w, data.w.rows, &exact_operands[1],
                           &data.w_operand);
            for (int t = 0; t < 3; t++) {
                shape_tokens(&data, layer, tokens[t]);
                check_configuration(turn / 2, layer, &data, tokens[t]);
            }
            shape_free(&data);
            RIG_OK(fp8_layer_dispatch(layer->handle, FP8_PASS_FPROP, 257, &dispatch));
            if (rig.cuda && !strstr(dispatch.kernel, turn % 2 ? "_i256_" : "_i512_"))
                fail_msg("%s: %s", c->name, dispatch.kernel);
        }
        rig_layers_close(&layers);
    }
}

/* 512, 1024, 147456: the contraction is far longer than anything else. */
static void a_very_long_contraction(void **state)
{
    (void)state;
    const int64_t m = rig_cut("M", 512, 8), n = rig_cut("N", 1024, 24), k = 147456;
    struct exact x, w;
    exact_make(&x, m, k, 11);
    exact_make(&w, n, k, 12);
    int count = (int)rig_cut("the number of configurations", exact_configuration_count, 1);
    uint16_t *y = malloc((size_t)(m * n) * sizeof *y);
    assert_non_null(y);
    for (int c = 0; c < count; c++) {
        struct rig_spec spec = { .out_features = n,
                                 .in_features = k,
                                 .max_tokens = m,
                                 .fprop_split = !exact_configurations[c].fast };
        struct rig_layers layers;
        fp8_operand a, b;
        exact_open(&exact_configurations[c], &layers, &spec, 1);
        exact_quantize(&layers.layer[0], FP8_ROLE_X, &x, m, &exact_operands[0], &a);
        exact_quantize(&layers.layer[0], FP8_ROLE_W, &w, n, &exact_operands[1], &b);
        exact_need(&exact_output, (size_t)(m * n) * sizeof *y);
        const fp8_tensor out = { exact_output.device, m, n, n, FP8_DTYPE_BF16, 0 };
        fp8_gemm_args args = FP8_GEMM_ARGS_INIT;
        args.pass = FP8_PASS_FPROP, args.a = &a, args.b = &b, args.out = &out;
        args.call = exact_call(&layers.layer[0], m, &exact_workspace);
        RIG_OK(fp8_gemm(layers.layer[0].handle, &args));
        RIG_OK(fp8_memory_copy(rig.context, y, exact_output.device, (size_t)(m * n) * sizeof *y,
                               rig.stream));
        RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
        uint64_t seed = 13;
        for (int sample = 0; sample < (rig.cuda ? 2000 : 50); sample++) {
            int64_t i = rig_below(&seed, m), j = rig_below(&seed, n);
            float want = (float)exact_dot(x.values + i * k, 1, w.values + j * k, 1, k);
            if (y[i * n + j] != fp8_float_to_bf16(want))
                fail_msg("%s [%lld, %lld]: %g, not %g", exact_configurations[c].name, (long long)i,
                         (long long)j, (double)fp8_bf16_to_float(y[i * n + j]), (double)want);
        }
        rig_layers_close(&layers);
    }
    free(y);
    exact_free(&x), exact_free(&w);
}

/* ---- a known product in every configuration ---- */

static void expect_all(const struct rig_tensor *tensor, float value, const char *configuration)
{
    for (int64_t i = 0; i < tensor->t.rows; i++) {
        for (int64_t j = 0; j < tensor->t.cols; j++) {
            if (rig_get(tensor, i, j) != value)
                fail_msg("%s: %s[%lld,%lld] is %.9g, not %g", configuration, tensor->name,
                         (long long)i, (long long)j, (double)rig_get(tensor, i, j), (double)value);
        }
    }
}

/* dy = 3, w = 2 I, x = 1: dx = 6 and dw = 384. E5M2 bytes read as E4M3 come out 163 times too
 * small. */
static void known_product_is_exact_in_every_configuration(void **state)
{
    (void)state;
    static const fp8_dtype outputs[] = { FP8_DTYPE_BF16, FP8_DTYPE_FP16, FP8_DTYPE_FP32 };
    int count = (int)rig_cut("the number of configurations", exact_configuration_count, 2);
    for (int index = 0; index < count; index++) {
        struct rig_spec specs[3];
        struct rig_layers layers;
        for (int d = 0; d < 3; d++)
            specs[d] = (struct rig_spec){ .out_features = 128,
                                          .in_features = 128,
                                          .output = outputs[d],
                                          .grad_input = outputs[d],
                                          .grad_weight = outputs[d],
                                          .power_of_two = true,
                                          .fprop_split = !exact_configurations[index].fast,
                                          .dgrad_fast = exact_configurations[index].fast,
                                          .wgrad_fast = exact_configurations[index].fast };
        exact_open(&exact_configurations[index], &layers, specs, 3);
        for (int n = 0; n < 6; n++) {
            struct rig_case c;
            rig_case_init(&c, &layers.layer[n / 2], 128, 1);
            c.one_backward = n % 2;
            rig_case_make(&c);
            rig_set_all(&c.tensor[RIG_DY], 3.0f);
            rig_set_all(&c.tensor[RIG_X], 1.0f);
            rig_set_all(&c.tensor[RIG_W], 0.0f);
            for (int64_t i = 0; i < 128; i++)
                rig_set(&c.tensor[RIG_W], i, i, 2.0f);
            rig_case_run(&c);
            rig_case_check(&c);
            expect_all(&c.tensor[RIG_DX], 6.0f, exact_configurations[index].name);
            expect_all(&c.tensor[RIG_DW], 384.0f, exact_configurations[index].name);
            expect_all(&c.tensor[RIG_Y], 2.0f, exact_configurations[index].name);
            rig_case_free(&c);
        }
        rig_layers_close(&layers);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(every_configuration_on_every_shape, exact_read_configurations),
        cmocka_unit_test(intervals_on_some_shapes),
        cmocka_unit_test(a_very_long_contraction),
        cmocka_unit_test_teardown(known_product_is_exact_in_every_configuration, exact_release_all),
    };
    return RIG_RUN(tests);
}
