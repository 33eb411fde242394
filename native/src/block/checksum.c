/* xxh3 with the pool's secret as the seed: equal to xxh3_64 and xxh3_128 of Python's xxhash package with seed=secret.
 * The kernels are the system's <xxhash.h>, compiled once for each instruction set (checksum_leaf.h). */
#include "block/checksum.h"

#include <assert.h>

#include "kvfs_format.h"

/* For the compiler's base target: SSE2 or NEON where there is one, else scalar. */
#define KVFS_LEAF_SUFFIX portable
#include "block/checksum_leaf.h"

static_assert(KVFS_LEAF_SIZE == KVFS_PAGE_SIZE, "a leaf is a page");

static const struct kvfs_leaf_functions *chosen = &kvfs_leaf_portable;

/* Runs at load time, in the only thread, so readers of `chosen` need no fence. */
__attribute__((constructor)) static void choose(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        chosen = &kvfs_leaf_avx512;
    else if (__builtin_cpu_supports("avx2"))
        chosen = &kvfs_leaf_avx2;
#endif
}

uint64_t kvfs_checksum(const void *data, uint64_t size, uint64_t secret) { return chosen->checksum(data, size, secret); }

void kvfs_leaf_checksums(const void *data, uint64_t size, uint64_t secret, uint64_t *out) { chosen->checksums(data, size, secret, out); }

uint64_t kvfs_leaf_verify(const void *data, uint64_t size, uint64_t secret, const uint64_t *expected) {
    return chosen->verify(data, size, secret, expected);
}

/* The reference: one plain call for each leaf, without the chosen instruction set and without a secret drawn ahead. */
void kvfs_leaf_checksums_reference(const void *data, uint64_t size, uint64_t secret, uint64_t *out) {
    const unsigned char *at = data;

    for (uint64_t offset = 0; offset < size; offset += KVFS_PAGE_SIZE) {
        uint64_t left = size - offset;
        uint64_t leaf = left < KVFS_PAGE_SIZE ? left : KVFS_PAGE_SIZE;

        *out++ = XXH3_64bits_withSeed(at + offset, leaf, secret);
    }
}

void kvfs_name_key(uint64_t parent, const char *name, uint32_t name_size, uint64_t secret, uint64_t *low, uint64_t *high) {
    unsigned char text[8 + KVFS_NAME_MAX];
    XXH128_hash_t hash;

    assert(name_size <= KVFS_NAME_MAX);
    for (int i = 0; i < 8; i++)
        text[i] = (unsigned char)(parent >> (8 * i));
    memcpy(text + 8, name, name_size);
    hash = XXH3_128bits_withSeed(text, 8 + name_size, secret);
    *low = hash.low64;
    *high = hash.high64;
}
