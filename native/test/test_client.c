/* sources: base block io client */
/* libkvfs without a daemon: a test double of it listens on a unix socket, keeps a real block table, and places blocks on real device files
 * (O_DIRECT where the file system has it). What it proves under the sanitizers: what is put is what is got at any size, alignment and
 * layout; blocks that move, are replaced or evicted while they are read never give wrong bytes; devices that fail, lie or stay silent become
 * misses within the deadline, and what they owe is known; no reply of the daemon, however wrong, is believed. */
#include "client/client.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define DEVICES 4u
#define ZONE ((uint64_t)4 << 20)
#define SEGMENTS 10u
#define ZONES_OFFSET ((uint64_t)1 << 20)
#define SECRET 0x1234567890abcdefull
#define RUNS_MAX 3u
#define CONNECTIONS_MAX 64u
#define TEAM 2u                         /* inode numbers */
#define SPACE 3u
#define SHARD 256u
#define BLOCK 1000u
#define BLOCKS_MAX 60000u
#define GUARD 4096u

/* ---- the double of the daemon: the pool ---- */

struct block {
    char name[2 * KVFS_KEY_MAX];
    uint32_t name_size;
    int connection;                     /* that reserved it; -1: nobody */
    bool live, late;                    /* late: its client said that its writes may still land */
    uint64_t size, seed;
    uint32_t header_pages, run_count;
    struct kvfs_run runs[RUNS_MAX];
    struct kvfs_inode_record record;
};

struct bytes { uint8_t *data; uint64_t size, capacity; };

/* What the double does wrong. */
enum trick {
    HONEST, SILENT, HALF_WELCOME_FRAME, OTHER_VERSION, OTHER_TYPE, SHORT_WELCOME, TRUNCATED_WELCOME, HUGE_WELCOME, NO_DEVICES, MANY_DEVICES,
    WIDE_STRIPE, MANY_SEGMENTS, ZONE_OF_0, BAD_MEMBER, NO_DESCRIPTORS, FEW_DESCRIPTORS, EXTRA_DESCRIPTORS, UNSEALED_TABLE, ZERO_TABLE,
    OTHER_EPOCH, OTHER_SECRET, REFUSE, REFUSE_WITHOUT_SENTENCE, TRICKS_OF_WELCOME,
    HANG, HALF_FRAME, HALF_PAYLOAD, WRONG_ID, WRONG_ANSWER, HUGE_ANSWER, EMPTY_ANSWER, LONG_ANSWER, RANDOM_ANSWER, STATUS_MIN,
    STATUS_POSITIVE, STATUS_ERROR, HANG_UP, GOODBYE_INSTEAD, TRICKS_OF_ANSWERS,
    RUN_BEYOND, RUN_TOO_LONG, RUNS_OF_0, RECORD_TOO_LARGE, RECORD_OF_OTHER, HEADER_OF_0, HEADER_TOO_SMALL, EXTENT_BEYOND, TRICKS_OF_RESERVE
};

static struct {
    pthread_mutex_t lock;
    pthread_t thread;
    bool running, direct;
    char directory[64];
    int devices[DEVICES], devices_read[DEVICES], listener, wake[2];
    struct geometry geometry;           /* for header_build */
    struct kvfs_member members[SEGMENTS * DEVICES];
    struct kvfs_table *table;
    uint64_t epoch, generations[SEGMENTS];
    uint8_t uuid[16];
    uint32_t cursors[RUNS_MAX], currents[RUNS_MAX], victim;
    struct block *blocks;
    uint32_t block_count;
    uint64_t version;
    int connections[CONNECTIONS_MAX];
    /* What tests set. */
    uint32_t split;                     /* runs a block has */
    bool header_alone, read_only, incomplete, writes_lost;
    uint32_t header_extra;              /* pages more than a header needs */
    enum trick trick;
    uint16_t trick_type;                /* the request it is played on */
    uint32_t reservation_ms;
    int32_t refuse_odd, fail_odd;       /* error of every other item of RESERVE, COMMIT */
    uint32_t honest;                    /* requests of trick_type before the trick is played */
    uint32_t held_until;                /* blocks reserved before any COMMIT is answered; then they are, the last one first */
    uint32_t room, room_in_all;         /* blocks that there is room for: reserved at one time, and ever */
    struct bytes held[8];
    uint32_t held_count;
    /* What they look at. */
    uint32_t accepted, reserved, committed, aborted, late, not_begun, lookups, reports, bad_blocks, reserves, commits, open, open_most;
    uint64_t hits, bad_inode, bad_segment;
    struct kvfs_client_statistics report;
} d;

static void locked(void) { pthread_mutex_lock(&d.lock); }
static void unlocked(void) { pthread_mutex_unlock(&d.lock); }

static void *pages_get(uint64_t pages) {
    void *memory;
    CHECK(posix_memalign(&memory, PAGE, (pages ? pages : 1) * PAGE) == 0);
    memset(memory, 0, pages * PAGE);
    return memory;
}

/* Pages of a segment, unit by unit; memory is page aligned. */
static void store_io(bool write, uint32_t segment, uint32_t page, uint8_t *data, uint64_t pages) {
    uint64_t offset = page * PAGE, size = pages * PAGE, unit = d.geometry.stripe_unit;
    while (size) {
        uint64_t index = offset / unit, inside = offset % unit, n = min_u64(size, unit - inside);
        struct kvfs_member member = d.members[segment * DEVICES + index % DEVICES];
        off_t at = (off_t)(ZONES_OFFSET + member.zone * ZONE + index / DEVICES * unit + inside);
        ssize_t done = write ? pwrite(d.devices[member.device], data, n, at) : pread(d.devices[member.device], data, n, at);
        CHECK_SAY(done == (ssize_t)n, "%zd of %llu bytes", done, (unsigned long long)n);
        data += n, offset += n, size -= n;
    }
}

static struct block *block_of(uint64_t inode) {
    CHECK(inode >= BLOCK && inode < BLOCK + d.block_count);
    return &d.blocks[inode - BLOCK];
}

/* A segment is used again under a new generation; what lies in it is gone. */
static void segment_reuse(uint32_t segment) {
    for (uint32_t i = 0; i < d.block_count; i++)
        for (uint32_t k = 0; d.blocks[i].live && k < d.blocks[i].run_count; k++)
            if (d.blocks[i].runs[k].segment == segment) {
                CHECK(kvfs_table_remove(d.table, BLOCK + i, 0) == 0);
                d.blocks[i].live = false;
            }
    d.generations[segment]++;
}

static bool segment_reserved(uint32_t segment) {
    for (uint32_t i = 0; i < d.block_count; i++)
        for (uint32_t k = 0; d.blocks[i].connection >= 0 && k < d.blocks[i].run_count; k++)
            if (d.blocks[i].runs[k].segment == segment)
                return true;
    return false;
}

static bool segment_held(uint32_t segment) {
    for (uint32_t i = 0; i < RUNS_MAX; i++)
        if (d.currents[i] == segment)
            return true;
    return segment_reserved(segment);
}

/* Behind it are the summaries: no run lies there. */
static uint32_t runs_end(void) {
    uint32_t summary_pages = d.geometry.segment_pages / 64 > 2 ? d.geometry.segment_pages / 64 : 2;
    return d.geometry.segment_pages - 2 * summary_pages;
}

/* Run i of every block goes to stream i: the runs of one block lie in different segments. */
static struct kvfs_run allocate(uint32_t stream, uint32_t pages) {
    CHECK(pages < runs_end());
    if (d.currents[stream] == UINT32_MAX || d.cursors[stream] + pages > runs_end()) {
        d.currents[stream] = UINT32_MAX;
        for (uint32_t tries = 0; segment_held(d.victim); tries++) {
            CHECK(tries < SEGMENTS);
            d.victim = (d.victim + 1) % SEGMENTS;
        }
        segment_reuse(d.victim);
        d.currents[stream] = d.victim;
        d.cursors[stream] = 1;
        d.victim = (d.victim + 1) % SEGMENTS;
    }
    struct kvfs_run run = {d.generations[d.currents[stream]], d.currents[stream], d.cursors[stream], pages, 0};
    d.cursors[stream] += pages;
    return run;
}

static uint32_t directory_record(uint8_t *out, uint64_t inode, uint64_t parent, const char *name) {
    struct kvfs_inode_record r = {.kind = KVFS_KIND_DIRECTORY, .name_size = (uint16_t)strlen(name), .inode = inode, .parent = parent,
                                  .version = 1, .mode = 040755, .nlink = 2};
    r.record_size = (uint32_t)(sizeof(r) + round_up(r.name_size, 8));
    memset(out, 0, r.record_size);
    memcpy(out, &r, sizeof(r));
    memcpy(out + sizeof(r), name, r.name_size);
    return r.record_size;
}

static void directory_put(uint64_t inode, uint64_t parent, const char *name) {
    uint8_t record[256];
    if (kvfs_table_load(d.table, record, directory_record(record, inode, parent, name)) != 1)
        CHECK(false);
}

static uint64_t shard_inode(const char *name) {
    unsigned byte;
    CHECK(sscanf(name, "%2x", &byte) == 1);
    return SHARD + byte;
}

/* A place for a block, and what its header is to say. record holds the record, extents included, when it returns. */
static struct block *block_place(const char *name, uint32_t name_size, uint64_t size, uint32_t split, uint8_t *record,
                                 uint32_t *record_size, uint8_t *ancestors, uint32_t *ancestors_size, uint64_t hole_from,
                                 uint64_t hole_to) {
    CHECK(d.block_count < BLOCKS_MAX);
    struct block *block = &d.blocks[d.block_count++];
    uint64_t inode = BLOCK + d.block_count - 1, parent = shard_inode(name);
    char shard[3] = {name[0], name[1], 0};
    uint32_t pages = (uint32_t)pages_of(size), fixed = (uint32_t)(sizeof(struct kvfs_inode_record) + round_up(name_size, 8));
    *ancestors_size = directory_record(ancestors, parent, SPACE, shard);
    *ancestors_size += directory_record(ancestors + *ancestors_size, SPACE, TEAM, "llama");
    *ancestors_size += directory_record(ancestors + *ancestors_size, TEAM, 1, "team");
    memset(block, 0, sizeof(*block));
    memcpy(block->name, name, name_size);
    block->name_size = name_size;
    block->connection = -1;
    block->size = size;
    block->header_pages = kvfs_header_pages(size, fixed, *ancestors_size, RUNS_MAX + 1) + d.header_extra;
    /* File pages of each run; a hole lies between the first and the second. */
    uint32_t ends[RUNS_MAX], starts[RUNS_MAX];
    if (hole_to)
        split = 2;
    split = pages < split ? 1 : split;
    for (uint32_t i = 0; i < split; i++) {
        starts[i] = i ? ends[i - 1] : 0;
        ends[i] = i + 1 == split ? pages : d.header_alone ? pages * i / (split - 1 ? split - 1 : 1) : pages * (i + 1) / split;
    }
    if (hole_to)
        ends[0] = (uint32_t)(hole_from / PAGE), starts[1] = (uint32_t)(hole_to / PAGE);
    struct kvfs_extent extents[RUNS_MAX];
    uint32_t extent_count = 0;
    block->run_count = split;
    for (uint32_t i = 0; i < split; i++) {
        uint32_t before = i ? 1 : block->header_pages;
        block->runs[i] = allocate(i, before + ends[i] - starts[i]);
        if (ends[i] > starts[i])
            extents[extent_count++] = (struct kvfs_extent){block->runs[i].generation, block->runs[i].segment, block->runs[i].page + before,
                                                           ends[i] - starts[i], starts[i]};
    }
    if (split == 1)
        extent_count = 0;
    struct kvfs_inode_record r = {.record_size = (uint32_t)(fixed + extent_count * sizeof(*extents)), .kind = KVFS_KIND_FILE,
                                  .flags = KVFS_INODE_SEALED, .name_size = (uint16_t)name_size, .inode = inode, .parent = parent,
                                  .version = ++d.version, .size = size,
                                  .generation = block->runs[0].generation, .segment = block->runs[0].segment, .page = block->runs[0].page,
                                  .header_pages = block->header_pages, .extent_count = extent_count, .mode = 0100644, .nlink = 1};
    memset(record, 0, r.record_size);
    memcpy(record, &r, sizeof(r));
    memcpy(record + sizeof(r), name, name_size);
    memcpy(record + fixed, extents, extent_count * sizeof(*extents));
    *record_size = r.record_size;
    block->record = r;
    return block;
}

/* The name leads to this block from now on. */
static void block_enter(struct block *block) {
    struct kvfs_record record, old;
    record_from_inode(&block->record, &record);
    if (kvfs_table_find_name(d.table, record.parent, block->name, block->name_size, &old) == 0 && old.inode != record.inode)
        block_of(old.inode)->live = false;
    CHECK(kvfs_table_put(d.table, &record, block->name, block->name_size, 0) == 0);
    block->live = true;
    block->connection = -1;
}

/* As the daemon writes a block itself. With old, the block moves: its number, name and bytes stay. */
static uint64_t block_write(const char *name, uint32_t name_size, const uint8_t *data, uint64_t size, uint32_t split, uint64_t hole_from,
                            uint64_t hole_to, struct block *old) {
    static uint8_t record[4096], ancestors[1024];
    uint32_t record_size, ancestors_size, count = d.block_count, page = 0;
    struct block *block = block_place(name, name_size, size, split, record, &record_size, ancestors, &ancestors_size, hole_from, hole_to);
    struct kvfs_inode_record r;
    memcpy(&r, record, sizeof(r));
    if (old && !old->live) { /* placing it has evicted it */
        d.block_count = count;
        return 0;
    }
    if (old) {
        r.inode = (uint64_t)(old - d.blocks) + BLOCK;
        old->header_pages = block->header_pages;
        old->run_count = block->run_count;
        memcpy(old->runs, block->runs, sizeof(old->runs));
        block = old;
        d.block_count = count;
        memcpy(record, &r, sizeof(r));
    }
    uint32_t extents_size = r.extent_count * (uint32_t)sizeof(struct kvfs_extent), leaf_count = (uint32_t)pages_of(size);
    uint8_t *copy = pages_get(leaf_count), extent_records[RUNS_MAX * sizeof(struct kvfs_extent)], *spare = pages_get(1);
    uint32_t *leaves = malloc((leaf_count + 1) * sizeof(*leaves));
    struct desc *desc = desc_new(block->header_pages);
    CHECK(leaves && desc);
    copy_bytes(copy, data, size);
    kvfs_leaf_checksums(copy, size, SECRET, leaves);
    memcpy(extent_records, record + record_size - extents_size, extents_size);
    struct kvfs_extent whole = {r.generation, r.segment, r.page + block->header_pages, leaf_count, 0};
    CHECK(header_build(&d.geometry, desc, record, record_size - extents_size, ancestors, ancestors_size,
                       r.extent_count ? (void *)extent_records : (void *)&whole, r.extent_count ? r.extent_count : leaf_count > 0, leaves,
                       block->runs[0].page_count) == 0);
    for (uint32_t i = 0; i < block->run_count; i++) {
        struct kvfs_run *run = &block->runs[i];
        uint32_t before = i ? 1 : block->header_pages, pages = run->page_count - before;
        if (i == 1 && hole_to)
            page = (uint32_t)(hole_to / PAGE);
        if (i)
            extent_header_build(&d.geometry, spare, r.inode, run, page);
        store_io(true, run->segment, run->page, i ? spare : desc->header, before);
        if (pages)
            store_io(true, run->segment, run->page + before, copy + page * PAGE, pages);
        page += pages;
    }
    desc_put(desc);
    free(leaves);
    free(copy);
    free(spare);
    if (old) {
        struct kvfs_record moved;
        block->record = r;
        record_from_inode(&r, &moved);
        CHECK(kvfs_table_update(d.table, &moved) == 0);
    } else {
        block_enter(block);
    }
    return r.inode;
}

