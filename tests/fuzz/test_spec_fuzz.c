/*
 * test_spec_fuzz.c - the corpus of the spec fuzzer and mutations of it, in every test run.
 *
 * The corpus: tests/fuzz/corpus/spec, the shipped specs and the bad specs. Mutations are the same
 * every time (own generator, fixed seed); FP8_FUZZ_SEED and FP8_FUZZ_COUNT choose others. An
 * input that fails is written to fuzz_spec_failure.lua in the build folder, to be shrunk and put
 * into the corpus.
 */
#include "tests/fuzz/spec_target.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <dirent.h>

enum { INPUT_MAX = 1 << 16, CORPUS_MAX = 512, WORDS_MAX = 128 };

struct input {
    uint8_t *data;
    size_t size;
};

static struct input corpus[CORPUS_MAX];
static int corpus_count;
static char *words[WORDS_MAX];
static int word_count;

/* ---- inputs ---------------------------------------------------------------------------------- */

static int is_input(const struct dirent *entry)
{
    size_t length = strlen(entry->d_name);
    return length > 4 && strcmp(entry->d_name + length - 4, ".lua") == 0;
}

static void add_folder(const char *folder)
{
    struct dirent **list = NULL;
    int count = scandir(folder, &list, is_input, alphasort);
    assert_true(count > 0);
    for (int i = 0; i < count; i++) {
        char path[512];
        snprintf(path, sizeof(path), "%s/%s", folder, list[i]->d_name);
        free(list[i]);
        FILE *file = fopen(path, "rb");
        assert_non_null(file);
        assert_true(corpus_count < CORPUS_MAX);
        struct input *input = &corpus[corpus_count++];
        input->data = malloc(INPUT_MAX);
        assert_non_null(input->data);
        input->size = fread(input->data, 1, INPUT_MAX, file);
        fclose(file);
    }
    free(list);
}

/* Words of the dictionary, with its two escapes undone. */
static void read_words(void)
{
    char line[256];
    FILE *file = fopen("tests/fuzz/spec.dict", "r");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file) != NULL && word_count < WORDS_MAX) {
        char *end = strrchr(line, '"');
        if (line[0] != '"' || end == line)
            continue;
        char *to = line;
        for (char *from = line + 1; from < end; from++) {
            if (*from == '\\' && (from[1] == '"' || from[1] == '\\'))
                from++;
            *to++ = *from;
        }
        *to = '\0';
        words[word_count++] = strdup(line);
    }
    fclose(file);
}

static int setup(void **state)
{
    (void)state;
    add_folder("tests/fuzz/corpus/spec");
    add_folder("tests/bad_specs");
    add_folder("specs");
    read_words();
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    while (corpus_count > 0)
        free(corpus[--corpus_count].data);
    while (word_count > 0)
        free(words[--word_count]);
    return 0;
}

static void check_input(const uint8_t *data, size_t size, const char *what)
{
    const char *problem = spec_target(data, size);
    if (problem == NULL)
        return;
    const char *build = getenv("FP8_TEST_BUILD");
    char path[512];
    snprintf(path, sizeof(path), "%s/fuzz_spec_failure.lua", build != NULL ? build : "/tmp");
    FILE *file = fopen(path, "wb");
    if (file != NULL) {
        fwrite(data, 1, size, file);
        fclose(file);
    }
    fail_msg("%s: %s (the input is in %s)", what, problem, path);
}

/* ---- mutation -------------------------------------------------------------------------------- */

static uint64_t random_state;

