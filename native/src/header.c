/* Block headers: built before a write, checked after a read; and the descriptors that hold verified ones. */
#include "internal.h"

struct desc *desc_new(uint32_t header_pages) {
    struct desc *desc = calloc(1, sizeof(*desc));
    void *header = NULL;
    if (!desc || posix_memalign(&header, KVFS_PAGE_SIZE, header_pages * PAGE)) {
        free(desc);
        return NULL;
    }
    desc->header = header;
    desc->header_pages = header_pages;
    atomic_store(&desc->refs, 1);
    return desc;
}

void desc_put(struct desc *desc) {
    if (!desc || atomic_fetch_sub(&desc->refs, 1) != 1)
        return;
    free(desc->header);
    free(desc);
}

static bool extents_valid(const struct kvfs_plane *plane, const struct kvfs_extent *extents, uint32_t count, uint64_t pages) {
    uint64_t before = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct kvfs_extent *e = &extents[i];
        if (e->segment >= plane->config.segment_count || e->page_count == 0 || e->page == 0 ||
            (uint64_t)e->page + e->page_count > plane->segment_pages || e->file_page < before ||
            (uint64_t)e->file_page + e->page_count > pages)
            return false;
        before = (uint64_t)e->file_page + e->page_count;
    }
    return true;
}

int header_check(struct kvfs_plane *plane, const uint8_t *header, uint32_t pages, struct kvfs_block_header *out, struct kvfs_inode_record *record) {
    uint64_t size = pages * PAGE;
    struct kvfs_block_header h;
    struct kvfs_inode_record r;
    memcpy(&h, header, sizeof(h));
    if (h.magic != KVFS_MAGIC_BLOCK || h.version != KVFS_FORMAT_VERSION || h.header_pages != pages || pages == 0 ||
        h.sums_offset != sizeof(h) || h.sums_offset + 8ull * (pages - 1) > h.record_offset || h.record_offset % 8 ||
        (uint64_t)h.record_offset + sizeof(r) > size || h.leaves_offset % 8 || h.leaves_offset + 4ull * h.leaf_count > size ||
        h.ancestors_offset % 8 || (uint64_t)h.ancestors_offset + h.ancestors_size > size)
        return -EBADMSG;
    uint8_t first[KVFS_PAGE_SIZE];
    memcpy(first, header, PAGE);
    memset(first + offsetof(struct kvfs_block_header, checksum), 0, 8);
    if (kvfs_checksum(first, PAGE, plane->config.secret) != h.checksum)
        return -EBADMSG;
    for (uint32_t i = 1; i < pages; i++) {
        uint64_t sum;
        memcpy(&sum, header + h.sums_offset + 8ull * (i - 1), 8); /* in a page before page i */
        if (kvfs_checksum(header + i * PAGE, PAGE, plane->config.secret) != sum)
            return -EBADMSG;
    }
    memcpy(&r, header + h.record_offset, sizeof(r));
    uint64_t extents_at = h.record_offset + sizeof(r) + round_up(r.name_size, 8);
    if (r.name_size > KVFS_NAME_MAX || extents_at + (uint64_t)r.extent_count * sizeof(struct kvfs_extent) > size ||
        h.leaf_count != pages_of(r.size) || r.header_pages != pages || (uint64_t)h.record_offset + r.record_size > h.ancestors_offset)
        return -EBADMSG;
    *out = h;
    *record = r;
    return 0;
}

void record_from_inode(const struct kvfs_inode_record *from, struct kvfs_record *to) {
    memset(to, 0, sizeof(*to));
    to->inode = from->inode;
    to->parent = from->parent;
    to->version = from->version;
    to->size = from->size;
    to->generation = from->generation;
    to->segment = from->segment;
    to->page = from->page;
    to->header_pages = from->header_pages;
    to->extent_count = from->extent_count;
    to->mtime_ns = from->mtime_ns;
    to->ctime_ns = from->ctime_ns;
    to->atime_ns = from->atime_ns;
    to->mode = from->mode;
    to->uid = from->uid;
    to->gid = from->gid;
    to->nlink = from->nlink;
    to->kind = from->kind;
    to->flags = from->flags;
}

int desc_verify(struct kvfs_plane *plane, struct desc *desc, const struct kvfs_record *want) {
    struct kvfs_block_header h;
    struct kvfs_inode_record r;
    if (header_check(plane, desc->header, desc->header_pages, &h, &r) < 0)
        return -EBADMSG;
    /* The version is of the name too: a rename raises the table's, never the header's. */
    if (r.inode != want->inode || r.generation != want->generation || r.version > want->version || r.size != want->size ||
        r.segment != want->segment || r.page != want->page)
        return -EBADMSG;
    uint64_t extents_at = h.record_offset + sizeof(r) + round_up(r.name_size, 8);
    desc->inode = r.inode;
    desc->version = r.version;
    desc->size = r.size;
    desc->generation = r.generation;
    desc->segment = r.segment;
    desc->page = r.page;
    desc->leaf_count = h.leaf_count;
    desc->leaves = (const uint32_t *)(const void *)(desc->header + h.leaves_offset);
    if (r.extent_count == 0 && h.leaf_count) {
        desc->inline_extent = (struct kvfs_extent){r.generation, r.segment, r.page + r.header_pages, h.leaf_count, 0};
        desc->extents = &desc->inline_extent;
        desc->extent_count = 1;
    } else {
        desc->extents = (struct kvfs_extent *)(void *)(desc->header + extents_at);
        desc->extent_count = r.extent_count;
    }
    return extents_valid(plane, desc->extents, desc->extent_count, h.leaf_count) ? 0 : -EBADMSG;
}