/* One bit of a page of a block; page -1 - i is page i of its header. */
static void block_corrupt(struct block *block, int32_t page) {
    uint8_t *memory = pages_get(1);
    uint32_t at = page < 0 ? block->runs[0].page + (uint32_t)(-1 - page) : block->runs[0].page + block->header_pages + (uint32_t)page;
    store_io(false, block->runs[0].segment, at, memory, 1);
    memory[17] ^= 4;
    store_io(true, block->runs[0].segment, at, memory, 1);
    free(memory);
}

/* ---- the double of the daemon: what it says ---- */

static void add(struct bytes *out, const void *data, uint64_t size) {
    uint64_t padded = round_up(size, 8);
    if (out->size + padded > out->capacity) {
        out->capacity = (out->size + padded) * 2 + 4096;
        out->data = realloc(out->data, out->capacity);
        CHECK(out->data);
    }
    if (!size)
        return;
    memcpy(out->data + out->size, data, size);
    memset(out->data + out->size + size, 0, padded - size);
    out->size += padded;
}

static bool say(int fd, const void *data, uint64_t size) {
    const uint8_t *at = data;
    while (size) {
        ssize_t n = send(fd, at, size, MSG_NOSIGNAL);
        if (n < 0)
            return false;
        at += n, size -= (uint64_t)n;
    }
    return true;
}

static bool hear(int fd, void *data, uint64_t size) { return size == 0 || recv(fd, data, size, MSG_WAITALL) == (ssize_t)size; }

static void say_descriptors(int fd, const int *fds, uint32_t count) {
    union { char space[CMSG_SPACE(sizeof(int) * 16)]; struct cmsghdr align; } control = {0};
    struct wire_frame frame = {.type = WIRE_DESCRIPTORS};
    struct iovec iov = {&frame, sizeof(frame)};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    if (count) {
        message.msg_control = control.space;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * count);
        struct cmsghdr *part = CMSG_FIRSTHDR(&message);
        part->cmsg_level = SOL_SOCKET;
        part->cmsg_type = SCM_RIGHTS;
        part->cmsg_len = CMSG_LEN(sizeof(int) * count);
        memcpy(CMSG_DATA(part), fds, sizeof(int) * count);
    }
    sendmsg(fd, &message, MSG_NOSIGNAL);
}

static int false_table(bool sealed) {
    int fd = memfd_create("no-table", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, 1 << 20) == 0);
    if (sealed)
        CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    return fd;
}

/* False: hang up. */
static bool say_welcome(int fd) {
    struct wire_hello hello;
    struct bytes out = {0};
    enum trick trick = d.trick;
    if (!hear(fd, &hello, sizeof(hello)) || memcmp(hello.magic, "KVFSCLI1", 8) != 0 || hello.version != KVFS_WIRE_VERSION)
        return false;
    if (trick == SILENT)
        return true;
    if (trick == REFUSE || trick == REFUSE_WITHOUT_SENTENCE) {
        const char *sentence = trick == REFUSE ? "no, not you" : "";
        struct wire_frame no = {.size = (uint32_t)strlen(sentence), .type = WIRE_HELLO, .status = trick == REFUSE ? -EACCES : INT32_MIN};
        say(fd, &no, sizeof(no));
        say(fd, sentence, no.size);
        return false;
    }
    struct wire_welcome w = {.version = KVFS_WIRE_VERSION, .writable = !d.read_only && !(hello.flags & KVFS_READ_ONLY),
                             .mount_epoch = d.epoch, .secret = SECRET, .zone_size = ZONE, .stripe_unit = d.geometry.stripe_unit,
                             .stripe_width = DEVICES, .segment_count = SEGMENTS, .device_count = DEVICES, .reservation_ms = d.reservation_ms};
    memcpy(w.pool_uuid, d.uuid, 16);
    w.version += trick == OTHER_VERSION;
    w.mount_epoch += trick == OTHER_EPOCH;
    w.secret += trick == OTHER_SECRET;
    w.device_count = trick == NO_DEVICES ? 0 : trick == MANY_DEVICES ? UINT32_MAX : DEVICES;
    w.stripe_width = trick == WIDE_STRIPE ? 33 : DEVICES;
    w.segment_count = trick == MANY_SEGMENTS ? UINT32_MAX : SEGMENTS;
    w.zone_size = trick == ZONE_OF_0 ? 0 : ZONE;
    add(&out, &w, sizeof(w));
    for (uint64_t i = 0, offset = ZONES_OFFSET; i < DEVICES; i++)
        add(&out, &offset, 8);
    struct kvfs_member saved = d.members[5];
    if (trick == BAD_MEMBER)
        d.members[5].device = DEVICES;
    add(&out, d.members, sizeof(d.members));
    d.members[5] = saved;
    struct wire_frame frame = {.size = (uint32_t)out.size, .type = trick == OTHER_TYPE ? WIRE_LIST : WIRE_HELLO};
    if (trick == SHORT_WELCOME)
        frame.size = 20;
    if (trick == HUGE_WELCOME)
        frame.size = UINT32_MAX;
    bool good = say(fd, &frame, trick == HALF_WELCOME_FRAME ? 8 : sizeof(frame));
    if (trick != HALF_WELCOME_FRAME)
        good = good && say(fd, out.data, trick == SHORT_WELCOME ? 20 : trick == TRUNCATED_WELCOME ? out.size / 2 : out.size);
    free(out.data);
    if (trick == TRUNCATED_WELCOME)
        return false;
    if (trick == HALF_WELCOME_FRAME || !good)
        return good;
    int fds[DEVICES + 2] = {kvfs_table_fd(d.table)}, table = -1;
    for (uint32_t i = 0; i < DEVICES; i++)
        fds[1 + i] = w.writable ? d.devices[i] : d.devices_read[i];
    fds[1 + DEVICES] = fds[0];
    if (trick == UNSEALED_TABLE || trick == ZERO_TABLE)
        table = fds[0] = false_table(trick == ZERO_TABLE);
    if (trick == NO_DESCRIPTORS) {
        say_descriptors(fd, NULL, 0);
    } else if (trick == FEW_DESCRIPTORS) {
        say_descriptors(fd, fds, DEVICES);
    } else if (trick == EXTRA_DESCRIPTORS) {
        say_descriptors(fd, fds, DEVICES + 2);
    } else { /* in two frames, as a pool of many devices needs them */
        say_descriptors(fd, fds, 2);
        say_descriptors(fd, fds + 2, DEVICES - 1);
    }
    if (table >= 0)
        close(table);
    return true;
}

/* Where items begin; *where is filled. */
static uint8_t *items_of(uint8_t *payload, struct wire_where *where) {
    memcpy(where, payload, sizeof(*where));
    CHECK(where->base == 1 && where->space_size == 10 && memcmp(payload + sizeof(*where), "team/llama", 10) == 0);
    return payload + sizeof(*where) + 16;
}

static void reserve(int connection, uint8_t *payload, struct bytes *out) {
    static uint8_t record[8192], ancestors[1024];
    struct wire_where where;
    uint8_t *at = items_of(payload, &where);
    bool full = false;
    d.reserves++;
    for (uint32_t i = 0; i < where.count; i++) {
        struct wire_reserve item;
        memcpy(&item, at, sizeof(item));
        char *name = (char *)at + sizeof(item), shard[3] = {name[0], name[1], 0};
        at += sizeof(item) + round_up(item.name_size, 8);
        struct wire_reserved reserved = {.error = i % 2 ? d.refuse_odd : 0};
        if (item.size / PAGE >= runs_end() * 2 / 3 * d.split)
            reserved.error = -EFBIG;
        full = full || d.open >= d.room || d.reserved >= d.room_in_all;
        if (full)
            reserved.error = -ENOSPC;
        if (reserved.error) {
            add(out, &reserved, sizeof(reserved));
            continue;
        }
        directory_put(TEAM, 1, "team");
        directory_put(SPACE, TEAM, "llama");
        directory_put(shard_inode(name), SPACE, shard);
        uint32_t record_size, ancestors_size;
        struct block *block = block_place(name, item.name_size, item.size, d.split, record, &record_size, ancestors, &ancestors_size, 0, 0);
        block->connection = connection;
        reserved = (struct wire_reserved){.reservation = (uint64_t)(block - d.blocks) + BLOCK, .header_pages = block->header_pages,
                                          .run_count = block->run_count, .record_size = record_size, .ancestors_size = ancestors_size};
        struct wire_run runs[RUNS_MAX];
        memcpy(runs, block->runs, sizeof(runs));
        static_assert(sizeof(runs) == sizeof(block->runs), "the same fields");
        struct kvfs_inode_record r;
        memcpy(&r, record, sizeof(r));
        if (d.trick == RUN_BEYOND)
            r.segment = runs[0].segment = SEGMENTS + 3;
        if (d.trick == RUN_TOO_LONG)
            runs[reserved.run_count - 1].page_count++;
        if (d.trick == RUNS_OF_0)
            reserved.run_count = 0;
        if (d.trick == RECORD_TOO_LARGE)
            reserved.record_size = 1u << 30;
        if (d.trick == RECORD_OF_OTHER)
            r.size++;
        if (d.trick == HEADER_OF_0)
            reserved.header_pages = 0;
        if (d.trick == HEADER_TOO_SMALL && block->header_pages > 1)
            reserved.header_pages--, runs[0].page_count--;
        memcpy(record, &r, sizeof(r));
        if (d.trick == EXTENT_BEYOND && r.extent_count)
            memset(record + record_size - 16, 0xff, 4);
        add(out, &reserved, sizeof(reserved));
        add(out, runs, reserved.run_count * sizeof(*runs));
        add(out, record, record_size);
        add(out, ancestors, ancestors_size);
        d.reserved++;
        d.open++;
        d.open_most = d.open > d.open_most ? d.open : d.open_most;
    }
}

static void commit(uint8_t *payload, struct bytes *out) {
    uint64_t count;
    memcpy(&count, payload, 8);
    d.commits++;
    for (uint64_t i = 0; i < count; i++) {
        struct wire_commit item;
        memcpy(&item, payload + 8 + i * sizeof(item), sizeof(item));
        struct block *block = block_of(item.reservation);
        int64_t result = item.error ? item.error : i % 2 ? d.fail_odd : 0;
        if (block->late) { /* it was answered before */
            CHECK(item.error == -EIO);
            block->late = false;
            d.late--;
            add(out, &item.error, 8);
            continue;
        }
        CHECK(block->connection >= 0);
        block->late = item.error == -ETIMEDOUT;
        d.late += block->late;
        d.not_begun += item.error == -ECANCELED;
        block->connection = -1;
        d.open--;
        if (result == 0) {
            uint8_t *header = pages_get(block->header_pages);
            struct kvfs_block_header h;
            struct kvfs_inode_record r;
            store_io(false, block->runs[0].segment, block->runs[0].page, header, block->header_pages);
            CHECK(d.writes_lost || header_check(&d.geometry, header, block->header_pages, &h, &r) == 0); /* the client wrote what it was to */
            CHECK(d.writes_lost || memcmp(&r, &block->record, sizeof(r)) == 0);
            block_enter(block);
            free(header);
            d.committed++;
        } else {
            d.aborted++;
        }
        add(out, &result, 8);
    }
}

static void delete(uint8_t *payload, struct bytes *out) {
    struct wire_where where;
    uint8_t *at = items_of(payload, &where), *answer = calloc(where.count + 1, 1);
    for (uint32_t i = 0; i < where.count; i++) {
        uint64_t size;
        struct kvfs_record record;
        memcpy(&size, at, 8);
        if (kvfs_table_find_name(d.table, shard_inode((char *)at + 8), (char *)at + 8, (uint32_t)size, &record) == 0) {
            CHECK(kvfs_table_remove(d.table, record.inode, 0) == 0);
            block_of(record.inode)->live = false;
            answer[i] = 1;
        }
        at += 8 + round_up(size, 8);
    }
    add(out, answer, where.count);
    out->size = where.count;
    free(answer);
}

static int by_name(const void *a, const void *b) {
    const struct block *x = *(struct block *const *)a, *y = *(struct block *const *)b;
    int r = memcmp(x->name, y->name, min_u64(x->name_size, y->name_size));
    return r ? r : x->name_size < y->name_size ? -1 : x->name_size > y->name_size;
}

static void list(uint8_t *payload, struct bytes *out) {
    struct wire_where where;
    uint8_t *at = items_of(payload, &where);
    struct block after = {0}, *after_pointer = &after, **sorted = malloc((d.block_count + 1) * sizeof(*sorted));
    uint64_t size, count = 0, total = 0;
    memcpy(&size, at, 8);
    memcpy(after.name, at + 8, size);
    after.name_size = (uint32_t)size;
    for (uint32_t i = 0; i < d.block_count; i++)
        if (d.blocks[i].live)
            sorted[total++] = &d.blocks[i];
    qsort(sorted, total, sizeof(*sorted), by_name);
    add(out, &count, 8);
    for (uint64_t i = 0; i < total && count < where.count; i++)
        if (by_name(&sorted[i], &after_pointer) > 0) {
            size = sorted[i]->name_size;
            add(out, &size, 8);
            add(out, sorted[i]->name, size);
            count++;
        }
    memcpy(out->data, &count, 8);
    free(sorted);
}

/* This answer comes later. */
static void hold(const struct wire_frame *head, const uint8_t *data, uint64_t size) {
    CHECK(d.held_count < sizeof(d.held) / sizeof(d.held[0]));
    struct bytes *held = &d.held[d.held_count++];
    add(held, head, sizeof(*head));
    add(held, data, size);
    CHECK(held->size == sizeof(*head) + size);
}

