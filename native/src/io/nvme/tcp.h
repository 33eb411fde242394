/* NVMe over TCP, the host's side: how its parts hold together. Not installed. io/nvme/wire.h has the bytes.
 *
 * io/nvme/link.c: one TCP connection, which is one queue: PDUs, digests, commands by their cid. It never blocks, and knows no controller.
 * io/nvme/admin.c: an association with a controller, step by step, for callers that may wait: threads of hosts, and helpers for labels.
 * io/nvme/host.c: a controller of an array's devices. Its thread keeps the association alive, and makes it again after a loss. io/nvme/queue.c: a
 * ring's own queue to a host: parts of ring.c become commands.
 *
 * All payload goes through calls that copy before they return, so the kernel never holds memory of a command. A command that is given up is
 * forgotten, and data that still comes for it is dropped.
 */
#ifndef KVFS_NVME_TCP_H
#define KVFS_NVME_TCP_H

#include "io/ring.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include "io/nvme/wire.h"

#define NVME_QUEUES_MAX 256 /* I/O queues of a host */
#define NVME_DEPTH_MAX 1024
#define NVME_HEAD_MAX 132 /* ICResp, or a header with its digest; or the bytes sent before a PDU's data */
#define NVME_IOVS 64      /* of one system call */
#define NVME_REASON 256

uint32_t nvme_crc32c(uint32_t crc, const void *data, uint64_t size); /* begin with 0 */

/* ---- io/nvme/link.c ---- */

struct nvme_link;
struct nvme_request;
/* 0, -EIO with completion.status, or -errno of a link that was closed. The request is the link's again when this returns. */
typedef void (*nvme_done)(struct nvme_link *link, struct nvme_request *request, int result);

/* A place in the memory of a command's data. */
struct nvme_cursor {
    const struct iovec *iov;
    uint64_t inside;
};

struct nvme_request {
    struct nvme_command command; /* the caller's, but for cid, flags and sgl */
    struct nvme_cursor data;     /* of `size` bytes; advances as data moves */
    uint32_t size;
    bool write;     /* data goes to the controller */
    bool abandoned; /* reads: data is dropped; all: done was called, or will be as usual */
    nvme_done done;
    void *owner;
    struct nvme_completion completion;
    /* The link's. */
    bool used, queued, sent, answered, corrupt;
    uint32_t moved;   /* bytes of data received, or sent */
    uint32_t granted; /* bytes of the R2T under way that are in no PDU yet */
    uint16_t ttag;
    uint16_t head_size, head_sent;      /* the PDU being sent: its head, */
    uint32_t data_left;                 /* data, */
    uint8_t trailer_size, trailer_sent; /* and digest */
    uint8_t trailer[NVME_DIGEST_SIZE];
    uint8_t head[NVME_HEAD_MAX];
    uint64_t abandoned_ns;
    struct nvme_request *next; /* in the queue to be sent, or free */
};

