/* Guests: shared memory, split virtqueues, and the parts of them that a vhost-user front end may change. Part of the data plane, not installed.
 *
 * Nothing that a guest can write is believed (I18). Every structure is copied before it is looked at, every address is translated, every length is
 * bounded. A queue whose guest breaks the rules stops, and its error descriptor is signalled, until the guest resets it. */
#ifndef KVFS_VIRTIO_H
#define KVFS_VIRTIO_H

#include "fuse/fuse.h"

#include <linux/virtio_ring.h>

#define QUEUE_SIZE_MAX 1024u
#define QUEUES_MAX 65u   /* the one of high priority, then the request queues */
#define CHAIN_IOVS 1152u /* as many as there are descriptors, with room for cuts at the borders of regions */
#define REGIONS_MAX 256u
#define CHAIN_BYTES_MAX ((uint64_t)16 << 20)

/* ---- shared_memory.c ---- */

/* Accepts a file if a fault on its memory waits for the kernel alone: memfd, tmpfs and hugetlbfs. Also accepts the filesystems of `types` (statfs(2),
 * f_type), which the guest's operator has named. -EMEDIUMTYPE: another filesystem. */
int shared_check(int fd, const uint64_t *types, uint32_t count);
/* A guest that shares memory. Each of `of` guests has an equal part of our addresses. */
struct shared_owner {
    uint32_t of;
};
/* Map memory of another process. If that process truncates the file, the memory reads as zeros instead of ending us. Returns NULL and *error: -errno;
 * -EDQUOT: more than the owner's part. */
void *shared_map(const struct shared_owner *owner, int fd, uint64_t offset, uint64_t size, int *error);
void shared_unmap(void *map, uint64_t size);

/* ---- virtqueue.c: memory ---- */

struct guest_region {
    atomic_uint refs;
    uint64_t guest_address, user_address, size;
    uint8_t *data;
    void *map;
    uint64_t map_size;
};
/* The meaning of a guest's addresses at one time. A request holds the one that it began with, so regions stay mapped until their last request has
 * ended. */
struct guest_memory {
    atomic_uint refs;
    uint32_t count;
    struct guest_region *regions[];
};
void guest_memory_put(struct guest_memory *memory);
struct region_description {
    uint64_t guest_address, size, user_address, offset;
};
/* types: see shared_check. */
int region_map(const struct shared_owner *owner, int fd, const struct region_description *from, const uint64_t *types, uint32_t type_count,
               struct guest_region **out);
void region_put(struct guest_region *region);
/* A copy of `from` (NULL: empty) with `add` (taken over) or without `remove`; either may be NULL. NULL: no memory. */
struct guest_memory *memory_change(const struct guest_memory *from, struct guest_region *add, const struct guest_region *remove);
struct guest_region *memory_find(const struct guest_memory *memory, const struct region_description *region);
bool memory_overlaps(const struct guest_memory *memory, const struct region_description *region);
/* Look up a front end's own address, as ring addresses are given; NULL unless all of the range is in one region. */
void *memory_user(const struct guest_memory *memory, uint64_t address, uint64_t size);

/* ---- virtqueue.c: queues ---- */

/* A request under way, by the head of its descriptor chain. */
struct element {
    bool live, answering, direct;
    uint32_t salt, opcode, cost; /* cost: bytes of the transport's share */
    uint32_t iov_count;
    uint64_t unique, capacity; /* the guest's id; bytes that the reply may have */
    struct iovec *iovs;        /* where it goes */
    struct guest_memory *memory;
};
/* A chain that was just taken: the guest's values, in private memory or bounds-checked. */
struct chain {
    uint16_t head;
    uint32_t in_count, out_count; /* in: what we read */
    uint64_t in_size, out_size;
    struct iovec in[CHAIN_IOVS], out[CHAIN_IOVS];
    struct vring_desc table[QUEUE_SIZE_MAX];
};
/* vhost-user's inflight tracking: requests that were taken and whose answers are not published. The front end keeps it when the daemon ends. */
struct inflight_entry {
    uint8_t inflight;
    uint8_t padding[5];
    uint16_t next;
    uint64_t counter;
};
struct inflight_queue {
    uint64_t features;
    uint16_t version, size, last_batch_head, used_index;
    struct inflight_entry entries[];
};

/* Signals one eventfd of a front end, and never waits for anybody: see bell_ring. */
struct bell {
    struct io_uring ring;
    bool made, set;
    bool aio; /* io_uring is denied: by io_submit(2), of `context` */
    unsigned long context;
    int null_fd, fd;
};