/* False: hang up. */
static bool answer(int connection, int fd) {
    struct wire_frame frame;
    struct bytes out = {0};
    if (!hear(fd, &frame, sizeof(frame)))
        return false;
    CHECK(frame.size <= KVFS_WIRE_SIZE_MAX);
    uint8_t *payload = malloc(frame.size + 1u);
    bool good = hear(fd, payload, frame.size);
    int32_t status = 0;
    if (good && frame.type == WIRE_HITS) {
        CHECK(frame.size % 8 == 0);
        d.hits += frame.size / 8;
    } else if (good && frame.type == WIRE_REPORT) {
        CHECK(frame.size == sizeof(d.report));
        memcpy(&d.report, payload, sizeof(d.report));
        d.reports++;
    } else if (good && frame.type == WIRE_BAD_BLOCK) {
        CHECK(frame.size == 16);
        memcpy(&d.bad_inode, payload, 8);
        memcpy(&d.bad_segment, payload + 8, 8);
        d.bad_blocks++;
    } else if (good) {
        enum trick trick = HONEST;
        if (frame.type == d.trick_type && d.trick != HONEST && d.honest-- == 0) {
            trick = d.trick;
            d.honest = 0;
        }
        if (frame.type == WIRE_RESERVE) {
            reserve(connection, payload, &out);
        } else if (frame.type == WIRE_COMMIT) {
            if (trick != HANG_UP)
                commit(payload, &out);
        } else if (frame.type == WIRE_DELETE) {
            delete(payload, &out);
        } else if (frame.type == WIRE_LIST) {
            list(payload, &out);
        } else if (frame.type == WIRE_LOOKUP) {
            uint64_t words[2];
            struct kvfs_record record;
            memcpy(words, payload, sizeof(words));
            CHECK(frame.size == 16 + round_up(words[1], 8));
            kvfs_table_set_complete(d.table, 1);
            status = kvfs_table_find_name(d.table, words[0], (char *)payload + 16, (uint32_t)words[1], &record);
            kvfs_table_set_complete(d.table, !d.incomplete);
            CHECK(status == 0 || status == -ENOENT);
            if (status == 0) {
                struct kvfs_inode_record r = {.record_size = sizeof(r), .kind = record.kind, .flags = record.flags, .inode = record.inode,
                                              .parent = record.parent, .version = record.version, .size = record.size,
                                              .generation = record.generation, .segment = record.segment, .page = record.page,
                                              .header_pages = record.header_pages, .extent_count = record.extent_count};
                add(&out, &r, sizeof(r));
            }
            d.lookups++;
        } else {
            CHECK_SAY(false, "a request of type %u", frame.type);
        }
        struct wire_frame head = {.size = (uint32_t)out.size, .type = frame.type, .status = status, .id = frame.id};
        struct bytes lie = {0};
        uint64_t size = out.size, seed = frame.id;
        head.id += trick == WRONG_ID;
        head.type = trick == WRONG_ANSWER ? WIRE_DESCRIPTORS : trick == GOODBYE_INSTEAD ? WIRE_GOODBYE : head.type;
        if (trick == HUGE_ANSWER)
            head.size = KVFS_WIRE_SIZE_MAX + 1;
        if (trick == EMPTY_ANSWER || trick == STATUS_MIN || trick == GOODBYE_INSTEAD)
            head.size = 0, size = 0;
        if (trick == STATUS_MIN)
            head.status = INT32_MIN;
        if (trick == STATUS_POSITIVE)
            head.status = 7;
        if (trick == STATUS_ERROR)
            head.status = -EIO, head.size = 0, size = 0;
        if (trick == RANDOM_ANSWER)
            for (uint64_t i = 0; i < out.size; i++)
                out.data[i] = (uint8_t)random_next(&seed);
        if (trick == LONG_ANSWER) {
            add(&lie, out.data, out.size);
            for (int i = 0; i < 3; i++)
                add(&lie, "trailing", 8);
            head.size = (uint32_t)lie.size, size = lie.size;
        }
        if (trick == HANG_UP)
            good = false;
        else if (trick == HALF_FRAME)
            say(fd, &head, 7);
        else if (frame.type == WIRE_COMMIT && d.reserved < d.held_until)
            hold(&head, out.data, size);
        else if (trick != HANG)
            good = say(fd, &head, sizeof(head)) && say(fd, lie.data ? lie.data : out.data, trick == HALF_PAYLOAD ? size / 2 : size);
        while (d.held_count && d.reserved >= d.held_until) {
            struct bytes *held = &d.held[--d.held_count];
            good = good && say(fd, held->data, held->size);
            free(held->data);
            *held = (struct bytes){0};
        }
        free(lie.data);
    }
    free(payload);
    free(out.data);
    return good;
}

static void hang_up(uint32_t i) {
    close(d.connections[i]);
    d.connections[i] = -1;
    for (uint32_t k = 0; k < d.block_count; k++)
        if (d.blocks[k].connection == (int)i) {
            d.blocks[k].connection = -1;
            d.open--;
        }
}

static void *daemon_main(void *nothing) {
    struct pollfd fds[CONNECTIONS_MAX + 2];
    for (;;) {
        for (uint32_t i = 0; i < CONNECTIONS_MAX; i++)
            fds[i] = (struct pollfd){.fd = d.connections[i], .events = POLLIN};
        fds[CONNECTIONS_MAX] = (struct pollfd){.fd = d.listener, .events = POLLIN};
        fds[CONNECTIONS_MAX + 1] = (struct pollfd){.fd = d.wake[0], .events = POLLIN};
        CHECK(poll(fds, CONNECTIONS_MAX + 2, -1) > 0 || errno == EINTR);
        if (fds[CONNECTIONS_MAX + 1].revents)
            return nothing;
        locked();
        for (uint32_t i = 0; i < CONNECTIONS_MAX; i++)
            if (fds[i].revents && !answer((int)i, d.connections[i]))
                hang_up(i);
        if (fds[CONNECTIONS_MAX].revents) {
            uint32_t i = 0;
            while (d.connections[i] >= 0)
                CHECK(++i < CONNECTIONS_MAX);
            d.connections[i] = accept4(d.listener, NULL, NULL, SOCK_CLOEXEC);
            CHECK(d.connections[i] >= 0);
            struct timeval limit = {.tv_sec = 5};
            setsockopt(d.connections[i], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
            setsockopt(d.connections[i], SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
            d.accepted++;
            if (!say_welcome(d.connections[i]))
                hang_up(i);
        }
        unlocked();
    }
}

/* A new mount: a new epoch, a new table of what is live. */
static void daemon_start(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    CHECK(!d.running);
    d.geometry.mount_epoch = ++d.epoch;
    CHECK(kvfs_table_create(BLOCKS_MAX + 1000, SECRET, d.epoch, &d.table) == 0);
    struct kvfs_record root = {.inode = 1, .parent = 1, .mode = 040755, .nlink = 2, .kind = KVFS_KIND_DIRECTORY};
    CHECK(kvfs_table_put(d.table, &root, "", 0, 0) == 0);
    for (uint32_t i = 0; i < d.block_count; i++)
        if (d.blocks[i].live) {
            char shard[3] = {d.blocks[i].name[0], d.blocks[i].name[1], 0};
            directory_put(TEAM, 1, "team");
            directory_put(SPACE, TEAM, "llama");
            directory_put(shard_inode(shard), SPACE, shard);
            block_enter(&d.blocks[i]);
        }
    kvfs_table_set_complete(d.table, !d.incomplete);
    snprintf(address.sun_path, sizeof(address.sun_path), "%s/control.sock", d.directory);
    unlink(address.sun_path);
    d.listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(d.listener, (struct sockaddr *)&address, sizeof(address)) == 0 && listen(d.listener, 64) == 0);
    CHECK(pipe2(d.wake, O_CLOEXEC) == 0);
    for (uint32_t i = 0; i < CONNECTIONS_MAX; i++)
        d.connections[i] = -1;
    CHECK(pthread_create(&d.thread, NULL, daemon_main, NULL) == 0);
    d.running = true;
}

static void daemon_stop(bool goodbye) {
    CHECK(write(d.wake[1], "x", 1) == 1);
    pthread_join(d.thread, NULL);
    close(d.listener);
    for (uint32_t i = 0; i < CONNECTIONS_MAX; i++)
        if (d.connections[i] >= 0) {
            struct wire_frame frame = {.type = WIRE_GOODBYE};
            if (goodbye)
                say(d.connections[i], &frame, sizeof(frame));
            hang_up(i);
        }
    close(d.wake[0]);
    close(d.wake[1]);
    kvfs_table_destroy(d.table);
    d.table = NULL;
    d.running = false;
}

/* A pool without blocks, and a daemon that behaves. */
static void pool_new(uint64_t stripe_unit) {
    CHECK(!d.running);
    d.geometry = (struct geometry){.secret = SECRET, .zone_size = ZONE, .stripe_unit = stripe_unit, .stripe_width = DEVICES,
                                   .segment_count = SEGMENTS};
    d.geometry.segment_size = ZONE * DEVICES;
    d.geometry.segment_pages = (uint32_t)(d.geometry.segment_size / PAGE);
    for (uint32_t i = 0; i < SEGMENTS; i++)
        d.generations[i]++;
    for (uint32_t i = 0; i < RUNS_MAX; i++)
        d.currents[i] = UINT32_MAX;
    d.victim = 0;
    d.block_count = 0;
    d.split = 1;
    d.header_alone = d.read_only = d.incomplete = d.writes_lost = false;
    d.trick = HONEST;
    d.trick_type = 0;
    d.reservation_ms = 30000;
    d.header_extra = 0;
    d.refuse_odd = d.fail_odd = 0;
    d.honest = d.held_until = 0;
    d.room = d.room_in_all = UINT32_MAX;
    d.reserves = d.commits = d.open = d.open_most = 0;
    d.accepted = d.reserved = d.committed = d.aborted = d.late = d.not_begun = d.lookups = d.reports = d.bad_blocks = 0;
    d.hits = 0;
    memset(d.uuid, 7, sizeof(d.uuid));
    daemon_start();
}

static void devices_open(void) {
    snprintf(d.directory, sizeof(d.directory), "%.32s/kvfs-client-XXXXXX", scratch());
    CHECK(mkdtemp(d.directory));
    d.direct = true;
    d.blocks = calloc(BLOCKS_MAX, sizeof(*d.blocks));
    pthread_mutex_init(&d.lock, NULL);
    for (uint32_t i = 0; i < DEVICES; i++) {
        char path[128];
        snprintf(path, sizeof(path), "%s/device%u", d.directory, i);
        d.devices[i] = open(path, O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
        if (d.devices[i] < 0) { /* tmpfs */
            d.devices[i] = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
            d.direct = false;
        }
        d.devices_read[i] = open(path, O_RDONLY | (d.direct ? O_DIRECT : 0) | O_CLOEXEC);
        CHECK(d.devices[i] >= 0 && d.devices_read[i] >= 0);
        off_t size = (off_t)(ZONES_OFFSET + ZONE * SEGMENTS);
        if (posix_fallocate(d.devices[i], 0, size))
            CHECK(ftruncate(d.devices[i], size) == 0);
        for (uint32_t s = 0; s < SEGMENTS; s++)
            d.members[s * DEVICES + i] = (struct kvfs_member){(i + s) % DEVICES, s};
    }
}

static void devices_close(void) {
    char path[128];
    for (uint32_t i = 0; i < DEVICES; i++) {
        snprintf(path, sizeof(path), "%s/device%u", d.directory, i);
        unlink(path);
        close(d.devices[i]);
        close(d.devices_read[i]);
    }
    snprintf(path, sizeof(path), "%s/control.sock", d.directory);
    unlink(path);
    CHECK(rmdir(d.directory) == 0);
    free(d.blocks);
}

/* ---- what the tests share ---- */

static uint64_t milliseconds(void) { return now_ns() / 1000000; }

/* Blocks whose first word is their seed, from which every other byte follows: a reader can tell whether one is whole. */
static void fill(uint8_t *data, uint64_t size, uint64_t seed) {
    uint64_t state = seed, word = seed;
    for (uint64_t at = 0; at < size; at += 8) {
        memcpy(data + at, &word, min_u64(8, size - at));
        word = random_next(&state);
    }
}

static bool filled(const uint8_t *data, uint64_t size, uint64_t seed) {
    uint64_t state = seed, word = seed;
    for (uint64_t at = 0; at < size; at += 8) {
        if (memcmp(data + at, &word, min_u64(8, size - at)) != 0)
            return false;
        word = random_next(&state);
    }
    return true;
}

struct batch {
    uint32_t count;
    struct kvfs_keys keys;
    uint8_t *key_data;
    uint32_t *key_sizes;
    struct kvfs_buffer *buffers;
    int64_t *results;
    uint8_t **memories;
    uint64_t *memory_sizes;
};

/* Keys are "key-<number>", numbers from first on; buffers lie `offset` behind a page's start, with a guard on both sides. */
static struct batch *batch_new(uint32_t first, uint32_t count, const uint64_t *sizes, uint32_t size_count, uint32_t offset) {
    struct batch *b = calloc(1, sizeof(*b));
    uint64_t used = 0;
    b->count = count;
    b->key_data = malloc((count + 1) * 24);
    b->key_sizes = malloc((count + 1) * sizeof(*b->key_sizes));
    b->buffers = calloc(count + 1, sizeof(*b->buffers));
    b->results = calloc(count + 1, sizeof(*b->results));
    b->memories = calloc(count + 1, sizeof(*b->memories));
    b->memory_sizes = calloc(count + 1, sizeof(*b->memory_sizes));
    for (uint32_t i = 0; i < count; i++) {
        b->key_sizes[i] = (uint32_t)sprintf((char *)b->key_data + used, "key-%u", first + i);
        used += b->key_sizes[i];
        uint64_t size = sizes[i % size_count];
        b->memory_sizes[i] = round_up(GUARD + offset + size + GUARD, PAGE);
        b->memories[i] = pages_get(b->memory_sizes[i] / PAGE);
        memset(b->memories[i], 0xa5, b->memory_sizes[i]);
        b->buffers[i] = (struct kvfs_buffer){b->memories[i] + GUARD + offset, size};
        b->results[i] = 12345;
    }
    b->keys = (struct kvfs_keys){b->key_data, b->key_sizes, count, 0};
    return b;
}

static void batch_free(struct batch *b) {
    for (uint32_t i = 0; i < b->count; i++)
        free(b->memories[i]);
    free(b->memories);
    free(b->memory_sizes);
    free(b->results);
    free(b->buffers);
    free(b->key_sizes);
    free(b->key_data);
    free(b);
}

static void batch_fill(struct batch *b, uint64_t version) {
    for (uint32_t i = 0; i < b->count; i++)
        fill(b->buffers[i].data, b->buffers[i].size, (version << 32) + i);
}

static void guards_check(const struct batch *b) {
    for (uint32_t i = 0; i < b->count; i++) {
        const uint8_t *data = b->buffers[i].data, *memory = b->memories[i], *end = memory + b->memory_sizes[i];
        for (const uint8_t *at = memory; at < data; at++)
            CHECK_SAY(*at == 0xa5, "%td bytes before buffer %u", data - at, i);
        for (const uint8_t *at = data + b->buffers[i].size; at < end; at++)
            CHECK_SAY(*at == 0xa5, "%td bytes behind buffer %u", at - data - (ptrdiff_t)b->buffers[i].size, i);
    }
}

/* Everything was read, and is what batch_fill made. */
static void batch_check(const struct batch *b, uint64_t version) {
    for (uint32_t i = 0; i < b->count; i++) {
        CHECK_SAY(b->results[i] == (int64_t)b->buffers[i].size, "block %u: %lld, %s", i, (long long)b->results[i], kvfs_error());
        CHECK_SAY(filled(b->buffers[i].data, b->buffers[i].size, (version << 32) + i), "block %u", i);
    }
    guards_check(b);
}

static struct kvfs_client *connect_with(struct kvfs_options options) {
    struct kvfs_client *client = NULL;
    options.size = sizeof(options);
    int r = client_open("/mnt/test", d.directory, 1, "team/llama", &options, &client);
    CHECK_SAY(r == 0, "%d: %s", r, kvfs_error());
    return client;
}

static struct kvfs_client *connect_plain(void) { return connect_with((struct kvfs_options){.timeout_ms = 30000}); }

static struct batch *put_batch(struct kvfs_client *client, uint32_t first, uint32_t count, const uint64_t *sizes, uint32_t size_count,
                               uint64_t version) {
    struct batch *b = batch_new(first, count, sizes, size_count, 0);
    batch_fill(b, version);
    int r = kvfs_put(client, &b->keys, b->buffers, b->results);
    CHECK_SAY(r == (int)count, "%d: %s", r, kvfs_error());
    for (uint32_t i = 0; i < count; i++)
        CHECK(b->results[i] == 0);
    return b;
}

static void batch_get(struct kvfs_client *client, struct batch *b, uint64_t version) {
    for (uint32_t i = 0; i < b->count; i++)
        memset(b->buffers[i].data, 0x11, b->buffers[i].size);
    int r = kvfs_get(client, &b->keys, b->buffers, b->results);
    CHECK_SAY(r == (int)b->count, "%d of %u: %s", r, b->count, kvfs_error());
    batch_check(b, version);
}

static struct kvfs_client_statistics statistics(struct kvfs_client *client) {
    struct kvfs_client_statistics out;
    CHECK(kvfs_client_statistics_get(client, &out) == 0);
    return out;
}

static void fault(struct kvfs_client *client, uint32_t device, uint32_t kind, uint32_t direction, uint32_t every, uint32_t value) {
    fault_set(&client->session->array.devices[device], kind, direction, every, value);
}

static void fault_all(struct kvfs_client *client, uint32_t kind, uint32_t direction, uint32_t every, uint32_t value) {
    for (uint32_t i = 0; i < DEVICES; i++)
        fault(client, i, kind, direction, every, value);
}

static uint64_t device_reads(struct kvfs_client *client) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < DEVICES; i++)
        total += atomic_load(&client->session->array.devices[i].reads);
    return total;
}

