/* Block headers: built before a write, checked after a read; and the descriptors that hold verified ones. */
#include "block/block.h"

#include <sys/stat.h>

#define LEAF_SUM sizeof(uint64_t)

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
    free(desc->parts);
    free(desc);
}

/* ---- input from devices ---- */

/* Two summary slots end a segment. Each is the 64th part of it, and at least two pages. */
static uint32_t end_page_of(uint32_t segment_pages) {
    uint32_t summary_pages = segment_pages / 64 > 2 ? segment_pages / 64 : 2;
    return segment_pages > 2 * summary_pages ? segment_pages - 2 * summary_pages : 0;
}

static struct kvfs_record_limits limits_of(const struct geometry *geometry, uint64_t epoch_max) {
    return (struct kvfs_record_limits){epoch_max, geometry->segment_count, end_page_of(geometry->segment_pages)};
}

/* The reason why this is no name, or NULL. */
static const char *name_fault(const struct kvfs_inode_record *r, const uint8_t *name) {
    if ((r->name_size == 0) != (r->inode == 1))
        return "only the root has no name";
    if (memchr(name, '/', r->name_size) || memchr(name, 0, r->name_size))
        return "a slash or a zero is in its name";
    if ((r->name_size == 1 || r->name_size == 2) && !memcmp(name, "..", r->name_size))
        return "its name is . or ..";
    return NULL;
}

static bool run_inside(const struct kvfs_record_limits *limits, uint32_t segment, uint32_t page, uint64_t count) {
    return segment < limits->segment_count && page && count && page + count <= limits->end_page;
}

static const char *block_fault(const struct kvfs_record_limits *limits, const struct kvfs_inode_record *r, const uint8_t *extents) {
    uint64_t pages = pages_of(r->size), before = 0;
    if (!(r->flags & KVFS_INODE_SEALED))
        return "a file that was never sealed";
    if (r->header_pages == 0 || r->header_pages >> 24)
        return "its header's pages";
    if (!run_inside(limits, r->segment, r->page, (uint64_t)r->header_pages + (r->extent_count ? 0 : pages)))
        return "its place is outside of the segments";
    for (uint32_t i = 0; i < r->extent_count; i++) {
        struct kvfs_extent e;
        memcpy(&e, extents + i * sizeof(e), sizeof(e));
        if (!run_inside(limits, e.segment, e.page, e.page_count))
            return "an extent is outside of the segments";
        if (e.file_page < before || (uint64_t)e.file_page + e.page_count > pages)
            return "an extent is out of order, or beyond its end";
        if (e.generation >> KVFS_COUNTER_BITS > limits->epoch_max)
            return "an extent is of a mount that has not been";
        before = (uint64_t)e.file_page + e.page_count;
    }
    return NULL;
}

static const char *xattrs_fault(const uint8_t *xattrs, uint32_t size) {
    for (uint64_t at = 0; at < size;) {
        uint16_t key_size;
        uint32_t value_size;
        if (at + 6 > size)
            return "an extended attribute is cut off";
        memcpy(&key_size, xattrs + at, sizeof(key_size));
        memcpy(&value_size, xattrs + at + 2, sizeof(value_size));
        at += 6 + (uint64_t)key_size + value_size;
        if (at > size || key_size == 0)
            return "an extended attribute is cut off";
    }
    return NULL;
}

/* No node gives such a number in a mount up to epoch_max. A directory's may be made of its name. */
static bool number_impossible(const struct kvfs_record_limits *limits, uint64_t number, bool directory) {
    return directory && number & KVFS_INODE_DERIVED ? number >> 61 != 2 : number >> KVFS_COUNTER_BITS > limits->epoch_max;
}

