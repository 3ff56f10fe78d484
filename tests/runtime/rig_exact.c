/*
 * rig_exact.c - see rig_exact.h.
 */
#include "tests/runtime/rig_exact.h"

#include <jansson.h>

#include "gen/fp8gen.h"
#include "runtime/fp8_format.h"

struct configuration exact_configurations[EXACT_CONFIGURATIONS];
int exact_configuration_count;

/* Whether `list`, names with commas between, has the name. */
static bool is_listed(const char *list, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = list; (at = strstr(at, name)) != NULL; at++) {
        if ((at == list || at[-1] == ',') && (at[length] == ',' || at[length] == 0))
            return true;
    }
    return false;
}

int exact_read_configurations(void **state)
{
    (void)state;
    fp8gen *gen;
    const char *text;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(fp8gen_gemm_configs(gen, &text), FP8GEN_OK);
    json_t *list = json_loads(text, 0, NULL);
    fp8gen_close(gen);
    const char *wanted =
        getenv("FP8_TEST_CONFIGURATIONS"); /* names, to run some in a process each */
    size_t i;
    json_t *record;
    exact_configuration_count = 0;
    json_array_foreach(list, i, record)
    {
        const char *name = json_string_value(json_object_get(record, "name"));
        if (wanted && !is_listed(wanted, name))
            continue;
        assert_in_range(exact_configuration_count, 0, EXACT_CONFIGURATIONS - 1);
        struct configuration *c = &exact_configurations[exact_configuration_count++];
        snprintf(c->name, sizeof c->name, "%s", name);
        c->fast = json_integer_value(json_object_get(record, "partials")) == 0;
    }
    json_decref(list);
    assert_int_not_equal(exact_configuration_count, 0);
    return 0;
}

void exact_open(const struct configuration *c, struct rig_layers *layers,
                const struct rig_spec *specs, int count)
{
    const char *forced = rig.gemm;
    rig.gemm = c->name;
    rig_layers_open(layers, specs, count);
    rig.gemm = forced;
}

/* ---- exact data ---- */

/* -1, 0 or 1, and 7 first: rows of a matrix are a prefix of those of a larger one with the same
 * scale. */
static int8_t exact_value(uint64_t seed, int64_t i, int64_t j)
{
    if (i == 0 && j == 0)
        return 7;
    return (int8_t)(rig_hash(seed, (uint64_t)i << 32 | (uint64_t)j) % 3) - 1;
}

void exact_make(struct exact *e, int64_t rows, int64_t cols, uint64_t seed)
{
    size_t count = (size_t)(rows * cols);
    uint16_t *halves = malloc(count * sizeof *halves);
    *e = (struct exact){ rows, cols, malloc(count), NULL };
    assert_true(halves != NULL && e->values != NULL);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < cols; j++) {
            e->values[i * cols + j] = exact_value(seed, i, j);
            halves[i * cols + j] = fp8_float_to_bf16((float)e->values[i * cols + j]);
        }
    }
    RIG_OK(fp8_memory_alloc(rig.context, count * sizeof *halves, &e->device));
    RIG_OK(fp8_memory_copy(rig.context, e->device, halves, count * sizeof *halves, rig.stream));
    RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
    free(halves);
}

void exact_free(struct exact *e)
{
    fp8_memory_free(rig.context, e->device);
    free(e->values);
}

static fp8_tensor exact_tensor(const struct exact *e, int64_t rows)
{
    return (fp8_tensor){ e->device, rows, e->cols, e->cols, FP8_DTYPE_BF16, 0 };
}

/* ---- memory that is used again and again ---- */

void exact_need(struct buffer *b, size_t bytes)
{
    if (bytes <= b->bytes)
        return;
    fp8_memory_free(rig.context, b->device);
    free(b->host);
    b->host = malloc(bytes);
    assert_non_null(b->host);
    RIG_OK(fp8_memory_alloc(rig.context, bytes, &b->device));
    b->bytes = bytes;
}

void exact_release(struct buffer *b)
{
    fp8_memory_free(rig.context, b->device);
    free(b->host);
    *b = (struct buffer){ NULL, NULL, 0 };
}

struct buffer exact_output, exact_workspace, exact_operands[3];

int exact_release_all(void **state)
{
    (void)state;
    exact_release(&exact_output);
    exact_release(&exact_workspace);
    for (int i = 0; i < 3; i++)
        exact_release(&exact_operands[i]);
    return 0;
}

/* ---- calls ---- */

fp8_call exact_call(const struct rig_layer *layer, int64_t tokens, struct buffer *memory)
{
    fp8_call call = FP8_CALL_INIT;
    call.workspace_bytes = rig_bytes(layer, tokens, FP8_BYTES_WORKSPACE);
    exact_need(memory, call.workspace_bytes + 1);
    call.workspace = memory->device;
    call.stream = rig.stream;
    return call;
}

void exact_quantize(const struct rig_layer *layer, fp8_role role, const struct exact *source,
                    int64_t rows, struct buffer *memory, fp8_operand *operand)
{
    static const fp8_bytes bytes[] = {
        [FP8_ROLE_X] = FP8_BYTES_X, [FP8_ROLE_W] = FP8_BYTES_WEIGHT, [FP8_ROLE_DY] = FP8_BYTES_GRAD
    };
    *operand = (fp8_operand)FP8_OPERAND_INIT;
    operand->bytes = rig_bytes(layer, role == FP8_ROLE_W ? 0 : rows, bytes[role]);
    exact_need(memory, operand->bytes);
    operand->data = memory->device;
    const fp8_tensor tensor = exact_tensor(source, rows);
    fp8_quantize_args args = FP8_QUANTIZE_ARGS_INIT;
    args.role = role;
    args.copies = FP8_COPY_BOTH;
    args.source = &tensor;
    args.operand = operand;
    args.call = exact_call(layer, role == FP8_ROLE_W ? 0 : rows, &exact_workspace);
    RIG_OK(fp8_quantize(layer->handle, &args));
    RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
}

/* ---- references: sums of integers ---- */

int32_t exact_dot(const int8_t *a, int64_t a_step, const int8_t *b, int64_t b_step, int64_t depth)
{
    int32_t sum = 0;
    for (int64_t k = 0; k < depth; k++)
        sum += a[k * a_step] * b[k * b_step];
    return sum;
}

/* sums[i][j] += a[k][i] b[k][j] for the rows [first, end) of both. */
void exact_add_rows(int32_t *sums, const struct exact *a, const struct exact *b, int64_t first,
                    int64_t end)
{
    for (int64_t k = first; k < end; k++) {
        const int8_t *row = b->values + k * b->cols;
        for (int64_t i = 0; i < a->cols; i++) {
            int32_t factor = a->values[k * a->cols + i];
            if (factor == 0)
                continue;
            for (int64_t j = 0; j < b->cols; j++)
                sums[i * b->cols + j] += factor * row[j];
        }
    }
}
