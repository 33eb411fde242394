/* The data plane, as the control plane sees it. Python decides, C moves bytes.
 *
 * Every function returns 0 (or a count) or -errno, takes no callbacks, and may be called from any thread unless it says otherwise.
 * Nothing here blocks longer than a mutex, except where "blocks" is said. Payload never crosses this interface: only places,
 * records, headers and summaries do.
 */
#ifndef KVFS_PLANE_H
#define KVFS_PLANE_H

#include <stdint.h>
#include "kvfs_format.h"
#include "kvfs_pod.h"
#include "kvfs_names.h"
#include "kvfs_table.h"
#include "kvfs_chains.h"
#include "kvfs_worth.h"

struct kvfs_plane;

struct kvfs_member {
    uint32_t device;
    uint32_t zone;
};

struct kvfs_plane_config {
    uint64_t secret;
    uint64_t mount_epoch;
    uint64_t zone_size;        /* multiple of stripe_unit */
    uint64_t stripe_unit;      /* multiple of 4096 */
    uint64_t staging_size;     /* bytes of payload memory for writes */
    uint64_t read_memory_size; /* bytes of payload memory for reads */
    uint64_t records_max;      /* of the block table */
    uint32_t stripe_width;
    uint32_t segment_count;
    uint32_t device_count;
    uint32_t io_timeout_ms;      /* one device I/O */
    uint32_t request_timeout_ms; /* one request forwarded to Python */
    uint32_t server_threads;     /* 0: one a core, at most 8 */
    uint32_t store_threads;      /* 0: 8 */
    uint32_t max_read;           /* bytes; 0: 1 MiB */
    uint32_t max_write;          /* bytes; 0: 1 MiB; at most 1 MiB */
    uint32_t verify;             /* 1; 0 only in benchmarks: leaves are not checked */
    uint32_t spin_us;            /* a server thread polls this long before it sleeps, while traffic lasts; 0: never */
    uint32_t kernel_timeout_s;   /* the kernel ends a /dev/fuse connection whose request waits longer, at most 65535; 0: never */
    uint32_t slow_ms;            /* a request that takes longer is reported by KVFS_EVENT_SLOW; 0: none is */
    uint32_t idmap;              /* 1: new mounts may be bound with an idmapping, if the kernel can do that */
};

/* ---- NVMe/TCP targets ---- */

/* A namespace, or with nsid 0 a subsystem, and how to reach it. Every field is checked by the function that takes it (I18). */
struct kvfs_nvme_target {
    uint64_t magic; /* the data plane's */
    uint32_t reserved;
    uint32_t nsid;
    uint32_t queues;        /* I/O queues, at most; 0: 128 */
    uint32_t depth;         /* commands at once in a queue; 0: 128 */
    uint32_t kato_ms;       /* keep alive; 0: 5000 */
    uint32_t timeout_ms;    /* to connect, and of a command that is no I/O of the plane; 0: 5000 */
    uint32_t header_digest; /* 0, 1 */
    uint32_t data_digest;
    uint32_t port;
    uint32_t reserved2;
    uint8_t hostid[16];
    char host[256]; /* name or address; all three end with a zero */
    char nqn[224];
    char hostnqn[224];
};
static_assert(sizeof(struct kvfs_nvme_target) == 768, "ABI");

/* A descriptor (a sealed memfd; the caller's to close) that stands for the target. It is accepted in place of a device's descriptor, by
 * kvfs_plane_create and by a native client. */
int kvfs_nvme_descriptor(const struct kvfs_nvme_target *target);

/* A controller, for labels and sizes. Every call blocks, timeout_ms at most, and reconnects if the connection was lost; one thread at a
 * time. */
struct kvfs_nvme;
struct kvfs_nvme_info {
    uint64_t size; /* of the namespace, in bytes; 0 without nsid */
    uint32_t block_size;
    uint32_t transfer_size; /* of one command */
    uint32_t queues;        /* I/O queues that the controller grants */
    uint32_t write_cache;
    char model[41];
    char serial[21];
    char reserved[2];
};
struct kvfs_nvme_subsystem {
    uint32_t type;      /* 1 referral, 2 NVM, 3 discovery */
    uint32_t transport; /* 3 TCP */
    char nqn[256];
    char address[256];
    char port[32];
};
int kvfs_nvme_open(const struct kvfs_nvme_target *target, struct kvfs_nvme **out);
void kvfs_nvme_close(struct kvfs_nvme *nvme);
int kvfs_nvme_info(struct kvfs_nvme *nvme, struct kvfs_nvme_info *out);
/* Whole blocks; a write is durable when it returns. */
int kvfs_nvme_read(struct kvfs_nvme *nvme, uint64_t offset, void *data, uint32_t size);
int kvfs_nvme_write(struct kvfs_nvme *nvme, uint64_t offset, const void *data, uint32_t size);
int kvfs_nvme_flush(struct kvfs_nvme *nvme);
/* One step of a reservation, write exclusive for registrants, under a key of this host. REPLACE: whatever its key was before. PREEMPT:
 * `other`'s registration ends. -EBADE: another host's reservation, or not registered; -EOPNOTSUPP: it has no reservations. */
enum kvfs_reservation_step {
    KVFS_RESERVATION_REGISTER,
    KVFS_RESERVATION_REPLACE,
    KVFS_RESERVATION_ACQUIRE,
    KVFS_RESERVATION_PREEMPT,
    KVFS_RESERVATION_RELEASE,
    KVFS_RESERVATION_END
};
int kvfs_nvme_reservation(struct kvfs_nvme *nvme, enum kvfs_reservation_step step, uint64_t key, uint64_t other);
/* Active namespaces, at most `count` of them; returns how many there are. */
int kvfs_nvme_namespaces(struct kvfs_nvme *nvme, uint32_t *out, uint32_t count);
/* The entries of a discovery controller; returns how many there are, of which at most `count` are written. The target's nqn is ignored. */
int kvfs_nvme_discover(const struct kvfs_nvme_target *target, struct kvfs_nvme_subsystem *out, uint32_t count);
/* The last failure of a kvfs_nvme_ call on this thread, as a message. The caller knows the address, so it has none. */
const char *kvfs_nvme_error(void);

