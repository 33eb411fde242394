/* The content of files: blocks and files being written, in memory, and who has them open. Not installed.
 *
 * Nothing here knows FUSE. A request's maker says how it is answered, resumed and freed (struct request); transports and servers are only names to
 * content. Locks are taken in the order of I1: shard, node, staging, then any one leaf lock (arena, queues, pending). No lock is held across a wait for a
 * device (I2).
 */
#ifndef KVFS_CONTENT_H
#define KVFS_CONTENT_H

#include "base/events.h"
#include "content/reservations.h"
#include "io/ring.h"
#include "names/names.h"
#include "pod/foreign.h"
#include "kvfs.h"
#include "kvfs_plane.h"

#define CHUNK_SIZE ((uint64_t)1 << 20)
#define CHUNK_PAGES 256u
#define SHARDS 64
#define READ_SLOTS 5 /* 4 MiB that begin inside a page */
#define PROMISE_S 1u
#define PROMISE_SLACK_NS 50000000ull /* for an answer's way to the guest */

struct feed;
struct file;
struct request;
struct server;
struct slab;
struct transport;

/* ---- node.c, handles.c, uses.c, lease.c: open inodes and handles ---- */

/* Files with staged bytes; that of the longest stay first. Under plane->staged_lock. */
struct staged_list {
    struct file *first, *last;
    uint32_t count;
    uint64_t asked_bytes; /* spills of so much have been asked, and are not over */
    uint64_t failed_ns;   /* when devices failed one last; 0: never */
};
/* A user's part of the pool. It never goes: a user who comes again finds the place. */
struct user {
    atomic_ullong key;                            /* id + 1; 0: free */
    atomic_ullong open, other;                    /* bytes: blocks open and charged to the user; pins, reservations and slabs, by Python's count */
    atomic_ullong writing;                        /* bytes of files being written */
    atomic_ullong evicted;                        /* blocks that went while the user had them open */
    atomic_llong names;                           /* records that eviction cannot take: kvfs_table_watch() */
    atomic_ullong staged_bytes, staging_refusals; /* memory of files being written; writes that were refused for want of it */
    struct staged_list staged;
};
struct hold {
    struct user *user;
    uint32_t handles;
    struct hold *next;
};
struct node {
    struct node *next;
    uint64_t inode;
    atomic_uint refs;          /* handles, requests under way, and the file */
    uint32_t handles, writers; /* under the shard's lock */
    uint64_t open_size;        /* its share of plane->open_bytes; under the shard's lock */
    struct user *payer;        /* the one of its users that open_size is charged to. Under the shard's lock */
    struct hold hold;          /* its users; under the shard's lock */
    /* How often native clients have leased it, and the pages that count for that, in plane->leased_pages: 0 once it has lost its name. Under the
     * shard's lock. */
    uint32_t leases, leased_pages;
    /* One content, several kernels. Once a guest has opened an inode for writing, no host opens it for its page cache. A host that did so before is
     * told of every change. (Guests cache nothing unasked: see do_init.) */
    atomic_bool guest_wrote, host_cached;
    /* Until this time guests may cache the attributes of an open block. A rewrite waits for it. Under the lock. */
    uint64_t promised_until_ns;
    bool rewriting;
    struct kvfs_record *foreign;    /* a block of another node: where it was found. Set when the node is made */
    struct foreign_content content; /* as a kernel may have it */
    uint32_t opens_place;           /* in the list of opens.c, of a foreign block; 0: none */
    pthread_mutex_t lock;           /* desc, file, *foreign, content, opens_place */
    struct desc *desc;
    struct file *file;
    bool mappable;                       /* a handle could write by a mapping, of which no WRITE tells in time. Under the lock */
    uint64_t placements;                 /* the last chunk's placement. Under the lock; it outlives the file */
    uint64_t failed_ns, failed_until_ns; /* the last read that failed: when, and its deadline. Under the lock */
};
struct shard {
    pthread_mutex_t lock;
    struct node *nodes[1024];
};

struct handle {
    struct node *node; /* NULL: a directory */
    uint64_t directory;
    struct transport *transport;
    struct user *user;
    uint64_t number; /* as its kernel has it */
    uint32_t flags;  /* O_ flags of the open */
    uint32_t listed; /* a directory: inodes that the listing through this handle has made */
    bool writer;
    bool unread;   /* the first READ of some bytes, or else the close, is a use of the block */
    bool earlier;  /* an earlier daemon gave it out */
    bool uncached; /* opened with FOPEN_DIRECT_IO: its kernel asks for no FSYNC behind a write with O_DSYNC, so the WRITE's own flag counts */
};
/* A kernel may bring a number of an earlier daemon, as a guest outlives its daemons. Numbers begin anywhere, so 1 of 2^42 is one of
 * ours by chance. And a handle is found only with its transport and its inode. */
struct handle_table {
    pthread_mutex_t lock;
    uint64_t last_salt;
    struct handle **chunks[4096]; /* 1024 handles each */
    uint32_t *free;
    uint32_t free_count, free_capacity, count;
    uint32_t earlier_count, earlier_end; /* handles of earlier daemons; behind the last of them */
};

