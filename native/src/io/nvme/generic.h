/* NVMe passthrough: devices that are /dev/ngXnY. */
#ifndef KVFS_NVME_GENERIC_H
#define KVFS_NVME_GENERIC_H

#include "io/ring.h"

bool generic_is(int fd);
int generic_device(struct device *device); /* asks the device; blocks */

#endif
