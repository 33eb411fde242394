/* The parts that vhost_fuse.c (rings) and vhost_fuse_setup.c (messages) share. */
#ifndef KVFS_VHOST_FUSE_INTERNAL_H
#define KVFS_VHOST_FUSE_INTERNAL_H

#include "vhost_fuse.h"

#include <linux/virtio_ring.h>
#include <stdbool.h>

#define VHOST_RINGS 2u

/* A request under way, by the head of its descriptors. All of it is private: nothing that the back end could write is read twice. */
struct vhost_slot {
    bool live;
    uint16_t last; /* of its descriptors */
    uint32_t descriptors, opcode;
    uint64_t unique, capacity, started_ns;
    void *answer;
    vhost_fuse_done *done;
    void *context;
};

struct vhost_ring {
    uint32_t index, size, live, free_count;
    uint16_t avail_index, seen, free_head;
    struct vring_desc *desc, *tables; /* tables: `size` indirect ones of `size` descriptors */
    struct vring_avail *avail;
    struct vring_used *used;
    uint16_t *next_free;
    struct vhost_slot *slots;
    int kick_fd;
};

struct vhost_fuse {
    char path[108], error[512];
    int fd, memory_fd, call_fd, broken;
    uint32_t timeout_ms, region_count;
    bool indirect, event_index, acknowledged, started;
    struct vhost_fuse_region regions[VHOST_FUSE_REGIONS_MAX + 1];
    uint64_t look_ns;
    struct vhost_ring rings[VHOST_RINGS];
};

uint64_t vhost_now_ns(void);
/* Keeps the first reason, and returns its -errno. */
__attribute__((format(printf, 3, 4))) int vhost_broken(struct vhost_fuse *vhost, int error, const char *format, ...);

#endif
