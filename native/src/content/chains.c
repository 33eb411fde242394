/* Chains of blocks as trees: each node has its parent, its first child, and its siblings. Ghosts are nodes behind those of the slots, and are found by
 * their keys. They lie in a ring, so that the oldest is forgotten for a new one. */
#include "content/chains.h"

#include <assert.h>
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Of one block that goes, so many behind it are marked at most: it is done within a step. */
#define MARKS_MAX 65536u
/* All children are told when their parent goes or comes back, within a step too. */
#define CHILDREN_MAX 65536u

/* Numbers of nodes; 0: none. A parent's first child has in `previous` how many children there are. */
struct link {
    uint32_t parent, first, next, previous;
};

struct ghost {
    uint64_t key;       /* 0: none */
    uint32_t use, next; /* in its bucket, as number of a ghost, from 1 on */
};

struct kvfs_chains {
    uint32_t slots, ghosts, buckets; /* buckets: a power of two */
    uint32_t limit;                  /* of ghosts, now: the ring's size */
    uint32_t hand, end;              /* the ghost of the ring that is overwritten next, from 0 on; there is none from `end` on */
    struct link *links;              /* [0] is unused; then slots, then ghosts */
    struct ghost *memory;            /* by number less one */
    uint32_t *heads;                 /* of buckets */
    _Atomic uint64_t *orphans;
    uint64_t size;
    struct kvfs_chains_statistics counted;
};

/* ---- memory ---- */

static uint64_t round_page(uint64_t size) { return (size + 4095) & ~UINT64_C(4095); }

int kvfs_chains_create(uint32_t slots, uint32_t ghosts, struct kvfs_chains **out) {
    if (!slots || (uint64_t)slots + ghosts >= UINT32_MAX)
        return -EINVAL;
    struct kvfs_chains *chains = calloc(1, sizeof(*chains));
    if (!chains)
        return -ENOMEM;
    chains->slots = slots;
    chains->ghosts = chains->limit = ghosts;
    chains->buckets = 1;
    while (chains->buckets < ghosts && chains->buckets < 1u << 31)
        chains->buckets *= 2;
    uint64_t links = round_page(((uint64_t)slots + ghosts + 1) * sizeof(struct link)), memory = round_page((uint64_t)ghosts * sizeof(struct ghost));
    uint64_t heads = round_page((uint64_t)chains->buckets * sizeof(uint32_t)), orphans = round_page(((uint64_t)slots + 63) / 64 * sizeof(uint64_t));
    chains->size = links + memory + heads + orphans;
    uint8_t *base = mmap(NULL, chains->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        free(chains);
        return -ENOMEM;
    }
    chains->links = (struct link *)base;
    chains->memory = (struct ghost *)(base + links);
    chains->heads = (uint32_t *)(base + links + memory);
    chains->orphans = (_Atomic uint64_t *)(base + links + memory + heads);
    chains->counted.bytes = chains->size;
    *out = chains;
    return 0;
}

void kvfs_chains_destroy(struct kvfs_chains *chains) {
    if (!chains)
        return;
    munmap(chains->links, chains->size);
    free(chains);
}

/* ---- trees ---- */

static uint32_t node_of(const struct kvfs_chains *chains, uint32_t slot) {
    assert(slot < chains->slots);
    return slot + 1;
}

/* Others read it meanwhile (kvfs_chains_parent). */
static void parent_set(struct link *link, uint32_t parent) { __atomic_store_n(&link->parent, parent, __ATOMIC_RELAXED); }

static bool is_slot(const struct kvfs_chains *chains, uint32_t node) { return node <= chains->slots; }

static bool is_first(const struct kvfs_chains *chains, uint32_t node) {
    return chains->links[node].parent && chains->links[chains->links[node].parent].first == node;
}

static void leave_parent(struct kvfs_chains *chains, uint32_t node) {
    struct link *links = chains->links, *link = &links[node];
    if (!link->parent)
        return;
    if (is_first(chains, node)) {
        links[link->parent].first = link->next;
        if (link->next)
            links[link->next].previous = link->previous - 1;
    } else {
        links[links[link->parent].first].previous--;
        links[link->previous].next = link->next;
        if (link->next)
            links[link->next].previous = link->previous;
    }
    parent_set(link, 0);
    link->next = link->previous = 0;
    chains->counted.parents -= is_slot(chains, node);
}

