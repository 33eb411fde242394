/* Inside libkvfs: how its parts hold together. Not installed; kvfs.h is the outside.
 *
 * A client has one connection with a daemon: its block table, devices, and socket. When the daemon ends, the connection stays readable. A call that
 * finds a new daemon makes a new connection; the old one goes with its last user. A connection's devices are a struct kvfs_array, as in the daemon:
 * rooms base, block and io work on it.
 *
 * A call takes a lane (a ring and what belongs to it), runs fetches on it in its own thread, and gives it back. Nothing here has threads but
 * the watcher (client/watch.c), the stager (client/prestage.c) and queues.
 *
 * Each file uses those above it: error, wire, ask, locate, bounce, spans, lane, connection, watch, report, orphans, keys, names. Then come fetch, prestage,
 * get, file, put_block, put, client, queue; gpu/ uses all but the last two. Beside get stand lease and claim; events uses connection and keys.
 */
#ifndef KVFS_CLIENT_INTERNAL_H
#define KVFS_CLIENT_INTERNAL_H

#include "block/block.h"
#include "kvfs_wire.h"
#include "io/ring.h"
#include "kvfs.h"
#include "pod/foreign.h"

#define LANES_MAX 32
#define CLIENT_RETRIES 4
#define SIDE_PAGES 2u
#define CLIENT_HITS_MAX 500
#define CLIENT_FOREIGN_MAX 170
#define CLIENT_FAILED_MAX 1024
#define KVFS_KEY_SHORT 127 /* bytes of a key whose name has all of its digits */
#define CLIENT_COUNTERS (sizeof(struct kvfs_client_statistics) / sizeof(uint64_t))

struct lane;
/* A write that the daemon was told may still land. */
struct late_write {
    struct late_write *next;
    uint64_t reservation;
};
struct connection {
    struct connection *next; /* retired ones */
    atomic_uint refs;
    atomic_uint light; /* of these, those that need no devices */
    struct kvfs_array array;
    bool verify; /* leaves are checked */
    struct kvfs_table *table;
    bool in_pod;
    struct kvfs_pod *pod;        /* names of the other nodes; NULL: the pool is no pod */
    struct foreign_known *known; /* their blocks, by node id */
    int *fds;                    /* devices */
    uint32_t memory_alignment;
    int socket;
    pthread_mutex_t send_lock;    /* one frame is sent; taken before socket_lock, if both are */
    pthread_mutex_t socket_lock;  /* guards what is received: from here to next_id */
    pthread_cond_t answered;      /* some request was, or nobody listens */
    bool listening;               /* a thread waits for the socket; the others wait for `answered` */
    struct wire_pending *pending; /* requests without an answer */
    struct wire_frame frame;      /* the frame that is coming in: received bytes of it, and of its payload */
    uint8_t *payload;
    uint64_t received;
    int descriptor; /* it came with the frame; -1: none did */
    uint32_t next_id;
    atomic_bool gone;     /* the daemon hung up */
    atomic_bool closed;   /* ... and said so first: unmounted */
    atomic_bool silent;   /* ... or its process listens still, and says nothing */
    bool held;            /* its mount outlives it: another daemon will come */
    uint64_t listener[4]; /* device, inode, ctime (s, ns) of the socket's file: each daemon makes one */
    bool writable;
    uint32_t version; /* of the protocol, as agreed on: KVFS_WIRE_OLDEST to KVFS_WIRE_VERSION */
    uint32_t reservation_ms;
    uint32_t user, own_user; /* as the daemon sees it, plus 1 (0: it does not say); as this process saw itself then */
    uint8_t uuid[16];
    pthread_mutex_t lock; /* lanes, orphans */
    struct lane *idle;
    struct fetch *orphans; /* of all lanes: ended with -ETIMEDOUT while a device still owns the memory */
    uint32_t lane_count;
    pthread_cond_t lane_idle;
    _Atomic(struct late_write *) landed; /* those that cannot land any more; each is the begin of its allocation */
    atomic_uint late;                    /* these, and those that still can */
};

/* File pages [from, to), and where they are read to. */
struct span {
    uint32_t from, to;
    uint8_t *memory; /* of page `from` */
    bool bounced;    /* memory is the fetch's */
};
/* All pages of a read. */
struct spans {
    struct kvfs_buffer *pieces; /* where the bytes of the file from offset on belong, size of them in all */
    struct span *list;
    uint32_t piece_count, count, capacity, bounced_pages;
    uint64_t offset, size;
};

