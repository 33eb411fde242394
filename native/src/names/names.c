/* Names in memory (kvfs_names.h). A map of inodes and a map of names, both chained hash tables that grow.
 *
 * An inode's entry is in one of four states. CLEAN: as the index has it. DIRTY: it differs. COMMITTING: a commit is writing it. VOLATILE: no commit
 * writes it, and the index has nothing of it. Entries of a state are a list, the oldest first. A name in the map leads to an inode, or to 0 when it
 * was removed. A removed name goes when the commit that removes it from the index has ended. */
#include "names/names_state.h"

#include <sched.h>
#include <sys/random.h>

#include "kvfs_checksum.h"

#define CLEAN_FILES_MAX 32768u
#define CLEAN_DIRECTORIES_MAX 65536u
#define BUCKETS_MIN 1024u
/* A step of Python's is short, but where another process has its core meanwhile it takes milliseconds. */
#define STEP_NS 5000000u
#define SPIN_NS 100000u
#define GROUP_ATTRIBUTE "user.kvfs.group"
#define GROUP_ATTRIBUTE_SIZE (sizeof(GROUP_ATTRIBUTE) - 1)

/* ---- lists and maps ---- */

static int map_init(struct map *map) {
    map->buckets = calloc(BUCKETS_MIN, sizeof(*map->buckets));
    map->mask = BUCKETS_MIN - 1;
    return map->buckets ? 0 : -ENOMEM;
}

uint64_t name_hash_of(const struct kvfs_names *names, uint64_t parent, const char *name, uint32_t size) {
    return kvfs_checksum(name, size, names->seed ^ number_hash(parent));
}

static struct name **name_bucket(const struct kvfs_names *names, uint64_t hash) {
    return (struct name **)&names->names.buckets[hash & names->names.mask];
}
static struct directory **directory_bucket(const struct kvfs_names *names, uint64_t inode) {
    return (struct directory **)&names->directories.buckets[number_hash(inode) & names->directories.mask];
}

/* More buckets for more items, each of which has its `next` at that offset. Without memory the map stays as it is, a little slower. */
static void map_grow(struct map *map, size_t next_at, uint64_t (*hash)(const void *item)) {
    const uint64_t size = (map->mask + 1) * 2;
    void **grown = map->count <= map->mask ? NULL : calloc(size, sizeof(*grown));
    if (!grown)
        return;
    for (uint64_t i = 0; i <= map->mask; i++)
        for (void *item = map->buckets[i], *next; item; item = next) {
            void **bucket = &grown[hash(item) & (size - 1)];
            memcpy(&next, (char *)item + next_at, sizeof(next));
            memcpy((char *)item + next_at, bucket, sizeof(next));
            *bucket = item;
        }
    free(map->buckets);
    map->buckets = grown;
    map->mask = size - 1;
}

static uint64_t entry_hash(const void *item) { return number_hash(((const struct entry *)item)->inode); }
static uint64_t node_hash(const void *item) { return ((const struct name *)item)->hash; }
static uint64_t directory_hash(const void *item) { return number_hash(((const struct directory *)item)->inode); }

/* ---- records ---- */

/* Neither files without a block nor files without a name survive a restart. */
static bool is_durable(const struct kvfs_inode_record *record) {
    return record && (record->kind != KVFS_KIND_FILE || (record->flags & (KVFS_INODE_SEALED | KVFS_INODE_NAMELESS)) == KVFS_INODE_SEALED);
}

/* Attributes: u16 size of the key, u32 size of the value, key, value. */
const char *record_group(const struct kvfs_inode_record *record, uint32_t *size) {
    if (!record || !record->xattr_size)
        return NULL;
    const uint8_t *at = (const uint8_t *)(record_extents(record) + record->extent_count), *end = at + record->xattr_size;
    while (at + 6 <= end) {
        uint16_t key_size;
        memcpy(&key_size, at, sizeof(key_size));
        memcpy(size, at + 2, sizeof(*size));
        at += 6;
        if ((uint64_t)(end - at) < (uint64_t)key_size + *size)
            return NULL;
        if (key_size == GROUP_ATTRIBUTE_SIZE && memcmp(at, GROUP_ATTRIBUTE, GROUP_ATTRIBUTE_SIZE) == 0)
            return *size && *size <= KVFS_NAME_MAX ? (const char *)at + key_size : NULL;
        at += key_size + *size;
    }
    return NULL;
}