static void join_parent(struct kvfs_chains *chains, uint32_t node, uint32_t parent) {
    struct link *links = chains->links, *link = &links[node];
    uint32_t first = links[parent].first, children = first ? links[first].previous : 0;
    if (children == CHILDREN_MAX)
        return;
    parent_set(link, parent);
    link->previous = children + 1;
    link->next = first;
    if (first)
        links[first].previous = node;
    links[parent].first = node;
    chains->counted.parents += is_slot(chains, node);
}

/* All that hangs on one node hangs on another from now on, which is new. */
static void replace(struct kvfs_chains *chains, uint32_t node, uint32_t by) {
    struct link *links = chains->links;
    bool first = is_first(chains, node);
    links[by].first = links[node].first;
    links[by].next = links[node].next;
    links[by].previous = links[node].previous;
    parent_set(&links[by], links[node].parent);
    parent_set(&links[node], 0);
    links[node].first = links[node].next = links[node].previous = 0;
    if (links[by].parent) {
        if (first)
            links[links[by].parent].first = by;
        else
            links[links[by].previous].next = by;
        if (links[by].next)
            links[links[by].next].previous = by;
        chains->counted.parents += is_slot(chains, by);
        chains->counted.parents -= is_slot(chains, node);
    }
    for (uint32_t child = links[by].first; child; child = links[child].next)
        parent_set(&links[child], by);
}

/* Nothing hangs on the node any more, nor the node on anything. */
static void cut(struct kvfs_chains *chains, uint32_t node) {
    leave_parent(chains, node);
    while (chains->links[node].first)
        leave_parent(chains, chains->links[node].first);
}

/* ---- marks ---- */

static bool mark_set(struct kvfs_chains *chains, uint32_t slot) {
    uint64_t bit = UINT64_C(1) << slot % 64;
    return !(__atomic_fetch_or((uint64_t *)&chains->orphans[slot / 64], bit, __ATOMIC_RELAXED) & bit);
}

void kvfs_chains_used(struct kvfs_chains *chains, uint32_t slot) {
    uint64_t *word = (uint64_t *)&chains->orphans[slot / 64], bit = UINT64_C(1) << slot % 64;
    if (__atomic_load_n(word, __ATOMIC_RELAXED) & bit)
        __atomic_fetch_and(word, ~bit, __ATOMIC_RELAXED);
}

const uint64_t *kvfs_chains_orphans(const struct kvfs_chains *chains) { return (const uint64_t *)chains->orphans; }

/* All behind the node are orphans. Those behind one that is an orphan already were marked with it. A client may have told of a circle: it then goes
 * through the node itself, as every other node has one parent alone. */
static void orphan_all(struct kvfs_chains *chains, uint32_t node) {
    const struct link *links = chains->links;
    uint32_t at = links[node].first;
    for (uint32_t marks = 0; at && at != node && marks < MARKS_MAX; marks++) {
        bool deeper = true;
        if (is_slot(chains, at)) {
            deeper = mark_set(chains, at - 1);
            chains->counted.orphans += deeper;
        }
        if (deeper && links[at].first && links[at].first != node) {
            at = links[at].first;
            continue;
        }
        while (at != node && !links[at].next)
            at = links[at].parent;
        if (at != node)
            at = links[at].next;
    }
}

/* ---- ghosts ---- */

static uint32_t *bucket_of(const struct kvfs_chains *chains, uint64_t key) { return &chains->heads[(key ^ key >> 32) & (chains->buckets - 1)]; }

/* The place that holds the number of the key's ghost, or 0. */
static uint32_t *ghost_find(const struct kvfs_chains *chains, uint64_t key) {
    uint32_t *at = bucket_of(chains, key);
    while (*at && chains->memory[*at - 1].key != key)
        at = &chains->memory[*at - 1].next;
    return at;
}

static void ghost_remove(struct kvfs_chains *chains, uint32_t *at) {
    struct ghost *ghost = &chains->memory[*at - 1];
    *at = ghost->next;
    ghost->next = 0;
    __atomic_store_n(&ghost->key, 0, __ATOMIC_RELAXED);
    chains->counted.ghosts--;
}

static void ghost_forget(struct kvfs_chains *chains, uint32_t number) {
    const struct ghost *ghost = &chains->memory[number - 1];
    if (!ghost->key)
        return;
    cut(chains, chains->slots + number);
    ghost_remove(chains, ghost_find(chains, ghost->key));
    chains->counted.forgotten++;
}