static void wait_idle(struct kvfs_client *client) {
    uint64_t until = milliseconds() + 30000;
    while (statistics(client).busy) {
        CHECK(milliseconds() < until);
        kvfs_busy(client, "", 1);
        usleep(1000);
    }
}

/* The block of a key, with the double's lock held. */
static struct block *block_named(const char *key) {
    char name[2 * KVFS_KEY_MAX];
    struct kvfs_record record;
    uint32_t size = key_hex((const uint8_t *)key, (uint32_t)strlen(key), name);
    if (kvfs_table_find_name(d.table, shard_inode(name), name, size, &record) < 0)
        return NULL;
    return block_of(record.inode);
}

static uint64_t inode_named(const char *key) {
    locked();
    struct block *block = block_named(key);
    unlocked();
    CHECK(block);
    return (uint64_t)(block - d.blocks) + BLOCK;
}

/* The block moves, and its old place is written again, with the double's lock held. */
static void block_move(struct block *block, uint32_t split) {
    uint8_t *data = pages_get(pages_of(block->size) + 1);
    struct block old = *block;
    uint32_t page = 0;
    for (uint32_t i = 0; i < block->run_count; i++) {
        uint32_t before = i ? 1 : block->header_pages, pages = block->runs[i].page_count - before;
        if (pages)
            store_io(false, block->runs[i].segment, block->runs[i].page + before, data + page * PAGE, pages);
        page += pages;
    }
    block_write(block->name, block->name_size, data, block->size, split, 0, 0, block);
    for (uint32_t i = 0; i < old.run_count && old.runs[i].generation == d.generations[old.runs[i].segment]; i++)
        store_io(true, old.runs[i].segment, old.runs[i].page + old.runs[i].page_count / 2, data, 1);
    free(data);
}

static int64_t get_one(struct kvfs_client *client, const char *key, void *data, uint64_t size) {
    uint32_t key_size = (uint32_t)strlen(key);
    struct kvfs_keys keys = {key, &key_size, 1, 0};
    struct kvfs_buffer buffer = {data, size};
    int64_t result = 12345;
    int r = kvfs_get(client, &keys, &buffer, &result);
    return r < 0 ? r : result;
}

static int64_t put_one(struct kvfs_client *client, const char *key, const void *data, uint64_t size) {
    uint32_t key_size = (uint32_t)strlen(key);
    struct kvfs_keys keys = {key, &key_size, 1, 0};
    struct kvfs_buffer buffer = {(void *)(uintptr_t)data, size};
    int64_t result = 12345;
    int r = kvfs_put(client, &keys, &buffer, &result);
    CHECK((r == 1) == (result == 0));
    return r < 0 ? r : result;
}

static bool says(const char *part) { return strstr(kvfs_error(), part) != NULL; }

/* ---- what is put is what is got ---- */

static const uint64_t SIZES[] = {0, 1, 4095, 4096, 4097, 1 << 20, (2 << 20) + 1, 9 << 20};
#define SIZE_COUNT ((uint32_t)(sizeof(SIZES) / sizeof(SIZES[0])))

static void round_trips(uint64_t stripe_unit) {
    static const uint32_t offsets[] = {0, 512, 1, 16};
    pool_new(stripe_unit);
    struct kvfs_client *client = connect_plain();
    uint64_t version = 0, put = 0;
    for (uint32_t layout = 0; layout < 5; layout++) {
        locked();
        d.split = layout > 2 ? layout - 1 : layout + 1;
        d.header_alone = layout > 2;
        unlocked();
        for (uint32_t k = 0; k < 4; k++) {
            /* The largest ones at one alignment a layout, and one stripe unit: time. */
            bool large = k == layout % 4 && layout % 2 == (stripe_unit > 16384);
            uint32_t count = large ? SIZE_COUNT : SIZE_COUNT - 2;
            put += count;
            struct batch *out = batch_new(0, count, SIZES, SIZE_COUNT, offsets[k]);
            batch_fill(out, ++version);
            CHECK_SAY(kvfs_put(client, &out->keys, out->buffers, out->results) == (int)count, "%s", kvfs_error());
            guards_check(out);
            for (uint32_t j = 0; j < 2; j++) {
                struct batch *in = batch_new(0, count, SIZES, SIZE_COUNT, offsets[(k + 1 + 2 * j) % 4]);
                batch_get(client, in, version);
                batch_free(in);
            }
            batch_get(client, out, version);
            batch_free(out);
        }
    }
    struct kvfs_client_statistics s = statistics(client);
    CHECK(s.checksum_errors == 0 && s.timeouts == 0 && s.retries == 0 && s.busy == 0 && s.puts == put);
    CHECK(s.gets == 3 * s.puts && s.get_bytes == 3 * s.put_bytes && s.bounced_bytes > 0);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_round_trips(void) {
    round_trips(16384);
    round_trips(131072);
}

static void test_keys(void) {
    pool_new(65536);
    struct kvfs_client *client = connect_plain();
    uint8_t memory[8192], found[4] = {9, 9, 9, 9};
    int64_t sizes[4];
    /* Nothing is there yet, not even the namespace: misses, and at once. */
    uint64_t started = milliseconds();
    CHECK(get_one(client, "nothing", memory, sizeof(memory)) == -ENOENT);
    CHECK(get_one(client, "nothing else", memory, sizeof(memory)) == -ENOENT);
    CHECK_SAY(milliseconds() - started < 900 * slowness(), "two misses took %llu ms", (unsigned long long)(milliseconds() - started));
    fill(memory, 5000, 77);
    CHECK(put_one(client, "a", memory, 5000) == 0);
    CHECK(get_one(client, "a", memory, sizeof(memory)) == 5000 && filled(memory, 5000, 77));
    started = milliseconds();
    CHECK(get_one(client, "b", memory, sizeof(memory)) == -ENOENT);
    CHECK_SAY(milliseconds() - started < 900 * slowness(), "a miss took %llu ms", (unsigned long long)(milliseconds() - started));
    /* The buffer is too small, by one byte: nothing is read. */
    memset(memory, 0x22, sizeof(memory));
    CHECK(get_one(client, "a", memory, 4999) == -ERANGE);
    for (uint32_t i = 0; i < sizeof(memory); i++)
        CHECK(memory[i] == 0x22);
    CHECK(get_one(client, "a", memory, 5000) == 5000);
    CHECK(get_one(client, "a", NULL, 5000) == -EINVAL);
    CHECK(get_one(client, "a", NULL, 0) == -ERANGE);
    /* Replaced: by another size, by nothing, and by as much again. */
    fill(memory, 8000, 78);
    CHECK(put_one(client, "a", memory, 8000) == 0);
    memset(memory, 0, sizeof(memory));
    CHECK(get_one(client, "a", memory, sizeof(memory)) == 8000 && filled(memory, 8000, 78));
    CHECK(put_one(client, "a", NULL, 0) == 0);
    CHECK(get_one(client, "a", memory, sizeof(memory)) == 0);
    CHECK(get_one(client, "a", NULL, 0) == 0);
    CHECK(put_one(client, "a", NULL, 4) == -EINVAL);
    /* Sizes of keys. */
    uint8_t keys[400];
    for (uint32_t i = 0; i < sizeof(keys); i++)
        keys[i] = (uint8_t)(255 - i);
    uint32_t key_sizes[4] = {1, 127, 126, 2};
    struct kvfs_keys batch = {keys, key_sizes, 4, 0};
    struct kvfs_buffer buffers[4] = {{memory, 10}, {memory + 100, 100}, {memory + 1000, 1000}, {memory + 3000, 3000}};
    int64_t results[4];
    CHECK(kvfs_put(client, &batch, buffers, results) == 4);
    CHECK(kvfs_exists(client, &batch, found) == 0 && found[0] == 1 && found[1] == 1 && found[2] == 1 && found[3] == 1);
    CHECK(kvfs_sizes(client, &batch, sizes) == 0 && sizes[0] == 10 && sizes[1] == 100 && sizes[2] == 1000 && sizes[3] == 3000);
    uint8_t deleted[4] = {9, 9, 9, 9};
    batch.count = 2;
    CHECK(kvfs_delete(client, &batch, deleted) == 2 && deleted[0] == 1 && deleted[1] == 1 && deleted[2] == 9);
    CHECK(kvfs_delete(client, &batch, deleted) == 0 && deleted[0] == 0 && deleted[1] == 0);
    batch.count = 4;
    CHECK(kvfs_exists(client, &batch, found) == 0 && found[0] == 0 && found[1] == 0 && found[2] == 1 && found[3] == 1);
    CHECK(kvfs_sizes(client, &batch, sizes) == 0 && sizes[0] == -ENOENT && sizes[3] == 3000);
    for (uint32_t wrong = 0; wrong < 2; wrong++) {
        key_sizes[1] = wrong ? 128 : 0;
        CHECK(kvfs_get(client, &batch, buffers, results) == -EINVAL && says("key"));
        CHECK(kvfs_put(client, &batch, buffers, results) == -EINVAL && says("key"));
        CHECK(kvfs_delete(client, &batch, deleted) == -EINVAL && says("key"));
        CHECK(kvfs_exists(client, &batch, found) == -EINVAL && says("key"));
        CHECK(kvfs_sizes(client, &batch, sizes) == -EINVAL && says("key"));
        CHECK(kvfs_prestage(client, &batch) == -EINVAL && says("key"));
    }
    CHECK(kvfs_list(client, keys, 128, keys, sizeof(keys), key_sizes, 4) == -EINVAL);
    key_sizes[1] = 127;
    /* Nothing to do. */
    struct kvfs_keys none = {NULL, NULL, 0, 0};
    CHECK(kvfs_get(client, &none, NULL, NULL) == 0 && kvfs_put(client, &none, NULL, NULL) == 0 && kvfs_delete(client, &none, NULL) == 0);
    CHECK(kvfs_exists(client, &none, NULL) == 0 && kvfs_sizes(client, &none, NULL) == 0 && kvfs_prestage(client, &none) == 0);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_overlaps(void) {
    pool_new(65536);
    struct kvfs_client *client = connect_plain();
    uint64_t size = 6000;
    struct batch *b = put_batch(client, 0, 4, &size, 1, 1);
    uint8_t *memory = pages_get(16);
    struct kvfs_buffer buffers[4] = {{memory + 18000, size}, {memory, size}, {memory + 11999, size}, {memory + 6000, size}};
    CHECK(kvfs_get(client, &b->keys, buffers, b->results) == -EINVAL && says("overlap"));
    buffers[2].data = memory + 12000;
    CHECK_SAY(kvfs_get(client, &b->keys, buffers, b->results) == 4, "%s", kvfs_error());
    CHECK(filled(buffers[2].data, size, (1ull << 32) + 2));
    buffers[1] = buffers[3];
    CHECK(kvfs_get(client, &b->keys, buffers, b->results) == -EINVAL);
    buffers[1] = (struct kvfs_buffer){(void *)(UINTPTR_MAX - 100), 200};
    CHECK(kvfs_get(client, &b->keys, buffers, b->results) == -EINVAL);
    /* The same key twice: to be read it may be, to be stored not. */
    b->key_sizes[3] = b->key_sizes[2];
    memcpy(b->key_data + 15, b->key_data + 10, 5);
    buffers[1] = (struct kvfs_buffer){memory, size};
    CHECK(kvfs_get(client, &b->keys, buffers, b->results) == 4 && filled(buffers[3].data, size, (1ull << 32) + 2));
    CHECK(kvfs_put(client, &b->keys, buffers, b->results) == -EINVAL && says("keys 2 and 3"));
    CHECK(b->results[0] == -ECANCELED);
    free(memory);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_batch_of_thousands(void) {
    static const uint64_t sizes[] = {100, 5000, 0, 4096, 333, 12000};
    enum { COUNT = 5000 };
    pool_new(65536);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = 10000, .depth = 64});
    struct batch *b = put_batch(client, 0, COUNT, sizes, 6, 3);
    batch_get(client, b, 3);
    uint8_t *found = calloc(COUNT, 1), *names = malloc(COUNT * KVFS_KEY_MAX);
    int64_t *known = calloc(COUNT, sizeof(*known));
    CHECK(kvfs_exists(client, &b->keys, found) == 0 && kvfs_sizes(client, &b->keys, known) == 0);
    for (uint32_t i = 0; i < COUNT; i++)
        CHECK(found[i] == 1 && known[i] == (int64_t)b->buffers[i].size);
    /* All keys, in order, page by page: of many and of few. */
    uint32_t *listed = calloc(COUNT, sizeof(*listed));
    for (uint32_t step = 1000; step; step = step == 1000 ? 1 : 0) {
        char after[128] = "", text[128];
        uint32_t after_size = 0, total = 0;
        int n;
        while ((n = kvfs_list(client, after, after_size, names, step * KVFS_KEY_MAX, listed, COUNT)) > 0) {
            CHECK((uint32_t)n <= step);
            const uint8_t *at = names;
            for (int i = 0; i < n; at += listed[i++]) {
                memcpy(text, at, listed[i]);
                text[listed[i]] = 0;
                CHECK(strcmp(text, after) > 0);
                strcpy(after, text);
                after_size = listed[i];
            }
            total += (uint32_t)n;
            if (step == 1 && total == 20)
                break;
        }
        CHECK_SAY(n >= 0 && total == (step == 1 ? 20 : COUNT), "%d, %u: %s", n, total, kvfs_error());
    }
    CHECK(kvfs_list(client, NULL, 0, names, 126, listed, COUNT) == -ERANGE);
    CHECK(kvfs_list(client, NULL, 0, names, 1000, listed, 0) == -ERANGE);
    CHECK(kvfs_delete(client, &b->keys, found) == COUNT);
    CHECK(kvfs_list(client, NULL, 0, names, COUNT * KVFS_KEY_MAX, listed, COUNT) == 0);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0);
    for (uint32_t i = 0; i < COUNT; i++)
        CHECK(found[i] == 1 && b->results[i] == -ENOENT);
    struct kvfs_client_statistics s = statistics(client);
    CHECK(s.puts == COUNT && s.gets == COUNT && s.deletes == COUNT && s.hits == COUNT && s.misses == COUNT);
    free(found);
    free(names);
    free(known);
    free(listed);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_depths(void) {
    static const uint64_t sizes[] = {20000, 70000, 4096, 300000};
    static const uint32_t depths[] = {1, 2, 7, 33, 64};
    pool_new(16384);
    locked();
    d.split = 2;
    unlocked();
    for (uint32_t i = 0; i < 5; i++) {
        struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = 10000, .depth = depths[i]});
        struct batch *b = put_batch(client, 0, 70, sizes, 4, i);
        batch_get(client, b, i);
        batch_free(b);
        kvfs_close(client);
    }
    struct kvfs_client *client;
    struct kvfs_options options = {.size = sizeof(options), .depth = 65};
    CHECK(client_open("/mnt/test", d.directory, 1, "", &options, &client) == -EINVAL && says("depth 65"));
    options = (struct kvfs_options){.size = sizeof(options), .flags = 4};
    CHECK(client_open("/mnt/test", d.directory, 1, "", &options, &client) == -EINVAL && says("flags 0x4"));
    daemon_stop(false);
}

