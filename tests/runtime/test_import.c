/*
 * test_import.c - weights that are FP8 already: a fused [q; k; v] with one scale and with one a
 * part, whole and cut over two tensor-parallel ranks, by its rows and by its columns.
 *
 * All data are small whole numbers and scales have few bits, so that every sum is exact in float32
 * whatever its order: what ranks compute must be the bits of one GPU.
 */
#include <math.h>

#include "runtime/fp8_format.h"
#include "tests/runtime/rig.h"

enum { M = 37, N = 48, K = 128, PARTS = 3, RANKS = 2 };

/* Each recipe whole, with half the rows of every part (column-parallel), with half the columns
 * (row-parallel). */
enum { ROWWISE, CURRENT, BLOCK, BF16, RECIPES };
enum { WHOLE, BY_ROWS, BY_COLS, CUTS };

static struct rig_scratch workspace;
static const int64_t parts[PARTS] = { 16, 20, 12 };
static const float part_scales[PARTS] = { 0.5f, 0.15625f, 3.0f };
static const float one_scale[PARTS] = { 0.15625f, 0.15625f, 0.15625f };

static const struct rig_layer *layer_of(int recipe, int cut)
{
    return &rig_shared.layer[recipe * CUTS + cut];
}

static int open_all(void **state)
{
    (void)state;
    static const enum rig_recipe recipes[RECIPES] = { RIG_ROWWISE, RIG_CURRENT, RIG_BLOCK };
    struct rig_spec specs[RECIPES * CUTS];
    for (int i = 0; i < RECIPES * CUTS; i++) {
        specs[i] = (struct rig_spec){ .out_features = i % CUTS == BY_ROWS ? N / RANKS : N,
                                      .in_features = i % CUTS == BY_COLS ? K / RANKS : K,
                                      .recipe = recipes[i / CUTS],
                                      .bf16 = i / CUTS == BF16,
                                      .e4m3 = i / CUTS == CURRENT,
                                      .power_of_two = i / CUTS != BF16,
                                      .output = FP8_DTYPE_FP32,
                                      .grad_input = FP8_DTYPE_FP32 };
    }
    rig_layers_open(&rig_shared, specs, RECIPES * CUTS);
    rig_workspace_make(&workspace, &rig_shared, M, 0xFF);
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    rig_scratch_free(&workspace);
    rig_layers_close(&rig_shared);
    return 0;
}

/* ---- a weight and its shards ---- */

struct shard {
    const struct rig_layer *layer;
    int64_t rows[PARTS]; /* of each part */
    int64_t from[N];     /* the whole weight's row of each of its own */
    int64_t n, k, first_col;
    struct rig_block codes; /* [n][k] */
    struct rig_operand weight;
};

static uint8_t code_at(int64_t i, int64_t k)
{
    return fp8_encode_e4m3((float)((int)(rig_hash(77, (uint64_t)(i * K + k)) % 9) - 4), 1.0f);
}

static void make_shard(struct shard *s, int recipe, int cut, int rank)
{
    memset(s, 0, sizeof *s);
    s->layer = layer_of(recipe, cut);
    s->k = s->layer->info.in_features;
    s->first_col = cut == BY_COLS ? rank * s->k : 0;
    int64_t first = 0;
    for (int part = 0; part < PARTS; part++) {
        s->rows[part] = cut == BY_ROWS ? parts[part] / RANKS : parts[part];
        int64_t begin = first + (cut == BY_ROWS ? rank * s->rows[part] : 0);
        for (int64_t i = 0; i < s->rows[part]; i++)
            s->from[s->n++] = begin + i;
        first += parts[part];
    }
    assert_int_equal(s->n, s->layer->info.out_features);
    rig_block_make(&s->codes, (size_t)(s->n * s->k), 0, 0xFF);
    for (int64_t i = 0; i < s->n; i++) {
        for (int64_t k = 0; k < s->k; k++)
            s->codes.image[i * s->k + k] = code_at(s->from[i], s->first_col + k);
    }
    rig_block_push(&s->codes);
    rig_operand_make(&s->weight, rig_bytes(s->layer, M, FP8_BYTES_WEIGHT), 0x7E);
    rig_block_push(&s->weight.block);
}

