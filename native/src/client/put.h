/* A put: one call, its windows, and the blocks of a window. */
#ifndef KVFS_CLIENT_PUT_H
#define KVFS_CLIENT_PUT_H

#include "client/client.h"

struct window;
/* Where in a block's memory its next page lies. */
struct piece_place {
    uint32_t piece;
    uint64_t at;
};
struct put_item {
    struct late_write late_write; /* first: in connection->landed it is one of many */
    struct lane *lane;
    struct put_call *call;
    struct window *window;
    const struct kvfs_buffer *pieces; /* the caller's; or `copied`, which the devices can take */
    struct kvfs_buffer copied;
    uint32_t piece_count, index; /* index: in the call */
    struct piece_place place;    /* of the first page that is not written */
    uint64_t size;
    struct wire_reserved reserved;
    const uint8_t *body; /* runs, record, ancestors: in the reply */
    struct desc *header;
    uint8_t *side; /* extent headers of further runs, then the padded last page */
    uint8_t *bounce;
    uint64_t bounce_size;
    uint32_t groups_left, groups_held;
    int error;
    bool begun;     /* some of it was queued for a device */
    bool late;      /* the daemon was told that some of it may still land */
    bool dismissed; /* its call is over, but a device owes an answer */
};

static_assert(offsetof(struct put_item, late_write) == 0, "connection_free() knows no other part of it");

/* Asked for until `opened`; then its items are written; then, with `committing`, what was written is asked to be entered. */
struct window {
    struct window *next;
    uint32_t first, count;   /* blocks of the call that it answers for */
    struct put_item **items; /* those that have a place; of blocks behind its own too, which it gives back */
    uint32_t item_count, started, in_flight;
    struct wire_pending pending;
    uint64_t requested_ns;
    uint8_t *reply;                 /* to the reservation */
    uint8_t *commit;                /* the request of that name */
    bool opened, committing, alone; /* alone: nothing of this call was reserved when it was asked for */
};

/* One that is to be stored. */
struct put_block {
    const struct kvfs_vector *vector;
    uint64_t size;
    const uint8_t *key;
    uint32_t key_size;
    uint32_t index; /* of its key, and of its result */
};

/* Where a block stands in its chain. */
struct chain {
    uint64_t inode;   /* of the block, once it is known */
    uint64_t parent;  /* of the block before it; 0: there is no such block, or it is unknown */
    bool behind_last; /* its parent is the block before it in the call */
};

struct put_call {
    struct kvfs_client *client;
    struct connection *connection;
    struct lane *lane;
    const struct put_block *blocks;
    struct chain *chain; /* by the index of its key; or NULL */
    int64_t *results;
    uint32_t kind;        /* of its keys */
    uint32_t count, next; /* blocks; those not yet asked for begin with next */
    uint64_t window_bytes;
    struct window *windows; /* oldest first */
    uint32_t window_count, in_flight, stored;
    struct put_item *prepared;
    bool commit_first; /* no window is asked for before all others are committed */
    int error;         /* ends the call: nothing more is asked for or written */
};

/* ---- client/put.c ---- */

/* The same key twice, or one that cannot be: -EINVAL. */
int put_keys_check(const struct kvfs_keys *keys);
/* The caller's options, in this version's struct; NULL: none. -EINVAL. */
int put_options_take(const struct kvfs_put_options *given, const struct kvfs_keys *keys, struct kvfs_put_options *out);

/* ---- client/put_block.c ---- */

/* The inode record that the daemon gave it. */
const uint8_t *item_record(const struct put_item *item);
/* Check what the daemon says of a block, and make what goes to the devices. */
int item_prepare(struct put_item *item);
/* Queue its writes. */
int item_write(struct put_item *item);
/* One of its groups has an outcome, or all have been started. */
void item_advance(struct put_item *item);
/* Its memory, once no device needs it. */
void item_release(struct put_item *item);
/* Its call is over, and no device needs it. */
void item_end(struct put_item *item);

#endif