struct node *node_get(struct kvfs_plane *plane, uint64_t inode, bool create);
/* With the shard's lock held. Without a reference, or NULL. */
struct node *node_find_locked(struct shard *shard, uint64_t inode);
struct node *node_get_locked(struct shard *shard, uint64_t inode, bool create); /* with the shard's lock held */
void node_put(struct kvfs_plane *plane, struct node *node);
/* A block was found and read: counts a use, and its age. */
void found_add(struct kvfs_plane *plane, const struct kvfs_record *record);
/* It was found, and nothing was read from here. If it was read before, it is used now, once in a tick. It counts no hit: opens cost nothing. */
void found_unread(struct kvfs_plane *plane, const struct kvfs_record *record);
/* These two with the shard's lock held. Whether a lease keeps the node's block: one that has outgrown what was leased is not kept. */
bool node_is_leased(struct kvfs_plane *plane, const struct node *node);
/* The block has lost its name, or goes: leases keep it no more. */
void node_unlease(struct kvfs_plane *plane, struct node *node);
/* A name was looked up and not found; `hash` is name_hash() of it. */
uint64_t name_hash(struct kvfs_plane *plane, uint64_t parent, const char *name, size_t size);
/* A block is in the table, as it was found there. before: it had that slot until now, and keeps its use; NULL: it is new, and used now. Within a step. */
void use_enter(struct kvfs_plane *plane, const struct kvfs_record *block, const struct kvfs_record *before);
/* It has the name of another, and takes its place in the chain. */
void use_replace(struct kvfs_plane *plane, const struct kvfs_record *other, const struct kvfs_record *block);
/* It is there no more: evicted, or removed. */
void use_leave(struct kvfs_plane *plane, const struct kvfs_record *block, bool evicted);
/* The block is the one behind `parent`, as kvfs_inode_follow(). Within a step. */
void inode_follow(struct kvfs_plane *plane, uint64_t inode, uint64_t parent);
/* A block that is to be stored unless it is there was found. One use in a tick. */
void use_look(struct kvfs_plane *plane, const struct kvfs_record *record);
void missed_add(struct kvfs_plane *plane, uint64_t hash);
/* The name is made now, so its look-up was no miss: every kernel looks a name up before it makes one. */
void missed_made(struct kvfs_plane *plane, uint64_t parent, const char *name);
/* Count a handle on an inode that the table knows: 0, -ESTALE, -EAGAIN. Under the shard's lock, so that removal sees it or it sees removal. */
int node_open(struct kvfs_plane *plane, uint64_t inode, struct user *user, bool writer, struct kvfs_record *record, struct node **out);
void node_unopen(struct kvfs_plane *plane, struct node *node, struct user *user, bool writer);
/* As record_find(), and of a foreign block that is open. Without the shard's lock. */
int record_find_open(struct kvfs_plane *plane, uint64_t inode, struct kvfs_record *out);
/* Promise a guest that the content of an open block stays for PROMISE_S seconds. False: it may change, or is not open. Called before the table is
 * asked. */
bool node_promise(struct kvfs_plane *plane, uint64_t inode);
int handles_init(struct kvfs_plane *plane);
/* uses: to read by it is a use of the block. unique: of a host's OPEN, by which the next daemon knows it; else 0. */
int handle_open(struct kvfs_plane *plane, struct transport *transport, struct node *node, struct user *user, uint32_t flags, bool writer, bool uses,
                uint64_t unique, uint64_t *fh);
/* A READ has read some bytes by a handle that handle_find() has given out. */
void handle_reads(struct kvfs_plane *plane, const struct handle *handle, uint64_t fh);
/* Copies a handle of that inode and references its node once more; false: no such file handle. A copy, as a hostile guest may release the handle at any
 * moment. */
bool handle_find(struct kvfs_plane *plane, struct transport *transport, uint64_t fh, uint64_t inode, struct handle *out);
void handle_set_uncached(struct kvfs_plane *plane, struct transport *transport, uint64_t fh, uint64_t inode);
int handle_open_directory(struct kvfs_plane *plane, struct transport *transport, uint64_t inode, uint64_t *fh);
/* The count of inodes that listings through a directory's handle have made, with `more` added. UINT32_MAX: no such handle. */
uint32_t handle_listed(struct kvfs_plane *plane, struct transport *transport, uint64_t fh, uint64_t inode, uint32_t more);
bool handle_close_directory(struct kvfs_plane *plane, struct transport *transport, uint64_t fh, uint64_t inode);
/* Returns the node, whose handle count it has lowered; the caller calls node_released, then node_put. NULL: no such file handle. */
struct node *handle_close(struct kvfs_plane *plane, struct transport *transport, uint64_t fh, uint64_t inode, bool *was_writer);
void node_released(struct kvfs_plane *plane, struct node *node, bool was_writer);
/* Close all handles of a transport. Returns the inode of a directory that Python is to release. Called again, *from on, until it returns 0. */
uint64_t handles_drop(struct kvfs_plane *plane, struct transport *transport, uint32_t *from);

/* Handles of earlier daemons, which earlier.c has found. In the order of their places, before any other; their node is open once more. */
int handle_restore(struct kvfs_plane *plane, const struct handle *from);
void handles_adopt(struct kvfs_plane *plane, struct transport *transport); /* they are this transport's */
void handles_asked_again(struct kvfs_plane *plane, uint64_t unique);       /* nobody has heard of that OPEN's handle */
void handles_forget(struct kvfs_plane *plane, uint64_t inode);             /* their kernel knows it no more */
uint32_t handle_place_of(uint64_t number);

/* ---- opens.c: which handles a host's kernel has, for the daemon after this one ---- */

