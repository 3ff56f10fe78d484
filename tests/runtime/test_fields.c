/*
 * test_fields.c - every field of a spec, changed once: something that can be seen changes, or it is
 * refused.
 *
 * The table below must name every field that fp8gen_schema lists, so a new field cannot come
 * without an effect.
 */
#include "gen/fp8gen.h"
#include "tests/runtime/rig.h"

#define DIMS "in_features = 64, out_features = 48"

/* Where the change must show. */
enum { INFO, DISPATCH, MANIFEST, ASPECTS };

struct change {
    const char *section, *field;
    const char *model; /* fields of the model */
    const char *layer; /* fields of the layer */
    int aspect;        /* -1: refused */
};

static const struct change changes[] = {
    { "model", "layers", "", DIMS "}, linear \"more\" { in_features = 1, out_features = 1", INFO },
    { "model", "mesh", "mesh = { fsdp = 2 },", DIMS, MANIFEST },
    { "model", "shard", "shard = { reduce = \"sum\" },", DIMS, MANIFEST },
    { "model", "tokens", "tokens = 100,", DIMS, INFO },
    { "model", "max_tokens", "max_tokens = 9000,", DIMS, INFO },
    { "model", "bias", "bias = true,", DIMS, INFO },
    { "model", "recipe", "recipe = recipe.current { format = \"e4m3\" },", DIMS, INFO },
    { "model", "recipe", "recipe = recipe.delayed {},", DIMS, INFO },
    { "model", "recipe", "recipe = recipe.mx {},", DIMS, -1 },
    { "model", "compute", "compute = \"bf16\",", DIMS, INFO },
    { "model", "accumulation", "accumulation = { fprop = \"split\" },", DIMS, MANIFEST },
    { "model", "weight", "weight = \"fp32\",", DIMS, INFO },
    { "model", "output", "output = \"fp32\",", DIMS, INFO },
    { "model", "grad_input", "grad_input = \"fp32\",", DIMS, INFO },
    { "model", "grad_weight", "grad_weight = \"bf16\",", DIMS, INFO },
    { "linear", "in_features", "", "in_features = 65, out_features = 48", INFO },
    { "linear", "out_features", "", "in_features = 64, out_features = 49", INFO },
    { "linear", "tokens", "", DIMS ", tokens = 100", INFO },
    { "linear", "max_tokens", "", DIMS ", max_tokens = 9000", INFO },
    { "linear", "bias", "", DIMS ", bias = true", INFO },
    { "linear", "recipe", "", DIMS ", recipe = recipe.current { format = \"e4m3\" }", INFO },
    { "linear", "compute", "", DIMS ", compute = \"bf16\"", INFO },
    { "linear", "accumulation", "", DIMS ", accumulation = { dgrad = \"fast\" }", MANIFEST },
    { "linear", "weight", "", DIMS ", weight = \"fp32\"", INFO },
    { "linear", "output", "", DIMS ", output = \"fp32\"", INFO },
    { "linear", "output", "", DIMS ", output = \"fp16\"", INFO },
    { "linear", "output", "", DIMS ", output = \"e4m3\"", -1 },
    { "linear", "output", "", DIMS ", output = \"e5m2\"", -1 },
    { "linear", "grad_input", "", DIMS ", grad_input = \"e4m3\"", -1 },
    { "linear", "grad_weight", "", DIMS ", grad_weight = \"e5m2\"", -1 },
    { "linear", "grad_weight", "", DIMS ", grad_weight = \"fp16\"", INFO },
    { "linear", "grad_input", "", DIMS ", grad_input = \"fp32\"", INFO },
    { "linear", "grad_weight", "", DIMS ", grad_weight = \"bf16\"", INFO },
    { "linear", "count", "", DIMS ", count = 3", MANIFEST },
    { "mesh", "tensor", "mesh = { tensor = 2 },", DIMS, -1 },
    { "mesh", "fsdp", "mesh = { fsdp = 4 },", DIMS, MANIFEST },
    { "linear", "gather_group", "", DIMS ", gather_group = \"block\"", MANIFEST },
    { "shard", "backward", "shard = { backward = \"keep\" },", DIMS, MANIFEST },
    { "shard", "reduce", "shard = { reduce = \"sum\" },", DIMS, MANIFEST },
    { "accumulation", "fprop", "", DIMS ", accumulation = { fprop = \"split\" }", MANIFEST },
    { "accumulation", "dgrad", "", DIMS ", accumulation = { dgrad = \"fast\" }", MANIFEST },
    { "accumulation", "wgrad", "", DIMS ", accumulation = { wgrad = \"fast\" }", MANIFEST },
    { "recipe.current", "format", "", DIMS ", recipe = recipe.current { format = \"e4m3\" }",
      INFO },
    { "recipe.current", "format", "", DIMS ", recipe = recipe.current { format = \"e5m2\" }", -1 },
    { "recipe.current", "weight_scale", "mesh = { fsdp = 2 },",
      DIMS ", recipe = recipe.current { weight_scale = \"shard\" }", MANIFEST },
    { "recipe.current", "weight_scale", "",
      DIMS ", recipe = recipe.current { weight_scale = \"shard\" }", -1 },
    { "recipe.current", "power_of_two", "",
      DIMS ", recipe = recipe.current { power_of_two = true }", DISPATCH },
    { "recipe.delayed", "format", "", DIMS ", recipe = recipe.delayed { format = \"e4m3\" }",
      INFO },
    { "recipe.delayed", "history_length", "",
      DIMS ", recipe = recipe.delayed { history_length = 16 }", MANIFEST },
    { "recipe.delayed", "history_length", "",
      DIMS ", recipe = recipe.delayed { history_length = 0 }", -1 },
    { "recipe.delayed", "algo", "", DIMS ", recipe = recipe.delayed { algo = \"most_recent\" }",
      MANIFEST },
    { "recipe.delayed", "margin", "", DIMS ", recipe = recipe.delayed { margin = 1 }", MANIFEST },
    { "recipe.delayed", "margin", "",
      DIMS ", recipe = recipe.delayed { margin = 7, power_of_two = true }", -1 },
    { "recipe.delayed", "calibrate", "", DIMS ", recipe = recipe.delayed { calibrate = true }",
      DISPATCH },
    { "recipe.delayed", "amax_group", "mesh = { fsdp = 2 },",
      DIMS ", recipe = recipe.delayed { amax_group = \"fsdp\" }", MANIFEST },
    { "recipe.delayed", "amax_group", "",
      DIMS ", recipe = recipe.delayed { amax_group = \"fsdp\" }", -1 },
    { "recipe.delayed", "power_of_two", "",
      DIMS ", recipe = recipe.delayed { power_of_two = true }", DISPATCH },
    { "recipe.rowwise", "power_of_two", "",
      DIMS ", recipe = recipe.rowwise { power_of_two = false }", DISPATCH },
    { "recipe.rowwise", "format", "", DIMS ", recipe = recipe.rowwise { format = \"hybrid\" }",
      -1 },
    { "recipe.rowwise_hp_wgrad", "power_of_two", "",
      DIMS ", recipe = recipe.rowwise_hp_wgrad { power_of_two = false }", DISPATCH },
    { "recipe.rowwise_hp_wgrad", "format", "",
      DIMS ", recipe = recipe.rowwise_hp_wgrad { format = \"hybrid\" }", -1 },
    { "recipe.block", "power_of_two", "", DIMS ", recipe = recipe.block { power_of_two = false }",
      DISPATCH },
    { "recipe.block", "format", "", DIMS ", recipe = recipe.block { format = \"hybrid\" }", -1 },
    { "accumulation", "wgrad", "",
      DIMS ", recipe = recipe.block {}, accumulation = { wgrad = \"fast\" }", -1 },
};
enum { CHANGES = sizeof changes / sizeof changes[0] };

