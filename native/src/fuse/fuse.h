/* The protocol of FUSE: transports and their threads, the requests that C answers, and the session behind it. Not installed.
 *
 * Threads: the servers of each transport, workers for requests that wait for a device, and one notifier. One server of a transport is the leader,
 * which also reads the session's replies.
 */
#ifndef KVFS_FUSE_H
#define KVFS_FUSE_H

#include "content/content.h"

#include <fcntl.h>
#include <linux/fuse.h>
#include <unistd.h>

/* fuse_open_out.open_flags; older headers lack some of FOPEN_*. */
#define OPEN_DIRECT_IO (1u << 0)
#define OPEN_KEEP_CACHE (1u << 1)
#define OPEN_NOFLUSH (1u << 5)
#define OPEN_PARALLEL_DIRECT_WRITES (1u << 6)

#define SERVERS_MAX 8
#define TRANSPORTS_MAX 16
#define PENDING_MAX 16384
#define LONG_SECONDS 3600u
#define REQUEST_HEAD 80 /* fuse_in_header and fuse_write_in: the payload of a WRITE then lands page aligned */
#define REQUEST_SMALL (REQUEST_HEAD + 132 * 1024)

/* ---- transports: server.c, fuse_dev.c, fuse_uring.c, guest.c ---- */

struct guest;
struct uring;
struct uring_entry;
struct transport_ops {
    int (*serve)(struct server *server, uint32_t *run); /* one request, if there is one: 1, 0, or -errno when the transport has ended */
    bool (*arm)(struct server *server);                 /* before a sleep: the next arrival will end it. True: something has arrived already */
    /* error: 0 or -errno. The first `placed` bytes of the body are already in place. Any thread. */
    void (*reply)(struct server *server, uint64_t unique, int error, uint32_t placed, const struct iovec *iovs, uint32_t count);
    /* Let a READ's targets be the kernel's own pages. False: they are not such pages, and slots are used. NULL: never. */
    bool (*targets)(struct request *request);
};
struct server {
    struct kvfs_plane *plane;
    struct transport *transport;
    pthread_t thread;
    int fd;
    int wake_fd;
    uint32_t index;
    bool started;
    bool reader;        /* takes requests all the time; others only while active */
    atomic_bool active; /* asked to help */
    struct io_thread io;
    uint8_t *head;       /* REQUEST_SMALL bytes */
    uint64_t arrived_ns; /* when that request came */
    struct slot *landing;
    uint64_t last_work_ns;
    struct chain *chain; /* guests: the request being taken */
    uint32_t next_queue;
    struct uring_entry *arrived, *arrived_last; /* entries with requests, oldest first */
    _Atomic(struct uring_entry *) answered;     /* by other threads: to be committed */
    int uring_error;
};
struct transport {
    struct kvfs_plane *plane;
    const struct transport_ops *ops;
    struct guest *guest; /* NULL: /dev/fuse */
    struct uring *uring; /* beside /dev/fuse; NULL: none */
    atomic_bool uring_on;
    struct server servers[SERVERS_MAX];
    uint32_t server_count;
    atomic_uint servers_running;
    atomic_bool ended;
    atomic_bool initialized;
    bool taken; /* from an earlier daemon: its kernel has handles of that one */
    bool inc_epoch;
    bool idmap;        /* its mounts may be idmapped, and its requests tell no user */
    bool listing_plus; /* its kernel asks for attributes with a listing: READDIRPLUS */
    bool direct_mmap;  /* its kernel maps files opened with FOPEN_DIRECT_IO (Linux 6.6) */
    uint32_t minor;
    uint64_t flags; /* agreed on with INIT */
    uint32_t max_read;
    uint32_t user;             /* a guest is one user, whatever users it has. 0: the users are its kernel's */
    atomic_uint forwarded;     /* under way in the session */
    atomic_uint kernel_number; /* counts the kernels that came and went: handles of an earlier one are not this one's */
};
static inline struct caller caller_of(const struct transport *transport, uint32_t pid) { return (struct caller){transport->user, pid}; }
#define NO_USER UINT32_MAX /* of a request on a connection with FLAG2_ALLOW_IDMAP, unless it makes something */
#define NOBODY 65534u
/* The user whom a request is charged to. Where mounts may be idmapped, a request that tells none is its file's owner's. Users without a share, as root,
 * are nobody there: a pod's root makes files of root, and everybody may open those. It gives no rights: those are the kernel's to check. */
