/* The journal of names (journal_layout.h): a ring of entries in memory that another process keeps. Its bytes stay when this process is killed, in the
 * order of its stores. So the tail alone says which entries count. Checksums are for a journal that another has damaged. */
#include "names/journal.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>

#include "base/sealed_memory.h"
#include "kvfs_checksum.h"
#include "names/journal_layout.h"
#include "names/names_state.h"

#define DATA_MAX (16u << 20) /* of one entry: no record is longer */
#define ZEROS_MAX 8u

/* A request whose entries stay until its reply was written. */
struct asked {
    uint64_t transport, unique, position;
    bool inherited; /* of the former daemon */
};
struct journal {
    uint32_t version; /* the one in which it was made */
    struct journal_header *header;
    uint8_t *ring;
    uint64_t size; /* of the ring */
    uint64_t head, tail, sequence;
    uint64_t id;
    uint64_t end, last_sequence; /* of the step that is under way */
    struct kvfs_journal_entry last;
    uint64_t last_data; /* checksum of its data */
    bool noted;         /* the step has changes */
    bool full;          /* the step has no room */
    bool held_untold;   /* nor had the blocks that tell_held() told */
    uint64_t mark, mark_sequence;
    uint64_t lost;
    struct asked *asked;
    uint32_t asked_count, asked_capacity;
};

static _Thread_local struct {
    uint64_t transport, unique;
} request;

/* ---- the ring ---- */

static void ring_write(struct journal *journal, uint64_t position, const void *data, uint64_t size) {
    uint64_t at = position % journal->size, first = min_u64(size, journal->size - at);
    copy_bytes(journal->ring + at, data, first);
    copy_bytes(journal->ring, (const uint8_t *)data + first, size - first);
}

static void ring_read(const struct journal *journal, uint64_t position, void *out, uint64_t size) {
    uint64_t at = position % journal->size, first = min_u64(size, journal->size - at);
    copy_bytes(out, journal->ring + at, first);
    copy_bytes((uint8_t *)out + first, journal->ring, size - first);
}

/* `data`: the checksum of the entry's data. */
static uint64_t entry_checksum(const struct kvfs_journal_entry *told, uint64_t data) {
    struct journal_entry entry = {.told = *told};
    return kvfs_checksum(&entry, sizeof(entry), data);
}

static void add(struct journal *journal, uint8_t kind, uint8_t flags, uint64_t inode, const void *data, uint32_t size) {
    struct journal_entry entry = {.told = {.size = (uint32_t)(sizeof(entry) + round_up(size, 8)),
                                           .kind = kind,
                                           .flags = flags,
                                           .sequence = ++journal->last_sequence,
                                           .inode = inode,
                                           .data_size = size}};
    static const uint8_t zeros[ZEROS_MAX];
    if (size > DATA_MAX || journal->end + entry.told.size - journal->head > journal->size)
        journal->full = true;
    if (journal->full)
        return;
    journal->last_data = kvfs_checksum(data, size, journal->id);
    entry.checksum = entry_checksum(&entry.told, journal->last_data);
    ring_write(journal, journal->end, &entry, sizeof(entry));
    ring_write(journal, journal->end + sizeof(entry), data, size);
    ring_write(journal, journal->end + sizeof(entry) + size, zeros, round_up(size, 8) - size);
    journal->last = entry.told;
    journal->end += entry.told.size;
}

void journal_note(struct journal *journal, uint64_t inode, const struct kvfs_inode_record *record) {
    add(journal, record ? KVFS_JOURNAL_PUT : KVFS_JOURNAL_REMOVE, 0, inode, record, record ? record->record_size : 0);
    journal->noted = true;
}

static void asked_drop(struct journal *journal, uint32_t i) { journal->asked[i] = journal->asked[--journal->asked_count]; }

/* -1: it is not there. The newest first: most are answered at once. */
static int64_t asked_find(const struct journal *journal, uint64_t transport, uint64_t unique) {
    for (uint32_t i = journal->asked_count; i-- > 0;)
        if (journal->asked[i].unique == unique && journal->asked[i].transport == transport)
            return i;
    return -1;
}

