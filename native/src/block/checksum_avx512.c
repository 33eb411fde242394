/* The checksum kernels for AVX-512. */
#if defined(__x86_64__)
#define KVFS_LEAF_SUFFIX avx512
#define KVFS_LEAF_TARGET "avx512f"
#define XXH_VECTOR XXH_AVX512
#include "block/checksum_leaf.h"
#else
typedef int kvfs_checksum_avx512_is_for_x86_64;
#endif