/* The reason why kvfs cannot have written the record, or NULL. *size is the record's. */
static const char *record_fault(const struct kvfs_record_limits *limits, const uint8_t *record, uint64_t left, uint64_t *size) {
    static const uint32_t types[] = {0, S_IFREG, S_IFDIR, S_IFLNK};
    struct kvfs_inode_record r;
    if (left < sizeof(r))
        return "it is cut off";
    memcpy(&r, record, sizeof(r));
    uint64_t extents_at = sizeof(r) + round_up(r.name_size, 8);
    uint64_t xattrs_at = extents_at + (uint64_t)r.extent_count * sizeof(struct kvfs_extent);
    if (r.record_size > left || r.record_size != xattrs_at + round_up(r.xattr_size, 8))
        return "its parts do not make its size";
    *size = r.record_size;
    if (r.kind < KVFS_KIND_FILE || r.kind > KVFS_KIND_SYMLINK || r.mode >> 16 || (r.mode & S_IFMT) != types[r.kind])
        return "its kind, or its mode";
    if (r.flags & ~(KVFS_INODE_SEALED | KVFS_INODE_PINNED | KVFS_INODE_REWRITTEN | KVFS_INODE_NAMELESS | KVFS_INODE_BORROWED) ||
        (r.flags & KVFS_INODE_BORROWED && r.kind != KVFS_KIND_DIRECTORY))
        return "flags that no device has";
    if (r.inode == 0 || r.parent == 0 || (r.inode == r.parent) != (r.inode == 1) || (r.inode == 1 && r.kind != KVFS_KIND_DIRECTORY))
        return "its number, or its directory's";
    if (number_impossible(limits, r.inode, r.kind == KVFS_KIND_DIRECTORY) || number_impossible(limits, r.parent, true) ||
        number_impossible(limits, r.version, false) || number_impossible(limits, r.generation, false))
        return "a number of a mount that has not been";
    if (r.size > (uint64_t)UINT32_MAX * PAGE || r.nlink >> 30)
        return "its size, or its count of links";
    if (r.name_size > KVFS_NAME_MAX)
        return "its name is too long";
    const char *fault = name_fault(&r, record + sizeof(r));
    if (!fault && r.kind == KVFS_KIND_FILE)
        fault = block_fault(limits, &r, record + extents_at);
    else if (!fault && (r.extent_count || r.flags & KVFS_INODE_SEALED))
        fault = "content of what is no file";
    return fault ? fault : xattrs_fault(record + xattrs_at, r.xattr_size);
}

int64_t kvfs_records_check(const struct kvfs_record_limits *limits, const void *records, uint64_t size, uint64_t *at, const char **why) {
    int64_t count = 0;
    for (*at = 0; *at < size; count++) {
        uint64_t record_size = 0;
        *why = record_fault(limits, (const uint8_t *)records + *at, size - *at, &record_size);
        if (*why)
            return -EBADMSG;
        *at += record_size;
    }
    return count;
}

int64_t kvfs_records_pages(const void *records, uint64_t size, uint64_t *pages, uint32_t segment_count) {
    const uint8_t *at = records, *end = at + size;
    int64_t count = 0;
    for (struct kvfs_inode_record r; at < end; at += r.record_size, count++) {
        if ((uint64_t)(end - at) < sizeof(r))
            return -EBADMSG;
        memcpy(&r, at, sizeof(r));
        uint64_t extents_at = sizeof(r) + round_up(r.name_size, 8);
        if (r.record_size > (uint64_t)(end - at) || r.record_size < extents_at + (uint64_t)r.extent_count * sizeof(struct kvfs_extent))
            return -EBADMSG;
        if (r.kind != KVFS_KIND_FILE || !(r.flags & KVFS_INODE_SEALED))
            continue;
        if (r.segment >= segment_count)
            return -EBADMSG;
        pages[r.segment] += r.header_pages + (r.extent_count ? 0 : pages_of(r.size));
        for (uint32_t i = 0; i < r.extent_count; i++) {
            struct kvfs_extent e;
            memcpy(&e, at + extents_at + i * sizeof(e), sizeof(e));
            if (e.segment >= segment_count)
                return -EBADMSG;
            pages[e.segment] += e.page_count;
        }
    }
    return count;
}

bool records_sound(const struct geometry *geometry, uint64_t epoch_max, const uint8_t *records, uint64_t size) {
    struct kvfs_record_limits limits = limits_of(geometry, epoch_max);
    uint64_t at;
    const char *why;
    return kvfs_records_check(&limits, records, size, &at, &why) >= 0;
}

/* The first page, proved by its own checksum. 0 or -EBADMSG. */
static int head_check(const struct geometry *geometry, const uint8_t *header, uint32_t pages, struct kvfs_block_header *out) {
    uint64_t size = pages * PAGE;
    struct kvfs_block_header h;
    memcpy(&h, header, sizeof(h));
    if (h.magic != KVFS_MAGIC_BLOCK || h.version != KVFS_FORMAT_VERSION || h.header_pages != pages || pages == 0 || h.sums_offset != sizeof(h) ||
        h.sums_offset + 8ull * (pages - 1) > h.record_offset || h.record_offset % 8 ||
        (uint64_t)h.record_offset + sizeof(struct kvfs_inode_record) > size || h.leaves_offset % 8 ||
        h.leaves_offset + LEAF_SUM * h.leaf_count > size || h.ancestors_offset % 8 || (uint64_t)h.ancestors_offset + h.ancestors_size > size)
        return -EBADMSG;
    uint8_t first[KVFS_PAGE_SIZE];
    memcpy(first, header, PAGE);
    memset(first + offsetof(struct kvfs_block_header, checksum), 0, 8);
    if (kvfs_checksum(first, PAGE, geometry->secret) != h.checksum)
        return -EBADMSG;
    *out = h;
    return 0;
}