/* A header of many pages, as a block of many GiB has: more pieces than one I/O can have, with the data or alone. */
static void test_large_headers(void) {
    static const uint64_t size = 4 << 20;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    for (uint32_t i = 0; i < 4; i++) {
        locked();
        d.header_extra = i % 2 ? 1000 : 70;
        d.split = 1 + i / 2;
        unlocked();
        struct batch *b = put_batch(client, 0, 1, &size, 1, i);
        batch_get(client, b, i);
        batch_free(b);
    }
    kvfs_close(client);
    daemon_stop(false);
}

/* ---- any file ---- */

static void test_file_reads(void) {
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    static const uint64_t sizes[] = {1, 4096, 70001, 2500000};
    uint64_t seed = 5;
    uint8_t key[] = {'k'};
    char name[3] = "";
    key_hex(key, 1, name);
    for (uint32_t i = 0; i < 12; i++) {
        uint64_t size = sizes[i % 4], inode;
        uint8_t *model = malloc(size), *memory = pages_get(size / PAGE + 40);
        uint32_t split = 1 + i / 4;
        bool hole = i == 11;
        fill(model, size, i);
        if (hole)
            memset(model + 40 * PAGE, 0, 60 * PAGE);
        locked();
        directory_put(TEAM, 1, "team");
        directory_put(SPACE, TEAM, "llama");
        directory_put(shard_inode(name), SPACE, name);
        d.header_alone = split == 2;
        inode = block_write(name, 2, model, size, hole ? 2 : split, hole ? 40 * PAGE : 0, hole ? 100 * PAGE : 0, NULL);
        unlocked();
        struct kvfs_file *file;
        CHECK(kvfs_file_open(client, inode, &file) == 0);
        for (uint32_t n = 0; n < 60; n++) {
            uint64_t offset = random_below(&seed, size + 100), length = random_below(&seed, n % 3 ? 30000 : size + 5000);
            uint64_t at = random_below(&seed, 2) ? offset % PAGE + PAGE : PAGE + random_below(&seed, PAGE); /* without a copy, or with */
            if (n % 5 == 0)
                offset = offset / PAGE * PAGE, length = round_up(length, PAGE);
            uint64_t want = offset >= size ? 0 : min_u64(length, size - offset);
            memset(memory, 0xa5, at + want + PAGE);
            int64_t got = kvfs_file_read(file, offset, memory + at, length);
            CHECK_SAY(got == (int64_t)want, "%lld of %llu at %llu: %s", (long long)got, (unsigned long long)want, (unsigned long long)offset,
                      kvfs_error());
            CHECK(want == 0 || memcmp(memory + at, model + offset, want) == 0);
            for (uint64_t b = 0; b < at; b++)
                CHECK(memory[b] == 0xa5);
            for (uint64_t b = at + want; b < at + want + PAGE; b++)
                CHECK(memory[b] == 0xa5);
        }
        CHECK(kvfs_file_read(file, UINT64_MAX, memory, 10) == 0 && kvfs_file_read(file, 0, NULL, 0) == 0);
        CHECK(kvfs_file_read(file, 0, NULL, 10) == -EINVAL);
        /* Moved, it reads on; replaced, the file is not there any more. */
        if (!hole) {
            locked();
            block_move(block_of(inode), 1 + i % 3);
            unlocked();
            memset(memory, 0, size);
            CHECK(kvfs_file_read(file, 0, memory, size) == (int64_t)size && memcmp(memory, model, size) == 0);
        }
        locked();
        block_write(name, 2, model, size / 2, 1, 0, 0, NULL);
        unlocked();
        int64_t gone = kvfs_file_read(file, 0, memory, size);
        CHECK_SAY(gone == -EAGAIN, "%lld", (long long)gone);
        kvfs_file_close(file);
        free(model);
        free(memory);
    }
    struct kvfs_file *file;
    struct kvfs_attributes a;
    CHECK(kvfs_file_open(client, 77777, &file) == -ENOENT && kvfs_file_open(client, SPACE, &file) == -EAGAIN);
    CHECK(kvfs_find(client, "", &a) == 0 && a.inode == 1 && kvfs_find(client, "team/llama", &a) == 0 && a.inode == SPACE && !a.sealed);
    CHECK(kvfs_find(client, "team/llama/6b/6b", &a) == 0 && a.size == 1250000 && a.sealed && a.mode == 0100644);
    CHECK(kvfs_find(client, "team/llama/6b/6b/x", &a) == -ENOTDIR && kvfs_find(client, "team/nothing", &a) == -ENOENT);
    CHECK(kvfs_find(client, "nothing/x", &a) == -ENOENT);
    kvfs_file_close(NULL);
    kvfs_close(client);
    daemon_stop(false);
}

/* ---- blocks that move, are replaced and evicted while they are read ---- */

#define CHURN_KEYS 8u
static struct { struct kvfs_client *client; atomic_bool stop; atomic_ullong read, missed; } churn;

static void *churn_get(void *argument) {
    uint64_t state = (uintptr_t)argument;
    static const uint64_t size = 400000;
    struct batch *b = batch_new(0, CHURN_KEYS, &size, 1, state % 2 ? 0 : 1 + (uint32_t)state);
    while (!atomic_load(&churn.stop)) {
        CHECK_SAY(kvfs_get(churn.client, &b->keys, b->buffers, b->results) >= 0, "%s", kvfs_error());
        for (uint32_t i = 0; i < b->count; i++) {
            if (b->results[i] == -ENOENT) {
                atomic_fetch_add(&churn.missed, 1);
                continue;
            }
            uint64_t seed;
            CHECK_SAY(b->results[i] >= 8, "block %u: %lld", i, (long long)b->results[i]);
            memcpy(&seed, b->buffers[i].data, 8);
            CHECK_SAY((seed & 0xffff) == i, "block %u has the bytes of %llu", i, (unsigned long long)(seed & 0xffff));
            CHECK(filled(b->buffers[i].data, (uint64_t)b->results[i], seed));
            atomic_fetch_add(&churn.read, 1);
        }
    }
    guards_check(b);
    batch_free(b);
    return NULL;
}

static void *churn_files(void *argument) {
    uint64_t state = (uintptr_t)argument;
    uint8_t *memory = malloc(400000), *model = malloc(400000);
    while (!atomic_load(&churn.stop)) {
        char key[32];
        sprintf(key, "key-%u", (unsigned)random_below(&state, CHURN_KEYS));
        locked();
        struct block *block = block_named(key);
        uint64_t inode = block ? (uint64_t)(block - d.blocks) + BLOCK : 0, size = block ? block->size : 0, seed = block ? block->seed : 0;
        unlocked();
        struct kvfs_file *file;
        if (!seed || kvfs_file_open(churn.client, inode, &file) < 0)
            continue;
        fill(model, size, seed);
        for (int i = 0; i < 20; i++) {
            uint64_t offset = random_below(&state, size), length = random_below(&state, size);
            int64_t n = kvfs_file_read(file, offset, memory, length);
            CHECK_SAY(n == -EAGAIN || (n >= 0 && memcmp(memory, model + offset, (size_t)n) == 0), "%lld", (long long)n);
            if (n < 0)
                break;
            atomic_fetch_add(&churn.read, 1);
        }
        kvfs_file_close(file);
    }
    free(memory);
    free(model);
    return NULL;
}

static void *churn_put(void *argument) {
    uint64_t state = (uintptr_t)argument;
    uint8_t *memory = malloc(400000);
    while (!atomic_load(&churn.stop)) {
        char key[32];
        uint64_t i = random_below(&state, CHURN_KEYS), size = 8 + random_below(&state, 399000);
        sprintf(key, "key-%u", (unsigned)i);
        fill(memory, size, (random_next(&state) << 16) + i);
        int64_t r = put_one(churn.client, key, memory, size);
        CHECK_SAY(r == 0, "%lld: %s", (long long)r, kvfs_error());
    }
    free(memory);
    return NULL;
}

static void test_churn(void) {
    pool_new(131072);
    churn.client = connect_plain();
    atomic_store(&churn.stop, false);
    uint64_t size = 100000, state = 99;
    batch_free(put_batch(churn.client, 0, CHURN_KEYS, &size, 1, 0));
    pthread_t threads[5];
    for (uintptr_t i = 0; i < 5; i++)
        CHECK(pthread_create(&threads[i], NULL, i < 3 ? churn_get : i < 4 ? churn_files : churn_put, (void *)(i + 1)) == 0);
    uint8_t *memory = malloc(200000);
    uint64_t until = milliseconds() + 1500;
    for (uint32_t n = 0; milliseconds() < until; n++) {
        char key[32], name[64];
        uint64_t i = random_below(&state, CHURN_KEYS), seed = (random_next(&state) << 16) + i;
        uint32_t name_size = key_hex((uint8_t *)key, (uint32_t)sprintf(key, "key-%u", (unsigned)i), name);
        locked();
        struct block *block = block_named(key);
        if (n % 3 && block && block->seed) {
            block_move(block, 1 + n % 2);
        } else {
            uint64_t length = 8 + random_below(&state, 199000);
            fill(memory, length, seed);
            uint64_t inode = block_write(name, name_size, memory, length, 1 + n % 3, 0, 0, NULL);
            block_of(inode)->seed = seed;
        }
        if (n % 40 == 39 && !segment_reserved(d.currents[0])) { /* evicted, and its segment written again at once */
            segment_reuse(d.currents[0]);
            d.cursors[0] = 1;
        }
        if (d.block_count > BLOCKS_MAX / 2)
            until = 0;
        unlocked();
    }
    atomic_store(&churn.stop, true);
    for (int i = 0; i < 5; i++)
        pthread_join(threads[i], NULL);
    free(memory);
    struct kvfs_client_statistics s = statistics(churn.client);
    CHECK(atomic_load(&churn.read) > 100 && s.busy == 0);
    printf("   %llu reads, %llu misses, %llu retries, %llu checksum errors, %u moves and writes\n",
           (unsigned long long)atomic_load(&churn.read), (unsigned long long)atomic_load(&churn.missed), (unsigned long long)s.retries,
           (unsigned long long)s.checksum_errors, d.block_count);
    kvfs_close(churn.client);
    daemon_stop(false);
}

/* ---- devices that lie, fail and stay silent ---- */

static void bad_block_wait(uint32_t count, uint64_t inode) {
    uint64_t until = milliseconds() + 30000;
    for (;;) {
        locked();
        bool there = d.bad_blocks >= count;
        CHECK(!there || inode == 0 || (d.bad_inode == inode && d.bad_segment == block_of(inode)->runs[0].segment));
        unlocked();
        if (there)
            return;
        CHECK(milliseconds() < until);
        usleep(1000);
    }
}