/* device_fds stay the caller's and must outlive the plane. zones_offset[device] is where its zone 0 begins; members is segment_count *
 * stripe_width long. */
int kvfs_plane_create(const struct kvfs_plane_config *config, const int *device_fds, const uint64_t *zones_offset, const struct kvfs_member *members,
                      struct kvfs_plane **out);
/* Blocks until every device I/O has been reaped or io_timeout_ms is over, twice. Aborts transports that still exist. */
void kvfs_plane_destroy(struct kvfs_plane *plane);
/* Take a device out of service: from now on I/O of segments that touch it fails at once; I/O under way has its deadlines. */
int kvfs_device_stop(struct kvfs_plane *plane, uint32_t device);
/* Take it into service (again), after its descriptor was opened, or changed by dup2. Blocks while an NVMe/TCP controller is connected.
 * Fails as create does. */
int kvfs_device_use(struct kvfs_plane *plane, uint32_t device);
/* The block table; the plane's. Table writes go through the kvfs_name_ and kvfs_inode_ functions below. */
struct kvfs_table *kvfs_plane_table(struct kvfs_plane *plane);
/* The names in memory; the plane's. */
struct kvfs_names *kvfs_plane_names(struct kvfs_plane *plane);
/* The last failure of create, or of taking a device into service, on this thread, as a message. */
const char *kvfs_plane_error(void);

/* ---- events, completions and calls: one eventfd, readable while one of the queues holds something ---- */

enum kvfs_event_type {
    KVFS_EVENT_SPILL = 1,           /* staging is short: spill the inode */
    KVFS_EVENT_RESEAL = 2,          /* the last writer is gone and left unsealed bytes: seal it */
    KVFS_EVENT_IDLE = 3,            /* a nameless inode lost its last handle: delete it */
    KVFS_EVENT_BAD_BLOCK = 4,       /* a block failed verification, value = segment: drop it */
    KVFS_EVENT_IO_ERROR = 5,        /* value = device << 32 | errno */
    KVFS_EVENT_TRANSPORTS_GONE = 6, /* the last transport ended; the session socket is closed */
    KVFS_EVENT_GUEST = 8,        /* a guest or its front end broke the rules; inode = its number, value = queue << 32 | errno (queue 0xffffffff: the
                                 * protocol). The queue has stopped, or the connection has ended */
    KVFS_EVENT_DEVICE = 9,       /* value = device: its connection was lost, or is back; kvfs_device_message */
    KVFS_EVENT_SLAB_CLOSED = 10, /* a slab with a name. value 1: it lost its last handle, and goes (kvfs_slab_close). value 0: it lost its
                                  * last writer, and becomes an ordinary file (kvfs_slab_to_file) */
    KVFS_EVENT_SLAB_FREE = 11,   /* an inode's slab has ended, and no I/O of it is under way: its segments are free. value: the first of
                                 * them */
    KVFS_EVENT_SLAB_WANTED = 12, /* a file of `value` bytes without content is written with O_DIRECT: make it a slab, then call
                                  * kvfs_slab_answer */
    KVFS_EVENT_ROOM = 15,        /* a FLUSH waits for room in a segment: kvfs_flush_wanted() */
    KVFS_EVENT_OVERTAKEN =
        16,                  /* another node has stored this inode's name, or removed it, or changed a directory. value = the version up to which this
                                  * node's own loses */
    KVFS_EVENT_PINNED = 17,  /* a file that was being sealed here was pinned meanwhile, or a directory above it: its pages are to be counted */
    KVFS_EVENT_LINGERS = 18, /* the inode's name is given to another: it can be opened for a moment more */
    KVFS_EVENT_PLACES = 14,  /* kvfs_places_noted() has news that are waited for */
    KVFS_EVENT_SLOW = 13     /* a request of this inode took longer than slow_ms. value = FUSE opcode << 56 | microseconds. Ten a second
                                 * at most, and no more than ten not yet taken; the others count in slow_requests only */
};
struct kvfs_event {
    uint32_t type;
    uint32_t reserved;
    uint64_t inode;
    uint64_t value;
};
struct kvfs_completion {
    uint64_t cookie;
    int64_t result;
};

int kvfs_event_fd(struct kvfs_plane *plane);
int kvfs_take_events(struct kvfs_plane *plane, struct kvfs_event *out, uint32_t count);
int kvfs_take_completions(struct kvfs_plane *plane, struct kvfs_completion *out, uint32_t count);

/* ---- transports and the session ---- */

/* Makes the socketpair and returns the end for pyfuse3 ("/dev/fd/N"), the caller's to close. INIT towards the session is sent at once. */
int kvfs_session_open(struct kvfs_plane *plane);
/* CREATE, UNLINK, RENAME and FLUSH, which come with every stored block, and listings: handed over as they are, many at once, not by the session.
 * Listings always come so, the others from kvfs_calls_open() on. The deadline is that of all requests. */