static struct kvfs_inode_record *record_copy(const void *record) {
    struct kvfs_inode_record head;
    memcpy(&head, record, sizeof(head)); /* Python's bytes need not be aligned */
    uint64_t parts = sizeof(head) + round_up(head.name_size, 8) + (uint64_t)head.extent_count * sizeof(struct kvfs_extent) + head.xattr_size;
    assert(head.record_size >= parts && head.record_size < parts + 8 && head.record_size % 8 == 0);
    assert(head.inode && head.name_size <= KVFS_NAME_MAX);
    struct kvfs_inode_record *copy = malloc(head.record_size);
    if (copy)
        memcpy(copy, record, head.record_size);
    return copy;
}

/* ---- names ---- */

static struct name *name_find(const struct kvfs_names *names, uint64_t parent, const char *text, uint32_t size) {
    uint64_t hash = name_hash_of(names, parent, text, size);
    struct name *name = *name_bucket(names, hash);
    while (name && !(name->hash == hash && name->parent == parent && name->size == size && memcmp(name->text, text, size) == 0))
        name = name->next;
    return name;
}

/* Its directory's list, made if need be. NULL: no memory. */
static struct directory *directory_get(struct kvfs_names *names, uint64_t inode) {
    struct directory **bucket = directory_bucket(names, inode), *directory = *bucket;
    while (directory && directory->inode != inode)
        directory = directory->next;
    if (directory)
        return directory;
    directory = calloc(1, sizeof(*directory));
    if (!directory)
        return NULL;
    directory->inode = inode;
    link_init(&directory->names);
    directory->next = *bucket;
    *bucket = directory;
    names->directories.count++;
    map_grow(&names->directories, offsetof(struct directory, next), directory_hash);
    return directory;
}

static void name_unlist(struct kvfs_names *names, struct name *name) {
    if (!name->listed)
        return;
    name->listed = false;
    link_drop(&name->link);
    struct directory **at = directory_bucket(names, name->parent);
    while ((*at)->inode != name->parent)
        at = &(*at)->next;
    assert((*at)->count > 0);
    if (--(*at)->count == 0) {
        struct directory *empty = *at;
        assert(link_empty(&empty->names));
        *at = empty->next;
        names->directories.count--;
        free(empty);
    }
}

static int name_list(struct kvfs_names *names, struct name *name) {
    if (name->listed)
        return 0;
    struct directory *directory = directory_get(names, name->parent);
    if (!directory)
        return -ENOMEM;
    link_add(&directory->names, &name->link);
    directory->count++;
    name->listed = true;
    return 0;
}

/* The node of a name, made if need be, unlisted then. NULL: no memory. */
static struct name *name_get(struct kvfs_names *names, const struct kvfs_inode_record *record) {
    struct name *name = name_find(names, record->parent, record_name(record), record->name_size);
    if (name)
        return name;
    name = malloc(sizeof(*name) + record->name_size);
    if (!name)
        return NULL;
    memset(name, 0, sizeof(*name));
    name->parent = record->parent;
    name->size = (uint8_t)record->name_size;
    memcpy(name->text, record_name(record), record->name_size);
    name->hash = name_hash_of(names, name->parent, name->text, name->size);
    struct name **bucket = name_bucket(names, name->hash);
    name->next = *bucket;
    *bucket = name;
    names->names.count++;
    map_grow(&names->names, offsetof(struct name, next), node_hash);
    return name;
}

static void name_free(struct kvfs_names *names, struct name *name) {
    name_unlist(names, name);
    if (name->removed.after)
        link_drop(&name->removed);
    struct name **at = name_bucket(names, name->hash);
    while (*at != name)
        at = &(*at)->next;
    *at = name->next;
    names->names.count--;
    free(name);
}

/* The inode has this name no more; another may have it by now. Its node exists, and is listed. */
static void name_remove(struct kvfs_names *names, const struct kvfs_inode_record *record) {
    struct name *name = name_find(names, record->parent, record_name(record), record->name_size);
    if (!name || name->inode != record->inode)
        return;
    assert(name->listed && !name->removed.after);
    if (!name->stored) {
        name_free(names, name);
        return;
    }
    name->inode = 0;
    name->batch = names->batch;
    link_add(&names->removed, &name->removed);
}

/* ---- entries ---- */

/* The node of the entry's name, if that leads to it. */
static struct name *entry_name(const struct kvfs_names *names, const struct entry *entry) {
    const struct kvfs_inode_record *record = entry->record;
    struct name *name = record_is_named(record) ? name_find(names, record->parent, record_name(record), record->name_size) : NULL;
    return name && name->inode == entry->inode ? name : NULL;
}

