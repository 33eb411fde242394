/* Claims: leases that nobody waits for. A look-up sends one frame for what it found, and goes on; the daemon's answer is taken in by a later call. A load
 * gives its keys back, each to its oldest claim, and a claim that waits for no other key is released. Keys that the daemon does not grant are not kept.
 * A daemon that is late hears of no more claims until it has answered. */
#include "client/client.h"

#include "kvfs_checksum.h"

/* Of one client: as many as the daemon grants. */
#define CLAIMS_MAX 4096u
#define CLAIMED_MAX 65536u
/* Frames on their way. */
#define UNANSWERED_MAX 64u
#define BUCKETS (1u << 16)

/* A key of a claim that was not given back, in the bucket of its hash, where older ones come first. */
struct claimed {
    struct claimed *next;
    struct claim *claim; /* NULL: it was given back */
    uint64_t hash;
};
/* One frame's. */
struct claim {
    struct claim *next, *previous;
    struct claims *claims;
    struct connection *connection; /* no reference: it spares another daemon a number, which is none of its own */
    uint64_t lease;                /* 0: it is not known yet */
    uint64_t until_ns;
    uint32_t count, left; /* keys, and those of them that were not given back */
    bool released;        /* `pending` is its release */
    struct wire_pending pending;
    struct claimed keys[];
};
struct claim_list {
    struct claim *first, *last;
    uint32_t count;
};
struct bucket {
    struct claimed *first, *last;
};
struct claims {
    pthread_mutex_t lock;
    struct claim_list unanswered, granted; /* by age */
    uint32_t claimed;                      /* keys in buckets */
    struct bucket buckets[BUCKETS];
};

static void list_add(struct claim_list *list, struct claim *claim) {
    claim->next = NULL;
    claim->previous = list->last;
    *(list->last ? &list->last->next : &list->first) = claim;
    list->last = claim;
    list->count++;
}

static void list_remove(struct claim_list *list, struct claim *claim) {
    *(claim->previous ? &claim->previous->next : &list->first) = claim->next;
    *(claim->next ? &claim->next->previous : &list->last) = claim->previous;
    list->count--;
}

/* ---- keys, with the lock ---- */

static void keys_enter(struct claim *claim) {
    for (uint32_t i = 0; i < claim->count; i++) {
        struct bucket *bucket = &claim->claims->buckets[claim->keys[i].hash % BUCKETS];
        claim->keys[i].next = NULL;
        claim->keys[i].claim = claim;
        *(bucket->last ? &bucket->last->next : &bucket->first) = &claim->keys[i];
        bucket->last = &claim->keys[i];
    }
    claim->left = claim->count;
    claim->claims->claimed += claim->count;
}

static void key_remove(struct claimed *key) {
    struct claim *claim = key->claim;
    struct bucket *bucket = &claim->claims->buckets[key->hash % BUCKETS];
    struct claimed *before = NULL, *at = bucket->first;
    for (; at != key; at = at->next)
        before = at;
    *(before ? &before->next : &bucket->first) = key->next;
    if (bucket->last == key)
        bucket->last = before;
    key->claim = NULL;
    claim->left--;
    claim->claims->claimed--;
}

static void keys_remove(struct claim *claim) {
    for (uint32_t i = 0; claim->left && i < claim->count; i++)
        if (claim->keys[i].claim)
            key_remove(&claim->keys[i]);
}

static void claim_free(struct claim *claim) {
    keys_remove(claim);
    free(claim->pending.reply);
    free(claim);
}

/* ---- the daemon's answers, with the lock ---- */

/* Nobody waits for its keys any more: tell the daemon, if it is the one that granted it. It is in neither list. */
static void claim_release(struct kvfs_client *client, struct connection *connection, struct claim *claim) {
    claim->released = true;
    if (connection == claim->connection && now_ns() < claim->until_ns &&
        wire_send_at_once(connection, WIRE_RELEASE, &claim->lease, sizeof(claim->lease), client->options.timeout_ms, &claim->pending))
        list_add(&claim->claims->unanswered, claim);
    else /* it ends by itself */
        claim_free(claim);
}

