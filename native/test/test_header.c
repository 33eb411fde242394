/* sources: base block */
/* Block headers: what is built reads back; and a device that tears them, returns old pages, or lies with right checksums proves nothing. */
#include "block/block.h"

#include "check.h"

#define SECRET 0x9e3779b97f4a7c15ull
#define ROUNDS 300

static const struct geometry geometry = {.secret = SECRET, .mount_epoch = 3, .segment_count = 8, .segment_pages = 1u << 16};

/* A block and its header as the device holds it. */
struct block {
    struct desc *desc; /* `whole` in memory, verified */
    uint8_t *whole;
    struct kvfs_record record;
    uint64_t *leaves;
    char name[KVFS_NAME_MAX];
    uint32_t name_size;
};

static uint64_t pieces_pages(const struct kvfs_extent *extents, uint32_t count) {
    uint64_t pages = 0;
    for (uint32_t i = 0; i < count; i++)
        pages += extents[i].page_count;
    return pages;
}

static struct block block_make(uint64_t size, uint32_t name_size, uint32_t extent_count, uint32_t ancestors, uint64_t seed) {
    struct block b = {.name_size = name_size};
    uint32_t bare = (uint32_t)(sizeof(struct kvfs_inode_record) + round_up(name_size, 8)), pages = (uint32_t)pages_of(size);
    struct kvfs_inode_record r = {.kind = KVFS_KIND_FILE,
                                  .flags = KVFS_INODE_SEALED,
                                  .name_size = (uint16_t)name_size,
                                  .inode = (3ull << KVFS_COUNTER_BITS) + seed,
                                  .parent = 2,
                                  .version = (3ull << KVFS_COUNTER_BITS) + seed + 1,
                                  .size = size,
                                  .generation = 3ull << KVFS_COUNTER_BITS | 7,
                                  .segment = 1,
                                  .page = 100,
                                  .header_pages = kvfs_header_pages(size, bare, ancestors * bare, extent_count),
                                  .mode = 0100644,
                                  .nlink = 1,
                                  .record_size = bare};
    struct kvfs_extent *extents = calloc(extent_count + 1, sizeof(*extents));
    for (uint32_t i = 0; i < extent_count; i++) { /* each in the next segment */
        uint32_t from = pages * i / extent_count;
        extents[i] = (struct kvfs_extent){r.generation, i % 8, 1 + i * 40, pages * (i + 1) / extent_count - from, from};
    }
    CHECK(pieces_pages(extents, extent_count) == (extent_count ? pages : 0));
    for (uint32_t i = 0; i < name_size; i++)
        b.name[i] = (char)('a' + (seed + i) % 26);
    uint8_t *record = calloc(1, bare), *above = calloc(ancestors + 1, bare);
    memcpy(record, &r, sizeof(r));
    memcpy(record + sizeof(r), b.name, name_size);
    for (uint32_t i = 0; i < ancestors; i++)
        memcpy(above + i * bare, record, bare);
    b.leaves = calloc(pages + 1, sizeof(*b.leaves));
    for (uint32_t i = 0; i < pages; i++)
        b.leaves[i] = random_next(&seed);
    b.desc = desc_new(r.header_pages);
    CHECK_SAY(header_build(&geometry, b.desc, record, bare, above, ancestors * bare, extents, extent_count, b.leaves, r.header_pages) == 0,
              "%lu bytes, a name of %u, %u extents, %u above", size, name_size, extent_count, ancestors);
    CHECK(posix_memalign((void **)&b.whole, PAGE, r.header_pages * PAGE) == 0);
    memcpy(b.whole, b.desc->header, r.header_pages * PAGE);
    struct kvfs_block_header h;
    memcpy(&h, b.whole, sizeof(h));
    memcpy(&r, b.whole + h.record_offset, sizeof(r));
    record_from_inode(&r, &b.record);
    free(record);
    free(above);
    free(extents);
    return b;
}

static void block_free(struct block *b) {
    desc_put(b->desc);
    free(b->whole);
    free(b->leaves);
}

/* The answer of a reader of the whole header to these bytes. */
static int whole_read(const struct block *b, const uint8_t *header) {
    struct desc *desc = desc_new(b->record.header_pages);
    memcpy(desc->header, header, b->record.header_pages * PAGE);
    int r = desc_verify(&geometry, desc, &b->record);
    if (r == 0)
        CHECK(desc->leaf_count == pages_of(b->record.size) && memcmp(desc->leaves, b->leaves, 8ull * desc->leaf_count) == 0);
    desc_put(desc);
    return r;
}