/* Where the sum of a header page other than the first lies: in a page before it. */
static uint64_t sum_at(uint32_t page) { return sizeof(struct kvfs_block_header) + 8ull * (page - 1); }

/* The page has the sum that an earlier, proven one holds. */
static bool page_right(const struct geometry *geometry, const uint8_t *header, uint32_t page) {
    uint64_t sum;
    memcpy(&sum, header + sum_at(page), 8);
    return kvfs_checksum(header + page * PAGE, PAGE, geometry->secret) == sum;
}

/* The record's fixed part, of proven bytes. 0 or -EBADMSG. */
static int record_check(const uint8_t *header, const struct kvfs_block_header *h, struct kvfs_inode_record *out) {
    struct kvfs_inode_record r;
    memcpy(&r, header + h->record_offset, sizeof(r));
    uint64_t extents_at = h->record_offset + sizeof(r) + round_up(r.name_size, 8);
    if (r.name_size > KVFS_NAME_MAX || extents_at + (uint64_t)r.extent_count * sizeof(struct kvfs_extent) > h->header_pages * PAGE ||
        h->leaf_count != pages_of(r.size) || r.header_pages != h->header_pages || (uint64_t)h->record_offset + r.record_size > h->ancestors_offset)
        return -EBADMSG;
    *out = r;
    return 0;
}

int header_check(const struct geometry *geometry, const uint8_t *header, uint32_t pages, struct kvfs_block_header *out,
                 struct kvfs_inode_record *record) {
    int error = head_check(geometry, header, pages, out);
    for (uint32_t i = 1; i < pages && error == 0; i++)
        if (!page_right(geometry, header, i))
            error = -EBADMSG;
    return error == 0 ? record_check(header, out, record) : error;
}

uint64_t header_parent_check(const struct geometry *geometry, uint64_t parent, uint64_t key_low, uint64_t key_high) {
    const uint64_t words[] = {parent, key_low, key_high};
    return parent ? kvfs_checksum(words, sizeof(words), geometry->secret) : 0;
}