struct opens;
void opens_free(struct opens *opens);
/* By their place in the table of handles, with its lock held. */
void opens_add(struct kvfs_plane *plane, uint32_t place, const struct handle *handle, uint64_t unique);
void opens_remove(struct kvfs_plane *plane, uint32_t place);
bool opens_asked(const struct kvfs_plane *plane, uint32_t place, uint64_t unique); /* whether that OPEN has made it */
/* A foreign block of which the node has the record: it is new, or lies elsewhere; its content is known; it goes. With the node's lock held. */
void opens_foreign_add(struct kvfs_plane *plane, struct node *node);
void opens_foreign_read(struct kvfs_plane *plane, const struct node *node);
void opens_foreign_remove(struct kvfs_plane *plane, const struct node *node);

/* ---- lost.c ---- */

struct lost_handles;
/* The mount was an earlier daemon's: what its kernel has open is counted from now on, as far as it shows. 0 or -ENOMEM. */
int lost_begin(struct kvfs_plane *plane);
void lost_end(struct kvfs_plane *plane);
/* The node of a sealed block, for a READ by a number that nobody here has given out; or -EBADF, -ENOMEM. counted: it is open until lost_close(). */
int lost_read(struct kvfs_plane *plane, bool counted, uint64_t inode, uint64_t fh, struct node **out);
/* The inode loses its name: it stays open until lost_forget(), if this kernel's request takes the name. Within a step. */
void lost_keep(struct kvfs_plane *plane, uint64_t inode);
void lost_close(struct kvfs_plane *plane, uint64_t inode, uint64_t fh);
/* The kernel knows the inode no more, so it has no handle of it. */
void lost_forget(struct kvfs_plane *plane, uint64_t inode);

/* ---- processes.c: who uses blocks, and in which order ---- */

#define PROCESSES_KNOWN 1021u
#define THREADS_KNOWN 4093u
#define PROCESS_LISTS 1u
#define PROCESS_LOADS 2u
#define PROCESS_STORES 4u
/* The maker of a request: a thread of this machine, as /proc knows it, or of a guest's. */
struct caller {
    uint32_t guest; /* the transport's user; 0: this machine */
    uint32_t thread;
};
struct process {
    atomic_ullong key, last; /* last: the inode that it used or made last */
    atomic_ullong made_ms;   /* when it was last at making that; 0: it found it */
    atomic_uint did;         /* PROCESS_ */
};
struct thread {
    atomic_ullong key;
    atomic_uint process, read_s;
    atomic_bool listed; /* a directory, and has made nothing since */
};
struct processes {
    struct process all[PROCESSES_KNOWN]; /* by hash; whoever comes takes the place */
    struct thread threads[THREADS_KNOWN];
};
void process_lists(struct kvfs_plane *plane, struct caller caller); /* a directory */
/* A block was opened for reading. Returns whether to read it is a use: it is none of one who walks. */
bool process_opens(struct kvfs_plane *plane, struct caller caller, const struct kvfs_record *block);
/* A block was looked up and found. One who loads or stores uses it if the block before it was looked up just before. */
void process_looks(struct kvfs_plane *plane, struct caller caller, const struct kvfs_record *block);
/* A file was made. It comes behind what the process found last, or made a moment ago. */
void process_makes(struct kvfs_plane *plane, struct caller caller, uint64_t inode);
/* It has closed what it wrote, or renamed it: until now it was at it. */
void process_made(struct kvfs_plane *plane, struct caller caller);

/* ---- shares.c: what each user holds ---- */

#define USERS_MAX 4096u
struct user *user_get(struct kvfs_plane *plane, uint32_t id);
/* These with the shard's lock held. */
bool hold_add(struct node *node, struct user *user); /* false: no memory */
void hold_drop(struct kvfs_plane *plane, struct node *node, struct user *user);
void hold_charge(struct kvfs_plane *plane, struct node *node, uint64_t size);    /* the size of an open inode is `size` now */
void hold_offer(struct kvfs_plane *plane, struct node *node, struct user *user); /* `user` has it open too, and may be charged instead */
bool hold_may_go(struct kvfs_plane *plane, struct node *node);                   /* true: all its users are beyond their share */
void hold_evict(struct kvfs_plane *plane, struct node *node);                    /* it was evicted while it was open */
bool space_lacks(struct kvfs_plane *plane, uint64_t growth);                     /* the pool has no room for `growth` bytes more that must stay */
/* A writer beyond the share leaves one share of that room to others. NULL: nobody is charged. */
bool writer_lacks(struct kvfs_plane *plane, const struct user *writer, uint64_t growth);
int space_ask(struct kvfs_plane *plane, const struct user *writer, uint64_t growth); /* both: 0, -EDQUOT, or the error of kvfs_set_space */
void user_names(void *plane, uint32_t id, int change);                               /* told by the block table */
/* Whether the user may make one more record that eviction cannot take: 0 or -EDQUOT. `lasting`: it stays so, which a file does not. Any thread. */
int names_ask(struct kvfs_plane *plane, const struct user *user, bool lasting);
bool user_is_exempt(struct kvfs_plane *plane, const struct user *user);

/* ---- staged_file.c, staging.c, park.c, load.c, file_control.c: files being written ---- */