static uint64_t next_random(void)
{
    random_state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    uint64_t z = random_state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static size_t below(size_t limit)
{
    return limit == 0 ? 0 : (size_t)(next_random() % limit);
}

/* Replaces `cut` bytes at `at` by others. */
static void splice(struct input *input, size_t at, size_t cut, const void *bytes, size_t size)
{
    if (cut > input->size - at)
        cut = input->size - at;
    if (input->size - cut + size > INPUT_MAX)
        return;
    memmove(input->data + at + size, input->data + at + cut, input->size - at - cut);
    memcpy(input->data + at, bytes, size);
    input->size = input->size - cut + size;
}

static void mutate(struct input *input)
{
    static const char specials[] = "{}()[]=,;\"'.-\\\n\0#~:%\x80\xff";
    size_t at = below(input->size + 1);
    uint8_t byte = (uint8_t)next_random();
    uint8_t piece[64];
    const struct input *other = &corpus[below((size_t)corpus_count)];
    switch (below(7)) {
    case 0: /* any byte */
        splice(input, at, below(2), &byte, 1);
        break;
    case 1: /* a byte that means something */
        splice(input, at, below(2), specials + below(sizeof(specials) - 1), 1);
        break;
    case 2: /* a piece goes */
        splice(input, at, below(40), "", 0);
        break;
    case 3: /* a word comes */
    {
        const char *word = words[below((size_t)word_count)];
        splice(input, at, below(12), word, strlen(word));
        break;
    }
    case 4: /* a piece of another input */
    {
        size_t from = below(other->size + 1);
        size_t size = below(sizeof(piece));
        if (size > other->size - from)
            size = other->size - from;
        memcpy(piece, other->data + from, size);
        splice(input, at, below(20), piece, size);
        break;
    }
    case 5: /* a piece once more */
    {
        size_t size = below(sizeof(piece));
        if (size > input->size - at)
            size = input->size - at;
        memcpy(piece, input->data + at, size);
        splice(input, at, 0, piece, size);
        break;
    }
    default: /* a bit */
        if (at < input->size)
            input->data[at] ^= (uint8_t)(1u << below(8));
    }
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void test_corpus(void **state)
{
    (void)state;
    for (int i = 0; i < corpus_count; i++) {
        char what[32];
        snprintf(what, sizeof(what), "input %d", i);
        check_input(corpus[i].data, corpus[i].size, what);
    }
}

/* Every prefix of a spec with all kinds of things in it. */
static void test_prefixes(void **state)
{
    (void)state;
    static const char text[] =
        "--[[ c ]] local n = 0x1p4 -- d\nreturn model 'm' { ['tokens'] = n // 1, mesh = { fsdp = 1 "
        "};"
        "recipe = recipe.current { format = \"e4m3\\z  \" }, layers = { linear [==[a]==] {"
        "in_features = (function(x) return x end)(-1), out_features = 2 ^ 4, bias = not nil } } }";
    for (size_t size = 0; size < sizeof(text); size++) {
        char what[32];
        snprintf(what, sizeof(what), "prefix %zu", size);
        check_input((const uint8_t *)text, size, what);
    }
}

static void test_mutations(void **state)
{
    (void)state;
    const char *seed_text = getenv("FP8_FUZZ_SEED");
    const char *count_text = getenv("FP8_FUZZ_COUNT");
    uint64_t seed = seed_text != NULL ? strtoull(seed_text, NULL, 0) : 1;
    long count = count_text != NULL ? strtol(count_text, NULL, 0) : 1000;
    uint8_t *data = malloc(INPUT_MAX);
    assert_non_null(data);
    print_message("seed %llu, %ld mutations\n", (unsigned long long)seed, count);
    for (long i = 0; i < count; i++) {
        char what[64];
        snprintf(what, sizeof(what), "seed %llu, mutation %ld", (unsigned long long)seed, i);
        random_state = seed * 1000003u + (uint64_t)i;
        const struct input *base = &corpus[below((size_t)corpus_count)];
        struct input input = { .data = data, .size = base->size };
        memcpy(data, base->data, base->size);
        for (size_t n = 1 + below(6); n > 0; n--)
            mutate(&input);
        check_input(input.data, input.size, what);
    }
    free(data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_corpus),
        cmocka_unit_test(test_prefixes),
        cmocka_unit_test(test_mutations),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