/* The answer is the lease's number and a byte for each key. A claim that was not granted, or by an answer that makes no sense, holds no key. */
static void claim_answered(struct claim *claim) {
    const struct wire_pending *pending = &claim->pending;
    bool good = pending->result == 0 && pending->status == 0 && pending->reply_size == sizeof(claim->lease) + claim->count;
    if (good)
        memcpy(&claim->lease, pending->reply, sizeof(claim->lease));
    for (uint32_t i = 0; i < claim->count; i++)
        if (claim->keys[i].claim && !(good && claim->lease && pending->reply[sizeof(claim->lease) + i]))
            key_remove(&claim->keys[i]);
    free(claim->pending.reply);
    claim->pending.reply = NULL;
}

/* Take in what was answered, and forget what is over. The connection may be NULL. */
static void claims_settle(struct kvfs_client *client, struct claims *claims, struct connection *connection) {
    uint64_t now = now_ns();
    struct claim *claim, *next;
    for (claim = claims->unanswered.first; claim; claim = next) {
        next = claim->next;
        if (now >= claim->until_ns)
            keys_remove(claim);
        if (!atomic_load(&claim->pending.done))
            continue;
        list_remove(&claims->unanswered, claim);
        if (claim->released) {
            claim_free(claim);
            continue;
        }
        claim_answered(claim);
        if (claim->left)
            list_add(&claims->granted, claim);
        else if (claim->lease)
            claim_release(client, connection, claim);
        else
            claim_free(claim);
    }
    while ((claim = claims->granted.first) && now >= claim->until_ns) {
        list_remove(&claims->granted, claim);
        claim_free(claim);
    }
}

/* ---- claiming ---- */

/* Without client->lock, which somebody who looks for a daemon holds for a deadline: a claim does not wait. NULL: no memory. */
static struct claims *claims_of(struct kvfs_client *client) {
    struct claims *claims = atomic_load(&client->claims), *none = NULL;
    if (claims || !(claims = calloc(1, sizeof(*claims))))
        return claims;
    pthread_mutex_init(&claims->lock, NULL);
    if (atomic_compare_exchange_strong(&client->claims, &none, claims))
        return claims;
    pthread_mutex_destroy(&claims->lock); /* another thread was first */
    free(claims);
    return none;
}

void claims_free(struct kvfs_client *client) {
    struct claims *claims = atomic_load(&client->claims);
    if (!claims)
        return;
    for (struct claim_list *list = &claims->unanswered; list; list = list == &claims->unanswered ? &claims->granted : NULL)
        for (struct claim *claim = list->first, *next; claim; claim = next) {
            next = claim->next;
            claim_free(claim);
        }
    pthread_mutex_destroy(&claims->lock);
    free(claims);
}

/* A frame that is being made: blocks of this node, or of others. */
struct draft {
    bool foreign;
    uint32_t capacity, item_size;
    struct claim *claim;
    uint8_t *frame;
};

static int draft_begin(struct draft *draft, struct claims *claims, uint32_t keys_left) {
    draft->capacity = (uint32_t)min_u64(keys_left, KVFS_WIRE_ITEMS_MAX);
    draft->claim = calloc(1, sizeof(struct claim) + draft->capacity * sizeof(struct claimed));
    draft->frame = malloc(sizeof(struct wire_lease) + (uint64_t)draft->capacity * draft->item_size);
    if (!draft->claim || !draft->frame)
        return client_fail(-ENOMEM, "no memory for a claim of %u blocks", draft->capacity);
    draft->claim->claims = claims;
    return 0;
}

static void draft_end(struct draft *draft) {
    free(draft->claim);
    free(draft->frame);
    draft->claim = NULL;
    draft->frame = NULL;
}

/* Send it, unless there are too many or the daemon is late. Returns how many blocks were asked for. */
static uint32_t draft_send(struct kvfs_client *client, struct connection *connection, uint32_t milliseconds, struct draft *draft) {
    struct claim *claim = draft->claim;
    if (!claim)
        return 0;
    struct claims *claims = claim->claims;
    struct wire_lease head = {.milliseconds = milliseconds};
    uint32_t count = claim->count, size = (uint32_t)sizeof(head) + count * draft->item_size;
    memcpy(draft->frame, &head, sizeof(head));
    claim->connection = connection;
    claim->until_ns = now_ns() + milliseconds * 1000000ull;
    pthread_mutex_lock(&claims->lock);
    claims_settle(client, claims, connection);
    struct claim *oldest = claims->unanswered.first;
    bool sends = claims->unanswered.count < UNANSWERED_MAX && claims->unanswered.count + claims->granted.count < CLAIMS_MAX &&
                 claims->claimed + count <= CLAIMED_MAX && (!oldest || now_ns() < oldest->pending.deadline_ns);
    sends = sends && wire_send_at_once(connection, draft->foreign ? WIRE_FOREIGN_LEASE : WIRE_LEASE, draft->frame, size, client->options.timeout_ms,
                                       &claim->pending);
    if (sends) {
        keys_enter(claim);
        list_add(&claims->unanswered, claim);
        draft->claim = NULL;
    }
    pthread_mutex_unlock(&claims->lock);
    draft_end(draft);
    return sends ? count : 0;
}

