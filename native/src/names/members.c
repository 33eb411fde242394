/* Which inodes in memory have their header or data in a segment; and the records of many inodes at a time, for summaries. */
#include "names/names_state.h"

#define KEY_SIZE 12u /* of the index's table segment_inodes: u32 segment, u64 inode, big-endian */

static int segment_order(const void *a, const void *b) {
    uint32_t x = ((const struct member *)a)->segment, y = ((const struct member *)b)->segment;
    return x < y ? -1 : x > y;
}

static bool is_sealed(const struct kvfs_inode_record *record) { return record->flags & KVFS_INODE_SEALED; }

int members_make(const struct kvfs_inode_record *record, struct members **out) {
    *out = NULL;
    if (!record || record->kind != KVFS_KIND_FILE || !record->extent_count)
        return 0;
    struct members *made = calloc(1, sizeof(*made) + record->extent_count * sizeof(made->all[0]));
    if (!made)
        return -ENOMEM;
    const struct kvfs_extent *extents = record_extents(record);
    uint32_t count = 0, unique = 0;
    for (uint32_t i = 0; i < record->extent_count; i++)
        if (!is_sealed(record) || extents[i].segment != record->segment)
            made->all[count++].segment = extents[i].segment;
    qsort(made->all, count, sizeof(made->all[0]), segment_order);
    for (uint32_t i = 0; i < count; i++)
        if (!unique || made->all[unique - 1].segment != made->all[i].segment)
            made->all[unique++].segment = made->all[i].segment;
    made->count = unique;
    *out = made;
    return 0;
}

static void member_add(struct kvfs_names *names, struct member *member, struct entry *entry, uint32_t segment) {
    member->entry = entry;
    member->segment = segment;
    link_add(&names->members[segment % MEMBER_LISTS], &member->link);
}

void members_set(struct kvfs_names *names, struct entry *entry, const struct kvfs_inode_record *record, struct members *made) {
    if (entry->home.link.after)
        link_drop(&entry->home.link);
    for (uint32_t i = 0; entry->extents && i < entry->extents->count; i++)
        if (entry->extents->all[i].link.after)
            link_drop(&entry->extents->all[i].link);
    if (entry->extents != made)
        free(entry->extents);
    entry->extents = made;
    if (record && record->kind == KVFS_KIND_FILE && is_sealed(record))
        member_add(names, &entry->home, entry, record->segment);
    for (uint32_t i = 0; made && i < made->count; i++)
        member_add(names, &made->all[i], entry, made->all[i].segment);
}

static int number_order(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static uint64_t key_inode(const uint8_t *key) {
    uint64_t inode;
    memcpy(&inode, key + 4, sizeof(inode));
    return __builtin_bswap64(inode);
}

uint32_t kvfs_names_members(struct kvfs_names *names, uint32_t segment, const void *keys, uint32_t key_count, uint64_t *out, uint32_t capacity) {
    uint32_t count = 0;
    pthread_mutex_lock(&names->lock);
    for (uint32_t i = 0; i < key_count; i++) {
        uint64_t inode = key_inode((const uint8_t *)keys + (uint64_t)i * KEY_SIZE);
        if (!entry_find(names, inode) && count++ < capacity)
            out[count - 1] = inode;
    }
    struct link *list = &names->members[segment % MEMBER_LISTS];
    for (struct link *at = list->after; at != list; at = at->after) {
        const struct member *member = (const struct member *)(void *)at;
        if (member->segment == segment && count++ < capacity)
            out[count - 1] = member->entry->inode;
    }
    pthread_mutex_unlock(&names->lock);
    if (count <= capacity)
        qsort(out, count, sizeof(*out), number_order);
    return count;
}

bool names_has(const struct kvfs_names *names, uint64_t inode) { return entry_find(names, inode) != NULL; }

uint32_t kvfs_names_absent(struct kvfs_names *names, const uint64_t *inodes, uint32_t count, uint64_t *out) {
    uint32_t absent = 0;
    pthread_mutex_lock(&names->lock);
    for (uint32_t i = 0; i < count; i++) {
        struct entry *entry = entry_find(names, inodes[i]);
        if (!entry) {
            out[absent++] = inodes[i];
        } else if (entry->state == CLEAN || entry->state == CLEAN_DIRECTORY) { /* those that are loaded next make older ones leave */
            link_drop(&entry->link);
            link_add(&names->states[entry->state], &entry->link);
        }
    }
    pthread_mutex_unlock(&names->lock);
    return absent;
}

static bool is_wanted(const struct kvfs_inode_record *record, uint32_t segment) {
    if (!record)
        return false;
    return segment == UINT32_MAX || (record->segment == segment && (record->flags & (KVFS_INODE_SEALED | KVFS_INODE_NAMELESS)) == KVFS_INODE_SEALED);
}

void kvfs_names_records(struct kvfs_names *names, uint32_t segment, const uint64_t *inodes, uint32_t count, void *out, uint64_t capacity,
                        uint64_t *absent, uint64_t *parents, struct kvfs_records *found) {
    memset(found, 0, sizeof(*found));
    pthread_mutex_lock(&names->lock);
    for (uint32_t i = 0; i < count; i++) {
        const struct entry *entry = entry_find(names, inodes[i]);
        if (!entry) {
            absent[found->absent_count++] = inodes[i];
            continue;
        }
        const struct kvfs_inode_record *record = entry->record;
        if (!is_wanted(record, segment))
            continue;
        if (found->size + record->record_size <= capacity)
            memcpy((uint8_t *)out + found->size, record, record->record_size);
        found->size += record->record_size;
        found->count++;
        if (!found->parent_count || parents[found->parent_count - 1] != record->parent)
            parents[found->parent_count++] = record->parent;
    }
    pthread_mutex_unlock(&names->lock);
}
