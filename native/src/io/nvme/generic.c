/* NVMe passthrough: a namespace by its generic character device (/dev/ngXnY), past the block layer. A ring's parts become commands by
 * IORING_OP_URING_CMD; labels and sizes go by ioctl. The kernel splits nothing here: group_fill cuts pieces that a command can carry.
 */
#include "io/nvme/generic.h"

#include <linux/nvme_ioctl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include "io/nvme/wire.h"

/* The kernel refuses a command with more segments than the driver takes: 127 for PCIe. At worst each page is a segment. */
#define TRANSFER_MAX (256u << 10)
#define MDTS_MIN 4 /* 64 KiB: with smaller pieces a run would be more than a group holds */
#define ADMIN_TIMEOUT_MS 10000

bool generic_is(int fd) {
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISCHR(st.st_mode);
}

/* 0, -errno, or the status of NVMe. */
static int command(int fd, unsigned long request, struct nvme_passthru_cmd *cmd, uint8_t opcode, uint32_t nsid, void *data, uint32_t size) {
    cmd->opcode = opcode;
    cmd->nsid = nsid;
    cmd->addr = (uintptr_t)data;
    cmd->data_len = size;
    cmd->timeout_ms = ADMIN_TIMEOUT_MS;
    int r = ioctl(fd, request, cmd);
    return r < 0 ? -errno : r & 0x7ff;
}

static int identify(int fd, uint32_t nsid, uint32_t cns, void *data) {
    struct nvme_passthru_cmd cmd = {.cdw10 = cns};
    return command(fd, NVME_IOCTL_ADMIN_CMD, &cmd, NVME_ADMIN_IDENTIFY, nsid, data, PAGE);
}

int kvfs_generic_info(int fd, struct kvfs_generic_info *out) {
    union {
        struct nvme_namespace namespace;
        struct nvme_controller controller;
    } *data;
    if (!generic_is(fd))
        return -ENOTTY;
    int nsid = ioctl(fd, NVME_IOCTL_ID);
    if (nsid < 0)
        return -errno;
    if (posix_memalign((void **)&data, PAGE, sizeof(*data)))
        return -ENOMEM;
    memset(out, 0, sizeof(*out));
    out->nsid = (uint32_t)nsid;
    int r = identify(fd, 0, NVME_CNS_CONTROLLER, data);
    if (r)
        goto out;
    uint8_t mdts = data->controller.mdts;
    out->transfer_size = mdts && mdts < 6 ? (uint32_t)PAGE << mdts : TRANSFER_MAX;
    out->write_cache = data->controller.vwc & 1;
    r = identify(fd, out->nsid, NVME_CNS_NAMESPACE, data);
    if (r)
        goto out;
    const struct nvme_lba_format *format = &data->namespace.lbaf[data->namespace.flbas & 15];
    if ((mdts && mdts < MDTS_MIN) || format->lbads < 9 || format->lbads > 12 || format->metadata_size || data->namespace.nsze == 0 ||
        data->namespace.nsze > UINT64_MAX >> 13) {
        r = -EMEDIUMTYPE;
        goto out;
    }
    out->block_size = 1u << format->lbads;
    out->size = data->namespace.nsze << format->lbads;
out:
    free(data);
    return r;
}

int kvfs_generic_io(int fd, const struct kvfs_generic_info *info, uint32_t write, uint64_t offset, void *data, uint32_t size) {
    if (offset % info->block_size || size % info->block_size || offset > info->size || size > info->size - offset)
        return -EINVAL;
    for (uint32_t done = 0; done < size;) {
        uint32_t part = size - done < info->transfer_size ? size - done : info->transfer_size;
        uint64_t block = (offset + done) / info->block_size;
        struct nvme_passthru_cmd cmd = {.cdw10 = (uint32_t)block, .cdw11 = (uint32_t)(block >> 32), .cdw12 = part / info->block_size - 1};
        int r = command(fd, NVME_IOCTL_IO_CMD, &cmd, write ? NVME_IO_WRITE : NVME_IO_READ, info->nsid, (uint8_t *)data + done, part);
        if (r)
            return r;
        done += part;
    }
    return 0;
}

int kvfs_generic_flush(int fd, const struct kvfs_generic_info *info) {
    struct nvme_passthru_cmd cmd = {0};
    return command(fd, NVME_IOCTL_IO_CMD, &cmd, NVME_IO_FLUSH, info->nsid, NULL, 0);
}

int generic_device(struct device *device) {
    struct kvfs_generic_info info;
    int r = kvfs_generic_info(device->fd, &info);
    if (r)
        return r < 0 ? r : -EIO;
    device->nsid = info.nsid;
    device->block_size = info.block_size;
    device->transfer_size = info.transfer_size;
    return 0;
}

static void start(struct ring *ring, struct io_part *part) {
    struct device *device = &ring->array->devices[part->device];
    const struct iovec *iov = &part->group->iovs[part->iov_first], *end = iov + part->iov_count;
    uint64_t block = part->device_offset / device->block_size;
    part->error = 0;
    part->commands_left = (uint16_t)((part->size + device->transfer_size - 1) / device->transfer_size);
    while (iov < end) {
        uint32_t count = 0, size = 0;
        while (iov + count < end && size + iov[count].iov_len <= device->transfer_size)
            size += (uint32_t)iov[count++].iov_len;
        struct io_uring_sqe *sqe = ring_sqe(ring);
        memset(sqe, 0, 2 * sizeof(*sqe));
        sqe->opcode = IORING_OP_URING_CMD;
        sqe->flags = IOSQE_FIXED_FILE;
        sqe->fd = (int)part->device;
        sqe->cmd_op = count == 1 ? NVME_URING_CMD_IO : NVME_URING_CMD_IO_VEC;
        struct nvme_uring_cmd *cmd = (struct nvme_uring_cmd *)sqe->cmd;
        cmd->opcode = part->group->write ? NVME_IO_WRITE : NVME_IO_READ;
        cmd->nsid = device->nsid;
        cmd->addr = count == 1 ? (uintptr_t)iov->iov_base : (uintptr_t)iov;
        cmd->data_len = count == 1 ? size : count;
        cmd->cdw10 = (uint32_t)block;
        cmd->cdw11 = (uint32_t)(block >> 32);
        cmd->cdw12 = size / device->block_size - 1;
        io_uring_sqe_set_data(sqe, part);
        block += size / device->block_size;
        iov += count;
    }
}

static bool reaped(struct io_part *part, int *result) {
    if (*result && !part->error)
        part->error = *result < 0 ? *result : -EIO;
    *result = part->error ? part->error : (int)part->size;
    return --part->commands_left == 0;
}

const struct device_ops passthrough_ops = {.start = start, .reaped = reaped, .cancel = uring_cancel};
