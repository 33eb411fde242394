/* A double of the daemon for tests of libkvfs. It listens on a unix socket, keeps a real block table, and places blocks on real device files
 * (O_DIRECT where the file system has it). It can be told to answer wrongly, late, or not at all. */
#ifndef KVFS_TEST_DAEMON_H
#define KVFS_TEST_DAEMON_H

#include "block/feed.h"
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

#include "../check.h"

#define DEVICES 4u
#define ZONE ((uint64_t)4 << 20)
#define SEGMENTS 10u
#define ZONES_OFFSET ((uint64_t)1 << 20)
#define SECRET 0x1234567890abcdefull
#define RUNS_MAX 3u
#define CONNECTIONS_MAX 64u
#define TEAM 2u /* inode numbers */
#define SPACE 3u
#define SHARD 256u
#define BLOCK 1000u
#define BLOCKS_MAX 60000u
#define GUARD 4096u
#define TABLED 100000u /* inode numbers of directories that tables of requests name */
#define TABLED_MAX 2000u

/* ---- the double of the daemon: the pool ---- */

struct block {
    char name[KVFS_NAME_MAX];
    uint32_t name_size;
    int connection;  /* its reserver; -1: nobody */
    bool live, late; /* late: its client said that its writes may still land */
    uint64_t size, seed;
    uint32_t header_pages, run_count;
    struct kvfs_run runs[RUNS_MAX];
    struct kvfs_inode_record record;
};

struct bytes {
    uint8_t *data;
    uint64_t size, capacity;
};

/* The rules that the double can be told to break. */
enum trick {
    HONEST,
    SILENT,
    HALF_WELCOME_FRAME,
    OTHER_VERSION,
    OTHER_TYPE,
    SHORT_WELCOME,
    TRUNCATED_WELCOME,
    HUGE_WELCOME,
    NO_DEVICES,
    MANY_DEVICES,
    WIDE_STRIPE,
    MANY_SEGMENTS,
    ZONE_OF_0,
    BAD_MEMBER,
    NO_DESCRIPTORS,
    FEW_DESCRIPTORS,
    EXTRA_DESCRIPTORS,
    UNSEALED_TABLE,
    ZERO_TABLE,
    OTHER_EPOCH,
    OTHER_SECRET,
    REFUSE,
    REFUSE_WITHOUT_MESSAGE,
    TRICKS_OF_WELCOME,
    HANG,
    HALF_FRAME,
    HALF_PAYLOAD,
    WRONG_ID,
    WRONG_ANSWER,
    HUGE_ANSWER,
    EMPTY_ANSWER,
    LONG_ANSWER,
    RANDOM_ANSWER,
    STATUS_MIN,
    STATUS_POSITIVE,
    STATUS_ERROR,
    HANG_UP,
    CLOSE_INSTEAD,
    TRICKS_OF_ANSWERS,
    RUN_BEYOND,
    RUN_TOO_LONG,
    RUNS_OF_0,
    RECORD_TOO_LARGE,
    RECORD_OF_OTHER,
    HEADER_OF_0,
    HEADER_TOO_SMALL,
    EXTENT_BEYOND,
    TRICKS_OF_RESERVE
};

