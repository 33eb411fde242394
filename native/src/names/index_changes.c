/* What a commit does to the index's databases: keys and values for LMDB, each list sorted, since neighbours share pages there. Takes no lock: it reads the
 * buffer of kvfs_names_commit_begin() and records of the index. */
#include "names/names_state.h"

/* Of every list: what it holds lies in `bytes` in the order of append(). */
struct item {
    uint64_t at;
    uint32_t key_size, value_size;
};
struct list {
    uint8_t *bytes;
    struct item *items;
    uint64_t size, size_max, count, count_max;
};
struct packing {
    struct list lists[KVFS_INDEX_LISTS];
    bool failed; /* no memory */
};

static void append(struct packing *packing, enum kvfs_index_list which, const void *key, uint64_t key_size, const void *value, uint64_t value_size) {
    struct list *list = &packing->lists[which];
    if (list->count == list->count_max) {
        uint64_t room = list->count_max ? 2 * list->count_max : 64;
        struct item *items = reallocarray(list->items, room, sizeof(*items));
        packing->failed |= !items;
        if (!items)
            return;
        list->items = items;
        list->count_max = room;
    }
    if (list->size + key_size + value_size > list->size_max) {
        uint64_t room = 2 * (list->size + key_size + value_size);
        uint8_t *bytes = realloc(list->bytes, room);
        packing->failed |= !bytes;
        if (!bytes)
            return;
        list->bytes = bytes;
        list->size_max = room;
    }
    copy_bytes(list->bytes + list->size, key, key_size);
    copy_bytes(list->bytes + list->size + key_size, value, value_size);
    list->items[list->count++] = (struct item){list->size, (uint32_t)key_size, (uint32_t)value_size};
    list->size += key_size + value_size;
}

/* ---- the keys of a record ---- */

static void put_big_endian(uint8_t *to, uint64_t number, uint32_t size) {
    for (uint32_t i = 0; i < size; i++)
        to[i] = (uint8_t)(number >> 8 * (size - 1 - i));
}

/* Parent, name. Nothing for the root and the nameless. */
static uint32_t dentry_key(const struct kvfs_inode_record *record, uint8_t key[8 + KVFS_NAME_MAX]) {
    if (!record_is_named(record))
        return 0;
    put_big_endian(key, record->parent, 8);
    copy_bytes(key + 8, record_name(record), record->name_size);
    return 8 + record->name_size;
}

/* Size of the group's name, the name, inode: names of one group lie side by side, whatever bytes those of others are. */
static uint32_t group_key(const struct kvfs_inode_record *record, uint8_t key[1 + KVFS_NAME_MAX + 8]) {
    uint32_t size = 0;
    const char *group = record_group(record, &size);
    if (!group)
        return 0;
    key[0] = (uint8_t)size;
    copy_bytes(key + 1, group, size);
    put_big_endian(key + 1 + size, record->inode, 8);
    return 1 + size + 8;
}

/* The segment of the header comes as number 0, those of the extents behind it. False: there is none of that number. */
static bool member_segment(const struct kvfs_inode_record *record, uint32_t i, uint32_t *segment) {
    bool is_file = record && record->kind == KVFS_KIND_FILE, sealed = is_file && record->flags & KVFS_INODE_SEALED;
    if (!is_file || i >= sealed + record->extent_count)
        return false;
    *segment = sealed && i == 0 ? record->segment : record_extents(record)[i - sealed].segment;
    return true;
}

/* A key for each segment in which the record has a part; some come twice. */
static void append_members(struct packing *packing, enum kvfs_index_list which, const struct kvfs_inode_record *record) {
    uint32_t segment;
    for (uint32_t i = 0; member_segment(record, i, &segment); i++) {
        uint8_t key[12];
        put_big_endian(key, segment, 4);
        put_big_endian(key + 4, record->inode, 8);
        append(packing, which, key, sizeof(key), NULL, 0);
    }
}