enum chunk_state { CHUNK_HOLE = 0, CHUNK_STAGED = 1, CHUNK_PLACED = 2 };
struct chunk {
    struct slot *slot; /* STAGED */
    uint32_t filled;   /* bytes from the chunk's start that are stored (in the slot, or on the devices); the rest reads as zeros */
    uint8_t state;
    bool spilling;
    bool reload; /* PLACED, but cut or grown inside a page: the seal must stage and write it again */
    /* PLACED: the number of this placing, among all in the node's life. I/O without the lock ends by comparing it: an equal state may belong to other
     * bytes (I3). */
    uint64_t placement;
};
struct file {
    uint64_t size;
    int64_t mtime_ns;
    struct chunk *chunks;
    uint32_t chunk_count;
    struct kvfs_extent *placed; /* places of PLACED chunks; sorted by file_page */
    uint32_t placed_count;
    uint64_t *leaves; /* of PLACED pages */
    uint32_t leaf_capacity;
    uint32_t short_page, short_size; /* the one PLACED page whose leaf covers fewer than 4096 bytes; UINT32_MAX: none */
    uint64_t inode;
    uint64_t staged_bytes;                      /* of slots; changed with plane->staged_lock, too */
    uint32_t spill_pages;                       /* of spills, beyond the size: headers, and the rest of a last page */
    uint64_t counted;                           /* its share of plane->open_bytes: the size, and those pages; a slab has none */
    atomic_bool touched;                        /* written to since the last look of staging.c */
    struct file *staged_next, *staged_previous; /* these under plane->staged_lock */
    uint64_t asked_bytes, spill_failed_until_ns;
    uint32_t spill_tries;          /* failures in a row */
    bool spill_asked, spill_whole; /* whole: with its last chunk, which is not full */
    struct user *payer;            /* `counted` is charged to it: the last user that made it grow, or the first writer. NULL: nobody yet */
    struct slab *slab;             /* the content lies there, and is written in place */
    bool direct;                   /* an open for writing had O_DIRECT */
    bool past_cache, shared;       /* its writer bypasses its kernel's page cache; others have opened it since: cache_bypass() */
    bool slab_asked, slab_refused; /* asked: Python makes it a slab, and writes wait; refused: it stays a file */
    bool dirty, sealing, spilling, discarded;
    uint32_t written_place; /* in the list of written.c; 0: none */
    bool told_sealed;       /* by written_is_sealed() */
    uint64_t overtaken;     /* up to this version another node's change of its name counts: looked at again when the file ends. 0: none */
    struct desc *sealed;    /* the header just written, until seal_end */
    struct request *parked, *parked_last;
};
/* ---- written.c: which inodes are open for writing, for the daemon after this one ---- */

int written_keep(struct kvfs_plane *plane, int fd); /* as kvfs_fuse_hold() */
struct written;
void written_free(struct written *written);
int written_add(struct kvfs_plane *plane, uint64_t inode, uint32_t *place); /* *place: 0 if nobody keeps a list. -ENFILE: the list is full */
void written_remove(struct kvfs_plane *plane, const struct file *file);
/* Whether all that a kernel may have of the file is sealed, although it has writers. False before a change of it begins. */
void written_is_sealed(struct kvfs_plane *plane, struct file *file, bool sealed);
bool written_earlier(const struct kvfs_plane *plane, uint64_t inode); /* an earlier daemon had it open for writing when it ended */

