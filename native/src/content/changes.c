/* Changes of the block table, as the feed tells them: which files became blocks, and which blocks' names ended. In a pod the other nodes are told too.
 * Everything here runs within a step (I4), after the table has changed and before the names in memory do. While nobody is to be told, nothing is looked
 * up. */
#include "block/feed.h"
#include "pod/foreign.h"
#include "content/content.h"

#define ROOT_INODE 1u
/* News wait for what comes next of the same name: engines write, close and rename. */
#define HOLD_NS 20000000u
#define PASSING_HOLD_NS 1000000000u

static bool is_block(const struct kvfs_record *record) {
    return record->kind == KVFS_KIND_FILE && (record->flags & (KVFS_INODE_SEALED | KVFS_INODE_NAMELESS)) == KVFS_INODE_SEALED;
}

static bool same_place(const struct kvfs_record *a, const struct kvfs_record *b) {
    return a->segment == b->segment && a->page == b->page && a->generation == b->generation;
}

/* With their version: others count a later change of this name by it. */
static bool same_rights(const struct kvfs_record *a, const struct kvfs_record *b) {
    return a->version == b->version && a->mode == b->mode && a->uid == b->uid && a->gid == b->gid;
}

static bool same_name(const struct kvfs_inode_record *a, const struct kvfs_inode_record *b, const char *b_name) {
    return a->parent == b->parent && a->name_size == b->name_size && memcmp(record_name(a), b_name, a->name_size) == 0;
}

/* The path as far up as memory has its directories, which is nearly always the root. */
static void tell(struct kvfs_plane *plane, enum feed_kind kind, enum kvfs_event_reason reason, uint64_t size, uint64_t parent, const char *name,
                 uint32_t name_size) {
    char text[FEED_TEXT_MAX];
    uint32_t at = sizeof(text) - name_size;
    copy_bytes(text + at, name, name_size);
    while (parent != ROOT_INODE) {
        const struct kvfs_inode_record *directory = names_record(plane->names, parent);
        if (!directory || !directory->name_size || directory->name_size + 1u > at)
            break;
        text[--at] = '/';
        at -= directory->name_size;
        memcpy(text + at, record_name(directory), directory->name_size);
        parent = directory->parent;
    }
    struct feed_record record = {
        .kind = kind, .reason = reason, .size = size, .time_ns = time_now(), .anchor = parent, .text_size = (uint32_t)sizeof(text) - at};
    feed_add(plane->feed, &record, text + at);
}

/* ---- to other nodes ---- */

/* A name that engines give for a moment, before they rename the file. */
static bool name_is_passing(const char *name, uint32_t size) {
    if (name[0] == '.')
        return true;
    for (uint32_t i = 1; i + 4 <= size; i++)
        if (memcmp(name + i, ".tmp", 4) == 0)
            return true;
    return false;
}

/* `keyed`: its header has this very name. `first`: nothing had the name before. */
static void news_here(struct kvfs_plane *plane, const struct kvfs_inode_record *r, const char *name, bool keyed, bool first) {
    const bool directory = r->kind == KVFS_KIND_DIRECTORY;
    uint64_t low, high;
    if (!plane->news || !r->name_size || r->flags & KVFS_INODE_BORROWED || (!directory && !(r->flags & KVFS_INODE_SEALED)))
        return;
    const bool passing = name_is_passing(name, r->name_size);
    foreign_key(&plane->array.geometry, r->parent, name, r->name_size, &low, &high);
    const enum foreign_holder theirs = foreign_replaced(plane, low, high, r->version);
    if (theirs != FOREIGN_NOTHING)
        first = false; /* an end of it is news to others, however soon */
    const struct kvfs_news_item item = {
        .kind = directory ? KVFS_POD_DIRECTORY_HERE : KVFS_POD_HERE,
        .flags = (uint8_t)((keyed ? KVFS_NEWS_KEYED : 0) | (first ? KVFS_NEWS_FIRST : 0) | (passing ? KVFS_NEWS_HIDDEN : 0)),
        .hold_ns = passing ? PASSING_HOLD_NS : HOLD_NS,
        .key_low = low,
        .key_high = high,
        .version = r->version,
        .segment = r->segment,
        .page = r->page,
        .generation = r->generation,
        .size = r->size,
        .header_pages = r->header_pages,
        .mode = r->mode | (r->extent_count ? KVFS_POD_EXTENTS : 0),
        .uid = r->uid,
        .gid = r->gid};
    kvfs_news_add(plane->news, &item);
    /* Another node has stored it later, or set a directory's rights later. An own directory takes nobody's away. */
    const bool overtaken = directory && theirs != FOREIGN_BLOCK ? kvfs_pod_version(plane->pod, low, high) > r->version
                                                                : kvfs_pod_remove(plane->pod, low, high, r->version) == -ESTALE;
    if (overtaken)
        event_add(plane, KVFS_EVENT_OVERTAKEN, r->inode, r->version);
}

