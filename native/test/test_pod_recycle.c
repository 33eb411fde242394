/* sources: base block */
/* The recycle race: a reader has an old header page of another node's block. The pages behind it are a new block's by now. The leaves alone keep
 * the new bytes from it, so they must be wide.
 *
 * An owner writes generation after generation of a block to the same place, each with other bytes. A reader has the header of any older generation.
 * It may have: a handle keeps one, and one I/O over header and data may be torn between them. It proves what it has as kvfs does: desc_verify() by what
 * its pod map says, then the leaves. With leaves of 64 bits no read of 10^6 passes. The same reads with leaves cut to 8 bits pass once in 256: this
 * test would see a mistake. The cut kernel is checksum_leaf.h once more, compiled here with KVFS_TEST_LEAF_BITS. */
#define KVFS_TEST_LEAF_BITS 8
#define KVFS_LEAF_SUFFIX cut
#include "block/checksum_leaf.h"

#include "block/block.h"
#include "check.h"

#define SECRET 0x2545f4914f6cdd1dull
#define GENERATIONS 64u
#define PAGES 2u
#define READS 1000000u

static const struct geometry geometry = {.secret = SECRET, .mount_epoch = 5, .segment_count = 8, .segment_pages = 256};

struct life {
    uint8_t data[PAGES * PAGE];
    uint64_t leaves[PAGES], cut[PAGES];
    struct desc *desc, *cut_desc; /* headers with whole leaves, and with cut ones */
    struct kvfs_record record;    /* as a pod map has it */
};

static struct desc *header(struct life *life, uint32_t number, const uint64_t *leaves) {
    struct {
        struct kvfs_inode_record r;
        char name[8];
    } record = {.r = {.kind = KVFS_KIND_FILE,
                      .flags = KVFS_INODE_SEALED,
                      .name_size = 1,
                      .record_size = sizeof(record),
                      .inode = 5ull << KVFS_COUNTER_BITS | (number + 1) << 12,
                      .parent = 1,
                      .version = 5ull << KVFS_COUNTER_BITS | (number + 1) << 12,
                      .size = PAGES * PAGE,
                      .generation = 5ull << KVFS_COUNTER_BITS | (number + 1) << 12,
                      .segment = 3,
                      .page = 17,
                      .header_pages = 1,
                      .mode = 0100644,
                      .nlink = 1},
                .name = "a"};
    const struct kvfs_extent extent = {record.r.generation, record.r.segment, record.r.page + 1, PAGES, 0};
    struct desc *desc = desc_new(1);
    int r = header_build(&geometry, desc, (const uint8_t *)&record, sizeof(record), NULL, 0, &extent, 1, leaves, 1 + PAGES);
    CHECK_SAY(r == 0, "%d", r);
    record_from_inode(&record.r, &life->record);
    life->record.header_pages = 1;
    life->record.extent_count = 0;
    life->record.flags = KVFS_INODE_FOREIGN | KVFS_INODE_SEALED;
    return desc;
}

static void life_make(struct life *life, uint32_t number, uint64_t *state) {
    for (uint32_t i = 0; i < sizeof(life->data); i += 8) {
        uint64_t word = random_next(state);
        memcpy(life->data + i, &word, 8);
    }
    kvfs_leaf_checksums(life->data, sizeof(life->data), SECRET, life->leaves);
    kvfs_leaf_cut.checksums(life->data, sizeof(life->data), SECRET, life->cut);
    for (uint32_t i = 0; i < PAGES; i++)
        CHECK(life->cut[i] == (life->leaves[i] & 0xff));
    life->desc = header(life, number, life->leaves);
    life->cut_desc = header(life, number, life->cut);
}

int main(void) {
    static struct life lives[GENERATIONS];
    uint64_t state = 7, passed = 0, passed_cut = 0, refused = 0;
    for (uint32_t i = 0; i < GENERATIONS; i++)
        life_make(&lives[i], i, &state);
    for (uint32_t i = 0; i < READS; i++) {
        uint32_t old = (uint32_t)random_below(&state, GENERATIONS), now = (uint32_t)random_below(&state, GENERATIONS);
        uint32_t page = (uint32_t)random_below(&state, PAGES);
        struct life *then = &lives[old], *is = &lives[now];
        if (i % 64 == 0) { /* a handle proves its header once */
            CHECK(desc_verify(&geometry, then->desc, &then->record) == 0);
            CHECK(desc_verify(&geometry, then->cut_desc, &then->record) == 0);
            if (old != now) { /* the place in the map is of another life: the header says so */
                refused++;
                CHECK(desc_verify(&geometry, is->desc, &then->record) == -EBADMSG);
            }
        }
        const uint8_t *data = is->data + page * PAGE;
        bool whole = kvfs_leaf_verify(data, PAGE, SECRET, then->desc->leaves + page) == 0;
        bool cut = kvfs_leaf_cut.verify(data, PAGE, SECRET, then->cut_desc->leaves + page) == 0;
        CHECK(old != now || (whole && cut));
        passed += old != now && whole;
        passed_cut += old != now && cut;
    }
    CHECK_SAY(passed == 0, "%llu reads of %u gave a new block's bytes for an old one's", (unsigned long long)passed, READS);
    CHECK_SAY(passed_cut > READS / 1000, "%llu: leaves of %d bits let too few pass to see a mistake", (unsigned long long)passed_cut,
              KVFS_TEST_LEAF_BITS);
    CHECK(refused > 1000);
    for (uint32_t i = 0; i < GENERATIONS; i++) {
        desc_put(lives[i].desc);
        desc_put(lives[i].cut_desc);
    }
    printf("ok %u reads: none passed; of the same with leaves of %d bits %llu\n", READS, KVFS_TEST_LEAF_BITS, (unsigned long long)passed_cut);
    return 0;
}
