/* Requests that are done once, also where a kernel sends them again to a later daemon.
 *
 * A repeated RENAME, UNLINK or RMDIR might do it to another file, and a repeated MKDIR fails. So each change of names that such a request makes is in the
 * journal of names with the request's number. The number leaves with the answer. A request of a former daemon that is there was done: it is answered
 * alone. A CREATE may be repeated: nothing of its file was sealed. */
#include "fuse/fuse.h"

#define UNIQUE_RESEND (UINT64_C(1) << 63) /* FUSE_UNIQUE_RESEND, Linux 6.9 */
/* Numbers are a connection's, whatever clone of /dev/fuse they come by. One mount has a journal. */
#define CONNECTION 1u

static bool is_once(const struct transport *transport, uint32_t opcode) {
    switch (opcode) {
    case FUSE_UNLINK:
    case FUSE_RMDIR:
    case FUSE_RENAME:
    case FUSE_RENAME2:
    case FUSE_MKDIR:
    case FUSE_SYMLINK:
    case FUSE_SETXATTR:
    case FUSE_REMOVEXATTR:
    case FUSE_FLUSH: return !transport->guest;
    default: return false;
    }
}

/* The answer to a MKDIR or SYMLINK that was done. False: what it made is gone by now. */
static bool answer_made(struct server *server, const struct fuse_in_header *in) {
    const char *name = (const char *)(in + 1) + (in->opcode == FUSE_MKDIR ? sizeof(struct fuse_mkdir_in) : 0);
    struct kvfs_record record;
    struct fuse_entry_out entry = {0};
    if (kvfs_table_find_name(server->plane->table, in->nodeid, name, (uint32_t)strlen(name), &record) < 0)
        return false;
    entry.nodeid = record.inode;
    fill_attr(server->plane, &record, &entry.attr);
    entry_timeouts(server->transport, &entry.attr, false, &entry);
    reply_data(server, in->unique, &entry, sizeof(entry));
    return true;
}

uint64_t once_number(const struct transport *transport, uint64_t unique) { return transport->guest ? 0 : unique & ~UNIQUE_RESEND; }

bool once_begin(struct server *server, const struct fuse_in_header *in) {
    if (in->unique & UNIQUE_RESEND && server->transport->taken && (in->opcode == FUSE_OPEN || in->opcode == FUSE_CREATE))
        handles_asked_again(server->plane, in->unique & ~UNIQUE_RESEND);
    if (!is_once(server->transport, in->opcode))
        return true;
    uint64_t unique = in->unique & ~UNIQUE_RESEND;
    if (in->unique & UNIQUE_RESEND && kvfs_names_was_asked(server->plane->names, CONNECTION, unique)) {
        bool makes = in->opcode == FUSE_MKDIR || in->opcode == FUSE_SYMLINK, answered = !makes || answer_made(server, in);
        if (answered && !makes)
            reply_error(server, in->unique, 0);
        kvfs_names_answered(server->plane->names, CONNECTION, unique);
        if (answered)
            return false;
    }
    kvfs_names_request(CONNECTION, unique);
    return true;
}

void once_end(void) { kvfs_names_request(0, 0); }

void once_answered(struct kvfs_plane *plane, const struct pending *p) {
    if (is_once(p->transport, p->opcode))
        kvfs_names_answered(plane->names, CONNECTION, p->unique & ~UNIQUE_RESEND);
}

void once_flush(struct flush *flush, const struct server *server, uint64_t unique) {
    if (!server->transport->guest)
        flush->connection = CONNECTION, flush->unique = unique & ~UNIQUE_RESEND;
}

int kvfs_request_of(struct kvfs_plane *plane, uint32_t token, uint64_t *connection, uint64_t *unique) {
    struct mux *mux = &plane->fuse->mux;
    if (token - 1u >= PENDING_MAX)
        return 0;
    pthread_mutex_lock(&mux->lock);
    const struct pending *p = &mux->entries[token - 1];
    bool once = p->live && is_once(p->transport, p->opcode);
    *connection = CONNECTION;
    *unique = p->unique & ~UNIQUE_RESEND;
    pthread_mutex_unlock(&mux->lock);
    return once;
}
