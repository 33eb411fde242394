/* Listings: READDIR and READDIRPLUS, answered from pages of names that Python brings out of the index.
 *
 * A page belongs to one handle. Each answer looks the names of a page up in the block table. A name that is gone is left out. One that
 * another inode has by now is listed with that one. A page is no use of blocks. */
#include "fuse/fuse.h"

#include <sys/stat.h>

#define REPLY_ROOM (252u * 1024)
#define PAGE_NAMES_MAX 1024u /* Python brings no more */
#define PAGE_TEXT_MAX (PAGE_NAMES_MAX * KVFS_NAME_MAX)
/* A page serves so long; then its names are brought anew. */
#define PAGE_NS 1000000000ull
#define DOTS 2u /* the offset of an entry is its inode number and this; those below are of "." and ".." */
/* Inodes that listings make in a kernel, 1.1 KB each with their names: 70 MB by one listing, 290 MB a minute by all. */
#define LISTED_MAX 65536u
#define LISTED_PERIOD_MAX 262144u
#define LISTED_PERIOD_NS 60000000000ull
/* A kernel may enter a listing after it has heard of evictions that are newer than the listing. So listed entries hold for a moment only: enough for
 * a caller that asks for each entry as it is listed. */
#define LISTED_S 1u

struct listing_page {
    const struct transport *transport;
    uint64_t fh, directory, made_ns, used;
    uint32_t count, next; /* next: the entry behind the last that was listed */
    bool end;             /* no names come behind these */
    uint32_t *ends;       /* of each name in the text */
    char *text;
    uint64_t inodes[];
};

void listings_init(struct listings *listings) { pthread_mutex_init(&listings->lock, NULL); }

void listings_free(struct listings *listings) {
    for (uint32_t i = 0; i < LISTING_PAGES; i++)
        free(listings->pages[i]);
}

/* NULL: no memory. */
static struct listing_page *page_make(const struct pending *p, const struct kvfs_listed *names) {
    const uint32_t kept = names->count;
    uint32_t text = 0;
    assert(kept <= PAGE_NAMES_MAX);
    for (uint32_t i = 0; i < kept; i++)
        text += names->sizes[i];
    struct listing_page *page = malloc(sizeof(*page) + kept * (sizeof(uint64_t) + sizeof(uint32_t)) + text);
    if (!page)
        return NULL;
    *page = (struct listing_page){.transport = p->transport, .fh = p->fh, .directory = p->node, .made_ns = now_ns(), .count = kept};
    page->end = names->end;
    page->ends = (uint32_t *)(void *)(page->inodes + kept);
    page->text = (char *)(page->ends + kept);
    memcpy(page->inodes, names->inodes, kept * sizeof(uint64_t));
    memcpy(page->text, names->text, text);
    for (uint32_t i = 0, at = 0; i < kept; i++)
        page->ends[i] = at += names->sizes[i];
    return page;
}

static const char *page_name(const struct listing_page *page, uint32_t i, uint32_t *size) {
    uint32_t begin = i ? page->ends[i - 1] : 0;
    *size = page->ends[i] - begin;
    return page->text + begin;
}

/* The entry behind an offset; UINT32_MAX: the page does not have that one. */
static uint32_t page_find(const struct listing_page *page, uint64_t offset) {
    uint64_t inode = offset - DOTS;
    if (page->next && page->inodes[page->next - 1] == inode)
        return page->next;
    for (uint32_t i = 0; i < page->count; i++)
        if (page->inodes[i] == inode)
            return i + 1;
    return UINT32_MAX;
}

static bool page_is(const struct listing_page *page, const struct transport *transport, uint64_t fh, uint64_t directory) {
    return page && page->fh == fh && page->directory == directory && page->transport == transport;
}

/* The handle's page is the caller's from now on. */
static struct listing_page *page_take(struct kvfs_plane *plane, const struct transport *transport, uint64_t fh, uint64_t directory) {
    struct listings *listings = &plane->fuse->listings;
    struct listing_page *page = NULL;
    pthread_mutex_lock(&listings->lock);
    for (uint32_t i = 0; i < LISTING_PAGES && !page; i++)
        if (page_is(listings->pages[i], transport, fh, directory)) {
            page = listings->pages[i];
            listings->pages[i] = NULL;
        }
    pthread_mutex_unlock(&listings->lock);
    return page;
}

/* In the place of the handle's other page, or of the page that was not used for longest. */
static void page_keep(struct kvfs_plane *plane, struct listing_page *page) {
    struct listings *listings = &plane->fuse->listings;
    uint32_t place = 0;
    pthread_mutex_lock(&listings->lock);
    page->used = ++listings->clock;
    for (uint32_t i = 0; i < LISTING_PAGES; i++) {
        if (page_is(listings->pages[i], page->transport, page->fh, page->directory)) {
            place = i;
            break;
        }
        if (listings->pages[place] && (!listings->pages[i] || listings->pages[i]->used < listings->pages[place]->used))
            place = i;
    }
    struct listing_page *other = listings->pages[place];
    listings->pages[place] = page;
    pthread_mutex_unlock(&listings->lock);
    free(other);
}