static const struct change base = { "", "", "", DIMS, 0 };

/* A field of a recipe is compared with the recipe's defaults. */
static struct change base_of(const struct change *change, char *text, size_t room)
{
    struct change made = base;
    if (strncmp(change->section, "recipe.", 7) == 0) {
        snprintf(text, room, DIMS ", recipe = %s {}", change->section);
        made.layer = text;
    }
    return made;
}

static void write_spec(const struct change *change, char *text, size_t room)
{
    snprintf(text, room, "return model \"m\" { %s layers = { linear \"l\" { %s } } }\n",
             change->model, change->layer);
}

/* ---- what can be seen of a bundle ---- */

struct sight {
    char text[ASPECTS][1 << 18];
};

/* The manifest without the lines that any change of the text changes. */
static void copy_manifest(char *target, size_t room, const char *manifest)
{
    size_t at = 0;
    while (*manifest) {
        const char *end = strchr(manifest, '\n');
        size_t length = end ? (size_t)(end + 1 - manifest) : strlen(manifest);
        bool hash = memmem(manifest, length, "\"spec_hash\"", 11) != NULL ||
                    memmem(manifest, length, "\"digest\"", 8) != NULL;
        if (!hash && at + length < room) {
            memcpy(target + at, manifest, length);
            at += length;
        }
        manifest += length;
    }
    target[at] = 0;
}