/* Without memory the request's entries go as others do: it would be executed again. */
static void asked_add(struct journal *journal, uint64_t transport, uint64_t unique, uint64_t position, bool inherited) {
    if (!unique || asked_find(journal, transport, unique) >= 0)
        return;
    if (journal->asked_count == journal->asked_capacity) {
        uint32_t capacity = journal->asked_capacity ? 2 * journal->asked_capacity : 64;
        struct asked *grown = realloc(journal->asked, capacity * sizeof(*grown));
        if (!grown)
            return;
        journal->asked = grown;
        journal->asked_capacity = capacity;
    }
    journal->asked[journal->asked_count++] = (struct asked){transport, unique, position, inherited};
}

/* The entry was the last of its step. Only now it is known whether that is what its request asked for. */
static void seal_last(struct journal *journal) {
    struct journal_entry entry = {.told = journal->last};
    entry.told.flags |= KVFS_JOURNAL_LAST;
    if (journal->noted) {
        entry.told.transport = request.transport;
        entry.told.unique = request.unique;
        asked_add(journal, request.transport, request.unique, journal->tail, false);
    }
    entry.checksum = entry_checksum(&entry.told, journal->last_data);
    ring_write(journal, journal->end - entry.told.size, &entry, sizeof(entry));
}

void journal_publish(struct journal *journal) {
    if (journal->last_sequence == journal->sequence)
        return;
    if (journal->full) {
        journal->lost += journal->last_sequence - journal->sequence;
        journal->end = journal->tail;
    } else {
        seal_last(journal);
        journal->tail = journal->end;
        atomic_store_explicit(&journal->header->tail, journal->tail, memory_order_release);
    }
    journal->full = journal->noted = false;
    journal->sequence = journal->last_sequence;
    atomic_store_explicit(&journal->header->sequence, journal->sequence, memory_order_release);
}

/* A step, as kvfs_names_begin() and kvfs_names_end() make one. */
static void step_begin(struct kvfs_names *names) { pthread_mutex_lock(&names->lock); }
static void step_end(struct kvfs_names *names) {
    if (!names->depth && names->journal)
        journal_publish(names->journal);
    pthread_mutex_unlock(&names->lock);
}

/* ---- what may go ---- */

/* Steps that change nothing lack no number where there is no room. Then the commit's end tells them. */
static void held_publish(struct journal *journal) {
    if (journal->full) {
        journal->held_untold = true;
        journal->full = false;
        journal->end = journal->tail;
        journal->last_sequence = journal->sequence;
    }
    journal_publish(journal);
}

static void add_held(struct journal *journal, const struct kvfs_inode_record *record) {
    add(journal, KVFS_JOURNAL_PUT, KVFS_JOURNAL_HELD, record->inode, record, record->record_size);
}

/* A file that is not sealed: no header of it says its name. And the block that it pushed from there stays until it is. Two steps: the block has its
 * name, then the file. */
static void tell_unsealed(struct kvfs_names *names, const struct entry *entry) {
    struct journal *journal = names->journal;
    const struct kvfs_inode_record *older = entry_older(entry);
    if (older) {
        const struct entry *pushed = entry_find(names, older->inode);
        add_held(journal, older);
        add(journal, KVFS_JOURNAL_REMOVE, KVFS_JOURNAL_HELD, entry->inode, NULL, 0);
        held_publish(journal);
        if (pushed && pushed->record)
            add_held(journal, pushed->record);
        else
            add(journal, KVFS_JOURNAL_REMOVE, KVFS_JOURNAL_HELD, older->inode, NULL, 0);
    }
    add_held(journal, entry->record);
    held_publish(journal);
}