static struct {
    pthread_mutex_t lock;
    pthread_t thread;
    bool running, direct;
    char directory[64];
    int devices[DEVICES], devices_read[DEVICES], listener, wake[2];
    struct geometry geometry; /* for header_build */
    struct kvfs_member members[SEGMENTS * DEVICES];
    struct kvfs_table *table;
    uint64_t epoch, generations[SEGMENTS];
    uint8_t uuid[16];
    uint32_t cursors[RUNS_MAX], currents[RUNS_MAX], victim;
    struct block *blocks;
    uint32_t block_count;
    uint64_t version;
    int connections[CONNECTIONS_MAX];
    /* Set by tests. */
    uint32_t split; /* runs a block has */
    bool header_alone, read_only, incomplete, writes_lost;
    uint32_t header_extra;   /* pages more than a header needs */
    uint32_t oldest, newest; /* versions of the protocol that it speaks */
    enum trick trick;
    uint16_t trick_type; /* the request it is played on */
    uint32_t reservation_ms;
    int32_t refuse_odd, fail_odd; /* error of every other item of RESERVE, COMMIT */
    uint32_t honest;              /* requests of trick_type before the trick is played */
    uint32_t held_until;          /* blocks reserved before any COMMIT is answered; then they are, the last one first */
    uint32_t room, room_in_all;   /* blocks that there is room for: reserved at one time, and ever */
    char *tabled[TABLED_MAX];     /* their paths below the namespace */
    uint32_t tabled_count;
    uint64_t parents[4096]; /* of the blocks of the last RESERVE that had any, their hashes */
    struct bytes held[8];
    uint32_t held_count;
    void (*before_lease)(void); /* called once, before a LEASE is looked at */
    bool lease_odd;             /* every other block of a LEASE is refused */
    /* Looked at by tests. */
    uint32_t hellos, accepted, reserved, committed, aborted, late, not_begun, lookups, reports, bad_blocks, reserves, commits, open, open_most;
    uint64_t hits, touched, bad_inode, bad_segment;
    uint64_t last_lease; /* the only one in force */
    uint32_t lease_frames, releases, leased;
    struct kvfs_client_statistics report;
    /* The feed: made by the first who asks, and gone with the daemon. */
    struct feed *feed;
    bool no_feed;                           /* it is promised without a descriptor */
    const char *(*path_of)(uint64_t inode); /* NULL: it has gone */
    uint32_t paths_asked;
} d;

static inline void locked(void) { pthread_mutex_lock(&d.lock); }
static inline void unlocked(void) { pthread_mutex_unlock(&d.lock); }

static inline void *pages_get(uint64_t pages) {
    void *memory;
    CHECK(posix_memalign(&memory, PAGE, (pages ? pages : 1) * PAGE) == 0);
    memset(memory, 0, pages * PAGE);
    return memory;
}