static void test_corruption(void) {
    pool_new(65536);
    struct kvfs_client *client = connect_plain();
    uint64_t size = 200001;
    struct batch *b = put_batch(client, 0, 6, &size, 1, 1);
    static const int32_t pages[] = {0, 48, 20, -1};
    for (uint32_t i = 0; i < 4; i++) {
        char key[16];
        sprintf(key, "key-%u", i);
        locked();
        block_corrupt(block_named(key), pages[i]);
        unlocked();
    }
    /* The table leads to another place; and to none. */
    for (uint32_t i = 4; i < 6; i++) {
        char key[16];
        struct kvfs_record record;
        sprintf(key, "key-%u", i);
        locked();
        CHECK(kvfs_table_find_inode(d.table, BLOCK + (uint64_t)(block_named(key) - d.blocks), &record) == 0);
        if (i == 4)
            record.page++;
        else
            record.segment = SEGMENTS + 7;
        CHECK(kvfs_table_update(d.table, &record) == 0);
        unlocked();
    }
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0);
    for (uint32_t i = 0; i < 6; i++)
        CHECK_SAY(b->results[i] == -EIO, "block %u: %lld", i, (long long)b->results[i]);
    guards_check(b);
    bad_block_wait(5, 0);
    struct kvfs_client_statistics s = statistics(client);
    CHECK_SAY(s.checksum_errors == 5 && s.retries == 5 && s.misses == 6, "%llu, %llu", (unsigned long long)s.checksum_errors,
              (unsigned long long)s.retries);
    for (uint32_t i = 0; i < 4; i++) { /* one at a time: the right numbers */
        char key[16];
        sprintf(key, "key-%u", i);
        CHECK(get_one(client, key, b->buffers[0].data, size) == -EIO);
        bad_block_wait(6 + i, inode_named(key));
    }
    batch_free(b);
    /* Every other read flips a bit: the second reading is right. */
    b = put_batch(client, 10, 10, &size, 1, 2);
    fault(client, 1, KVFS_FAULT_FLIP, 1, 2, 5);
    kvfs_get(client, &b->keys, b->buffers, b->results);
    for (uint32_t i = 0; i < 10; i++)
        CHECK(b->results[i] == -EIO || (b->results[i] == (int64_t)size && filled(b->buffers[i].data, size, (2ull << 32) + i)));
    fault_all(client, KVFS_FAULT_FLIP, 1, 1, 3);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0 && b->results[3] == -EIO);
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    batch_get(client, b, 2);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_device_errors(void) {
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    uint64_t size = 150000;
    struct batch *b = put_batch(client, 0, 10, &size, 1, 1);
    static const uint32_t errors[] = {EIO, ENODEV, EREMOTEIO, ERANGE, EBADMSG, ESTALE};
    for (uint32_t i = 0; i < 6; i++) {
        fault(client, 2, KVFS_FAULT_ERROR, 1, 1, errors[i]);
        CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0);
        for (uint32_t k = 0; k < 10; k++) /* a miss, whatever the device says; never an answer that means something else */
            CHECK_SAY(b->results[k] == -EIO, "errno %u: %lld", errors[i], (long long)b->results[k]);
    }
    fault(client, 2, KVFS_FAULT_SHORT, 1, 1, 0);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0 && b->results[9] == -EIO);
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    batch_get(client, b, 1);
    /* What cannot be written is taken back; the rest is stored. */
    fault(client, 1, KVFS_FAULT_ERROR, 2, 7, EIO);
    batch_fill(b, 2);
    int stored = kvfs_put(client, &b->keys, b->buffers, b->results), zeros = 0;
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    for (uint32_t i = 0; i < 10; i++) {
        CHECK(b->results[i] == 0 || b->results[i] == -EIO);
        zeros += b->results[i] == 0;
    }
    CHECK(stored == zeros && stored > 0 && stored < 10);
    locked();
    CHECK(d.aborted == 10u - (uint32_t)stored && d.committed == 10u + (uint32_t)stored);
    unlocked();
    int64_t *put_results = malloc(10 * sizeof(*put_results));
    memcpy(put_results, b->results, 10 * sizeof(*put_results));
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 10);
    for (uint32_t i = 0; i < 10; i++)
        CHECK(filled(b->buffers[i].data, size, ((put_results[i] == 0 ? 2ull : 1ull) << 32) + i));
    free(put_results);
    /* A write that is lost is found when it is read. */
    locked();
    d.writes_lost = true;
    unlocked();
    fault(client, 1, KVFS_FAULT_LOST_WRITE, 2, 1, 0);
    batch_fill(b, 3);
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == 10);
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0 && b->results[0] == -EIO);
    /* What the daemon refuses. */
    locked();
    d.refuse_odd = -EFBIG;
    unlocked();
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == 5);
    for (uint32_t i = 0; i < 10; i++)
        CHECK(b->results[i] == (i % 2 ? -EFBIG : 0));
    locked();
    d.refuse_odd = 0;
    d.fail_odd = -EISDIR;
    unlocked();
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == 5);
    for (uint32_t i = 0; i < 10; i++)
        CHECK(b->results[i] == (i % 2 ? -EISDIR : 0));
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_deadlines(void) {
    const uint32_t timeout_ms = 200 * slowness(), late_ms = 600 * slowness();
    pool_new(16384);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms});
    static const uint64_t sizes[] = {100000, 100001};
    struct batch *b = put_batch(client, 0, 6, sizes, 2, 1);
    uint8_t *unaligned = malloc(100010);
    fault(client, 3, KVFS_FAULT_DELAY, 1, 1, late_ms);
    uint64_t started = milliseconds();
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0);
    CHECK(milliseconds() - started >= timeout_ms && milliseconds() - started < 3 * timeout_ms);
    for (uint32_t i = 0; i < 6; i++)
        CHECK_SAY(b->results[i] == -ETIMEDOUT, "block %u: %lld", i, (long long)b->results[i]);
    struct kvfs_client_statistics s = statistics(client);
    CHECK(s.timeouts == 6 && s.busy == 6);
    uint8_t *data = b->buffers[2].data;
    CHECK(kvfs_busy(client, data, 100000) == 1 && kvfs_busy(client, data + 99999, 1) == 1 && kvfs_busy(client, data - 1, 2) == 1);
    CHECK(kvfs_busy(client, unaligned, 100010) == 0);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == -EBUSY && says("buffer 0"));
    /* Other devices go on, to other memory; this one fails at once. */
    started = milliseconds();
    CHECK(get_one(client, "key-0", unaligned + 1, 100009) == -ETIMEDOUT);
    CHECK(milliseconds() - started < timeout_ms);
    while (kvfs_busy(client, data, 100000))
        CHECK(milliseconds() - started < late_ms + 10000);
    CHECK(milliseconds() - started + timeout_ms >= late_ms - 100);
    wait_idle(client);
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    usleep(timeout_ms * 1000);
    batch_get(client, b, 1);
    /* Unaligned: the device writes elsewhere, but the caller need not know. */
    fault(client, 0, KVFS_FAULT_DELAY, 1, 1, late_ms);
    CHECK(get_one(client, "key-1", unaligned + 1, 100009) == -ETIMEDOUT);
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    wait_idle(client);
    usleep(timeout_ms * 1000);
    CHECK(get_one(client, "key-1", unaligned + 1, 100009) == 100001 && filled(unaligned + 1, 100001, (1ull << 32) + 1));
    /* A read that is late within the deadline is none the worse. */
    fault_all(client, KVFS_FAULT_DELAY, 1, 3, 40);
    batch_get(client, b, 1);
    /* Writes: taken back, and the block that was there stays. */
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    fault(client, 3, KVFS_FAULT_DELAY, 2, 1, late_ms);
    batch_fill(b, 2);
    started = milliseconds();
    CHECK_SAY(kvfs_put(client, &b->keys, b->buffers, b->results) == 0, "%s", kvfs_error());
    CHECK(milliseconds() - started < 3 * timeout_ms);
    for (uint32_t i = 0; i < 6; i++)
        CHECK(b->results[i] == -ETIMEDOUT);
    locked();
    CHECK(d.aborted == 6);
    unlocked();
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    usleep(late_ms * 1000);
    batch_get(client, b, 1);
    batch_free(b);
    free(unaligned);
    kvfs_close(client);
    daemon_stop(false);
}

/* A device owes an answer to a session that is over: its memory is known all the same, and the session goes when it has answered. */
static void test_restart_while_stuck(void) {
    const uint32_t timeout_ms = 200 * slowness(), late_ms = 600 * slowness();
    static const uint64_t size = 100000;
    pool_new(16384);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms});
    struct batch *b = put_batch(client, 0, 3, &size, 1, 1), *other = batch_new(0, 3, &size, 1, 0);
    fault_all(client, KVFS_FAULT_DELAY, 1, 1, late_ms);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0 && b->results[0] == -ETIMEDOUT);
    daemon_stop(false);
    daemon_start();
    batch_get(client, other, 1);
    CHECK(client->retired && statistics(client).busy == 3 && kvfs_busy(client, b->buffers[1].data, 10) == 1);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == -EBUSY);
    wait_idle(client);
    CHECK(kvfs_busy(client, b->buffers[1].data, 10) == 0 && !client->retired);
    batch_get(client, b, 1);
    daemon_stop(false);
    daemon_start();
    batch_get(client, b, 1);
    CHECK(statistics(client).reconnects == 2 && !client->retired);
    batch_free(other);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

/* The same for a write, whose memory the client may have back at once. */
static void test_restart_while_a_write_is_stuck(void) {
    const uint32_t timeout_ms = 200 * slowness(), late_ms = 1000 * slowness();
    static const uint64_t size = 100000;
    pool_new(16384);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms});
    struct batch *b = put_batch(client, 0, 3, &size, 1, 1), *other = batch_new(3, 3, &size, 1, 0);
    batch_fill(other, 1);
    fault_all(client, KVFS_FAULT_DELAY, 2, 1, late_ms);
    CHECK(kvfs_put(client, &other->keys, other->buffers, other->results) == 0 && other->results[0] == -ETIMEDOUT);
    daemon_stop(false);
    daemon_start();
    batch_get(client, b, 1);
    CHECK(statistics(client).busy == 0 && client->retired);
    usleep(late_ms * 1000);
    daemon_stop(false);
    daemon_start();
    batch_get(client, b, 1);
    CHECK(statistics(client).reconnects == 2 && !client->retired);
    batch_free(other);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

/* The daemon hears of a write that is late that it is, and by the next put that it is not any more; of one that was never begun neither. */
static void test_a_late_write_is_told_again_when_it_has_landed(void) {
    const uint32_t timeout_ms = 200 * slowness(), late_ms = 600 * slowness();
    static const uint64_t size = 100000;
    pool_new(16384);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms});
    struct batch *b = batch_new(0, 3, &size, 1, 1);
    batch_fill(b, 1);
    fault_all(client, KVFS_FAULT_DELAY, 2, 1, late_ms);
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == 0);
    for (uint32_t i = 0; i < 3; i++)
        CHECK(b->results[i] == -ETIMEDOUT);
    locked();
    CHECK(d.late == 3 && d.not_begun == 0 && d.aborted == 3);
    unlocked();
    fault_all(client, KVFS_FAULT_NONE, 2, 0, 0);
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == 0 && b->results[0] == -ETIMEDOUT); /* the devices are left alone */
    locked();
    CHECK(d.late == 3 && d.not_begun == 3 && d.aborted == 6);
    unlocked();
    usleep(late_ms * 1000);
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == 3);
    locked();
    CHECK(d.late == 0 && d.not_begun == 3 && d.open == 0);
    unlocked();
    batch_get(client, b, 1);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

/* One device of four is stuck, and 200 blocks are wanted: about one deadline, not one each. */
static void test_one_stuck_device(void) {
    enum { COUNT = 200 };
    const uint32_t timeout_ms = 500 * slowness();
    static const uint64_t sizes[] = {9000, 100000};
    pool_new(16384);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms});
    struct batch *b = put_batch(client, 0, COUNT, sizes, 2, 1);
    fault(client, 3, KVFS_FAULT_DELAY, 1, 1, 5 * timeout_ms / 2);
    uint64_t started = milliseconds();
    int read = kvfs_get(client, &b->keys, b->buffers, b->results);
    uint64_t took = milliseconds() - started;
    CHECK_SAY(took < 2 * timeout_ms, "%llu ms", (unsigned long long)took);
    for (uint32_t i = 0; i < COUNT; i++) {
        CHECK(b->results[i] == -ETIMEDOUT ||
              (b->results[i] == (int64_t)b->buffers[i].size && filled(b->buffers[i].data, b->buffers[i].size, (1ull << 32) + i)));
        read -= b->results[i] >= 0;
    }
    CHECK(read == 0 && b->results[0] != 12345);
    started = milliseconds();
    CHECK(kvfs_busy(client, b->buffers[1].data, 100000) == 1);
    fault_all(client, KVFS_FAULT_NONE, 3, 0, 0);
    wait_idle(client);
    usleep(timeout_ms * 1000);
    batch_get(client, b, 1);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wredundant-decls"
__attribute__((weak)) void __lsan_disable(void);
__attribute__((weak)) void __lsan_enable(void);
#pragma GCC diagnostic pop

/* A client is closed while a device owes it an answer, to a read or to a write: soon, and later than anybody waits. What it
 * owes no more is freed (the leak sanitizer looks). */
static void test_close_while_stuck(void) {
    const uint32_t timeout_ms = 200 * slowness();
    static const uint64_t size = 100000;
    pool_new(16384);
    for (int i = 0; i < 4; i++) {
        bool never = i & 1, writing = i & 2;
        uint32_t late = never ? 10 * timeout_ms : timeout_ms + 100;
        if (never && __lsan_disable)
            __lsan_disable(); /* what a device still owns is not freed, ever */
        struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms});
        struct batch *b = put_batch(client, 0, 3, &size, 1, 1);
        fault_all(client, KVFS_FAULT_DELAY, writing ? 2 : 1, 1, late);
        int r = writing ? kvfs_put(client, &b->keys, b->buffers, b->results) : kvfs_get(client, &b->keys, b->buffers, b->results);
        CHECK(r == 0 && b->results[2] == -ETIMEDOUT);
        uint64_t started = milliseconds();
        kvfs_close(client);
        CHECK(milliseconds() - started < 5 * timeout_ms);
        batch_free(b); /* the double's devices have written already */
        if (never && __lsan_enable)
            __lsan_enable();
    }
    daemon_stop(false);
}

/* ---- many threads ---- */

static struct { struct kvfs_client *client; atomic_uint good; } crowd;

static void *crowd_get(void *argument) {
    static const uint64_t size = 30000;
    struct batch *b = batch_new(0, 8, &size, 1, (uint32_t)(uintptr_t)argument % 3);
    for (int i = 0; i < 3; i++)
        batch_get(crowd.client, b, 1);
    batch_free(b);
    atomic_fetch_add(&crowd.good, 1);
    return NULL;
}

static void test_more_threads_than_lanes(void) {
    enum { THREADS = LANES_MAX + 8 };
    static const uint64_t size = 30000;
    pool_new(16384);
    crowd.client = connect_plain();
    batch_free(put_batch(crowd.client, 0, 8, &size, 1, 1));
    fault_all(crowd.client, KVFS_FAULT_DELAY, 1, 5, 20);
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, crowd_get, (void *)i) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    CHECK(atomic_load(&crowd.good) == THREADS && crowd.client->session->lane_count <= LANES_MAX);
    kvfs_close(crowd.client);
    daemon_stop(false);
}

/* ---- prestaging ---- */

static void staged_wait(struct kvfs_client *client, uint64_t reads) {
    uint64_t until = milliseconds() + 30000;
    while (device_reads(client) < reads)
        CHECK(milliseconds() < until);
    usleep(50000 * slowness()); /* verified, too */
}

