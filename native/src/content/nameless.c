/* Inodes without a name that nobody has open any more. */
#include "content/content.h"

void name_let_go(struct kvfs_plane *plane, uint64_t inode) {
    /* A next daemon hears of the last close as little as this one, if that ends before Python acts. So the journal has it. */
    if (plane->written && names_try(plane->names)) {
        const struct kvfs_inode_record *record = names_record(plane->names, inode);
        bool tells = record && record->flags & KVFS_INODE_NAMELESS && record->flags & KVFS_INODE_SEALED && record->nlink == 0;
        struct kvfs_inode_record *told = tells ? record_again(record) : NULL;
        if (told) {
            told->nlink = 1;
            if (names_take(plane->names, told) < 0)
                free(told);
        }
        kvfs_names_end(plane->names);
    }
    event_add(plane, KVFS_EVENT_IDLE, inode, 0);
}
