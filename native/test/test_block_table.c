/* sources: block/block_table.c block/block_table_reader.c block/checksum.c block/checksum_avx2.c block/checksum_avx512.c */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "block/checksum.h"
#include "block/table.h"
#include "table_records.h"

#define SECRET 0x0123456789abcdefULL
#define EPOCH 77

static struct kvfs_table *create(uint64_t records_max) {
    struct kvfs_table *table;

    CHECK(kvfs_table_create(records_max, SECRET, EPOCH, &table) == 0);
    return table;
}

static struct kvfs_table *attach(const struct kvfs_table *table) {
    struct kvfs_table *reader;

    CHECK(kvfs_table_attach(kvfs_table_fd(table), SECRET, &reader) == 0);
    return reader;
}

static struct kvfs_table_statistics statistics_of(const struct kvfs_table *table) {
    struct kvfs_table_statistics statistics;

    kvfs_table_statistics(table, &statistics);
    return statistics;
}

/* ---- the model: two arrays ---- */

struct model_inode {
    bool present;
    int64_t name; /* -1: none */
    uint64_t parent;
    uint64_t version;
    bool nameless; /* flag set */
};

struct model {
    struct kvfs_table *table;
    struct kvfs_table *reader;
    struct model_inode *inodes; /* inode number i + 1 */
    int64_t *names;             /* index of the inode, or -1 */
    uint64_t inode_count;
    uint64_t name_count;
    uint64_t live;
    uint64_t max;
    uint64_t version;
    uint64_t seed;
    uint64_t first_seed;
};

#define MODEL_CHECK(model, condition) CHECK_SAY(condition, "seed %lu, step %lu", (model)->first_seed, (model)->version)

static uint32_t name_text(uint64_t name, char out[32]) { return (uint32_t)sprintf(out, "name-%lu", name / 3); }

static uint64_t name_parent(uint64_t name) { return 1000 + name % 3; }

static void model_check_name(struct model *model, uint64_t name) {
    char text[32];
    uint64_t low, high;
    struct kvfs_record got;
    int rc = kvfs_table_find_name(model->reader, name_parent(name), text, name_text(name, text), &got);
    int64_t expected = model->names[name];

    if (expected < 0) {
        MODEL_CHECK(model, rc == -ENOENT);
        return;
    }
    MODEL_CHECK(model, rc == 0);
    MODEL_CHECK(model, got.inode == (uint64_t)expected + 1 && got.version == model->inodes[expected].version);
    MODEL_CHECK(model, got.parent == name_parent(name));
    kvfs_name_key(name_parent(name), text, name_text(name, text), SECRET, &low, &high);
    MODEL_CHECK(model, got.key_low == low && got.key_high == high);
    MODEL_CHECK(model, record_is_whole(&got, 0));
    MODEL_CHECK(model, got.slot <= model->max);
}

static void model_check_inode(struct model *model, uint64_t index) {
    struct kvfs_record got;
    const struct model_inode *expected = &model->inodes[index];
    int rc = kvfs_table_find_inode(model->reader, index + 1, &got);

    if (!expected->present) {
        MODEL_CHECK(model, rc == -ENOENT);
        return;
    }
    MODEL_CHECK(model, rc == 0);
    MODEL_CHECK(model, got.inode == index + 1 && got.version == expected->version && got.parent == expected->parent);
    MODEL_CHECK(model, record_is_whole(&got, expected->nameless ? KVFS_INODE_NAMELESS : 0));
    MODEL_CHECK(model, got.slot <= model->max);
}

