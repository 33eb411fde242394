/* CRC32C, the digest of NVMe/TCP (transport 3.3.1.1; the polynomial of RFC 3720): by SSE4.2 where the CPU has it, else by a table. */
#include "io/nvme/tcp.h"

static uint32_t crc_table[256];
static pthread_once_t crc_once = PTHREAD_ONCE_INIT;
#ifdef __x86_64__
static bool crc_hardware;
#endif

static void crc_prepare(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++)
            value = value >> 1 ^ (value & 1 ? 0x82f63b78u : 0);
        crc_table[i] = value;
    }
#ifdef __x86_64__
    crc_hardware = __builtin_cpu_supports("sse4.2");
#endif
}

#ifdef __x86_64__
/* The instruction takes three cycles and one can begin in each cycle. So three streams of this many bytes are summed side by side. */
#define LANE 1024u
static uint32_t crc_lane[2][4][256]; /* the effect of LANE, 2 * LANE zero bytes on a sum, by each of its bytes */
static pthread_once_t lane_once = PTHREAD_ONCE_INIT;

static void lane_prepare(void) {
    for (uint32_t byte = 0; byte < 4; byte++)
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t value = i << 8 * byte;
            for (uint32_t n = 0; n < 2 * LANE; n++) {
                if (n == LANE)
                    crc_lane[0][byte][i] = value;
                value = value >> 8 ^ crc_table[value & 255];
            }
            crc_lane[1][byte][i] = value;
        }
}

static uint32_t lane_shift(uint32_t which, uint32_t crc) {
    return crc_lane[which][0][crc & 255] ^ crc_lane[which][1][crc >> 8 & 255] ^ crc_lane[which][2][crc >> 16 & 255] ^ crc_lane[which][3][crc >> 24];
}

__attribute__((target("sse4.2"))) static uint32_t crc_sse(uint32_t crc, const uint8_t *data, uint64_t size) {
    pthread_once(&lane_once, lane_prepare);
    uint64_t a = crc, word;
    while (size >= 3 * LANE) {
        uint64_t b = 0, c = 0, x, y;
        for (uint32_t i = 0; i < LANE; i += 8) {
            memcpy(&word, data + i, 8);
            memcpy(&x, data + LANE + i, 8);
            memcpy(&y, data + 2 * LANE + i, 8);
            a = __builtin_ia32_crc32di(a, word);
            b = __builtin_ia32_crc32di(b, x);
            c = __builtin_ia32_crc32di(c, y);
        }
        a = lane_shift(1, (uint32_t)a) ^ lane_shift(0, (uint32_t)b) ^ (uint32_t)c;
        data += 3 * LANE;
        size -= 3 * LANE;
    }
    for (; size >= 8; data += 8, size -= 8) {
        memcpy(&word, data, 8);
        a = __builtin_ia32_crc32di(a, word);
    }
    uint32_t result = (uint32_t)a;
    for (; size; size--)
        result = __builtin_ia32_crc32qi(result, *data++);
    return result;
}
#endif

uint32_t nvme_crc32c(uint32_t crc, const void *data, uint64_t size) {
    pthread_once(&crc_once, crc_prepare);
    const uint8_t *bytes = data;
    crc = ~crc;
#ifdef __x86_64__
    if (crc_hardware)
        return ~crc_sse(crc, bytes, size);
#endif
    while (size--)
        crc = crc >> 8 ^ crc_table[(crc ^ *bytes++) & 255];
    return ~crc;
}
