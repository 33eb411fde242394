/* Inside libkvfs: how its parts hold together. Not installed; kvfs.h is the outside.
 *
 * A client has one session with a daemon: its block table, devices, and connection. When the daemon ends the session stays readable; a call
 * that finds a new daemon makes a new session, and the old one goes with its last user. A session's devices are a struct kvfs_array, as
 * in the daemon: rooms base, block and io work on it.
 *
 * A call takes a lane (a ring and what belongs to it), runs fetches on it in its own thread, and gives it back. Nothing here has threads but
 * the stager (client/stage.c).
 */
#ifndef KVFS_CLIENT_INTERNAL_H
#define KVFS_CLIENT_INTERNAL_H

#include "block/block.h"
#include "io/ring.h"
#include "client/wire.h"
#include "kvfs.h"

#define LANES_MAX 32
#define CLIENT_RETRIES 4
#define CLIENT_HITS_MAX 500

struct lane;
struct put_item;
struct session {
    struct session *next;                /* retired ones */
    atomic_uint refs;
    struct kvfs_array array;
    bool verify;                         /* leaves are checked */
    struct kvfs_table *table;
    int *fds;                            /* devices */
    uint32_t memory_alignment;
    int socket;
    pthread_mutex_t send_lock;           /* one frame is sent; taken before socket_lock, if both are */
    pthread_mutex_t socket_lock;         /* what comes: from here to next_id */
    pthread_cond_t answered;             /* some request was, or nobody listens */
    bool listening;                      /* a thread waits for the socket; the others wait for that one */
    struct asked *asked;                 /* requests without an answer */
    struct wire_frame frame;             /* the frame that is coming in: heard bytes of it, and of its payload */
    uint8_t *payload;
    uint64_t heard;
    uint32_t next_id;
    atomic_bool gone;                    /* the daemon hung up */
    atomic_bool goodbye;                 /* ... and said so first: unmounted */
    atomic_bool silent;                  /* ... or its process listens still, and says nothing */
    uint64_t listener[4];                /* device, inode, ctime (s, ns) of the socket's file: each daemon makes one */
    bool writable;
    uint32_t reservation_ms;
    uint8_t uuid[16];
    pthread_mutex_t lock;                /* lanes, zombies */
    struct lane *idle;
    struct fetch *zombies;               /* of all lanes: done with -ETIMEDOUT, memory still the device's */
    uint32_t lane_count;
    pthread_cond_t lane_idle;
    _Atomic(struct put_item *) landed;   /* writes that the daemon was told may still land, and that cannot any more */
    atomic_uint late;                    /* these, and those that still can */
};

/* One read of (a part of) a sealed file into memory. */
struct fetch {
    struct fetch *next, *previous;
    /* The caller sets these, on a fetch from fetch_get(). */
    struct kvfs_record record;           /* as the table has it: a sealed file */
    struct desc *desc;                   /* verified, of this very place, if known: the fetch takes this reference over */
    uint64_t offset, size;               /* of the file; offset + size <= record.size; size may be 0 */
    uint64_t until_ns;                   /* done by then, however many I/Os it takes; 0: timeout_ms from fetch_start() on */
    uint8_t *data;                       /* where the bytes go, any alignment */
    void (*done)(struct lane *lane, struct fetch *fetch);   /* once, from lane_run(); then the fetch is gone. It may start others. */
    void *owner;
    uint64_t cookie;
    /* Set before done: size, or -ESTALE (the inode is not there any more: look the name up again), -EIO (reported to the daemon), -ETIMEDOUT
     * (the memory at data is the device's until kvfs_busy() says otherwise), -ENOMEM. desc is verified where result >= 0. */
    int64_t result;
    /* The engine's. */
    struct lane *lane;
    uint8_t *side;                       /* two pages: the first and the last, where only a part of them is wanted */
    uint8_t *bounce;                     /* whole pages, when data is not aligned for direct reads */
    uint64_t bounce_size;
    uint32_t groups_left, groups_held, retries;
    int error;
    uint8_t *direct;                     /* where file page 0 would lie; NULL: all of it goes to bounce */
    bool load_header, bad_once;
};

struct lane {
    struct lane *next;
    struct session *session;
    struct kvfs_client *client;
    struct ring ring;
    struct fetch *ready, *ready_last;    /* read, not yet verified */
    uint32_t zombie_count;               /* its fetches in session->zombies */
    struct fetch *free;
    uint32_t active_count, ready_count;  /* ready ones are active */
    uint8_t *bounces[8];                 /* free bounce buffers */
    uint64_t bounce_sizes[8];
};

struct stage;                            /* client/stage.c */
struct kvfs_client {
    pid_t pid;
    struct kvfs_options options;
    char path[4096];                     /* as given to connect */
    char pool[4096];                     /* directory of the control socket */
    char space[1024];
    uint64_t base;                       /* inode of path */
    pthread_mutex_t lock;                /* session (the pointer), connection, hits */
    struct session *session;
    struct session *retired;             /* of daemons that are gone; kept while calls use them or devices owe them answers */
    uint64_t *hits;
    uint32_t hit_count;
    uint64_t hits_sent_ns;
    uint64_t silent_until_ns;            /* a daemon took a connection and said nothing: not asked again before that */
    atomic_uint zombies;                 /* of all lanes */
    struct stage *stage;
    struct {
        atomic_ullong lookups, hits, misses, gets, get_bytes, bounced_bytes, retries, timeouts, checksum_errors, puts, put_bytes, deletes,
            prestaged, prestage_used, prestage_wasted, reconnects;
    } count;
};
#define TALLY(client, field, n) atomic_fetch_add_explicit(&(client)->count.field, (n), memory_order_relaxed)