static void news_gone(struct kvfs_plane *plane, const struct kvfs_record *was) {
    if (!plane->news || was->flags & (KVFS_INODE_NAMELESS | KVFS_INODE_BORROWED) ||
        (was->kind != KVFS_KIND_DIRECTORY && !(was->flags & KVFS_INODE_SEALED)))
        return;
    const struct kvfs_news_item item = {.kind = was->kind == KVFS_KIND_DIRECTORY ? KVFS_POD_DIRECTORY_GONE : KVFS_POD_GONE,
                                        .key_low = was->key_low,
                                        .key_high = was->key_high,
                                        .version = was->version};
    kvfs_news_add(plane->news, &item);
}

/* ---- to subscribers ---- */

/* By the inode's name in memory. */
static void tell_old_name(struct kvfs_plane *plane, enum feed_kind kind, enum kvfs_event_reason reason, const struct kvfs_record *was) {
    const struct kvfs_inode_record *record = names_record(plane->names, was->inode);
    if (record && record->name_size)
        tell(plane, kind, reason, was->size, record->parent, record_name(record), record->name_size);
    else
        tell(plane, FEED_LOST, reason, was->size, ROOT_INODE, NULL, 0);
}

void change_look(struct kvfs_plane *plane, uint64_t inode, uint64_t parent, const char *name, uint32_t name_size, struct change *out) {
    out->known = out->held = false;
    if (!plane->feed && !plane->news)
        return;
    out->known = kvfs_table_find_inode(plane->table, inode, &out->before) == 0;
    out->held = name_size && kvfs_table_find_name(plane->table, parent, name, name_size, &out->holder) == 0 && out->holder.inode != inode;
}

/* Names are told to other nodes by their keys; the table has the old one. */
static void news_put(struct kvfs_plane *plane, const struct kvfs_inode_record *record, const char *name, bool stored, const struct change *change) {
    struct kvfs_record now;
    if (kvfs_table_find_inode(plane->table, record->inode, &now) < 0)
        return;
    bool renamed = change->known && !(change->before.flags & KVFS_INODE_NAMELESS) &&
                   (change->before.key_low != now.key_low || change->before.key_high != now.key_high);
    if (renamed)
        news_gone(plane, &change->before);
    if (record->kind == KVFS_KIND_DIRECTORY || is_block(&now))
        news_here(plane, record, name, stored && !renamed && !change->known, !change->held);
    else if (change->held && is_block(&change->holder))
        news_gone(plane, &change->holder);
}

void change_put(struct kvfs_plane *plane, const struct kvfs_inode_record *record, const char *name, enum kvfs_event_reason reason,
                const struct change *change) {
    if (plane->news)
        news_put(plane, record, name, reason == KVFS_REASON_WRITTEN, change);
    if (!plane->feed)
        return;
    struct kvfs_record now;
    record_from_inode(record, &now);
    now.flags &= (uint8_t)~KVFS_INODE_NAMELESS;
    const struct kvfs_inode_record *old = names_record(plane->names, record->inode);
    bool had_name = change->known && !(change->before.flags & KVFS_INODE_NAMELESS);
    bool renamed = had_name && (!old || !same_name(old, record, name));
    bool replaced = change->held && is_block(&change->holder);
    if (record->kind == KVFS_KIND_DIRECTORY && renamed) {
        tell_old_name(plane, FEED_LOOK, KVFS_REASON_RENAMED, &change->before);
        tell(plane, FEED_LOOK, KVFS_REASON_RENAMED, 0, record->parent, name, record->name_size);
        return;
    }
    if (renamed && is_block(&change->before))
        tell_old_name(plane, FEED_REMOVED, KVFS_REASON_RENAMED, &change->before);
    if (!is_block(&now)) {
        if (replaced)
            tell(plane, FEED_REMOVED, KVFS_REASON_REPLACED, change->holder.size, record->parent, name, record->name_size);
    } else if (renamed || !had_name || !is_block(&change->before) || !same_place(&change->before, &now)) {
        reason = renamed ? KVFS_REASON_RENAMED : replaced || (had_name && is_block(&change->before)) ? KVFS_REASON_REPLACED : reason;
        tell(plane, FEED_STORED, reason, now.size, record->parent, name, record->name_size);
    }
}