struct kvfs_call {
    uint64_t id;         /* for the answer */
    uint64_t inode;      /* the directory; FLUSH: the file */
    uint64_t new_parent; /* RENAME; READDIR: the inode that was listed last, or 0 */
    uint32_t opcode;     /* linux/fuse.h; RENAME2 as RENAME */
    uint32_t flags;      /* CREATE: of open(2); RENAME: of renameat2(2) */
    uint32_t mode, uid, gid;
    uint16_t name_size, new_name_size;
    char name[256], new_name[256]; /* READDIR, READDIRPLUS: the name that was listed last, if C knows it */
};
/* on 0: as before it. Calls taken after that have lost their owner: the end of the session answers them, or a guest's relay asks the next daemon. */
void kvfs_calls_open(struct kvfs_plane *plane, int on);
/* Whose request the session serves under this `pid`, or a call under the low 32 bits of its id: for kvfs_names_request(). 0: of none that is done once. */
int kvfs_request_of(struct kvfs_plane *plane, uint32_t token, uint64_t *connection, uint64_t *unique);
int kvfs_take_calls(struct kvfs_plane *plane, struct kvfs_call *out, uint32_t count);
/* Names of a directory in their order, behind the one that a READDIR asks for. They are kept for the next READDIR of the handle. */
struct kvfs_listed {
    const uint64_t *inodes;
    const uint8_t *sizes;
    const char *text; /* one name after the other */
    uint32_t count;
    uint32_t end; /* there are no more */
};
/* error: 0 or -errno; inode: of a CREATE, which is in the block table and being written; names: of a READDIR or READDIRPLUS, else NULL. Late answers
 * are dropped. Returns 0, or -EAGAIN: all the names are gone by now. The call then needs an answer by those behind them. */
int kvfs_answer(struct kvfs_plane *plane, uint64_t id, int error, uint64_t inode, const struct kvfs_listed *names);
/* Serve this mounted /dev/fuse descriptor (taken over). */
int kvfs_fuse_add(struct kvfs_plane *plane, int fd);

/* ---- a mount that outlives this process: another one keeps its descriptors for the next daemon ---- */

#define KVFS_HELD_VERSION 1 /* of new ones; a mount keeps it */
#define KVFS_HELD_OLDEST 1
#define KVFS_WRITTEN_VERSION 1
#define KVFS_WRITTEN_OLDEST 1
#define KVFS_OPENS_VERSION 1
#define KVFS_OPENS_OLDEST 1
#define KVFS_HELD_DESCRIPTORS_MAX 8
/* The answer to INIT, as far as a later daemon must know it. */
struct kvfs_held {
    uint32_t version; /* KVFS_HELD_OLDEST to KVFS_HELD_VERSION */
    uint32_t minor;   /* of the protocol that was agreed on */
    uint64_t flags;   /* of fuse_init_out, with flags2 above */
    uint32_t max_read, max_write;
    uint64_t reserved[5]; /* zero */
};
/* A list of the inodes that are open for writing: memory (memfd_create(2)) for all daemons of a mount. Its descriptor, or -errno. */
int kvfs_written_make(void);
/* Whether it can be kept. 0 or as kvfs_fuse_hold(). Changes nothing. */
int kvfs_written_check(int fd, struct kvfs_versions *out);
/* Keep that list, and know what earlier daemons left in it. Before kvfs_fuse_add() or kvfs_fuse_take(), once. The descriptor stays the caller's. -EBADMSG:
 * it is none; -EPROTONOSUPPORT: of another version. Mounts of this plane do without FUSE over io_uring from then on. */
int kvfs_fuse_hold(struct kvfs_plane *plane, int written_fd);
/* A list of the handles by which the mount's kernel reads: memory as that of kvfs_written_make(). */
int kvfs_opens_make(void);
/* Whether it can be kept. 0 or as kvfs_opens_keep(). Changes nothing. */
int kvfs_opens_check(int fd, struct kvfs_versions *out);
/* Keep that list, and have again what earlier daemons gave out. Behind kvfs_fuse_hold() and kvfs_plane_join(), once, when the block table is full, and
 * before any block may go. Errors as there: the plane is as it was. */
int kvfs_opens_keep(struct kvfs_plane *plane, int opens_fd);
/* Of the mount: its descriptors, which stay the plane's, and the answer to INIT. Returns how many, or -errno. -EAGAIN: INIT has not come. -EOPNOTSUPP: its
 * kernel does not send requests again (before Linux 6.9). */
int kvfs_fuse_held(struct kvfs_plane *plane, int *fds, uint32_t capacity, struct kvfs_held *out);
/* Whether a mount with this number of descriptors can be served. The state is a struct kvfs_held, of any build. 0; -EPROTONOSUPPORT: of another version;
 * -EBADMSG: it is none; -EPROTO: it has flags that this build does not know; -EINVAL: numbers that cannot be. Changes nothing. */
int kvfs_held_check(const void *state, uint32_t size, uint32_t count, struct kvfs_versions *out);
/* Serve a mount that an earlier daemon served: all its descriptors (taken over, also after a failure), and what it agreed on. The kernel sends its requests
 * without an answer again, and looks all names up again. As kvfs_held_check(), or -EOPNOTSUPP: there are exports, and that kernel does not look for changes
 * by them. */
int kvfs_fuse_take(struct kvfs_plane *plane, const int *fds, uint32_t count, const struct kvfs_held *held);
/* Answer what is under way, for at most this time, take nothing more, and end the transport. The mount waits for the next daemon. */
void kvfs_fuse_leave(struct kvfs_plane *plane, uint32_t timeout_ms);

/* 1: the mount's kernel lets it be bound with an idmapping; requests then tell no user. One that was taken over keeps what it had. */
int kvfs_fuse_idmap(struct kvfs_plane *plane);

#define KVFS_VIRTIOFS_MAX 64
#define KVFS_VIRTIOFS_MEMORY_TYPES_MAX 4
struct kvfs_virtiofs_config {
    char tag[36];            /* of the config space: UTF-8, padded with zeros */
    uint32_t queue_count;    /* request queues, 1 to 64 */
    uint32_t queue_size_max; /* a power of two, 8 to 1024 */
    uint32_t memory_type_count;
    uint32_t reserved;
    /* Guest memory may lie in files of these filesystems (statfs(2), f_type), in addition to memfd, tmpfs and hugetlbfs. In another filesystem, a
     * fault on a file that does not answer would wait for ever. */
    uint64_t memory_types[KVFS_VIRTIOFS_MEMORY_TYPES_MAX];
};
/* Serve vhost-user-fs front ends that connect to listen_fd, one at a time. listen_fd is an AF_UNIX stream socket that listens; dup'ed.
 * Returns the number of the transport, or -errno (-EUSERS: KVFS_VIRTIOFS_MAX exist). After a front end has gone away, its next connection
 * is waited for. */