static void look_at_layer(fp8_bundle *bundle, struct sight *sight)
{
    fp8_layer *layer = NULL;
    fp8_layer_info info = { .size = sizeof info };
    RIG_OK(fp8_layer_create(bundle, "l", &layer));
    RIG_OK(fp8_layer_describe(layer, &info));
    snprintf(
        sight->text[INFO], sizeof sight->text[INFO],
        "layers %d, %lld x %lld, tokens %lld of %lld, bias %u, %s %s %s %s %s %s, %s %s %s, %s",
        fp8_bundle_layer_count(bundle), (long long)info.out_features, (long long)info.in_features,
        (long long)info.tokens, (long long)info.max_tokens, info.has_bias,
        fp8_dtype_name(info.x_dtype), fp8_dtype_name(info.w_dtype), fp8_dtype_name(info.y_dtype),
        fp8_dtype_name(info.dy_dtype), fp8_dtype_name(info.dx_dtype), fp8_dtype_name(info.dw_dtype),
        fp8_dtype_name(info.x_format), fp8_dtype_name(info.w_format),
        fp8_dtype_name(info.dy_format), info.recipe);
    char *at = sight->text[DISPATCH];
    for (int pass = 0; pass < FP8_PASS_COUNT; pass++) {
        fp8_dispatch dispatch = FP8_DISPATCH_INIT;
        RIG_OK(fp8_layer_dispatch(layer, (fp8_pass)pass, 16, &dispatch));
        at += sprintf(at, "%s: %s %s %s\n", fp8_pass_name((fp8_pass)pass), dispatch.backend,
                      dispatch.kernel, dispatch.dtype);
    }
    fp8_layer_destroy(layer);
}

static void look(const struct change *change, struct sight *sight)
{
    char text[1024], path[256];
    fp8_bundle *bundle = NULL;
    write_spec(change, text, sizeof text);
    rig_bundle_open(text, path, &bundle);
    look_at_layer(bundle, sight);
    copy_manifest(sight->text[MANIFEST], sizeof sight->text[MANIFEST], fp8_bundle_manifest(bundle));
    rig_bundle_drop(path, bundle);
}

static void expect_refusal(const struct change *change)
{
    char text[1024];
    fp8gen *gen = NULL;
    write_spec(change, text, sizeof text);
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(fp8gen_load_text(gen, "test.lua", text, strlen(text)), FP8GEN_ERR_SPEC);
    assert_non_null(strstr(fp8gen_diagnostics(gen), "test.lua:1:"));
    fp8gen_close(gen);
}

static void every_field_has_an_effect(void **state)
{
    (void)state;
    static struct sight plain, changed;
    const char *section = NULL;
    char text[160];
    for (int i = 0; i < CHANGES; i++) {
        if (changes[i].aspect < 0) {
            expect_refusal(&changes[i]);
            continue;
        }
        if (section == NULL || strcmp(section, changes[i].section) != 0) {
            struct change from = base_of(&changes[i], text, sizeof text);
            section = changes[i].section;
            look(&from, &plain);
        }
        look(&changes[i], &changed);
        if (strcmp(plain.text[changes[i].aspect], changed.text[changes[i].aspect]) == 0)
            fail_msg("%s.%s: '%s %s' changes nothing in:\n%s", changes[i].section, changes[i].field,
                     changes[i].model, changes[i].layer, plain.text[changes[i].aspect]);
    }
}

/* Lines of the schema's text: "mesh = { ... }" begins a section, "  tensor  ..." is a field of
 * it. */
static void the_table_names_every_field(void **state)
{
    (void)state;
    fp8gen *gen = NULL;
    const char *schema = NULL;
    char section[64] = "", field[64];
    int fields = 0;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(fp8gen_schema(gen, &schema), FP8GEN_OK);
    for (const char *line = schema; line != NULL && *line; line = strchr(line, '\n')) {
        if (*line == '\n' && *++line == 0)
            break;
        if (*line != ' ') {
            if (*line != '\n')
                sscanf(line, "%63s", section);
            continue;
        }
        if (sscanf(line, " %63s", field) != 1)
            continue;
        bool found = false;
        for (int i = 0; i < CHANGES; i++)
            found = found || (strcmp(changes[i].section, section) == 0 &&
                              strcmp(changes[i].field, field) == 0);
        if (!found)
            fail_msg("the schema has %s.%s, which no row of this test changes", section, field);
        fields++;
    }
    assert_true(fields >= 25);
    fp8gen_close(gen);
}

/* The recipe's fields reach the bytes: format the gradient's, power_of_two the scales. */
static void recipe_fields_change_bytes(void **state)
{
    (void)state;
    static const struct rig_spec specs[] = {
        { .out_features = 40, .in_features = 50 },
        { .out_features = 40, .in_features = 50, .e4m3 = true },
        { .out_features = 40, .in_features = 50, .power_of_two = true },
    };
    struct rig_layers layers;
    unsigned char bytes[3][256 + 48 * 128];
    rig_layers_open(&layers, specs, 3);
    for (int i = 0; i < 3; i++) {
        struct rig_case c;
        rig_case_init(&c, &layers.layer[i], 48, 5);
        rig_case_complete(&c);
        memcpy(bytes[i], c.grad.block.image, sizeof bytes[i]);
        rig_case_free(&c);
    }
    assert_memory_not_equal(bytes[0], bytes[1], sizeof bytes[0]);
    assert_memory_not_equal(bytes[0], bytes[2], sizeof bytes[0]);
    rig_layers_close(&layers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_table_names_every_field),
        cmocka_unit_test(every_field_has_an_effect),
        cmocka_unit_test(recipe_fields_change_bytes),
    };
    return RIG_RUN(tests);
}
