/* A batch of news as bytes: whether it is whole. The format is in kvfs_pod.h. */
#include "pod/pod_layout.h"

int kvfs_pod_batch_check(const void *bytes, uint64_t size, uint64_t secret, struct kvfs_pod_batch *out) {
    _Alignas(8) uint8_t copy[KVFS_POD_BATCH_SIZE_MAX];
    struct kvfs_pod_batch head;

    if (size < sizeof(head) || size > sizeof(copy))
        return -EBADMSG;
    memcpy(&head, bytes, sizeof(head)); /* the bytes need not be aligned */
    if (head.magic != KVFS_MAGIC_NEWS)
        return -EBADMSG;
    if (head.version != 1)
        return -EPROTONOSUPPORT;
    if (head.size != size || head.record_count > KVFS_POD_BATCH_RECORDS_MAX ||
        size != sizeof(head) + head.segment_count * sizeof(struct kvfs_pod_batch_segment) + head.shape_count * sizeof(struct kvfs_pod_batch_shape) +
                    head.record_count * sizeof(struct kvfs_pod_batch_record))
        return -EBADMSG;
    memcpy(copy, bytes, size);
    memset(copy + offsetof(struct kvfs_pod_batch, checksum), 0, sizeof(head.checksum));
    if (kvfs_checksum(copy, size, secret) != head.checksum)
        return -EBADMSG;
    *out = head;
    return 0;
}
