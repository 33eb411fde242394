/* The leaf checksums as a GPU computes them: xxh3-64 of one page, as checksum_leaf.h has it for a CPU. One text, for two compilers:
 * client/gpu/kernel.c takes it as a string for NVRTC, tests and doubles as C. Hence the argument of a macro, and no preprocessor in it. A file that
 * includes it defines GPU_LEAF(...), and for C: GPU_KERNEL, GPU_FUNCTION, GPU_INDEX (the number of a thread).
 *
 * xxh3's eight lanes do not see each other until the end, but for the word that each takes from its neighbour. So a thread is a lane of a leaf
 * (kvfs_leaf_lanes), and then a leaf (kvfs_leaf_sums). Data is aligned to 8. Each launch has another nonce, so sums that an earlier launch left
 * behind match nothing.
 *
 * words: of the secret drawn from the pool's (192 bytes), the 24 from its start. Then 8 from byte 121, for the last stripe; then 8 from byte 11, for
 * the end. */
GPU_LEAF(

    typedef unsigned long long gpu_u64; typedef unsigned int gpu_u32; struct gpu_leaf_keys { gpu_u64 words[40]; };
    enum {GPU_LEAF_LANES = 8, GPU_LEAF_WORDS = 512, GPU_LEAF_STRIPES = 16};

    GPU_FUNCTION gpu_u64 gpu_leaf_stripe(gpu_u64 sum, gpu_u64 own, gpu_u64 neighbour, gpu_u64 key) {
        gpu_u64 mixed = own ^ key;
        return sum + neighbour + (mixed & 0xffffffffull) * (mixed >> 32);
    }

    GPU_FUNCTION gpu_u64 gpu_leaf_fold(gpu_u64 a, gpu_u64 b) {
        gpu_u64 low = (a & 0xffffffffull) * (b & 0xffffffffull);
        gpu_u64 left = (a >> 32) * (b & 0xffffffffull);
        gpu_u64 right = (a & 0xffffffffull) * (b >> 32);
        gpu_u64 middle = (low >> 32) + (left & 0xffffffffull) + right;
        gpu_u64 high = (a >> 32) * (b >> 32) + (left >> 32) + (middle >> 32);
        return ((middle << 32) | (low & 0xffffffffull)) ^ high;
    }

    GPU_KERNEL void kvfs_leaf_lanes(const gpu_u64 *data, gpu_u64 leaves, struct gpu_leaf_keys keys, gpu_u64 *lanes) {
        const gpu_u64 starts[8] = {0xC2B2AE3Dull,         0x9E3779B185EBCA87ull, 0xC2B2AE3D27D4EB4Full, 0x165667B19E3779F9ull,
                                   0x85EBCA77C2B2AE63ull, 0x85EBCA77ull,         0x27D4EB2F165667C5ull, 0x9E3779B1ull};
        gpu_u64 index = GPU_INDEX;
        gpu_u32 lane = (gpu_u32)(index % GPU_LEAF_LANES);
        gpu_u64 secret[GPU_LEAF_STRIPES];
        if (index >= leaves * GPU_LEAF_LANES)
            return;
        const gpu_u64 *own = data + index / GPU_LEAF_LANES * GPU_LEAF_WORDS + lane;
        const gpu_u64 *neighbour = data + index / GPU_LEAF_LANES * GPU_LEAF_WORDS + (lane ^ 1u);
        for (int i = 0; i < GPU_LEAF_STRIPES; i++)
            secret[i] = keys.words[i + lane];
        gpu_u64 scramble = keys.words[GPU_LEAF_STRIPES + lane];
        gpu_u64 sum = starts[lane];
        for (int block = 0; block < 3; block++) {
            for (int i = 0; i < GPU_LEAF_STRIPES; i++)
                sum = gpu_leaf_stripe(sum, own[(block * GPU_LEAF_STRIPES + i) * 8], neighbour[(block * GPU_LEAF_STRIPES + i) * 8], secret[i]);
            sum = (sum ^ (sum >> 47) ^ scramble) * 0x9E3779B1ull;
        }
        for (int i = 0; i < GPU_LEAF_STRIPES - 1; i++)
            sum = gpu_leaf_stripe(sum, own[(48 + i) * 8], neighbour[(48 + i) * 8], secret[i]);
        lanes[index] = gpu_leaf_stripe(sum, own[63 * 8], neighbour[63 * 8], keys.words[24 + lane]);
    }

    GPU_KERNEL void kvfs_leaf_sums(const gpu_u64 *lanes, gpu_u64 leaves, struct gpu_leaf_keys keys, gpu_u64 nonce, gpu_u64 *sums) {
        gpu_u64 index = GPU_INDEX;
        gpu_u64 sum = 4096ull * 0x9E3779B185EBCA87ull;
        if (index >= leaves)
            return;
        const gpu_u64 *of = lanes + index * GPU_LEAF_LANES;
        for (int i = 0; i < GPU_LEAF_LANES; i += 2)
            sum += gpu_leaf_fold(of[i] ^ keys.words[32 + i], of[i + 1] ^ keys.words[33 + i]);
        sum = (sum ^ (sum >> 37)) * 0x165667919E3779F9ull;
        sums[index] = sum ^ (sum >> 32) ^ nonce;
    }

)
