/* An NVMe/TCP target to test against: subsystems whose namespaces are files or block devices, with faults on demand.
 *
 * One thread a connection, blocked in recv(): at depth 1 nothing wakes faster, and what is slow on one connection is slow on no other. The
 * namespaces are mapped: data goes from the map to the socket and from the socket into the map, through no buffer in between. main.c listens;
 * connection.c receives; request.c takes a command through its life; answer.c sends. admin.c, io.c, reserve.c and controller.c do the commands' work.
 * faults.c decides which faults occur, and control.c receives them.
 */
#ifndef KVFS_ENCLOSURE_H
#define KVFS_ENCLOSURE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "io/nvme/wire.h"

#define NAMESPACES_MAX 64
#define SUBSYSTEMS_MAX 256
#define QUEUE_ENTRIES_MAX 1024
#define ADMIN_EVENTS_MAX 4 /* Async Event Requests at once */
#define ABORTS_MAX 4
#define SETUP_TIMEOUT_MS 10000 /* from accept() to Connect */
#define FOREVER_NS INT64_MAX

struct subsystem;

/* A host that has registered for a namespace's reservation. */
#define REGISTRANTS_MAX 16
struct registrant {
    bool used;
    uint8_t hostid[16];
    uint64_t key;
};

struct backing {
    char *path;
    int fd;
    uint8_t *map;
    uint64_t size;
    bool block_device;
    uint32_t nsid;
    struct subsystem *subsystem;
    uint8_t nguid[16];
    _Atomic bool attached;
    _Atomic uint64_t reads, writes, read_bytes, written_bytes;
    struct registrant registrants[REGISTRANTS_MAX];
    struct registrant *holder; /* of the reservation; both under reserve.c's lock */
    _Atomic bool reserved;     /* there is a holder */
};

struct subsystem {
    char nqn[NVME_NQN_SIZE];
    bool discovery;
    uint32_t namespace_count;
    struct backing namespaces[NAMESPACES_MAX];
};

struct options {
    char host[64];
    uint16_t port;
    uint32_t block_size, queue_count, entries;
    uint32_t in_capsule_size, max_h2c_size, r2t_size, c2h_size, mdts;
    uint32_t digests; /* enum nvme_digests: granted if wanted */
    uint32_t cpda;
    bool success; /* the last data of a read is its answer, where the host allows it */
    bool verbose;
    uint64_t seed;
};

struct controller {
    struct controller *next;
    struct subsystem *subsystem;
    uint16_t cntlid;
    uint8_t hostid[16];
    char hostnqn[NVME_NQN_SIZE];
    uint32_t cc, csts, kato_ms, queues_granted, async_events, write_cache;
    uint32_t events_due;    /* bits: 1 namespaces changed */
    uint32_t events_masked; /* told, and the log not read since */
    uint64_t changed;       /* namespaces: bit nsid - 1 */
    struct connection *admin;
};

/* ---- faults ---- */