uint32_t user_id(const struct transport *transport, const struct fuse_in_header *in);
int transport_start(struct kvfs_plane *plane, int fd);
int transport_take(struct kvfs_plane *plane, const int *fds, uint32_t count, const struct kvfs_held *held);
void transport_agreed(struct transport *transport, uint32_t minor, uint64_t flags); /* takes over the answer to INIT */
bool flags_are_known(uint64_t flags);                                               /* of INIT: this build could have asked for them */
int server_init(struct transport *transport, uint32_t index, int fd);               /* fd is the server's from then on, also after a failure */
void server_free(struct server *server);
int servers_start(struct transport *transport);
static inline void server_wake(struct server *server) { wake_fd(server->wake_fd); }
void transport_stop(struct transport *transport);   /* ends its threads; blocks */
void transport_free(struct transport *transport);   /* closes its descriptors; nothing refers to it any more */
void transport_forget(struct transport *transport); /* its kernel is gone: late replies are dropped, its handles are released */

/* ---- fuse_uring.c: requests of /dev/fuse's kernel by io_uring ---- */

bool uring_prepare(struct transport *transport); /* before INIT is answered. False: not to be had, so INIT does not ask for it */
void uring_begin(struct transport *transport);   /* INIT is answered: every server registers its entries */
/* Take a request to server->head, as if it had come by /dev/fuse: 1, 0, or -errno. *size is 0 if it has been refused. In the server's thread. */
int uring_take(struct server *server, size_t *size);
bool uring_pending(struct server *server); /* uring_take() has something to do */
bool uring_owns(uint64_t id);              /* the request came by a ring */
void uring_reply(struct server *server, uint64_t id, int error, const struct iovec *iovs, uint32_t count);
void uring_free(struct uring *uring);        /* the servers' rings are gone */
uint32_t uring_cpus_count(const char *text); /* the count of CPUs in a list such as "0-3,8"; 0: it is none */
/* The size of a request's first argument, from the sizes that the kernel gives; -EINVAL: they do not fit together. */
int uring_operation_size(const struct fuse_in_header *in, uint64_t payload_size, uint64_t payload_max);

/* ---- attr.c, check.c, dispatch.c, reply.c, slow.c: requests that C answers ---- */

void dispatch(struct server *server, size_t size); /* the request in server->head, payload of a WRITE in server->landing */
void request_slow(struct request *request);        /* the slow half, on a worker; the request is not the caller's any more */
size_t body_minimum(uint32_t opcode);
int strings_check(uint32_t opcode, const uint8_t *body, size_t size);
void fill_attr(struct kvfs_plane *plane, const struct kvfs_record *record, struct fuse_attr *attr);
bool host_opens_uncached(struct node *node);
/* Whether an open of a file being written must bypass the kernel's page cache, as the writer does. `created`: it is the writer's own open. */
bool cache_bypass(const struct transport *transport, struct node *node, bool created);
bool overlay_attr(struct kvfs_plane *plane, uint64_t inode, struct fuse_attr *attr); /* size, mtime of a file being written */
void entry_timeouts(struct transport *transport, const struct fuse_attr *attr, bool staged, struct fuse_entry_out *entry);
void reply_data(struct server *server, uint64_t unique, const void *data, uint32_t size);
void reply_error(struct server *server, uint64_t unique, int error);
void reply_to_read(struct request *request, int64_t result);
void reply_to_write(struct request *request, int64_t result);
uint64_t write_count(struct kvfs_plane *plane, uint32_t size, uint64_t arrived_ns); /* it has succeeded; returns its duration in ns */
void write_over(struct request *request);                                           /* it is answered, or will be by others */

/* ---- mux.c: the session ---- */

struct pending {
    struct transport *transport;
    struct server *server;
    uint64_t unique, node, deadline_ns, arrived_ns, offset, fh;
    uint32_t opcode, flags, salt, index, size, user, pid;
    uint32_t kernel_number; /* the transport's, when the request came */
    bool live, timed_out, call;
    struct pending *next, *previous; /* by deadline; or free list */
};
struct message {
    struct message *next;
    size_t size;
    uint8_t data[];
};
struct mux {
    pthread_mutex_t lock;
    atomic_int fd; /* our end of the socketpair; -1 */
    struct pending *entries;
    struct pending *free, *oldest, *newest;
    struct message *queue, *queue_last;
    atomic_uint queue_count;
    atomic_uint live_count;
    atomic_uint session_count; /* pending requests that the session will answer: all but calls */
    atomic_bool calls_open;
    pthread_mutex_t receiving; /* one leader at a time: reply, written */
    uint8_t *reply;
    struct fuse_write_out written;
};
int mux_init(struct kvfs_plane *plane);
void mux_free(struct kvfs_plane *plane);
/* Pass the request in server->head on to Python. offset, flags: kept for the reply. */
void mux_forward(struct server *server, uint32_t flags, uint64_t offset);
/* The end of a WRITE with O_DSYNC, by any thread: Python makes the bytes durable, and then it is answered. */
void mux_sync_written(struct request *request, int64_t result);
/* The request in server->head, a CREATE, UNLINK, RENAME or FLUSH, was done here: answer it. */
void mux_answer_created(struct server *server, uint32_t flags, const struct kvfs_record *record);
void mux_answer_done(struct server *server);
/* The READDIR or READDIRPLUS in server->head, `in`. */
struct pending mux_list(struct server *server, const struct fuse_in_header *in);
void mux_answer_listing(struct server *server, struct pending *p, void *body, uint32_t size);
bool mux_is_open(struct kvfs_plane *plane); /* CREATE, UNLINK, RENAME and FLUSH may be answered */
/* The FLUSH in server->head is a seal; whoever seals answers it. */
void mux_flush_file(struct server *server);
bool mux_receive(struct kvfs_plane *plane); /* takes one reply; false when there is none */
void mux_expire(struct kvfs_plane *plane, uint64_t now);
void mux_flush(struct kvfs_plane *plane);
bool mux_waiting(struct kvfs_plane *plane); /* forwarded requests under way */
void mux_transport_ended(struct kvfs_plane *plane, struct transport *transport);
void mux_release_directory(struct kvfs_plane *plane, uint64_t inode);
void mux_close(struct kvfs_plane *plane);
/* The session has ended. Hosts get EIO for requests that it has not answered, and new requests are refused. A guest's relay asks the next daemon, and so
 * does the kernel of a mount that is held. */