enum nvme_link_state { NVME_LINK_CLOSED, NVME_LINK_CONNECTING, NVME_LINK_GREETING, NVME_LINK_READY };
struct nvme_link {
    int fd; /* -1 */
    enum nvme_link_state state;
    bool header_digest, data_digest; /* wanted; once ready: used */
    uint32_t align;                  /* of the data in PDUs that are sent */
    uint32_t maxh2cdata;
    uint32_t in_capsule_size; /* data that a command may carry; the caller knows it from Identify */
    uint32_t depth, in_flight, abandoned;
    struct nvme_request *requests;
    struct nvme_request *free;
    struct nvme_request *first, *last; /* to be sent */
    uint8_t hello[sizeof(struct nvme_icreq)];
    uint32_t hello_left;
    /* The PDU being received. */
    uint8_t head[NVME_HEAD_MAX];
    uint32_t head_have, head_need;
    bool in_data, last_data, success;
    struct nvme_request *into;
    uint32_t pad_left, data_left, trailer_left, crc;
    uint8_t trailer[NVME_DIGEST_SIZE];
    uint64_t received;        /* bytes so far: whether anything moves */
    char reason[NVME_REASON]; /* why it was closed */
};
int nvme_link_init(struct nvme_link *link, uint32_t depth);
void nvme_link_free(struct nvme_link *link); /* closes; requests are forgotten */
/* Begins to connect; digests as wanted. 0 or -errno. */
int nvme_link_connect(struct nvme_link *link, const struct sockaddr_storage *address, bool header_digest, bool data_digest);
/* NULL: the maximum is under way. */
struct nvme_request *nvme_request_get(struct nvme_link *link);
void nvme_request_put(struct nvme_link *link, struct nvme_request *request);  /* a request that was never sent */
void nvme_request_send(struct nvme_link *link, struct nvme_request *request); /* nothing goes out before nvme_link_send */
/* True: the command's memory is free, and done is not called. False: done is called as usual, or when the link is closed. */
bool nvme_request_abandon(struct nvme_link *link, struct nvme_request *request, uint64_t now);
/* Send and receive without waiting. -errno: the link is unusable, `reason` says why, and the caller closes it. */
int nvme_link_send(struct nvme_link *link);
int nvme_link_receive(struct nvme_link *link);
bool nvme_link_sending(const struct nvme_link *link); /* wants to know when it can send */
void nvme_link_shutdown(struct nvme_link *link);      /* wakes its poller */
/* Every request under way ends with `error`. */
void nvme_link_close(struct nvme_link *link, int error);
int nvme_link_fail(struct nvme_link *link, int error, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* The -errno for a completion's status. */
int nvme_status_error(uint16_t status);

/* ---- io/nvme/admin.c ---- */

struct nvme_admin {
    struct nvme_link link;
    const struct kvfs_nvme_target *target;
    struct sockaddr_storage address;
    int wake_fd; /* readable: give up (-ECANCELED); -1 */
    uint16_t cntlid;
    uint32_t entries_max;   /* of an I/O queue */
    uint32_t queue_count;   /* I/O queues granted */
    uint32_t transfer_size; /* of one command, at most */
    uint32_t in_capsule_size;
    uint32_t oaes;
    bool write_cache, reservations, shut;
    char model[41], serial[21];
    char reason[NVME_REASON];
};
struct nvme_identity {
    uint64_t size; /* bytes */
    uint32_t block_shift;
    uint8_t nguid[16], eui64[8], uuid[16];
};
int nvme_admin_fail(struct nvme_admin *admin, int error, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* All of these block, until deadline_ns at most; -errno and a message in `reason`. kato_ms 0: no keep alive. */
int nvme_admin_open(struct nvme_admin *admin, const struct kvfs_nvme_target *target, uint32_t kato_ms, uint64_t deadline_ns);
void nvme_admin_close(struct nvme_admin *admin, bool orderly);
int nvme_admin_identity(struct nvme_admin *admin, uint32_t nsid, struct nvme_identity *out, uint64_t deadline_ns);
int nvme_admin_queue(struct nvme_admin *admin, struct nvme_link *link, uint16_t qid, uint64_t deadline_ns);
/* One command on any link of the association, with flat data. Returns 0 and the completion, or -errno. */
int nvme_execute(struct nvme_admin *admin, struct nvme_link *link, const struct nvme_command *command, void *data, uint32_t size, bool write,
                 struct nvme_completion *completion, uint64_t deadline_ns);
int nvme_block_io(struct nvme_admin *admin, struct nvme_link *link, uint32_t nsid, const struct nvme_identity *identity, bool write, uint64_t offset,
                  void *data, uint32_t size, uint64_t deadline_ns);
void nvme_connect_fill(const struct kvfs_nvme_target *target, uint16_t cntlid, uint16_t qid, uint32_t entries, uint32_t kato_ms,
                       struct nvme_command *command, struct nvme_connect_data *data);

/* ---- io/nvme/host.c ---- */

/* A namespace that is a device of an array. */
struct nvme_remote {
    struct nvme_host *host;
    uint32_t device;
    uint32_t nsid;
    struct nvme_identity identity;
    bool known;       /* identity and label were taken at the first connection */
    atomic_bool anew; /* ... and must be taken again, as the label was written meanwhile */
    atomic_bool usable;
    char reason[NVME_REASON];        /* why it was last unusable */
    char message[NVME_REASON + 160]; /* the last message worth a line in a log */
    struct kvfs_label label;
    struct nvme_remote *next; /* of the host */
};
enum nvme_host_state { NVME_HOST_STARTING, NVME_HOST_UP, NVME_HOST_DOWN };
struct nvme_host {
    struct nvme_host *next;
    struct kvfs_array *array;
    struct kvfs_nvme_target target;
    _Atomic(struct nvme_remote *) remotes; /* grows in front */
    uint32_t index;
    pthread_t thread;
    bool started;
    int wake_fd;
    atomic_bool stopping, poll_now; /* poll_now: look at the namespaces that are not usable */
    /* Rings read these; they change under the lock. */
    atomic_uint state, generation;
    atomic_uint lost;    /* the generation that a ring has found dead */
    atomic_uint wanting; /* rings that have I/O and no queue, as the controller has no more */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct sockaddr_storage address;
    uint16_t cntlid;
    uint32_t entries, queue_count, transfer_size, in_capsule_size;
    struct nvme_link *links[NVME_QUEUES_MAX + 1]; /* by qid: to shut down when the association ends */
    struct {
        uint16_t qid, cid;
    } aborts[64];
    uint32_t abort_count;
    char reason[NVME_REASON];
};
/* Make and start hosts and remotes for the device descriptors that are NVMe/TCP targets. With `wait`, returns when each is up or has failed. */
int nvme_hosts_start(struct kvfs_array *array, const int *device_fds, bool wait, char *error, size_t error_size);
/* For a device whose descriptor was opened again. Blocks until the device is usable, no longer than a connection may take. -errno; error says why. */
int nvme_device_use(struct kvfs_array *array, uint32_t device, char *error, size_t error_size);
void nvme_hosts_stop(struct kvfs_array *array);
/* A qid for a link of this generation; 0: none is left. The link is shut down with the association. */
uint16_t nvme_host_join(struct nvme_host *host, struct nvme_link *link, uint32_t generation);
bool nvme_host_room(struct nvme_host *host); /* a qid is left */
void nvme_host_leave(struct nvme_host *host, uint16_t qid, struct nvme_link *link);
void nvme_host_lost(struct nvme_host *host, uint32_t generation, const char *reason);
void nvme_host_abort(struct nvme_host *host, uint16_t qid, uint16_t cid);
/* The target that a device descriptor stands for; false if it is another kind of device. */
bool nvme_target_of(int fd, struct kvfs_nvme_target *out);
int nvme_device_message(struct kvfs_array *array, uint32_t device, char *out, uint32_t capacity); /* as kvfs_device_message */

#endif
