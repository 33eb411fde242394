/* sources: ../test/enclosure/digest.c */
/* CRC32C against its published values and against itself bit by bit, at every length and alignment that the fast path tells apart. */
#include <string.h>

#include "check.h"
#include "enclosure/digest.h"

static unsigned char data[3 * 4096 + 64];

int main(void) {
    uint32_t whole;

    CHECK(nvme_digest(0, "123456789", 9) == 0xe3069283);
    memset(data, 0, 32);
    CHECK(nvme_digest(0, data, 32) == 0x8a9136aa);
    memset(data, 0xff, 32);
    CHECK(nvme_digest(0, data, 32) == 0x62a8ab43);
    for (size_t i = 0; i < sizeof(data); i++)
        data[i] = (unsigned char)(i * 2654435761u >> 13);
    for (size_t at = 0; at < 9; at++)
        for (size_t size = 0; size < sizeof(data) - at; size += size < 64 || (size > 4070 && size < 4100) ? 1 : 61)
            CHECK(nvme_digest(0, data + at, size) == nvme_digest_reference(0, data + at, size));
    whole = nvme_digest(0, data, sizeof(data));
    for (size_t cut = 0; cut < sizeof(data); cut += 97)
        CHECK(nvme_digest(nvme_digest(0, data, cut), data + cut, sizeof(data) - cut) == whole);
    return 0;
}