static void *stage_taker(void *argument) {
    (void)argument;
    static const uint64_t size = 300000;
    struct batch *b = batch_new(0, 8, &size, 1, 0);
    for (int i = 0; i < 10; i++) {
        CHECK(kvfs_prestage(crowd.client, &b->keys) >= 0);
        batch_get(crowd.client, b, 3);
    }
    batch_free(b);
    return NULL;
}

static void test_prestage(void) {
    static const uint64_t size = 300000;
    pool_new(65536);
    struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = 10000, .staging_size = 16 << 20});
    struct batch *b = put_batch(client, 0, 8, &size, 1, 1), *missing = batch_new(100, 8, &size, 1, 0);
    /* Used: no device is read a second time. */
    CHECK(kvfs_prestage(client, &missing->keys) == 0);
    CHECK(kvfs_prestage(client, &b->keys) == 8);
    CHECK(kvfs_prestage(client, &b->keys) == 0);
    staged_wait(client, 8 * 4);
    uint64_t reads = device_reads(client);
    batch_get(client, b, 1);
    struct kvfs_client_statistics s = statistics(client);
    CHECK(s.prestaged == 8 && s.prestage_used == 8 && s.prestage_wasted == 0 && device_reads(client) == reads);
    batch_get(client, b, 1);
    CHECK(statistics(client).prestage_used == 8 && device_reads(client) > reads);
    /* Taken while it is being read. */
    CHECK(kvfs_prestage(client, &b->keys) == 8);
    batch_get(client, b, 1);
    s = statistics(client);
    CHECK(s.prestage_used + s.prestage_wasted <= s.prestaged && s.prestaged == 16);
    /* Bounded: 8 slots of 2 MiB; the oldest make room. */
    struct batch *more = put_batch(client, 20, 12, &size, 1, 2);
    CHECK(kvfs_prestage(client, &more->keys) <= 12);
    usleep(200000 * slowness());
    CHECK(kvfs_prestage(client, &more->keys) >= 4);
    usleep(200000 * slowness());
    CHECK(statistics(client).prestage_wasted >= 4);
    batch_get(client, more, 2);
    batch_get(client, more, 2);
    /* A block larger than all of it is not staged; one of several slots is. */
    static const uint64_t large[] = {5 << 20, 17 << 20};
    locked();
    d.split = 3;
    unlocked();
    struct batch *two = put_batch(client, 40, 2, large, 2, 5);
    CHECK(kvfs_prestage(client, &two->keys) == 1);
    batch_get(client, two, 5);
    batch_free(two);
    locked();
    d.split = 1;
    unlocked();
    /* Replaced, moved, deleted while staged: never what was. */
    CHECK(kvfs_prestage(client, &b->keys) == 8);
    usleep(100000 * slowness());
    batch_free(put_batch(client, 0, 3, &size, 1, 3));
    locked();
    for (unsigned i = 3; i < 6; i++) {
        char key[16];
        sprintf(key, "key-%u", i);
        block_move(block_named(key), 2);
    }
    unlocked();
    struct kvfs_keys last = {b->key_data + 30, b->key_sizes + 6, 2, 0};
    uint8_t deleted[2];
    CHECK(kvfs_delete(client, &last, deleted) == 2);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 6);
    for (uint32_t i = 0; i < 8; i++)
        CHECK(i < 6 ? filled(b->buffers[i].data, size, ((i < 3 ? 3ull : 1ull) << 32) + i) : b->results[i] == -ENOENT);
    /* Takers of the same blocks, all at once. */
    batch_free(put_batch(client, 0, 8, &size, 1, 3));
    crowd.client = client;
    pthread_t threads[6];
    for (int i = 0; i < 6; i++)
        CHECK(pthread_create(&threads[i], NULL, stage_taker, NULL) == 0);
    for (int i = 0; i < 6; i++)
        pthread_join(threads[i], NULL);
    s = statistics(client);
    CHECK_SAY(s.prestage_used + s.prestage_wasted <= s.prestaged, "%llu and %llu of %llu", (unsigned long long)s.prestage_used,
              (unsigned long long)s.prestage_wasted, (unsigned long long)s.prestaged);
    batch_free(more);
    batch_free(missing);
    kvfs_close(client);
    /* Closed with reads in flight: on time, and late. */
    const uint32_t timeout_ms = 500 * slowness();
    for (uint32_t late = 0; late < 2; late++) {
        client = connect_with((struct kvfs_options){.timeout_ms = timeout_ms, .staging_size = 64 << 20});
        fault_all(client, KVFS_FAULT_DELAY, 1, 1, timeout_ms / 2 + late * timeout_ms);
        CHECK(kvfs_prestage(client, &b->keys) == 8);
        usleep(20000);
        if (late) { /* a taker does not wait for ever */
            CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 0);
            CHECK(b->results[0] == -ETIMEDOUT);
        }
        kvfs_close(client);
    }
    batch_free(b);
    daemon_stop(false);
}

/* ---- daemons that come and go ---- */

static void test_daemon_dies(void) {
    static const uint64_t size = 50000;
    pool_new(16384);
    struct kvfs_client *client = connect_plain(), *unverified = connect_with((struct kvfs_options){.flags = KVFS_NO_VERIFY});
    struct kvfs_client_information information;
    struct batch *b = put_batch(client, 0, 5, &size, 1, 1);
    uint8_t found[5], names[1000];
    uint32_t name_sizes[5];
    CHECK(kvfs_client_information_get(client, &information) == 0 && information.connected && information.writable);
    CHECK(information.device_count == DEVICES && information.mount_epoch == d.epoch && strcmp(information.pool, d.directory) == 0);
    CHECK(memcmp(information.pool_uuid, d.uuid, 16) == 0 && information.memory_alignment);
    batch_get(unverified, b, 1);
    daemon_stop(false);
    batch_get(client, b, 1);
    CHECK(kvfs_exists(client, &b->keys, found) == 0 && found[4] == 1);
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == -ENOTCONN && says("daemon is gone"));
    CHECK(kvfs_delete(client, &b->keys, found) == -ENOTCONN);
    CHECK(kvfs_list(client, NULL, 0, names, sizeof(names), name_sizes, 5) == -ENOTCONN);
    CHECK(kvfs_client_information_get(client, &information) == 0 && !information.connected);
    CHECK(kvfs_get(unverified, &b->keys, b->buffers, b->results) == -ENOTCONN);
    CHECK(kvfs_prestage(client, &b->keys) == 5);
    batch_get(client, b, 1);
    daemon_start();
    batch_get(client, b, 1);
    batch_get(unverified, b, 1);
    CHECK(statistics(client).reconnects == 1);
    batch_free(put_batch(client, 0, 2, &size, 1, 7));
    CHECK(kvfs_client_information_get(client, &information) == 0 && information.connected && information.mount_epoch == d.epoch);
    /* Unmounted: until it is back nothing works, and the reason is told. */
    daemon_stop(true);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == -ENOTCONN && says("unmounted"));
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == -ENOTCONN && says("unmounted"));
    CHECK(kvfs_exists(client, &b->keys, found) == -ENOTCONN && says("unmounted"));
    daemon_start();
    CHECK_SAY(kvfs_get(client, &b->keys, b->buffers, b->results) == 5, "%s", kvfs_error());
    CHECK(filled(b->buffers[1].data, size, (7ull << 32) + 1) && filled(b->buffers[2].data, size, (1ull << 32) + 2));
    /* Formatted again. */
    daemon_stop(false);
    d.uuid[0]++;
    daemon_start();
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == -ESTALE && says("another pool"));
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == -ESTALE);
    d.uuid[0]--;
    daemon_stop(false);
    /* No control socket at all: as a dead daemon. */
    char path[128];
    snprintf(path, sizeof(path), "%s/control.sock", d.directory);
    unlink(path);
    CHECK(kvfs_get(client, &b->keys, b->buffers, b->results) == 5);
    struct kvfs_client *none;
    CHECK(client_open("/mnt/test", d.directory, 1, "", NULL, &none) == -ENOTCONN && says("no daemon"));
    kvfs_close(client);
    kvfs_close(unverified);
    batch_free(b);
}

static void *crowd_exist(void *argument) {
    (void)argument;
    static const uint64_t size = 30000;
    struct batch *b = batch_new(0, 8, &size, 1, 0);
    while (!atomic_load(&churn.stop)) {
        batch_get(crowd.client, b, 1);
        kvfs_prestage(crowd.client, &b->keys);
    }
    batch_free(b);
    return NULL;
}

static void test_daemon_restarts_under_readers(void) {
    static const uint64_t size = 30000;
    pool_new(16384);
    crowd.client = connect_plain();
    batch_free(put_batch(crowd.client, 0, 8, &size, 1, 1));
    atomic_store(&churn.stop, false);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, crowd_exist, NULL) == 0);
    for (uint64_t i = 0; i < 8; i++) {
        usleep(60000);
        daemon_stop(false);
        usleep(20000);
        daemon_start();
        uint64_t until = milliseconds() + 5000 * slowness();
        while (statistics(crowd.client).reconnects < i / 2 + 1) {
            CHECK(milliseconds() < until);
            usleep(1000);
        }
    }
    atomic_store(&churn.stop, true);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    CHECK(statistics(crowd.client).reconnects >= 4);
    kvfs_close(crowd.client);
    daemon_stop(false);
}

/* The table cannot say: the daemon is asked. */
static void test_incomplete_table(void) {
    static const uint64_t size = 50000;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct batch *b = put_batch(client, 0, 5, &size, 1, 1);
    locked();
    d.incomplete = true;
    kvfs_table_set_complete(d.table, 0);
    unlocked();
    batch_get(client, b, 1);
    CHECK(get_one(client, "nothing", b->buffers[0].data, size) == -ENOENT);
    locked();
    CHECK(d.lookups > 0);
    unlocked();
    /* Two names may share a key: which of the two this is only the daemon knows. */
    uint64_t inode = inode_named("key-1");
    struct kvfs_record record;
    struct kvfs_attributes attributes;
    struct kvfs_file *file;
    locked();
    d.incomplete = false;
    kvfs_table_set_complete(d.table, 1);
    CHECK(kvfs_table_find_inode(d.table, inode, &record) == 0);
    record.flags |= KVFS_INODE_ASK;
    CHECK(kvfs_table_update(d.table, &record) == 0);
    uint32_t lookups = d.lookups;
    unlocked();
    batch_get(client, b, 1);
    locked();
    CHECK(d.lookups == lookups + 1);
    unlocked();
    CHECK(kvfs_find(client, "team/llama/6b/6b65792d31", &attributes) == -EAGAIN && kvfs_file_open(client, inode, &file) == -EAGAIN);
    CHECK(kvfs_find(client, "team/llama/6b/6b65792d32", &attributes) == 0);
    daemon_stop(false);
    CHECK(get_one(client, "nothing", b->buffers[0].data, size) == -ENOENT);
    batch_free(b);
    kvfs_close(client);
}

/* ---- a daemon that lies ---- */

static void test_hostile_welcomes(void) {
    pool_new(16384);
    struct kvfs_client *client;
    struct kvfs_options options = {.size = sizeof(options)};
    for (enum trick trick = SILENT; trick < TRICKS_OF_WELCOME; trick++) {
        locked();
        d.trick = trick;
        unlocked();
        int expected = -EPROTO;
        if (trick == SILENT || trick == HALF_WELCOME_FRAME || trick == FEW_DESCRIPTORS)
            expected = -ETIMEDOUT;
        else if (trick == TRUNCATED_WELCOME)
            expected = -ENOTCONN;
        else if (trick == REFUSE)
            expected = -EACCES;
        options.timeout_ms = expected == -ETIMEDOUT ? 150 : 5000 * slowness(); /* the others answer, on a busy machine late */
        uint64_t started = milliseconds();
        int r = client_open("/mnt/test", d.directory, 1, "team/llama", &options, &client);
        uint64_t took_ms = milliseconds() - started;
        CHECK_SAY(took_ms < options.timeout_ms + 1000 * slowness(), "trick %d: %llu ms", trick, (unsigned long long)took_ms);
        CHECK_SAY(r == expected, "trick %d: %d: %s", trick, r, kvfs_error());
        CHECK_SAY(says(d.directory), "trick %d: %s", trick, kvfs_error());
        CHECK(trick != REFUSE || says("no, not you"));
    }
    locked();
    d.trick = HONEST;
    unlocked();
    /* No right to write. */
    client = connect_with((struct kvfs_options){.flags = KVFS_READ_ONLY});
    CHECK(put_one(client, "a", "x", 1) == -EROFS && says("reading only"));
    kvfs_close(client);
    locked();
    d.read_only = true;
    unlocked();
    client = connect_plain();
    CHECK(put_one(client, "a", "x", 1) == -EROFS && says("no right"));
    kvfs_close(client);
    daemon_stop(false);
}

/* One request of each type, answered in every wrong way: an error in time; never a crash, never a success that is none. */
static void test_hostile_answers(void) {
    static const uint64_t size = 50000;
    static const uint16_t types[] = {WIRE_LOOKUP, WIRE_RESERVE, WIRE_COMMIT, WIRE_DELETE, WIRE_LIST};
    for (uint32_t t = 0; t < 5; t++)
        for (enum trick trick = HANG; trick < TRICKS_OF_ANSWERS; trick++) {
            /* Only look-ups have a short deadline: others may have to wait for eviction. */
            if (t > 0 && (trick == HANG || trick == HALF_FRAME || trick == HALF_PAYLOAD))
                continue;
            pool_new(16384);
            struct kvfs_client *client = connect_with((struct kvfs_options){.timeout_ms = 250 * slowness()});
            struct batch *b = put_batch(client, 0, 3, &size, 1, 1);
            uint8_t deleted[3], names[1000];
            uint32_t name_sizes[5];
            locked();
            d.trick = trick;
            d.trick_type = types[t];
            d.incomplete = t == 0;
            kvfs_table_set_complete(d.table, !d.incomplete);
            unlocked();
            uint64_t started = milliseconds();
            int r = 0;
            if (t == 0) {
                locked();
                CHECK(kvfs_table_remove(d.table, SHARD + 'k', 0) == 0); /* then the table cannot say */
                unlocked();
                r = kvfs_get(client, &b->keys, b->buffers, b->results);
                CHECK_SAY(r <= 0, "%d", r);
            } else if (t <= 2) {
                r = kvfs_put(client, &b->keys, b->buffers, b->results);
                for (uint32_t i = 0; i < 3 && trick != LONG_ANSWER && trick != STATUS_POSITIVE; i++)
                    CHECK_SAY(b->results[i] != 0, "type %u, trick %d: %d, %s", types[t], trick, r, kvfs_error());
            } else if (t == 3) {
                r = kvfs_delete(client, &b->keys, deleted);
            } else {
                r = kvfs_list(client, NULL, 0, names, sizeof(names), name_sizes, 5);
            }
            CHECK_SAY(milliseconds() - started < 2000 * slowness(), "type %u, trick %d: %llu ms", types[t], trick,
                      (unsigned long long)(milliseconds() - started));
            if (trick == HANG_UP || trick == GOODBYE_INSTEAD)
                CHECK_SAY(r == -ENOTCONN || (t == 0 && r == 0), "type %u, trick %d: %d", types[t], trick, r);
            else if (trick == HANG || trick == HALF_FRAME || trick == HALF_PAYLOAD)
                CHECK_SAY(r == -ETIMEDOUT || (t == 0 && r == 0), "type %u, trick %d: %d", types[t], trick, r);
            else if (trick == WRONG_ID || trick == WRONG_ANSWER || trick == HUGE_ANSWER || trick == STATUS_MIN)
                CHECK_SAY(r == -EPROTO, "type %u, trick %d: %d: %s", types[t], trick, r, kvfs_error());
            else if (trick == EMPTY_ANSWER && t > 0)
                CHECK_SAY(r == -EPROTO, "type %u: %d", types[t], r);
            /* And with an honest daemon all is well again. */
            locked();
            d.trick = HONEST;
            d.incomplete = false;
            kvfs_table_set_complete(d.table, 1);
            if (t == 0) {
                char shard[] = "6b";
                directory_put(SHARD + 0x6b, SPACE, shard);
            }
            unlocked();
            if (trick == RANDOM_ANSWER || t == 0)
                kvfs_get(client, &b->keys, b->buffers, b->results);
            batch_free(put_batch(client, 0, 3, &size, 1, 2));
            batch_get(client, b, 2);
            batch_free(b);
            kvfs_close(client);
            daemon_stop(false);
        }
}

