/* Blocks of other nodes as records: found by name in the pod map, and again by the node ids that they have here. */
#include "pod/foreign.h"

#include <stdio.h>

#include "kvfs_checksum.h"
#include "kvfs_plane.h"

/* The id is made of the place and of the life of its segment. So one content is one inode for a kernel, and its page cache is always right. */
static uint64_t place_id(uint64_t secret, uint64_t generation, uint32_t segment, uint32_t page) {
    const uint64_t words[2] = {generation, (uint64_t)segment << 32 | page};
    return (kvfs_checksum(words, sizeof(words), secret) >> 3) | FOREIGN_BITS;
}

uint64_t kvfs_directory_number(uint64_t parent, const char *name, uint32_t name_size, uint64_t secret) {
    uint64_t low, high;
    kvfs_name_key(parent, name, name_size, secret, &low, &high);
    return (high & ((UINT64_C(1) << 61) - 1)) | KVFS_INODE_DERIVED;
}

static int record_make(const struct kvfs_pod_found *found, const struct geometry *geometry, uint64_t low, uint64_t high, struct kvfs_record *out) {
    *out = (struct kvfs_record){.inode = place_id(geometry->secret, found->generation, found->segment, found->page),
                                .version = UINT64_MAX,
                                .size = found->size,
                                .generation = found->generation,
                                .segment = found->segment,
                                .page = found->page,
                                .header_pages = found->header_pages,
                                .extent_count = found->mode & KVFS_POD_EXTENTS ? 1 : 0,
                                .mode = found->mode & 0xffff,
                                .uid = found->uid,
                                .gid = found->gid,
                                .nlink = 1,
                                .kind = found->directory ? KVFS_KIND_DIRECTORY : KVFS_KIND_FILE,
                                .flags = (uint8_t)(KVFS_INODE_FOREIGN | (found->directory ? 0 : KVFS_INODE_SEALED)),
                                .keyed = found->keyed,
                                .key_low = low,
                                .key_high = high};
    return found->directory;
}

void foreign_key(const struct geometry *geometry, uint64_t parent, const char *name, uint32_t name_size, uint64_t *low, uint64_t *high) {
    kvfs_name_key(parent, name, name_size, geometry->secret, low, high);
    *low += !(*low | *high); /* no name has the key zero, as in the block table */
}

int foreign_find(const struct kvfs_pod *pod, const struct geometry *geometry, uint64_t parent, const char *name, uint32_t name_size,
                 struct kvfs_record *out) {
    struct kvfs_pod_found found;
    uint64_t low, high;
    if (!name_size || name_size > KVFS_NAME_MAX)
        return -ENOENT;
    foreign_key(geometry, parent, name, name_size, &low, &high);
    int r = kvfs_pod_find(pod, low, high, &found);
    if (r < 0)
        return r;
    r = record_make(&found, geometry, low, high, out);
    out->parent = parent;
    if (r == 1)
        out->inode = kvfs_directory_number(parent, name, name_size, geometry->secret);
    return r;
}

int foreign_again(const struct kvfs_pod *pod, const struct geometry *geometry, const struct kvfs_record *then, struct kvfs_record *now) {
    struct kvfs_pod_found found;
    int r = kvfs_pod_find(pod, then->key_low, then->key_high, &found);
    if (r < 0 || found.directory)
        return r < 0 ? r : -ENOENT;
    record_make(&found, geometry, then->key_low, then->key_high, now);
    now->parent = then->parent;
    return 0;
}

/* ---- by node id ---- */

#define KNOWN_SETS 16384u
#define KNOWN_WAYS 4u
#define KNOWN_LOCKS 64u

struct known {
    struct kvfs_record record; /* inode 0: none */
    char *name;                /* NULL: none */
    struct foreign_content content;
};
struct foreign_known {
    pthread_mutex_t locks[KNOWN_LOCKS];
    struct known *sets[KNOWN_SETS]; /* KNOWN_WAYS each, made when the first comes */
    uint8_t next[KNOWN_SETS];       /* the way that goes next */
};