int kvfs_virtiofs_add(struct kvfs_plane *plane, int listen_fd, const struct kvfs_virtiofs_config *config);
/* Stop: a front end's requests under way are answered, within a deadline, then its socket closes. Only asks for the stop: the transport has
 * gone when its statistics are -ENOENT. -ENOENT: no such number. */
int kvfs_virtiofs_remove(struct kvfs_plane *plane, int number);
struct kvfs_virtiofs_statistics {
    uint32_t connected, queues_running;
    uint64_t connections, requests, bytes_read, bytes_written;
    uint64_t zero_copy_bytes; /* of bytes_read: the device wrote them to the guest's pages */
    uint64_t copied_bytes;    /* payload that a CPU copied out of or into guest memory */
    uint64_t protocol_errors, descriptor_errors, io_errors;
};
int kvfs_virtiofs_statistics(struct kvfs_plane *plane, int number, struct kvfs_virtiofs_statistics *out);
/* Make every host mount look up its cached names again (FUSE_NOTIFY_INC_EPOCH, where supported). Queued to the notifier thread. */
void kvfs_notify_epoch(struct kvfs_plane *plane);
/* Completion: 0 when the hosts have received all that was queued before, -ENOMEM. */
int kvfs_notify_flush(struct kvfs_plane *plane, uint64_t cookie);

/* ---- FLUSHes that wait for room (KVFS_EVENT_ROOM) ---- */

/* The pages that the first of them needs; 0: none waits. */
uint32_t kvfs_flush_wanted(struct kvfs_plane *plane);
/* There may be room: they are tried again. */
void kvfs_flush_retry(struct kvfs_plane *plane);
/* There is none: they come as calls. */
void kvfs_flush_give_up(struct kvfs_plane *plane);

/* ---- names (all from the one control-plane thread) ---- */

/* What has lost its name lives on: it is open, or it was sealed. A look-up of a moment ago can still open it then: the kernel repeats an OPEN that is ESTALE
 * only once. */
enum kvfs_kept { KVFS_KEPT_OPEN = 1, KVFS_KEPT_LINGERS = 2 };
/* Attributes or place changed, name unchanged. */
int kvfs_inode_update(struct kvfs_plane *plane, const void *inode_record);
/* Like kvfs_inode_update, for a block that was copied to another place; -EBUSY: it is being written, from its old place, and stays
 * there. */
int kvfs_inode_move(struct kvfs_plane *plane, const void *inode_record);
/* Its device is away: the inode leaves the table. 1: it is open and was kept nameless (KVFS_EVENT_IDLE follows); 0: it is gone. */
int kvfs_inode_hide(struct kvfs_plane *plane, uint64_t inode);
/* For each inode: if it is open, busy[i] = 1 and nothing changes. Otherwise, or if it is open beyond its users' shares, its record is removed and
 * busy[i] = 0. Returns the busy count. */
int kvfs_inode_evict(struct kvfs_plane *plane, const uint64_t *inodes, uint32_t count, uint8_t *busy);
/* kvfs_table_load() in a step, of blocks that are found again while subscribers listen. */
int64_t kvfs_blocks_load(struct kvfs_plane *plane, const void *records, uint64_t size);
/* A block, as eviction looks at it. */
struct kvfs_look {
    uint64_t inode;
    uint32_t pages;     /* in the segment; 0: it has nothing */
    uint32_t pages_all; /* in all segments */
    uint32_t use;       /* as kvfs_inode_uses() has it */
    uint8_t open;       /* enum kvfs_open_state */
    uint8_t absent;     /* 1: nothing else is known before kvfs_names_load() of its record */
    uint8_t orphan;
    uint8_t reserved; /* zero */
};
/* Look at these inodes in a segment, as of one instant. */
void kvfs_blocks_look(struct kvfs_plane *plane, uint32_t segment, const uint64_t *inodes, uint32_t count, struct kvfs_look *out);
/* One step: sealed blocks with a part in the segment leave block table, names and places, and hosts need notice of their names.
 * UINT32_MAX: wherever they lie. A block stays if it is open within its users' shares, leased, its record is not in memory, or memory is short.
 * gone[i] = 1 for blocks that left. */
struct kvfs_evicted {
    uint32_t blocks;
    uint32_t reserved; /* zero */
    uint64_t pages;
};
void kvfs_blocks_evict(struct kvfs_plane *plane, uint32_t segment, const uint64_t *inodes, uint32_t count, uint8_t *gone,
                       struct kvfs_evicted *evicted);
/* The same for files that are worth nothing without each other, wherever they lie: while one is open within its users' shares, or written, all
 * stay. Leased ones stay without the others. */
void kvfs_group_evict(struct kvfs_plane *plane, const uint64_t *inodes, uint32_t count, uint8_t *gone, struct kvfs_evicted *evicted);
/* One step: files of a directory lose their names and go, as by unlink(2); hosts will have to be told of the names. left[i] = 1 for the caller's:
 * directories, pinned files, and files without a record in memory. */
struct kvfs_removed {
    uint32_t files;
    uint32_t open;  /* of these: they live on without a name until the last close */
    uint64_t bytes; /* of sealed ones */
};
void kvfs_files_remove(struct kvfs_plane *plane, uint64_t directory, const uint64_t *inodes, uint32_t count, uint8_t *left,
                       struct kvfs_removed *removed);
/* For each inode: tick of its last use << 8 | hits. Hits are opens for reading since the mount, and stop at 255; an inode's creation is its
 * first use, and no hit. Blocks that existed at the mount begin with the age that kvfs_uses_begin() gives them. 0 for missing inodes. */
int kvfs_inode_uses(struct kvfs_plane *plane, const uint64_t *inodes, uint32_t count, uint32_t *uses);
/* All blocks were used a number of ticks ago, by the segment in which they begin, and the clock is at 0: before anything is used. */
void kvfs_uses_begin(struct kvfs_plane *plane, const uint32_t *ages, uint32_t segment_count);
/* Weigh the pool's segments by its blocks (kvfs_weigh), and count these. It reads what others change meanwhile, and takes some 4 ns a block:
 * where there are many, not for a thread that answers requests. */