static int keys_check(const struct kvfs_keys *keys) {
    const uint8_t *key = keys->data;
    int r = 0;
    for (uint32_t i = 0; i < keys->count && r == 0; key += keys->sizes[i++])
        r = key_check(keys->kind, key, keys->sizes[i]);
    return r;
}

int kvfs_claim(struct kvfs_client *client, const struct kvfs_keys *keys, uint32_t milliseconds) {
    struct connection *connection;
    struct shards shards = {.at_once = true};
    struct draft drafts[2] = {{.item_size = sizeof(uint64_t)}, {.foreign = true, .item_size = sizeof(struct wire_foreign_block)}};
    const uint8_t *key = keys->data;
    uint32_t asked = 0;
    int r = milliseconds ? keys_check(keys) : client_fail(-EINVAL, "a claim of 0 milliseconds");
    struct claims *claims = r == 0 ? claims_of(client) : NULL;
    if (r == 0 && !claims)
        r = client_fail(-ENOMEM, "no memory for claims");
    if (r == 0)
        r = connection_get_at_once(client, &connection);
    if (r < 0)
        return r == -EAGAIN ? 0 : r;
    for (uint32_t i = 0; i < keys->count && r == 0; key += keys->sizes[i++]) {
        struct kvfs_record record;
        if (key_find(client, connection, &shards, keys->kind, key, keys->sizes[i], &record) < 0)
            continue; /* there is none, or only the daemon could say */
        struct draft *draft = &drafts[(record.flags & KVFS_INODE_FOREIGN) != 0];
        if (!draft->claim && (r = draft_begin(draft, claims, keys->count - i)) < 0)
            break;
        uint32_t at = draft->claim->count++;
        uint8_t *item = draft->frame + sizeof(struct wire_lease) + (uint64_t)at * draft->item_size;
        if (draft->foreign) {
            struct wire_foreign_block block = foreign_block(&record);
            memcpy(item, &block, sizeof(block));
        } else {
            memcpy(item, &record.inode, sizeof(record.inode));
        }
        draft->claim->keys[at].hash = kvfs_checksum(key, keys->sizes[i], 0);
        if (draft->claim->count == draft->capacity)
            asked += draft_send(client, connection, milliseconds, draft);
    }
    for (uint32_t i = 0; i < 2; i++) {
        asked += r == 0 ? draft_send(client, connection, milliseconds, &drafts[i]) : 0;
        draft_end(&drafts[i]);
    }
    connection_put(connection);
    return r < 0 ? r : (int)asked;
}

int kvfs_unclaim(struct kvfs_client *client, const struct kvfs_keys *keys) {
    struct connection *connection = NULL;
    const uint8_t *key = keys->data;
    int r = keys_check(keys), found = 0;
    struct claims *claims = r == 0 ? claims_of(client) : NULL;
    if (r == 0)
        r = claims ? connection_get_at_once(client, &connection) : client_fail(-ENOMEM, "no memory for claims");
    if (r < 0 && r != -EAGAIN)
        return r;
    pthread_mutex_lock(&claims->lock);
    claims_settle(client, claims, connection);
    for (uint32_t i = 0; i < keys->count; key += keys->sizes[i++]) {
        uint64_t hash = kvfs_checksum(key, keys->sizes[i], 0);
        struct claimed *claimed = claims->buckets[hash % BUCKETS].first;
        while (claimed && claimed->hash != hash)
            claimed = claimed->next;
        if (!claimed)
            continue;
        struct claim *claim = claimed->claim;
        key_remove(claimed);
        found++;
        if (!claim->left && claim->lease) {
            list_remove(&claims->granted, claim);
            claim_release(client, connection, claim);
        }
    }
    pthread_mutex_unlock(&claims->lock);
    connection_put(connection);
    return found;
}
