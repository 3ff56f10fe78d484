/*
 * manifest.c - manifest.json as plain structs: version, digest, the lists; kernels are read in
 * manifest_kernel.c, layers in manifest_layer.c.
 *
 * In: the text of a manifest. Out: structs in the bundle's arena, in which every name has been
 * resolved and every number checked; JSON is not looked at again. Strict: a field that this version
 * does not know is refused, because leaving it out could change what a pass computes. The digest is
 * taken over the compact form, so it covers every value, whatever the white space.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "runtime/json_read.h"

static fp8_status read_archs(struct fp8_reader *reader, const json_t *root,
                             struct fp8_manifest *manifest)
{
    const json_t *archs;
    FP8_TRY(fp8_read_array(reader, root, "archs", FP8_MAX_ARCHS, &archs));
    for (size_t i = 0; i < json_array_size(archs); i++) {
        const char *text = json_string_value(json_array_get(archs, i));
        if (!text)
            return fp8_read_bad(reader, "archs[%zu] is not a string", i);
        manifest->archs[i] = fp8_arena_copy(reader->arena, text);
        if (!manifest->archs[i])
            return fp8_fail_memory("a bundle", strlen(text));
        manifest->arch_count++;
    }
    return FP8_OK;
}

static fp8_status read_kernels(struct fp8_reader *reader, const json_t *root,
                               struct fp8_manifest *manifest)
{
    const json_t *kernels;
    FP8_TRY(fp8_read_array(reader, root, "kernels", 4096, &kernels));
    size_t count = json_array_size(kernels);
    FP8_TRY(
        fp8_read_allocate(reader, count, sizeof *manifest->kernels, (void **)&manifest->kernels));
    for (size_t i = 0; i < count; i++) {
        struct fp8_kernel *kernel = &manifest->kernels[i];
        size_t mark = fp8_read_enter(reader, "kernels[%zu]", i);
        FP8_TRY(fp8_manifest_read_kernel(reader, manifest, json_array_get(kernels, i), kernel));
        if (fp8_manifest_kernel(manifest, kernel->name))
            return fp8_read_bad(reader, "the name '%.100s' occurs twice", kernel->name);
        manifest->kernel_count++;
        fp8_read_leave(reader, mark);
    }
    return FP8_OK;
}

static fp8_status read_layers(struct fp8_reader *reader, const json_t *root,
                              struct fp8_manifest *manifest)
{
    const json_t *layers;
    FP8_TRY(fp8_read_array(reader, root, "layers", 4096, &layers));
    size_t count = json_array_size(layers);
    if (count == 0)
        return fp8_read_bad(reader, "'layers' is empty");
    FP8_TRY(fp8_read_allocate(reader, count, sizeof *manifest->layers, (void **)&manifest->layers));
    for (size_t i = 0; i < count; i++) {
        struct fp8_layer_plan *plan = &manifest->layers[i];
        size_t mark = fp8_read_enter(reader, "layers[%zu]", i);
        FP8_TRY(fp8_manifest_layer(reader, manifest, json_array_get(layers, i), plan));
        for (size_t j = 0; j < i; j++) {
            if (strcmp(manifest->layers[j].name, plan->name) == 0)
                return fp8_read_bad(reader, "the name '%.100s' occurs twice", plan->name);
        }
        manifest->layer_count++;
        fp8_read_leave(reader, mark);
    }
    return FP8_OK;
}

void fp8_hash_text(const void *data, size_t size, char text[33])
{
    XXH128_hash_t hash = XXH3_128bits(data, size);
    snprintf(text, 33, "%016" PRIx64 "%016" PRIx64, hash.high64, hash.low64);
}

/* Without the white space between its parts; returns the length. */
static size_t squeeze(const char *text, size_t length, char *out)
{
    bool quoted = false;
    size_t at = 0;
    for (size_t i = 0; i < length; i++) {
        const char c = text[i];
        if (!quoted && (c == ' ' || c == '\n' || c == '\r' || c == '\t'))
            continue;
        out[at++] = c;
        if (quoted && c == '\\' && i + 1 < length)
            out[at++] = text[++i];
        else if (c == '"')
            quoted = !quoted;
    }
    return at;
}

/* Whether the digest is that of the text as it stands: so the generator writes it, and to make the
 * compact form anew takes as long as half of the parsing. */
