/* gds: the devices' DMA straight into GPU memory, and its proof. */
#ifndef KVFS_GPU_DIRECT_H
#define KVFS_GPU_DIRECT_H

#include "client/gpu/driver.h"

/* One thread at a time calls. Parts are read by direct.c's own threads. */

struct desc;
struct kvfs_client;
struct kvfs_record;
struct lane;
struct connection;
struct direct;
struct direct_read;
struct direct_proof;
struct direct_look;

/* Everything that gds needs, proven with the devices of the client's connection; the message says what is missing. The primary context is
 * current. */
int direct_open(struct kvfs_client *client, const struct gpu_driver *driver, int device, int handle, cuda_context primary,
                const struct kvfs_gpu_options *options, struct direct **out);
/* Waits for reads that are late, at most the client's timeout; what they use then stays. usable: CUDA may be called, primary is current. */
void direct_close(struct direct *direct, bool usable);
/* Make, and give back, all that belongs to a context. The context is current. */
int direct_enter(struct direct *direct, cuda_context context);
void direct_leave(struct direct *direct);
/* May blocks of this connection be read so now? 0, or -EAGAIN. Proves its devices if they are new; the primary context is current. */
int direct_session(struct direct *direct, struct connection *connection);
/* Start reading the first pages of a block. NULL: this one is to be read another way. */
struct direct_read *direct_start(struct direct *direct, const struct desc *desc, uint32_t pages, cuda_pointer to);
/* -EINPROGRESS; else it is over, and read gone: 0; -EAGAIN: failed, nobody writes there any more; -ETIMEDOUT: kvfs_busy() knows where. */
int direct_poll(struct direct *direct, struct direct_read *read);
/* Prove pages that lie in GPU memory. *out NULL and 0: all in use, later. At most DIRECT_PROOF_PAGES. */
#define DIRECT_PROOF_PAGES 1024u
int direct_proof_start(struct direct *direct, cuda_stream stream, cuda_pointer data, const uint64_t *leaves, uint32_t pages,
                       struct direct_proof **out);
/* -EINPROGRESS; else it is over: 0; -EBADMSG; -EIO, -ETIMEDOUT: the GPU. */
int direct_proof_poll(struct direct *direct, struct direct_proof *proof);
/* Forget all proofs, after an error, when the stream is done with them. */
void direct_proofs_drop(struct direct *direct);
/* After the proof: read the headers of the segments again that the block lies in. NULL: no memory. */
struct direct_look *direct_look_start(struct lane *lane, const struct desc *desc);
/* -EINPROGRESS; else it is over: 0; -ESTALE: the block, or a segment, is another one by now, or nobody can say; -ETIMEDOUT; -EIO. */
int direct_look_poll(struct direct_look *look, const struct kvfs_record *record);
/* Counts of reads are direct's own; of blocks client/gpu/reader.c's. */
void direct_statistics(struct direct *direct, struct kvfs_gpu_direct_statistics *out);

#endif