/* The answer of a reader of some leaves, which has only those pages that it asked for. *read: how many. */
static int part_read(const struct block *b, const uint8_t *header, uint32_t first, uint32_t end, uint32_t *read) {
    struct desc *desc = desc_new(b->record.header_pages);
    memset(desc->header, 0xa5, b->record.header_pages * PAGE);
    CHECK(desc_narrow(desc, &b->record, first, end) == 0);
    int r = -EAGAIN;
    *read = 0;
    for (uint32_t turn = 0; r == -EAGAIN; turn++) {
        CHECK_SAY(turn < b->record.header_pages + 1, "leaves %u to %u", first, end);
        for (uint32_t page = 0; page < desc->header_pages; page++)
            if (desc->parts[page] == PART_WANTED) {
                memcpy(desc->header + page * PAGE, header + page * PAGE, PAGE);
                desc->parts[page] = PART_READ;
                ++*read;
            }
        r = desc_verify_part(&geometry, desc, &b->record, first, end);
    }
    if (r == 0)
        CHECK(memcmp(desc->leaves + first, b->leaves + first, 8ull * (end - first)) == 0);
    desc_put(desc);
    return r;
}

/* Both readers, of all leaves. */
static bool reads(const struct block *b, const uint8_t *header) {
    uint32_t pages;
    int whole = whole_read(b, header), part = part_read(b, header, 0, (uint32_t)pages_of(b->record.size), &pages);
    CHECK(whole == part && (whole == 0 || whole == -EBADMSG));
    return whole == 0;
}

/* All checksums of a header made right again: the device lies, and has the secret. */
static void sums_make(uint8_t *header, uint32_t pages) {
    struct kvfs_block_header h;
    memcpy(&h, header, sizeof(h));
    for (uint32_t i = pages; i-- > 1;) {
        uint64_t sum = kvfs_checksum(header + i * PAGE, PAGE, SECRET);
        memcpy(header + sizeof(h) + 8ull * (i - 1), &sum, 8);
    }
    h.checksum = 0;
    memcpy(header, &h, sizeof(h));
    h.checksum = kvfs_checksum(header, PAGE, SECRET);
    memcpy(header, &h, sizeof(h));
}

/* The reader's answer to a header with one changed field, and right checksums. */
static bool lie(const struct block *b, uint64_t offset, const void *value, uint64_t size) {
    uint8_t *header = NULL;
    CHECK(posix_memalign((void **)&header, PAGE, b->record.header_pages * PAGE) == 0);
    memcpy(header, b->whole, b->record.header_pages * PAGE);
    memcpy(header + offset, value, size);
    sums_make(header, b->record.header_pages);
    bool right = reads(b, header);
    free(header);
    return right;
}
#define LIE(b, field, value) lie(b, offsetof(struct kvfs_block_header, field), &(value), sizeof(((struct kvfs_block_header *)0)->field))

static void test_what_is_built_reads_back(void) {
    static const uint64_t sizes[] = {0, 1, 4096, 4097, 1 << 20, 2 << 20, 16 << 20};
    static const uint32_t pages[] = {1, 1, 1, 1, 1, 2, 9};
    for (uint32_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        struct block b = block_make(sizes[i], 32, 0, 1, i + 1);
        struct kvfs_block_header h;
        memcpy(&h, b.whole, sizeof(h));
        CHECK_SAY(b.record.header_pages == pages[i] && h.version == 2 && h.leaf_count == pages_of(sizes[i]), "size %lu", sizes[i]);
        CHECK(reads(&b, b.whole));
        CHECK(h.parent == 0 && h.parent_check == 0 && h.keep_until_ns == 0);
        block_free(&b);
    }
}

/* Sizes around the edges of pages: kvfs_header_pages() is enough, and its place for them is never a page too many for the parts. */
static void test_a_header_has_room_for_its_parts(void) {
    uint64_t seed = 4;
    for (uint32_t i = 0; i < ROUNDS; i++) {
        uint64_t size = random_below(&seed, 40 << 20), pages = pages_of(size);
        struct block b = block_make(size, 1 + (uint32_t)random_below(&seed, 255), (uint32_t)random_below(&seed, min_u64(pages, 200) + 1),
                                    (uint32_t)random_below(&seed, 12), i + 1);
        struct kvfs_block_header h;
        memcpy(&h, b.whole, sizeof(h));
        CHECK(h.leaves_offset % 8 == 0 && h.leaves_offset + 8ull * h.leaf_count + 8 + 24 + 8 >= (h.header_pages - 1) * PAGE);
        CHECK(reads(&b, b.whole));
        for (uint32_t turn = 0; turn < 4 && pages; turn++) {
            uint32_t first = (uint32_t)random_below(&seed, pages), end = first + 1 + (uint32_t)random_below(&seed, pages - first), read;
            CHECK(part_read(&b, b.whole, first, end, &read) == 0 && read <= h.header_pages);
        }
        block_free(&b);
    }
}