enum fault_kind {
    FAULT_NONE,
    FAULT_DELAY,
    FAULT_DROP,
    FAULT_RESET,
    FAULT_DIGEST,
    FAULT_STATUS,
    FAULT_FLIP,
    FAULT_HALF,
    FAULT_SILENCE,
    FAULT_SLOW,
    FAULT_PROTOCOL
};
/* The values of `what=`; 0 is each kind's default. */
enum fault_what {
    WHAT_DEFAULT,
    WHAT_COMMAND,
    WHAT_ANSWER,
    WHAT_HEADER,
    WHAT_DATA,
    WHAT_TYPE,
    WHAT_HLEN,
    WHAT_PLEN,
    WHAT_PDO,
    WHAT_CID,
    WHAT_OFFSET,
    WHAT_SIZE,
    WHAT_SHORT,
    WHAT_TWICE,
    WHAT_R2T,
    WHAT_TERM,
    WHAT_FLAGS,
    WHAT_ICRESP,
    WHAT_C2H,
    WHAT_PFV,
    WHAT_CPDA,
    WHAT_MAXH2CDATA,
    WHAT_DIGESTS,
    WHAT_CLOSE,
    WHAT_HANG,
    WHAT_MEDIA,
    WHAT_WIRE
};
/* Commands by what they are for. */
enum command_class {
    CLASS_ICREQ = 1,
    CLASS_CONNECT = 2,
    CLASS_PROPERTY = 4,
    CLASS_IDENTIFY = 8,
    CLASS_FEATURES = 16,
    CLASS_LOG = 32,
    CLASS_KEEP_ALIVE = 64,
    CLASS_ABORT = 128,
    CLASS_READ = 256,
    CLASS_WRITE = 512,
    CLASS_FLUSH = 1024,
    CLASS_DATASET = 2048,
    CLASS_ZEROES = 4096,
    CLASS_OTHER = 8192,
    CLASS_IO = CLASS_READ | CLASS_WRITE | CLASS_FLUSH | CLASS_DATASET | CLASS_ZEROES,
    CLASS_ANY = 16383
};
/* A fault that hit a command. */
struct fault_hit {
    enum fault_kind kind;
    enum fault_what what;
    uint16_t status;
    int64_t delay_ns;
    int64_t at; /* HALF: bytes sent, -1: half; FLIP: bit, -1: a random one */
    uint64_t random;
};

/* ---- a connection ---- */

enum request_stage { STAGE_FREE, STAGE_START, STAGE_TRANSFER, STAGE_RUN, STAGE_ANSWER, STAGE_SENDING };

struct request {
    struct nvme_command command;
    enum request_stage stage;
    bool held;    /* waits for due_ns, or for an abort, or an event */
    bool event;   /* an Async Event Request */
    bool hang_up; /* the connection ends with its answer */
    uint16_t status;
    uint32_t dw0, dw1;
    struct backing *backing;
    uint64_t offset; /* in the namespace */
    uint32_t size;   /* of the data */
    bool to_host;
    uint32_t received, asked; /* of a write: arrived, and in R2Ts */
    uint8_t *data;            /* in the map or in `own` */
    uint8_t *own;             /* freed with the request */
    uint32_t inline_size;
    bool copy; /* own + copy_at goes to data before it runs */
    uint32_t copy_at;
    int64_t due_ns;
    struct fault_hit fault;
};

/* A PDU to be sent. */
struct out {
    uint8_t head[192];
    uint32_t head_size;
    const uint8_t *data;
    uint32_t size;
    uint8_t tail[NVME_DIGEST_SIZE];
    uint32_t tail_size;
    struct request *last; /* it ends with this PDU */
    bool hang_up;         /* after this PDU: orderly, or by WHAT_HANG silence */
    bool hang;
    uint8_t *own; /* freed when sent */
};

struct connection {
    struct connection *next;
    int fd;
    int wake_fd; /* eventfd: look at `held`, events, aborts */
    pthread_t thread;
    char peer[80];
    struct subsystem *subsystem;
    struct controller *controller;
    uint8_t hostid[16];
    uint16_t qid;
    uint32_t entries, free_count, transfer_count;
    uint16_t sqhd;
    bool greeted, connected, no_flow;
    bool header_digest, data_digest;
    uint32_t hpda;
    bool ended;   /* nothing more is received */
    bool hung;    /* silent until the peer goes */
    bool reset;   /* ends with a RST */
    bool closing; /* nothing more is looked at; ends when all is sent */
    int64_t accepted_ns, alive_ns;
    char why[200]; /* it ended */

    _Atomic uint32_t held_count;
    _Atomic uint32_t abort_state; /* 1 asked, 2 done, 3 not found; abort_cid is the asker's until then */
    uint16_t abort_cid;

    struct request *requests; /* `entries` */
    uint32_t *free_requests;