void listing_end(struct kvfs_plane *plane, const struct transport *transport, uint64_t fh, uint64_t directory) {
    free(page_take(plane, transport, fh, directory));
}

void listings_forget(struct kvfs_plane *plane, const struct transport *transport) {
    struct listings *listings = &plane->fuse->listings;
    pthread_mutex_lock(&listings->lock);
    for (uint32_t i = 0; i < LISTING_PAGES; i++)
        if (listings->pages[i] && listings->pages[i]->transport == transport) {
            free(listings->pages[i]);
            listings->pages[i] = NULL;
        }
    pthread_mutex_unlock(&listings->lock);
}

void listing_ask(struct kvfs_plane *plane, const struct pending *p, struct kvfs_call *call) {
    call->new_parent = p->offset > DOTS ? p->offset - DOTS : 0;
    struct listing_page *page = call->new_parent ? page_take(plane, p->transport, p->fh, p->node) : NULL;
    uint32_t behind = page ? page_find(page, p->offset) : UINT32_MAX, size;
    if (behind != UINT32_MAX) {
        const char *name = page_name(page, behind - 1, &size);
        memcpy(call->name, name, size);
        call->name_size = (uint16_t)size;
    }
    if (page)
        page_keep(plane, page);
}

/* ---- answers ---- */

struct reply {
    const struct pending *pending;
    uint8_t *out;
    uint32_t used, room;
    uint32_t inodes, inodes_max; /* that it makes in the kernel */
    bool plus, full;
};

static void reply_put(struct reply *reply, const struct fuse_entry_out *entry, const struct fuse_dirent *dirent, const char *name) {
    uint32_t head = reply->plus ? sizeof(*entry) : 0, fixed = head + (uint32_t)offsetof(struct fuse_dirent, name);
    uint32_t need = (uint32_t)round_up(fixed + dirent->namelen, 8);
    uint8_t *at = reply->out + reply->used;
    reply->full = reply->used + need > reply->room;
    if (reply->full)
        return;
    memset(at, 0, need);
    if (reply->plus)
        memcpy(at, entry, head);
    memcpy(at + head, dirent, offsetof(struct fuse_dirent, name));
    memcpy(at + fixed, name, dirent->namelen);
    reply->used += need;
}

static void put_dots(struct kvfs_plane *plane, struct reply *reply) {
    for (uint64_t dot = reply->pending->offset; dot < DOTS && !reply->full; dot++) {
        struct kvfs_record record;
        uint64_t inode = reply->pending->node;
        if (dot == 1 && kvfs_table_find_inode(plane->table, inode, &record) == 0 && record.parent)
            inode = record.parent;
        struct fuse_entry_out none = {0};
        struct fuse_dirent dirent = {.ino = inode, .off = dot + 1, .namelen = (uint32_t)dot + 1, .type = S_IFDIR >> 12};
        reply_put(reply, &none, &dirent, "..");
    }
}

/* The name's record, and in *known whether it is one that the kernel may keep. False: the name is gone. */
static bool entry_find(struct kvfs_plane *plane, uint64_t directory, const char *name, uint32_t size, uint64_t inode, struct kvfs_record *record,
                       bool *known) {
    int r = kvfs_table_find_name(plane->table, directory, name, size, record);
    *known = r == 0 && !(record->flags & KVFS_INODE_ASK);
    if (r != -EAGAIN)
        return r == 0;
    r = kvfs_table_find_inode(plane->table, inode, record); /* the table cannot say by names */
    if (r < 0 || record->parent != directory)
        *record = (struct kvfs_record){.inode = inode, .parent = directory};
    return true; /* nothing says that it is gone */
}

static void entry_fill(struct kvfs_plane *plane, struct transport *transport, const struct kvfs_record *record, struct fuse_entry_out *out) {
    out->nodeid = record->inode;
    fill_attr(plane, record, &out->attr);
    bool staged = S_ISREG(record->mode) && overlay_attr(plane, record->inode, &out->attr);
    entry_timeouts(transport, &out->attr, staged || !(record->flags & KVFS_INODE_SEALED), out);
    out->entry_valid = min_u64(out->entry_valid, LISTED_S);
    out->attr_valid = min_u64(out->attr_valid, LISTED_S);
}