/* A page of the header that was there before, of zeros, of another block, or of the same block in another generation of the segment. */
static void test_a_torn_header_is_none(void) {
    struct block b = block_make(16 << 20, 40, 0, 1, 1), other = block_make(16 << 20, 40, 0, 1, 2);
    uint32_t pages = b.record.header_pages, read;
    uint8_t *header = NULL;
    CHECK(pages == 9 && other.record.header_pages == pages && posix_memalign((void **)&header, PAGE, pages * PAGE) == 0);
    for (uint32_t page = 0; page < pages; page++)
        for (uint32_t from = 0; from < 3; from++) {
            memcpy(header, b.whole, pages * PAGE);
            if (from == 2) /* the page after it */
                memcpy(header + page * PAGE, b.whole + (page + 1) % pages * PAGE, PAGE);
            else if (from == 1)
                memcpy(header + page * PAGE, other.whole + page * PAGE, PAGE);
            else
                memset(header + page * PAGE, 0, PAGE);
            CHECK_SAY(!reads(&b, header), "page %u from %u", page, from);
            /* Leaves of other pages are still proved, if those pages are. */
            uint32_t leaf = page > 4 ? 100 : 4000;
            CHECK((part_read(&b, header, leaf, leaf + 1, &read) == 0) == (page > 0));
        }
    /* All of it, but of another block. */
    CHECK(!reads(&b, other.whole));
    free(header);
    block_free(&b);
    block_free(&other);
}