void kvfs_segments_weigh(struct kvfs_plane *plane, const struct kvfs_worths *worths, float price, uint32_t tick, struct kvfs_weight *segments,
                         uint32_t segment_count, struct kvfs_ages *ages);
/* Add the ghosts of evicted blocks to `ages`. It takes a step to fit their number to that of blocks. Time as above. */
void kvfs_ghosts_count(struct kvfs_plane *plane, uint32_t tick, struct kvfs_ages *ages);
/* Uses since the last time, by the class and age that their blocks had before. */
void kvfs_used_take(struct kvfs_plane *plane, struct kvfs_ages *out);
/* `inode` is the block behind `parent` in its chain (kvfs_chains.h). Inodes that are not there are passed over. */
void kvfs_inode_follow(struct kvfs_plane *plane, uint64_t inode, uint64_t parent);
/* The inode that it is the one behind. -ENOENT: that is not known, or one of the two is not there. */
int64_t kvfs_inode_parent(struct kvfs_plane *plane, uint64_t inode);
void kvfs_plane_chains(struct kvfs_plane *plane, struct kvfs_chains_statistics *out);
/* The clock of uses; its low 24 bits count. */
void kvfs_set_tick(struct kvfs_plane *plane, uint32_t tick);
/* Blocks that are used now. found: native clients have read them, which is a hit for each. Missing inodes are passed over. */
int kvfs_inode_touch(struct kvfs_plane *plane, const uint64_t *inodes, uint32_t count, int found);
/* The same, as a client tells. It can have used this number of bytes: each inode costs `cost` of them, and each block that it found its size, too.
 * Blocks that cost more than is left are passed over. Returns what is left. */
uint64_t kvfs_inode_told(struct kvfs_plane *plane, const uint64_t *inodes, uint32_t count, int found, uint64_t budget, uint64_t cost);
/* Blocks that a user no longer needs: they are worth what such blocks were worth so far, until their next use. */
void kvfs_inode_done(struct kvfs_plane *plane, const uint64_t *inodes, uint32_t count);
/* Beyond share: sealed, and all its users hold more than their share; eviction may take it. Leased: neither, and a lease keeps it. */
enum kvfs_open_state { KVFS_NOT_OPEN = 0, KVFS_OPEN = 1, KVFS_BEING_WRITTEN = 2, KVFS_OPEN_BEYOND_SHARE = 3, KVFS_LEASED = 4 };
int kvfs_inode_is_open(struct kvfs_plane *plane, uint64_t inode);
/* As kvfs_inode_is_open(). Another node's change of this name counts up to this version. A file that is being written stays:
 * KVFS_EVENT_OVERTAKEN reports it again when the last writer has gone. Its seal may have been under way already, or none may come. */
int kvfs_inode_overtaken(struct kvfs_plane *plane, uint64_t inode, uint64_t version);

/* ---- the feed: changes of blocks' names, for native clients that subscribed (block/feed.h) ---- */

#define KVFS_FEED_SIZE 16777216
struct kvfs_feed_place {
    uint64_t size;     /* of its records */
    uint64_t position; /* of the next change */
    uint64_t number;   /* of the last change before that */
    int32_t fd;        /* the plane's, until kvfs_feed_stop() */
    uint32_t reserved;
};
/* The feed begins, if it has not. size: of its records, if it begins now: a multiple of 64 KiB, 256 KiB to 1 GiB. -EINVAL, -ENOMEM, or an error of
 * memfd_create(2). */
int kvfs_feed_begin(struct kvfs_plane *plane, uint64_t size, struct kvfs_feed_place *out);
/* The last listener has gone. */
void kvfs_feed_stop(struct kvfs_plane *plane);

/* ---- a pod: names and blocks of other nodes (kvfs_pod.h) ---- */

/* The pool is a pod, and this node has that slot. Call it before anything is served. -EINVAL, -ENOMEM, or an error of memfd_create(2). */
int kvfs_plane_join(struct kvfs_plane *plane, uint32_t slot, uint32_t nodes, uint32_t lot, uint64_t entries_max, uint64_t news_bytes, uint64_t start);
/* A look-up through a mount that finds nothing goes on to Python, which waits for news. */
void kvfs_foreign_wait(struct kvfs_plane *plane, int on);
struct kvfs_pod *kvfs_plane_pod(struct kvfs_plane *plane); /* the plane's; NULL: the pool is no pod */
struct kvfs_news *kvfs_plane_news(struct kvfs_plane *plane);
/* The block or directory that the name leads to at other nodes. 0: a block; 1: a directory; -ENOENT; -EAGAIN: try again. */
int kvfs_foreign_find(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t name_size, struct kvfs_record *out);
/* Tell once more of all directories that this node has: another one has begun, and empty ones are on no device. Returns how many. Any thread. */
uint64_t kvfs_foreign_tell_directories(struct kvfs_plane *plane);
/* Names of other nodes that were removed here, since the last call. Their owners may be away: the node that removed them says it again when they are back.
 * Returns how many of `capacity` were written; call again until it is 0. */
struct kvfs_tombstone {
    uint64_t key_low, key_high;
    uint64_t version; /* of the removal */
    uint32_t slot;    /* of the owner */
    uint32_t reserved;
};
uint32_t kvfs_foreign_tombstones(struct kvfs_plane *plane, struct kvfs_tombstone *out, uint32_t capacity);
/* Tell of removals once more. */
void kvfs_foreign_tell_gone(struct kvfs_plane *plane, const struct kvfs_tombstone *tombstones, uint32_t count);
/* A block that was looked up, by its node id. name: KVFS_NAME_MAX + 1 bytes. 0, -ENOENT. */
int kvfs_foreign_known(struct kvfs_plane *plane, uint64_t inode, struct kvfs_record *out, char *name);
/* Take in another node's news, as kvfs_pod_apply() does; blocks that others read are used, and the clock of versions goes on. */
int kvfs_foreign_apply(struct kvfs_plane *plane, uint32_t slot, const void *batch, uint64_t size, struct kvfs_pod_conflict *conflicts,
                       struct kvfs_pod_applied *out);