/* Forget the staged bytes of an inode that nobody will seal (unlinked and closed). */
int kvfs_file_discard(struct kvfs_plane *plane, uint64_t inode);
/* A new, empty, dirty file. -ENFILE: another process keeps a list of what is being written, which is full. */
int kvfs_file_create(struct kvfs_plane *plane, uint64_t inode);
int kvfs_file_set_mtime(struct kvfs_plane *plane, uint64_t inode, int64_t mtime_ns); /* -ENOENT: it is not being written */
/* All of these take node->lock held, unless they block. */
struct file *file_new(uint64_t inode);
int file_from_desc(struct kvfs_plane *plane, struct node *node, const struct desc *desc);
void file_charge(struct kvfs_plane *plane, struct file *file, struct user *user);
int file_admit(struct kvfs_plane *plane, struct node *node, struct user *user); /* for a writer's open: 0 or -EDQUOT. Takes the lock */
/* 0; -EAGAIN: parked, and no longer the caller's; -EINPROGRESS: a worker must load chunks first; -ENOSPC, -EDQUOT, -EFBIG, -ENOMEM. */
int file_write(struct kvfs_plane *plane, struct node *node, struct request *request);
/* Copy [offset, offset + size) out; -EINPROGRESS: part of it lies on the devices. */
int file_copy_out(const struct file *file, uint64_t offset, uint32_t size, uint8_t *out);
int file_truncate(struct kvfs_plane *plane, struct node *node, uint64_t size);
/* fallocate(2): give the file at least that size, with room for it. -EBUSY: a seal is under way, or it is a slab. */
int file_allocate(struct kvfs_plane *plane, struct node *node, uint64_t size);
uint64_t file_size_max(const struct kvfs_plane *plane);
void file_count(struct kvfs_plane *plane, struct file *file); /* the size has changed */
int file_grow_chunks(struct file *file, uint32_t count);
int file_grow_leaves(struct file *file, uint32_t count);
void chunk_stage(struct kvfs_plane *plane, struct file *file, uint32_t index, struct slot *slot, uint32_t filled); /* a slot replaces the old bytes */
void chunk_place(struct node *node, struct chunk *chunk, uint32_t filled); /* its bytes lie on the devices; it holds no slot */
int file_stage_zeros(struct kvfs_plane *plane, struct file *file);         /* one byte, at the start */
void file_drop_chunk(struct kvfs_plane *plane, struct file *file, uint32_t index);
uint32_t file_kept_extents(const struct file *file, bool sealing, struct kvfs_extent *out, uint32_t capacity);
void file_free(struct kvfs_plane *plane, struct node *node); /* drops the file's reference too: the caller calls node_put after */
/* staging.c. With the node's lock held, but for staging_is_short(). */
#define STAGING_SHARE_MIN (4 * CHUNK_SIZE)
void staged_count(struct kvfs_plane *plane, struct file *file, int64_t bytes);      /* so much more lies in memory, or less */
void staged_charge(struct kvfs_plane *plane, struct file *file, struct user *user); /* `user` pays for it from now on */
/* A WRITE needs so much more memory: 0; -EAGAIN: parked; -EDQUOT, -ENOSPC: none can be had. */
int staging_ask(struct kvfs_plane *plane, struct node *node, struct request *request, uint64_t more);
bool staging_fills(struct kvfs_plane *plane, const struct file *file); /* the file is to spill */
bool staging_is_short(struct kvfs_plane *plane);                       /* a WRITE had to wait for it lately, or was refused */
void spill_ask(struct kvfs_plane *plane, struct file *file);
bool spill_is_whole(struct kvfs_plane *plane, const struct file *file);
/* error: 0; -EIO: devices failed it, and the next goes to others; -ENOSPC: it has no place to go. */
void spill_ended(struct kvfs_plane *plane, struct file *file, int error);
/* park.c */
/* unparks: plane->unparks, read before memory was found short. False: there has been one since, which may have been the last. */
bool memory_park(struct kvfs_plane *plane, struct request *request, uint64_t unparks);
void file_park(struct kvfs_plane *plane, struct file *file, struct request *request);
void file_unpark(struct kvfs_plane *plane, struct file *file);
void memory_unpark(struct kvfs_plane *plane); /* staging has room again; no lock held */
/* Blocking, on a worker, without node->lock: */
/* 0: the chunk is staged, or the file has changed and the caller looks again. An error belongs to the chunk as it still is. */
int file_load_chunk(struct kvfs_plane *plane, struct ring *ring, struct node *node, uint32_t index, bool for_seal);
int file_read_slow(struct kvfs_plane *plane, struct ring *ring, struct node *node, uint64_t offset, uint32_t size, uint8_t *out);
int file_reopen(struct kvfs_plane *plane, struct ring *ring, struct node *node); /* a writer writes to a sealed inode */
int desc_load(struct kvfs_plane *plane, struct ring *ring, const struct kvfs_record *record, struct desc **out);
struct placed {
    const struct kvfs_extent *extents;
    uint32_t extent_count;
    const uint64_t *leaves;
    uint32_t short_page, short_size;
};
/* Read whole pages and verify every leaf; pages outside all extents are zeros. data is page aligned. */
int placed_read(struct kvfs_plane *plane, struct ring *ring, const struct placed *placed, uint32_t first_page, uint32_t page_count, uint8_t *data);

struct write_job;
/* As kvfs_seal_write(), into runs of which the record has the first one's place. Nothing is written before seal_go(); `done` is told the end after that. */
int seal_to(struct kvfs_plane *plane, uint64_t inode, const struct kvfs_run *runs, uint32_t run_count, const struct kvfs_inode_record *record,
            const void *ancestors, uint32_t ancestors_size, void (*done)(void *owner, int result), void *owner, struct write_job **out);
/* Sums and writes a small block of one run by the caller's ring, which it submits and reaps; others, or without a ring, by a worker. No lock held: `done` may
 * be told at once. */
void seal_go(struct kvfs_plane *plane, struct write_job *job, struct ring *ring);

/* ---- names_changes.c, making.c, naming.c, flush.c: what comes with every stored file ---- */

/* These change names where all that they need is in memory. 0, -errno, or enum kvfs_need: it is Python's, which brings the rest, and nothing has changed.
 * Names are of 1 to KVFS_NAME_MAX bytes. */
int name_create(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t mode, uint32_t uid, uint32_t gid, struct kvfs_record *out);
int name_unlink(struct kvfs_plane *plane, uint64_t parent, const char *name);
int name_rename(struct kvfs_plane *plane, uint64_t parent, const char *name, uint64_t new_parent, const char *new_name, uint32_t flags);
/* These within a step. Whether the inode is pinned, or lies below a directory that is, or that is not in memory. */
bool name_is_pinned(struct kvfs_plane *plane, uint64_t inode);
/* As name_unlink(), of files alone. */
int name_remove(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t size);
/* 0: nobody has the name; 1: *holder has it; -EAGAIN: only the index knows. */
int name_holder(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t size, const struct kvfs_inode_record **holder);
/* Like kvfs_table_put. If the name led to another inode (`replaced`), that inode is kept nameless if it is open, or sealed. Returns enum kvfs_kept if it
 * was kept, else 0. */
