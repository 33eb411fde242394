/* The session behind the transports. Requests that C does not answer go to pyfuse3 over a socketpair, under our own ids, each with a deadline (I24).
 * Requests that come with every block go to Python as calls, without a task for each.
 *
 * The kernel's INIT never gets here: the session has one constant INIT of its own. Python's file handle is the inode number; the kernel's handles are
 * ours. */
#include "base/descriptor.h"
#include "pod/foreign.h"
#include "fuse/fuse.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define INIT_UNIQUE UINT64_MAX
#define RELEASEDIR_UNIQUE (UINT64_MAX - 1)
#define QUEUE_MAX 4096u
#define REPLY_MAX (256u * 1024)
#define READDIR_MAX (128u * 1024)
/* A kernel checks the mode of a file that it has just created, and would ask for it. The kernel counts the size itself. */
#define CREATED_NS 100000000u
#define FSYNC_DATA 1u /* FUSE_FSYNC_FDATASYNC; older headers lack it */

int mux_init(struct kvfs_plane *plane) {
    struct mux *mux = &plane->fuse->mux;
    pthread_mutex_init(&mux->lock, NULL);
    pthread_mutex_init(&mux->receiving, NULL);
    mux->fd = -1;
    mux->entries = calloc(PENDING_MAX, sizeof(*mux->entries));
    mux->reply = malloc(REPLY_MAX);
    if (!mux->entries || !mux->reply)
        return -ENOMEM;
    for (uint32_t i = PENDING_MAX; i-- > 0;) {
        mux->entries[i].index = i;
        mux->entries[i].next = mux->free;
        mux->free = &mux->entries[i];
    }
    return 0;
}

void mux_free(struct kvfs_plane *plane) {
    struct mux *mux = &plane->fuse->mux;
    mux_close(plane);
    while (mux->queue) {
        struct message *next = mux->queue->next;
        free(mux->queue);
        mux->queue = next;
    }
    free(mux->entries);
    free(mux->reply);
}

void mux_close(struct kvfs_plane *plane) {
    pthread_mutex_lock(&plane->fuse->mux.lock);
    if (plane->fuse->mux.fd >= 0)
        shutdown(plane->fuse->mux.fd, SHUT_RDWR), close(plane->fuse->mux.fd);
    plane->fuse->mux.fd = -1;
    pthread_mutex_unlock(&plane->fuse->mux.lock);
}

/* With the lock held. */
static int message_send(struct mux *mux, const void *data, size_t size) {
    if (mux->fd < 0)
        return -ENOTCONN;
    if (!mux->queue) {
        if (send(mux->fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)size)
            return 0;
        if (errno != EAGAIN && errno != ENOBUFS)
            return -errno;
    }
    if (mux->queue_count >= QUEUE_MAX)
        return -EBUSY;
    struct message *message = malloc(sizeof(*message) + size);
    if (!message)
        return -ENOMEM;
    message->next = NULL;
    message->size = size;
    memcpy(message->data, data, size);
    if (mux->queue_last)
        mux->queue_last->next = message;
    else
        mux->queue = message;
    mux->queue_last = message;
    mux->queue_count++;
    return 0;
}