/* Beyond inodes_max the node id is 0, and the kernel makes no inode. */
static void put_names(struct kvfs_plane *plane, struct reply *reply, struct listing_page *page, uint32_t from) {
    uint32_t i = from, size;
    for (; i < page->count; i++) {
        const char *name = page_name(page, i, &size);
        struct kvfs_record record;
        struct fuse_entry_out entry = {0};
        bool known;
        if (!entry_find(plane, page->directory, name, size, page->inodes[i], &record, &known))
            continue;
        bool makes = known && reply->inodes < reply->inodes_max;
        if (makes)
            entry_fill(plane, reply->pending->transport, &record, &entry);
        /* As it was brought: no two entries of a page have one offset, and Python knows the name of each. */
        struct fuse_dirent dirent = {.ino = record.inode, .off = page->inodes[i] + DOTS, .namelen = size, .type = (record.mode & S_IFMT) >> 12};
        reply_put(reply, &entry, &dirent, name);
        if (reply->full)
            break;
        reply->inodes += makes;
        page->next = i + 1;
    }
}

/* How many inodes a READDIRPLUS may make: LISTED_MAX by one handle, LISTED_PERIOD_MAX by all in LISTED_PERIOD_NS. */
static uint32_t inodes_left(struct kvfs_plane *plane, const struct pending *p) {
    struct listings *listings = &plane->fuse->listings;
    uint32_t before = handle_listed(plane, p->transport, p->fh, p->node, 0);
    pthread_mutex_lock(&listings->lock);
    uint64_t now = now_ns();
    if (now - listings->since_ns > LISTED_PERIOD_NS)
        listings->since_ns = now, listings->inodes = 0;
    uint32_t left = listings->inodes < LISTED_PERIOD_MAX ? LISTED_PERIOD_MAX - listings->inodes : 0;
    pthread_mutex_unlock(&listings->lock);
    return (uint32_t)min_u64(left, before < LISTED_MAX ? LISTED_MAX - before : 0);
}

static void inodes_made(struct kvfs_plane *plane, const struct pending *p, uint32_t count) {
    struct listings *listings = &plane->fuse->listings;
    pthread_mutex_lock(&listings->lock);
    listings->inodes += count;
    pthread_mutex_unlock(&listings->lock);
    handle_listed(plane, p->transport, p->fh, p->node, count);
}

/* Make the answer of a page from one of its entries on. Returns memory that free() frees. *size < 0: -ENOMEM, or -EAGAIN: all that the page has there
 * is gone, and the next page is needed. */
static uint8_t *answer_make(struct kvfs_plane *plane, const struct pending *p, struct listing_page *page, uint32_t from, int64_t *size) {
    struct reply reply = {.pending = p, .plus = p->opcode == FUSE_READDIRPLUS};
    uint64_t fixed = offsetof(struct fuse_dirent, name) + 8 + (reply.plus ? sizeof(struct fuse_entry_out) : 0);
    uint64_t most = (page->count - from + DOTS) * fixed + PAGE_TEXT_MAX;
    if (page->count)
        most -= PAGE_TEXT_MAX - (page->ends[page->count - 1] - (from ? page->ends[from - 1] : 0));
    reply.room = (uint32_t)min_u64(p->size, min_u64(most, REPLY_ROOM));
    reply.out = malloc(reply.room ? reply.room : 1);
    if (!reply.out) {
        *size = -ENOMEM;
        return NULL;
    }
    if (reply.plus)
        reply.inodes_max = inodes_left(plane, p);
    put_dots(plane, &reply);
    if (!reply.full)
        put_names(plane, &reply, page, from);
    assert(reply.used <= reply.room);
    if (reply.inodes)
        inodes_made(plane, p, reply.inodes);
    *size = reply.used || reply.full || page->end ? (int64_t)reply.used : -EAGAIN;
    return reply.out;
}

uint8_t *listing_here(struct kvfs_plane *plane, const struct pending *p, int64_t *size) {
    struct listing_page *page = p->offset > DOTS ? page_take(plane, p->transport, p->fh, p->node) : NULL;
    uint8_t *out = NULL;
    *size = -EAGAIN;
    if (!page)
        return NULL;
    uint32_t from = now_ns() - page->made_ns < PAGE_NS ? page_find(page, p->offset) : UINT32_MAX;
    if (from < page->count || (from == page->count && page->end))
        out = answer_make(plane, p, page, from, size);
    page_keep(plane, page);
    return out;
}

uint8_t *listing_bring(struct kvfs_plane *plane, const struct pending *p, const struct kvfs_listed *names, int64_t *size) {
    struct listing_page *page = page_make(p, names);
    *size = -ENOMEM;
    uint8_t *out = page ? answer_make(plane, p, page, 0, size) : NULL;
    if (*size == -EAGAIN)
        free(page);
    else if (page)
        page_keep(plane, page);
    return out;
}