static void entry_move(struct kvfs_names *names, struct entry *entry, enum state state) {
    link_drop(&entry->link);
    names->counts[entry->state]--;
    entry->state = (uint8_t)state;
    link_add(&names->states[state], &entry->link);
    names->counts[state]++;
}

/* The entry has this record from now on, or none, and is a member where it lies. */
static void entry_hold(struct kvfs_names *names, struct entry *entry, struct kvfs_inode_record *record, struct members *members) {
    uint32_t size;
    names->grouped -= record_group(entry->record, &size) != NULL;
    names->grouped += record_group(record, &size) != NULL;
    members_set(names, entry, record, members);
    free(entry->record);
    entry->record = record;
    if (!is_unsealed(record)) {
        free(entry->older);
        entry->older = NULL;
    }
}

/* A new entry without a record, VOLATILE. NULL: no memory. */
static struct entry *entry_new(struct kvfs_names *names, uint64_t inode) {
    struct entry *entry = calloc(1, sizeof(*entry));
    if (!entry)
        return NULL;
    struct entry **bucket = entry_bucket(names, inode);
    entry->inode = inode;
    entry->is_new = true;
    entry->next = *bucket;
    *bucket = entry;
    entry->state = VOLATILE;
    link_add(&names->states[VOLATILE], &entry->link);
    names->counts[VOLATILE]++;
    names->entries.count++;
    map_grow(&names->entries, offsetof(struct entry, next), entry_hash);
    return entry;
}

static void entry_free(struct kvfs_names *names, struct entry *entry) {
    struct entry **at = entry_bucket(names, entry->inode);
    while (*at != entry)
        at = &(*at)->next;
    *at = entry->next;
    link_drop(&entry->link);
    names->counts[entry->state]--;
    names->entries.count--;
    entry_hold(names, entry, NULL, NULL);
    free(entry);
}

/* An entry that is as the index has it leaves memory, and its name with it. */
static void entry_forget(struct kvfs_names *names, struct entry *entry) {
    assert(entry->state == CLEAN || entry->state == CLEAN_DIRECTORY);
    struct name *name = entry_name(names, entry);
    if (name && !name->listed)
        name_free(names, name);
    entry_free(names, entry);
}

static void entry_clean(struct kvfs_names *names, struct entry *entry) {
    bool directory = entry->record->kind == KVFS_KIND_DIRECTORY;
    enum state state = directory ? CLEAN_DIRECTORY : CLEAN;
    entry_move(names, entry, state);
    struct entry *oldest = entry_at(names->states[state].after);
    if (names->counts[state] > names->clean_max[state] && oldest != entry && !names->held) /* a record that was loaded for a change stays for it */
        entry_forget(names, oldest);
}

/* The entry's record is another now, or NULL. */
static void entry_settle(struct kvfs_names *names, struct entry *entry) {
    if (entry->state == COMMITTING) {
        entry->again = true;
    } else if (is_durable(entry->record) || !entry->is_new) {
        if (entry->state != DIRTY)
            entry_move(names, entry, DIRTY);
    } else if (!entry->record) {
        entry_free(names, entry);
    } else if (entry->state != VOLATILE) {
        entry_move(names, entry, VOLATILE);
    }
}

/* The node of the name that the entry has, in its directory's list: in the index it still leads to the inode. *name is NULL if it has none. */
static int entry_list(struct kvfs_names *names, struct entry *entry, struct name **name) {
    const struct kvfs_inode_record *record = entry->record;
    *name = NULL;
    if (!record_is_named(record))
        return 0;
    struct name *found = name_get(names, record);
    if (!found)
        return -ENOMEM;
    if (found->inode == 0 && !found->removed.after) { /* the node is new */
        found->inode = entry->inode;
        found->stored = true;
    }
    *name = found;
    return name_list(names, found);
}

/* The names follow the record, which may be NULL: gone. -ENOMEM: nothing has changed. */
static int entry_rename(struct kvfs_names *names, struct entry *entry, const struct kvfs_inode_record *record) {
    struct name *before, *now = NULL;
    /* Memory first, then the change. */
    if (entry_list(names, entry, &before) < 0)
        return -ENOMEM;
    if (record_is_named(record) && (!(now = name_get(names, record)) || name_list(names, now) < 0)) {
        if (now && !now->listed)
            name_free(names, now);
        return -ENOMEM;
    }
    if (before && before != now)
        name_remove(names, entry->record);
    if (now) {
        now->inode = entry->inode;
        if (now->removed.after)
            link_drop(&now->removed);
    }
    return 0;
}

