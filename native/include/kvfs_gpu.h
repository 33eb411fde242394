/* libkvfs, GPU memory: blocks of a mounted pool into memory of an NVIDIA GPU. libcuda is loaded when it is first needed. A build needs
 * nothing of CUDA; a process without libcuda gets -ENODEV with a message. KVFS_CUDA_LIBRARY in the environment names another file than
 * libcuda.so.1.
 *
 *     struct kvfs_gpu *gpu;
 *     if (kvfs_gpu_open(client, NULL, &gpu) < 0 || kvfs_gpu_get(gpu, &keys, buffers, stream, results) < 0)
 *         errx(1, "%s", kvfs_error());
 *
 * KVFS_GPU_STAGED: blocks are read into a ring of pinned host memory, where every leaf's checksum is checked; proven bytes are copied to
 * the GPU. No unverified byte leaves the ring.
 *
 * KVFS_GPU_GDS: the devices' DMA goes straight into the GPU, by cuFileRead on the devices. A block's header, and the part of a page at its
 * end, are read by the CPU. Whole pages are proven by a kernel on the GPU. Then the segment's header is read from the device again, and the
 * block table is asked again (I10). A block that cannot be read this way is read the staged way. To open it, libcufile and libnvrtc are
 * needed. cuFile must also have read a page range of every device into the GPU, right, and directly by its own statistics. Otherwise it is
 * -EOPNOTSUPP, with the reason. cuFileDriverOpen and a driver may hang: a caller that cannot accept that opens it in a separate process first.
 * KVFS_CUFILE_LIBRARY and KVFS_NVRTC_LIBRARY in the environment name other files.
 */
#ifndef KVFS_GPU_H
#define KVFS_GPU_H

#include <stdint.h>

#include "kvfs.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kvfs_gpu;

/* AUTO is STAGED: gds is not tried unasked in the caller's process. */
enum kvfs_gpu_mode { KVFS_GPU_AUTO = 0, KVFS_GPU_STAGED = 1, KVFS_GPU_GDS = 2 };
enum kvfs_gpu_flags {
    KVFS_GPU_INDIRECT = 1 /* diagnosis only: gds also where cuFile's statistics show no direct reads, its compatibility mode */
};

struct kvfs_gpu_options {
    uint32_t size;       /* sizeof(struct kvfs_gpu_options): the fields that this caller knows */
    uint32_t mode;       /* enum kvfs_gpu_mode */
    uint32_t device;     /* as CUDA counts them */
    uint32_t slot_count; /* of the ring: 1 to 1024; 0: 32 */
    uint64_t slot_size;  /* multiple of 64 KiB, at most 64 MiB; 0: 256 KiB. A larger block takes several slots. */
    uint32_t flags;      /* enum kvfs_gpu_flags */
    uint32_t reserved;
    const char *cufile, *nvrtc; /* for gds: the libraries' files; NULL: as in the environment, or of the dynamic linker's search */
};

/* Takes slot_count * slot_size of pinned memory, and the device's primary context. It takes up to four times that memory while silent
 * devices hold on to it. options may be NULL. Close it before its client. -ENODEV: no libcuda, or no such device. -EOPNOTSUPP. -EIO: CUDA
 * failed. */
int kvfs_gpu_open(struct kvfs_client *client, const struct kvfs_gpu_options *options, struct kvfs_gpu **out);
/* Waits for copies under way, and, for at most the client's timeout, for reads that gave no answer. Memory that a device still holds then
 * stays the process's. */
void kvfs_gpu_close(struct kvfs_gpu *gpu);
/* KVFS_GPU_STAGED or KVFS_GPU_GDS */
int kvfs_gpu_mode(const struct kvfs_gpu *gpu);
/* The GPU that memory is on, by CUDA's count. -EINVAL: it is no GPU memory. */
int kvfs_gpu_device_of(const void *pointer);