void mux_flush(struct kvfs_plane *plane) {
    struct mux *mux = &plane->fuse->mux;
    pthread_mutex_lock(&mux->lock);
    while (mux->queue && mux->fd >= 0) {
        struct message *message = mux->queue;
        if (send(mux->fd, message->data, message->size, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
            break;
        mux->queue = message->next;
        if (!mux->queue)
            mux->queue_last = NULL;
        assert(mux->queue_count > 0);
        mux->queue_count--;
        free(message);
    }
    pthread_mutex_unlock(&mux->lock);
}

int kvfs_session_open(struct kvfs_plane *plane) {
    struct mux *mux = &plane->fuse->mux;
    int fds[2];
    if (mux->fd >= 0)
        return -EBUSY;
    if (descriptors_above(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), fds) < 0)
        return -errno;
    int size = 4 << 20;
    for (int i = 0; i < 2; i++) {
        if (setsockopt(fds[i], SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof(size)) < 0)
            setsockopt(fds[i], SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
    }
    struct {
        struct fuse_in_header head;
        struct fuse_init_in init;
    } message;
    memset(&message, 0, sizeof(message));
    message.head.len = sizeof(message);
    message.head.opcode = FUSE_INIT;
    message.head.unique = INIT_UNIQUE;
    message.init.major = FUSE_KERNEL_VERSION;
    message.init.minor = 31; /* constant: spoken by libfuse 3.10 and later */
    message.init.max_readahead = READDIR_MAX;
    message.init.flags = FUSE_ASYNC_READ | FUSE_ATOMIC_O_TRUNC | FUSE_BIG_WRITES | FUSE_DO_READDIRPLUS | FUSE_PARALLEL_DIROPS | FUSE_MAX_PAGES;
    pthread_mutex_lock(&mux->lock);
    mux->fd = fds[0];
    int r = message_send(mux, &message, sizeof(message));
    pthread_mutex_unlock(&mux->lock);
    if (r < 0) {
        mux_close(plane);
        close(fds[1]);
        return r;
    }
    return fds[1];
}

/* ---- towards Python ---- */

/* By deadline. Only a WRITE that waited before it came here has an earlier one than the newest. */
static void pending_link(struct mux *mux, struct pending *p) {
    p->previous = mux->newest;
    while (p->previous && p->previous->deadline_ns > p->deadline_ns)
        p->previous = p->previous->previous;
    p->next = p->previous ? p->previous->next : mux->oldest;
    if (p->previous)
        p->previous->next = p;
    else
        mux->oldest = p;
    if (p->next)
        p->next->previous = p;
    else
        mux->newest = p;
}

static void pending_unlink(struct mux *mux, struct pending *p) {
    assert(!p->timed_out); /* it is in the list */
    assert(p->previous || mux->oldest == p);
    assert(p->next || mux->newest == p);
    if (p->previous)
        p->previous->next = p->next;
    else
        mux->oldest = p->next;
    if (p->next)
        p->next->previous = p->previous;
    else
        mux->newest = p->previous;
}

static void pending_release(struct mux *mux, struct pending *p) {
    assert(p->live);
    assert(mux->live_count > 0);
    p->live = false;
    atomic_fetch_sub(&p->transport->forwarded, 1);
    p->next = mux->free;
    mux->free = p;
    mux->live_count--;
    mux->session_count -= !p->call;
}

static struct pending pending_here(struct server *server, uint32_t flags) {
    const struct fuse_in_header *in = (struct fuse_in_header *)(void *)server->head;
    return (struct pending){.transport = server->transport,
                            .server = server,
                            .unique = in->unique,
                            .node = in->nodeid,
                            .opcode = in->opcode,
                            .flags = flags,
                            .user = user_id(server->transport, in),
                            .pid = in->pid,
                            .kernel_number = atomic_load(&server->transport->kernel_number)};
}

static bool is_list(uint32_t opcode) { return opcode == FUSE_READDIR || opcode == FUSE_READDIRPLUS; }

struct pending mux_list(struct server *server, const struct fuse_in_header *in) {
    struct fuse_read_in read;
    memcpy(&read, in + 1, sizeof(read));
    struct pending p = pending_here(server, 0);
    p.offset = read.offset;
    p.fh = read.fh;
    p.size = read.size;
    return p;
}

/* Makes a call of a request. NULL: no memory, or the request goes by the session. `*is`: whether it is a call. Names have been checked. */
static struct call *call_make(struct mux *mux, const struct fuse_in_header *in, bool *is) {
    const uint8_t *body = (const uint8_t *)(in + 1);
    const char *name = (const char *)body;
    *is = is_list(in->opcode) ||
          (atomic_load(&mux->calls_open) && (in->opcode == FUSE_CREATE || in->opcode == FUSE_UNLINK || in->opcode == FUSE_RENAME ||
                                             in->opcode == FUSE_RENAME2 || in->opcode == FUSE_FLUSH));
    struct call *call = *is ? malloc(sizeof(*call)) : NULL;
    if (!call)
        return NULL;
    struct kvfs_call *c = &call->body;
    memset(c, 0, offsetof(struct kvfs_call, name));
    c->inode = in->nodeid;
    c->opcode = in->opcode;
    c->uid = in->uid;
    c->gid = in->gid;
    if (in->opcode == FUSE_CREATE) {
        struct fuse_create_in create;
        memcpy(&create, body, sizeof(create));
        c->flags = create.flags;
        c->mode = create.mode;
        name += sizeof(create);
    } else if (in->opcode == FUSE_RENAME) {
        struct fuse_rename_in rename;
        memcpy(&rename, body, sizeof(rename));
        c->new_parent = rename.newdir;
        name += sizeof(rename);
    } else if (in->opcode == FUSE_RENAME2) {
        struct fuse_rename2_in rename;
        memcpy(&rename, body, sizeof(rename));
        c->new_parent = rename.newdir;
        c->flags = rename.flags;
        c->opcode = FUSE_RENAME;
        name += sizeof(rename);
    }
    if (in->opcode != FUSE_FLUSH && !is_list(in->opcode)) {
        c->name_size = (uint16_t)strlen(name);
        memcpy(c->name, name, c->name_size);
        name += c->name_size + 1;
    }
    if (c->opcode == FUSE_RENAME) {
        c->new_name_size = (uint16_t)strlen(name);
        memcpy(c->new_name, name, c->new_name_size);
    }
    return call;
}

/* `held`: NULL, or the call is to stay here: it is put there, and not handed to Python. The deadline counts from arrived_ns on. */
static void forward(struct server *server, struct fuse_in_header *in, uint64_t arrived_ns, uint32_t flags, uint64_t offset, struct call **held) {
    struct kvfs_plane *plane = server->plane;
    struct mux *mux = &plane->fuse->mux;
    const uint32_t size = in->len;
    uint64_t unique = in->unique;
    const uint32_t user = user_id(server->transport, in);
    bool is_call, first = false;
    struct call *call = call_make(mux, in, &is_call);
    struct pending listed = {.transport = NULL};
    if (call && is_list(in->opcode)) {
        listed = mux_list(server, in);
        listing_ask(plane, &listed, &call->body);
    }
    COUNT(plane, forwarded, held ? 0 : 1);
    pthread_mutex_lock(&mux->lock);
    struct pending *p = mux->free;
    int r = p ? 0 : -EBUSY;
    if (p) {
        assert(!p->live);
        mux->free = p->next;
        first = mux->live_count++ == 0;
        mux->session_count += !is_call;
        uint32_t index = p->index, salt = p->salt + 1;
        *p = (struct pending){.transport = server->transport,
                              .server = server,
                              .unique = unique,
                              .node = in->nodeid,
                              .arrived_ns = arrived_ns,
                              .deadline_ns = arrived_ns + plane->config.request_timeout_ms * 1000000ull,
                              .offset = offset,
                              .opcode = in->opcode,
                              .flags = flags,
                              .user = user,
                              .pid = in->pid,
                              .salt = salt & 0x3fffffff,
                              .index = index,
                              .size = size,
                              .live = true,
                              .call = is_call,
                              .kernel_number = atomic_load(&server->transport->kernel_number)};
        atomic_fetch_add(&server->transport->forwarded, 1);
        if (is_list(in->opcode)) {
            p->size = listed.size;
            p->fh = listed.fh;
        }
        if (in->opcode == FUSE_SETXATTR)
            in->uid = user; /* the one that a pin or a slab is charged to */
        pending_link(mux, p);
        in->unique = (uint64_t)p->salt << 32 | (index + 1);
        if (in->opcode != FUSE_GETXATTR) /* Python asks for the process there. Elsewhere it asks whose request it is: kvfs_request_of() */
            in->pid = index + 1;
        if (!is_call) {
            r = message_send(mux, in, size);
        } else if (!call || mux->fd < 0) {
            r = call ? -ENOTCONN : -ENOMEM;
        } else {
            call->body.id = in->unique;
            if (held)
                *held = call;
            else
                events_call(&plane->events, call);
            call = NULL;
        }
        if (r < 0) {
            pending_unlink(mux, p);
            pending_release(mux, p);
        }
    }
    pthread_mutex_unlock(&mux->lock);
    free(call);
    if (r < 0)
        reply_error(server, unique, -EIO);
    else if (server->index && (!is_call || first))
        server_wake(&server->transport->servers[0]); /* the leader waits for the session's reply, and checks deadlines */
}

void mux_forward(struct server *server, uint32_t flags, uint64_t offset) {
    forward(server, (struct fuse_in_header *)(void *)server->head, now_ns(), flags, offset, NULL);
}

void mux_sync_written(struct request *request, int64_t result) {
    if (result < 0 || !request->size) {
        reply_to_write(request, result);
        return;
    }
    struct {
        struct fuse_in_header head;
        struct fuse_fsync_in sync;
    } message;
    memset(&message, 0, sizeof(message));
    message.head.len = sizeof(message);
    message.head.opcode = FUSE_FSYNC;
    message.head.unique = request->unique;
    message.head.nodeid = request->node->inode;
    message.sync.fh = request->node->inode;
    message.sync.fsync_flags = FSYNC_DATA;
    struct server *server = request->server;
    forward(server, &message.head, request->arrived_ns, 0, request->size, NULL);
    server_wake(&server->transport->servers[0]); /* this may be a worker, while the leader sleeps */
    write_over(request);
}

/* A FLUSH that waits for its seal. Python has not been told of it. */
struct held_flush {
    struct flush flush;
    struct call *call;
};

static bool pending_take(struct mux *mux, uint64_t id, struct pending *out);

static void flush_answer(struct kvfs_plane *plane, uint64_t id) {
    struct pending p;
    COUNT(plane, flushes_sealed, 1);
    if (plane->fuse->mux.fd < 0 || !pending_take(&plane->fuse->mux, id, &p))
        return;
    process_made(plane, caller_of(p.transport, p.pid));
    if (!p.timed_out) {
        slow_look(plane, p.opcode, p.node, now_ns() - p.arrived_ns);
        p.transport->ops->reply(p.server, p.unique, 0, 0, NULL, 0);
    }
    once_answered(plane, &p);
}

static void flush_done(struct flush *flush, int result) {
    struct held_flush *held = (struct held_flush *)(void *)flush;
    struct kvfs_plane *plane = flush->plane;
    if (result == 0) {
        flush_answer(plane, held->call->body.id);
        free(held->call);
    } else {
        COUNT(plane, forwarded, 1);
        events_call(&plane->events, held->call);
    }
    free(held);
}

void mux_flush_file(struct server *server) {
    struct kvfs_plane *plane = server->plane;
    struct fuse_in_header *in = (struct fuse_in_header *)(void *)server->head;
    struct held_flush *held = mux_is_open(plane) ? calloc(1, sizeof(*held)) : NULL;
    if (!held) {
        mux_forward(server, 0, 0);
        return;
    }
    held->flush = (struct flush){.plane = plane, .inode = in->nodeid, .done = flush_done};
    once_flush(&held->flush, server, in->unique);
    forward(server, in, now_ns(), 0, 0, &held->call);
    if (!held->call) /* refused, or it has gone to the session */
        free(held);
    else if (flush_start(&held->flush, &server->io.ring) < 0)
        flush_done(&held->flush, -EAGAIN);
}

/* mux_sync_written() asks for a FSYNC, where the kernel asked for a WRITE. */
static uint32_t opcode_asked(const struct pending *p) { return p->opcode == FUSE_FSYNC && p->offset ? FUSE_WRITE : p->opcode; }

bool mux_is_open(struct kvfs_plane *plane) { return atomic_load(&plane->fuse->mux.calls_open); }

bool mux_waiting(struct kvfs_plane *plane) { return plane->fuse->mux.live_count || plane->fuse->mux.queue_count; }

void mux_expire(struct kvfs_plane *plane, uint64_t now) {
    struct mux *mux = &plane->fuse->mux;
    for (;;) {
        pthread_mutex_lock(&mux->lock);
        struct pending *p = mux->oldest;
        if (!p || p->deadline_ns > now) {
            pthread_mutex_unlock(&mux->lock);
            return;
        }
        pending_unlink(mux, p);
        p->timed_out = true;
        struct server *server = p->server;
        uint64_t unique = p->unique, inode = p->node, took = now > p->arrived_ns ? now - p->arrived_ns : 0;
        uint32_t opcode = opcode_asked(p);
        bool answer = !atomic_load(&server->transport->ended);
        pthread_mutex_unlock(&mux->lock);
        COUNT(plane, forward_timeouts, 1);
        slow_look(plane, opcode, inode, took);
        if (answer)
            reply_error(server, unique, -EIO);
    }
}

void mux_end(struct kvfs_plane *plane) {
    struct mux *mux = &plane->fuse->mux;
    pthread_mutex_lock(&mux->lock);
    if (mux->fd >= 0)
        shutdown(mux->fd, SHUT_RDWR); /* a server thread may be reading it: closed when all have ended */
    pthread_mutex_unlock(&mux->lock);
    for (struct pending *p;;) {
        pthread_mutex_lock(&mux->lock);
        for (p = mux->oldest; p && (p->transport->guest || plane->fuse->held); p = p->next)
            ;
        if (!p) {
            pthread_mutex_unlock(&mux->lock);
            return;
        }
        struct server *server = p->server;
        uint64_t unique = p->unique;
        pending_unlink(mux, p);
        pending_release(mux, p);
        pthread_mutex_unlock(&mux->lock);
        reply_error(server, unique, -EIO);
    }
}

void mux_transport_ended(struct kvfs_plane *plane, struct transport *transport) {
    struct mux *mux = &plane->fuse->mux;
    pthread_mutex_lock(&mux->lock);
    for (uint32_t i = 0; i < PENDING_MAX; i++) {
        struct pending *p = &mux->entries[i];
        if (p->live && !p->timed_out && p->transport == transport) {
            pending_unlink(mux, p);
            p->timed_out = true;
        }
    }
    pthread_mutex_unlock(&mux->lock);
}

/* ---- from Python ---- */

/* Open an inode for a reply. The kernel's handle is ours. */
static int open_reply(struct kvfs_plane *plane, struct pending *p, uint64_t inode, bool writer, struct fuse_open_out *out) {
    struct kvfs_record record;
    struct node *node;
    struct user *user = user_get(plane, p->user);
    int r;
    /* The table's writer may have lost its CPU in the middle of a change. Python has answered already, so the table is asked again here. */
    uint64_t until = now_ns() + 1000000000ull;
    while ((r = node_open(plane, inode, user, writer, &record, &node)) == -EAGAIN && now_ns() < until)
        sched_yield();
    if (r < 0)
        return r == -EAGAIN ? -EIO : r;
    if (p->timed_out) { /* nobody will release it: release it now */
        struct shard *shard = shard_of(plane, inode);
        pthread_mutex_lock(&shard->lock);
        node_unopen(plane, node, user, writer);
        pthread_mutex_unlock(&shard->lock);
        node_released(plane, node, writer);
        node_put(plane, node);
        return -EINTR;
    }
    uint64_t fh;
    bool uncached = !p->transport->guest && host_opens_uncached(node);
    if (p->transport->guest && writer)
        atomic_store(&node->guest_wrote, true); /* before there is a handle to write by */
    bool uses = !writer && record.flags & KVFS_INODE_SEALED && process_opens(plane, caller_of(p->transport, p->pid), &record);
    r = handle_open(plane, p->transport, node, user, p->flags, writer, uses, once_number(p->transport, p->unique), &fh);
    if (r < 0) {
        struct shard *shard = shard_of(plane, inode);
        pthread_mutex_lock(&shard->lock);
        node_unopen(plane, node, user, writer);
        pthread_mutex_unlock(&shard->lock);
        node_released(plane, node, writer);
        node_put(plane, node);
        return r;
    }
    r = writer ? file_admit(plane, node, user) : 0;
    bool ended =
        atomic_load(&p->transport->kernel_number) != p->kernel_number; /* its kernel went away meanwhile, and the drop of its handles may be over */
    if (r < 0 || ended) {
        bool was_writer = false;
        node = handle_close(plane, p->transport, fh, inode, &was_writer);
        if (node) {
            node_released(plane, node, was_writer);
            node_put(plane, node);
        }
        return ended ? -EINTR : r;
    }
    out->fh = fh;
    out->open_flags = writer ? OPEN_PARALLEL_DIRECT_WRITES : 0;
    /* Linux asks for no FSYNC behind a synchronous write that bypasses its cache. So such a writer's file has pages: one FSYNC a write(2), not one a
     * WRITE. */
    bool bypasses = p->opcode == FUSE_CREATE && (p->flags & O_ACCMODE) == O_WRONLY && !(p->flags & O_DSYNC);
    if (cache_bypass(p->transport, node, bypasses) || uncached) {
        out->open_flags |= OPEN_DIRECT_IO;
        handle_set_uncached(plane, p->transport, fh, node->inode);
    }
    return 0;
}

static void attr_patch(struct kvfs_plane *plane, struct fuse_attr_out *out) {
    out->attr_valid = 0;
    out->attr_valid_nsec = 0;
    if (!overlay_attr(plane, out->attr.ino, &out->attr) && (out->attr.mode & 0170000) == 0040000)
        out->attr_valid = 1;
}

static void entry_patch(struct kvfs_plane *plane, struct transport *transport, struct fuse_entry_out *out) {
    bool staged = overlay_attr(plane, out->nodeid, &out->attr);
    out->generation = 0;
    if (!is_foreign(out->nodeid))
        entry_timeouts(transport, &out->attr, staged, out);
}

void mux_release_directory(struct kvfs_plane *plane, uint64_t inode) {
    struct {
        struct fuse_in_header head;
        struct fuse_release_in release;
    } message;
    memset(&message, 0, sizeof(message));
    message.head = (struct fuse_in_header){.len = sizeof(message), .opcode = FUSE_RELEASEDIR, .unique = RELEASEDIR_UNIQUE, .nodeid = inode};
    message.release.fh = inode;
    pthread_mutex_lock(&plane->fuse->mux.lock);
    message_send(&plane->fuse->mux, &message, sizeof(message));
    pthread_mutex_unlock(&plane->fuse->mux.lock);
}

/* Kernels of hosts may have cached entries that a guest changes: they are told. */
static void guest_changed(struct kvfs_plane *plane, const struct pending *p, uint64_t inode) {
    switch (p->opcode) {
    case FUSE_UNLINK:
    case FUSE_RMDIR:
    case FUSE_RENAME:
    case FUSE_RENAME2: kvfs_notify_epoch(plane); return;
    case FUSE_OPEN:
    case FUSE_CREATE:
    case FUSE_SETXATTR:
    case FUSE_SETATTR: notify_inode(plane, inode); return;
    default: return;
    }
}

static int opendir_reply(struct kvfs_plane *plane, const struct pending *p, struct fuse_open_out *open) {
    open->open_flags = 0;
    int r = p->timed_out ? -EINTR : handle_open_directory(plane, p->transport, p->node, &open->fh);
    bool ended = r == 0 && atomic_load(&p->transport->kernel_number) != p->kernel_number;
    if (r < 0 || (ended && handle_close_directory(plane, p->transport, open->fh, p->node)))
        mux_release_directory(plane, p->node);
    return r;
}

/* A guest's name is its own, whatever user of its has made it. And one of nobody's may have another owner: user_id(). */
static void maker_pays(struct kvfs_plane *plane, const struct pending *p, uint64_t inode) {
    if (!p->transport->guest && !(p->transport->idmap && p->user == NOBODY))
        return;
    kvfs_names_begin(plane->names);
    kvfs_table_charge(plane->table, inode, p->user);
    kvfs_names_end(plane->names);
}

/* Turn Python's successful reply into the kernel's: attributes, handles, listings. Returns 0, or the error to answer instead. */
static int reply_patch(struct kvfs_plane *plane, struct pending *p, uint8_t **body, uint32_t *length) {
    void *out = *body;
    struct fuse_entry_out *entry = out;
    switch (p->opcode) {
    case FUSE_LOOKUP:
    case FUSE_MKNOD:
    case FUSE_MKDIR:
    case FUSE_SYMLINK:
        if (*length < sizeof(*entry))
            return -EIO;
        if (p->opcode != FUSE_LOOKUP)
            maker_pays(plane, p, entry->nodeid);
        entry_patch(plane, p->transport, entry);
        return 0;
    case FUSE_CREATE:
        if (*length < sizeof(*entry) + sizeof(struct fuse_open_out))
            return -EIO;
        maker_pays(plane, p, entry->nodeid);
        entry_patch(plane, p->transport, entry);
        if (p->transport->inc_epoch)
            entry->attr_valid_nsec = CREATED_NS;
        return open_reply(plane, p, entry->nodeid, true, (struct fuse_open_out *)(void *)(entry + 1));
    case FUSE_OPEN:
        if (*length < sizeof(struct fuse_open_out))
            return -EIO;
        /* An open that only truncated the file has changed it too: its close seals the change. */
        return open_reply(plane, p, p->node, (p->flags & O_ACCMODE) != O_RDONLY || p->flags & O_TRUNC, out);
    case FUSE_GETATTR:
    case FUSE_SETATTR:
        if (*length < sizeof(struct fuse_attr_out))
            return -EIO;
        attr_patch(plane, out);
        return 0;
    case FUSE_OPENDIR: return *length < sizeof(struct fuse_open_out) ? -EIO : opendir_reply(plane, p, out);
    case FUSE_FSYNC:
        if (p->offset) { /* mux_sync_written(): the WRITE is answered */
            if (!p->timed_out)
                write_count(plane, (uint32_t)p->offset, p->arrived_ns);
            struct fuse_write_out *written = &plane->fuse->mux.written;
            *written = (struct fuse_write_out){.size = (uint32_t)p->offset};
            *body = (uint8_t *)written;
            *length = sizeof(*written);
        }
        return 0;
    default: return 0;
    }
}

/* Makes the kernel's reply of a body. Returns 0, or the error to answer instead. */
static int reply_make(struct kvfs_plane *plane, struct pending *p, uint8_t **body, uint32_t *length, int error) {
    int r = error ? error : reply_patch(plane, p, body, length);
    if (r == 0 && p->opcode == FUSE_CREATE && *length >= sizeof(uint64_t))
        process_makes(plane, caller_of(p->transport, p->pid), ((struct fuse_entry_out *)(void *)*body)->nodeid);
    else if (r == 0 && (p->opcode == FUSE_FLUSH || p->opcode == FUSE_RENAME || p->opcode == FUSE_RENAME2))
        process_made(plane, caller_of(p->transport, p->pid));
    if (error == 0 && p->transport->guest)
        guest_changed(plane, p, p->opcode == FUSE_CREATE && *length >= 8 ? ((struct fuse_entry_out *)(void *)*body)->nodeid : p->node);
    return r;
}

static void answer(struct kvfs_plane *plane, struct pending *p, uint8_t *body, uint32_t length, int error) {
    int r = reply_make(plane, p, &body, &length, error);
    if (p->opcode == FUSE_LOOKUP && error == -ENOENT)
        missed_add(plane, p->offset);
    uint64_t took = latency_add(plane, LATENCY_FORWARD, p->arrived_ns);
    if (!p->timed_out) { /* else it was answered long ago, or its transport is gone */
        slow_look(plane, opcode_asked(p), p->node, took);
        struct iovec iov = {body, length};
        p->transport->ops->reply(p->server, p->unique, r, 0, &iov, r == 0 && length ? 1 : 0);
    }
    once_answered(plane, p);
}

static void answer_here(struct server *server, struct pending *p, void *data, uint32_t length) {
    uint8_t *body = data;
    int r = reply_make(server->plane, p, &body, &length, 0);
    slow_look(server->plane, p->opcode, p->node, now_ns() - server->arrived_ns);
    struct iovec iov = {body, length};
    server->transport->ops->reply(server, p->unique, r, 0, &iov, r == 0 && length ? 1 : 0);
    once_answered(server->plane, p);
}

void mux_answer_created(struct server *server, uint32_t flags, const struct kvfs_record *record) {
    struct {
        struct fuse_entry_out entry;
        struct fuse_open_out open;
    } reply;
    struct pending p = pending_here(server, flags);
    memset(&reply, 0, sizeof(reply));
    reply.entry.nodeid = record->inode;
    fill_attr(server->plane, record, &reply.entry.attr);
    answer_here(server, &p, &reply, sizeof(reply));
}

void mux_answer_listing(struct server *server, struct pending *p, void *body, uint32_t size) { answer_here(server, p, body, size); }

void mux_answer_done(struct server *server) {
    struct pending p = pending_here(server, 0);
    answer_here(server, &p, NULL, 0);
}

/* Takes the request of one of our ids and ends it; false if it has ended already. */
static bool pending_take(struct mux *mux, uint64_t id, struct pending *out) {
    uint32_t index = (uint32_t)id - 1;
    if (index >= PENDING_MAX)
        return false;
    pthread_mutex_lock(&mux->lock);
    struct pending *p = &mux->entries[index];
    bool known = p->live && p->salt == (uint32_t)(id >> 32);
    if (known) {
        if (!p->timed_out)
            pending_unlink(mux, p);
        *out = *p;
        pending_release(mux, p);
    }
    pthread_mutex_unlock(&mux->lock);
    return known;
}

static bool receive(struct kvfs_plane *plane) {
    struct mux *mux = &plane->fuse->mux;
    int fd = mux->fd;
    if (fd < 0)
        return false;
    ssize_t n = recv(fd, mux->reply, REPLY_MAX, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        mux_close(plane);
        mux_end(plane);
        return false;
    }
    if (n < (ssize_t)sizeof(struct fuse_out_header))
        return false;
    struct fuse_out_header head;
    memcpy(&head, mux->reply, sizeof(head));
    if (head.unique == INIT_UNIQUE || head.unique == RELEASEDIR_UNIQUE || head.unique == 0 || head.len != (uint32_t)n)
        return true;
    struct pending pending;
    if (pending_take(mux, head.unique, &pending))
        answer(plane, &pending, mux->reply + sizeof(head), (uint32_t)(n - (ssize_t)sizeof(head)), head.error);
    return true;
}

bool mux_receive(struct kvfs_plane *plane) {
    if (pthread_mutex_trylock(&plane->fuse->mux.receiving))
        return false; /* another transport's leader is reading */
    bool received = receive(plane);
    pthread_mutex_unlock(&plane->fuse->mux.receiving);
    return received;
}

/* The request of a call, which stays under way. False: it has ended, or nobody waits for it. */
static bool pending_look(struct mux *mux, uint64_t id, struct pending *out) {
    uint32_t index = (uint32_t)id - 1;
    if (index >= PENDING_MAX)
        return false;
    pthread_mutex_lock(&mux->lock);
    *out = mux->entries[index];
    pthread_mutex_unlock(&mux->lock);
    return out->live && !out->timed_out && out->salt == (uint32_t)(id >> 32);
}

static int answer_names(struct kvfs_plane *plane, uint64_t id, const struct kvfs_listed *names) {
    struct pending p;
    int64_t size = -EIO;
    uint8_t *out = NULL;
    if (pending_look(&plane->fuse->mux, id, &p)) /* else the kernel has an answer or has gone, and the request ends here */
        out = listing_bring(plane, &p, names, &size);
    if (size != -EAGAIN && pending_take(&plane->fuse->mux, id, &p))
        answer(plane, &p, out, (uint32_t)(size < 0 ? 0 : size), size < 0 ? (int)size : 0);
    free(out);
    return size == -EAGAIN ? -EAGAIN : 0;
}

void kvfs_calls_open(struct kvfs_plane *plane, int on) { atomic_store(&plane->fuse->mux.calls_open, on != 0); }

int kvfs_answer(struct kvfs_plane *plane, uint64_t id, int error, uint64_t inode, const struct kvfs_listed *names) {
    struct pending pending;
    struct {
        struct fuse_entry_out entry;
        struct fuse_open_out open;
    } reply;
    uint32_t size = 0;
    /* The session has ended: hosts have their answer, guests ask the next daemon. */
    if (plane->fuse->mux.fd < 0)
        return 0;
    if (names)
        return answer_names(plane, id, names);
    if (!pending_take(&plane->fuse->mux, id, &pending))
        return 0;
    if (pending.opcode == FUSE_CREATE && error == 0) {
        struct kvfs_record record;
        memset(&reply, 0, sizeof(reply));
        if (kvfs_table_find_inode(plane->table, inode, &record) < 0) {
            error = -EIO;
        } else {
            reply.entry.nodeid = inode;
            fill_attr(plane, &record, &reply.entry.attr);
            size = sizeof(reply);
        }
    }
    answer(plane, &pending, (uint8_t *)&reply, size, error);
    return 0;
}

void transport_forget(struct transport *transport) {
    atomic_fetch_add(&transport->kernel_number, 1);
    mux_transport_ended(transport->plane, transport);
    listings_forget(transport->plane, transport);
    uint32_t from = 0;
    for (uint64_t directory; (directory = handles_drop(transport->plane, transport, &from));)
        mux_release_directory(transport->plane, directory);
}