static bool lies_as(const struct kvfs_inode_record *a, const struct kvfs_inode_record *b) {
    return b && a->kind == b->kind && a->segment == b->segment && !((a->flags ^ b->flags) & KVFS_INODE_SEALED) &&
           a->extent_count == b->extent_count && memcmp(record_extents(a), record_extents(b), a->extent_count * sizeof(struct kvfs_extent)) == 0;
}

/* Takes over `record`, which may be NULL: gone. -ENOMEM: nothing has changed, and the record is the caller's. */
static int entry_set(struct kvfs_names *names, struct entry *entry, struct kvfs_inode_record *record) {
    /* Prepared, or those of a record that lies where this one does: then it needs no memory. */
    struct members *members = !entry->record || lies_as(entry->record, record) ? entry->extents : NULL;
    if (!members && members_make(record, &members) < 0)
        return -ENOMEM;
    if (entry_rename(names, entry, record) < 0) {
        if (members != entry->extents)
            free(members);
        return -ENOMEM;
    }
    entry_hold(names, entry, record, members);
    entry_settle(names, entry);
    return 0;
}

/* ---- the interface ---- */

int kvfs_names_create(struct kvfs_names **out) {
    struct kvfs_names *names = calloc(1, sizeof(*names));
    if (!names)
        return -ENOMEM;
    names->step = 1;
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&names->lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
    for (int i = 0; i < STATES; i++)
        link_init(&names->states[i]);
    for (int i = 0; i < MEMBER_LISTS; i++)
        link_init(&names->members[i]);
    link_init(&names->removed);
    link_init(&names->in_flight);
    names->clean_max[CLEAN] = CLEAN_FILES_MAX;
    names->clean_max[CLEAN_DIRECTORY] = CLEAN_DIRECTORIES_MAX;
    names->batch = 1;
    names->left = KVFS_LEAVE_CLOSED;
    if (map_init(&names->entries) < 0 || map_init(&names->names) < 0 || map_init(&names->directories) < 0) {
        kvfs_names_destroy(names);
        return -ENOMEM;
    }
    if (getrandom(&names->seed, sizeof(names->seed), GRND_NONBLOCK) != sizeof(names->seed))
        names->seed = now_ns();
    *out = names;
    return 0;
}

static void map_free(struct map *map) {
    free(map->buckets);
    map->buckets = NULL;
}

void kvfs_names_destroy(struct kvfs_names *names) {
    if (!names)
        return;
    for (int i = 0; i < STATES; i++)
        while (names->entries.buckets && !link_empty(&names->states[i]))
            entry_free(names, entry_at(names->states[i].after));
    for (uint64_t i = 0; names->names.buckets && i <= names->names.mask; i++)
        while (names->names.buckets[i])
            name_free(names, names->names.buckets[i]);
    map_free(&names->entries);
    map_free(&names->names);
    map_free(&names->directories);
    free(names->committing);
    journal_destroy(names->journal);
    free(names->untold.hashes);
    places_free(&names->places);
    pthread_mutex_destroy(&names->lock);
    free(names);
}

void kvfs_names_begin(struct kvfs_names *names) {
    pthread_mutex_lock(&names->lock);
    names->depth++;
}

void kvfs_names_end(struct kvfs_names *names) {
    if (--names->depth == 0 && names->journal)
        journal_publish(names->journal);
    pthread_mutex_unlock(&names->lock);
}

int64_t kvfs_names_get(struct kvfs_names *names, uint64_t inode, void *out, uint32_t capacity) {
    int64_t size = -ENOENT;
    pthread_mutex_lock(&names->lock);
    struct entry *entry = entry_find(names, inode);
    if (entry) {
        size = entry->record ? entry->record->record_size : 0;
        copy_bytes(out, entry->record, min_u64((uint64_t)size, capacity));
    }
    pthread_mutex_unlock(&names->lock);
    return size;
}

int kvfs_names_find(struct kvfs_names *names, uint64_t parent, const char *name, uint32_t name_size, uint64_t *inode) {
    pthread_mutex_lock(&names->lock);
    struct name *found = name_find(names, parent, name, name_size);
    if (found)
        *inode = found->inode;
    pthread_mutex_unlock(&names->lock);
    return found != NULL;
}

