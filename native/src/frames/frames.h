/* Connections of native clients, as their thread sees them. Not installed. Only the thread touches a connection or a user; a lock guards what it and
 * Python give each other. */
#ifndef KVFS_CONNECTIONS_H
#define KVFS_CONNECTIONS_H

#include "content/content.h"
#include "kvfs_clients.h"
#include "kvfs_wire.h"

#define CONNECTION_BUCKETS 1024u
#define MEMORY_OF_CONNECTION (UINT64_C(16) << 20)
#define REQUEST_SIZE (UINT64_C(16) << 10) /* memory of a request that is answered, beside its bytes */
#define RECEIVE_SIZE (UINT64_C(8) << 10)
/* Of a connection as long as it lasts: what is received ahead of the frame that comes first, and its own structures. */
#define CONNECTION_SIZE (2 * RECEIVE_SIZE)

/* A frame that is being answered. */
struct frame {
    struct kvfs_client_frame told; /* first */
    struct frame *next;
    struct kvfs_plane *plane;
    struct connection *connection; /* NULL: Python has it */
    uint64_t cost;                 /* counted bytes */
    uint64_t settles_until_ns;
    uint32_t id;
    bool hears; /* it has no answer */
    bool dropped;
    bool failed;     /* there was no memory for its answer */
    uint8_t *answer; /* Python's */
    uint64_t answer_size;
    int32_t status;
    int fd;
    _Alignas(8) uint8_t payload[];
};

/* An answer on its way. */
struct output {
    struct output *next;
    uint8_t *data;
    uint64_t size, sent, cost; /* sent: with the head */
    struct wire_frame head;
    int fd; /* of a file that goes along; -1 */
};

/* Directories of keys in one namespace. */
struct space {
    uint64_t base, moves;
    uint32_t size;
    char path[KVFS_WIRE_SPACE_MAX];
    struct kvfs_shard shards[KVFS_SHARDS];
};

struct client_user {
    struct link connections, starved, ready; /* of its connections */
    struct link turn;                        /* among users with work */
    struct frames settling;                  /* commits that wait for other runs */
    struct link settles;                     /* among users that have had such */
    struct client_user *next;                /* of all */
    struct user *user;
    uint64_t kept; /* bytes of connections, requests and answers */
    uint32_t uid, refs;
    bool looks; /* at `settling`, in its turn */
};

struct connection {
    struct link of_user, work; /* work: among its user's ready or starved ones */
    struct connection *next;   /* of its bucket; then of those that have ended */
    struct client_user *user;
    struct holder *holder;
    uint64_t number, kept;
    int fd;
    uint32_t version, handed_hears;
    uint32_t uid;
    bool writable, in_poll, readable, sendable, armed, ended, closing, starved, own_starved, paused;
    /* armed: the poll tells when more can be sent. */
    /* The frame whose bytes come first. */
    uint8_t *data;
    uint64_t have, capacity, until_ns; /* until_ns: of the frame that has begun; UINT64_MAX: none has */
    struct wire_frame head;
    uint64_t cost;
    bool headed, counted;
    struct frame *running; /* in parts; frames behind it wait */
    struct output *first, *last;
    uint64_t unread_ns; /* since when the peer has been waited for to read; 0: it is not */
    uint64_t starved_ns, closes_ns;
    struct space *spaces[KVFS_CLIENT_SPACES];
    uint32_t next_space;
    struct frame *end; /* KVFS_CLIENT_ENDED: there is memory for it */
};

/* What Python tells the thread. */
enum command_what { COMMAND_SERVE, COMMAND_END, COMMAND_CLOSE, COMMAND_REMEMBER };
struct command {
    struct command *next;
    enum command_what what;
    uint64_t client;
    struct connection *connection;
    struct space space;
};

struct clients {
    struct kvfs_plane *plane;
    struct kvfs_clients_config config;
    pthread_t thread;
    int poll, wake; /* wake: an eventfd of the thread's */
    int told;       /* an eventfd of Python's */
    struct connection *buckets[CONNECTION_BUCKETS];
    struct connection *dead; /* freed when nobody looks at them */
    struct client_user *users;
    struct link turns;
    struct link settling;  /* users with commits that wait */
    uint64_t settle_ns;    /* the next look at these */
    bool runs_ended;       /* since the last one */
    uint64_t sweep_ns;     /* the next look at deadlines; UINT64_MAX: there are none */
    uint64_t account_ns;   /* Python takes accounts then; UINT64_MAX: nothing has changed */
    uint64_t accounted_ns; /* when it was told last */
    uint64_t gains;        /* of reservations, when it was told last */
    uint64_t *aligned;     /* inodes of a frame */
    bool started, changed; /* changed: accounts */
    atomic_bool stopping;
    atomic_ullong frames, handed_count, connected;
    pthread_mutex_t lock;
    struct command *commands, *commands_last;
    struct link handing;    /* users with frames for Python */
    struct frames answered; /* by Python */
    bool woken, told_python;
    uint64_t last_number;
};

