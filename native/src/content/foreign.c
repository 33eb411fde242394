/* Blocks of other nodes of the pod, for requests: looked up in the pod map, opened, read, and removed by name. And what other nodes tell. */
#include "pod/foreign.h"
#include "kvfs_wire.h"
#include "content/content.h"

int foreign_look(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t name_size, struct kvfs_record *out) {
    if (!plane->pod)
        return -ENOENT;
    int r = foreign_find(plane->pod, &plane->array.geometry, parent, name, name_size, out);
    return r == 0 ? foreign_known_add(plane->known, out, name, name_size) : r;
}

int record_find(struct kvfs_plane *plane, uint64_t inode, struct kvfs_record *out) {
    if (!is_foreign(inode))
        return kvfs_table_find_inode(plane->table, inode, out);
    return plane->pod && foreign_known_get(plane->known, inode, out, NULL) ? 0 : -ENOENT;
}

int node_record(struct kvfs_plane *plane, struct node *node, struct kvfs_record *out) {
    if (!node->foreign)
        return kvfs_table_find_inode(plane->table, node->inode, out);
    pthread_mutex_lock(&node->lock);
    *out = *node->foreign;
    pthread_mutex_unlock(&node->lock);
    return 0;
}

static bool is_content(const struct node *node, const struct desc *desc) {
    return !node->content.inode || (node->content.inode == desc->inode && node->content.version == desc->version);
}

bool foreign_is_same(struct node *node, const struct desc *desc) {
    if (!node->foreign)
        return true;
    pthread_mutex_lock(&node->lock);
    bool same = is_content(node, desc);
    pthread_mutex_unlock(&node->lock);
    return same;
}

void foreign_avoid(struct kvfs_plane *plane, uint32_t segment) {
    kvfs_pod_avoid(plane->pod, segment, now_ns() + FOREIGN_AVOID * plane->array.io_timeout_ms * UINT64_C(1000000));
}

bool foreign_proven(struct kvfs_plane *plane, struct node *node, const struct desc *desc) {
    pthread_mutex_lock(&node->lock);
    bool same = is_content(node, desc);
    if (!node->content.inode) {
        node->content = (struct foreign_content){desc->inode, desc->version};
        foreign_known_read(plane->known, node->inode, &node->content);
        opens_foreign_read(plane, node);
    }
    pthread_mutex_unlock(&node->lock);
    return same;
}

bool foreign_moved(struct kvfs_plane *plane, struct node *node, const struct kvfs_record *failed, const struct desc *desc) {
    struct kvfs_record then = *failed, now;
    if (!then.header_pages) {
        node_record(plane, node, &then);
        then.generation = desc->generation;
        then.segment = desc->segment;
        then.page = desc->page;
    }
    if (foreign_again(plane->pod, &plane->array.geometry, &then, &now) < 0)
        return false;
    if (now.generation == then.generation && now.segment == then.segment && now.page == then.page) {
        kvfs_pod_forget(plane->pod, then.key_low, then.key_high, then.segment, then.page);
        return false;
    }
    if (now.size != then.size)
        return false;
    pthread_mutex_lock(&node->lock);
    now.inode = node->inode;
    *node->foreign = now;
    opens_foreign_add(plane, node);
    pthread_mutex_unlock(&node->lock);
    return true;
}

/* ---- removed ---- */

#define MAP_TRIES 1000u /* a look-up that meets a change of the map is repeated */
#define TOMBSTONES_MAX 65536u
/* Those that Python has not taken yet; within a step. Beyond the bound the oldest are overwritten. */
struct tombstones {
    uint64_t added, taken;
    struct kvfs_tombstone all[TOMBSTONES_MAX];
};

static void gone_tell(struct kvfs_plane *plane, uint64_t key_low, uint64_t key_high, uint64_t version) {
    const struct kvfs_news_item item = {.kind = KVFS_POD_GONE, .key_low = key_low, .key_high = key_high, .version = version};
    kvfs_news_add(plane->news, &item);
}

static void tombstone_add(struct kvfs_plane *plane, uint64_t key_low, uint64_t key_high, uint64_t version, uint32_t slot) {
    plane->tombstones->all[plane->tombstones->added++ % TOMBSTONES_MAX] =
        (struct kvfs_tombstone){.key_low = key_low, .key_high = key_high, .version = version, .slot = slot};
}