int kvfs_name_put(struct kvfs_plane *plane, const void *inode_record, uint64_t replaced);
const struct kvfs_inode_record *directory_here(struct kvfs_plane *plane, uint64_t inode); /* NULL: only the index knows, or it is none */
/* The inode loses its name in the block table. 1: it is open and was kept nameless (KVFS_EVENT_IDLE follows); 0: it is gone. */
int kvfs_inode_remove(struct kvfs_plane *plane, uint64_t inode);
/* The inode has lost its name, and is out of the block table unless it is `kept`, for those who have it open. Takes over the record, a copy. */
int name_drop(struct kvfs_plane *plane, struct kvfs_inode_record *record, int kept, int64_t now); /* enum kvfs_kept */
/* Nobody has a nameless inode open any more: Python removes it. */
void name_let_go(struct kvfs_plane *plane, uint64_t inode);
/* A directory's entries have changed. Without memory its times stay: nothing depends on them. */
void name_touch(struct kvfs_plane *plane, uint64_t inode, int64_t now);
/* A step, unless Python is in the middle of one, or changes are left to it for one of these reasons (enum kvfs_names_leave). */
bool names_step_begin(struct kvfs_plane *plane, uint32_t reasons);
/* A copy with another name, which may be its own. NULL: no memory. */
struct kvfs_inode_record *record_named(const struct kvfs_inode_record *from, uint64_t parent, const char *name, uint32_t size);
/* A record with this name, and with these extents and attributes. */
struct kvfs_inode_record *record_build(const struct kvfs_inode_record *head, uint64_t parent, const char *name, uint32_t size, const void *rest,
                                       uint64_t rest_size);
/* Bytes of the records of the directories from `parent` up, without the root. -EAGAIN: one is not in memory; `partial`: the way ends there. */
int64_t ancestors_size(struct kvfs_plane *plane, uint64_t parent, bool partial);
void ancestors_copy(struct kvfs_plane *plane, uint64_t parent, uint8_t *out, uint64_t size);
uint32_t runs_bound(const struct kvfs_plane *plane, uint32_t data_pages); /* how many runs a block gets at most */
void places_wake(struct kvfs_plane *plane);                               /* after a step: Python takes notes, if there are some that it waits for */

/* A seal for a FLUSH. done: 0: the content is on the devices, in the names, and a scan finds it (I13). -EAGAIN: it was not written, and Python is to
 * seal the file. */
struct flush {
    struct flush_run {
        struct settled settled;
        struct flush *flush;
    } ends[PLACE_RUNS_MAX];
    struct kvfs_run runs[PLACE_RUNS_MAX];
    uint32_t run_count;
    atomic_uint unsettled; /* runs */
    struct kvfs_plane *plane;
    void (*done)(struct flush *flush, int result);
    struct version version;
    uint64_t inode;
    uint64_t connection, unique;      /* the request that it is for, as kvfs_names_request() has it; 0: none that may be sent again */
    struct flush *next;               /* waiting for room */
    uint32_t wanted;                  /* pages */
    struct kvfs_inode_record *before; /* as it was when the seal began */
};
/* 0: done will be called, or has been; -EAGAIN: Python is to seal it. flush->plane, inode and done are set. ring: the caller's; NULL: it has none. */
int flush_start(struct flush *flush, struct ring *ring);

/* ---- slab.c, slab_control.c: files that are overwritten in place ---- */

struct slab *slab_ref(struct slab *slab);
void slab_put(struct slab *slab);
/* These six with the node's lock held. */
bool file_untouched(const struct file *file);
uint64_t slab_capacity(const struct slab *slab); /* bytes */
bool slab_passes(struct kvfs_plane *plane, const struct file *file);
bool slab_read_begin(struct node *node, struct request *request);
int slab_write_begin(struct node *node, struct request *request, bool worker);
/* Whether a WRITE must wait until its file is a slab: then it is parked. */
bool slab_ask(struct kvfs_plane *plane, struct node *node, struct request *request);
/* Without the lock. Both answer the request and end with it. */
void slab_read(struct request *request, bool good);
void slab_write(struct request *request);
bool slab_worker_write(struct kvfs_plane *plane, struct ring *ring, struct request *request);

/* ---- request.c, read.c: requests ---- */

