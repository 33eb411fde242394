/* Blocks of other nodes of the pod, for requests: looked up in the pod map, opened, read, and removed by name. */
#include "pod/foreign.h"
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

bool foreign_is_same(struct node *node, const struct desc *desc) {
    if (!node->foreign)
        return true;
    pthread_mutex_lock(&node->lock);
    bool same = !node->desc || (node->desc->inode == desc->inode && node->desc->version == desc->version);
    pthread_mutex_unlock(&node->lock);
    return same;
}

bool foreign_moved(struct kvfs_plane *plane, struct node *node, const struct kvfs_record *failed) {
    struct kvfs_record now;
    foreign_forget(plane->pod, failed);
    if (foreign_again(plane->pod, &plane->array.geometry, failed, &now) < 0 || now.size != failed->size)
        return false;
    pthread_mutex_lock(&node->lock);
    now.inode = node->inode;
    *node->foreign = now;
    pthread_mutex_unlock(&node->lock);
    return true;
}

void foreign_hit(struct kvfs_plane *plane, const struct kvfs_record *record) {
    if (plane->news)
        kvfs_news_hit(plane->news, record->key_low, record->key_high, record->segment);
}

bool foreign_holds(struct kvfs_plane *plane, uint64_t parent, const char *name) {
    struct kvfs_record record;
    uint32_t size = (uint32_t)strlen(name);
    return kvfs_table_find_name(plane->table, parent, name, size, &record) == -ENOENT &&
           foreign_find(plane->pod, &plane->array.geometry, parent, name, size, &record) == 0;
}

int foreign_unlink(struct kvfs_plane *plane, uint64_t parent, const char *name) {
    struct kvfs_record record;
    if (!plane->pod)
        return -EAGAIN;
    kvfs_names_begin(plane->names);
    int r = -EAGAIN; /* this node's own: Python's, or its name is gone by now */
    if (kvfs_table_find_name(plane->table, parent, name, (uint32_t)strlen(name), &record) == -ENOENT)
        r = foreign_find(plane->pod, &plane->array.geometry, parent, name, (uint32_t)strlen(name), &record);
    if (r == 0) {
        kvfs_names_seen(plane->names, kvfs_pod_version(plane->pod, record.key_low, record.key_high));
        uint64_t version = kvfs_names_next_version(plane->names);
        kvfs_pod_remove(plane->pod, record.key_low, record.key_high, version);
        kvfs_news_gone(plane->news, record.key_low, record.key_high, version);
    }
    kvfs_names_end(plane->names);
    return r == 1 ? -EAGAIN : r;
}