/* The inode numbers of this node's blocks with these keys, two words each; 0: there is none. Returns how many there are. */
int kvfs_foreign_asked(struct kvfs_plane *plane, const uint64_t *keys, uint32_t count, uint64_t *inodes);
/* News of a native client about blocks of other nodes (struct wire_foreign_block); what: enum wire_foreign_what. Returns how many entries went. */
int kvfs_foreign_note(struct kvfs_plane *plane, uint32_t what, const void *blocks, uint32_t count);
/* Take in inode records that were found on the devices. Entries of blocks whose header is in this segment, in this life, count; and of directories.
 * Returns how many were taken, or -EBADMSG: one makes no sense. */
int64_t kvfs_foreign_load(struct kvfs_plane *plane, uint32_t segment, uint64_t generation, const void *records, uint64_t size);

/* ---- files being written ---- */

/* A sealed file opened for writing (or truncated): from the completion on all its handles read through staging. keep_content 0: it is then
 * empty. Completion: 0, -EBUSY (a seal or spill is under way, and keep_content is 0), -ENOENT, -EBADMSG, or -errno of reading the header. 0
 * also for a file that is being written already: it is truncated if keep_content is 0. */
int kvfs_file_rewrite(struct kvfs_plane *plane, uint64_t cookie, uint64_t inode, int keep_content);
/* Set the size of a file that is being written. -EBUSY: a seal or spill is under way, or it is a slab; -ENOENT: it is not being written;
 * -EFBIG; -EDQUOT. */
int kvfs_file_truncate(struct kvfs_plane *plane, uint64_t inode, uint64_t size);
/* The same for fallocate(2), which makes a file no smaller, and asks for its room: -ENOSPC, or the error of kvfs_set_space. */
int kvfs_file_allocate(struct kvfs_plane *plane, uint64_t inode, uint64_t size);

/* ---- slabs: files that are overwritten in place, in whole segments ---- */

/* An untouched file of at least this many bytes becomes a slab by FALLOCATE, and by ftruncate through a handle opened with O_DIRECT. 256
 * MiB: more than any engine's block. */
#define KVFS_SLAB_MIN 268435456
struct kvfs_run;
/* The pages that a slab has room for. 0: a file being written that is no slab yet, but may become one. -EBUSY: it has content already, or
 * is being sealed; -ENOENT: it is not being written. */
int64_t kvfs_slab_pages(struct kvfs_plane *plane, uint64_t inode);
/* The size of a file that is being written, in bytes; -ENOENT. */
int64_t kvfs_file_size(struct kvfs_plane *plane, uint64_t inode);
/* 1: truncated to `size`, the file should be a slab. */
int kvfs_slab_wanted(struct kvfs_plane *plane, uint64_t inode, uint64_t size);
/* Make a file a slab, or a slab larger: append runs, all of one page_count, and give the file at least `size` bytes. chosen: it goes with
 * its last handle, whatever was done with it. 0, -ENOENT, -EBUSY, -EAGAIN (a job on it is under way), -EFBIG, -ENOMEM, -ERANGE (runs that
 * do not fit). */
int kvfs_slab_extend(struct kvfs_plane *plane, uint64_t inode, uint64_t size, int chosen, const struct kvfs_run *runs, uint32_t run_count);
/* Set the size, at most to the slab's room. A range that was cut off is zeros when the slab grows again. Completion: 0, -ENOENT, -ENOSPC,
 * -EBUSY (a job on it is under way), or -errno of an I/O. */
int kvfs_slab_resize(struct kvfs_plane *plane, uint64_t cookie, uint64_t inode, uint64_t size);
/* Make it an ordinary file being written, dirty, whose content is placed (kvfs_file_extents). Completion: 0; -EBUSY: it is open for
 * writing; -EPERM: it has been overwritten, and goes; -ENOENT; -errno of an I/O. writers_stay: also while it is open for writing, and
 * overwritten. Then -EPERM: its owner chose a slab, it has failed, or it is larger than a file may be. */
int kvfs_slab_to_file(struct kvfs_plane *plane, uint64_t cookie, uint64_t inode, int writers_stay);
/* Remove a slab without handles from the table, with its content. -EBUSY: it has handles; -ENOENT. */
int kvfs_slab_close(struct kvfs_plane *plane, uint64_t inode);
/* After KVFS_EVENT_SLAB_WANTED, whatever its outcome: writes that waited go on. -ENOENT. */
int kvfs_slab_answer(struct kvfs_plane *plane, uint64_t inode);
/* Its I/O fails from now on. -ENOENT. */
int kvfs_slab_fail(struct kvfs_plane *plane, uint64_t inode);

struct kvfs_seal_info {
    uint64_t size; /* bytes */
    int64_t mtime_ns;
    uint32_t data_pages;   /* pages to be written */
    uint32_t ranges;       /* contiguous file ranges they form */
    uint32_t kept_extents; /* extents that stay where they are, at most; 0: nothing of the file is on the devices */
    uint32_t dirty;        /* 0: nothing to seal (then seal_begin changed nothing) */
    uint32_t shared;       /* kernels may keep old pages of it: it needs KVFS_INODE_REWRITTEN */
    uint32_t reserved;
};
/* Freeze the file: writes to it wait until kvfs_seal_end. -ENOENT: not being written. -EBUSY: a seal or spill is under way. */
int kvfs_seal_begin(struct kvfs_plane *plane, uint64_t inode, struct kvfs_seal_info *out);
/* Write data and block header. record: the inode record without extents (extent_count 0), with the place fields of runs[0]. All runs
 * together must hold exactly header_pages + (run_count - 1) + data_pages pages. Completion: 0 or -errno. */