void change_update(struct kvfs_plane *plane, const struct kvfs_inode_record *record, const char *name, const struct change *change) {
    if ((!plane->feed && !plane->news) || !change->known || change->before.flags & KVFS_INODE_NAMELESS)
        return;
    struct kvfs_record now;
    record_from_inode(record, &now);
    bool was = is_block(&change->before), is = is_block(&now);
    if (now.kind == KVFS_KIND_DIRECTORY ? !same_rights(&change->before, &now)
                                        : is && !(was && same_place(&change->before, &now) && same_rights(&change->before, &now)))
        news_here(plane, record, name, false, is && !was);
    else if (was && !is)
        news_gone(plane, &change->before);
    if (!plane->feed)
        return;
    if (is && !(was && same_place(&change->before, &now)))
        tell(plane, FEED_STORED, was ? KVFS_REASON_REPLACED : KVFS_REASON_WRITTEN, now.size, record->parent, name, record->name_size);
    else if (was && !is)
        tell(plane, FEED_REMOVED, KVFS_REASON_REPLACED, change->before.size, record->parent, name, record->name_size);
}

void change_moved(struct kvfs_plane *plane, const struct kvfs_inode_record *record, const char *name) {
    if (!(record->flags & KVFS_INODE_NAMELESS))
        news_here(plane, record, name, false, false);
}

void change_remove(struct kvfs_plane *plane, enum kvfs_event_reason reason, const struct change *change) {
    if (change->known && reason != KVFS_REASON_EVICTED) /* of an evicted block its segment's end tells; until then its bytes are there */
        news_gone(plane, &change->before);
    if (plane->feed && change->known && is_block(&change->before))
        tell_old_name(plane, FEED_REMOVED, reason, &change->before);
}

int64_t kvfs_blocks_load(struct kvfs_plane *plane, const void *records, uint64_t size) {
    int64_t loaded = 0, r = 0;
    kvfs_names_begin(plane->names);
    if (!plane->feed && !plane->news) {
        loaded = kvfs_table_load(plane->table, records, size);
        kvfs_names_end(plane->names);
        return loaded;
    }
    for (const uint8_t *at = records, *end = at + size; at < end && r >= 0; loaded += r) {
        struct kvfs_inode_record head;
        struct change change;
        if ((uint64_t)(end - at) < sizeof(head))
            r = -EBADMSG;
        else
            memcpy(&head, at, sizeof(head)); /* the buffer need not be aligned */
        if (r < 0 || head.record_size < sizeof(head) + head.name_size || head.record_size > (uint64_t)(end - at)) {
            r = -EBADMSG;
            break;
        }
        const char *name = (const char *)at + sizeof(head);
        bool named = head.name_size && !(head.flags & KVFS_INODE_NAMELESS);
        change_look(plane, head.inode, head.parent, name, named ? head.name_size : 0, &change);
        r = kvfs_table_load(plane->table, at, head.record_size);
        if (r > 0 && named)
            change_put(plane, &head, name, KVFS_REASON_FOUND, &change);
        at += head.record_size;
    }
    kvfs_names_end(plane->names);
    return r < 0 ? r : loaded;
}

/* ---- subscribers ---- */

int kvfs_feed_begin(struct kvfs_plane *plane, uint64_t size, struct kvfs_feed_place *out) {
    kvfs_names_begin(plane->names);
    int r = plane->feed ? 0 : feed_create(size, &plane->feed);
    if (r == 0) {
        struct kvfs_feed_place place = {.fd = feed_fd(plane->feed), .size = feed_size(plane->feed)};
        feed_end(plane->feed, &place.position, &place.number);
        *out = place;
    }
    kvfs_names_end(plane->names);
    return r;
}

void kvfs_feed_stop(struct kvfs_plane *plane) {
    kvfs_names_begin(plane->names);
    feed_destroy(plane->feed);
    plane->feed = NULL;
    kvfs_names_end(plane->names);
}