/* ---- client/connect.c: the daemon ---- */

/* Keep the sentence for kvfs_error(); returns error. */
int client_fail(int error, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Connect to the daemon of the pool in a directory; path, of inode `base`, is what its users call it. options may be NULL. */
int client_open(const char *path, const char *pool, uint64_t base, const char *space, const struct kvfs_options *options, struct kvfs_client **out);
/* Every call begins here: -ECHILD after fork, -ENOTCONN after an unmount; else the session, reconnected if there is a new daemon, with a
 * reference that session_put() gives back. */
int session_get(struct kvfs_client *client, struct session **out);
void session_put(struct session *session);
/* Is the daemon still there? Takes in what it has said meanwhile. Never waits. */
void session_look(struct session *session);
int key_directory(struct kvfs_client *client, struct session *session, const char *path, uint64_t *inode);  /* 0, -ENOENT */
int lane_take(struct kvfs_client *client, struct session *session, struct lane **out);   /* -EBUSY: all in use for timeout_ms */
void lane_give(struct lane *lane);                                                        /* no fetch may be active */
/* The inode number of a directory below the client's base, or of the shard directory of a key; 0, -ENOENT, -EAGAIN. */
struct shards { uint64_t space; uint64_t inodes[256]; uint8_t known[256]; };              /* zeroed at the start of a call */
/* 0 and the record of a sealed file; -ENOENT: a miss; -EINVAL: a key of a wrong size. Asks the daemon where the table cannot say. */
int key_find(struct kvfs_client *client, struct session *session, struct shards *shards, const uint8_t *key, uint32_t key_size,
             struct kvfs_record *out);
void client_hit(struct kvfs_client *client, struct session *session, uint64_t inode);      /* tells the daemon, some time soon */
void client_bad_block(struct kvfs_client *client, struct session *session, uint64_t inode, uint32_t segment);
uint32_t key_hex(const uint8_t *key, uint32_t key_size, char *out);                        /* out: 2 * key_size bytes; returns that */
/* One request: its asker's, who waits for the answer in any case. Any number may be under way, of any threads. */
struct asked {
    struct asked *next;
    uint32_t id;
    uint16_t type;
    uint64_t sent_ns, answered_ns, deadline_ns;
    atomic_bool done;                    /* what follows is set; session_look() may have done that */
    int result;                          /* 0, or why no answer came: -ENOTCONN, -EPROTO, -ETIMEDOUT */
    int32_t status;
    uint8_t *reply;                      /* malloc'ed */
    uint32_t reply_size;
};
void wire_send(struct session *session, uint16_t type, const void *payload, uint32_t size, uint32_t timeout_ms, struct asked *asked);
void wire_wait(struct session *session, struct asked *asked);
/* What came of it, when it is done; *reply is malloc'ed. 0, the daemon's -errno, -ENOTCONN, -ETIMEDOUT, -EPROTO. */
int wire_answer(struct kvfs_client *client, struct asked *asked, uint8_t **reply, uint32_t *reply_size);
/* All three. */
int wire_ask(struct kvfs_client *client, struct session *session, uint16_t type, const void *payload, uint32_t size, uint32_t timeout_ms,
             uint8_t **reply, uint32_t *reply_size);
/* Memory of this process that a read writes into which belongs to no lane and cannot be cancelled. From any thread. */
struct claim { struct claim *next; const uint8_t *data; uint64_t size; };
void claim_add(struct claim *claim);
void claim_remove(struct claim *claim);
void session_reap(struct session *session);                                                /* lane_reap() for all idle lanes */
bool client_overlaps_zombie(struct kvfs_client *client, const void *data, uint64_t size);
bool client_owed(struct kvfs_client *client);                                              /* devices owe answers, to reads or to writes */
void client_prune(struct kvfs_client *client);                                             /* client->lock held */
/* -EINVAL, -EBUSY: destinations that overlap each other, or memory that a device still owns. */
int client_check_buffers(struct kvfs_client *client, const struct kvfs_buffer *buffers, uint32_t count);
uint8_t *lane_bounce(struct lane *lane, uint64_t *size);                                  /* page aligned, at least *size; NULL: no memory */
void lane_bounce_give(struct lane *lane, uint8_t *bounce, uint64_t size);

/* ---- client/fetch.c ---- */

struct fetch *fetch_get(struct lane *lane);              /* NULL: no memory */
void fetch_start(struct lane *lane, struct fetch *fetch);
/* Submit, wait for a completion (at most timeout_ns; 0: only look), prove what is complete and call its done. Returns how many fetches are
 * active. lane_step() proves one at most: who has more to read starts it before the next is proven, so that devices do not wait for checksums. */
uint32_t lane_step(struct lane *lane, uint64_t timeout_ns);
uint32_t lane_run(struct lane *lane, uint64_t timeout_ns);
/* Let go of zombies whose devices have answered. By the lane's holder; or, locked, of an idle lane with session->lock held. */
void lane_reap(struct lane *lane, bool locked);

/* ---- client/put.c ---- */

void late_free(struct session *session);

/* ---- client/stage.c ---- */

void stage_stop(struct kvfs_client *client);
/* If this very block is staged: copy it to data (size bytes) and give it up. 1, or 0: not staged. Waits for one that is being read, until then. */
int stage_take(struct kvfs_client *client, const struct kvfs_record *record, uint8_t *data, uint64_t until_ns);

#endif