/* The thread that took a request, as content sees it. */
struct io_thread {
    struct kvfs_plane *plane;
    struct ring ring;
    bool batching;                 /* a slab's I/O is queued; more of it may follow at once */
    struct request *waiting_reads; /* reads that wait for memory, or news; oldest first */
    struct request *waiting_last;
};
struct job {
    struct job *next;
    void (*run)(struct kvfs_plane *plane, struct ring *ring, struct job *job); /* frees or completes the job */
    uint64_t cookie;
};
struct request {
    struct job job; /* its slow half: waits for a worker without memory of its own, so it can always go on */
    struct request *next;
    struct io_thread *io;
    /* Answers: a READ with its bytes, a WRITE with 0, or -errno. Any thread. The request stays the caller's. */
    void (*done)(struct request *request, int64_t result);
    void (*resume)(struct request *request);  /* Go on with a parked request, on a worker. It cannot fail: nobody would answer */
    void (*release)(struct request *request); /* NULL: nothing to do. Gives back the targets' memory */
    struct server *server;                    /* its server: used by those three functions alone */
    struct transport *transport;
    struct node *node;
    struct user *user; /* WRITE: the user of its handle */
    struct desc *desc;
    struct slab *slab;
    struct request *previous; /* with `next`: the list of a slab's writes under way */
    bool exclusive;           /* alone on its pages */
    uint64_t unique, arrived_ns, fh, offset;
    uint64_t until_ns; /* READ: answered by then, over all its I/Os */
    uint32_t size;
    bool write, cached; /* cached: a WRITE of pages from its kernel's cache */
    bool awaits_news;   /* READ of a foreign block that has gone from its place */
    bool waited;        /* WRITE: for staging */
    bool unread;        /* READ: of a handle by which nothing was read yet */
    uint8_t *payload;   /* WRITE: inside slots[0] */
    struct slot *slots[READ_SLOTS];
    uint32_t slot_count;
    uint32_t skip;        /* bytes before the first requested byte */
    uint32_t groups_left; /* not reported yet */
    uint32_t groups_held; /* not reaped yet */
    uint32_t retries;
    int result;
    bool load_header;                  /* desc is being read, not yet verified */
    bool direct;                       /* READ into the guest's own pages: targets, and slots[0] for a last page that is not whole */
    bool owed;                         /* direct and failed: the answer waits until no device can write there any more */
    uint32_t target_count, placed_max; /* bytes of the targets that belong to the guest */
    struct iovec *targets;             /* whole pages, in order */
    void *target_memory;               /* keeps them mapped */
    struct kvfs_record record;
};
void read_submit(struct request *request);
void reads_retry(struct io_thread *io); /* reads that wait */
struct request *request_get(struct kvfs_plane *plane);
/* Some were got and not put. */
bool requests_are_busy(struct kvfs_plane *plane);
void request_put(struct kvfs_plane *plane, struct request *request);
enum { LATENCY_LOOKUP, LATENCY_OPEN, LATENCY_READ, LATENCY_WRITE, LATENCY_FORWARD };
/* Returns the request's duration in ns. A caller that answers with an error calls slow_look() with it, too. */
uint64_t latency_add(struct kvfs_plane *plane, uint32_t operation, uint64_t arrived_ns);
void slow_add(struct kvfs_plane *plane, uint32_t opcode, uint64_t inode, uint64_t took_ns);

/* ---- foreign.c: blocks of other nodes of the pod ---- */

/* Look a name up that the table has not. 0: a block; 1: a directory; -ENOENT, -EAGAIN. */
int foreign_look(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t name_size, struct kvfs_record *out);
/* The record of an inode of this node, or of a foreign block that was looked up. 0, -ENOENT, -EAGAIN. */
int record_find(struct kvfs_plane *plane, uint64_t inode, struct kvfs_record *out);
/* A read of the node's block failed by its proofs, at the place in `failed`, or in `desc` where failed->header_pages is 0. True: it lies elsewhere by
 * now, and the node says where. */
bool foreign_moved(struct kvfs_plane *plane, struct node *node, const struct kvfs_record *failed, const struct desc *desc);
/* The node's record: as the table has it, or where a foreign block was found last. */
int node_record(struct kvfs_plane *plane, struct node *node, struct kvfs_record *out);
/* A node has one content, as have its handles and the kernel's pages of it. A foreign block that its owner moved is known by its header: the inode
 * number and version are those that it had before. */
bool foreign_is_same(struct node *node, const struct desc *desc);
/* The same of a foreign block of which all is proven: from now on it is the node's content. */
bool foreign_proven(struct kvfs_plane *plane, struct node *node, const struct desc *desc);
/* A device of the segment gives no answer: its blocks are misses for a while. */
void foreign_avoid(struct kvfs_plane *plane, uint32_t segment);
/* Its owner is told, some time, that it was used. */
void foreign_hit(struct kvfs_plane *plane, const struct kvfs_record *record);
/* The plane comes down. */
void foreign_leave(struct kvfs_plane *plane);
/* A block or directory is here under a key, within a step. Returns what other nodes have of that name. Their block is remembered as removed: its node
 * may be away, and would bring it back once the new block is gone. */
enum foreign_holder { FOREIGN_NOTHING, FOREIGN_BLOCK, FOREIGN_DIRECTORY };
enum foreign_holder foreign_replaced(struct kvfs_plane *plane, uint64_t key_low, uint64_t key_high, uint64_t by_version);
/* Remove a block's name of another node, which nobody here has, within a step: every node is told. 0; 1: a directory; -ENOENT: no node has it. */
int foreign_drop(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t size);
/* The rights of a directory that other nodes have, and as its version that of their last change. 0, -ENOENT, -EAGAIN. */
int foreign_rights(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t size, struct kvfs_record *out);

/* ---- changes.c: what subscribers are told; within a step ---- */

/* Records of the table before it changes: the inode's, and another inode's that has the name. Neither, if nobody has subscribed. */
struct change {
    struct kvfs_record before, holder;
    bool known, held;
};
void change_look(struct kvfs_plane *plane, uint64_t inode, uint64_t parent, const char *name, uint32_t name_size, struct change *out);
/* The table has changed: by kvfs_table_put(), _update(), or _remove(). `reason`: of a block that is new there. */
void change_put(struct kvfs_plane *plane, const struct kvfs_inode_record *record, const char *name, enum kvfs_event_reason reason,
                const struct change *change);
void change_update(struct kvfs_plane *plane, const struct kvfs_inode_record *record, const char *name, const struct change *change);
/* A block was copied to another place: subscribers do not care, other nodes do. */
void change_moved(struct kvfs_plane *plane, const struct kvfs_inode_record *record, const char *name);
void change_remove(struct kvfs_plane *plane, enum kvfs_event_reason reason, const struct change *change);

/* ---- workers (worker.c) and store jobs (segment_jobs.c) ---- */