static void test_a_flipped_bit_is_found(void) {
    struct block b = block_make(2 << 20, 40, 5, 1, 3);
    uint64_t seed = 5;
    CHECK(b.record.header_pages == 2);
    for (uint32_t i = 0; i < 4000; i++) {
        uint64_t bit = i < 8 * sizeof(struct kvfs_block_header) ? i : random_below(&seed, 2 * PAGE * 8);
        b.whole[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK_SAY(whole_read(&b, b.whole) == -EBADMSG, "bit %lu", bit);
        b.whole[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    CHECK(reads(&b, b.whole));
    block_free(&b);
}

/* An old page under a leaf whose checksums differ above bit 31 alone: the half that format 1 cut off. */
static void test_a_leaf_is_all_64_bits(void) {
    uint8_t *data = aligned_alloc(PAGE, 4 * PAGE);
    uint64_t sums[4];
    for (uint64_t i = 0; i < 4 * PAGE; i++)
        data[i] = (uint8_t)(i * 7 + i / 4096);
    kvfs_leaf_checksums(data, 4 * PAGE, SECRET, sums);
    for (uint32_t leaf = 0; leaf < 4; leaf++)
        for (uint32_t bit = 0; bit < 64; bit++) {
            sums[leaf] ^= 1ull << bit;
            CHECK_SAY(kvfs_leaf_verify(data, 4 * PAGE, SECRET, sums) == leaf + 1, "leaf %u, bit %u", leaf, bit);
            sums[leaf] ^= 1ull << bit;
        }
    CHECK(kvfs_leaf_verify(data, 4 * PAGE, SECRET, sums) == 0 && sums[3] == kvfs_checksum(data + 3 * PAGE, PAGE, SECRET));
    free(data);
}

static void test_layouts_that_cannot_be_are_refused(void) {
    struct block b = block_make(2 << 20, 40, 3, 1, 6);
    struct kvfs_block_header h;
    memcpy(&h, b.whole, sizeof(h));
    CHECK(h.leaf_count == 512 && h.header_pages == 2);
    static const uint32_t counts[] = {0, 1, 511, 513, 1024, UINT32_MAX / 8, UINT32_MAX / 8 + 2, UINT32_MAX / 4, UINT32_MAX};
    for (uint32_t i = 0; i < sizeof(counts) / sizeof(*counts); i++)
        CHECK_SAY(!LIE(&b, leaf_count, counts[i]), "%u leaves", counts[i]);
    const uint32_t end = 2 * KVFS_PAGE_SIZE,
                   offsets[] = {h.leaves_offset + 1, h.leaves_offset + 4, end - 512 * 4, end - 511 * 8, end, UINT32_MAX - 7, UINT32_MAX};
    for (uint32_t i = 0; i < sizeof(offsets) / sizeof(*offsets); i++)
        CHECK_SAY(!LIE(&b, leaves_offset, offsets[i]), "leaves at %u", offsets[i]);
    const uint32_t records[] = {0, 8, 104, h.record_offset + 4, h.record_offset + 8, end - 120, end, UINT32_MAX - 7};
    for (uint32_t i = 0; i < sizeof(records) / sizeof(*records); i++)
        CHECK_SAY(!LIE(&b, record_offset, records[i]), "record at %u", records[i]);
    const uint32_t versions[] = {0, 1, 3, UINT32_MAX}, sums[] = {80, 96, 112, 0}, pages[] = {0, 1, 3, UINT32_MAX};
    for (uint32_t i = 0; i < 4; i++) {
        CHECK_SAY(!LIE(&b, version, versions[i]), "version %u", versions[i]);
        CHECK_SAY(!LIE(&b, sums_offset, sums[i]), "sums at %u", sums[i]);
        CHECK_SAY(!LIE(&b, header_pages, pages[i]), "%u pages", pages[i]);
    }
    CHECK(LIE(&b, leaf_count, h.leaf_count)); /* the double of a lying device does nothing else */
    block_free(&b);
}

static void test_the_key_is_that_of_the_record(void) {
    struct block b = block_make(2 << 20, 40, 0, 1, 7);
    struct kvfs_block_header h;
    uint64_t low, high;
    memcpy(&h, b.whole, sizeof(h));
    kvfs_name_key(2, b.name, b.name_size, SECRET, &low, &high);
    CHECK(h.key_low == low && h.key_high == high);
    low ^= 1;
    high ^= 1ull << 63;
    CHECK(!LIE(&b, key_low, low) && !LIE(&b, key_high, high));
    /* A name that the key is not of. */
    CHECK(!lie(&b, h.record_offset + sizeof(struct kvfs_inode_record), "/", 1));
    CHECK(!lie(&b, h.record_offset + sizeof(struct kvfs_inode_record), "!", 1));
    uint64_t parent = 3;
    CHECK(!lie(&b, h.record_offset + offsetof(struct kvfs_inode_record, parent), &parent, 8));
    block_free(&b);
    /* A name that goes on in the header's second page, which is proved before it is believed: ancestors and sums do not come before it. */
    for (uint32_t size = 1; size <= KVFS_NAME_MAX; size += 127) {
        b = block_make(6 << 20, size, 0, 0, size);
        CHECK(reads(&b, b.whole));
        block_free(&b);
    }
}

static void test_words_for_eviction_are_checked(void) {
    struct block b = block_make(2 << 20, 40, 0, 1, 8);
    struct kvfs_block_header h;
    memcpy(&h, b.whole, sizeof(h));
    const int64_t times[] = {0, 1, INT64_MAX, -1, INT64_MIN};
    for (uint32_t i = 0; i < 5; i++)
        CHECK_SAY(LIE(&b, keep_until_ns, times[i]) == (times[i] >= 0), "%ld", times[i]);
    const struct {
        uint64_t parent, key_low;
        bool right;
    } parents[] = {{1, h.key_low, true},
                   {(3ull << KVFS_COUNTER_BITS) + 77, h.key_low, true},
                   {(KVFS_EPOCH_MAX << KVFS_COUNTER_BITS) + 77, h.key_low, true},
                   {KVFS_INODE_DERIVED, h.key_low, false},
                   {1ull << 61, h.key_low, false},
                   {UINT64_MAX, h.key_low, false},
                   {77, h.key_low + 1, false}}; /* meant for another block */
    for (uint32_t i = 0; i < sizeof(parents) / sizeof(*parents); i++) {
        uint64_t words[] = {parents[i].parent, header_parent_check(&geometry, parents[i].parent, parents[i].key_low, h.key_high)};
        static_assert(offsetof(struct kvfs_block_header, parent_check) == offsetof(struct kvfs_block_header, parent) + 8, "format");
        CHECK_SAY(lie(&b, offsetof(struct kvfs_block_header, parent), words, 16) == parents[i].right, "%u", i);
        CHECK(!LIE(&b, parent, words[0]) && !LIE(&b, parent_check, words[1])); /* one without the other */
    }
    block_free(&b);
}

int main(void) {
    RUN(test_what_is_built_reads_back);
    RUN(test_a_header_has_room_for_its_parts);
    RUN(test_a_torn_header_is_none);
    RUN(test_a_flipped_bit_is_found);
    RUN(test_a_leaf_is_all_64_bits);
    RUN(test_layouts_that_cannot_be_are_refused);
    RUN(test_the_key_is_that_of_the_record);
    RUN(test_words_for_eviction_are_checked);
}