static void model_check_all(struct model *model) {
    struct kvfs_table_statistics statistics = statistics_of(model->reader);

    MODEL_CHECK(model, statistics.records == model->live && statistics.records_max == model->max && !statistics.ambiguous);
    uint64_t blocks = 0;

    for (uint64_t i = 0; i < model->inode_count; i++) {
        struct kvfs_record got;

        model_check_inode(model, i);
        if (kvfs_table_find_inode(model->reader, i + 1, &got) == 0)
            blocks += got.kind == KVFS_KIND_FILE && got.flags & KVFS_INODE_SEALED && !(got.flags & KVFS_INODE_NAMELESS);
    }
    MODEL_CHECK(model, statistics.blocks == blocks);
    for (uint64_t i = 0; i < model->name_count; i++)
        model_check_name(model, i);
}

static void model_put(struct model *model, uint64_t index, int64_t name, bool keep) {
    struct model_inode *inode = &model->inodes[index];
    int64_t holder = name < 0 ? -1 : model->names[name];
    bool replaces = holder >= 0 && holder != (int64_t)index;
    uint64_t parent = name < 0 ? 1 : name_parent((uint64_t)name);
    struct kvfs_record record = record_of(index + 1, parent, model->version);
    char text[32];
    uint32_t text_size = name < 0 ? 0 : name_text((uint64_t)name, text);
    int rc = kvfs_table_put(model->table, &record, text, text_size, keep);

    if (!inode->present && model->live - (replaces && !keep) >= model->max) {
        MODEL_CHECK(model, rc == -ENOSPC);
        return;
    }
    MODEL_CHECK(model, rc == 0);
    if (replaces) {
        model->inodes[holder].name = -1;
        model->inodes[holder].nameless = keep;
        model->inodes[holder].present = keep;
        model->live -= !keep;
    }
    model->live += !inode->present;
    if (inode->present && inode->name >= 0)
        model->names[inode->name] = -1;
    if (name >= 0)
        model->names[name] = (int64_t)index;
    *inode = (struct model_inode){.present = true, .name = name, .parent = parent, .version = model->version};
}

static void model_update(struct model *model, uint64_t index) {
    struct model_inode *inode = &model->inodes[index];
    struct kvfs_record record = record_of(index + 1, inode->parent, model->version);
    int rc = kvfs_table_update(model->table, &record);

    MODEL_CHECK(model, rc == (inode->present ? 0 : -ENOENT));
    inode->version = model->version;
}

static void model_remove(struct model *model, uint64_t index, bool keep) {
    struct model_inode *inode = &model->inodes[index];
    int rc = kvfs_table_remove(model->table, index + 1, keep);

    MODEL_CHECK(model, rc == (inode->present ? 0 : -ENOENT));
    if (!inode->present)
        return;
    if (inode->name >= 0)
        model->names[inode->name] = -1;
    inode->name = -1;
    inode->present = keep;
    inode->nameless = keep;
    model->live -= !keep;
}

static void model_run(uint64_t seed, uint64_t inode_count, uint64_t name_count, uint64_t max, uint64_t steps) {
    struct model model = {.inode_count = inode_count, .name_count = name_count, .max = max, .seed = seed, .first_seed = seed};

    model.table = create(max);
    model.reader = attach(model.table);
    kvfs_table_set_complete(model.table, 1);
    model.inodes = calloc(inode_count, sizeof(*model.inodes));
    model.names = malloc(name_count * sizeof(*model.names));
    CHECK(model.inodes && model.names);
    for (uint64_t i = 0; i < name_count; i++)
        model.names[i] = -1;
    for (uint64_t i = 0; i < steps; i++) {
        uint64_t index = random_below(&model.seed, inode_count);
        uint64_t name = random_below(&model.seed, name_count);
        /* Phases of growth and of decline, so that chains and free lists see both. */
        bool growing = i * 4 / steps % 2 == 0;
        uint64_t dice = random_below(&model.seed, 100);

        model.version++;
        if (dice < (growing ? 75 : 25))
            model_put(&model, index, (int64_t)name, random_below(&model.seed, 4) == 0);
        else if (dice < (growing ? 78 : 28))
            model_put(&model, index, -1, false);
        else if (dice < (growing ? 90 : 45))
            model_update(&model, index);
        else
            model_remove(&model, index, random_below(&model.seed, 4) == 0);
        model_check_inode(&model, index);
        model_check_name(&model, name);
        if (i % (steps / 8) == 0)
            model_check_all(&model);
    }
    for (uint64_t i = 0; i < inode_count; i++) {
        model.version++;
        model_remove(&model, i, false);
    }
    model_check_all(&model);
    CHECK(model.live == 0 && statistics_of(model.table).overflow_buckets == 0);
    free(model.inodes);
    free(model.names);
    kvfs_table_destroy(model.reader);
    kvfs_table_destroy(model.table);
}

