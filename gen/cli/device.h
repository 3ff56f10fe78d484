/*
 * device.h - the device that run, bench and doctor work on, and buffers on it.
 */
#ifndef FP8GEN_CLI_DEVICE_H
#define FP8GEN_CLI_DEVICE_H

#include "gen/cli/cli.h"

struct cli_device {
    fp8_context *context;
    fp8_stream stream;
    fp8_device_info info;
    bool is_host;
    const char *arch; /* for fp8gen_build: "sm_90a", or "none" on the host */
};

#define CLI_WITHOUT_GPU                                                                            \
    "without one, check, plan, expand, 'build --arch none', 'run --device host' and "              \
    "'bench shard --device host' work"

/* choice is "host", "cuda" or "auto" (CUDA if there is one; says on stderr why not); what: who
 * needs the device, for the refusal where there is none ("'bench layer'"). */
int cli_device_open(const char *choice, const char *what, struct cli_device *device);
/* The GPU of this ordinal; on the host so many threads for its work (0: all cores). */
int cli_device_open_at(const char *choice, const char *what, int ordinal, int threads,
                       struct cli_device *device);
void cli_device_close(struct cli_device *device);
int cli_device_synchronize(const struct cli_device *device);

/* Builds the spec's bundle for the device into a temporary folder, opens it and removes the
 * folder. */
int cli_device_bundle(const struct cli_device *device, fp8gen *gen, fp8_bundle **bundle);
/* Builds it and leaves it in a temporary folder, which cli_device_built removes. */
int cli_device_build(const struct cli_device *device, fp8gen *gen, char **folder, char **path);
void cli_device_built(char **folder, char **path);

/* Memory on the device and, if mirrored, its twin on the host. On the host context both are one. */
struct cli_buffer {
    void *device;
    void *host;
    size_t bytes;
};

int cli_buffer_create(const struct cli_device *device, size_t bytes, bool mirrored,
                      struct cli_buffer *buffer);
void cli_buffer_destroy(const struct cli_device *device, struct cli_buffer *buffer);
int cli_buffer_upload(const struct cli_device *device, const struct cli_buffer *buffer);
/* Blocks until the bytes are there. */
int cli_buffer_download(const struct cli_device *device, const struct cli_buffer *buffer);
int cli_buffer_fill(const struct cli_device *device, const struct cli_buffer *buffer,
                    uint8_t value);

#endif