static void drop_shard(struct shard *s)
{
    rig_operand_free(&s->weight);
    rig_block_free(&s->codes);
}

static fp8_status import(struct shard *s, int32_t count, const float *scales, const int64_t *rows)
{
    const fp8_tensor q = { s->codes.device, s->n, s->k, s->k, FP8_DTYPE_E4M3, 0 };
    fp8_import_args args = FP8_IMPORT_ARGS_INIT;
    args.count = count;
    args.q = &q;
    args.scale_inv = scales;
    args.rows = rows;
    args.version = 5;
    args.weight = &s->weight.op;
    args.call.stream = rig.stream;
    return fp8_import(s->layer->handle, &args);
}

/* Every element is its code times the scale of its part; the pads of the row copy are zero. */
static void check_weight(struct shard *s, const float *scales)
{
    struct rig_tensor target;
    fp8_operand_view view;
    rig_tensor_make(&target, "target", FP8_DTYPE_FP32, s->n, s->k, 0, 0, 0xFF);
    rig_tensor_push(&target);
    fp8_dequantize_args args = FP8_DEQUANTIZE_ARGS_INIT;
    args.operand = &s->weight.op;
    args.target = &target.t;
    args.call.stream = rig.stream;
    RIG_OK(fp8_dequantize(s->layer->handle, &args));
    rig_tensor_pull(&target);
    for (int64_t i = 0, part = 0, end = s->rows[0]; i < s->n; i++) {
        if (i == end)
            end += s->rows[++part];
        for (int64_t k = 0; k < s->k; k++)
            assert_true(rig_get(&target, i, k) ==
                        fp8_decode_e4m3(s->codes.image[i * s->k + k]) * scales[part]);
    }
    RIG_OK(fp8_operand_parts(&s->weight.op, &view));
    rig_block_pull(&s->weight.block, "weight");
    const unsigned char *row =
        s->weight.block.image + ((const unsigned char *)view.row - s->weight.block.device);
    for (int64_t i = 0; i < (s->n + 15) / 16 * 16; i++, row += view.row_ld) {
        for (int64_t k = i < s->n ? s->k : 0; k < view.row_ld; k++)
            assert_int_equal(row[k], 0);
    }
    rig_tensor_free(&target);
}

/* ---- products ---- */

/* cols columns from first on of a matrix of whole numbers up to `most`, the same for all ranks. */
static void make_numbers(struct rig_tensor *tensor, const int64_t *columns, int64_t cols, int most)
{
    rig_tensor_make(tensor, "numbers", FP8_DTYPE_BF16, M, cols, 0, 0, 0xFF);
    for (int64_t i = 0; i < M; i++) {
        for (int64_t j = 0; j < cols; j++) {
            uint64_t bits = rig_hash((uint64_t)most, (uint64_t)(i * 1000 + columns[j]));
            rig_set(tensor, i, j, (float)((int)(bits % (uint64_t)(2 * most + 1)) - most));
        }
    }
    rig_tensor_push(tensor);
}

static void forward(const struct shard *s, struct rig_tensor *y)
{
    struct rig_tensor x;
    int64_t columns[K];
    for (int64_t k = 0; k < s->k; k++)
        columns[k] = s->first_col + k;
    make_numbers(&x, columns, s->k, 8);
    rig_tensor_make(y, "y", FP8_DTYPE_FP32, M, s->n, 0, 0, 0xFF);
    rig_tensor_push(y);
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    args.x = &x.t;
    args.weight = &s->weight.op;
    args.y = &y->t;
    args.call = rig_call(&workspace);
    RIG_OK(fp8_layer_fprop(s->layer->handle, &args));
    rig_tensor_pull(y);
    rig_tensor_free(&x);
}