static int text_order(const char *a, uint32_t a_size, const char *b, uint32_t b_size) {
    int order = memcmp(a, b, min_u64(a_size, b_size));
    return order ? order : a_size < b_size ? -1 : a_size > b_size;
}

static int name_order(const void *a, const void *b) {
    const struct name *x = *(struct name *const *)a, *y = *(struct name *const *)b;
    return text_order(x->text, x->size, y->text, y->size);
}

int kvfs_names_list(struct kvfs_names *names, uint64_t parent, const char *after, uint32_t after_size, struct kvfs_name *out, uint32_t limit) {
    pthread_mutex_lock(&names->lock);
    struct directory *directory = *directory_bucket(names, parent);
    while (directory && directory->inode != parent)
        directory = directory->next;
    struct name **found = directory ? malloc(directory->count * sizeof(struct name *)) : NULL;
    uint32_t count = 0;
    for (struct link *at = found ? directory->names.after : NULL; at && at != &directory->names; at = at->after) {
        struct name *name = (struct name *)(void *)at;
        if (text_order(name->text, name->size, after, after_size) > 0)
            found[count++] = name;
    }
    if (found)
        qsort(found, count, sizeof(struct name *), name_order);
    count = (uint32_t)min_u64(count, limit);
    for (uint32_t i = 0; i < count; i++) {
        out[i].inode = found[i]->inode;
        out[i].size = found[i]->size;
        memcpy(out[i].name, found[i]->text, found[i]->size);
    }
    int r = directory && !found ? -ENOMEM : (int)count;
    pthread_mutex_unlock(&names->lock);
    free(found);
    return r;
}

uint32_t kvfs_names_parents(struct kvfs_names *names, uint64_t *out, uint32_t capacity) {
    uint32_t count = 0;
    pthread_mutex_lock(&names->lock);
    for (uint64_t i = 0; i <= names->directories.mask; i++)
        for (struct directory *directory = names->directories.buckets[i]; directory; directory = directory->next)
            if (count++ < capacity)
                out[count - 1] = directory->inode;
    pthread_mutex_unlock(&names->lock);
    return count;
}

uint64_t kvfs_names_grouped(struct kvfs_names *names) {
    pthread_mutex_lock(&names->lock);
    uint64_t count = names->grouped;
    pthread_mutex_unlock(&names->lock);
    return count;
}

uint32_t kvfs_names_group(struct kvfs_names *names, const char *group, uint32_t group_size, uint64_t *out, uint32_t capacity) {
    uint32_t count = 0;
    pthread_mutex_lock(&names->lock);
    for (enum state state = DIRTY; state <= VOLATILE; state++)
        for (struct link *at = names->states[state].after; at != &names->states[state]; at = at->after) {
            const struct entry *entry = entry_at(at);
            uint32_t size;
            const char *found = record_group(entry->record, &size);
            if (found && size == group_size && memcmp(found, group, size) == 0 && count++ < capacity)
                out[count - 1] = entry->inode;
        }
    pthread_mutex_unlock(&names->lock);
    return count;
}

uint32_t kvfs_names_volatile(struct kvfs_names *names, uint64_t *out, uint32_t capacity) {
    uint32_t count = 0;
    pthread_mutex_lock(&names->lock);
    for (enum state state = DIRTY; state <= VOLATILE; state++)
        for (struct link *at = names->states[state].after; at != &names->states[state]; at = at->after) {
            const struct entry *entry = entry_at(at);
            if (entry->record && !is_durable(entry->record) && count++ < capacity)
                out[count - 1] = entry->inode;
        }
    pthread_mutex_unlock(&names->lock);
    return count;
}

/* The entry is new, and as the index has it. -ENOMEM: it is gone again. */
static int entry_load(struct kvfs_names *names, struct entry *entry, struct kvfs_inode_record *record) {
    struct name *name = record_is_named(record) ? name_get(names, record) : NULL;
    struct members *members = NULL;
    if ((record_is_named(record) && !name) || members_make(record, &members) < 0) {
        if (name && !name->inode && !name->removed.after)
            name_free(names, name);
        entry_free(names, entry);
        return -ENOMEM;
    }
    if (name && !name->inode && !name->removed.after) { /* the node is new */
        name->inode = record->inode;
        name->stored = true;
    }
    entry->is_new = false;
    entry_hold(names, entry, record, members);
    entry_clean(names, entry);
    return 0;
}