/* Nameless blocks that are open, and files that are not sealed, stay known: they are told again as their entries go. */
static void tell_held(struct kvfs_names *names) {
    names->journal->held_untold = false;
    for (enum state state = DIRTY; state <= VOLATILE; state++)
        for (const struct link *at = names->states[state].after; at != &names->states[state] && !names->journal->held_untold; at = at->after) {
            const struct entry *entry = (const struct entry *)(const void *)at;
            const struct kvfs_inode_record *record = entry->record;
            uint32_t flags =
                record && record->kind == KVFS_KIND_FILE ? record->flags & (KVFS_INODE_SEALED | KVFS_INODE_NAMELESS | KVFS_INODE_SLAB) : 255;
            if (flags == (KVFS_INODE_SEALED | KVFS_INODE_NAMELESS)) {
                add_held(names->journal, record);
                held_publish(names->journal);
            } else if (flags == 0) {
                tell_unsealed(names, entry);
            }
        }
}

void journal_commit_begin(struct kvfs_names *names) {
    struct journal *journal = names->journal;
    if (!journal)
        return;
    journal_publish(journal);
    journal->mark = journal->tail;
    journal->mark_sequence = journal->sequence;
    tell_held(names);
}

/* Whole pages within [from, from + size) of the ring. */
static void punch(struct journal *journal, uint64_t from, uint64_t size) {
    uint64_t first = round_up(from, PAGE), end = (from + size) / PAGE * PAGE;
    if (first < end)
        (void)madvise(journal->ring + first, end - first, MADV_REMOVE);
}

/* The memory goes without the lock. Nothing is written there before the head says so, and only a commit moves that. */
void journal_commit_end(struct kvfs_names *names) {
    struct journal *journal = names->journal;
    if (!journal)
        return;
    step_begin(names);
    uint64_t to = journal->mark;
    for (uint32_t i = 0; i < journal->asked_count; i++)
        to = min_u64(to, journal->asked[i].position);
    atomic_store_explicit(&journal->header->durable, journal->mark_sequence, memory_order_release);
    step_end(names);
    uint64_t size = to - journal->head, at = journal->head % journal->size, first = min_u64(size, journal->size - at);
    punch(journal, at, first);
    punch(journal, 0, size - first);
    step_begin(names);
    journal->head = to;
    atomic_store_explicit(&journal->header->head, to, memory_order_release);
    if (journal->held_untold) {
        journal_publish(journal);
        tell_held(names);
    }
    step_end(names);
}

void kvfs_names_journal_idle(struct kvfs_names *names) {
    step_begin(names);
    journal_commit_begin(names);
    step_end(names);
    journal_commit_end(names);
}

/* ---- making, reading, attaching ---- */

int kvfs_journal_make(uint64_t size) {
    if (size < KVFS_JOURNAL_SIZE_MIN || size > KVFS_JOURNAL_SIZE_MAX || size % PAGE)
        return -EINVAL;
    struct journal_header header = {.magic = JOURNAL_MAGIC, .version = KVFS_JOURNAL_VERSION, .header_size = JOURNAL_HEADER_SIZE, .size = size};
    while (!header.id)
        if (getrandom(&header.id, sizeof(header.id), 0) != sizeof(header.id))
            return -EIO;
    header.checksum = kvfs_checksum(&header, offsetof(struct journal_header, checksum), 0);
    return sealed_create("kvfs-journal", size, &header, sizeof(header));
}