void mux_end(struct kvfs_plane *plane);

/* ---- listing.c ---- */

#define LISTING_PAGES 64u
struct listing_page;
struct listings {
    pthread_mutex_t lock;
    struct listing_page *pages[LISTING_PAGES]; /* NULL: none, or a thread has it */
    uint64_t clock, since_ns;
    uint32_t inodes; /* that listings made since then */
};
void listings_init(struct listings *listings);
void listings_free(struct listings *listings);
void listings_forget(struct kvfs_plane *plane, const struct transport *transport); /* its handles are gone */
void listing_end(struct kvfs_plane *plane, const struct transport *transport, uint64_t fh, uint64_t directory);
/* The answer to a listing by the names that are here, in memory that free() frees. *size < 0: names are to be brought. */
uint8_t *listing_here(struct kvfs_plane *plane, const struct pending *p, int64_t *size);
/* The answer by names that were brought. *size is -EAGAIN: all of them are gone, and those behind are needed. */
uint8_t *listing_bring(struct kvfs_plane *plane, const struct pending *p, const struct kvfs_listed *names, int64_t *size);
/* Fill in which names a call asks for. */
void listing_ask(struct kvfs_plane *plane, const struct pending *p, struct kvfs_call *call);

/* ---- once.c: requests that are not done again when a kernel sends them to a later daemon ---- */

/* By which a host's kernel would send this request again; 0: a guest's. */
uint64_t once_number(const struct transport *transport, uint64_t unique);
/* Changes of names by this thread are this request's until once_end(). False: a former daemon has done it, and it is answered. */
bool once_begin(struct server *server, const struct fuse_in_header *in);
void once_end(void);
void once_answered(struct kvfs_plane *plane, const struct pending *p);              /* its answer is out, or nobody waits for it */
void once_flush(struct flush *flush, const struct server *server, uint64_t unique); /* the seal is this FLUSH's */

/* ---- notify.c ---- */

struct notification {
    struct notification *next;
    uint64_t inode, cookie;
}; /* inode 0: a flush */
/* Hosts' kernels ask for the inode's attributes again, and drop its pages if its mtime has changed since (AUTO_INVAL_DATA). */
void notify_inode(struct kvfs_plane *plane, uint64_t inode);
struct notifier {
    pthread_mutex_t lock;
    pthread_cond_t more;
    struct notification *first, *last;
    pthread_t thread;
    bool started, epoch, stopping;
};
int notifier_start(struct kvfs_plane *plane);
void notifier_stop(struct kvfs_plane *plane);

/* ---- fuse.c: all of it ---- */

struct fuse {
    struct mux mux;
    struct listings listings;
    struct notifier notifier;
    struct worker_pool slow; /* requests that wait for a device */
    pthread_mutex_t transports_lock;
    struct transport *transports[TRANSPORTS_MAX];
    atomic_uint transport_count;
    atomic_uint guest_count;      /* exports */
    atomic_bool spinning;         /* only one thread of the plane polls at a time */
    bool held;                    /* another process keeps the mount */
    atomic_ullong leave_until_ns; /* 0: the mount is not left */
};
int fuse_create(struct kvfs_plane *plane); /* memory; 0 or -ENOMEM */
int fuse_start(struct kvfs_plane *plane);  /* its threads */
void fuse_stop(struct kvfs_plane *plane);  /* blocks until the threads have ended */
void fuse_free(struct kvfs_plane *plane);

#endif