static void backward(const struct shard *s, struct rig_tensor *dx)
{
    struct rig_tensor dy;
    struct rig_operand grad;
    make_numbers(&dy, s->from, s->n, 2);
    rig_operand_make(&grad, rig_bytes(s->layer, M, FP8_BYTES_GRAD), 0x7E);
    rig_block_push(&grad.block);
    rig_tensor_make(dx, "dx", FP8_DTYPE_FP32, M, s->k, 0, 0, 0xFF);
    rig_tensor_push(dx);
    fp8_backward_args args = FP8_BACKWARD_ARGS_INIT;
    args.dy = &dy.t;
    args.weight = &s->weight.op;
    args.grad = &grad.op;
    args.dx = &dx->t;
    args.stale_ok = 1;
    args.call = rig_call(&workspace);
    RIG_OK(fp8_layer_backward(s->layer->handle, &args));
    rig_tensor_pull(dx);
    rig_operand_free(&grad);
    rig_tensor_free(&dy);
}

/* What the products of the whole weight are, by whole numbers. */
static void check_forward(const struct rig_tensor *y, const float *scales)
{
    for (int64_t i = 0; i < M; i++) {
        for (int64_t j = 0; j < N; j++) {
            float sum = 0;
            for (int64_t k = 0; k < K; k++)
                sum += (float)((int)(rig_hash(8, (uint64_t)(i * 1000 + k)) % 17) - 8) *
                       fp8_decode_e4m3(code_at(j, k));
            int part = j < parts[0] ? 0 : j < parts[0] + parts[1] ? 1 : 2;
            assert_true(rig_get(y, i, j) == sum * scales[part]);
        }
    }
}

/* Sums over the ranks, as an all-reduce gives them. */
static void add(struct rig_tensor *sum, const struct rig_tensor *part)
{
    for (int64_t i = 0; i < sum->t.rows; i++) {
        for (int64_t j = 0; j < sum->t.cols; j++)
            rig_set(sum, i, j, rig_get(sum, i, j) + rig_get(part, i, j));
    }
}

static void same_bits(const struct rig_tensor *a, int64_t a_col, const struct rig_tensor *b,
                      int64_t b_col)
{
    for (int64_t i = 0; i < M; i++)
        assert_int_equal(rig_bits(a, i, a_col), rig_bits(b, i, b_col));
}

/* count: 1 scale or PARTS of them. */
static void check_ranks(int recipe, int32_t count, const float *scales)
{
    struct shard whole, shard[RANKS];
    struct rig_tensor y, part[RANKS];
    make_shard(&whole, recipe, WHOLE, 0);
    RIG_OK(import(&whole, count, scales, count > 1 ? whole.rows : NULL));
    assert_int_equal(whole.weight.op.version, 5);
    assert_int_equal(whole.weight.op.copies, FP8_COPY_ROW);
    check_weight(&whole, scales);
    forward(&whole, &y);
    check_forward(&y, scales);
    for (int cut = BY_ROWS; cut <= BY_COLS; cut++) {
        for (int rank = 0; rank < RANKS; rank++) {
            make_shard(&shard[rank], recipe, cut, rank);
            RIG_OK(import(&shard[rank], count, scales, count > 1 ? shard[rank].rows : NULL));
            check_weight(&shard[rank], scales);
            forward(&shard[rank], &part[rank]);
            for (int64_t j = 0; cut == BY_ROWS && j < shard[rank].n; j++)
                same_bits(&part[rank], j, &y, shard[rank].from[j]);
        }
        add(&part[0], &part[1]);
        for (int64_t j = 0; cut == BY_COLS && j < N; j++)
            same_bits(&part[0], j, &y, j);
        for (int rank = 0; rank < RANKS; rank++) {
            rig_tensor_free(&part[rank]);
            drop_shard(&shard[rank]);
        }
    }
    rig_tensor_free(&y);
    drop_shard(&whole);
}

static void a_fused_weight_with_one_scale(void **state)
{
    (void)state;
    check_ranks(ROWWISE, 1, one_scale);
    check_ranks(CURRENT, 1, one_scale);
}

static void a_fused_weight_with_a_scale_a_part(void **state)
{
    (void)state;
    check_ranks(ROWWISE, PARTS, part_scales);
}