struct foreign_known *foreign_known_new(void) {
    struct foreign_known *known = calloc(1, sizeof(*known));
    for (uint32_t i = 0; known && i < KNOWN_LOCKS; i++)
        pthread_mutex_init(&known->locks[i], NULL);
    return known;
}

void foreign_known_free(struct foreign_known *known) {
    if (!known)
        return;
    for (uint32_t i = 0; i < KNOWN_SETS; i++) {
        for (uint32_t way = 0; known->sets[i] && way < KNOWN_WAYS; way++)
            free(known->sets[i][way].name);
        free(known->sets[i]);
    }
    for (uint32_t i = 0; i < KNOWN_LOCKS; i++)
        pthread_mutex_destroy(&known->locks[i]);
    free(known);
}

static struct known *known_find(struct foreign_known *known, uint32_t set, uint64_t inode) {
    for (uint32_t way = 0; known->sets[set] && way < KNOWN_WAYS; way++)
        if (known->sets[set][way].record.inode == inode)
            return &known->sets[set][way];
    return NULL;
}

static bool is_block(const struct kvfs_record *a, const struct kvfs_record *b) {
    return a->generation == b->generation && a->segment == b->segment && a->page == b->page;
}

int foreign_known_add(struct foreign_known *known, const struct kvfs_record *record, const char *name, uint32_t name_size) {
    const uint32_t set = (uint32_t)record->inode % KNOWN_SETS;
    pthread_mutex_t *lock = &known->locks[set % KNOWN_LOCKS];
    int r = 0;
    pthread_mutex_lock(lock);
    struct known *at = known_find(known, set, record->inode);
    if (at && !is_block(&at->record, record))
        r = -ENOENT; /* once in 2^61 pairs */
    if (!at && !known->sets[set])
        known->sets[set] = calloc(KNOWN_WAYS, sizeof(**known->sets));
    if (!at && known->sets[set]) {
        at = &known->sets[set][known->next[set]];
        known->next[set] = (uint8_t)((known->next[set] + 1) % KNOWN_WAYS);
        free(at->name);
        at->name = NULL;
        at->content = (struct foreign_content){0};
    }
    if (r == 0 && at) {
        if (name && !(at->name && at->record.key_low == record->key_low && at->record.key_high == record->key_high)) {
            free(at->name);
            at->name = strndup(name, name_size);
        }
        at->record = *record;
    }
    pthread_mutex_unlock(lock);
    return r == 0 && !at ? -ENOMEM : r;
}

bool foreign_known_get(struct foreign_known *known, uint64_t inode, struct kvfs_record *out, char *name) {
    const uint32_t set = (uint32_t)inode % KNOWN_SETS;
    pthread_mutex_t *lock = &known->locks[set % KNOWN_LOCKS];
    pthread_mutex_lock(lock);
    const struct known *at = known_find(known, set, inode);
    if (at)
        *out = at->record;
    if (at && name)
        snprintf(name, KVFS_NAME_MAX + 1, "%s", at->name ? at->name : "");
    pthread_mutex_unlock(lock);
    return at != NULL;
}

struct foreign_content foreign_known_content(struct foreign_known *known, uint64_t inode) {
    const uint32_t set = (uint32_t)inode % KNOWN_SETS;
    pthread_mutex_t *lock = &known->locks[set % KNOWN_LOCKS];
    pthread_mutex_lock(lock);
    const struct known *at = known_find(known, set, inode);
    struct foreign_content content = at ? at->content : (struct foreign_content){0};
    pthread_mutex_unlock(lock);
    return content;
}

void foreign_known_read(struct foreign_known *known, uint64_t inode, const struct foreign_content *content) {
    const uint32_t set = (uint32_t)inode % KNOWN_SETS;
    pthread_mutex_t *lock = &known->locks[set % KNOWN_LOCKS];
    pthread_mutex_lock(lock);
    struct known *at = known_find(known, set, inode);
    if (at)
        at->content = *content;
    pthread_mutex_unlock(lock);
}