/* Pages of a segment, unit by unit; memory is page aligned. */
static inline void store_io(bool write, uint32_t segment, uint32_t page, uint8_t *data, uint64_t pages) {
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

static inline struct block *block_of(uint64_t inode) {
    CHECK(inode >= BLOCK && inode < BLOCK + d.block_count);
    return &d.blocks[inode - BLOCK];
}

/* A segment is used again under a new generation; what lies in it is gone. */
static inline void segment_reuse(uint32_t segment) {
    for (uint32_t i = 0; i < d.block_count; i++)
        for (uint32_t k = 0; d.blocks[i].live && k < d.blocks[i].run_count; k++)
            if (d.blocks[i].runs[k].segment == segment) {
                CHECK(kvfs_table_remove(d.table, BLOCK + i, 0) == 0);
                d.blocks[i].live = false;
            }
    d.generations[segment]++;
}

static inline bool segment_reserved(uint32_t segment) {
    for (uint32_t i = 0; i < d.block_count; i++)
        for (uint32_t k = 0; d.blocks[i].connection >= 0 && k < d.blocks[i].run_count; k++)
            if (d.blocks[i].runs[k].segment == segment)
                return true;
    return false;
}

static inline bool segment_held(uint32_t segment) {
    for (uint32_t i = 0; i < RUNS_MAX; i++)
        if (d.currents[i] == segment)
            return true;
    return segment_reserved(segment);
}

/* Behind it are the summaries: no run lies there. */
static inline uint32_t runs_end(void) {
    uint32_t summary_pages = d.geometry.segment_pages / 64 > 2 ? d.geometry.segment_pages / 64 : 2;
    return d.geometry.segment_pages - 2 * summary_pages;
}

/* Run i of every block goes to stream i: the runs of one block lie in different segments. */
static inline struct kvfs_run allocate(uint32_t stream, uint32_t pages) {
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

static inline uint32_t directory_record(uint8_t *out, uint64_t inode, uint64_t parent, const char *name) {
    struct kvfs_inode_record r = {
        .kind = KVFS_KIND_DIRECTORY, .name_size = (uint16_t)strlen(name), .inode = inode, .parent = parent, .version = 1, .mode = 040755, .nlink = 2};
    r.record_size = (uint32_t)(sizeof(r) + round_up(r.name_size, 8));
    memset(out, 0, r.record_size);
    memcpy(out, &r, sizeof(r));
    memcpy(out + sizeof(r), name, r.name_size);
    return r.record_size;
}

static inline void directory_put(uint64_t inode, uint64_t parent, const char *name) {
    uint8_t record[512];
    if (kvfs_table_load(d.table, record, directory_record(record, inode, parent, name)) != 1)
        CHECK(false);
}

static inline uint64_t shard_inode(const char *name) {
    unsigned byte;
    CHECK(sscanf(name, "%2x", &byte) == 1);
    return SHARD + byte;
}

/* The directory at a path below the namespace, made if it is not there: as shards have it, or one of the others. */
static inline uint64_t directory_at(const char *path, uint64_t size) {
    unsigned byte;
    int end = 0;
    char text[KVFS_PATH_MAX + 1];
    memcpy(text, path, size);
    text[size] = 0;
    directory_put(TEAM, 1, "team");
    directory_put(SPACE, TEAM, "llama");
    if (size == 0)
        return SPACE;
    const char *slash = strrchr(text, '/');
    uint64_t parent = directory_at(text, slash ? (uint64_t)(slash - text) : 0);
    if (size == 2 && sscanf(text, "%2x%n", &byte, &end) == 1 && end == 2) {
        directory_put(SHARD + byte, SPACE, text);
        return SHARD + byte;
    }
    uint32_t i = 0;
    while (i < d.tabled_count && strcmp(d.tabled[i], text) != 0)
        i++;
    CHECK(i < TABLED_MAX);
    if (i == d.tabled_count)
        d.tabled[d.tabled_count++] = strdup(text);
    directory_put(TABLED + i, parent, slash ? slash + 1 : text);
    return TABLED + i;
}

/* A place for a block in a directory, and what its header is to say. record holds the record, extents included, when it returns. */
static inline struct block *block_place(uint64_t parent, const char *name, uint32_t name_size, uint64_t size, uint32_t split, uint8_t *record,
                                        uint32_t *record_size, uint8_t *ancestors, uint32_t *ancestors_size, uint64_t hole_from, uint64_t hole_to) {
    CHECK(d.block_count < BLOCKS_MAX);
    struct block *block = &d.blocks[d.block_count++];
    uint64_t inode = BLOCK + d.block_count - 1;
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
            extents[extent_count++] =
                (struct kvfs_extent){block->runs[i].generation, block->runs[i].segment, block->runs[i].page + before, ends[i] - starts[i], starts[i]};
    }
    if (split == 1)
        extent_count = 0;
    struct kvfs_inode_record r = {.record_size = (uint32_t)(fixed + extent_count * sizeof(*extents)),
                                  .kind = KVFS_KIND_FILE,
                                  .flags = KVFS_INODE_SEALED,
                                  .name_size = (uint16_t)name_size,
                                  .inode = inode,
                                  .parent = parent,
                                  .version = ++d.version,
                                  .size = size,
                                  .generation = block->runs[0].generation,
                                  .segment = block->runs[0].segment,
                                  .page = block->runs[0].page,
                                  .header_pages = block->header_pages,
                                  .extent_count = extent_count,
                                  .mode = 0100644,
                                  .nlink = 1};
    memset(record, 0, r.record_size);
    memcpy(record, &r, sizeof(r));
    memcpy(record + sizeof(r), name, name_size);
    memcpy(record + fixed, extents, extent_count * sizeof(*extents));
    *record_size = r.record_size;
    block->record = r;
    return block;
}

/* The name leads to this block from now on. */
static inline void block_enter(struct block *block) {
    struct kvfs_record record, old;
    record_from_inode(&block->record, &record);
    if (kvfs_table_find_name(d.table, record.parent, block->name, block->name_size, &old) == 0 && old.inode != record.inode)
        block_of(old.inode)->live = false;
    CHECK(kvfs_table_put(d.table, &record, block->name, block->name_size, 0) == 0);
    block->live = true;
    block->connection = -1;
}

/* Write a block as the daemon does by itself. With old, the block moves: its number, name and bytes stay. */
static inline uint64_t block_write(const char *name, uint32_t name_size, const uint8_t *data, uint64_t size, uint32_t split, uint64_t hole_from,
                                   uint64_t hole_to, struct block *old) {
    static uint8_t record[4096], ancestors[1024];
    uint32_t record_size, ancestors_size, count = d.block_count, page = 0;
    struct block *block =
        block_place(shard_inode(name), name, name_size, size, split, record, &record_size, ancestors, &ancestors_size, hole_from, hole_to);
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
    uint64_t *leaves = malloc((leaf_count + 1) * sizeof(*leaves));
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
static inline void block_corrupt(struct block *block, int32_t page) {
    uint8_t *memory = pages_get(1);
    uint32_t at = page < 0 ? block->runs[0].page + (uint32_t)(-1 - page) : block->runs[0].page + block->header_pages + (uint32_t)page;
    store_io(false, block->runs[0].segment, at, memory, 1);
    memory[17] ^= 4;
    store_io(true, block->runs[0].segment, at, memory, 1);
    free(memory);
}

/* ---- the double of the daemon: what it says ---- */

static inline void add(struct bytes *out, const void *data, uint64_t size) {
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

static inline bool say(int fd, const void *data, uint64_t size) {
    const uint8_t *at = data;
    while (size) {
        ssize_t n = send(fd, at, size, MSG_NOSIGNAL);
        if (n < 0)
            return false;
        at += n, size -= (uint64_t)n;
    }
    return true;
}

static inline bool read_exactly(int fd, void *data, uint64_t size) { return size == 0 || recv(fd, data, size, MSG_WAITALL) == (ssize_t)size; }

static inline void say_descriptors(int fd, const int *fds, uint32_t count) {
    union {
        char space[CMSG_SPACE(sizeof(int) * 16)];
        struct cmsghdr align;
    } control = {0};
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

static inline int false_table(bool sealed) {
    int fd = memfd_create("no-table", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, 1 << 20) == 0);
    if (sealed)
        CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    return fd;
}

/* False: hang up. */
static inline bool say_welcome(int fd) {
    struct wire_hello hello;
    struct bytes out = {0};
    enum trick trick = d.trick;
    if (!read_exactly(fd, &hello, sizeof(hello)) || memcmp(hello.magic, "KVFSCLI1", 8) != 0)
        return false;
    d.hellos++;
    if (trick == SILENT)
        return true;
    if (hello.version < d.oldest || hello.version > d.newest) {
        char message[128];
        snprintf(message, sizeof(message), "the daemon speaks version %u of the client protocol, the client %u", d.newest, hello.version);
        struct wire_frame no = {.size = (uint32_t)strlen(message), .type = WIRE_HELLO, .status = -EPROTO};
        say(fd, &no, sizeof(no));
        say(fd, message, no.size);
        return false;
    }
    if (trick == REFUSE || trick == REFUSE_WITHOUT_MESSAGE) {
        const char *message = trick == REFUSE ? "no, not you" : "";
        struct wire_frame no = {.size = (uint32_t)strlen(message), .type = WIRE_HELLO, .status = trick == REFUSE ? -EACCES : INT32_MIN};
        say(fd, &no, sizeof(no));
        say(fd, message, no.size);
        return false;
    }
    struct wire_welcome w = {.version = hello.version,
                             .writable = !d.read_only && !(hello.flags & KVFS_READ_ONLY),
                             .mount_epoch = d.epoch,
                             .secret = SECRET,
                             .zone_size = ZONE,
                             .stripe_unit = d.geometry.stripe_unit,
                             .stripe_width = DEVICES,
                             .segment_count = SEGMENTS,
                             .device_count = DEVICES,
                             .reservation_ms = d.reservation_ms};
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

/* Where items begin; *where is filled, and the inode numbers of the directories in the request's table. */
static inline uint8_t *items_of(uint8_t *payload, struct wire_where *where, uint64_t directories[KVFS_WIRE_DIRECTORIES_MAX]) {
    memcpy(where, payload, sizeof(*where));
    CHECK(where->base == 1 && where->space_size == 10 && memcmp(payload + sizeof(*where), "team/llama", 10) == 0);
    uint8_t *at = payload + sizeof(*where) + 16;
    uint64_t count = 0, size;
    if (where->flags & WIRE_TABLE) {
        memcpy(&count, at, 8);
        CHECK(count >= 1 && count <= KVFS_WIRE_DIRECTORIES_MAX);
        at += 8;
    }
    for (uint64_t i = 0; i < count; i++, at += 8 + round_up(size, 8)) {
        memcpy(&size, at, 8);
        directories[i] = directory_at((char *)at + 8, size);
    }
    return at;
}

static inline void reserve(int connection, uint8_t *payload, struct bytes *out) {
    static uint8_t record[8192], ancestors[1024];
    struct wire_where where;
    uint64_t directories[KVFS_WIRE_DIRECTORIES_MAX];
    uint8_t *at = items_of(payload, &where, directories);
    bool full = false;
    d.reserves++;
    for (uint32_t i = 0; i < where.count; i++) {
        struct wire_reserve item;
        memcpy(&item, at, sizeof(item));
        at += sizeof(item);
        if (where.flags & WIRE_PARENTS) {
            memcpy(&d.parents[i], at, 8);
            at += 8;
        }
        char *name = (char *)at, shard[3] = {name[0], name[1], 0};
        at += round_up(item.name_size, 8);
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
        uint64_t parent = where.flags & WIRE_TABLE ? directories[item.directory] : directory_at(shard, 2);
        uint32_t record_size, ancestors_size;
        struct block *block = block_place(parent, name, item.name_size, item.size, d.split, record, &record_size, ancestors, &ancestors_size, 0, 0);
        block->connection = connection;
        reserved = (struct wire_reserved){.reservation = (uint64_t)(block - d.blocks) + BLOCK,
                                          .header_pages = block->header_pages,
                                          .run_count = block->run_count,
                                          .record_size = record_size,
                                          .ancestors_size = ancestors_size};
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

static inline void commit(uint8_t *payload, struct bytes *out) {
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

static inline void delete(uint8_t *payload, struct bytes *out) {
    struct wire_where where;
    uint64_t directories[KVFS_WIRE_DIRECTORIES_MAX];
    uint8_t *at = items_of(payload, &where, directories), *answer = calloc(where.count + 1, 1);
    for (uint32_t i = 0; i < where.count; i++) {
        struct wire_delete item;
        struct kvfs_record record;
        memcpy(&item, at, sizeof(item));
        const char *name = (char *)at + sizeof(item);
        uint64_t parent = where.flags & WIRE_TABLE ? directories[item.directory] : shard_inode(name);
        if (kvfs_table_find_name(d.table, parent, name, item.name_size, &record) == 0) {
            CHECK(kvfs_table_remove(d.table, record.inode, 0) == 0);
            block_of(record.inode)->live = false;
            answer[i] = 1;
        }
        at += sizeof(item) + round_up(item.name_size, 8);
    }
    add(out, answer, where.count);
    out->size = where.count;
    free(answer);
}

static inline int by_name(const void *a, const void *b) {
    const struct block *x = *(struct block *const *)a, *y = *(struct block *const *)b;
    int r = memcmp(x->name, y->name, min_u64(x->name_size, y->name_size));
    return r ? r : x->name_size < y->name_size ? -1 : x->name_size > y->name_size;
}

static inline void list(uint8_t *payload, struct bytes *out) {
    struct wire_where where;
    uint8_t *at = items_of(payload, &where, NULL);
    struct block after = {0}, *after_pointer = &after, **sorted = malloc((d.block_count + 1) * sizeof(*sorted));
    uint64_t size, count = 0, total = 0;
    memcpy(&size, at, 8);
    CHECK(size <= sizeof(after.name));
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

static inline void lease(const uint8_t *payload, uint64_t size, struct bytes *out) {
    struct wire_lease head;
    uint8_t held[KVFS_WIRE_ITEMS_MAX];
    uint64_t count = (size - sizeof(head)) / 8, inode, any = 0;
    CHECK(size >= sizeof(head) + 8 && size % 8 == 0 && count <= KVFS_WIRE_ITEMS_MAX);
    memcpy(&head, payload, sizeof(head));
    CHECK(head.milliseconds && !head.reserved && (!head.lease || head.lease == d.last_lease));
    if (d.before_lease)
        d.before_lease();
    d.before_lease = NULL;
    for (uint64_t i = 0; i < count; i++) {
        struct kvfs_record record;
        memcpy(&inode, payload + sizeof(head) + 8 * i, 8);
        held[i] = kvfs_table_find_inode(d.table, inode, &record) == 0 && !(d.lease_odd && i % 2);
        any += held[i];
    }
    uint64_t number = head.lease ? head.lease : any ? ++d.last_lease : 0;
    d.lease_frames++;
    d.leased += (uint32_t)any;
    add(out, &number, 8);
    add(out, held, count);
    out->size = 8 + count;
}

/* This answer comes later. */
static inline void hold(const struct wire_frame *head, const uint8_t *data, uint64_t size) {
    CHECK(d.held_count < sizeof(d.held) / sizeof(d.held[0]));
    struct bytes *held = &d.held[d.held_count++];
    add(held, head, sizeof(*head));
    add(held, data, size);
    CHECK(held->size == sizeof(*head) + size);
}

/* Returns the status; the feed's descriptor, if that is asked for, is to come with the answer. */
static inline int32_t events(const uint8_t *payload, uint32_t size, struct bytes *out, int *descriptor) {
    struct wire_events request;
    CHECK(size == sizeof(request));
    memcpy(&request, payload, sizeof(request));
    CHECK(request.reserved == 0);
    if (request.operation == KVFS_WIRE_EVENTS_PATH) {
        const char *path = d.path_of ? d.path_of(request.inode) : NULL;
        d.paths_asked++;
        if (path)
            add(out, path, strlen(path));
        out->size = path ? strlen(path) : 0; /* not padded */
        return path ? 0 : -ENOENT;
    }
    CHECK(request.operation == KVFS_WIRE_EVENTS_BEGIN && request.inode == 0);
    if (!d.feed)
        CHECK(feed_create(FEED_SIZE_MIN, &d.feed) == 0);
    struct wire_feed feed = {.size = feed_size(d.feed)};
    feed_end(d.feed, &feed.position, &feed.number);
    add(out, &feed, sizeof(feed));
    *descriptor = d.no_feed ? -1 : feed_fd(d.feed);
    return 0;
}

static inline bool say_head(int fd, const struct wire_frame *head, int descriptor) {
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    struct iovec iov = {(void *)(uintptr_t)head, sizeof(*head)};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof(control.space)};
    if (descriptor < 0)
        return say(fd, head, sizeof(*head));
    struct cmsghdr *part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(part), &descriptor, sizeof(int));
    return sendmsg(fd, &message, MSG_NOSIGNAL) == sizeof(*head);
}

/* False: hang up. */
static inline bool answer(int connection, int fd) {
    struct wire_frame frame;
    struct bytes out = {0};
    if (!read_exactly(fd, &frame, sizeof(frame)))
        return false;
    CHECK(frame.size <= KVFS_WIRE_SIZE_MAX);
    uint8_t *payload = malloc(frame.size + 1u);
    bool good = read_exactly(fd, payload, frame.size);
    int32_t status = 0;
    int descriptor = -1;
    if (good && frame.type == WIRE_HITS) {
        CHECK(frame.size % 8 == 0);
        d.hits += frame.size / 8;
    } else if (good && frame.type == WIRE_TOUCH) {
        CHECK(frame.size && frame.size % 8 == 0);
        d.touched += frame.size / 8;
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
            delete (payload, &out);
        } else if (frame.type == WIRE_LIST) {
            list(payload, &out);
        } else if (frame.type == WIRE_LEASE) {
            lease(payload, frame.size, &out);
        } else if (frame.type == WIRE_RELEASE) {
            uint64_t number, ended;
            CHECK(frame.size == 8);
            memcpy(&number, payload, 8);
            ended = number == d.last_lease && d.leased;
            d.leased = ended ? 0 : d.leased;
            d.releases++;
            add(&out, &ended, 8);
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
                struct kvfs_inode_record r = {.record_size = sizeof(r),
                                              .kind = record.kind,
                                              .flags = record.flags,
                                              .inode = record.inode,
                                              .parent = record.parent,
                                              .version = record.version,
                                              .size = record.size,
                                              .generation = record.generation,
                                              .segment = record.segment,
                                              .page = record.page,
                                              .header_pages = record.header_pages,
                                              .extent_count = record.extent_count};
                add(&out, &r, sizeof(r));
            }
            d.lookups++;
        } else if (frame.type == WIRE_EVENTS) {
            status = events(payload, frame.size, &out, &descriptor);
        } else {
            CHECK_SAY(false, "a request of type %u", frame.type);
        }
        struct wire_frame head = {.size = (uint32_t)out.size, .type = frame.type, .status = status, .id = frame.id};
        struct bytes lie = {0};
        uint64_t size = out.size, seed = frame.id;
        head.id += trick == WRONG_ID;
        head.type = trick == WRONG_ANSWER ? WIRE_DESCRIPTORS : trick == CLOSE_INSTEAD ? WIRE_CLOSE : head.type;
        if (trick == HUGE_ANSWER)
            head.size = KVFS_WIRE_SIZE_MAX + 1;
        if (trick == EMPTY_ANSWER || trick == STATUS_MIN || trick == CLOSE_INSTEAD)
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
            good = say_head(fd, &head, descriptor) && say(fd, lie.data ? lie.data : out.data, trick == HALF_PAYLOAD ? size / 2 : size);
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

static inline void hang_up(uint32_t i) {
    close(d.connections[i]);
    d.connections[i] = -1;
    for (uint32_t k = 0; k < d.block_count; k++)
        if (d.blocks[k].connection == (int)i) {
            d.blocks[k].connection = -1;
            d.open--;
        }
}

static inline void *daemon_main(void *nothing) {
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

/* A new mount: a new epoch, and a new table of the live blocks. */
static inline void daemon_start(void) {
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

static inline void daemon_stop(bool close_frame) {
    CHECK(write(d.wake[1], "x", 1) == 1);
    pthread_join(d.thread, NULL);
    close(d.listener);
    for (uint32_t i = 0; i < CONNECTIONS_MAX; i++)
        if (d.connections[i] >= 0) {
            struct wire_frame frame = {.type = WIRE_CLOSE};
            if (close_frame)
                say(d.connections[i], &frame, sizeof(frame));
            hang_up(i);
        }
    close(d.wake[0]);
    close(d.wake[1]);
    kvfs_table_destroy(d.table);
    d.table = NULL;
    feed_destroy(d.feed);
    d.feed = NULL;
    d.running = false;
}

/* A pool without blocks, and a daemon that behaves. */
static inline void pool_new(uint64_t stripe_unit) {
    CHECK(!d.running);
    d.geometry =
        (struct geometry){.secret = SECRET, .zone_size = ZONE, .stripe_unit = stripe_unit, .stripe_width = DEVICES, .segment_count = SEGMENTS};
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
    d.oldest = KVFS_WIRE_OLDEST;
    d.newest = KVFS_WIRE_VERSION;
    d.refuse_odd = d.fail_odd = 0;
    d.honest = d.held_until = 0;
    d.room = d.room_in_all = UINT32_MAX;
    d.reserves = d.commits = d.open = d.open_most = 0;
    d.hellos = d.accepted = d.reserved = d.committed = d.aborted = d.late = d.not_begun = d.lookups = d.reports = d.bad_blocks = 0;
    while (d.tabled_count)
        free(d.tabled[--d.tabled_count]);
    d.hits = d.touched = d.last_lease = 0;
    d.lease_frames = d.releases = d.leased = 0;
    d.lease_odd = false;
    memset(d.uuid, 7, sizeof(d.uuid));
    daemon_start();
}

static inline void devices_open(void) {
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

static inline void devices_close(void) {
    while (d.tabled_count)
        free(d.tabled[--d.tabled_count]);
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

#endif