bool header_sound(const struct geometry *geometry, const uint8_t *header, const struct kvfs_block_header *h, const struct kvfs_inode_record *r) {
    uint64_t low, high;
    kvfs_name_key(r->parent, (const char *)header + h->record_offset + sizeof(*r), r->name_size, geometry->secret, &low, &high);
    return low == h->key_low && high == h->key_high && h->keep_until_ns >= 0 && h->parent >> KVFS_COUNTER_BITS <= KVFS_EPOCH_MAX &&
           h->parent_check == header_parent_check(geometry, h->parent, low, high);
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

/* The record is of the block and place that the table means. A rename raises the version in the table, never in the header. */
static bool record_is(const struct kvfs_block_header *h, const struct kvfs_inode_record *r, const struct kvfs_record *want) {
    if (want->flags & KVFS_INODE_FOREIGN) /* another node's: its pod map knows no inode number */
        return r->generation == want->generation && r->size == want->size && r->segment == want->segment && r->page == want->page &&
               (!want->keyed || (h->key_low == want->key_low && h->key_high == want->key_high));
    return r->inode == want->inode && r->generation == want->generation && r->version <= want->version && r->size == want->size &&
           r->segment == want->segment && r->page == want->page;
}

/* Fill the descriptor from a proven header. 0 or -EBADMSG. */
static int desc_fill(const struct geometry *geometry, struct desc *desc, const struct kvfs_block_header *h, const struct kvfs_inode_record *r) {
    uint64_t extents_at = h->record_offset + sizeof(*r) + round_up(r->name_size, 8);
    desc->inode = r->inode;
    desc->version = r->version;
    desc->size = r->size;
    desc->generation = r->generation;
    desc->segment = r->segment;
    desc->page = r->page;
    desc->leaf_count = h->leaf_count;
    desc->leaves = (const uint64_t *)(const void *)(desc->header + h->leaves_offset);
    if (r->extent_count == 0 && h->leaf_count) {
        desc->inline_extent = (struct kvfs_extent){r->generation, r->segment, r->page + r->header_pages, h->leaf_count, 0};
        desc->extents = &desc->inline_extent;
        desc->extent_count = 1;
    } else {
        desc->extents = (struct kvfs_extent *)(void *)(desc->header + extents_at);
        desc->extent_count = r->extent_count;
    }
    /* Reads go by this record: no extent may lead out of its segment, and no page may be read twice. Its numbers may be another node's. */
    return header_sound(geometry, desc->header, h, r) && records_sound(geometry, KVFS_EPOCH_MAX, desc->header + h->record_offset, r->record_size)
               ? 0
               : -EBADMSG;
}

int desc_verify(const struct geometry *geometry, struct desc *desc, const struct kvfs_record *want) {
    struct kvfs_block_header h;
    struct kvfs_inode_record r;
    if (header_check(geometry, desc->header, desc->header_pages, &h, &r) < 0 || !record_is(&h, &r, want))
        return -EBADMSG;
    return desc_fill(geometry, desc, &h, &r);
}

/* ---- headers of which only some pages are read ---- */

static void part_want(struct desc *desc, uint64_t from, uint64_t to) {
    for (uint64_t page = from / PAGE; page < pages_of(to); page++)
        desc->parts[page] = PART_WANTED;
}

int desc_narrow(struct desc *desc, const struct kvfs_record *record, uint32_t first, uint32_t end) {
    const uint32_t pages = desc->header_pages;
    const uint64_t room = pages * PAGE, sums_end = sum_at(pages), leaves_size = LEAF_SUM * pages_of(record->size);
    /* The least that a record takes: what it holds beside, and what lies between it and the leaves, only the first page tells. */
    const uint64_t record_end = sums_end + sizeof(struct kvfs_inode_record) + 8 + (uint64_t)record->extent_count * sizeof(struct kvfs_extent);
    desc->parts = calloc(pages, 1);
    if (!desc->parts)
        return -ENOMEM;
    part_want(desc, 0, 1);
    if (record_end <= room)
        part_want(desc, sums_end, record_end);
    if (end > first && record_end + leaves_size <= room && room - leaves_size - record_end <= 2 * PAGE)
        part_want(desc, record_end + LEAF_SUM * first, room - leaves_size + LEAF_SUM * end);
    for (uint32_t page = pages; --page;)
        if (desc->parts[page])
            desc->parts[sum_at(page) / PAGE] = PART_WANTED;
    return 0;
}

/* 0, -EBADMSG; -EAGAIN: it, or one that holds a sum, is to be read first. */
static int part_prove(const struct geometry *geometry, struct desc *desc, uint32_t page) {
    if (desc->parts[page] == PART_PROVEN)
        return 0;
    assert(page > 0);
    int r = part_prove(geometry, desc, (uint32_t)(sum_at(page) / PAGE));
    if (desc->parts[page] != PART_READ) {
        desc->parts[page] = PART_WANTED;
        r = r < 0 && r != -EAGAIN ? r : -EAGAIN;
    }
    if (r < 0)
        return r;
    if (!page_right(geometry, desc->header, page))
        return -EBADMSG;
    desc->parts[page] = PART_PROVEN;
    return 0;
}

/* The same for all pages with bytes of [from, to). */
static int parts_prove(const struct geometry *geometry, struct desc *desc, uint64_t from, uint64_t to) {
    int error = 0;
    for (uint64_t page = from / PAGE; page < pages_of(to) && error != -EBADMSG; page++) {
        int r = part_prove(geometry, desc, (uint32_t)page);
        error = r < 0 ? r : error;
    }
    return error;
}

int desc_verify_part(const struct geometry *geometry, struct desc *desc, const struct kvfs_record *want, uint32_t first, uint32_t end) {
    struct kvfs_block_header h;
    struct kvfs_inode_record r;
    int error = head_check(geometry, desc->header, desc->header_pages, &h);
    if (error == 0) {
        desc->parts[0] = PART_PROVEN;
        error = parts_prove(geometry, desc, h.record_offset, (uint64_t)h.record_offset + sizeof(r));
    }
    if (error == 0)
        error = record_check(desc->header, &h, &r);
    if (error == 0 && !record_is(&h, &r, want))
        error = -EBADMSG;
    if (error < 0)
        return error;
    error = parts_prove(geometry, desc, h.record_offset, (uint64_t)h.record_offset + r.record_size);
    if (error == 0 || error == -EAGAIN) {
        int leaves = parts_prove(geometry, desc, h.leaves_offset + LEAF_SUM * first, h.leaves_offset + LEAF_SUM * end);
        error = leaves < 0 ? leaves : error;
    }
    return error == 0 ? desc_fill(geometry, desc, &h, &r) : error;
}

/* ---- building ---- */

uint32_t kvfs_header_pages(uint64_t size, uint32_t record_size, uint32_t ancestors_size, uint32_t extents) {
    uint64_t bytes = sizeof(struct kvfs_block_header) + record_size + 24ull * extents + round_up(ancestors_size, 8) + LEAF_SUM * pages_of(size) + 8;
    uint64_t pages = pages_of(bytes);
    while (pages_of(bytes + 8 * (pages - 1)) > pages)
        pages++;
    return (uint32_t)pages;
}

int header_build(const struct geometry *geometry, struct desc *desc, const uint8_t *record, uint32_t record_size, const uint8_t *ancestors,
                 uint32_t ancestors_size, const struct kvfs_extent *extents, uint32_t extent_count, const uint64_t *leaves, uint32_t run_pages) {
    struct kvfs_inode_record r;
    memcpy(&r, record, sizeof(r));
    uint32_t pages = desc->header_pages, leaf_count = (uint32_t)pages_of(r.size);
    uint64_t name_end = sizeof(r) + round_up(r.name_size, 8);
    if (extent_count == 1 && extents[0].segment == r.segment && extents[0].generation == r.generation && extents[0].file_page == 0 &&
        extents[0].page == r.page + pages && extents[0].page_count == leaf_count)
        extent_count = 0;
    struct kvfs_block_header h = {.magic = KVFS_MAGIC_BLOCK,
                                  .version = KVFS_FORMAT_VERSION,
                                  .owner_epoch = geometry->mount_epoch,
                                  .header_pages = pages,
                                  .leaf_count = leaf_count,
                                  .sums_offset = sizeof(h),
                                  .run_pages = run_pages};
    uint64_t at = sizeof(h) + 8ull * (pages - 1);
    uint64_t final_size = record_size + 24ull * extent_count;
    h.record_offset = (uint32_t)at;
    h.ancestors_offset = (uint32_t)(at + final_size);
    h.ancestors_size = ancestors_size;
    h.leaves_offset = (uint32_t)round_up(h.ancestors_offset + ancestors_size, 8);
    if (h.leaves_offset + LEAF_SUM * leaf_count > pages * PAGE)
        return -ERANGE;
    r.record_size = (uint32_t)final_size;
    r.extent_count = extent_count;
    r.header_pages = pages;
    uint8_t *out = desc->header;
    memset(out, 0, pages * PAGE);
    kvfs_name_key(r.parent, (const char *)record + sizeof(r), r.name_size, geometry->secret, &h.key_low, &h.key_high);
    memcpy(out + at, &r, sizeof(r));
    memcpy(out + at + sizeof(r), record + sizeof(r), name_end - sizeof(r));
    copy_bytes(out + at + name_end, extents, 24ull * extent_count);
    copy_bytes(out + at + name_end + 24ull * extent_count, record + name_end, record_size - name_end);
    copy_bytes(out + h.ancestors_offset, ancestors, ancestors_size);
    copy_bytes(out + h.leaves_offset, leaves, LEAF_SUM * leaf_count);
    /* Backwards: the sum of a page lies in an earlier page, which is summed later. */
    for (uint32_t i = pages; i-- > 1;) {
        uint64_t sum = kvfs_checksum(out + i * PAGE, PAGE, geometry->secret);
        memcpy(out + h.sums_offset + 8ull * (i - 1), &sum, 8);
    }
    memcpy(out, &h, sizeof(h));
    h.checksum = kvfs_checksum(out, PAGE, geometry->secret);
    memcpy(out, &h, sizeof(h));
    struct kvfs_record want;
    record_from_inode(&r, &want);
    return desc_verify(geometry, desc, &want); /* paired: what is about to be written reads back */
}

void extent_header_build(const struct geometry *geometry, uint8_t *page, uint64_t inode, const struct kvfs_run *run, uint32_t file_page) {
    struct kvfs_extent_header h = {.magic = KVFS_MAGIC_EXTENT,
                                   .version = KVFS_FORMAT_VERSION,
                                   .inode = inode,
                                   .generation = run->generation,
                                   .owner_epoch = geometry->mount_epoch,
                                   .segment = run->segment,
                                   .page = run->page,
                                   .run_pages = run->page_count,
                                   .file_page = file_page};
    memset(page, 0, PAGE);
    memcpy(page, &h, sizeof(h));
    h.checksum = kvfs_checksum(page, PAGE, geometry->secret);
    memcpy(page, &h, sizeof(h));
}