/* A free ghost, which may have been the oldest. */
static uint32_t ghost_make(struct kvfs_chains *chains, uint64_t key, uint32_t use) {
    uint32_t number = ++chains->hand;
    chains->hand %= chains->limit;
    ghost_forget(chains, number);
    if (number > chains->end)
        __atomic_store_n(&chains->end, number, __ATOMIC_RELAXED);
    struct ghost *ghost = &chains->memory[number - 1];
    uint32_t *bucket = bucket_of(chains, key);
    ghost->next = *bucket;
    __atomic_store_n(&ghost->use, use, __ATOMIC_RELAXED);
    __atomic_store_n(&ghost->key, key, __ATOMIC_RELAXED);
    *bucket = number;
    chains->counted.ghosts++;
    return chains->slots + number;
}

void kvfs_chains_limit(struct kvfs_chains *chains, uint32_t ghosts) {
    uint32_t limit = ghosts > chains->ghosts ? chains->ghosts : ghosts < 1 ? 1 : ghosts;
    if (!chains->ghosts)
        return;
    for (uint32_t number = chains->end; number > limit; number--)
        ghost_forget(chains, number);
    if (chains->end > limit)
        __atomic_store_n(&chains->end, limit, __ATOMIC_RELAXED);
    chains->limit = limit;
    chains->hand %= limit;
}

/* ---- changes ---- */

void kvfs_chains_clear(struct kvfs_chains *chains, uint32_t slot) {
    cut(chains, node_of(chains, slot));
    kvfs_chains_used(chains, slot);
}

int kvfs_chains_enter(struct kvfs_chains *chains, uint32_t slot, uint64_t key, uint32_t *use) {
    uint32_t node = node_of(chains, slot);
    assert(key);
    if (!chains->ghosts)
        return 0;
    uint32_t *at = ghost_find(chains, key);
    if (!*at)
        return 0;
    kvfs_chains_clear(chains, slot);
    *use = chains->memory[*at - 1].use;
    replace(chains, chains->slots + *at, node);
    ghost_remove(chains, at);
    chains->counted.returned++;
    return 1;
}

void kvfs_chains_follow(struct kvfs_chains *chains, uint32_t slot, uint32_t parent) {
    uint32_t node = node_of(chains, slot);
    kvfs_chains_used(chains, slot);
    if (parent != UINT32_MAX && chains->links[node].parent == node_of(chains, parent))
        return;
    leave_parent(chains, node);
    if (parent != UINT32_MAX && parent != slot)
        join_parent(chains, node, node_of(chains, parent));
}

void kvfs_chains_move(struct kvfs_chains *chains, uint32_t from, uint32_t to) {
    uint64_t bit = UINT64_C(1) << from % 64;
    bool marked = __atomic_load_n((uint64_t *)&chains->orphans[from / 64], __ATOMIC_RELAXED) & bit;
    if (from == to)
        return;
    cut(chains, node_of(chains, to));
    replace(chains, node_of(chains, from), node_of(chains, to));
    kvfs_chains_used(chains, from);
    kvfs_chains_used(chains, to);
    if (marked)
        mark_set(chains, to);
}

void kvfs_chains_leave(struct kvfs_chains *chains, uint32_t slot, uint64_t key, uint32_t use, int evicted) {
    uint32_t node = node_of(chains, slot);
    orphan_all(chains, node);
    kvfs_chains_used(chains, slot);
    if (!evicted || !chains->ghosts || !key) {
        cut(chains, node);
        return;
    }
    uint32_t *known = ghost_find(chains, key);
    if (*known) { /* a rename brought the name back while the ghost was there */
        cut(chains, chains->slots + *known);
        ghost_remove(chains, known);
    }
    replace(chains, node, ghost_make(chains, key, use));
}

/* ---- looking ---- */

uint32_t kvfs_chains_parent(const struct kvfs_chains *chains, uint32_t slot) {
    uint32_t parent = __atomic_load_n(&chains->links[node_of(chains, slot)].parent, __ATOMIC_RELAXED);
    return parent && is_slot(chains, parent) ? parent - 1 : UINT32_MAX;
}

uint32_t kvfs_chains_ghosts(const struct kvfs_chains *chains, uint32_t *at, uint32_t *uses, uint32_t capacity) {
    uint32_t count = 0;
    uint32_t end = __atomic_load_n(&chains->end, __ATOMIC_RELAXED);
    for (; *at < end && count < capacity; ++*at)
        if (__atomic_load_n(&chains->memory[*at].key, __ATOMIC_RELAXED))
            uses[count++] = __atomic_load_n(&chains->memory[*at].use, __ATOMIC_RELAXED);
    return count;
}

void kvfs_chains_statistics(const struct kvfs_chains *chains, struct kvfs_chains_statistics *out) { *out = chains->counted; }