int kvfs_seal_write(struct kvfs_plane *plane, uint64_t cookie, uint64_t inode, const struct kvfs_run *runs, uint32_t run_count, uint32_t header_pages,
                    const void *record, uint32_t record_size, const void *ancestors, uint32_t ancestors_size);
/* The record as the header has it, with extents; for the index and the table. Returns its size; -ERANGE if capacity is less. */
int kvfs_seal_record(struct kvfs_plane *plane, uint64_t inode, void *out, uint32_t capacity);
/* ok: the index has it, and the file is clean and sealed (call after kvfs_inode_update). Not ok: still dirty. */
int kvfs_seal_end(struct kvfs_plane *plane, uint64_t inode, int ok);
/* The header pages that a seal needs for these numbers (extents: an upper bound). */
uint32_t kvfs_header_pages(uint64_t size, uint32_t record_size, uint32_t ancestors_size, uint32_t extents);

/* Move full staged chunks to the devices before the seal. begin says how many pages; write's completion ends it, and so does an error of write. cancel
 * ends one that has begun and is not being written, and one that was asked by KVFS_EVENT_SPILL and does not begin. */
int kvfs_spill_begin(struct kvfs_plane *plane, uint64_t inode, struct kvfs_seal_info *out);
int kvfs_spill_write(struct kvfs_plane *plane, uint64_t cookie, uint64_t inode, const struct kvfs_run *runs, uint32_t run_count);
int kvfs_spill_cancel(struct kvfs_plane *plane, uint64_t inode);
/* The inodes with unsealed changes; sealed ones that were changed are among them. Returns the count; with more than capacity, only capacity
 * are written. */
uint32_t kvfs_dirty_files(struct kvfs_plane *plane, uint64_t *out, uint32_t capacity);
/* Extents of a file being written that are on the devices already: the segments they lie in must not be freed. Returns the count;
 * with more than capacity, only capacity are written. */
int kvfs_file_extents(struct kvfs_plane *plane, uint64_t inode, struct kvfs_extent *out, uint32_t capacity);
/* The pool's room for bytes that must stay: open blocks and files being written. A WRITE that would go beyond ends with `error`, a positive
 * errno. */
void kvfs_set_space(struct kvfs_plane *plane, uint64_t bytes, int error);

/* ---- shares: what one user may hold of the pool ---- */

/* Users are the openers of files: a uid of the host; or, for all of a guest, this value and the number of its transport. SETXATTR names
 * them in the same way. */
#define KVFS_USER_GUEST 0xffff0000u
#define KVFS_USER_OTHERS 0xffffffffu /* users beyond the table's places: they share one share */
struct kvfs_user {
    uint32_t id, reserved;
    uint64_t open_bytes, writing_bytes, evicted;
    uint64_t names;            /* of directories, symbolic links, files not sealed yet and files without a name: eviction cannot take them */
    uint64_t staged_bytes;     /* memory of files being written */
    uint64_t staging_refusals; /* writes that were refused for want of it */
};
/* The share of one user: sealed blocks that are open, and the bytes of kvfs_user_hold. Files being written may be more, while a share is left to
 * others; then their writes, and opens for writing, end with EDQUOT. Root and `exempt` may hold all. names_part: the same of the block table's
 * records, of KVFS_WHOLE. With `left` of `all` records left to all users, one may have names_part / (KVFS_WHOLE - names_part) * left * left / all
 * names. Beyond that CREATE, MKNOD, MKDIR and SYMLINK end with EDQUOT. */
#define KVFS_WHOLE 65536
void kvfs_set_share(struct kvfs_plane *plane, uint64_t bytes, uint32_t names_part, uint32_t exempt);
/* Whether the user may make one more directory: 0 or -EDQUOT. Of that share a ninth is for files alone. */
int kvfs_names_ask(struct kvfs_plane *plane, uint32_t id);
/* The share of staging of one user, some MiB at least. A user may have more while a share is left to others. Beyond it files of the user are
 * spilled, whatever their size. Where they cannot be, writes end with EDQUOT; with EIO where devices fail. */
void kvfs_set_staging_share(struct kvfs_plane *plane, uint64_t bytes);
/* Bytes that a user holds in addition: pins, reservations, slabs. */
void kvfs_user_hold(struct kvfs_plane *plane, uint32_t id, uint64_t bytes);
/* All users seen so far. Returns the count, at most capacity. */
int kvfs_users(struct kvfs_plane *plane, struct kvfs_user *out, uint32_t capacity);
/* The user that an inode's open content is charged to; -ENOENT: it is not open. */
int64_t kvfs_inode_user(struct kvfs_plane *plane, uint64_t inode);

/* ---- the store: jobs, each with a completion ---- */

/* data is copied before return; size a multiple of 4096. */
int kvfs_store_write(struct kvfs_plane *plane, uint64_t cookie, uint32_t segment, uint32_t page, const void *data, uint64_t size);
/* out is the caller's and must live until the completion; size a multiple of 4096. Completion: size or -errno. */
int kvfs_store_read(struct kvfs_plane *plane, uint64_t cookie, uint32_t segment, uint32_t page, void *out, uint64_t size);
/* The same page of many segments: out is count * 4096 bytes; a page that could not be read is all 0xff. Completion: 0. */
int kvfs_store_read_pages(struct kvfs_plane *plane, uint64_t cookie, const uint32_t *segments, uint32_t count, uint32_t page, void *out);
struct kvfs_scan_result {
    uint64_t size;      /* bytes of inode records written to out */
    uint32_t next_page; /* where the scan stopped: no valid header there, end_page, or out is full */
    uint32_t entry_count;
    uint32_t full;       /* 1: out was too small for the next entry; scan again from next_page */
    uint32_t impossible; /* headers that are whole, but whose records no kvfs can have written: stepped over */
};
/* Walk block headers from first_page on. For each valid one of this generation write its inode record, then its ancestors' records. Numbers
 * in them are of mounts up to epoch_max. result and out are the caller's until the completion (0 or -errno). */
