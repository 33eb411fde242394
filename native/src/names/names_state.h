/* The state of the names in memory: for the files that keep it. */
#ifndef KVFS_NAMES_STATE_H
#define KVFS_NAMES_STATE_H

#include "names/journal.h"
#include "names/names.h"

/* An entry is a member of each segment that has its header or a part of its data. Segments share lists, by the remainder of their number. */
#define MEMBER_LISTS 4096
struct member {
    struct link link;
    struct entry *entry;
    uint32_t segment;
};
struct members {
    uint32_t count;
    struct member all[];
};
enum state { CLEAN, CLEAN_DIRECTORY, DIRTY, COMMITTING, VOLATILE, STATES };
struct entry {
    struct link link; /* of its state */
    struct entry *next;
    uint64_t inode;
    struct kvfs_inode_record *record; /* NULL: gone */
    struct kvfs_inode_record *older;  /* the sealed block that it pushed from its name; NULL: none, or it is sealed by now */
    struct member home;               /* of the header */
    struct members *extents;          /* of the other segments; NULL: there are none. Without a record: memory for those of the next */
    uint8_t state;                    /* enum state */
    bool again;                       /* COMMITTING, and changed since */
    bool is_new;                      /* no commit that may have a record of it has begun */
};
struct name {
    struct link link;    /* of its directory, if it is listed */
    struct link removed; /* all removed names, the oldest first */
    struct name *next;
    uint64_t parent, inode; /* inode 0: removed */
    uint64_t batch;         /* removed in it */
    uint64_t hash;
    uint8_t size;
    bool listed; /* the index may not have it so */
    bool stored; /* the index may have it, for this inode or another */
    char text[];
};
struct directory {
    struct directory *next;
    uint64_t inode;
    struct link names; /* listed ones */
    uint32_t count;
};
static inline struct entry *entry_at(struct link *link) { return (struct entry *)(void *)link; }
struct map {
    void **buckets;
    uint64_t mask, count;
};
/* Evicted names that hosts were not told of: a set of their hashes, with room for as many again. */
struct untold {
    uint64_t *hashes;
    uint64_t mask, count;
    bool all; /* there was no memory for one */
};
struct kvfs_names {
    struct places places; /* first: names_places() */
    pthread_mutex_t lock; /* recursive */
    struct map entries, names, directories;
    struct link states[STATES], removed;
    uint64_t counts[STATES];
    uint64_t clean_max[2]; /* of CLEAN and CLEAN_DIRECTORY */
    uint32_t held;         /* calls for which both stay, whatever their number */
    struct link members[MEMBER_LISTS];
    uint64_t grouped; /* entries with an attribute that names a group */
    uint64_t seed, batch;
    uint64_t last_inode, last_version;
    uint64_t step;         /* from one number to the next */
    struct link in_flight; /* versions */
    uint32_t left;         /* enum kvfs_names_leave */
    struct untold untold;
    uint32_t depth;          /* of steps, one within another */
    struct journal *journal; /* NULL: there is none */
    uint8_t *committing;     /* the buffer of the commit that is under way */
};
static_assert(offsetof(struct kvfs_names, places) == 0, "names_places()");
static inline uint64_t number_hash(uint64_t number) {
    number = (number ^ (number >> 33)) * 0xff51afd7ed558ccdULL;
    return number ^ (number >> 29);
}
static inline struct entry **entry_bucket(const struct kvfs_names *names, uint64_t inode) {
    return (struct entry **)&names->entries.buckets[number_hash(inode) & names->entries.mask];
}
static inline struct entry *entry_find(const struct kvfs_names *names, uint64_t inode) {
    struct entry *entry = *entry_bucket(names, inode);
    while (entry && entry->inode != inode)
        entry = entry->next;
    return entry;
}
static inline bool is_unsealed(const struct kvfs_inode_record *record) {
    return record && record->kind == KVFS_KIND_FILE && !(record->flags & (KVFS_INODE_SEALED | KVFS_INODE_NAMELESS));
}
/* The record of the block that comes back to the entry's name if this process ends now, or NULL. */
static inline const struct kvfs_inode_record *entry_older(const struct entry *entry) {
    const struct kvfs_inode_record *record = entry->record, *older = entry->older;
    bool same = older && record && record->parent == older->parent && record->name_size == older->name_size &&
                memcmp(record_name(record), record_name(older), record->name_size) == 0;
    return same && is_unsealed(record) ? older : NULL;
}
uint64_t name_hash_of(const struct kvfs_names *names, uint64_t parent, const char *name, uint32_t size);
/* The value of the attribute that names a group; NULL if there is none, or it is too long for a name. */
const char *record_group(const struct kvfs_inode_record *record, uint32_t *size);
/* The memory that an entry needs beside its own to be a member where this record lies; the record may be NULL. 0 or -ENOMEM. */
int members_make(const struct kvfs_inode_record *record, struct members **out);
/* The entry is a member where the record lies, and nowhere else. Takes over what members_make() made, or has entry->extents again. */
void members_set(struct kvfs_names *names, struct entry *entry, const struct kvfs_inode_record *record, struct members *made);

#endif