/* ---- building ---- */

uint32_t kvfs_header_pages(uint64_t size, uint32_t record_size, uint32_t ancestors_size, uint32_t extents) {
    uint64_t bytes = sizeof(struct kvfs_block_header) + record_size + 24ull * extents + round_up(ancestors_size, 8) + 4 * pages_of(size) + 8;
    uint64_t pages = pages_of(bytes);
    while (pages_of(bytes + 8 * (pages - 1)) > pages)
        pages++;
    return (uint32_t)pages;
}

int header_build(struct kvfs_plane *plane, struct desc *desc, const uint8_t *record, uint32_t record_size, const uint8_t *ancestors,
                 uint32_t ancestors_size, const struct kvfs_extent *extents, uint32_t extent_count, const uint32_t *leaves,
                 uint32_t run_pages) {
    struct kvfs_inode_record r;
    memcpy(&r, record, sizeof(r));
    uint32_t pages = desc->header_pages, leaf_count = (uint32_t)pages_of(r.size);
    uint64_t name_end = sizeof(r) + round_up(r.name_size, 8);
    if (extent_count == 1 && extents[0].segment == r.segment && extents[0].generation == r.generation && extents[0].file_page == 0 &&
        extents[0].page == r.page + pages && extents[0].page_count == leaf_count)
        extent_count = 0;
    struct kvfs_block_header h = {.magic = KVFS_MAGIC_BLOCK, .version = KVFS_FORMAT_VERSION, .owner_epoch = plane->config.mount_epoch,
                                  .header_pages = pages, .leaf_count = leaf_count, .sums_offset = sizeof(h), .run_pages = run_pages};
    uint64_t at = sizeof(h) + 8ull * (pages - 1);
    uint64_t final_size = record_size + 24ull * extent_count;
    h.record_offset = (uint32_t)at;
    h.ancestors_offset = (uint32_t)(at + final_size);
    h.ancestors_size = ancestors_size;
    h.leaves_offset = (uint32_t)round_up(h.ancestors_offset + ancestors_size, 8);
    if (h.leaves_offset + 4ull * leaf_count > pages * PAGE)
        return -ERANGE;
    r.record_size = (uint32_t)final_size;
    r.extent_count = extent_count;
    r.header_pages = pages;
    uint8_t *out = desc->header;
    memset(out, 0, pages * PAGE);
    kvfs_name_key(r.parent, (const char *)record + sizeof(r), r.name_size, plane->config.secret, &h.key_low, &h.key_high);
    memcpy(out + at, &r, sizeof(r));
    memcpy(out + at + sizeof(r), record + sizeof(r), name_end - sizeof(r));
    copy_bytes(out + at + name_end, extents, 24ull * extent_count);
    copy_bytes(out + at + name_end + 24ull * extent_count, record + name_end, record_size - name_end);
    copy_bytes(out + h.ancestors_offset, ancestors, ancestors_size);
    copy_bytes(out + h.leaves_offset, leaves, 4ull * leaf_count);
    /* From the last page on: each sum lies in an earlier page, which is summed after it. */
    for (uint32_t i = pages; i-- > 1;) {
        uint64_t sum = kvfs_checksum(out + i * PAGE, PAGE, plane->config.secret);
        memcpy(out + h.sums_offset + 8ull * (i - 1), &sum, 8);
    }
    memcpy(out, &h, sizeof(h));
    h.checksum = kvfs_checksum(out, PAGE, plane->config.secret);
    memcpy(out, &h, sizeof(h));
    struct kvfs_record want;
    record_from_inode(&r, &want);
    return desc_verify(plane, desc, &want); /* paired: what is about to be written reads back */
}

void extent_header_build(struct kvfs_plane *plane, uint8_t *page, uint64_t inode, const struct kvfs_run *run, uint32_t file_page) {
    struct kvfs_extent_header h = {.magic = KVFS_MAGIC_EXTENT, .version = KVFS_FORMAT_VERSION, .inode = inode, .generation = run->generation,
                                   .owner_epoch = plane->config.mount_epoch, .segment = run->segment, .page = run->page,
                                   .run_pages = run->page_count, .file_page = file_page};
    memset(page, 0, PAGE);
    memcpy(page, &h, sizeof(h));
    h.checksum = kvfs_checksum(page, PAGE, plane->config.secret);
    memcpy(page, &h, sizeof(h));
}
