/* CRC32C: eight bytes an instruction where the CPU has one for it, three runs side by side: an instruction's result takes three cycles. */
#include "digest.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define POLYNOMIAL 0x82f63b78u /* reflected */
/* Bytes of one of the three runs: three and 16 bytes are 4 KiB. */
#define RUN 1360

/* The register after one byte; after RUN zero bytes, by each byte of the register. */
static uint32_t by_byte[256], past_run[4][256];

uint32_t nvme_digest_reference(uint32_t before, const void *data, size_t size) {
    const unsigned char *at = data;
    uint32_t crc = ~before;

    while (size--) {
        crc ^= *at++;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (POLYNOMIAL & -(crc & 1));
    }
    return ~crc;
}

static uint32_t scalar(uint32_t crc, const unsigned char *at, size_t size) {
    while (size--)
        crc = by_byte[(crc ^ *at++) & 0xff] ^ crc >> 8;
    return crc;
}

#if defined(__x86_64__)
static uint64_t load(const unsigned char *at) {
    uint64_t value;

    memcpy(&value, at, sizeof(value));
    return value;
}

static uint32_t skip_run(uint32_t crc) {
    return past_run[0][crc & 0xff] ^ past_run[1][crc >> 8 & 0xff] ^ past_run[2][crc >> 16 & 0xff] ^ past_run[3][crc >> 24];
}

__attribute__((target("sse4.2"))) static uint32_t sse42(uint32_t crc, const unsigned char *at, size_t size) {
    for (; size >= 3 * RUN; at += 3 * RUN, size -= 3 * RUN) {
        uint64_t first = crc, second = 0, third = 0;

        for (size_t offset = 0; offset < RUN; offset += 8) {
            first = _mm_crc32_u64(first, load(at + offset));
            second = _mm_crc32_u64(second, load(at + RUN + offset));
            third = _mm_crc32_u64(third, load(at + 2 * RUN + offset));
        }
        crc = skip_run(skip_run((uint32_t)first) ^ (uint32_t)second) ^ (uint32_t)third;
    }
    for (; size >= 8; at += 8, size -= 8)
        crc = (uint32_t)_mm_crc32_u64(crc, load(at));
    while (size--)
        crc = _mm_crc32_u8(crc, *at++);
    return crc;
}
#endif

static uint32_t (*chosen)(uint32_t crc, const unsigned char *at, size_t size) = scalar;

/* At load time, while there is one thread: no reader needs a fence. */
__attribute__((constructor)) static void prepare(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        by_byte[byte] = byte;
        for (int bit = 0; bit < 8; bit++)
            by_byte[byte] = by_byte[byte] >> 1 ^ (POLYNOMIAL & -(by_byte[byte] & 1));
    }
    for (int place = 0; place < 4; place++)
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t crc = byte << 8 * place;

            for (int zero = 0; zero < RUN; zero++)
                crc = by_byte[crc & 0xff] ^ crc >> 8;
            past_run[place][byte] = crc;
        }
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("sse4.2"))
        chosen = sse42;
#endif
}

uint32_t nvme_digest(uint32_t before, const void *data, size_t size) { return ~chosen(~before, data, size); }