    uint8_t *buffer; /* received, not looked at: [start, end) */
    size_t start, end;
    struct {
        struct request *request; /* whose data comes now; NULL: a header */
        uint8_t *target;
        uint32_t size, left;
        bool digest_left, in_capsule;
    } payload;

    struct out *outs; /* ring of out_space, a power of two */
    uint32_t out_space, out_first, out_count;
    uint64_t out_sent; /* bytes of the first */
};

struct enclosure {
    struct options options;
    uint32_t subsystem_count;
    struct subsystem *subsystems[SUBSYSTEMS_MAX]; /* the last is the discovery subsystem */
    pthread_mutex_t lock;                         /* of what follows, and of every controller */
    pthread_cond_t changed;                       /* a connection went, an abort was answered */
    struct connection *connections;
    uint32_t connection_count;
    struct controller *controllers;
    uint16_t last_cntlid;
    uint64_t generation; /* of the discovery log */
    int listen_fd;
    bool stopping;
};
extern struct enclosure enclosure;

#define BUFFER_SIZE (64u << 10)

int64_t now_ns(void);
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* main.c */
int listen_now(void); /* 0 or -errno */
void listen_end(void);
void enclosure_quit(void);

/* connection.c */
void connection_start(int fd, const char *peer);
/* End it with a C2HTermReq that names the header at fault. */
void connection_fatal(struct connection *connection, enum nvme_fatal_error fes, uint32_t fei, const void *head, const char *why);
void connection_wake(struct connection *connection);
void connection_payload(struct connection *connection, struct request *request, uint8_t *target, uint32_t size, bool in_capsule);

/* request.c: the connection's own thread only. */
void request_command(struct connection *connection, const struct nvme_command *command, uint32_t inline_size);
void request_data(struct connection *connection, const struct nvme_data *pdu);
void request_payload_done(struct connection *connection, bool digest_ok);
void request_due(struct connection *connection);
int64_t request_next_due(const struct connection *connection);
void request_end(struct connection *connection, struct request *request);
void request_event(struct connection *connection, struct request *request);

/* answer.c */
void answer_icresp(struct connection *connection, const struct nvme_icreq *request);
void answer(struct connection *connection, struct request *request);
void answer_r2t(struct connection *connection, struct request *request, uint32_t size);
void answer_term(struct connection *connection, enum nvme_fatal_error fes, uint32_t fei, const void *head);
/* 0: all sent; -EAGAIN; another -errno. */
int answer_flush(struct connection *connection);

/* A command's needs before it runs: `size`, `to_host`, `data`; and its run. Both answer a status. */
uint16_t admin_prepare(struct connection *connection, struct request *request);
uint16_t admin_run(struct connection *connection, struct request *request);
uint16_t fabrics_prepare(struct connection *connection, struct request *request);
uint16_t fabrics_run(struct connection *connection, struct request *request);
uint16_t io_prepare(struct connection *connection, struct request *request);
uint16_t io_run(struct connection *connection, struct request *request);
enum command_class command_class(const struct connection *connection, const struct nvme_command *command);

/* reserve.c */
bool reserve_allows(const struct connection *connection, struct backing *backing); /* a write */
uint16_t reserve_run(struct connection *connection, struct request *request);
void reserve_count(struct backing *backing, uint32_t *registered, bool *held);

/* controller.c */
void controller_leave(struct connection *connection);
/* The events of a controller that its admin queue may send now; holds enclosure.lock. */
void controller_namespace_changed(struct subsystem *subsystem, uint32_t nsid);
bool controller_take_event(struct controller *controller, uint32_t *dw0);

/* faults.c */
bool fault_hits(const struct connection *connection, uint32_t nsid, enum command_class class, uint32_t size, struct fault_hit *hit);
bool fault_silent(const struct connection *connection);
/* One line of the control socket about faults; `answer` gets JSON. */
bool fault_control(char *line, char *answer, size_t answer_size);

/* control.c */
int control_start(const char *path);

#endif
