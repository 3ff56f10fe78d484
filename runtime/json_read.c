/*
 * json_read.c - strict getters on a manifest's JSON; see json_read.h.
 */
#include "runtime/json_read.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

fp8_status fp8_read_bad(const struct fp8_reader *reader, const char *format, ...)
{
    char sentence[512];
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof sentence, format, args);
    va_end(args);
    return fp8_fail(FP8_ERR_BUNDLE, "%s: %s%s%s; rebuild the bundle", reader->path, reader->where,
                    reader->length ? ": " : "", sentence);
}

size_t fp8_read_enter(struct fp8_reader *reader, const char *format, ...)
{
    size_t mark = reader->length, room = sizeof reader->where - mark;
    int separator = snprintf(reader->where + mark, room, "%s", mark && *format != '[' ? "." : "");
    size_t at = mark + (separator > 0 && room > 1 ? (size_t)separator : 0);
    va_list args;
    va_start(args, format);
    int length = vsnprintf(reader->where + at, sizeof reader->where - at, format, args);
    va_end(args);
    at += length > 0 ? (size_t)length : 0;
    reader->length = at < sizeof reader->where ? at : sizeof reader->where - 1;
    return mark;
}

void fp8_read_leave(struct fp8_reader *reader, size_t mark)
{
    reader->length = mark;
    reader->where[mark] = '\0';
}

static const char *type_name(const json_t *value)
{
    if (!value)
        return "missing";
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a fraction";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    case JSON_NULL:
        return "null";
    }
    return "unknown";
}

static fp8_status wrong_type(const struct fp8_reader *reader, const char *key, const json_t *value,
                             const char *wanted)
{
    return fp8_read_bad(reader, "'%s' is %s, %s is wanted", key, type_name(value), wanted);
}

fp8_status fp8_read_keys(const struct fp8_reader *reader, const json_t *object,
                         const char *const *keys)
{
    if (!json_is_object(object))
        return fp8_read_bad(reader, "this is %s, an object is wanted", type_name(object));
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value)
    {
        int i = 0;
        while (keys[i] && strcmp(keys[i], key) != 0)
            i++;
        if (!keys[i])
            return fp8_read_bad(reader, "unknown field '%.100s'", key);
    }
    return FP8_OK;
}

fp8_status fp8_read_string(const struct fp8_reader *reader, const json_t *object, const char *key,
                           const char **value)
{
    const json_t *found = json_object_get(object, key);
    if (!json_is_string(found))
        return wrong_type(reader, key, found, "a string");
    *value = fp8_arena_copy(reader->arena, json_string_value(found));
    return *value ? FP8_OK : fp8_fail_memory("a bundle", json_string_length(found));
}

fp8_status fp8_read_integer(const struct fp8_reader *reader, const json_t *object, const char *key,
                            int64_t minimum, int64_t maximum, int64_t *value)
{
    const json_t *found = json_object_get(object, key);
    if (!json_is_integer(found))
        return wrong_type(reader, key, found, "an integer");
    *value = json_integer_value(found);
    if (*value < minimum || *value > maximum)
        return fp8_read_bad(reader, "'%s' is %" PRId64 ", outside %" PRId64 "..%" PRId64, key,
                            *value, minimum, maximum);
    return FP8_OK;
}

fp8_status fp8_read_bool(const struct fp8_reader *reader, const json_t *object, const char *key,
                         bool *value)
{
    const json_t *found = json_object_get(object, key);
    if (!json_is_boolean(found))
        return wrong_type(reader, key, found, "a boolean");
    *value = json_is_true(found);
    return FP8_OK;
}

fp8_status fp8_read_array(const struct fp8_reader *reader, const json_t *object, const char *key,
                          size_t maximum, const json_t **value)
{
    *value = json_object_get(object, key);
    if (!json_is_array(*value))
        return wrong_type(reader, key, *value, "an array");
    if (json_array_size(*value) > maximum)
        return fp8_read_bad(reader, "'%s' has %zu entries, this version takes at most %zu", key,
                            json_array_size(*value), maximum);
    return FP8_OK;
}

fp8_status fp8_read_object(const struct fp8_reader *reader, const json_t *object, const char *key,
                           const json_t **value)
{
    *value = json_object_get(object, key);
    return json_is_object(*value) ? FP8_OK : wrong_type(reader, key, *value, "an object");
}

fp8_status fp8_read_word(const struct fp8_reader *reader, const json_t *object, const char *key,
                         const char *const *words, int count, int *value)
{
    const json_t *found = json_object_get(object, key);
    if (!json_is_string(found))
        return wrong_type(reader, key, found, "a string");
    for (int i = 0; i < count; i++) {
        if (strcmp(words[i], json_string_value(found)) == 0) {
            *value = i;
            return FP8_OK;
        }
    }
    return fp8_read_bad(reader, "'%s' is '%.100s', which this version does not know", key,
                        json_string_value(found));
}

fp8_status fp8_read_dtype(const struct fp8_reader *reader, const json_t *object, const char *key,
                          fp8_dtype *value)
{
    static const char *const words[] = { "none", "e4m3",   "e5m2",  "bf16",
                                         "fp32", "uint32", "uint8", "fp16" };
    int index = 0;
    FP8_TRY(fp8_read_word(reader, object, key, words, 8, &index));
    *value = (fp8_dtype)index;
    return FP8_OK;
}

fp8_status fp8_read_allocate(const struct fp8_reader *reader, size_t count, size_t bytes,
                             void **array)
{
    *array = fp8_arena_allocate(reader->arena, count * bytes);
    return *array ? FP8_OK : fp8_fail_memory("a bundle", count * bytes);
}
