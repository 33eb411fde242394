/* NVMe passthrough: devices that are /dev/ngXnY. */
#ifndef KVFS_NVME_GENERIC_H
#define KVFS_NVME_GENERIC_H

#include "io/ring.h"

bool generic_is(int fd);
int generic_device(struct device *device);                     /* asks the device; blocks */
void generic_part_start(struct ring *ring, struct io_part *part, bool write);
bool generic_command_done(struct io_part *part, int result);   /* the part's last: part->error says how */

#endif
