/* The open blocks of each user, and how much of them eviction must keep.
 *
 * An open block is charged to one of its users. Eviction may take blocks that are charged to a user beyond that user's share: handles then read EIO.
 * First another user within the share takes the charge over, so that nobody loses a block by another's doing.
 */
#include "content/content.h"

/* Probes for a place that is the user's or free. If there is none, the user shares the last place, and its one share, with all other such users. */
#define PROBES 64u

struct user *user_get(struct kvfs_plane *plane, uint32_t id) {
    uint64_t key = (uint64_t)id + 1;
    uint32_t at = id * 0x9e3779b1u >> 20;
    static_assert(USERS_MAX == 1u << 12, "hash");
    for (uint32_t i = 0; i < PROBES; i++) {
        struct user *user = &plane->users[(at + i) % USERS_MAX];
        unsigned long long known = atomic_load_explicit(&user->key, memory_order_relaxed);
        if (known == key || (!known && (atomic_compare_exchange_strong(&user->key, &known, key) || known == key)))
            return user;
    }
    atomic_store(&plane->users[USERS_MAX].key, (uint64_t)KVFS_USER_OTHERS + 1);
    return &plane->users[USERS_MAX];
}

bool user_is_exempt(struct kvfs_plane *plane, const struct user *user) {
    uint64_t key = atomic_load_explicit(&user->key, memory_order_relaxed);
    return key == 1 || key == (uint64_t)atomic_load(&plane->exempt) + 1;
}

static uint64_t user_holds(const struct user *user) { return atomic_load(&user->other) + atomic_load(&user->reserved) * PAGE; }

uint64_t user_room(struct kvfs_plane *plane, const struct user *user) {
    uint64_t has = user_holds(user), share = atomic_load(&plane->share);
    return user_is_exempt(plane, user) ? UINT64_MAX : share - min_u64(share, has);
}

/* Bytes beyond the share that the user has if `more` bytes are added; 0 if none. */
static uint64_t user_beyond(struct kvfs_plane *plane, const struct user *user, uint64_t more) {
    uint64_t has = atomic_load(&user->open) + user_holds(user) + more, share = atomic_load(&plane->share);
    return has <= share || user_is_exempt(plane, user) ? 0 : has - share;
}

bool hold_add(struct node *node, struct user *user) {
    struct hold *empty = NULL;
    for (struct hold *hold = &node->hold; hold; hold = hold->next) {
        if (hold->user == user) {
            hold->handles++;
            return true;
        }
        if (!hold->user)
            empty = hold;
    }
    if (!empty) {
        empty = calloc(1, sizeof(*empty));
        if (!empty)
            return false;
        empty->next = node->hold.next;
        node->hold.next = empty;
    }
    empty->user = user;
    empty->handles = 1;
    return true;
}

static void charge_move(struct node *node, struct user *to) {
    unsigned long long before = atomic_fetch_sub(&node->payer->open, node->open_size);
    assert(before >= node->open_size);
    atomic_fetch_add(&to->open, node->open_size);
    node->payer = to;
}

void hold_charge(struct kvfs_plane *plane, struct node *node, uint64_t size) {
    assert(node->payer);
    atomic_fetch_add(&plane->open_bytes, size - node->open_size); /* modulo 2^64 where it shrinks */
    atomic_fetch_add(&node->payer->open, size - node->open_size);
    node->open_size = size;
}

void hold_offer(struct kvfs_plane *plane, struct node *node, struct user *user) {
    if (node->payer != user && user_beyond(plane, node->payer, 0) && !user_beyond(plane, user, node->open_size))
        charge_move(node, user);
}

void hold_drop(struct kvfs_plane *plane, struct node *node, struct user *user) {
    struct hold *before = NULL, *hold = &node->hold;
    while (hold && hold->user != user) {
        before = hold;
        hold = hold->next;
    }
    assert(hold);
    assert(hold->handles > 0);
    if (--hold->handles)
        return;
    hold->user = NULL;
    if (before) {
        before->next = hold->next;
        free(hold);
    }
    if (node->payer != user)
        return;
    struct user *next = NULL;
    for (hold = &node->hold; hold; hold = hold->next)
        if (hold->user && (!next || user_beyond(plane, next, node->open_size)))
            next = hold->user;
    if (next) {
        charge_move(node, next);
    } else {
        hold_charge(plane, node, 0);
        node->payer = NULL;
    }
}

bool hold_may_go(struct kvfs_plane *plane, struct node *node) {
    if (!node->payer || !user_beyond(plane, node->payer, 0))
        return false;
    for (struct hold *hold = &node->hold; hold; hold = hold->next)
        if (hold->user && hold->user != node->payer && !user_beyond(plane, hold->user, node->open_size)) {
            charge_move(node, hold->user);
            return false;
        }
    return true;
}

