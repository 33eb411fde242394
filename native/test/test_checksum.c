/* sources: block/checksum.c block/checksum_avx2.c block/checksum_avx512.c */
/* The expected numbers are those of Python's xxhash package, 3.x: xxh3_64_intdigest(data, seed=secret) and xxh3_128_intdigest. */
#define KVFS_LEAF_SUFFIX scalar
#define XXH_VECTOR 0 /* XXH_SCALAR: <xxhash.h> defines the name */
#include "block/checksum_leaf.h"

#include "check.h"
#include "block/checksum.h"

#define SECRET 0x9e3779b97f4a7c15ULL
#define PATTERN_SIZE 20000

static unsigned char *pattern(uint64_t size) {
    unsigned char *data = malloc(size);

    CHECK(data);
    for (uint64_t i = 0; i < size; i++)
        data[i] = (unsigned char)(i * 131 + 7);
    return data;
}

static void test_checksums_equal_those_of_the_python_package(void) {
    static const struct {
        uint64_t size, secret, checksum;
    } expected[] = {
        {0, 0x0ULL, 0x2d06800538d394c2ULL},
        {1, 0x1ULL, 0x0a187bf012eca100ULL},
        {16, 0x2ULL, 0x7176c627d252ec00ULL},
        {100, 0x3ULL, 0x125cd00bce32ed04ULL},
        {200, 0x9e3779b97f4a7c15ULL, 0x83264818fb531769ULL},
        {240, 0x5ULL, 0x0bcf8736b5f03057ULL},
        {241, 0x0ULL, 0x956cae592c67279eULL},
        {241, 0x9e3779b97f4a7c15ULL, 0x2be236ba3bacf75cULL},
        {4096, 0x9e3779b97f4a7c15ULL, 0xc7bc989f5d547a4dULL},
        {4095, 0x7ULL, 0x2a4e8c8c9b61624eULL},
        {20000, 0xffffffffffffffffULL, 0x293327f43616baaeULL},
    };
    unsigned char *data = pattern(PATTERN_SIZE);

    for (unsigned i = 0; i < sizeof(expected) / sizeof(*expected); i++)
        CHECK_SAY(kvfs_checksum(data, expected[i].size, expected[i].secret) == expected[i].checksum, "case %u", i);
    free(data);
}

static void test_name_keys_equal_those_of_the_python_package(void) {
    char *data = (char *)pattern(255);
    uint64_t low, high;

    kvfs_name_key(1, "a", 1, 0, &low, &high);
    CHECK(low == 0xadea399fbae36cb2ULL && high == 0xea7daf8b8b8e0899ULL);
    kvfs_name_key(0x0123456789abcdefULL, "model.safetensors", 17, SECRET, &low, &high);
    CHECK(low == 0x58fd2607e412cb66ULL && high == 0x757474acae51b053ULL);
    kvfs_name_key(42, data, 255, 7, &low, &high);
    CHECK(low == 0xb2b480c0bde8b0a1ULL && high == 0xf2f17bb5de58aab1ULL);
    free(data);
}

static void compare(const struct kvfs_leaf_functions *fast, const unsigned char *data, uint64_t size, uint64_t secret) {
    uint64_t leaves = (size + KVFS_LEAF_SIZE - 1) / KVFS_LEAF_SIZE;
    uint64_t *expected = malloc(leaves * 8 + 8), *got = malloc(leaves * 8 + 8);

    CHECK(expected && got);
    got[leaves] = expected[leaves] = 0x0123456789abcdefull;
    kvfs_leaf_checksums_reference(data, size, secret, expected);
    fast->checksums(data, size, secret, got);
    for (uint64_t i = 0; i <= leaves; i++)
        CHECK_SAY(expected[i] == got[i], "leaf %lu of size %lu, secret %lx", i, size, secret);
    CHECK(fast->checksum(data, size, secret) == XXH3_64bits_withSeed(data, size, secret));
    CHECK(fast->verify(data, size, secret, expected) == 0);
    for (uint64_t i = 0; i < leaves; i++) {
        expected[i] ^= 1ull << (i * 37 % 64);
        CHECK_SAY(fast->verify(data, size, secret, expected) == i + 1, "leaf %lu of size %lu", i, size);
        expected[i] ^= 1ull << (i * 37 % 64);
    }
    free(expected);
    free(got);
}

static void compare_all(const struct kvfs_leaf_functions *fast) {
    static const uint64_t sizes[] = {0, 1, 15, 240, 241, 1024, 4095, 4096, 4097, 8191, 8192, 3 * 4096 + 100, 65536, 65537};
    static const uint64_t secrets[] = {0, 1, SECRET, UINT64_MAX};
    uint64_t seed = 1;

    for (unsigned s = 0; s < sizeof(sizes) / sizeof(*sizes); s++) {
        /* Exactly as long as the data, so that the address sanitizer sees a read behind it; and off every alignment. */
        for (unsigned shift = 0; shift < 4; shift++) {
            unsigned char *data = malloc(sizes[s] + shift);

            CHECK(data || !(sizes[s] + shift));
            for (uint64_t i = 0; i < sizes[s] + shift; i++)
                data[i] = (unsigned char)random_next(&seed);
            for (unsigned k = 0; k < sizeof(secrets) / sizeof(*secrets); k++)
                compare(fast, data + shift, sizes[s], secrets[k]);
            free(data);
        }
    }
}

static void test_every_instruction_set_equals_the_reference(void) {
    static const struct kvfs_leaf_functions chosen = {kvfs_checksum, kvfs_leaf_checksums, kvfs_leaf_verify};

    compare_all(&kvfs_leaf_scalar);
    compare_all(&kvfs_leaf_portable);
    compare_all(&chosen);
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        compare_all(&kvfs_leaf_avx2);
    if (__builtin_cpu_supports("avx512f"))
        compare_all(&kvfs_leaf_avx512);
#endif
}

static void test_a_flipped_bit_is_found_in_its_leaf(void) {
    uint64_t size = 5 * 4096 + 77, seed = 2;
    unsigned char *data = pattern(size);
    uint64_t sums[6];

    kvfs_leaf_checksums(data, size, SECRET, sums);
    for (int i = 0; i < 2000; i++) {
        uint64_t at = random_below(&seed, size);
        unsigned char bit = (unsigned char)(1u << random_below(&seed, 8));

        data[at] ^= bit;
        CHECK_SAY(kvfs_leaf_verify(data, size, SECRET, sums) == at / 4096 + 1, "offset %lu", at);
        data[at] ^= bit;
    }
    CHECK(kvfs_leaf_verify(data, size, SECRET, sums) == 0);
    CHECK(kvfs_leaf_verify(data, size, SECRET + 1, sums) == 1);
    free(data);
}

int main(void) {
    RUN(test_checksums_equal_those_of_the_python_package);
    RUN(test_name_keys_equal_those_of_the_python_package);
    RUN(test_every_instruction_set_equals_the_reference);
    RUN(test_a_flipped_bit_is_found_in_its_leaf);
    return 0;
}