static void test_the_table_agrees_with_two_arrays(void) {
    for (uint64_t seed = 1; seed <= 60; seed++)
        model_run(seed, 40, 50, seed % 3 ? 1000 : 20, 2000);
    for (uint64_t seed = 101; seed <= 103; seed++)
        model_run(seed, 20000, 20000, seed == 101 ? 6000 : 1000000, 120000);
}

/* ---- single claims ---- */

static void put(struct kvfs_table *table, uint64_t inode, const char *name, int keep) {
    struct kvfs_record record = record_of(inode, 1, 1);

    CHECK(kvfs_table_put(table, &record, name, (uint32_t)strlen(name), keep) == 0);
}

static int find(const struct kvfs_table *table, const char *name, struct kvfs_record *out) {
    return kvfs_table_find_name(table, 1, name, (uint32_t)strlen(name), out);
}

static void test_an_incomplete_table_believes_no_miss(void) {
    struct kvfs_table *table = create(10);
    struct kvfs_record record;

    CHECK(find(table, "a", &record) == -EAGAIN);
    CHECK(kvfs_table_find_inode(table, 2, &record) == -EAGAIN);
    put(table, 2, "a", 0);
    CHECK(find(table, "a", &record) == 0 && record.inode == 2);
    kvfs_table_set_complete(table, 1);
    CHECK(find(table, "b", &record) == -ENOENT);
    kvfs_table_set_complete(table, 0);
    CHECK(find(table, "b", &record) == -EAGAIN);
    kvfs_table_destroy(table);
}

static void test_a_record_marked_ask_is_found_with_its_flag(void) {
    struct kvfs_table *table = create(10);
    struct kvfs_record record = record_of(5, 1, 1), got;

    record.flags |= KVFS_INODE_ASK;
    CHECK(kvfs_table_put(table, &record, "a", 1, 0) == 0);
    CHECK(find(table, "a", &got) == 0 && (got.flags & KVFS_INODE_ASK));
    kvfs_table_destroy(table);
}

static void test_records_that_do_not_fit_are_refused(void) {
    struct kvfs_table *table = create(10);
    struct kvfs_table *none;
    char name[300] = {0};
    struct kvfs_record good = record_of(5, 1, 1), bad, got;

    kvfs_table_set_complete(table, 1);
    bad = good, bad.inode = 0;
    CHECK(kvfs_table_put(table, &bad, "a", 1, 0) == -EINVAL);
    bad = good, bad.kind = 4;
    CHECK(kvfs_table_put(table, &bad, "a", 1, 0) == -EINVAL);
    bad = good, bad.size = 1ULL << 48;
    CHECK(kvfs_table_put(table, &bad, "a", 1, 0) == -EINVAL);
    CHECK(kvfs_table_put(table, &good, name, 256, 0) == -ENAMETOOLONG);
    CHECK(kvfs_table_put(table, &good, name, 255, 0) == 0);
    CHECK(kvfs_table_find_name(table, 1, name, 255, &got) == 0);
    CHECK(kvfs_table_find_name(table, 1, name, 256, &got) == -ENOENT);
    CHECK(kvfs_table_find_name(table, 1, name, 0, &got) == -ENOENT);
    CHECK(kvfs_table_create(0, SECRET, 1, &none) == -EINVAL);
    CHECK(kvfs_table_create(1ULL << 32, SECRET, 1, &none) == -EINVAL);
    kvfs_table_destroy(table);
}