/* One read of (a part of) a sealed file into memory. */
struct fetch {
    struct fetch *next, *previous;
    /* The caller sets these, on a fetch from fetch_get(). */
    struct kvfs_record record;                            /* as the table has it: a sealed file */
    struct desc *desc;                                    /* verified, of this very place, if known: the fetch takes this reference over */
    uint64_t offset, size;                                /* of the file; offset + size <= record.size; size may be 0 */
    uint64_t until_ns;                                    /* done by then, however many I/Os it takes; 0: timeout_ms from fetch_start() on */
    bool narrow;                                          /* of a header of many pages only those are read that prove the wanted leaves */
    void (*done)(struct lane *lane, struct fetch *fetch); /* once, from lane_run(); then the fetch is gone. It may start others. */
    void *owner;
    uint64_t cookie;
    /* Set before done. Size, or -ESTALE (the inode is not there any more: look the name up again), -EIO (reported to the daemon), -ENOMEM. Or
     * -ETIMEDOUT: the memory is the device's until kvfs_busy() says otherwise. desc is verified where result >= 0: the wanted leaves, if it is
     * narrow, else all of it. */
    int64_t result;
    /* The engine's. */
    struct lane *lane;
    struct spans spans;
    uint8_t *side;   /* SIDE_PAGES, where no more are bounced */
    uint8_t *bounce; /* where there are more */
    uint64_t bounce_size;
    uint32_t groups_left, groups_held, retries;
    int error;
    bool load_header, bad_once;
};

struct lane {
    struct lane *next;
    struct connection *connection;
    struct kvfs_client *client;
    struct ring ring;
    struct fetch *ready, *ready_last; /* read, not yet verified */
    uint32_t orphan_count;            /* its fetches in connection->orphans */
    struct fetch *free;
    uint32_t active_count, ready_count; /* ready ones are active */
    uint8_t *bounces[8];                /* free bounce buffers */
    uint64_t bounce_sizes[8];
};

struct ask;    /* client/ask.c */
struct stage;  /* client/prestage.c */
struct claims; /* client/claim.c */
/* How the daemon is found. The first way that leads there is kept to. */
enum way { BY_ANY, BY_CONTROL, BY_MOUNT };
#define FUSE_MAGIC 0x65735546 /* statfs(2) */
struct kvfs_client {
    pid_t pid;
    struct kvfs_options options;
    char path[4096];  /* as given to connect */
    char pool[4096];  /* directory of the control socket */
    char place[4096]; /* path, absolute */
    char space[1024];
    uint64_t base;        /* inode of path */
    pthread_mutex_t lock; /* connection (the pointer), hits of both kinds, failed */
    struct connection *connection;
    struct connection *retired; /* of daemons that are gone; kept while calls use them or devices owe them answers */
    uint64_t *hits;
    uint32_t hit_count;
    struct wire_foreign_block foreign_hits[CLIENT_FOREIGN_MAX];
    uint32_t foreign_hit_count;
    uint64_t hits_sent_ns;
    uint64_t failed[CLIENT_FAILED_MAX]; /* inodes of the last blocks that could not be read */
    uint32_t failed_count;              /* ever */
    uint64_t silent_until_ns;           /* a daemon took a connection and said nothing: not asked again before that */
    atomic_uint orphans;                /* of all lanes */
    enum way way;                       /* with `ask`: of whoever connects, with `lock` once there is a connection */
    struct ask *ask;                    /* the last one */
    struct stage *stage;
    _Atomic(struct claims *) claims; /* client/claim.c; NULL: there was none yet. Set once, without `lock` */
    pthread_t watcher;               /* client/watch.c */
    int watch_fds[2];                /* a pair of sockets; a byte from the second: the end. -1: there is no watcher */
    uint64_t watch_inodes[2];        /* theirs */
    atomic_bool closing;
    atomic_ullong count[CLIENT_COUNTERS]; /* as struct kvfs_client_statistics has them; the last, `busy`, is not counted here */
};
#define TALLY(client, field, n) \
    atomic_fetch_add_explicit(&(client)->count[offsetof(struct kvfs_client_statistics, field) / sizeof(uint64_t)], (n), memory_order_relaxed)

/* ---- client/error.c ---- */