int kvfs_store_scan(struct kvfs_plane *plane, uint64_t cookie, uint32_t segment, uint64_t generation, uint64_t epoch_max, uint32_t first_page,
                    uint32_t end_page, void *out, uint64_t capacity, struct kvfs_scan_result *result);
/* Check the block of this inode record: header, and with verify_data every leaf. Completion: 0, -EBADMSG, or -errno of a read. */
int kvfs_store_verify(struct kvfs_plane *plane, uint64_t cookie, const void *record, uint32_t record_size, int verify_data);
/* Copy a sealed block to new runs with a new header (carry-over). old_record as in the index; record, runs, header_pages as in seal_write
 * (all data pages in runs). Leaves are verified during the copy. out_record (capacity) receives the final record and is the caller's until
 * the completion: its size, or -EBADMSG, or -errno. */
int kvfs_store_copy(struct kvfs_plane *plane, uint64_t cookie, const void *old_record, uint32_t old_size, const struct kvfs_run *runs,
                    uint32_t run_count, uint32_t header_pages, const void *record, uint32_t record_size, const void *ancestors,
                    uint32_t ancestors_size, void *out_record, uint32_t capacity);
/* The limits of inode records in a pool. */
struct kvfs_record_limits {
    uint64_t epoch_max; /* the last mount that can have given out numbers */
    uint32_t segment_count;
    uint32_t end_page; /* of every segment: blocks lie before it */
};
/* Check concatenated inode records that come from a device. Returns their number. -EBADMSG, with *at and *why (a constant) for the first
 * that no kvfs can have written. Any thread; does not block. */
int64_t kvfs_records_check(const struct kvfs_record_limits *limits, const void *records, uint64_t size, uint64_t *at, const char **why);
/* Count the pages of sealed blocks, headers included: each adds to pages[] of its segments. Returns the number of records, or -EBADMSG if they are
 * none. Any thread; does not block. */
int64_t kvfs_records_pages(const void *records, uint64_t size, uint64_t *pages, uint32_t segment_count);
/* Device I/Os in flight on a segment, given-up ones included: it may be written again only at 0. */
uint32_t kvfs_segment_busy(struct kvfs_plane *plane, uint32_t segment);

/* ---- statistics ---- */

struct kvfs_latency {
    uint64_t count;
    uint64_t total_ns;
    uint64_t buckets[40];
}; /* bucket i: below 2^i ns... of a request, arrival to reply */
#define KVFS_DEVICE_BUCKETS 40
struct kvfs_device_statistics {
    uint64_t reads, read_bytes, writes, write_bytes, errors, timeouts, read_ns, write_ns;
    uint64_t read_buckets[KVFS_DEVICE_BUCKETS], write_buckets[KVFS_DEVICE_BUCKETS]; /* as in kvfs_latency, of one I/O each */
};
#define KVFS_AGES 28
struct kvfs_statistics {
    uint64_t requests, forwarded, forward_timeouts, forwarded_in_flight;
    uint64_t lookups, lookup_misses, misses_made, opens, opens_found, stale_opens, reads, read_bytes, writes, write_bytes;
    uint64_t checksum_errors, read_errors, staged_bytes, staging_size, staged_files, open_handles, parked;
    uint64_t spins, sleeps, wakeups, blocks_written, blocks_copied, written_bytes, jobs_in_flight, zombies;
    uint64_t open_bytes;            /* of open blocks and files being written: eviction must keep them */
    uint64_t names_missed;          /* lookup_misses less misses_made (names that were then made); never falls */
    uint64_t slow_requests;         /* took longer than slow_ms */
    uint64_t handed;                /* events, completions and calls that Python took */
    uint64_t flushes_sealed;        /* files that a FLUSH sealed without Python */
    uint64_t uses;                  /* of blocks, as eviction counts them */
    uint64_t staging_waits;         /* writes that waited for memory of files being written */
    uint64_t staging_refusals;      /* writes that were refused for want of it */
    uint64_t staging_short;         /* 1: one of both was in the last 10 s */
    uint64_t ring_requests;         /* came by FUSE over io_uring */
    uint64_t found_ages[KVFS_AGES]; /* opens of sealed blocks, and hits reported by clients: [0] within a second of mtime, [i] below 2^i
                                     * s */
};
void kvfs_statistics_get(struct kvfs_plane *plane, struct kvfs_statistics *out);
/* The last news of an NVMe/TCP device's connection, as a message. Returns 1 if the device can be used, else 0; for other kinds of device 1
 * and "". */
int kvfs_device_message(struct kvfs_plane *plane, uint32_t device, char *out, uint32_t capacity);
/* The way of device I/O: "io_uring"; or "threads (...)", and why. */
void kvfs_rings_tell(struct kvfs_plane *plane, char *out, uint32_t capacity);
int kvfs_device_statistics_get(struct kvfs_plane *plane, uint32_t device, struct kvfs_device_statistics *out);
/* operation: 0 lookup, 1 open, 2 read, 3 write, 4 forwarded. */
int kvfs_latency_get(struct kvfs_plane *plane, uint32_t operation, struct kvfs_latency *out);

/* ---- fault injection, for tests only ---- */

enum kvfs_fault {
    KVFS_FAULT_NONE = 0,
    KVFS_FAULT_ERROR = 1,
    KVFS_FAULT_DELAY = 2,
    KVFS_FAULT_SHORT = 3,
    KVFS_FAULT_FLIP = 4,
    KVFS_FAULT_LOST_WRITE = 5,
    KVFS_FAULT_HOLD = 6 /* its end is reported only after the next kvfs_fault_set of another kind; value: errno that it then
                                       * ends with, or 0 */
};
/* From now on every `every`-th I/O (reads: 1, writes: 2, both: 3) of a device suffers the fault. value: errno, delay in ms. */
int kvfs_fault_set(struct kvfs_plane *plane, uint32_t device, uint32_t fault, uint32_t direction, uint32_t every, uint32_t value);

#endif