static int load_one(struct kvfs_names *names, const void *data) {
    uint64_t inode;
    memcpy(&inode, (const uint8_t *)data + offsetof(struct kvfs_inode_record, inode), sizeof(inode));
    if (entry_find(names, inode))
        return 0;
    struct kvfs_inode_record *record = record_copy(data);
    assert(!record || is_durable(record));
    struct entry *entry = record ? entry_new(names, inode) : NULL;
    if (entry && entry_load(names, entry, record) == 0)
        return 0;
    free(record);
    return -ENOMEM;
}

int kvfs_names_load(struct kvfs_names *names, const void *records, uint64_t size) {
    int r = 0;
    pthread_mutex_lock(&names->lock);
    for (uint64_t at = 0; at < size && r == 0;) {
        const uint8_t *data = (const uint8_t *)records + at;
        uint32_t record_size;
        memcpy(&record_size, data, sizeof(record_size));
        assert(record_size >= sizeof(struct kvfs_inode_record) && record_size <= size - at);
        r = load_one(names, data);
        at += record_size;
    }
    pthread_mutex_unlock(&names->lock);
    return r;
}

static int take(struct kvfs_names *names, struct kvfs_inode_record *record, bool known) {
    struct entry *entry = entry_find(names, record->inode), *made = NULL;
    int r = entry ? 0 : known ? -ENOENT : (made = entry = entry_new(names, record->inode)) ? 0 : -ENOMEM;
    if (r == 0)
        r = entry_set(names, entry, record);
    if (r == 0 && names->journal)
        journal_note(names->journal, record->inode, record);
    if (r < 0 && made)
        entry_free(names, made);
    return r;
}

int names_take(struct kvfs_names *names, struct kvfs_inode_record *record) { return take(names, record, false); }

int names_prepare(struct kvfs_names *names, const struct kvfs_inode_record *record) {
    struct entry *entry = entry_find(names, record->inode), *made = NULL;
    assert(record_is_named(record) && !(entry && record_is_named(entry->record)));
    assert(!entry || (record->kind == KVFS_KIND_DIRECTORY && !entry->extents));
    if (!entry && !(made = entry = entry_new(names, record->inode)))
        return -ENOMEM;
    struct name *name = !made || members_make(record, &made->extents) == 0 ? name_get(names, record) : NULL;
    if (name && name_list(names, name) == 0)
        return 0;
    names_unprepare(names, record);
    return -ENOMEM;
}

/* The record's name is not taken: its node is as before. */
static void name_unprepare(struct kvfs_names *names, const struct kvfs_inode_record *record) {
    struct name *name = name_find(names, record->parent, record_name(record), record->name_size);
    if (name && !name->inode && !name->removed.after) { /* the node is new */
        name_free(names, name);
    } else if (name && name->inode) {
        const struct entry *holder = entry_find(names, name->inode);
        if (holder && (holder->state == CLEAN || holder->state == CLEAN_DIRECTORY))
            name_unlist(names, name);
    }
}

void names_unprepare(struct kvfs_names *names, const struct kvfs_inode_record *record) {
    struct entry *entry = entry_find(names, record->inode);
    name_unprepare(names, record);
    if (entry->state == VOLATILE && !entry->record) /* it is new */
        entry_free(names, entry);
}

int names_prepare_move(struct kvfs_names *names, const struct kvfs_inode_record *record) {
    struct entry *entry = entry_find(names, record->inode);
    struct name *name;
    assert(record_is_named(record) && entry && entry->record && lies_as(entry->record, record));
    if (entry_list(names, entry, &name) == 0 && (name = name_get(names, record)) && name_list(names, name) == 0)
        return 0;
    names_unprepare_move(names, record);
    return -ENOMEM;
}

void names_unprepare_move(struct kvfs_names *names, const struct kvfs_inode_record *record) {
    name_unprepare(names, record);
    name_unprepare(names, entry_find(names, record->inode)->record);
}

int kvfs_names_put(struct kvfs_names *names, const void *data, int known) {
    struct kvfs_inode_record *record = record_copy(data);
    if (!record)
        return -ENOMEM;
    kvfs_names_begin(names);
    int r = take(names, record, known);
    kvfs_names_end(names);
    if (r < 0)
        free(record);
    return r;
}

int names_older(const struct kvfs_names *names, uint64_t inode, uint64_t target, struct kvfs_inode_record **older) {
    const struct entry *entry = entry_find(names, inode), *from = entry_find(names, target);
    const struct kvfs_inode_record *found = NULL;
    if (entry && from && from->record && is_unsealed(entry->record))
        found = is_unsealed(from->record) ? entry_older(from) : from->record;
    *older = found && found->kind == KVFS_KIND_FILE ? record_again(found) : NULL;
    return found && found->kind == KVFS_KIND_FILE && !*older ? -ENOMEM : 0;
}