static void test_a_client_can_map_the_table_only_read_only(void) {
    struct kvfs_table *table = create(1000);
    struct kvfs_table *reader = attach(table);
    int fd = kvfs_table_fd(table);
    char path[64];
    int again;
    struct stat status;
    struct kvfs_record record;

    CHECK(kvfs_table_fd(reader) == -1 && kvfs_table_mount_epoch(reader) == EPOCH);
    CHECK(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED && errno == EPERM);
    void *read_only = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(read_only != MAP_FAILED);
    CHECK(mprotect(read_only, 4096, PROT_READ | PROT_WRITE) == -1);
    munmap(read_only, 4096);
    CHECK(pwrite(fd, "x", 1, 0) == -1 && errno == EPERM);
    CHECK(ftruncate(fd, 4096) == -1 && errno == EPERM);
    CHECK(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == -1);
    CHECK(fstat(fd, &status) == 0 && ftruncate(fd, status.st_size + 4096) == -1);
    sprintf(path, "/proc/self/fd/%d", fd);
    again = open(path, O_RDWR | O_CLOEXEC);
    if (again >= 0) {
        CHECK(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0) == MAP_FAILED);
        close(again);
    }
    /* No seal forbids to take the memory of what is sparse: who is not the owner opens nothing for writing. */
    int readable = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(readable >= 0 && fallocate(readable, 0, 0, status.st_size) == -1 && errno == EBADF);
    CHECK((status.st_mode & 07777) == 0444);
    if (geteuid() == 0) {
        pid_t child = fork();
        if (child == 0) {
            if (setresgid(65534, 65534, 65534) < 0 || setresuid(65534, 65534, 65534) < 0)
                _exit(2);
            _exit(open(path, O_RDWR | O_CLOEXEC) == -1 && errno == EACCES ? 0 : 1);
        }
        int how;
        CHECK(waitpid(child, &how, 0) == child && how == 0);
    }
    close(readable);
    blkcnt_t before = status.st_blocks;
    put(table, 9, "seen", 0);
    CHECK(find(reader, "seen", &record) == 0 && record.inode == 9);
    CHECK(fstat(fd, &status) == 0 && status.st_blocks <= before + 64); /* the daemon's own mapping still takes what it needs, and no more */
    kvfs_table_destroy(reader);
    kvfs_table_destroy(table);
}

static int copy_of(const struct kvfs_table *table, unsigned char **out, uint64_t *size) {
    struct stat status;
    int fd = memfd_create("copy", MFD_ALLOW_SEALING | MFD_CLOEXEC);

    CHECK(fd >= 0 && fstat(kvfs_table_fd(table), &status) == 0);
    *size = (uint64_t)status.st_size;
    *out = malloc(*size);
    CHECK(*out && pread(kvfs_table_fd(table), *out, *size, 0) == (ssize_t)*size);
    CHECK(pwrite(fd, *out, *size, 0) == (ssize_t)*size);
    return fd;
}