/* ---- frame.c ---- */

/* The largest payload of this type; UINT32_MAX: it is none that a client sends. item_size: what an item of its answer counts as. */
uint32_t frame_size_max(uint32_t type, uint32_t *item_size);
bool frame_hears(uint32_t type); /* it has no answer */
void frames_add(struct frames *frames, struct frame *frame);
struct frame *frames_take(struct frames *frames);
/* Those of a connection are freed. */
void frames_forget(struct frames *frames, const struct connection *connection);
void frame_finish(struct frame *frame); /* all that is under way for it ends */
void frame_free(struct frame *frame);
/* To Python: a connection's in their order, with its end behind them. */
void frame_hand(struct clients *clients, struct frame *frame, const struct connection *connection);
/* With the lock: the next that was handed on, of each user in turn. NULL: there is none. */
struct frame *frame_handed(struct clients *clients);

/* ---- connection.c: bytes and their bounds ---- */

struct connection *connection_new(const struct kvfs_client *client);
void connection_enter(struct clients *clients, struct connection *connection);
void connection_free(struct connection *connection);
struct connection *connection_find(const struct clients *clients, uint64_t number);
/* It has work for a turn. */
void user_ready(struct clients *clients, struct client_user *user);
/* Work of it may be done. */
void connection_ready(struct clients *clients, struct connection *connection);
/* breach: the rule that it broke, for the log; NULL: none. */
void connection_end(struct clients *clients, struct connection *connection, const char *breach);
/* Take in what is there. Returns whether something was. */
bool connection_receive(struct clients *clients, struct connection *connection);
/* Whether a frame is there and counted. Its head is looked at as soon as that is there. */
bool connection_frame(struct clients *clients, struct connection *connection);
/* The frame's bytes have been used. */
void connection_used(struct connection *connection);
/* Count so many bytes, whatever room there is; count them no more. */
void connection_keep(struct connection *connection, uint64_t size);
void connection_give(struct clients *clients, struct connection *connection, uint64_t size);
/* The answer to a frame, counted in its place. Takes over `data`, which malloc() made. */
void connection_answer(struct clients *clients, struct connection *connection, const struct frame *frame, int32_t status, uint8_t *data,
                       uint64_t size, int fd);
void connection_flush(struct clients *clients, struct connection *connection);
void connection_close(struct clients *clients, struct connection *connection); /* with a CLOSE */
/* Deadlines. Sets clients->sweep_ns. */
void connections_sweep(struct clients *clients, uint64_t now);

/* ---- answer.c: what the thread answers by itself ---- */

/* Uses that are told: nothing of such a frame stays. False: it is another, or the connection has ended. */
bool frame_use(struct clients *clients, struct connection *connection);
/* A whole frame: it is answered, handed on, or connection->running. */
void frame_begin(struct clients *clients, struct connection *connection, struct frame *frame);
/* A part of connection->running. */
void frame_run(struct clients *clients, struct connection *connection);
/* A part of a user's turn: COMMITs whose runs are settled are answered, and those that have waited for long go to Python. One at least, others until
 * then. */
void frames_settle(struct clients *clients, struct client_user *user, uint64_t until);
/* Users whose commits are to be looked at have a turn. */
void frames_settle_soon(struct clients *clients, uint64_t now);
void connection_remember(struct connection *connection, const struct space *space);

/* ---- clients.c: the thread, and what Python calls ---- */

void clients_turn(struct clients *clients); /* of one user, who has work */
/* Python is told to take accounts of what was reserved and committed: soon if something has come that somebody waits for, else now and then. */
void clients_account(struct clients *clients, uint64_t now);
void clients_stop(struct kvfs_plane *plane);
/* Connections, frames so far, and those of them that Python was left. */
struct clients_count {
    uint64_t connections, frames, handed;
};
struct clients_count clients_count(struct kvfs_plane *plane);

#endif
