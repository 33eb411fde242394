/* Body of the checksum kernels. One translation unit for each instruction set defines KVFS_LEAF_SUFFIX and, where it may,
 * KVFS_LEAF_TARGET and XXH_VECTOR, and includes this file. It selects the target by pragma, so that every source compiles with the
 * same flags. A unit compiled for an instruction set runs only after checksum.c has seen that the CPU has it. */
#ifndef KVFS_CHECKSUM_LEAF_H
#define KVFS_CHECKSUM_LEAF_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
/* Included before the pragma, as clang would give every function of this header a second target. */
#include <immintrin.h>
#endif

/* The functions of one instruction set. Contracts as in kvfs_checksum.h. */
struct kvfs_leaf_functions {
    uint64_t (*checksum)(const void *data, uint64_t size, uint64_t secret);
    void (*checksums)(const void *data, uint64_t size, uint64_t secret, uint64_t *out);
    uint64_t (*verify)(const void *data, uint64_t size, uint64_t secret, const uint64_t *expected);
};
extern const struct kvfs_leaf_functions kvfs_leaf_portable;
#if defined(__x86_64__)
extern const struct kvfs_leaf_functions kvfs_leaf_avx2;
extern const struct kvfs_leaf_functions kvfs_leaf_avx512;
#endif

#ifdef KVFS_LEAF_TARGET
#define KVFS_PRAGMA(text) _Pragma(#text)
#define KVFS_PRAGMA_OF(text) KVFS_PRAGMA(text)
#if defined(__clang__)
KVFS_PRAGMA_OF(clang attribute push(__attribute__((target(KVFS_LEAF_TARGET))), apply_to = function))
#else
#pragma GCC push_options
KVFS_PRAGMA_OF(GCC target(KVFS_LEAF_TARGET))
#endif
#endif

#define XXH_INLINE_ALL
#include <xxhash.h>

#define KVFS_LEAF_SIZE 4096
#define KVFS_CAT_(a, b) a##b
#define KVFS_CAT(a, b) KVFS_CAT_(a, b)

/* The long hash draws 192 bytes of secret from the seed at each call: a fifth of a leaf's time. Here they are drawn once for all leaves. */
struct leaf_secret {
    _Alignas(64) unsigned char bytes[XXH3_SECRET_DEFAULT_SIZE];
};

/* A test alone makes leaves of fewer bits: to show that it would see too few (test_pod_recycle.c). */
#ifdef KVFS_TEST_LEAF_BITS
#define KVFS_LEAF_CUT(sum) ((sum) & ((UINT64_C(1) << KVFS_TEST_LEAF_BITS) - 1))
#else
#define KVFS_LEAF_CUT(sum) (sum)
#endif

static inline uint64_t leaf_sum(const unsigned char *data, uint64_t size, uint64_t secret, const struct leaf_secret *drawn) {
    return KVFS_LEAF_CUT(XXH3_64bits_withSecretandSeed(data, size, drawn->bytes, sizeof(drawn->bytes), secret));
}

static uint64_t checksum(const void *data, uint64_t size, uint64_t secret) { return XXH3_64bits_withSeed(data, size, secret); }

static void checksums(const void *data, uint64_t size, uint64_t secret, uint64_t *out) {
    const unsigned char *at = data;
    struct leaf_secret drawn;

    XXH3_generateSecret_fromSeed(drawn.bytes, secret);
    for (; size >= KVFS_LEAF_SIZE; size -= KVFS_LEAF_SIZE, at += KVFS_LEAF_SIZE)
        *out++ = leaf_sum(at, KVFS_LEAF_SIZE, secret, &drawn);
    if (size)
        *out = leaf_sum(at, size, secret, &drawn);
}

static uint64_t verify(const void *data, uint64_t size, uint64_t secret, const uint64_t *expected) {
    const unsigned char *at = data;
    struct leaf_secret drawn;
    uint64_t index = 0;

    XXH3_generateSecret_fromSeed(drawn.bytes, secret);
    for (; size >= KVFS_LEAF_SIZE; size -= KVFS_LEAF_SIZE, at += KVFS_LEAF_SIZE, index++)
        if (leaf_sum(at, KVFS_LEAF_SIZE, secret, &drawn) != expected[index])
            return index + 1;
    if (size && leaf_sum(at, size, secret, &drawn) != expected[index])
        return index + 1;
    return 0;
}

const struct kvfs_leaf_functions KVFS_CAT(kvfs_leaf_, KVFS_LEAF_SUFFIX) = {checksum, checksums, verify};

#ifdef KVFS_LEAF_TARGET
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#endif
