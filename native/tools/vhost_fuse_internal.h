/* The parts that vhost_fuse.c (rings), vhost_fuse_setup.c (messages) and their test share. */
#ifndef KVFS_VHOST_FUSE_INTERNAL_H
#define KVFS_VHOST_FUSE_INTERNAL_H

#include "vhost_fuse.h"

#include <linux/virtio_config.h>
#include <linux/virtio_ring.h>
#include <stdbool.h>

#define VHOST_RINGS 2u

/* ---- the messages, as they are sent ---- */

#define FEATURE_PROTOCOL (1ull << 30)
#define FEATURES (1ull << VIRTIO_F_VERSION_1 | 1ull << VIRTIO_RING_F_INDIRECT_DESC | 1ull << VIRTIO_RING_F_EVENT_IDX | FEATURE_PROTOCOL)
#define PROTOCOL_MQ (1ull << 0)
#define PROTOCOL_REPLY_ACK (1ull << 3)
#define FLAG_VERSION 1u
#define FLAG_REPLY 4u
#define FLAG_NEED_REPLY 8u

enum {
    GET_FEATURES = 1,
    SET_FEATURES,
    SET_OWNER,
    SET_MEM_TABLE = 5,
    SET_VRING_NUM = 8,
    SET_VRING_ADDR,
    SET_VRING_BASE,
    GET_VRING_BASE,
    SET_VRING_KICK,
    SET_VRING_CALL,
    GET_PROTOCOL_FEATURES = 15,
    SET_PROTOCOL_FEATURES,
    GET_QUEUE_NUM,
    SET_VRING_ENABLE
};

struct header {
    uint32_t request, flags, size;
};
struct state {
    uint32_t index, number;
};
struct address {
    uint32_t index, flags;
    uint64_t desc, used, avail, log;
};
struct table {
    uint32_t count, padding;
    struct {
        uint64_t guest_address, size, user_address, offset;
    } regions[VHOST_FUSE_REGIONS_MAX + 1];
};

/* ---- the connection ---- */

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