static void test_attach_rejects_a_corrupt_header(void) {
    struct kvfs_table *table = create(100), *reader;
    unsigned char *bytes;
    uint64_t size;
    int fd = copy_of(table, &bytes, &size), file;

    CHECK(kvfs_table_attach(fd, SECRET, &reader) == -EBADMSG); /* it could still shrink */
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    CHECK(kvfs_table_attach(fd, SECRET, &reader) == 0);
    kvfs_table_destroy(reader);
    CHECK(kvfs_table_attach(fd, SECRET + 1, &reader) == -EBADMSG);
    for (uint64_t bit = 0; bit < 56 * 8; bit++) {
        unsigned char byte = bytes[bit / 8] ^ (unsigned char)(1u << bit % 8);

        CHECK(pwrite(fd, &byte, 1, (off_t)(bit / 8)) == 1);
        CHECK_SAY(kvfs_table_attach(fd, SECRET, &reader) == -EBADMSG, "bit %lu", bit);
        CHECK(pwrite(fd, &bytes[bit / 8], 1, (off_t)(bit / 8)) == 1);
    }
    CHECK(ftruncate(fd, (off_t)size + 4096) == 0);
    CHECK(kvfs_table_attach(fd, SECRET, &reader) == -EBADMSG);
    file = memfd_create("short", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    CHECK(file >= 0 && fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    CHECK(kvfs_table_attach(file, SECRET, &reader) == -EBADMSG);
    CHECK(kvfs_table_attach(-1, SECRET, &reader) == -EBADF);
    close(file);
    close(fd);
    free(bytes);
    kvfs_table_destroy(table);
}

static void test_a_torn_table_never_crashes_a_reader(void) {
    struct kvfs_table *table = create(2000);
    unsigned char *bytes;
    uint64_t size;
    char name[32];

    for (uint64_t i = 0; i < 1500; i++) {
        sprintf(name, "name-%lu", i);
        put(table, i + 2, name, 0);
    }
    for (uint64_t seed = 1; seed <= 40; seed++) {
        uint64_t state = seed;
        int fd = copy_of(table, &bytes, &size);
        struct kvfs_table *reader;
        struct kvfs_table_statistics statistics;
        struct kvfs_record record;

        /* All but the constants, which attach checks; dense in the buckets, where the links are. */
        for (int i = 0; i < 3000; i++) {
            uint64_t at = 64 + random_below(&state, (i % 2 ? size : 40000) - 64);

            bytes[at] = seed % 2 ? (unsigned char)random_next(&state) : 0xff;
        }
        CHECK(pwrite(fd, bytes, size, 0) == (ssize_t)size && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
        CHECK(kvfs_table_attach(fd, SECRET, &reader) == 0);
        for (uint32_t count = 0; count < 600; count++) {
            uint32_t counts[2] = {count % 7 ? count : (uint32_t)random_next(&state), (uint32_t)random_next(&state) % 300};

            CHECK(pwrite(fd, counts, sizeof(counts), 64) == sizeof(counts));
            for (int i = 0; i < 30; i++) {
                uint64_t inode = 2 + random_below(&state, 1600);
                int rc;

                sprintf(name, "name-%lu", inode - 2);
                rc = find(reader, name, &record);
                CHECK(rc == 0 || rc == -ENOENT || rc == -EAGAIN);
                rc = kvfs_table_find_inode(reader, inode, &record);
                CHECK((rc == 0 && record.inode == inode) || rc == -ENOENT || rc == -EAGAIN);
            }
        }
        kvfs_table_statistics(reader, &statistics);
        kvfs_table_destroy(reader);
        close(fd);
        free(bytes);
    }
    kvfs_table_destroy(table);
}

/* ---- load ---- */

/* Appends a record; returns its size. */
static uint64_t append(unsigned char *at, uint64_t inode, const char *name, uint8_t flags) {
    uint16_t name_size = (uint16_t)strlen(name);
    struct kvfs_inode_record record = {
        .record_size = 128 + ((name_size + 7u) & ~7u),
        .kind = KVFS_KIND_FILE,
        .flags = flags,
        .name_size = name_size,
        .inode = inode,
        .parent = 1,
        .version = inode * 3,
        .size = inode * 5,
        .generation = inode * 7,
        .segment = (uint32_t)inode * 11,
        .page = (uint32_t)inode * 13,
        .header_pages = 1,
        .mtime_ns = -5,
        .ctime_ns = (int64_t)inode,
        .mode = 0100644,
        .uid = 1,
        .gid = 2,
        .nlink = 1,
    };

    memset(at, 0, record.record_size);
    memcpy(at, &record, sizeof(record));
    memcpy(at + sizeof(record), name, name_size);
    return record.record_size;
}

static void test_load_puts_every_record(void) {
    struct kvfs_table *table = create(1000);
    unsigned char *buffer = malloc(200000);
    uint64_t size = 0;
    struct kvfs_record record;
    char name[32];

    CHECK(buffer);
    kvfs_table_set_complete(table, 1);
    size += append(buffer + 1 + size, 1, "", 0);
    for (uint64_t i = 2; i <= 500; i++) {
        sprintf(name, "file-%lu", i);
        size += append(buffer + 1 + size, i, name, KVFS_INODE_SEALED);
    }
    size += append(buffer + 1 + size, 501, "gone", KVFS_INODE_SEALED | KVFS_INODE_NAMELESS);
    CHECK(kvfs_table_load(table, buffer + 1, size) == 501); /* unaligned, too */
    CHECK(kvfs_table_load(table, buffer + 1, size) == 501); /* and again changes nothing */
    CHECK(kvfs_table_load(table, buffer, 0) == 0);
    CHECK(statistics_of(table).records == 501);
    for (uint64_t i = 2; i <= 500; i++) {
        sprintf(name, "file-%lu", i);
        CHECK(find(table, name, &record) == 0 && record.inode == i && record.version == i * 3 && record.size == i * 5);
        CHECK(record.mtime_ns == -5 && record.flags == KVFS_INODE_SEALED && record.mode == 0100644 && record.parent == 1);
    }
    CHECK(kvfs_table_find_inode(table, 1, &record) == 0 && record.flags == 0);
    CHECK(find(table, "gone", &record) == -ENOENT);
    CHECK(kvfs_table_find_inode(table, 501, &record) == 0 && (record.flags & KVFS_INODE_NAMELESS));
    free(buffer);
    kvfs_table_destroy(table);
}

static void test_load_stops_at_a_bad_record(void) {
    /* The field to spoil in the third of five records: its offset and size, and its value. */
    static const struct {
        uint64_t offset, size, value;
    } spoils[] = {
        {0, 4, 0},        {0, 4, 120}, {0, 4, 132},         {0, 4, 1 << 20},  {0, 4, 0xfffffff8}, {4, 1, 0},
        {4, 1, 4},        {6, 2, 0},   {6, 2, 256},         {6, 2, 0xffff},   {8, 8, 0},          {32, 8, 1ULL << 48},
        {56, 4, 1 << 24}, {60, 4, 1},  {60, 4, 0xffffffff}, {88, 4, 1 << 16}, {104, 4, 1},        {104, 4, 0xffffffff},
    };

    for (unsigned i = 0; i < sizeof(spoils) / sizeof(*spoils); i++) {
        struct kvfs_table *table = create(100);
        unsigned char buffer[2000];
        uint64_t starts[6] = {0}, size;
        struct kvfs_record record;
        static const char *const names[] = {"a", "b", "c", "d", "e"};

        kvfs_table_set_complete(table, 1);
        for (int k = 0; k < 5; k++)
            starts[k + 1] = starts[k] + append(buffer + starts[k], (uint64_t)k + 2, names[k], 0);
        size = starts[5];
        memcpy(buffer + starts[2] + spoils[i].offset, &spoils[i].value, spoils[i].size);
        /* A copy of exactly this size, so that the address sanitizer sees a read behind it. */
        unsigned char *exact = malloc(size);
        CHECK(exact);
        memcpy(exact, buffer, size);
        CHECK_SAY(kvfs_table_load(table, exact, size) == -EBADMSG, "case %u", i);
        CHECK_SAY(statistics_of(table).records == 2, "case %u", i);
        CHECK(find(table, "b", &record) == 0 && find(table, "d", &record) == -ENOENT);
        free(exact);
        kvfs_table_destroy(table);
    }
    for (uint64_t size = 1; size < 136; size++) {
        struct kvfs_table *table = create(100);
        unsigned char *exact = malloc(size), buffer[200];

        CHECK(exact && append(buffer, 2, "a", 0) == 136);
        memcpy(exact, buffer, size);
        CHECK_SAY(kvfs_table_load(table, exact, size) == -EBADMSG, "size %lu", size);
        free(exact);
        kvfs_table_destroy(table);
    }
}

/* ---- memory ---- */

static uint64_t memory_in_use(const struct kvfs_table *table) {
    struct stat status;

    CHECK(fstat(kvfs_table_fd(table), &status) == 0);
    return (uint64_t)status.st_blocks * 512;
}

static void check_bytes(struct kvfs_table *table, uint64_t records) {
    struct kvfs_table_statistics statistics = statistics_of(table);

    CHECK(statistics.records == records);
    CHECK_SAY(statistics.bytes < 144 * records, "%lu bytes for %lu records", statistics.bytes, records);
    CHECK_SAY((statistics.buckets + statistics.overflow_buckets) * 64 < 22 * records, "%lu and %lu buckets for %lu records", statistics.buckets,
              statistics.overflow_buckets, records);
    /* The kernel's word: nothing else was touched. */
    CHECK_SAY(memory_in_use(table) <= statistics.bytes + 16 * 4096, "%lu, not %lu", memory_in_use(table), statistics.bytes);
}

/* ---- records that eviction cannot take, by who pays ---- */

enum { ALICE = 1, BOB = 2, GUEST = 3, PAYERS = 4 };
struct paid {
    int64_t kept[PAYERS];
};

static void count_kept(void *of, uint32_t user, int change) {
    CHECK(user < PAYERS && (change == 1 || change == -1));
    ((struct paid *)of)->kept[user] += change;
}

static int paid_is(const struct paid *paid, int64_t alice, int64_t bob, int64_t guest) {
    return paid->kept[ALICE] == alice && paid->kept[BOB] == bob && paid->kept[GUEST] == guest;
}

static struct kvfs_record owned(uint64_t inode, uint8_t kind, uint32_t uid, uint8_t flags) {
    struct kvfs_record record = record_of(inode, 1, inode);

    record.kind = kind;
    record.uid = uid;
    record.flags = flags;
    return record;
}

static void test_each_pays_for_the_records_that_eviction_cannot_take(void) {
    struct kvfs_table *table = create(10);
    struct paid paid = {{0}};
    struct kvfs_record directory = owned(1, KVFS_KIND_DIRECTORY, ALICE, 0), link = owned(2, KVFS_KIND_SYMLINK, BOB, 0);
    struct kvfs_record file = owned(3, KVFS_KIND_FILE, ALICE, 0), block = owned(4, KVFS_KIND_FILE, BOB, KVFS_INODE_SEALED);

    kvfs_table_watch(table, count_kept, &paid);
    CHECK(kvfs_table_put(table, &directory, "d", 1, 0) == 0 && kvfs_table_put(table, &link, "l", 1, 0) == 0);
    CHECK(kvfs_table_put(table, &file, "f", 1, 0) == 0 && paid_is(&paid, 2, 1, 0));
    CHECK(kvfs_table_put(table, &block, "b", 1, 0) == 0 && paid_is(&paid, 2, 1, 0)); /* eviction may take a block */
    /* Sealed it is a block, without a name it is none again. */
    file.flags = KVFS_INODE_SEALED;
    CHECK(kvfs_table_update(table, &file) == 0 && paid_is(&paid, 1, 1, 0));
    CHECK(kvfs_table_remove(table, 3, 1) == 0 && paid_is(&paid, 2, 1, 0));
    CHECK(kvfs_table_remove(table, 3, 0) == 0 && paid_is(&paid, 1, 1, 0));
    /* A rename moves the record, a new owner the charge; a record that another replaces is gone. */
    CHECK(kvfs_table_put(table, &directory, "e", 1, 0) == 0 && paid_is(&paid, 1, 1, 0));
    directory.uid = BOB;
    CHECK(kvfs_table_update(table, &directory) == 0 && paid_is(&paid, 0, 2, 0));
    CHECK(kvfs_table_put(table, &directory, "l", 1, 0) == 0 && paid_is(&paid, 0, 1, 0));
    /* A guest pays whoever its users are, also after a rename. Of a block nobody pays. */
    CHECK(kvfs_table_charge(table, 1, GUEST) == 0 && paid_is(&paid, 0, 0, 1));
    CHECK(kvfs_table_put(table, &directory, "g", 1, 0) == 0 && paid_is(&paid, 0, 0, 1));
    directory.uid = ALICE;
    CHECK(kvfs_table_update(table, &directory) == 0 && paid_is(&paid, 0, 0, 1));
    CHECK(kvfs_table_charge(table, 4, GUEST) == 0 && kvfs_table_remove(table, 4, 1) == 0 && paid_is(&paid, 0, 1, 1));
    CHECK(kvfs_table_charge(table, 99, GUEST) == -ENOENT);
    /* The next record in that place is its owner's. */
    CHECK(kvfs_table_remove(table, 1, 0) == 0 && kvfs_table_remove(table, 4, 0) == 0 && paid_is(&paid, 0, 0, 0));
    CHECK(kvfs_table_put(table, &link, "l", 1, 0) == 0 && paid_is(&paid, 0, 1, 0));
    kvfs_table_destroy(table);
}

static void test_memory_grows_with_the_records_only(void) {
    struct kvfs_table *table = create(500000000);
    struct kvfs_record record;
    char name[32];
    uint64_t full;

    CHECK(memory_in_use(table) <= 16 * 4096 && statistics_of(table).bytes <= 16 * 4096);
    kvfs_table_set_complete(table, 1);
    for (uint64_t i = 1; i <= 1000000; i++) {
        record = record_of(i + 1, 1, 1);
        CHECK(kvfs_table_put(table, &record, name, (uint32_t)sprintf(name, "name-%lu", i), 0) == 0);
        if (i >= 10000 && i % 10000 == 0)
            check_bytes(table, i);
    }
    full = statistics_of(table).bytes;
    for (uint64_t i = 1; i <= 1000000; i += 7) {
        CHECK(kvfs_table_find_name(table, 1, name, (uint32_t)sprintf(name, "name-%lu", i), &record) == 0 && record.inode == i + 1);
        CHECK(kvfs_table_find_inode(table, i + 1, &record) == 0 && record_is_whole(&record, 0));
    }
    /* Renames, removals and puts use again what they free. */
    for (uint64_t i = 1; i <= 300000; i++) {
        record = record_of(i + 1, 1, 2);
        CHECK(kvfs_table_put(table, &record, name, (uint32_t)sprintf(name, "other-%lu", i), 0) == 0);
    }
    for (uint64_t i = 1; i <= 300000; i++)
        CHECK(kvfs_table_remove(table, i + 1, 0) == 0);
    CHECK(statistics_of(table).records == 700000);
    for (uint64_t i = 1; i <= 300000; i++) {
        record = record_of(i + 2000000, 1, 2);
        CHECK(kvfs_table_put(table, &record, name, (uint32_t)sprintf(name, "third-%lu", i), 0) == 0);
    }
    CHECK(statistics_of(table).records == 1000000 && statistics_of(table).bytes <= full + full / 100);
    kvfs_table_destroy(table);
}

int main(void) {
    RUN(test_an_incomplete_table_believes_no_miss);
    RUN(test_a_record_marked_ask_is_found_with_its_flag);
    RUN(test_records_that_do_not_fit_are_refused);
    RUN(test_a_client_can_map_the_table_only_read_only);
    RUN(test_attach_rejects_a_corrupt_header);
    RUN(test_a_torn_table_never_crashes_a_reader);
    RUN(test_load_puts_every_record);
    RUN(test_load_stops_at_a_bad_record);
    RUN(test_the_table_agrees_with_two_arrays);
    RUN(test_each_pays_for_the_records_that_eviction_cannot_take);
    RUN(test_memory_grows_with_the_records_only);
    return 0;
}