/* Map a journal, and take its header's word for nothing. 0 or -errno. */
static int map(int fd, bool write, struct journal *out) {
    uint32_t version;
    int r = sealed_version(fd, JOURNAL_MAGIC, KVFS_JOURNAL_OLDEST, KVFS_JOURNAL_VERSION, &version);
    *out = (struct journal){.version = version};
    if (r < 0)
        return r;
    int64_t size = sealed_size(fd);
    if (size < KVFS_JOURNAL_SIZE_MIN || (uint64_t)size > KVFS_JOURNAL_SIZE_MAX || size % KVFS_PAGE_SIZE)
        return -EBADMSG;
    void *memory = mmap(NULL, (uint64_t)size, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return -errno;
    struct journal_header *header = memory;
    if (header->header_size != JOURNAL_HEADER_SIZE || header->size != (uint64_t)size || !header->id ||
        header->checksum != kvfs_checksum(header, offsetof(struct journal_header, checksum), 0))
        r = -EBADMSG;
    out->header = header;
    out->ring = (uint8_t *)memory + JOURNAL_HEADER_SIZE;
    out->size = (uint64_t)size - JOURNAL_HEADER_SIZE;
    out->id = header->id;
    out->head = atomic_load_explicit(&header->head, memory_order_acquire);
    out->tail = atomic_load_explicit(&header->tail, memory_order_acquire);
    out->sequence = atomic_load_explicit(&header->sequence, memory_order_acquire);
    if (r == 0 && (out->head > out->tail || out->tail - out->head > out->size || out->head % 8 || out->tail % 8 || out->tail > UINT64_MAX / 2 ||
                   out->sequence > UINT64_MAX / 2 || atomic_load_explicit(&header->durable, memory_order_acquire) > out->sequence))
        r = -EBADMSG;
    if (r < 0)
        munmap(memory, (uint64_t)size);
    return r;
}

static void unmap(struct journal *journal) { munmap(journal->header, journal->size + JOURNAL_HEADER_SIZE); }

int kvfs_journal_check(int fd, struct kvfs_versions *out) {
    struct journal journal;
    *out = (struct kvfs_versions){.oldest = KVFS_JOURNAL_OLDEST, .newest = KVFS_JOURNAL_VERSION};
    int r = map(fd, false, &journal);
    out->found = journal.version;
    if (r == 0)
        unmap(&journal);
    return r;
}

static bool record_fits(const struct kvfs_journal_entry *told, const void *data) {
    struct kvfs_inode_record record;
    if (told->data_size < sizeof(record))
        return false;
    memcpy(&record, data, sizeof(record));
    uint64_t parts = sizeof(record) + round_up(record.name_size, 8) + (uint64_t)record.extent_count * sizeof(struct kvfs_extent) + record.xattr_size;
    return record.record_size == told->data_size && record.record_size % 8 == 0 && parts <= told->data_size && told->data_size < parts + 8 &&
           record.inode && record.inode == told->inode && record.name_size <= KVFS_NAME_MAX;
}

/* The entry at a position, its data copied behind it. False: there is none that proves itself. */
static bool entry_at_position(const struct journal *journal, uint64_t position, uint64_t before, struct kvfs_journal_entry *out) {
    struct journal_entry entry;
    if (journal->tail - position < sizeof(entry))
        return false;
    ring_read(journal, position, &entry, sizeof(entry));
    const struct kvfs_journal_entry *told = &entry.told;
    if (told->size > journal->tail - position || told->data_size > DATA_MAX || told->size != sizeof(entry) + round_up(told->data_size, 8) ||
        told->sequence <= before || told->sequence > journal->sequence)
        return false;
    ring_read(journal, position + sizeof(entry), out + 1, told->data_size);
    memset((uint8_t *)(out + 1) + told->data_size, 0, round_up(told->data_size, 8) - told->data_size);
    *out = *told;
    if (entry.checksum != entry_checksum(told, kvfs_checksum(out + 1, told->data_size, journal->id)))
        return false;
    switch (told->kind) {
    case KVFS_JOURNAL_PUT: return record_fits(told, out + 1);
    case KVFS_JOURNAL_REMOVE: return told->inode && !told->data_size;
    default: return false;
    }
}

/* All whole steps, from the head on. NULL: no memory. *tail: where they end. */
static uint8_t *entries(const struct journal *journal, struct kvfs_journal_found *found, uint64_t *tail) {
    uint8_t *out = malloc(journal->tail - journal->head + 8);
    uint64_t at = journal->head, before = 0, size = 0, count = 0;
    *tail = journal->head;
    while (out) {
        struct kvfs_journal_entry *entry = (struct kvfs_journal_entry *)(void *)(out + size);
        if (!entry_at_position(journal, at, before, entry))
            break;
        before = entry->sequence;
        at += entry->size;
        size += sizeof(*entry) + round_up(entry->data_size, 8);
        count++;
        if (entry->flags & KVFS_JOURNAL_LAST) {
            found->size = size;
            found->count = count;
            *tail = at;
        }
    }
    return out;
}

const void *kvfs_journal_read(int fd, struct kvfs_journal_found *found, int *r) {
    struct journal journal;
    uint64_t tail;
    memset(found, 0, sizeof(*found));
    *r = map(fd, false, &journal);
    if (*r < 0)
        return NULL;
    found->id = journal.id;
    found->durable = atomic_load(&journal.header->durable);
    found->sequence = journal.sequence;
    void *out = entries(&journal, found, &tail);
    found->refused = journal.tail - tail;
    unmap(&journal);
    if (!out)
        *r = -ENOMEM;
    return out;
}

void kvfs_journal_free(const void *read) { free((void *)(uintptr_t)read); }

int kvfs_names_journal(struct kvfs_names *names, int fd) {
    struct kvfs_journal_found found = {0};
    struct journal *journal = calloc(1, sizeof(*journal));
    int r = journal ? map(fd, true, journal) : -ENOMEM;
    if (r < 0) {
        free(journal);
        return r;
    }
    uint8_t *all = entries(journal, &found, &journal->end);
    for (uint64_t at = 0, position = journal->head, step = position; all && at < found.size;) {
        const struct kvfs_journal_entry *entry = (const void *)(all + at);
        asked_add(journal, entry->transport, entry->unique, step, true);
        position += entry->size;
        step = entry->flags & KVFS_JOURNAL_LAST ? position : step;
        at += sizeof(*entry) + round_up(entry->data_size, 8);
    }
    free(all);
    if (!all) {
        unmap(journal);
        free(journal);
        return -ENOMEM;
    }
    journal->tail = journal->end;
    journal->last_sequence = journal->sequence;
    atomic_store(&journal->header->tail, journal->tail);
    atomic_store(&journal->header->durable, journal->sequence);
    step_begin(names);
    assert(!names->journal);
    names->journal = journal;
    step_end(names);
    return 0;
}

void journal_destroy(struct journal *journal) {
    if (!journal)
        return;
    unmap(journal);
    free(journal->asked);
    free(journal);
}

/* ---- requests ---- */

void kvfs_names_request(uint64_t transport, uint64_t unique) {
    request.transport = transport;
    request.unique = unique;
}

bool names_are_asked(void) { return request.unique != 0; }

int kvfs_names_was_asked(struct kvfs_names *names, uint64_t transport, uint64_t unique) {
    if (!names->journal)
        return 0;
    step_begin(names);
    int64_t at = asked_find(names->journal, transport, unique);
    int asked = at >= 0 && names->journal->asked[at].inherited;
    step_end(names);
    return asked;
}

void kvfs_names_answered(struct kvfs_names *names, uint64_t transport, uint64_t unique) {
    if (!names->journal)
        return;
    step_begin(names);
    int64_t at = asked_find(names->journal, transport, unique);
    if (at >= 0)
        asked_drop(names->journal, (uint32_t)at);
    step_end(names);
}

void kvfs_names_journal_settled(struct kvfs_names *names) {
    if (!names->journal)
        return;
    step_begin(names);
    for (uint32_t i = names->journal->asked_count; i-- > 0;)
        if (names->journal->asked[i].inherited)
            asked_drop(names->journal, i);
    step_end(names);
}

/* ---- commits ---- */

int kvfs_names_journal_mark(struct kvfs_names *names, uint64_t *id, uint64_t *sequence) {
    step_begin(names);
    struct journal *journal = names->journal;
    if (journal) {
        *id = journal->id;
        *sequence = journal->mark_sequence;
    }
    step_end(names);
    return journal != NULL;
}

bool journal_is_full(const struct journal *journal) { return journal && journal->tail - journal->head > journal->size / 8 * 7; }

int kvfs_names_journal_is_full(struct kvfs_names *names) {
    step_begin(names);
    bool full = journal_is_full(names->journal);
    step_end(names);
    return full;
}

int kvfs_names_journal_fill(struct kvfs_names *names, struct kvfs_journal_fill *out) {
    step_begin(names);
    const struct journal *journal = names->journal;
    if (journal)
        *out = (struct kvfs_journal_fill){journal->size, journal->tail - journal->head, journal->lost, journal->asked_count};
    step_end(names);
    return journal != NULL;
}