static fp8_status compare_text(const char *text, size_t length, const char *digest, bool *same)
{
    char member[64], found[33];
    int size = snprintf(member, sizeof member, "\"digest\":\"%.32s\",", digest);
    char *compact = fp8_allocate(length + 1);
    if (!compact)
        return fp8_fail_memory("the digest of a manifest", length + 1);
    size_t rest = squeeze(text, length, compact);
    char *at = memmem(compact, rest, member, (size_t)size);
    if (at) {
        rest -= (size_t)size;
        memmove(at, at + size, rest - (size_t)(at - compact));
        fp8_hash_text(compact, rest, found);
    }
    fp8_release(compact);
    *same = at && strcmp(found, digest) == 0;
    return FP8_OK;
}

static fp8_status check_digest(const struct fp8_reader *reader, const json_t *root,
                               const char *manifest, size_t length)
{
    const char *digest = json_string_value(json_object_get(root, "digest"));
    if (!digest)
        return fp8_read_bad(reader, "'digest' is missing");
    bool same = false;
    FP8_TRY(compare_text(manifest, length, digest, &same));
    if (same)
        return FP8_OK;
    json_t *rest = json_copy((json_t *)root);
    if (!rest)
        return fp8_fail_memory("the digest of a manifest", 0);
    char *compact = NULL;
    if (json_object_del(rest, "digest") == 0)
        compact = json_dumps(rest, JSON_COMPACT | JSON_SORT_KEYS);
    json_decref(rest);
    if (!compact)
        return fp8_fail_memory("the digest of a manifest", 0);
    char text[33];
    fp8_hash_text(compact, strlen(compact), text);
    free(compact);
    if (strcmp(text, digest) != 0)
        return fp8_read_bad(reader, "the manifest was altered: its digest is %s, it says %.40s",
                            text, digest);
    return FP8_OK;
}

static fp8_status read_header(struct fp8_reader *reader, const json_t *root, const char *whole,
                              size_t length, struct fp8_manifest *manifest)
{
    static const char *const keys[] = { "format",    "format_version", "generator", "model",
                                        "spec_hash", "tuning_hash",    "mesh",      "rank",
                                        "archs",     "kernels",        "layers",    "digest",
                                        "nvrtc",     "collectives",    "shard",     NULL };
    if (!json_is_object(root))
        return fp8_read_bad(reader, "this is no JSON object");
    const char *format = json_string_value(json_object_get(root, "format"));
    if (!format || strcmp(format, FP8_BUNDLE_FORMAT) != 0)
        return fp8_read_bad(reader, "'format' is not \"" FP8_BUNDLE_FORMAT "\"");
    const json_t *version = json_object_get(root, "format_version");
    if (!json_is_integer(version))
        return fp8_read_bad(reader, "'format_version' is missing");
    if (json_integer_value(version) != FP8_BUNDLE_FORMAT_VERSION)
        return fp8_read_bad(
            reader, "the bundle has format version %lld, this libfp8 (%s) reads version %d",
            (long long)json_integer_value(version), fp8_version(), FP8_BUNDLE_FORMAT_VERSION);
    FP8_TRY(check_digest(reader, root, whole, length));
    FP8_TRY(fp8_read_keys(reader, root, keys));
    const char *text;
    FP8_TRY(fp8_read_string(reader, root, "generator", &text));
    FP8_TRY(fp8_read_string(reader, root, "model", &text));
    FP8_TRY(fp8_read_string(reader, root, "spec_hash", &text));
    if (!json_is_null(json_object_get(root, "tuning_hash")))
        FP8_TRY(fp8_read_string(reader, root, "tuning_hash", &text));
    if (json_object_get(root, "nvrtc"))
        FP8_TRY(fp8_read_string(reader, root, "nvrtc", &manifest->nvrtc));
    return fp8_manifest_mesh(reader, root, manifest);
}

fp8_status fp8_manifest_parse(const char *path, const char *text, size_t length,
                              struct fp8_arena *arena, struct fp8_manifest *manifest)
{
    struct fp8_reader reader = { .path = path, .arena = arena };
    json_error_t error;
    memset(manifest, 0, sizeof *manifest);
    json_t *root = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
    if (!root) {
        if (json_error_code(&error) == json_error_out_of_memory)
            return fp8_fail_memory("reading a manifest", length);
        return fp8_read_bad(&reader, "no valid JSON at line %d, column %d (%s)", error.line,
                            error.column, error.text);
    }
    fp8_status status = read_header(&reader, root, text, length, manifest);
    if (status == FP8_OK)
        status = read_archs(&reader, root, manifest);
    if (status == FP8_OK)
        status = read_kernels(&reader, root, manifest);
    if (status == FP8_OK)
        status = read_layers(&reader, root, manifest);
    json_decref(root);
    return status;
}