/* Like kvfs_get(), into device memory: results[i] is final when the call returns, and a block that is a miss leaves its buffer undefined.
 *
 * stream is a CUstream, or 1 (the legacy default stream) or 2 (the per-thread one), of the buffers' context. Earlier work on it is done
 * before a buffer is written, and later work on it finds the bytes there. The call itself may return while copies are still under way. With
 * 0 it waits for earlier work on the legacy default stream, and for the bytes.
 *
 * Calls on one kvfs_gpu take turns; for reads at the same time open several. -EINVAL, nothing read: a bad buffer, or a stream that is being
 * captured. A buffer is bad if it is NULL, no device memory, longer than its allocation, or overlaps another. So is one on another GPU or
 * in another context than the first. -EBUSY, nothing read: see below. -EIO: CUDA failed. -ETIMEDOUT: the GPU finished no copy, or no
 * checksums, in five times the client's timeout. Then every result is that error; where CUDA cannot say that its copies have ended, so is
 * every later call.
 *
 * In staged mode no device ever holds GPU memory. With gds a cuFileRead cannot be cancelled. When one has given no answer in the client's
 * timeout, the block is -ETIMEDOUT. The pages that are still being read then belong to the device until kvfs_busy() says 0, also after
 * kvfs_gpu_close(). Until then blocks of this kvfs_gpu are read the staged way. */
int kvfs_gpu_get(struct kvfs_gpu *gpu, const struct kvfs_keys *keys, const struct kvfs_buffer *device_buffers, uint64_t stream, int64_t *results);

/* Like kvfs_put_vectors(), from device memory, staged in every mode. Blocks are copied into pinned memory: two shares of 32 MiB or of the
 * largest block, kept until kvfs_gpu_close(). One is put while the other is copied. stream as above: earlier work on it is done before a byte is read.
 * Every buffer has been read when this returns. Calls on one kvfs_gpu take turns, with kvfs_gpu_get() too. -EINVAL, nothing stored: a bad
 * buffer (`buffer i` in the message counts all pieces), a stream that is being captured, a key twice. -EIO, -ETIMEDOUT: as above; blocks whose
 * result is 0 are stored. */
int kvfs_gpu_put(struct kvfs_gpu *gpu, const struct kvfs_keys *keys, const struct kvfs_vector *device_vectors, const struct kvfs_put_options *options,
                 uint64_t stream, int64_t *results);

struct kvfs_gpu_statistics {
    uint64_t blocks, bytes;  /* of results that were blocks */
    uint64_t prestaged;      /* blocks of them that kvfs_prestage() had in memory */
    uint64_t pieces, copies; /* slots filled; copies from them to the GPU: fewer where neighbours went together */
    uint64_t restarts;       /* blocks begun again, because they were replaced or moved while their pieces were read */
    uint64_t slot_waits;     /* how often every slot was in use */
    uint64_t slots_stuck;    /* now: out of use, because a device that gave no answer may still write into them */
    uint64_t slots_huge;     /* 1: the ring lies in reserved huge pages */
};
int kvfs_gpu_statistics_get(struct kvfs_gpu *gpu, struct kvfs_gpu_statistics *out);

/* Of gds; all zero in another mode. */
struct kvfs_gpu_direct_statistics {
    uint64_t blocks, bytes; /* results that came without the ring: blocks, and their bytes */
    uint64_t reads;         /* calls of cuFileRead that ended */
    uint64_t fallbacks;     /* blocks begun so and then read the staged way */
    uint64_t mismatches;    /* of those: blocks whose GPU checksums differed */
    uint64_t overdue;       /* now: reads that gave no answer in time */
    /* cuFile's own statistics for this GPU, of the process, since this kvfs_gpu was opened: n_p2p_reads and n_nvfs_reads; n_posix_reads.
     * Reads were direct only if known is 1 and indirect_reads is 0. known 0: cuFile does not know the GPU. */
    uint64_t known, direct_reads, indirect_reads;
};
int kvfs_gpu_direct_statistics_get(struct kvfs_gpu *gpu, struct kvfs_gpu_direct_statistics *out);

/* The checksum kernel as PTX for a compute capability (90: 9.0), compiled by libnvrtc; it stays the library's. nvrtc: as in the options.
 * -EOPNOTSUPP: no compiler, or it failed. */
int kvfs_gpu_kernel(const char *nvrtc, uint32_t capability, const char **ptx);

#ifdef __cplusplus
}
#endif

#endif