void hold_evict(struct kvfs_plane *plane, struct node *node) {
    hold_charge(plane, node, 0);
    atomic_fetch_add(&node->payer->evicted, 1);
}

bool space_lacks(struct kvfs_plane *plane, uint64_t growth) {
    uint64_t open = atomic_load(&plane->open_bytes), space = atomic_load(&plane->space);
    if (open + growth <= space)
        return false;
    uint64_t may_go = 0; /* open, and yet eviction may take it */
    for (uint32_t i = 0; i <= USERS_MAX; i++)
        if (atomic_load_explicit(&plane->users[i].key, memory_order_relaxed))
            may_go += min_u64(user_beyond(plane, &plane->users[i], 0), atomic_load(&plane->users[i].open));
    return open - min_u64(open, may_go) + growth > space;
}

/* Eviction cannot take files being written from a user beyond the share, so their growth is refused beforehand. */
bool writer_lacks(struct kvfs_plane *plane, const struct user *writer, uint64_t growth) {
    return writer && user_beyond(plane, writer, atomic_load(&writer->writing) + growth) && space_lacks(plane, growth + atomic_load(&plane->share));
}

int space_ask(struct kvfs_plane *plane, const struct user *writer, uint64_t growth) {
    return space_lacks(plane, growth) ? -(int)atomic_load(&plane->space_error) : writer_lacks(plane, writer, growth) ? -EDQUOT : 0;
}

/* ---- names ---- */

void user_names(void *plane, uint32_t id, int change) { atomic_fetch_add_explicit(&user_get(plane, id)->names, change, memory_order_relaxed); }

/* A share goes by what is left, and by its square. With a share of a quarter a user may have a third of what is left, times its part of all. Where
 * nobody else has any that is a fifth of all. So n users who each take what they may leave 4 / (n + 4) of all, however many they are. A ninth of it is for files
 * alone: a user with all the directories that one may have goes on to store in them. */
int names_ask(struct kvfs_plane *plane, const struct user *user, bool lasting) {
    uint64_t part = atomic_load_explicit(&plane->names_share, memory_order_relaxed);
    int64_t has = atomic_load_explicit(&user->names, memory_order_relaxed);
    if (lasting)
        has += has / 8;
    if (part >= KVFS_WHOLE || user_is_exempt(plane, user))
        return 0;
    struct kvfs_table_statistics table;
    kvfs_table_statistics(plane->table, &table);
    uint64_t kept = table.records - min_u64(table.blocks, table.records), left = table.records_max - min_u64(kept, table.records_max);
    unsigned __int128 held = (unsigned __int128)(has > 0 ? has : 0) * (KVFS_WHOLE - part) * table.records_max;
    return held < (unsigned __int128)left * left * part ? 0 : -EDQUOT;
}

/* ---- for the control plane ---- */

void kvfs_set_share(struct kvfs_plane *plane, uint64_t bytes, uint32_t names_part, uint32_t exempt) {
    atomic_store(&plane->exempt, exempt);
    atomic_store(&plane->share, bytes);
    atomic_store(&plane->names_share, names_part);
}

int kvfs_names_ask(struct kvfs_plane *plane, uint32_t id) { return names_ask(plane, user_get(plane, id), true); }

void kvfs_user_hold(struct kvfs_plane *plane, uint32_t id, uint64_t bytes) { atomic_store(&user_get(plane, id)->other, bytes); }
uint64_t kvfs_user_reserved(struct kvfs_plane *plane, uint32_t id) { return atomic_load(&user_get(plane, id)->reserved) * PAGE; }

int kvfs_users(struct kvfs_plane *plane, struct kvfs_user *out, uint32_t capacity) {
    uint32_t count = 0;
    for (uint32_t i = 0; i <= USERS_MAX && count < capacity; i++) {
        struct user *user = &plane->users[i];
        uint64_t key = atomic_load(&user->key);
        if (key)
            out[count++] = (struct kvfs_user){.id = (uint32_t)(key - 1),
                                              .open_bytes = atomic_load(&user->open),
                                              .writing_bytes = atomic_load(&user->writing),
                                              .evicted = atomic_load(&user->evicted),
                                              .names = (uint64_t)atomic_load(&user->names),
                                              .staged_bytes = atomic_load(&user->staged_bytes),
                                              .staging_refusals = atomic_load(&user->staging_refusals)};
    }
    return (int)count;
}

void kvfs_set_space(struct kvfs_plane *plane, uint64_t bytes, int error) {
    atomic_store(&plane->space_error, error);
    atomic_store(&plane->space, bytes);
}