enum foreign_holder foreign_replaced(struct kvfs_plane *plane, uint64_t key_low, uint64_t key_high, uint64_t by_version) {
    struct kvfs_pod_found found;
    if (kvfs_pod_find(plane->pod, key_low, key_high, &found) < 0)
        return FOREIGN_NOTHING;
    if (found.directory)
        return FOREIGN_DIRECTORY;
    uint64_t version = kvfs_pod_version(plane->pod, key_low, key_high);
    if (version && version < by_version)
        tombstone_add(plane, key_low, key_high, version, found.slot);
    return FOREIGN_BLOCK;
}

uint32_t kvfs_foreign_tombstones(struct kvfs_plane *plane, struct kvfs_tombstone *out, uint32_t capacity) {
    struct tombstones *tombstones = plane->tombstones;
    uint32_t count = 0;
    kvfs_names_begin(plane->names);
    if (tombstones && tombstones->added - tombstones->taken > TOMBSTONES_MAX)
        tombstones->taken = tombstones->added - TOMBSTONES_MAX;
    while (tombstones && count < capacity && tombstones->taken < tombstones->added)
        out[count++] = tombstones->all[tombstones->taken++ % TOMBSTONES_MAX];
    kvfs_names_end(plane->names);
    return count;
}

void kvfs_foreign_tell_gone(struct kvfs_plane *plane, const struct kvfs_tombstone *tombstones, uint32_t count) {
    for (uint32_t i = 0; plane->pod && i < count; i++) {
        kvfs_pod_remove(plane->pod, tombstones[i].key_low, tombstones[i].key_high, tombstones[i].version);
        gone_tell(plane, tombstones[i].key_low, tombstones[i].key_high, tombstones[i].version);
    }
}

int foreign_drop(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t size) {
    struct kvfs_record record;
    int r = -EAGAIN;
    for (uint32_t i = 0; i < MAP_TRIES && r == -EAGAIN; i++)
        r = foreign_find(plane->pod, &plane->array.geometry, parent, name, size, &record);
    if (r)
        return r == -EAGAIN ? -ENOENT : r;
    kvfs_names_seen(plane->names, kvfs_pod_version(plane->pod, record.key_low, record.key_high));
    uint64_t version = kvfs_names_next_version(plane->names);
    kvfs_pod_remove(plane->pod, record.key_low, record.key_high, version);
    gone_tell(plane, record.key_low, record.key_high, version);
    tombstone_add(plane, record.key_low, record.key_high, version, kvfs_pod_owner(plane->pod, record.segment));
    return 0;
}

/* ---- for the control plane ---- */

int kvfs_plane_join(struct kvfs_plane *plane, uint32_t slot, uint32_t nodes, uint32_t lot, uint64_t entries_max, uint64_t news_bytes,
                    uint64_t start) {
    const struct kvfs_pod_config config = {.entries_max = entries_max,
                                           .secret = plane->config.secret,
                                           .segment_count = plane->config.segment_count,
                                           .segment_pages = plane->array.geometry.segment_pages,
                                           .lot = lot,
                                           .nodes = nodes,
                                           .own_slot = slot};
    const struct kvfs_news_config news = {.bytes_max = news_bytes, .secret = plane->config.secret, .start = start, .slot = slot};
    assert(!plane->pod);
    int r = kvfs_pod_create(&config, &plane->pod);
    if (r == 0)
        r = kvfs_news_create(&news, &plane->news);
    if (r == 0 && (!(plane->known = foreign_known_new()) || !(plane->tombstones = calloc(1, sizeof(*plane->tombstones)))))
        r = -ENOMEM;
    if (r < 0)
        foreign_leave(plane);
    return r;
}

void foreign_leave(struct kvfs_plane *plane) {
    kvfs_news_destroy(plane->news);
    kvfs_pod_destroy(plane->pod);
    foreign_known_free(plane->known);
    free(plane->tombstones);
    plane->tombstones = NULL;
    plane->news = NULL;
    plane->pod = NULL;
    plane->known = NULL;
}