/* ---- the index's own records ---- */

/* The record at `at`, of which `left` bytes are there, is whole. */
static bool is_whole(const uint8_t *at, uint64_t left) {
    struct kvfs_inode_record head;
    if (left < sizeof(head))
        return false;
    memcpy(&head, at, sizeof(head));
    uint64_t parts =
        sizeof(head) + round_up(head.name_size, 8) + (uint64_t)head.extent_count * sizeof(struct kvfs_extent) + round_up(head.xattr_size, 8);
    return head.record_size == parts && parts <= left && head.name_size <= KVFS_NAME_MAX;
}

/* Finds records of ascending inodes, whatever the order in which they are asked for. */
struct stored {
    const struct kvfs_inode_record **all;
    uint64_t count;
};

static int stored_read(struct stored *stored, const uint8_t *records, uint64_t size, uint64_t *damaged) {
    uint64_t last = 0, room = size / sizeof(struct kvfs_inode_record) + 1;
    stored->all = malloc(room * sizeof(*stored->all));
    if (!stored->all)
        return -ENOMEM;
    for (uint64_t at = 0; at < size;) {
        const struct kvfs_inode_record *record = (const void *)(records + at);
        if (!is_whole(records + at, size - at) || record->inode <= last) {
            *damaged = size - at >= sizeof(*record) ? record->inode : 0;
            return -EBADMSG;
        }
        stored->all[stored->count++] = record;
        last = record->inode;
        at += record->record_size;
    }
    return 0;
}

static const struct kvfs_inode_record *stored_find(const struct stored *stored, uint64_t inode) {
    uint64_t first = 0, end = stored->count;
    while (first < end) {
        uint64_t middle = (first + end) / 2;
        if (stored->all[middle]->inode < inode)
            first = middle + 1;
        else
            end = middle;
    }
    return first < stored->count && stored->all[first]->inode == inode ? stored->all[first] : NULL;
}

/* ---- a commit ---- */

/* All keys of the old record and of the new one: those that both have are taken out of the first later. */
static void pack_one(struct packing *packing, const struct kvfs_change *change, const struct kvfs_inode_record *old) {
    const struct kvfs_inode_record *now = change->record_size ? (const void *)(change + 1) : NULL;
    for (uint32_t dropped = 0; dropped < 2; dropped++) {
        const struct kvfs_inode_record *record = dropped ? old : now;
        const uint32_t lists = dropped ? KVFS_INDEX_DROP_INODES : KVFS_INDEX_PUT_INODES;
        uint8_t key[1 + KVFS_NAME_MAX + 8];
        if (!record)
            continue;
        put_big_endian(key, record->inode, 8);
        append(packing, lists + KVFS_INDEX_PUT_INODES, key, 8, record, dropped ? 0 : record->record_size);
        uint32_t size = dentry_key(record, key);
        if (size)
            append(packing, lists + KVFS_INDEX_PUT_NAMES, key, size, &record->inode, sizeof(record->inode));
        append_members(packing, lists + KVFS_INDEX_PUT_MEMBERS, record);
        size = group_key(record, key);
        if (size)
            append(packing, lists + KVFS_INDEX_PUT_GROUPS, key, size, NULL, 0);
    }
}

/* As LMDB orders keys. */
static int key_order(const struct list *a, const struct item *x, const struct list *b, const struct item *y) {
    uint32_t size = x->key_size < y->key_size ? x->key_size : y->key_size;
    int order = memcmp(a->bytes + x->at, b->bytes + y->at, size);
    return order ? order : (x->key_size > y->key_size) - (x->key_size < y->key_size);
}

static int item_compare(const void *a, const void *b, void *list) { return key_order(list, a, list, b); }