struct virtqueue {
    pthread_mutex_t serve; /* taking: avail, last_avail, state */
    pthread_mutex_t lock;  /* answering: used, elements; taken after serve */
    pthread_cond_t idle;
    uint32_t index;
    uint32_t size;
    uint64_t desc_user, avail_user, used_user;
    bool addressed;              /* these three are set by the front end */
    struct guest_memory *memory; /* changes under both locks, as all addresses do */
    const struct vring_desc *desc;
    struct vring_avail *avail;
    struct vring_used *used;
    uint16_t last_avail, used_index;
    bool enabled, started, broken, event_index, indirect;
    atomic_bool running;            /* enabled, mapped, has a kick: servers may look at it */
    int kick_fd, call_fd, error_fd; /* the front end's: never read or written here */
    struct bell bell;               /* of call_fd; under lock */
    struct element *elements;       /* QUEUE_SIZE_MAX */
    uint32_t in_flight;
    struct inflight_queue *inflight; /* NULL: not tracked */
    uint64_t inflight_counter;
    uint16_t *again; /* heads to be taken once more after a reconnect */
    uint32_t again_count, again_next;
    uint16_t seen_avail, seen_used; /* at the last look (guest_look_again) */
    bool reminded;
};
int virtqueue_init(struct virtqueue *queue, uint32_t index);
void virtqueue_free(struct virtqueue *queue);
/* Make the queue new, without a front end; both locks held, nothing in flight. */
void virtqueue_reset(struct virtqueue *queue);
/* Translate the ring addresses anew; both locks held. -EFAULT: they lie nowhere. */
int virtqueue_map(struct virtqueue *queue);
/* Take a request; serve held. Returns 1, 0, or -errno: the guest broke the rules. On 1 an element is live. */
int virtqueue_take(struct virtqueue *queue, struct chain *chain);
/* Ask for a kick at the next request; serve held. True: one has come already. */
bool virtqueue_arm(struct virtqueue *queue);
void virtqueue_quiet(struct virtqueue *queue);
bool virtqueue_pending(const struct virtqueue *queue);
/* Publish an answer of `size` bytes; lock held, element live. Signals the guest if the guest wants it. */
void virtqueue_publish(struct virtqueue *queue, uint16_t head, uint32_t size);
/* Lock held; never waits. */
void virtqueue_signal(struct virtqueue *queue);
/* The queue owns fd (-1: none), an eventfd, from then on, also after a failure; both locks held. */
int virtqueue_call_set(struct virtqueue *queue, int fd);
int virtqueue_error_set(struct virtqueue *queue, int fd);
/* Called once a second, lock held: signal again if the guest has not reached the answers of a second ago. A front end may lose a signal. */
void virtqueue_remind(struct virtqueue *queue);
/* Forget an element without an answer; lock held. */
void virtqueue_drop(struct virtqueue *queue, uint16_t head);
/* Take no more requests of it until it is reset; serve held, lock not. */
void virtqueue_break(struct virtqueue *queue);
/* Take over a front end's notes of earlier requests; both locks held, queue mapped, nothing in flight. */
int virtqueue_resume(struct virtqueue *queue);

/* ---- porter.c ---- */

#define VHOST_FDS_MAX 8
#define VHOST_PAYLOAD_MAX 272u /* eight regions of SET_MEM_TABLE, 256 bytes of configuration */
struct vhost_header {
    uint32_t request, flags, size;
};
/* A message from the porter, with its descriptors. error: the front end has gone, or has sent no valid message. refused: one of the descriptors was,
 * and none of them comes. */
struct ported {
    int32_t error, refused;
    struct vhost_header header;
    uint8_t payload[VHOST_PAYLOAD_MAX];
};
struct porters {
    atomic_uint refs;
}; /* references: the guest's, and one for each porter */
struct porters *porters_new(void);
void porters_put(struct porters *porters);
/* Let a porter read `fd`, a front end's socket with a timeout for reading. Returns the socket that messages come from. -EUSERS: too many porters have
 * not ended. */
int porter_start(struct porters *porters, const struct kvfs_virtiofs_config *config, int fd);
/* Close `fd` and the socket that porter_start returned (-errno: there is no porter). The porter closes the front end's socket itself, and waits alone
 * if the close waits. */
void porter_end(int channel, int fd);
/* A front end is let in only if there is room for a porter: the close of a front end's socket could wait. */
bool porters_have_room(const struct porters *porters);
/* Asks no filesystem. */
bool is_eventfd(int fd);

/* ---- guest.c ---- */

struct guest {
    struct transport *transport;
    struct guest *next;           /* in the list of ended guests */
    uint32_t number, queue_count; /* queues: with the high-priority one */
    struct kvfs_virtiofs_config config;
    struct virtqueue queues[QUEUES_MAX];
    int listen_fd, stop_fd;
    struct porters *porters;
    struct shared_owner owner;
    pthread_t thread;
    bool threaded;
    atomic_bool stopping, limited;
    atomic_uint dispatching; /* requests that have been taken and not yet dispatched */
    atomic_ullong in_flight_bytes;
    atomic_uint connected;
    atomic_ullong connections, requests, bytes_read, bytes_written, zero_copy_bytes, copied_bytes, protocol_errors, descriptor_errors, io_errors;
};
extern const struct transport_ops guest_ops;
/* Under plane->fuse->transports_lock. */
struct guests {
    struct guest *all[KVFS_VIRTIOFS_MAX];
    struct guest *ended; /* late replies may still look at them */
};
int guests_create(struct kvfs_plane *plane); /* 0 or -ENOMEM */
void guests_stop(struct kvfs_plane *plane);  /* blocks until their threads have ended */
void guests_free(struct kvfs_plane *plane);
/* export.c: a transport without threads: for kvfs_virtiofs_add, and for tests that call its parts. */
int guest_new(struct kvfs_plane *plane, const struct kvfs_virtiofs_config *config, struct guest **out);
int guest_serve(struct server *server, uint32_t *run);
void guest_error(struct guest *guest, uint32_t queue, int error);
/* Called once a second while a front end is there: repeats kicks and signals that were lost on the way. */
void guest_look_again(struct guest *guest);
/* Both locks held: the conditions for the queue to run may have changed. */
void guest_queue_update(struct guest *guest, struct virtqueue *queue);
/* Both locks held. The queue owns fd (-1: none) from then on. */
int guest_queue_kick(struct guest *guest, struct virtqueue *queue, int fd);
/* Take no more requests, and wait until none is under way. Then drop the rest: with an answer (EIO), or silently. */
void guest_queue_stop(struct guest *guest, struct virtqueue *queue, bool answer, uint32_t timeout_ms);
/* The front end is gone. */
void guest_disconnect(struct guest *guest);

/* ---- vhost_user.c ---- */

/* Speak with one front end until it goes away, breaks the protocol, or the guest is to stop. Closes its socket. */
void vhost_user_serve(struct guest *guest, int fd);

#endif