void kvfs_foreign_wait(struct kvfs_plane *plane, int on) { atomic_store(&plane->waits_for_news, on != 0); }

struct kvfs_pod *kvfs_plane_pod(struct kvfs_plane *plane) { return plane->pod; }

struct kvfs_news *kvfs_plane_news(struct kvfs_plane *plane) { return plane->news; }

int kvfs_foreign_find(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t name_size, struct kvfs_record *out) {
    return foreign_look(plane, parent, name, name_size, out);
}

int foreign_rights(struct kvfs_plane *plane, uint64_t parent, const char *name, uint32_t name_size, struct kvfs_record *out) {
    uint64_t low, high;
    foreign_key(&plane->array.geometry, parent, name, name_size, &low, &high);
    uint64_t version = kvfs_pod_version(plane->pod, low, high); /* first: rights that come in between are of a later one, and told again */
    int r = foreign_find(plane->pod, &plane->array.geometry, parent, name, name_size, out);
    out->version = version;
    return r == 1 && version ? 0 : r < 0 ? r : -ENOENT;
}

#define TOLD_AT_ONCE 256 /* records under one hold of the names' lock */

uint64_t kvfs_foreign_tell_directories(struct kvfs_plane *plane) {
    uint64_t slot = 0, told = 0;
    bool paced = true; /* while somebody takes them; if nobody does, only one slice waits, and the others learn that some were lost */
    for (bool more = plane->news != NULL; more;) {
        paced = paced && kvfs_news_pace(plane->news) == 0;
        kvfs_names_begin(plane->names);
        for (int i = 0; i < TOLD_AT_ONCE && more; i++) {
            struct kvfs_record r;
            uint64_t low, high;
            more = kvfs_table_scan(plane->table, &slot, &r, &low, &high);
            if (!more || r.kind != KVFS_KIND_DIRECTORY || r.flags & (KVFS_INODE_BORROWED | KVFS_INODE_NAMELESS))
                continue;
            const struct kvfs_news_item item = {
                .kind = KVFS_POD_DIRECTORY_HERE, .key_low = low, .key_high = high, .version = r.version, .mode = r.mode, .uid = r.uid, .gid = r.gid};
            kvfs_news_add(plane->news, &item);
            told++;
        }
        kvfs_names_end(plane->names);
    }
    return told;
}

int kvfs_foreign_known(struct kvfs_plane *plane, uint64_t inode, struct kvfs_record *out, char *name) {
    return plane->known && is_foreign(inode) && foreign_known_get(plane->known, inode, out, name) ? 0 : -ENOENT;
}

/* A directory that another node removed: if this node only looked it up, it looks whether anybody has it still. The batch has been checked. */
static void directories_look(struct kvfs_plane *plane, const uint8_t *batch) {
    struct kvfs_pod_batch head;
    memcpy(&head, batch, sizeof(head));
    const uint8_t *at =
        batch + sizeof(head) + head.segment_count * sizeof(struct kvfs_pod_batch_segment) + head.shape_count * sizeof(struct kvfs_pod_batch_shape);
    for (uint32_t i = 0; i < head.record_count; i++, at += sizeof(struct kvfs_pod_batch_record)) {
        struct kvfs_pod_batch_record r;
        struct kvfs_record own;
        memcpy(&r, at, sizeof(r));
        if (r.page_kind >> 24 == KVFS_POD_DIRECTORY_GONE && kvfs_table_find_key(plane->table, r.key_low, r.key_high, &own) == 0 &&
            own.kind == KVFS_KIND_DIRECTORY && own.flags & KVFS_INODE_BORROWED)
            event_add(plane, KVFS_EVENT_OVERTAKEN, own.inode, r.version);
    }
}

int kvfs_foreign_apply(struct kvfs_plane *plane, uint32_t slot, const void *batch, uint64_t size, struct kvfs_pod_conflict *conflicts,
                       struct kvfs_pod_applied *out) {
    struct kvfs_pod_hit *hits = plane->pod ? malloc(KVFS_POD_BATCH_RECORDS_MAX * sizeof(*hits)) : NULL;
    if (!hits)
        return plane->pod ? -ENOMEM : -EINVAL;
    int r = kvfs_pod_apply(plane->pod, slot, batch, size, plane->table, conflicts, hits, out);
    if (r == 0) {
        kvfs_names_seen(plane->names, out->version_max);
        for (uint32_t i = 0; i < out->hit_count; i++)
            kvfs_inode_touch(plane, &hits[i].inode, 1, 1);
    }
    free(hits);
    if (r == 0)
        directories_look(plane, batch);
    return r;
}