/* Sort the list, and leave out keys that `other`, sorted, has too, and those that come again. */
static void list_sort(struct list *list, const struct list *other) {
    uint64_t kept = 0, o = 0;
    if (list->count)
        qsort_r(list->items, list->count, sizeof(*list->items), item_compare, list);
    for (uint64_t i = 0; i < list->count; i++) {
        const struct item *item = &list->items[i];
        while (other && o < other->count && key_order(other, &other->items[o], list, item) < 0)
            o++;
        bool there = other && o < other->count && key_order(other, &other->items[o], list, item) == 0;
        bool again = kept && key_order(list, &list->items[kept - 1], list, item) == 0;
        if (!there && !again)
            list->items[kept++] = *item;
    }
    list->count = kept;
}

/* One block of memory: the struct, the bounds of each list, the bytes. */
static struct kvfs_index_changes *sorted(struct packing *packing) {
    uint64_t bounds = 0, size = 0;
    for (uint32_t i = 0; i < KVFS_INDEX_LISTS; i++) {
        list_sort(&packing->lists[i], i < KVFS_INDEX_DROP_INODES ? NULL : &packing->lists[i - KVFS_INDEX_DROP_INODES]);
        bounds += 2 * packing->lists[i].count + 1;
        size += packing->lists[i].size;
    }
    struct kvfs_index_changes *changes = malloc(sizeof(*changes) + bounds * sizeof(uint64_t) + size);
    if (!changes)
        return NULL;
    uint64_t *bound = (uint64_t *)(void *)(changes + 1), at = 0;
    uint8_t *to = (uint8_t *)(bound + bounds);
    *changes = (struct kvfs_index_changes){.bytes = to};
    for (uint32_t i = 0; i < KVFS_INDEX_LISTS; i++) {
        const struct list *list = &packing->lists[i];
        changes->lists[i].bounds = bound;
        changes->lists[i].count = list->count;
        for (uint64_t k = 0; k < list->count; k++) {
            const struct item *item = &list->items[k];
            copy_bytes(to + at, list->bytes + item->at, (uint64_t)item->key_size + item->value_size);
            *bound++ = at;
            *bound++ = at + item->key_size;
            at += (uint64_t)item->key_size + item->value_size;
        }
        *bound++ = at;
    }
    assert(at <= size && (uint8_t *)bound == changes->bytes);
    changes->size = at;
    return changes;
}

static const struct kvfs_change *change_next(const struct kvfs_change *change) {
    return (const void *)((const uint8_t *)(change + 1) + change->record_size);
}

static int key_compare(const void *a, const void *b) { return memcmp(a, b, 8); }

uint64_t kvfs_index_known(const void *changes, uint64_t size, uint8_t *keys) {
    uint64_t count = 0;
    const struct kvfs_change *end = (const void *)((const uint8_t *)changes + size);
    for (const struct kvfs_change *change = changes; change < end; change = change_next(change))
        if (!change->is_new)
            put_big_endian(keys + 8 * count++, change->inode, 8);
    qsort(keys, count, 8, key_compare);
    return count;
}

struct kvfs_index_changes *kvfs_index_changes(const void *changes, uint64_t size, const void *records, uint64_t records_size, int *error,
                                              uint64_t *damaged) {
    struct packing packing = {0};
    struct stored stored = {0};
    struct kvfs_index_changes *made = NULL;
    const struct kvfs_change *end = (const void *)((const uint8_t *)changes + size);
    *error = stored_read(&stored, records, records_size, damaged);
    for (const struct kvfs_change *change = changes; *error == 0 && change < end; change = change_next(change))
        pack_one(&packing, change, change->is_new ? NULL : stored_find(&stored, change->inode));
    if (*error == 0) {
        made = packing.failed ? NULL : sorted(&packing);
        *error = made ? 0 : -ENOMEM;
    }
    for (uint32_t i = 0; i < KVFS_INDEX_LISTS; i++) {
        free(packing.lists[i].bytes);
        free(packing.lists[i].items);
    }
    free(stored.all);
    return made;
}

void kvfs_index_changes_free(struct kvfs_index_changes *changes) { free(changes); }