struct worker {
    struct kvfs_plane *plane;
    struct worker_pool *pool;
    pthread_t thread;
    struct ring ring;
    bool started;
};
struct worker_pool {
    pthread_mutex_t lock;
    pthread_cond_t more;
    struct job *first, *last;
    struct worker *workers;
    uint32_t count;
    bool stopping;
};
int pool_start(struct kvfs_plane *plane, struct worker_pool *pool, uint32_t count);
void pool_stop(struct worker_pool *pool);
void pool_add(struct worker_pool *pool, struct job *job);

/* ---- the plane, as content sees it: fuse and virtiofs keep their parts ---- */

#define MISSED_NAMES 4096
struct counters {
    atomic_ullong requests, forwarded, forward_timeouts, lookups, lookup_misses, misses_made, opens, opens_found, stale_opens, reads, read_bytes,
        writes, write_bytes, checksum_errors, read_errors, staged_files, open_handles, parked, spins, sleeps, wakeups, blocks_written, blocks_copied,
        written_bytes, jobs_in_flight, slow_requests, ring_requests, handed, flushes_sealed, uses, staging_waits, staging_refusals;
};
struct kvfs_plane {
    struct kvfs_plane_config config;
    struct kvfs_array array;
    struct kvfs_table *table;
    struct kvfs_names *names;
    struct feed *feed;    /* NULL: nobody has subscribed; within a step */
    struct kvfs_pod *pod; /* the names of other nodes, and what this one tells them. All NULL: the pool is no pod */
    struct kvfs_news *news;
    struct foreign_known *known;
    struct tombstones *tombstones;
    atomic_bool waits_for_news;           /* look-ups that miss */
    struct flush *flushes, *flushes_last; /* waiting for room; within a step */
    struct reservations reservations;
    struct arena staging, staging_small, reading, reading_small;
    pthread_mutex_t staged_lock;
    uint64_t asked_bytes, spill_failed_ns; /* of all lists; under staged_lock */
    atomic_ullong staged_bytes, staging_share, staging_short_until_ns;
    atomic_ullong open_bytes, space; /* open_bytes: content that eviction must keep, open, leased or being written; space: the pool's room for it */
    atomic_ullong leased_pages;      /* of all leased blocks: each counts once */
    atomic_uint leased_blocks;
    atomic_int space_error;           /* the error of a write that needs more */
    atomic_ullong share;              /* of one user */
    atomic_uint names_share;          /* the same as a part of KVFS_WHOLE */
    atomic_uint exempt;               /* besides root */
    struct user users[USERS_MAX + 1]; /* by hash; the last is shared by all users without a place */
    struct shard shards[SHARDS];
    struct handle_table handles;
    atomic_uint *uses;          /* by table slot: tick of the last use << 8 | hits, which stop at 255 */
    atomic_uint tick;           /* 24 bits */
    struct kvfs_ages used;      /* uses since they were last taken, by the age before */
    struct kvfs_chains *chains; /* changed in steps (I4) */
    struct worker_pool store;
    atomic_bool stopping;
    atomic_bool leaving; /* the mount is another daemon's next */
    struct counters count;
    struct processes processes;
    atomic_ullong missed_names[MISSED_NAMES]; /* hashes of names that were looked up and missing, by hash */
    atomic_ullong missed_told;                /* the largest count that kvfs_statistics_get() has returned: a counter never goes back */
    atomic_ullong found_ages[KVFS_AGES];
    struct {
        atomic_ullong count, total_ns, buckets[40];
    } latency[5];
    uint64_t slow_ns;          /* of slow_ms; UINT64_MAX: nothing is slow */
    atomic_ullong slow_window; /* second << 8 | its events */
    struct events events;
    pthread_mutex_t request_lock;
    struct request *requests_free;
    struct request *memory_parked, *memory_parked_last; /* WRITEs that wait for staging; under request_lock */
    uint32_t requests_busy;                             /* got and not put; under request_lock */
    atomic_ullong unparks;                              /* of those; changed under request_lock */
    struct written *written;                            /* NULL: no other process keeps such a list */
    struct opens *opens;                                /* the same */
    uint64_t news_until_ns;                             /* until then news of before the daemon's start are still to come */
    struct lost_handles *lost;                          /* NULL: the mount is of this daemon alone */
    struct fuse *fuse;                                  /* fuse/fuse.h */
    struct guests *guests;                              /* virtiofs/virtio.h */
};
#define COUNT(plane, field, n) atomic_fetch_add_explicit(&(plane)->count.field, (n), memory_order_relaxed)

/* False: it was lost, for want of memory. */
static inline bool event_add(struct kvfs_plane *plane, uint32_t type, uint64_t inode, uint64_t value) {
    return events_add(&plane->events, type, inode, value);
}
static inline void complete(struct kvfs_plane *plane, uint64_t cookie, int64_t result) {
    unsigned long long before = atomic_fetch_sub(&plane->count.jobs_in_flight, 1);
    assert(before > 0); /* a job ends once */
    events_complete(&plane->events, cookie, result);
}

static inline void slow_look(struct kvfs_plane *plane, uint32_t opcode, uint64_t inode, uint64_t took_ns) {
    if (__builtin_expect(took_ns > plane->slow_ns, 0))
        slow_add(plane, opcode, inode, took_ns);
}

static inline struct shard *shard_of(struct kvfs_plane *plane, uint64_t inode) { return &plane->shards[(inode ^ (inode >> 20)) % SHARDS]; }

#endif
