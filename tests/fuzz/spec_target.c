/*
 * spec_target.c - the fuzz target of the spec front: any bytes give a model or clean diagnostics.
 *
 * test_spec_fuzz.c runs it on a corpus and on mutations of it in every test run. For a longer
 * search with libFuzzer (clang), from the project's root, after a build in build/ has made
 * build/embedded.c:
 *
 *   clang -std=c11 -D_GNU_SOURCE -DFP8_LIBFUZZER -g -O1 -fsanitize=fuzzer,address,undefined -I. \
 *     -DFP8GEN_VERSION_STRING='"0"' $(pkg-config --cflags lua5.4 libxxhash) \
 *     tests/fuzz/spec_target.c gen/buf.c gen/diag.c gen/files.c gen/script.c gen/session.c \
 *     build/embedded.c $(pkg-config --libs lua5.4) \
 *     -o build/fuzz_spec
 *   mkdir -p build/spec_corpus
 *   build/fuzz_spec -max_len=4096 -dict=tests/fuzz/spec.dict build/spec_corpus \
 *     tests/fuzz/corpus/spec tests/bad_specs specs
 */
#include "tests/fuzz/spec_target.h"

#include "gen/internal.h"

#include <stdlib.h>
#include <string.h>

/* What a terminal would obey must not come out: control characters, invalid UTF-8. */
static const char *check_text(const char *text, const void *data, size_t data_size)
{
    size_t size = strlen(text);
    if (size == 0 || text[size - 1] != '\n')
        return "the diagnostics do not end in a newline";
    if (strncmp(text, "fuzz:", 5) != 0)
        return "the first diagnostic has no place";
    if (strstr(text, "error: ") == NULL)
        return "no diagnostic says error";
    if (strstr(text, "gen/lua/") != NULL && memmem(data, data_size, "gen/lua/", 8) == NULL)
        return "a diagnostic speaks of our own modules";
    for (size_t i = 0; i < size;) {
        size_t length = gen_utf8_length(text + i, size - i);
        unsigned char byte = (unsigned char)text[i];
        if (length == 0)
            return "the diagnostics are not UTF-8";
        if ((byte < 0x20 && byte != '\n') || byte == 0x7f)
            return "the diagnostics hold a control character";
        i += length;
    }
    return NULL;
}

const char *spec_target(const uint8_t *data, size_t size)
{
    const char *problem = NULL;
    fp8gen *gen = NULL;
    if (fp8gen_open(NULL, &gen) != FP8GEN_OK)
        return "a session does not open";
    gen->script.limits = (struct script_limits){ 200000, 8 << 20, 20000 };
    fp8gen_status status = fp8gen_load_text(gen, "fuzz", (const char *)data, size);
    if (status == FP8GEN_OK) {
        if (fp8gen_diagnostics(gen)[0] != '\0')
            problem = "a good spec has diagnostics";
        else if (strlen(gen->spec_hash) != 32)
            problem = "a good spec has no hash";
    } else if (status == FP8GEN_ERR_SPEC) {
        problem = check_text(fp8gen_diagnostics(gen), data, size);
    } else {
        problem = "a spec is answered with another status than OK and ERR_SPEC";
    }
    fp8gen_close(gen);
    return problem;
}

#ifdef FP8_LIBFUZZER
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The fuzzer links the front alone. */
void gen_plan_free(struct fp8gen *gen)
{
    (void)gen;
}

void gen_nvrtc_free(struct fp8gen *gen)
{
    (void)gen;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (spec_target(data, size) != NULL)
        abort();
    return 0;
}
#endif