void names_push(struct kvfs_names *names, uint64_t inode, struct kvfs_inode_record *older) {
    struct entry *entry = entry_find(names, inode);
    assert(entry && (!older || is_unsealed(entry->record)));
    free(entry->older);
    entry->older = older;
}

int kvfs_names_remove(struct kvfs_names *names, uint64_t inode) {
    kvfs_names_begin(names);
    struct entry *entry = entry_find(names, inode);
    bool present = entry && entry->record;
    int r = !entry ? -ENOENT : present ? entry_set(names, entry, NULL) : 0;
    if (r == 0 && present && names->journal)
        journal_note(names->journal, inode, NULL);
    kvfs_names_end(names);
    return r;
}

int names_removable(struct kvfs_names *names, uint64_t inode) {
    struct entry *entry = entry_find(names, inode);
    struct name *name;
    assert(entry);
    return entry_list(names, entry, &name);
}

void names_unremovable(struct kvfs_names *names, uint64_t inode) {
    const struct entry *entry = entry_find(names, inode);
    if (record_is_named(entry->record))
        name_unprepare(names, entry->record);
}

void names_hold(struct kvfs_names *names) { names->held++; }

void names_let_go(struct kvfs_names *names) {
    assert(names->held);
    if (--names->held)
        return;
    for (enum state state = CLEAN; state <= CLEAN_DIRECTORY; state++)
        while (names->counts[state] > names->clean_max[state] && names->states[state].after != names->states[state].before)
            entry_forget(names, entry_at(names->states[state].after));
}

bool names_has_new(const struct kvfs_names *names, uint64_t parent) {
    const struct directory *directory = *directory_bucket(names, parent);
    while (directory && directory->inode != parent)
        directory = directory->next;
    for (const struct link *at = directory ? directory->names.after : NULL; at && at != &directory->names; at = at->after)
        if (((const struct name *)(const void *)at)->inode)
            return true;
    return false;
}

void kvfs_names_limit(struct kvfs_names *names, uint64_t files, uint64_t directories) {
    pthread_mutex_lock(&names->lock);
    names->clean_max[CLEAN] = files;
    names->clean_max[CLEAN_DIRECTORY] = directories;
    pthread_mutex_unlock(&names->lock);
}

void kvfs_names_forget(struct kvfs_names *names) {
    pthread_mutex_lock(&names->lock);
    for (enum state state = CLEAN; state <= CLEAN_DIRECTORY; state++)
        while (!link_empty(&names->states[state]))
            entry_forget(names, entry_at(names->states[state].after));
    pthread_mutex_unlock(&names->lock);
}

const void *kvfs_names_commit_begin(struct kvfs_names *names, uint64_t *size) {
    pthread_mutex_lock(&names->lock);
    assert(!names->committing && link_empty(&names->states[COMMITTING]));
    *size = 0;
    for (struct link *at = names->states[DIRTY].after; at != &names->states[DIRTY]; at = at->after) {
        const struct entry *entry = entry_at(at);
        *size += sizeof(struct kvfs_change) + (is_durable(entry->record) ? entry->record->record_size : 0);
    }
    uint8_t *to = names->committing = malloc(*size + 1);
    while (to && !link_empty(&names->states[DIRTY])) {
        struct entry *entry = entry_at(names->states[DIRTY].after);
        bool durable = is_durable(entry->record);
        struct kvfs_change change = {entry->inode, durable ? entry->record->record_size : 0, entry->is_new};
        memcpy(to, &change, sizeof(change));
        copy_bytes(to + sizeof(change), entry->record, change.record_size);
        to += sizeof(change) + change.record_size;
        entry->is_new = false;
        struct name *name = durable ? entry_name(names, entry) : NULL;
        if (name)
            name->stored = true;
        entry_move(names, entry, COMMITTING);
    }
    assert(!to || to == names->committing + *size);
    names->batch += to != NULL;
    if (to)
        journal_commit_begin(names);
    pthread_mutex_unlock(&names->lock);
    return to ? names->committing : NULL;
}