static void test_hostile_reservations(void) {
    static const uint64_t sizes[] = {50000, 6 << 20};
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    locked();
    d.split = 2;
    unlocked();
    struct batch *b = put_batch(client, 0, 4, sizes, 2, 1);
    for (enum trick trick = RUN_BEYOND; trick < TRICKS_OF_RESERVE; trick++) {
        locked();
        d.trick = trick;
        unlocked();
        batch_fill(b, 2);
        int r = kvfs_put(client, &b->keys, b->buffers, b->results);
        if (trick == HEADER_TOO_SMALL) {
            CHECK(b->results[1] != 0 && b->results[3] != 0);
        } else {
            CHECK_SAY(r <= 0, "trick %d: %d", trick, r);
            for (uint32_t i = 0; i < 4; i++)
                CHECK_SAY(b->results[i] < 0, "trick %d, block %u", trick, i);
        }
        locked();
        d.trick = HONEST;
        unlocked();
        batch_free(put_batch(client, 0, 4, sizes, 2, 3));
        batch_get(client, b, 3);
    }
    /* A reservation that is too old to be written to. */
    locked();
    d.reservation_ms = 0;
    uint32_t aborted = d.aborted;
    unlocked();
    struct kvfs_client *late = connect_plain();
    batch_fill(b, 4);
    CHECK(kvfs_put(late, &b->keys, b->buffers, b->results) == 0);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(b->results[i] == -ETIMEDOUT);
    locked();
    CHECK(d.aborted == aborted + 4);
    unlocked();
    batch_get(client, b, 3);
    batch_free(b);
    kvfs_close(late);
    kvfs_close(client);
    daemon_stop(false);
}

/* ---- puts in windows ---- */

/* A window of the double's pool of 160 MiB is 5 MiB: 20 of these blocks. */
enum { WINDOW_BLOCKS = 90, WINDOW = 20 };
static const uint64_t window_size = 250000;

static struct batch *windows_new(uint64_t version) {
    struct batch *b = batch_new(0, WINDOW_BLOCKS, &window_size, 1, 0);
    batch_fill(b, version);
    return b;
}

/* Nothing stays reserved, and another put stores everything. */
static void windows_heal(struct kvfs_client *client, struct batch *b) {
    locked();
    d.trick = HONEST;
    d.fail_odd = 0;
    d.room = d.room_in_all = UINT32_MAX;
    CHECK_SAY(d.open == 0, "%u blocks are reserved", d.open);
    unlocked();
    batch_free(put_batch(client, 0, WINDOW_BLOCKS, &window_size, 1, 9));
    batch_get(client, b, 9);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_windows_go_on_while_commits_are_not_answered(void) {
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    locked();
    d.held_until = 3 * WINDOW + 1; /* two windows are written and a fourth is asked for before the first commit's answer */
    unlocked();
    struct batch *b = put_batch(client, 0, WINDOW_BLOCKS, &window_size, 1, 1);
    locked();
    CHECK(d.held_count == 0 && d.reserves == 5 && d.commits == 5 && d.committed == WINDOW_BLOCKS && d.open == 0);
    CHECK_SAY(d.open_most <= 4 * WINDOW, "%u blocks were reserved at one time", d.open_most);
    unlocked();
    batch_get(client, b, 1);
    windows_heal(client, b);
}

struct put_job { struct kvfs_client *client; struct batch *batch; int result; };

static void *put_in_thread(void *argument) {
    struct put_job *job = argument;
    job->result = kvfs_put(job->client, &job->batch->keys, job->batch->buffers, job->batch->results);
    return NULL;
}

static void test_a_look_up_passes_a_put_that_waits(void) {
    static const uint64_t one = 5000;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct batch *b = put_batch(client, 0, 1, &one, 1, 1);
    locked();
    d.held_until = UINT32_MAX; /* no commit is answered */
    kvfs_table_set_complete(d.table, 0);
    d.incomplete = true;
    unlocked();
    struct batch *other = windows_new(2);
    struct put_job job = {client, other, 0};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, put_in_thread, &job) == 0);
    uint64_t until = milliseconds() + 30000;
    for (bool waits = false; !waits;) {
        CHECK(milliseconds() < until);
        usleep(1000);
        locked();
        waits = d.held_count >= 1;
        unlocked();
    }
    uint64_t started = milliseconds();
    struct kvfs_keys missing = {(const uint8_t *)"no such key", (uint32_t[]){11}, 1, 0};
    uint8_t found = 1;
    CHECK(kvfs_exists(client, &missing, &found) == 0 && found == 0);
    CHECK(milliseconds() - started < 5000);
    locked();
    CHECK(d.lookups > 0);
    d.held_until = 0;
    unlocked();
    CHECK(kvfs_delete(client, &b->keys, &found) == 1); /* any request lets the double answer */
    pthread_join(thread, NULL);
    CHECK_SAY(job.result == WINDOW_BLOCKS, "%d", job.result);
    batch_free(other);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_a_commit_of_an_earlier_window_fails(void) {
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct batch *b = windows_new(1);
    locked();
    d.fail_odd = -EISDIR;
    unlocked();
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == WINDOW_BLOCKS / 2);
    for (uint32_t i = 0; i < WINDOW_BLOCKS; i++) {
        uint32_t inside = i % WINDOW;
        CHECK_SAY(b->results[i] == (inside % 2 ? -EISDIR : 0), "block %u: %lld", i, (long long)b->results[i]);
    }
    /* As a whole: what comes behind is given back, or was entered already. */
    locked();
    d.fail_odd = 0;
    d.trick = STATUS_ERROR;
    d.trick_type = WIRE_COMMIT;
    d.honest = 1;
    uint32_t committed = d.committed;
    unlocked();
    CHECK(kvfs_put(client, &b->keys, b->buffers, b->results) == -EIO);
    int64_t stored = 0;
    for (uint32_t i = 0; i < WINDOW_BLOCKS; i++) {
        CHECK_SAY(i < WINDOW ? b->results[i] == 0 : b->results[i] == -EIO || b->results[i] == -ECANCELED, "block %u: %lld", i,
                  (long long)b->results[i]);
        stored += b->results[i] == 0;
    }
    locked();
    CHECK(stored == WINDOW && d.committed >= committed + WINDOW);
    unlocked();
    windows_heal(client, b);
}

static void test_the_daemon_goes_between_two_windows(void) {
    static const uint16_t types[] = {WIRE_RESERVE, WIRE_COMMIT};
    for (uint32_t t = 0; t < 2; t++)
        for (uint32_t honest = 0; honest < 4; honest++) {
            pool_new(16384);
            struct kvfs_client *client = connect_plain();
            struct batch *b = windows_new(1);
            locked();
            d.trick = HANG_UP;
            d.trick_type = types[t];
            d.honest = honest;
            unlocked();
            int r = kvfs_put(client, &b->keys, b->buffers, b->results);
            CHECK_SAY(r == -ENOTCONN, "type %u, after %u: %d", types[t], honest, r);
            uint32_t stored = 0;
            for (uint32_t i = 0; i < WINDOW_BLOCKS; i++) {
                CHECK_SAY(b->results[i] == 0 || b->results[i] == -ENOTCONN || b->results[i] == -ECANCELED, "block %u: %lld", i,
                          (long long)b->results[i]);
                stored += b->results[i] == 0;
            }
            locked();
            CHECK_SAY(stored <= d.committed, "%u of %u", stored, d.committed);
            unlocked();
            windows_heal(client, b);
        }
}

static void test_no_room_in_a_later_window(void) {
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct batch *b = windows_new(1);
    for (uint32_t room = 1; room < 2 * WINDOW; room += 12) { /* what is committed makes room for what comes */
        locked();
        d.room = room;
        d.open_most = 0;
        unlocked();
        int r = kvfs_put(client, &b->keys, b->buffers, b->results);
        CHECK_SAY(r == WINDOW_BLOCKS, "room for %u: %d, %s", room, r, kvfs_error());
        locked();
        CHECK(d.open_most <= room && d.open == 0);
        unlocked();
        batch_get(client, b, 1);
    }
    for (uint32_t room = 0; room < 2 * WINDOW; room += 12) { /* nothing makes room */
        locked();
        d.room = UINT32_MAX;
        d.reserved = d.reserves = 0;
        d.room_in_all = room;
        unlocked();
        int r = kvfs_put(client, &b->keys, b->buffers, b->results);
        CHECK_SAY(r == (int)room, "room for %u: %d, %s", room, r, kvfs_error());
        for (uint32_t i = 0; i < WINDOW_BLOCKS; i++)
            CHECK_SAY(b->results[i] == (i < room ? 0 : -ENOSPC), "room for %u, block %u: %lld", room, i, (long long)b->results[i]);
        locked();
        CHECK_SAY(d.open == 0 && d.reserves <= 12, "%u requests", d.reserves);
        unlocked();
    }
    windows_heal(client, b);
}

/* ---- the rest ---- */

static void test_fork(void) {
    static const uint64_t size = 50000;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct batch *b = put_batch(client, 0, 4, &size, 1, 1);
    struct kvfs_file *file;
    CHECK(kvfs_file_open(client, inode_named("key-1"), &file) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        uint8_t found[4];
        int64_t known[4];
        uint32_t name_sizes[4];
        struct kvfs_client_information information;
        struct kvfs_attributes attributes;
        struct kvfs_file *other;
        bool good = kvfs_get(client, &b->keys, b->buffers, b->results) == -ECHILD && says("fork") &&
                    kvfs_put(client, &b->keys, b->buffers, b->results) == -ECHILD && kvfs_delete(client, &b->keys, found) == -ECHILD &&
                    kvfs_exists(client, &b->keys, found) == -ECHILD && kvfs_sizes(client, &b->keys, known) == -ECHILD &&
                    kvfs_list(client, NULL, 0, found, 4, name_sizes, 4) == -ECHILD && kvfs_prestage(client, &b->keys) == -ECHILD &&
                    kvfs_busy(client, found, 4) == -ECHILD && kvfs_client_information_get(client, &information) == -ECHILD &&
                    kvfs_find(client, "", &attributes) == -ECHILD && kvfs_file_open(client, 1, &other) == -ECHILD &&
                    kvfs_file_read(file, 0, b->buffers[0].data, 10) == -ECHILD;
        kvfs_close(client);
        _exit(good ? 0 : 1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    batch_get(client, b, 1);
    batch_free(put_batch(client, 0, 4, &size, 1, 2));
    kvfs_file_close(file);
    batch_free(b);
    kvfs_close(client);
    daemon_stop(false);
}

static void test_reports(void) {
    static const uint64_t size = 500;
    pool_new(16384);
    struct kvfs_client *client = connect_plain();
    struct batch *b = put_batch(client, 0, 300, &size, 1, 1);
    batch_get(client, b, 1);
    batch_get(client, b, 1);
    uint64_t until = milliseconds() + 30000, hits = 0;
    while (hits < CLIENT_HITS_MAX) { /* 600 reads: told before the client ends */
        CHECK(milliseconds() < until);
        usleep(1000);
        locked();
        hits = d.hits;
        unlocked();
    }
    usleep(1050000);
    batch_get(client, b, 1); /* a second later, the totals too */
    uint32_t reports = 0;
    while (!reports) {
        CHECK(milliseconds() < until);
        usleep(1000);
        locked();
        reports = d.reports;
        unlocked();
    }
    kvfs_close(client);
    for (bool all = false; !all;) {
        CHECK(milliseconds() < until);
        usleep(1000);
        locked();
        all = d.hits == 900 && d.report.gets == 900 && d.report.get_bytes == 900 * size && d.report.puts == 300;
        unlocked();
    }
    batch_free(b);
    daemon_stop(false);
}

int main(void) {
    alarm(300 * slowness());
    signal(SIGPIPE, SIG_DFL); /* it must not be needed */
    devices_open();
    RUN(test_keys);
    RUN(test_overlaps);
    RUN(test_round_trips);
    RUN(test_batch_of_thousands);
    RUN(test_depths);
    RUN(test_large_headers);
    RUN(test_file_reads);
    RUN(test_churn);
    RUN(test_corruption);
    RUN(test_device_errors);
    RUN(test_deadlines);
    RUN(test_restart_while_stuck);
    RUN(test_restart_while_a_write_is_stuck);
    RUN(test_a_late_write_is_told_again_when_it_has_landed);
    RUN(test_one_stuck_device);
    RUN(test_close_while_stuck);
    RUN(test_more_threads_than_lanes);
    RUN(test_prestage);
    RUN(test_daemon_dies);
    RUN(test_daemon_restarts_under_readers);
    RUN(test_incomplete_table);
    RUN(test_hostile_welcomes);
    RUN(test_hostile_answers);
    RUN(test_hostile_reservations);
    RUN(test_windows_go_on_while_commits_are_not_answered);
    RUN(test_a_look_up_passes_a_put_that_waits);
    RUN(test_a_commit_of_an_earlier_window_fails);
    RUN(test_the_daemon_goes_between_two_windows);
    RUN(test_no_room_in_a_later_window);
    RUN(test_fork);
    RUN(test_reports);
    devices_close();
    return 0;
}
