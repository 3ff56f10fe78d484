/*
 * crc.h - CRC-32 as zlib computes it, the sum that the oracle's tables keep of long results.
 */
#ifndef TESTS_UNIT_CRC_H
#define TESTS_UNIT_CRC_H

#include <stddef.h>
#include <stdint.h>

static inline uint32_t crc32_of(const void *data, size_t bytes)
{
    const uint8_t *at = data;
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= at[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (0xEDB88320u & (0u - (crc & 1u)));
    }
    return ~crc;
}

#endif