void kvfs_names_commit_end(struct kvfs_names *names, int ok) {
    pthread_mutex_lock(&names->lock);
    while (!link_empty(&names->states[COMMITTING])) {
        struct entry *entry = entry_at(names->states[COMMITTING].after);
        bool again = entry->again || !ok;
        entry->again = false;
        if (again) {
            entry_move(names, entry, DIRTY);
        } else if (!entry->record) {
            entry_free(names, entry);
        } else if (!is_durable(entry->record)) {
            entry->is_new = true;
            entry_move(names, entry, VOLATILE);
        } else {
            struct name *name = entry_name(names, entry);
            if (name)
                name_unlist(names, name);
            entry_clean(names, entry);
        }
    }
    while (ok && !link_empty(&names->removed)) {
        struct name *name = (struct name *)(void *)((char *)names->removed.after - offsetof(struct name, removed));
        if (name->batch >= names->batch)
            break;
        name_free(names, name);
    }
    free(names->committing);
    names->committing = NULL;
    pthread_mutex_unlock(&names->lock);
    if (ok)
        journal_commit_end(names);
}

uint64_t kvfs_names_pending(struct kvfs_names *names) {
    pthread_mutex_lock(&names->lock);
    uint64_t count = names->counts[DIRTY];
    pthread_mutex_unlock(&names->lock);
    return count;
}

/* ---- what the data plane's threads ask ---- */

/* pthread_mutex_timedlock() would wait by a clock that may be set back, and ThreadSanitizer does not know pthread_mutex_clocklock(). */
bool names_try(struct kvfs_names *names) {
    const uint64_t begun = now_ns();
    while (pthread_mutex_trylock(&names->lock)) {
        uint64_t waited = now_ns() - begun;
        if (waited >= STEP_NS)
            return false;
        if (waited < SPIN_NS)
            sched_yield();
        else
            nanosleep(&(struct timespec){.tv_nsec = SPIN_NS}, NULL);
    }
    names->depth++;
    return true;
}

const struct kvfs_inode_record *names_record(const struct kvfs_names *names, uint64_t inode) {
    const struct entry *entry = entry_find(names, inode);
    return entry ? entry->record : NULL;
}

uint32_t names_left(const struct kvfs_names *names) { return names->left | (journal_is_full(names->journal) ? KVFS_LEAVE_FULL : 0); }

void kvfs_names_leave(struct kvfs_names *names, uint32_t reason, int on) {
    pthread_mutex_lock(&names->lock);
    names->left = on ? names->left | reason : names->left & ~reason;
    pthread_mutex_unlock(&names->lock);
}

/* ---- numbers ---- */

void kvfs_names_number(struct kvfs_names *names, uint64_t number, int in_pod) {
    pthread_mutex_lock(&names->lock);
    names->step = in_pod ? UINT64_C(1) << KVFS_SLOT_BITS : 1;
    names->last_inode = names->last_version = number;
    pthread_mutex_unlock(&names->lock);
}

void kvfs_names_seen(struct kvfs_names *names, uint64_t version) {
    pthread_mutex_lock(&names->lock);
    if (version > names->last_version && version >> KVFS_COUNTER_BITS <= KVFS_EPOCH_MAX)
        names->last_version = (version & ~(names->step - 1)) | (names->last_version & (names->step - 1));
    pthread_mutex_unlock(&names->lock);
}

uint64_t kvfs_names_next_inode(struct kvfs_names *names) {
    pthread_mutex_lock(&names->lock);
    uint64_t inode = names->last_inode += names->step;
    pthread_mutex_unlock(&names->lock);
    return inode;
}

uint64_t kvfs_names_next_version(struct kvfs_names *names) {
    pthread_mutex_lock(&names->lock);
    uint64_t version = names->last_version += names->step;
    pthread_mutex_unlock(&names->lock);
    return version;
}

uint64_t kvfs_names_last_version(struct kvfs_names *names) {
    pthread_mutex_lock(&names->lock);
    uint64_t version = names->last_version;
    pthread_mutex_unlock(&names->lock);
    return version;
}

uint64_t version_begin(struct kvfs_names *names, struct version *version) {
    link_add(&names->in_flight, &version->link);
    return version->number = names->last_version += names->step;
}

void version_end(struct version *version) { link_drop(&version->link); }

uint32_t kvfs_names_in_flight(struct kvfs_names *names, uint64_t *out, uint32_t capacity) {
    uint32_t count = 0;
    pthread_mutex_lock(&names->lock);
    for (struct link *at = names->in_flight.after; at != &names->in_flight; at = at->after)
        if (count++ < capacity)
            out[count - 1] = ((struct version *)(void *)at)->number;
    pthread_mutex_unlock(&names->lock);
    return count;
}
