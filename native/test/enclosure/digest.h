/* The digest of NVMe/TCP: CRC32C (iSCSI's, RFC 3720 B.4), as it stands in a PDU, little-endian. Not the initiator's code: each checks
 * the other. */
#ifndef KVFS_ENCLOSURE_DIGEST_H
#define KVFS_ENCLOSURE_DIGEST_H

#include <stddef.h>
#include <stdint.h>

/* The digest of the bytes that `before` is the digest of, and these behind them; 0 is that of none. */
uint32_t nvme_digest(uint32_t before, const void *data, size_t size);
/* The same, bit by bit. */
uint32_t nvme_digest_reference(uint32_t before, const void *data, size_t size);

#endif