/* Keep the message for kvfs_error(); returns error. */
int client_fail(int error, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* In words: why a call that makes a descriptor failed. EMFILE and ENFILE say whose limit it is. Until the thread's next call. */
const char *descriptor_reason(int error);

/* ---- client/wire.c ---- */

/* One after the other, in as few pieces as the socket takes. 0, -ETIMEDOUT, -ENOTCONN. */
int wire_send_all(int fd, const void *head, uint64_t head_size, const void *data, uint64_t size, uint64_t deadline_ns);
/* Exactly size bytes; descriptors that come with them go to fds (KVFS_WIRE_FDS_MAX), or are closed. -EMFILE, -ENFILE: some found no place here. */
int wire_receive_all(int fd, void *data, uint64_t size, uint64_t deadline_ns, int *fds, uint32_t *fd_count);
/* Is the daemon still there? Receives what it has sent meanwhile. Never waits. */
void connection_poll(struct connection *connection);
/* One request. Until it is done it is the connection's, and its memory stays: the asker waits for that, or looks later whether it is
 * (wire_send_at_once). Any number may be under way, from any threads. */
struct wire_pending {
    struct wire_pending *next;
    uint32_t id;
    uint16_t type;
    uint64_t sent_ns, answered_ns, deadline_ns;
    atomic_bool done; /* the fields below are set; connection_poll() may have set it */
    int result;       /* 0, or why no answer came: -ENOTCONN, -EPROTO, -ETIMEDOUT */
    int32_t status;
    uint8_t *reply; /* malloc'ed */
    uint32_t reply_size;
    int descriptor; /* the asker's, or -1; only EVENTS has one */
};
void wire_send(struct connection *connection, uint16_t type, const void *payload, uint32_t size, uint32_t timeout_ms, struct wire_pending *pending);
/* The same, if its first byte goes without waiting; false: it was not sent. A caller that does not wait has the request, and its memory,
 * until it is done. */
bool wire_send_at_once(struct connection *connection, uint16_t type, const void *payload, uint32_t size, uint32_t timeout_ms,
                       struct wire_pending *pending);
void wire_wait(struct connection *connection, struct wire_pending *pending);
/* The outcome of a request that is done; *reply is malloc'ed. 0, the daemon's -errno, -ENOTCONN, -ETIMEDOUT, -EPROTO. */
int wire_answer(struct kvfs_client *client, struct wire_pending *pending, uint8_t **reply, uint32_t *reply_size);
/* All three. */
int wire_ask(struct kvfs_client *client, struct connection *connection, uint16_t type, const void *payload, uint32_t size, uint32_t timeout_ms,
             uint8_t **reply, uint32_t *reply_size);
/* Notify the daemon, without an answer; dropped where it would have to wait: small frames are sent whole or not at all. */
#define WIRE_NOTIFY_MAX 4096
static_assert(CLIENT_HITS_MAX * sizeof(uint64_t) <= WIRE_NOTIFY_MAX, "a frame of hits would be dropped");
static_assert(sizeof(struct wire_foreign) + CLIENT_FOREIGN_MAX * sizeof(struct wire_foreign_block) <= WIRE_NOTIFY_MAX,
              "so would one of foreign hits");
void wire_notify(struct connection *connection, uint16_t type, const void *payload, uint32_t size);
/* A payload that grows; what is appended is padded to 8. The owner frees data. */
struct message_buffer {
    uint8_t *data;
    uint64_t size, capacity;
    bool failed;
};
void message_append(struct message_buffer *out, const void *data, uint64_t size);
void message_append_where(struct message_buffer *out, const struct kvfs_client *client, uint32_t flags, uint32_t count); /* enum wire_flag */
int message_check(const struct message_buffer *request); /* -ENOMEM: there was no memory, or it is too long for a frame */
/* message_check() and wire_ask(); the request is freed. */
int message_ask(struct kvfs_client *client, struct connection *connection, uint16_t type, struct message_buffer *request, uint8_t **reply,
                uint32_t *reply_size);

/* ---- client/locate.c ---- */

/* The pool behind a path: the source of its mount, or the path itself; and the path's inode in it. */
int pool_of(const char *path, char pool[4096], uint64_t *base);
/* The socket's file, as connection->listener has it. Zeros: there is none. */
void listener_of(const struct kvfs_client *client, uint64_t out[4]);
/* The process behind the connection still listens: nothing can have been changed without it. */
bool listener_is_same(const struct kvfs_client *client, const struct connection *connection);
int socket_open(struct kvfs_client *client, uint64_t deadline_ns); /* a descriptor, or -errno */

/* ---- client/ask.c ---- */

/* A connection by the mount that the client's path lies in. -ESHUTDOWN, without a message: nothing of kvfs answers there. */
int ask_mount(struct kvfs_client *client, uint64_t deadline_ns);
/* Wait until the mount answers, as one that is held does once its next daemon comes. -ENOTCONN: nobody serves it, or it is none, which is told at once;
 * -ETIMEDOUT: it is held, and none has come. It leaves kvfs_error() alone. */
int mount_await(struct kvfs_client *client, uint64_t deadline_ns);
void ask_forget(struct kvfs_client *client); /* at its end; an ask that waits goes by itself */

/* ---- client/bounce.c ---- */

uint8_t *lane_bounce(struct lane *lane, uint64_t *size); /* page aligned, at least *size; NULL: no memory */
void lane_bounce_give(struct lane *lane, uint8_t *bounce, uint64_t size);

/* ---- client/spans.c ---- */

/* Plan a read of bytes [offset, offset + size) into pieces, which hold at least as many. They are copied. 0 or -ENOMEM. */
int spans_plan(struct spans *spans, const struct kvfs_buffer *pieces, uint32_t count, uint64_t offset, uint64_t size, uint32_t alignment);
void spans_bounce(struct spans *spans, uint8_t *memory); /* where the bounced pages go: bounced_pages, page aligned */
/* The memory of pages [from, *to) in at most `capacity` parts; returns their number. *to becomes the page that they end before. */
uint32_t spans_memory(const struct spans *spans, uint32_t from, uint32_t *to, struct iovec *iovs, uint32_t capacity);
uint64_t spans_copy_out(const struct spans *spans); /* bounced bytes to where they belong; returns how many */
bool spans_overlap(const struct spans *spans, const uint8_t *data, uint64_t size);
void spans_free(struct spans *spans);

/* ---- client/lane.c ---- */

int lane_take(struct kvfs_client *client, struct connection *connection, struct lane **out); /* -EBUSY: all in use for timeout_ms */
void lane_give(struct lane *lane);                                                           /* no fetch may be active */
/* Free a lane of a connection that nobody uses. False: a device may still write, so its memory stays. */
bool lane_free(struct lane *lane);
struct fetch *fetch_get(struct lane *lane); /* NULL: no memory */
void fetch_recycle(struct fetch *fetch);
/* Let go of orphans whose devices have answered. By the lane's holder; or, locked, of an idle lane with connection->lock held. */
void lane_reap(struct lane *lane, bool locked);
void connection_reap(struct connection *connection); /* lane_reap() for all idle lanes */
/* True: an orphan overlaps that memory. *owed becomes true where devices owe answers to reads (orphans) or to writes. */
bool connection_overlaps(struct connection *connection, const uint8_t *data, uint64_t size, bool *owed);

/* ---- client/connection.c ---- */

/* A new one with the daemon that is there. */
int connection_open(struct kvfs_client *client, struct connection **out);
/* The first of a client. Between two daemons of a mount that is held it waits for the next one, timeout_ms in all. */
int connection_first(struct kvfs_client *client);
/* Every call begins here. Returns -ECHILD after fork, -ENOTCONN after an unmount; else the connection, reconnected if there is a new daemon. The
 * caller has a reference, which connection_put() gives back. */
int connection_get(struct kvfs_client *client, struct connection **out);
int connection_get_at_once(struct kvfs_client *client, struct connection **out); /* -EAGAIN: not without waiting */
/* A call's wait for the daemon after one that has ended under a held mount: at most timeout_ms in all, from when it was first missed. Zeroed at the
 * call's start. */
struct daemon_wait {
    uint64_t until_ns;
    uint32_t retries;
};
/* One with a daemon that lives. NULL: nothing is waited for. */
int daemon_get(struct kvfs_client *client, struct daemon_wait *wait, struct connection **out);
int writer_get(struct kvfs_client *client, struct daemon_wait *wait, struct connection **out); /* and that may write */
/* A call failed with `error` on that connection. True: its daemon ended under a held mount, so the call is to be made once more. */
bool daemon_retry(const struct connection *connection, struct daemon_wait *wait, int error);
void daemon_wait_over(const atomic_bool *over); /* this thread waits for no daemon once that is true */
void connection_put(struct connection *connection);
/* A reference becomes one that keeps the socket and the table alone; connection_put_light() gives that back. */
void connection_lighten(struct connection *connection);
void connection_put_light(struct connection *connection); /* NULL: nothing to do */
/* client->lock is held, the daemon is gone and its table no longer right: nothing is read by this connection any more. Its devices are closed once no
 * call uses it and no device owes it an answer. */
void client_leave(struct kvfs_client *client);
void client_prune(struct kvfs_client *client); /* client->lock held */

/* ---- client/watch.c ---- */

/* Before anybody else knows the client. Without a thread it lets go at its next call. */
void client_watch(struct kvfs_client *client);
void client_watch_end(struct kvfs_client *client);

/* ---- client/report.c ---- */

/* Tells the daemon, some time soon; NULL: now. */
void client_hit(struct kvfs_client *client, struct connection *connection, const struct kvfs_record *record);
/* Those that wait for longer than "some time soon": a client may store and not read any more. */
void client_hits_send(struct kvfs_client *client, struct connection *connection);
/* A block is there and could not be read: its bytes do not prove, or its device erred or gave no answer. A put if absent stores it again. */
void client_failed(struct kvfs_client *client, uint64_t inode);
bool client_has_failed(struct kvfs_client *client, uint64_t inode);
void client_bad_block(struct connection *connection, const struct kvfs_record *record);
/* Blocks of other nodes, as frames name them; at most CLIENT_FOREIGN_MAX. `what` is an enum wire_foreign_what. */
struct wire_foreign_block foreign_block(const struct kvfs_record *record);
void foreign_notify(struct connection *connection, uint32_t what, const struct wire_foreign_block *blocks, uint32_t count);

/* ---- client/orphans.c ---- */

/* Memory that is written by a read which belongs to no lane and cannot be cancelled. Any thread may call. */
struct orphan {
    struct orphan *next;
    const uint8_t *data;
    uint64_t size;
};
void orphan_add(struct orphan *orphan);
void orphan_remove(struct orphan *orphan);
bool client_overlaps_orphan(struct kvfs_client *client, const void *data, uint64_t size);
bool client_owed(struct kvfs_client *client); /* devices owe answers, to reads or to writes */
/* -EINVAL, -EBUSY: destinations that overlap each other, or memory that a device still owns. */
int client_check_buffers(struct kvfs_client *client, const struct kvfs_buffer *buffers, uint32_t count);
int client_check_vectors(struct kvfs_client *client, const struct kvfs_vector *vectors, uint32_t count); /* the same of all their pieces */

/* ---- client/keys.c ---- */

/* Where a key's block lies: a file below the namespace. */
struct key_file {
    const char *path;   /* in memory, or the key; no zero behind it */
    uint32_t path_size; /* the name is [name_at, path_size); its directory what is before that, without the slash; name_at 0: the namespace's own */
    uint32_t name_at;
    char memory[3 + 2 * KVFS_KEY_MAX + 1];
};
int key_check(uint32_t kind, const void *key, uint32_t key_size); /* enum kvfs_key_kind. -EINVAL */
bool key_is_short(uint32_t kind, uint32_t key_size);              /* its file is one of the 256 directories of keys, and needs no table */
void key_file(uint32_t kind, const void *key, uint32_t key_size, struct key_file *out); /* of a key that was checked */
uint32_t key_hex(const uint8_t *key, uint32_t key_size, char *out);                     /* out: 2 * key_size bytes; returns that */

/* RESERVE and DELETE: items, and where WIRE_TABLE is set the directories that they are in. */
#define DIRECTORY_SLOTS (2 * KVFS_WIRE_DIRECTORIES_MAX)
struct names_request {
    struct message_buffer items, table;
    uint32_t flags, directory_count;
    uint32_t directory_at[KVFS_WIRE_DIRECTORIES_MAX]; /* in the table */
    uint16_t slots[DIRECTORY_SLOTS];                  /* by hash: number + 1 of a directory */
};
void names_begin(struct names_request *request, uint32_t flags);
int names_directory(struct names_request *request, const struct key_file *file); /* number of the file's directory; -1: the table is full */
/* The whole request, of `count` items; the owner frees it. */
void names_end(struct names_request *request, const struct kvfs_client *client, uint32_t count, struct message_buffer *out);

/* ---- client/names.c ---- */

/* Directories that were found in a call: those of keys, and the last one of another kind. Zeroed at its start. */
struct shards {
    uint64_t space; /* inode of the namespace; 0: it is not known */
    uint64_t inodes[256];
    uint8_t known[256];
    bool at_once;  /* the daemon is not asked: -EAGAIN */
    uint64_t last; /* 0: there is none */
    uint32_t last_size;
    bool last_known;
    char last_path[KVFS_PATH_MAX];
};
/* 0 and the record of a sealed file; -ENOENT: a miss; -EINVAL: what cannot be a key of that kind. Asks the daemon where the table cannot say. */
int key_find(struct kvfs_client *client, struct connection *connection, struct shards *shards, uint32_t kind, const uint8_t *key, uint32_t key_size,
             struct kvfs_record *out);
/* kvfs_exists() that waits for nobody: how many there are; -EAGAIN, where only the daemon can say. */
int keys_exist_at_once(struct kvfs_client *client, const struct kvfs_keys *keys, uint8_t *found);

/* ---- client/claim.c ---- */

void claims_free(struct kvfs_client *client); /* no connection is left that could receive their answers */

/* ---- client/events.c ---- */

/* The key (255 bytes at most) whose block lies at this path below its namespace. Returns its size; 0: that is no key's path. */
uint32_t key_of_path(const char *path, uint32_t size, uint8_t *key);

/* ---- client/fetch.c ---- */

/* Read into `count` pieces, which hold at least fetch->size bytes; they are copied. */
void fetch_start(struct lane *lane, struct fetch *fetch, const struct kvfs_buffer *pieces, uint32_t count);
/* Submit, wait for a completion (at most timeout_ns; 0: only look), prove what is complete and call its done. Returns how many fetches are active.
 * lane_step() proves one at most: a caller with more to read starts that first, so that devices do not wait for checksums. */
uint32_t lane_step(struct lane *lane, uint64_t timeout_ns);
uint32_t lane_run(struct lane *lane, uint64_t timeout_ns);

/* ---- client/prestage.c ---- */

void stage_stop(struct kvfs_client *client);
/* If this very block is staged: copy bytes [offset, offset + size) of it to pieces that hold as many. If these are all, give it up. 1, or 0: not
 * staged. Waits for one that is being read, until then. */
int stage_take(struct kvfs_client *client, const struct kvfs_record *record, uint64_t offset, uint64_t size, const struct kvfs_buffer *pieces,
               uint64_t until_ns);

/* ---- client/get.c ---- */

/* Reads of one call, or of one that a queue took. Each has a turn for its blocks, the oldest first. */
struct get_batch {
    struct get_batch *next; /* of those with blocks that have had no turn */
    struct kvfs_client *client;
    const struct kvfs_keys *keys;
    const struct kvfs_vector *vectors;
    bool ranges; /* vectors[i].offset counts; else each is to hold the whole block */
    int64_t *results;
    void (*done)(struct get_batch *batch); /* all blocks have their results; NULL: the caller looks at `left` */
    void *owner;
    const uint8_t **places; /* of the keys */
    uint8_t *tries;         /* how often a name led to an inode that was gone */
    uint32_t begun, left, read;
    int error;        /* of the whole batch, such as of a key that cannot be */
    char reason[512]; /* its message */
    struct shards shards;
};
/* Blocks of batches on one lane, up to `depth` of them in flight. */
struct get_loop {
    struct lane *lane;
    uint32_t depth;
    uint64_t turn_ns; /* when the blocks that begin now could */
    struct get_batch *first, *last;
};
/* Check a batch's memory, and make what reading it needs. 0, -EINVAL, -EBUSY, -ENOMEM; get_end() in any case. */
int get_begin(struct get_batch *batch);
void get_end(struct get_batch *batch);
void get_add(struct get_loop *loop, struct get_batch *batch); /* a batch that has begun, and has blocks */
bool get_wants(const struct get_loop *loop);                  /* another block could be begun now */
void get_fill(struct get_loop *loop);                         /* begin as many as are to be in flight */
/* Begin blocks, wait for a completion at most timeout_ns, and give a block its result. True while there is more to do. */
bool get_step(struct get_loop *loop, uint64_t timeout_ns);
/* Blocks that have had no turn get none: -ECANCELED. */
void get_cancel(struct get_loop *loop);

/* ---- client/client.c ---- */

/* Connect to the daemon of the pool in a directory; path, of inode `base`, is what its users call it. options may be NULL. */
int client_open(const char *path, const char *pool, uint64_t base, const char *space, const struct kvfs_options *options, struct kvfs_client **out);

#endif
