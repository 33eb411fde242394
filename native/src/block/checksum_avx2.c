/* The checksum kernels for AVX2. */
#if defined(__x86_64__)
#define KVFS_LEAF_SUFFIX avx2
#define KVFS_LEAF_TARGET "avx2"
#define XXH_VECTOR XXH_AVX2
#include "block/checksum_leaf.h"
#else
typedef int kvfs_checksum_avx2_is_for_x86_64;
#endif