int kvfs_foreign_asked(struct kvfs_plane *plane, const uint64_t *keys, uint32_t count, uint64_t *inodes) {
    int found = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct kvfs_record record;
        bool there = kvfs_table_find_key(plane->table, keys[2 * i], keys[2 * i + 1], &record) == 0 && record.kind == KVFS_KIND_FILE &&
                     record.flags & KVFS_INODE_SEALED;
        inodes[i] = there ? record.inode : 0;
        found += there;
    }
    return found;
}

int kvfs_foreign_note(struct kvfs_plane *plane, uint32_t what, const void *blocks, uint32_t count) {
    int gone = 0;
    for (uint32_t i = 0; plane->pod && i < count; i++) {
        struct wire_foreign_block block;
        memcpy(&block, (const uint8_t *)blocks + i * sizeof(block), sizeof(block));
        const struct kvfs_record record = {.key_low = block.key_low, .key_high = block.key_high};
        if (what == WIRE_FOREIGN_BAD)
            gone += kvfs_pod_forget(plane->pod, block.key_low, block.key_high, block.segment, block.page) == 0;
        else
            foreign_hit(plane, &record);
    }
    return gone;
}

static int load_one(struct kvfs_plane *plane, uint32_t segment, uint64_t generation, const struct kvfs_inode_record *r, const char *name) {
    const bool directory = r->kind == KVFS_KIND_DIRECTORY;
    struct kvfs_pod_entry entry = {.version = r->version,
                                   .mode = r->mode | (r->extent_count ? KVFS_POD_EXTENTS : 0),
                                   .uid = r->uid,
                                   .gid = r->gid,
                                   .slot = (uint16_t)kvfs_pod_owner(plane->pod, segment),
                                   .directory = directory};
    if (!r->name_size || (!directory && (r->kind != KVFS_KIND_FILE || !(r->flags & KVFS_INODE_SEALED) || r->flags & KVFS_INODE_NAMELESS)))
        return 0;
    if (!directory && (r->segment != segment || r->generation != generation))
        return 0;
    if (!directory) {
        entry.generation = r->generation;
        entry.size = r->size;
        entry.segment = r->segment;
        entry.page = r->page;
        entry.header_pages = r->header_pages;
    }
    struct kvfs_record own;
    foreign_key(&plane->array.geometry, r->parent, name, r->name_size, &entry.key_low, &entry.key_high);
    kvfs_names_seen(plane->names, r->version);
    int r_own = kvfs_table_find_key(plane->table, entry.key_low, entry.key_high, &own);
    const bool both = r_own == 0 && directory && own.kind == KVFS_KIND_DIRECTORY;
    if (r_own == 0 && !both && (directory || own.version >= entry.version))
        return 0;
    int result = kvfs_pod_put(plane->pod, &entry);
    if (r_own == 0 && result == 0 && (both ? own.version < entry.version : own.kind == KVFS_KIND_FILE))
        event_add(plane, KVFS_EVENT_OVERTAKEN, own.inode, own.version);
    return result == 0;
}

int64_t kvfs_foreign_load(struct kvfs_plane *plane, uint32_t segment, uint64_t generation, const void *records, uint64_t size) {
    int64_t taken = 0;
    if (!plane->pod || segment >= plane->config.segment_count)
        return -EINVAL;
    if (!records_sound(&plane->array.geometry, KVFS_EPOCH_MAX, records, size))
        return -EBADMSG;
    for (const uint8_t *at = records, *end = at + size; at < end;) {
        struct kvfs_inode_record head;
        memcpy(&head, at, sizeof(head)); /* the buffer need not be aligned */
        taken += load_one(plane, segment, generation, &head, (const char *)at + sizeof(head));
        at += head.record_size;
    }
    return taken;
}
