/*
 * buf.c - memory and text of a session: heap, arena, string buffer, hash.
 *
 * All heap memory of libfp8gen's own C code, and that of the Lua state, comes from gen_realloc. A
 * test can make the n-th request of its thread fail; the counter is thread-local, so that compile
 * threads and other tests are not disturbed and no lock is needed. A failure is not reported
 * here: callers see NULL or buf.failed, and the session says "out of memory" once.
 */
#define XXH_INLINE_ALL
#include "gen/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* ---- heap ------------------------------------------------------------------------------------ */

static _Thread_local int64_t alloc_count;
static _Thread_local int64_t alloc_fail_at;
static _Thread_local bool alloc_fail_on;

void gen_alloc_fail(int64_t nth, bool on)
{
    alloc_fail_at = nth > 0 ? alloc_count + nth : 0;
    alloc_fail_on = on;
}

int64_t gen_alloc_count(void)
{
    return alloc_count;
}

void *gen_realloc(void *memory, size_t size)
{
    alloc_count++;
    if (alloc_fail_at != 0 &&
        (alloc_count == alloc_fail_at || (alloc_fail_on && alloc_count > alloc_fail_at)))
        return NULL;
    return realloc(memory, size);
}

void gen_free(void *memory)
{
    free(memory);
}

/* ---- arena ----------------------------------------------------------------------------------- */

struct arena_block {
    struct arena_block *next;
    size_t used;
    size_t size;
    _Alignas(16) unsigned char data[];
};

enum { ARENA_BLOCK_BYTES = 16 * 1024 };

void *arena_alloc(struct arena *arena, size_t size)
{
    if (size > SIZE_MAX / 2)
        return NULL;
    size_t need = (size + 15) & ~(size_t)15;
    struct arena_block *block = arena->first;
    if (block == NULL || block->size - block->used < need) {
        size_t bytes = need > ARENA_BLOCK_BYTES ? need : ARENA_BLOCK_BYTES;
        struct arena_block *fresh = gen_realloc(NULL, sizeof(*fresh) + bytes);
        if (fresh == NULL)
            return NULL;
        fresh->used = 0;
        fresh->size = bytes;
        fresh->next = block;
        /* A large piece must not hide the room that is left in the current block. */
        if (block != NULL && need > ARENA_BLOCK_BYTES) {
            fresh->next = block->next;
            block->next = fresh;
        } else {
            arena->first = fresh;
        }
        block = fresh;
    }
    void *memory = block->data + block->used;
    block->used += need;
    return memset(memory, 0, need);
}

char *arena_copy(struct arena *arena, const void *data, size_t size)
{
    char *copy = size < SIZE_MAX ? arena_alloc(arena, size + 1) : NULL;
    if (copy != NULL && size > 0)
        memcpy(copy, data, size);
    return copy;
}

char *arena_printf(struct arena *arena, const char *format, ...)
{
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int length = vsnprintf(NULL, 0, format, args);
    char *text = length < 0 ? NULL : arena_alloc(arena, (size_t)length + 1);
    if (text != NULL)
        vsnprintf(text, (size_t)length + 1, format, again);
    va_end(again);
    va_end(args);
    return text;
}

void arena_free(struct arena *arena)
{
    struct arena_block *block = arena->first;
    while (block != NULL) {
        struct arena_block *next = block->next;
        gen_free(block);
        block = next;
    }
    arena->first = NULL;
}

/* ---- string buffer --------------------------------------------------------------------------- */

/* Makes room for `more` bytes and a NUL. */
static bool buf_reserve(struct buf *buf, size_t more)
{
    if (buf->failed)
        return false;
    if (more < buf->capacity && buf->size < buf->capacity - more)
        return true;
    size_t capacity = buf->capacity < 256 ? 256 : buf->capacity;
    while (capacity <= SIZE_MAX / 2 && capacity - buf->size <= more)
        capacity *= 2;
    char *data = capacity - buf->size > more ? gen_realloc(buf->data, capacity) : NULL;
    if (data == NULL) {
        buf->failed = true;
        return false;
    }
    buf->data = data;
    buf->capacity = capacity;
    return true;
}

void buf_put(struct buf *buf, const void *data, size_t size)
{
    if (size == 0 || !buf_reserve(buf, size))
        return;
    memcpy(buf->data + buf->size, data, size);
    buf->size += size;
    buf->data[buf->size] = '\0';
}

void buf_puts(struct buf *buf, const char *text)
{
    buf_put(buf, text, strlen(text));
}

void buf_vprintf(struct buf *buf, const char *format, va_list args)
{
    va_list again;
    va_copy(again, args);
    int length = vsnprintf(NULL, 0, format, args);
    if (length < 0)
        buf->failed = true;
    else if (buf_reserve(buf, (size_t)length)) {
        vsnprintf(buf->data + buf->size, (size_t)length + 1, format, again);
        buf->size += (size_t)length;
    }
    va_end(again);
}

void buf_printf(struct buf *buf, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    buf_vprintf(buf, format, args);
    va_end(args);
}

void buf_put_clean(struct buf *buf, const char *text, size_t size)
{
    size_t i = 0;
    while (i < size) {
        size_t length = gen_utf8_length(text + i, size - i);
        unsigned char byte = (unsigned char)text[i];
        /* C1 controls (0xC2 0x80..0x9F) steer terminals too. */
        bool control = byte < 0x20 || byte == 0x7f ||
                       (length == 2 && byte == 0xc2 && (unsigned char)text[i + 1] < 0xa0);
        if (length == 0 || control) {
            buf_printf(buf, "\\x%02x", byte);
            length = length == 0 ? 1 : length;
            if (length == 2)
                buf_printf(buf, "\\x%02x", (unsigned char)text[i + 1]);
        } else {
            buf_put(buf, text + i, length);
        }
        i += length;
    }
}

void buf_free(struct buf *buf)
{
    gen_free(buf->data);
    *buf = (struct buf){ 0 };
}

/* ---- UTF-8 and hash -------------------------------------------------------------------------- */

size_t gen_utf8_length(const char *text, size_t size)
{
    const unsigned char *s = (const unsigned char *)text;
    if (size == 0)
        return 0;
    if (s[0] < 0x80)
        return 1;
    size_t length = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4 || length > size)
        return 0;
    for (size_t i = 1; i < length; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    bool too_long = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90);
    bool surrogate = s[0] == 0xed && s[1] >= 0xa0;
    bool beyond = s[0] == 0xf4 && s[1] >= 0x90;
    return too_long || surrogate || beyond ? 0 : length;
}

void gen_hash(const void *data, size_t size, char hex[33])
{
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, size));
    for (size_t i = 0; i < sizeof(canonical.digest); i++)
        snprintf(hex + 2 * i, 3, "%02x", canonical.digest[i]);
}