static fp8_status transpose(struct shard *s)
{
    fp8_transpose_args args = FP8_TRANSPOSE_ARGS_INIT;
    args.operand = &s->weight.op;
    args.call.stream = rig.stream;
    return fp8_transpose(s->layer->handle, &args);
}

/* The input gradient of a column-parallel layer is summed over the ranks. */
static void gradients_of_a_weight_with_one_scale(void **state)
{
    (void)state;
    struct shard whole, shard[RANKS];
    struct rig_tensor dx, part[RANKS];
    make_shard(&whole, CURRENT, WHOLE, 0);
    RIG_OK(import(&whole, 1, one_scale, NULL));
    RIG_OK(transpose(&whole));
    assert_int_equal(whole.weight.op.copies, FP8_COPY_BOTH);
    backward(&whole, &dx);
    for (int rank = 0; rank < RANKS; rank++) {
        make_shard(&shard[rank], CURRENT, BY_ROWS, rank);
        RIG_OK(import(&shard[rank], 1, one_scale, NULL));
        RIG_OK(transpose(&shard[rank]));
        backward(&shard[rank], &part[rank]);
    }
    add(&part[0], &part[1]);
    for (int64_t k = 0; k < K; k++)
        same_bits(&part[0], k, &dx, k);
    for (int rank = 0; rank < RANKS; rank++) {
        rig_tensor_free(&part[rank]);
        drop_shard(&shard[rank]);
    }
    make_shard(&shard[0], ROWWISE, BY_ROWS, 0); /* of several scales there is no transposed copy */
    RIG_OK(import(&shard[0], PARTS, part_scales, shard[0].rows));
    RIG_REFUSED(FP8_ERR_UNSUPPORTED, transpose(&shard[0]));
    drop_shard(&shard[0]);
    rig_tensor_free(&dx);
    drop_shard(&whole);
}

static void a_missing_scale_is_an_error(void **state)
{
    (void)state;
    static const fp8_status wrong_recipe = FP8_ERR_UNSUPPORTED;
    float bad[PARTS] = { 0.5f, 0.0f, 1.0f };
    struct shard s;
    for (int cut = WHOLE; cut <= BY_ROWS; cut++) {
        make_shard(&s, ROWWISE, cut, 1);
        bad[1] = 0.0f;
        RIG_REFUSED(FP8_ERR_SHAPE, import(&s, 2, part_scales, s.rows));
        rig_expect_sentence("a scale is missing");
        RIG_REFUSED(FP8_ERR_ARGUMENT, import(&s, PARTS, bad, s.rows));
        rig_expect_sentence("scale_inv[1] is 0");
        bad[1] = NAN;
        RIG_REFUSED(FP8_ERR_ARGUMENT, import(&s, PARTS, bad, s.rows));
        RIG_REFUSED(FP8_ERR_ARGUMENT, import(&s, 0, bad, s.rows));
        RIG_REFUSED(FP8_ERR_ARGUMENT, import(&s, PARTS, part_scales, NULL));
        drop_shard(&s);
    }
    static const struct {
        int recipe;
        int32_t count;
    } refused[] = { { CURRENT, PARTS }, { BLOCK, 1 } };
    for (int i = 0; i < 2; i++) {
        make_shard(&s, refused[i].recipe, WHOLE, 0);
        RIG_REFUSED(wrong_recipe,
                    import(&s, refused[i].count, part_scales, i == 0 ? s.rows : NULL));
        drop_shard(&s);
    }
    make_shard(&s, BF16, WHOLE, 0);
    RIG_REFUSED(wrong_recipe, import(&s, 1, part_scales, NULL));
    drop_shard(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_fused_weight_with_one_scale, open_all),
        cmocka_unit_test(a_fused_weight_with_a_scale_a_part),
        cmocka_unit_test(gradients_of_a_weight_with_one_scale),
        cmocka_unit_test_teardown(a_missing_scale_is_an_error, close_all),
    };
    return RIG_RUN(tests);
}
