/* Requests of a kernel: which of them C answers, and which go on to Python. A table has a function by opcode. */
#include "pod/foreign.h"
#include "fuse/fuse.h"

#include "kvfs_naming.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>

#ifndef FUSE_HANDLE_KILLPRIV_V2
#define FUSE_HANDLE_KILLPRIV_V2 (1 << 28)
#endif
#define FLAG2_DIRECT_IO_ALLOW_MMAP (1u << (36 - 32))
#define FLAG_INIT_EXT (1u << 30)
#define FLAG2_OVER_IO_URING (1u << (41 - 32)) /* Linux 6.14; offered only while fuse.enable_uring is Y */
/* Linux 6.12, protocol 7.41. From then on no request but those that make something tells its user, on any mount of the connection. */
#define FLAG2_ALLOW_IDMAP (1u << (40 - 32))
/* Linux 6.15, protocol 7.43. Older headers know neither the flag nor the field: 16 bits, behind flags2 and another field. */
#define FLAG2_REQUEST_TIMEOUT (1u << (42 - 32))
#define INIT_REQUEST_TIMEOUT_AT 40u
static_assert(sizeof(struct fuse_init_out) == 64 && __builtin_offsetof(struct fuse_init_out, flags2) + 8 == INIT_REQUEST_TIMEOUT_AT, "ABI");
/* After a failed read the kernel retries each page once. Both attempts share one deadline. */
#define AGAIN_NS 500000000ull
/* namespace/files.py takes them. */
#define SLAB_REQUEST "kvfs.slab"
#define ALLOCATE_REQUEST "kvfs.allocate"

/* All that do_init() may ever ask for. */
#define FLAGS_KNOWN                                                                                                                               \
    (FUSE_ASYNC_READ | FUSE_ATOMIC_O_TRUNC | FUSE_BIG_WRITES | FUSE_ASYNC_DIO | FUSE_PARALLEL_DIROPS | FUSE_MAX_PAGES | FUSE_HANDLE_KILLPRIV_V2 | \
     FUSE_AUTO_INVAL_DATA | FUSE_EXPLICIT_INVAL_DATA | FUSE_DO_READDIRPLUS | FUSE_READDIRPLUS_AUTO | FLAG_INIT_EXT |                              \
     (uint64_t)(FLAG2_DIRECT_IO_ALLOW_MMAP | FLAG2_IDMAP) << 32)
#ifdef FLAG2_ALLOW_IDMAP
#define FLAG2_IDMAP FLAG2_ALLOW_IDMAP
#else
#define FLAG2_IDMAP 0u
#endif

bool flags_are_known(uint64_t flags) { return !(flags & ~FLAGS_KNOWN); }

void transport_agreed(struct transport *transport, uint32_t minor, uint64_t flags) {
    transport->minor = minor;
    transport->flags = flags;
    transport->inc_epoch = minor >= 44 && !transport->guest;
    transport->listing_plus = transport->inc_epoch && flags & FUSE_DO_READDIRPLUS;
    transport->direct_mmap = flags >> 32 & FLAG2_DIRECT_IO_ALLOW_MMAP;
    transport->idmap = flags >> 32 & FLAG2_ALLOW_IDMAP;
}

static void do_init(struct server *server, struct fuse_in_header *in) {
    struct kvfs_plane *plane = server->plane;
    struct transport *transport = server->transport;
    struct fuse_init_in init;
    memset(&init, 0, sizeof(init));
    memcpy(&init, in + 1, min_u64(in->len - sizeof(*in), sizeof(init)));
    struct fuse_init_out out;
    memset(&out, 0, sizeof(out));
    out.major = FUSE_KERNEL_VERSION;
    if (init.major != FUSE_KERNEL_VERSION) {
        reply_data(server, in->unique, &out, sizeof(out)); /* the kernel comes again with our version */
        return;
    }
    if (init.minor < 28) { /* MAX_PAGES: Linux 4.20 */
        reply_error(server, in->unique, -EPROTO);
        return;
    }
    uint64_t offered = init.flags | (init.flags & FLAG_INIT_EXT ? (uint64_t)init.flags2 << 32 : 0);
    uint64_t wanted = FUSE_ASYNC_READ | FUSE_ATOMIC_O_TRUNC | FUSE_BIG_WRITES | FUSE_ASYNC_DIO | FUSE_PARALLEL_DIROPS | FUSE_MAX_PAGES |
                      FUSE_HANDLE_KILLPRIV_V2 | FLAG_INIT_EXT | (uint64_t)FLAG2_DIRECT_IO_ALLOW_MMAP << 32;
    /* Another kernel may rewrite a file whose pages are cached. A kernel whose attributes have expired looks at the file's mtime before it reads its
     * cache. A host is told to ask again. */
    wanted |= transport->guest || atomic_load(&plane->fuse->guest_count) ? FUSE_AUTO_INVAL_DATA : FUSE_EXPLICIT_INVAL_DATA;
    /* FUSE_NOTIFY_INC_EPOCH came with protocol 7.44 (Linux 6.16). A kernel that cannot be told of evictions keeps no names of blocks, and would ask
     * again for each name that was listed. With AUTO the kernel finds out which listings need it (`ls -l`, not `ls`). */
    bool listing_plus = init.minor >= 44 && !transport->guest && offered & FUSE_DO_READDIRPLUS && offered & FUSE_READDIRPLUS_AUTO;
    if (listing_plus)
        wanted |= FUSE_DO_READDIRPLUS | FUSE_READDIRPLUS_AUTO;
    /* A guest may wait as long as it likes. */
    uint16_t patience_s = transport->guest ? 0 : (uint16_t)min_u64(plane->config.kernel_timeout_s, UINT16_MAX);
    if (patience_s)
        wanted |= (uint64_t)FLAG2_REQUEST_TIMEOUT << 32;
    if (plane->config.idmap && !transport->guest)
        wanted |= (uint64_t)FLAG2_ALLOW_IDMAP << 32;
    /* Requests in rings end with the process that has the rings. */
    bool rings = !transport->guest && !plane->fuse->held && offered >> 32 & FLAG2_OVER_IO_URING && uring_prepare(transport);
    if (rings)
        wanted |= (uint64_t)FLAG2_OVER_IO_URING << 32;
    uint64_t flags = offered & wanted;
    if (flags >> 32 & FLAG2_REQUEST_TIMEOUT)
        memcpy((uint8_t *)&out + INIT_REQUEST_TIMEOUT_AT, &patience_s, sizeof(patience_s));
    out.minor = init.minor < 45 ? init.minor : 45;
    transport_agreed(transport, out.minor, flags);
    if (transport->guest) /* it has booted, or mounts again: its earlier handles are gone */
        transport_forget(transport);
    out.max_readahead = init.max_readahead;
    out.flags = (uint32_t)flags;
    out.flags2 = (uint32_t)(flags >> 32);
    out.max_background = 1024;
    out.congestion_threshold = 768;
    out.max_write = plane->config.max_write;
    out.time_gran = 1;
    uint32_t pages = transport->max_read / KVFS_PAGE_SIZE;
    out.max_pages = (uint16_t)(pages > 65535 ? 65535 : pages);
    atomic_store(&transport->initialized, true);
    reply_data(server, in->unique, &out, sizeof(out));
    if (rings)
        uring_begin(transport);
}

static void do_lookup(struct server *server, struct fuse_in_header *in) {
    struct kvfs_plane *plane = server->plane;
    const char *name = (const char *)(in + 1);
    size_t name_size = strnlen(name, in->len - sizeof(*in));
    COUNT(plane, lookups, 1);
    if (name_size > KVFS_NAME_MAX) {
        reply_error(server, in->unique, -ENAMETOOLONG);
        return;
    }
    struct kvfs_record record;
    int r = kvfs_table_find_name(plane->table, in->nodeid, name, (uint32_t)name_size, &record);
    if (r == -ENOENT)
        r = foreign_look(plane, in->nodeid, name, (uint32_t)name_size, &record);
    if (r == -ENOENT && plane->pod && atomic_load_explicit(&plane->waits_for_news, memory_order_relaxed))
        r = -EAGAIN;
    if (r == -EAGAIN || r == 1 || (r == 0 && record.flags & KVFS_INODE_ASK)) { /* 1: Python enters a directory of another node here */
        mux_forward(server, 0, name_hash(plane, in->nodeid, name, name_size));
        return;
    }
    if (r < 0) {
        missed_add(plane, name_hash(plane, in->nodeid, name, name_size));
        reply_error(server, in->unique, -ENOENT);
    } else {
        struct fuse_entry_out entry;
        memset(&entry, 0, sizeof(entry));
        entry.nodeid = record.inode;
        fill_attr(plane, &record, &entry.attr);
        bool foreign = record.flags & KVFS_INODE_FOREIGN;
        bool staged = !foreign && S_ISREG(record.mode) && overlay_attr(plane, record.inode, &entry.attr);
        if (!foreign) /* a kernel cannot be told in time of what another node does: it keeps neither name nor attributes */
            entry_timeouts(server->transport, &entry.attr, staged || !(record.flags & KVFS_INODE_SEALED), &entry);
        if (S_ISREG(record.mode) && record.flags & KVFS_INODE_SEALED)
            process_looks(plane, caller_of(server->transport, in->pid), &record);
        reply_data(server, in->unique, &entry, sizeof(entry));
    }
    slow_look(plane, FUSE_LOOKUP, in->nodeid, latency_add(plane, LATENCY_LOOKUP, server->arrived_ns));
}

static void do_getattr(struct server *server, struct fuse_in_header *in) {
    struct kvfs_plane *plane = server->plane;
    struct kvfs_record record;
    bool promised = server->transport->guest && node_promise(plane, in->nodeid);
    int r = record_find_open(plane, in->nodeid, &record);
    if (r < 0 || record.flags & KVFS_INODE_ASK) { /* -ENOENT: perhaps a removed directory that is held open, which Python knows */
        struct fuse_getattr_in *get = (struct fuse_getattr_in *)(void *)(in + 1);
        get->getattr_flags = 0;
        mux_forward(server, 0, 0);
        return;
    }
    struct fuse_attr_out out;
    memset(&out, 0, sizeof(out));
    fill_attr(plane, &record, &out.attr);
    bool staged = S_ISREG(record.mode) && overlay_attr(plane, record.inode, &out.attr);
    if (S_ISDIR(record.mode))
        out.attr_valid = 1;
    else if (record.flags & KVFS_INODE_FOREIGN)
        out.attr_valid = 0;
    else if (!staged && record.flags & KVFS_INODE_SEALED)
        out.attr_valid = server->transport->inc_epoch ? LONG_SECONDS : promised ? PROMISE_S : 0;
    reply_data(server, in->unique, &out, sizeof(out));
}

static void do_open(struct server *server, struct fuse_in_header *in) {
    struct kvfs_plane *plane = server->plane;
    struct fuse_open_in open;
    memcpy(&open, in + 1, sizeof(open));
    if ((open.flags & O_ACCMODE) != O_RDONLY || open.flags & O_TRUNC) {
        mux_forward(server, open.flags, 0);
        return;
    }
    struct kvfs_record record;
    struct node *node;
    struct user *user = user_get(plane, user_id(server->transport, in));
    int r = node_open(plane, in->nodeid, user, false, &record, &node);
    if (r == -EAGAIN) {
        mux_forward(server, open.flags, 0);
        return;
    }
    struct fuse_open_out out;
    memset(&out, 0, sizeof(out));
    if (r == 0) {
        bool uses = record.flags & KVFS_INODE_SEALED && process_opens(plane, caller_of(server->transport, in->pid), &record);
        r = handle_open(plane, server->transport, node, user, open.flags, false, uses, once_number(server->transport, in->unique), &out.fh);
        if (r < 0) {
            struct shard *shard = shard_of(plane, in->nodeid);
            pthread_mutex_lock(&shard->lock);
            node_unopen(plane, node, user, false);
            pthread_mutex_unlock(&shard->lock);
            node_put(plane, node);
        }
    }
    if (r < 0) {
        COUNT(plane, stale_opens, r == -ESTALE);
        reply_error(server, in->unique, r);
        return;
    }
    pthread_mutex_lock(&node->lock);
    bool written = node->file != NULL;
    /* Pages that the kernel has of another node's block are kept only while it is known of which content they are. */
    bool unsure = node->foreign && !node->content.inode;
    pthread_mutex_unlock(&node->lock);
    out.open_flags = OPEN_NOFLUSH;
    bool uncached = !server->transport->guest && host_opens_uncached(node);
    if ((written && cache_bypass(server->transport, node, false)) || uncached)
        out.open_flags |= OPEN_DIRECT_IO;
    else if (!server->transport->guest && !written && !unsure && !(server->transport->taken && written_earlier(plane, in->nodeid)) &&
             record.flags & KVFS_INODE_SEALED && !(record.flags & KVFS_INODE_REWRITTEN) && node->writers == 0)
        out.open_flags |= OPEN_KEEP_CACHE;
    COUNT(plane, opens, 1);
    reply_data(server, in->unique, &out, sizeof(out));
    slow_look(plane, FUSE_OPEN, in->nodeid, latency_add(plane, LATENCY_OPEN, server->arrived_ns));
}

static struct request *request_new(struct server *server, const struct fuse_in_header *in, struct node *node) {
    struct request *request = request_get(server->plane);
    if (!request)
        return NULL;
    request->server = server;
    request->transport = server->transport;
    request->unique = in->unique;
    request->io = &server->io;
    request->resume = request_slow;
    request->write = in->opcode == FUSE_WRITE;
    request->done = request->write ? reply_to_write : reply_to_read;
    request->node = node;
    request->arrived_ns = server->arrived_ns;
    return request;
}

/* A read of a file that is being written: from memory here, else by a worker. */
static void read_staged(struct server *server, struct request *request) {
    struct kvfs_plane *plane = server->plane;
    struct node *node = request->node;
    uint64_t size = 0;
    int r = -EINPROGRESS;
    if (request->size <= CHUNK_SIZE) {
        struct slot *slot = slot_get_extra(request->size <= SMALL_SIZE ? &plane->reading_small : &plane->reading);
        pthread_mutex_lock(&node->lock);
        if (slot && node->file) {
            request->slots[0] = slot;
            request->slot_count = 1;
            slot = NULL;
            if (request->offset < node->file->size)
                size = min_u64(request->size, node->file->size - request->offset);
            r = file_copy_out(node->file, request->offset, (uint32_t)size, request->slots[0]->data);
        }
        pthread_mutex_unlock(&node->lock);
        slot_put(slot);
    }
    if (r == 0) {
        request->done(request, (int64_t)size);
        request_put(plane, request);
        return;
    }
    while (request->slot_count)
        slot_put(request->slots[--request->slot_count]);
    request_slow(request);
}

/* A kernel that has outlived a daemon reads on with handles that the new daemon never gave out. A sealed block needs only the node id. A host's kernel
 * may have pages of a file that was being written: nothing that is sealed may stand beside them. */
static int find_lost(struct server *server, uint64_t inode, uint64_t fh, struct handle *out) {
    struct kvfs_plane *plane = server->plane;
    if (!server->transport->guest && (!server->transport->taken || written_earlier(plane, inode)))
        return -EBADF;
    return lost_read(plane, server->transport->taken, inode, fh, &out->node);
}

static void do_read(struct server *server, struct fuse_in_header *in) {
    struct kvfs_plane *plane = server->plane;
    struct fuse_read_in read;
    memcpy(&read, in + 1, sizeof(read));
    struct handle handle = {0};
    int r = handle_find(plane, server->transport, read.fh, in->nodeid, &handle) ? 0 : find_lost(server, in->nodeid, read.fh, &handle);
    if (r == 0 && read.size > server->transport->max_read)
        r = -EINVAL;
    struct request *request = r == 0 ? request_new(server, in, handle.node) : NULL;
    if (!request) {
        node_put(plane, handle.node);
        reply_error(server, in->unique, r < 0 ? r : -ENOMEM);
        return;
    }
    request->fh = read.fh;
    request->unread = handle.unread;
    request->offset = read.offset;
    request->size = read.size;
    request->until_ns = server->arrived_ns + plane->array.io_timeout_ms * 1000000ull;
    struct node *node = request->node;
    pthread_mutex_lock(&node->lock);
    if (node->failed_ns && server->arrived_ns < node->failed_ns + AGAIN_NS && node->failed_until_ns < request->until_ns)
        request->until_ns = node->failed_until_ns;
    bool staged = node->file != NULL, slab = staged && node->file->slab, good = slab && slab_read_begin(node, request);
    if (!staged && node->desc) {
        request->desc = node->desc;
        atomic_fetch_add(&request->desc->refs, 1);
    }
    pthread_mutex_unlock(&node->lock);
    if (slab) {
        slab_read(request, good);
        return;
    }
    if (staged) {
        read_staged(server, request);
        return;
    }
    request->direct = server->transport->ops->targets && server->transport->ops->targets(request);
    read_submit(request);
}

static void do_write(struct server *server, struct fuse_in_header *in) {
    struct kvfs_plane *plane = server->plane;
    struct fuse_write_in write;
    static_assert(sizeof(*in) + sizeof(write) == REQUEST_HEAD, "the payload begins behind the head");
    assert(server->landing);
    memcpy(&write, in + 1, sizeof(write));
    struct handle handle = {0};
    bool found = handle_find(plane, server->transport, write.fh, in->nodeid, &handle);
    bool good = found && handle.writer && write.size == in->len - REQUEST_HEAD && write.size <= CHUNK_SIZE;
    struct request *request = good ? request_new(server, in, handle.node) : NULL;
    if (!request) {
        node_put(plane, handle.node);
        reply_error(server, in->unique, !found ? -EBADF : good ? -ENOMEM : -EINVAL);
        return;
    }
    request->offset = write.offset;
    request->size = write.size;
    request->slots[0] = server->landing;
    request->slot_count = 1;
    request->payload = server->landing->data;
    request->cached = write.write_flags & FUSE_WRITE_CACHE;
    if (handle.uncached && write.flags & O_DSYNC) /* O_SYNC has that bit, too */
        request->done = mux_sync_written;
    request->user = handle.user;
    server->landing = NULL;
    struct node *node = request->node;
    pthread_mutex_lock(&node->lock);
    bool slab = node->file && node->file->slab && request->size;
    int r = slab ? slab_write_begin(node, request, false) : -EINPROGRESS;
    if (node->file && !slab)
        r = write.flags & O_DIRECT && slab_ask(plane, node, request) ? -EAGAIN : file_write(plane, node, request);
    pthread_mutex_unlock(&node->lock);
    if (r == -EAGAIN) { /* parked */
        if (server->index)
            server_wake(&server->transport->servers[0]); /* the leader has the timer */
        return;
    }
    if (slab && r == 0) {
        slab_write(request);
        return;
    }
    if (r == -EINPROGRESS) {
        request_slow(request);
        return;
    }
    if (request->slot_count) { /* the payload was copied: the landing memory is free again */
        server->landing = request->slots[0];
        request->slot_count = 0;
    }
    request->done(request, r);
    request_put(plane, request);
}

/* Python makes and grows slabs, and knows when a seal ends. pyfuse3 has no FALLOCATE, so the request goes to Python as a setxattr(2): both are
 * answered alike. */
static void forward_fallocate(struct server *server, struct fuse_in_header *in, const char *what, uint64_t size) {
    struct fuse_setxattr_in set = {0};
    char *name = (char *)(in + 1) + FUSE_COMPAT_SETXATTR_IN_SIZE;
    int length = sprintf(name, "%s%c%llu", what, 0, (unsigned long long)size);
    set.size = (uint32_t)(length - (int)strlen(what) - 1);
    memcpy(in + 1, &set, FUSE_COMPAT_SETXATTR_IN_SIZE);
    in->opcode = FUSE_SETXATTR;
    in->len = (uint32_t)(sizeof(*in) + FUSE_COMPAT_SETXATTR_IN_SIZE) + (uint32_t)length;
    mux_forward(server, 0, 0);
}

static void do_fallocate(struct server *server, struct fuse_in_header *in) {
    struct kvfs_plane *plane = server->plane;
    struct fuse_fallocate_in fallocate;
    memcpy(&fallocate, in + 1, sizeof(fallocate));
    struct handle handle = {0};
    int r = handle_find(plane, server->transport, fallocate.fh, in->nodeid, &handle) && handle.writer ? 0 : -EBADF;
    uint64_t end = fallocate.offset + fallocate.length;
    if (r == 0 && fallocate.mode)
        r = -EOPNOTSUPP;
    if (r == 0 && (end < fallocate.offset || end > INT64_MAX))
        r = -EFBIG;
    if (r == 0) {
        pthread_mutex_lock(&handle.node->lock);
        struct file *file = handle.node->file;
        bool grows = file && end > file->size, slab = grows && (file->slab || (end >= KVFS_SLAB_MIN && file_untouched(file)));
        r = file ? 0 : -EBUSY; /* the last writer closed it while this one opened it */
        if (grows && !slab) {
            file_charge(plane, file, handle.user);
            r = file_allocate(plane, handle.node, end);
        }
        pthread_mutex_unlock(&handle.node->lock);
        if (slab || r == -EBUSY) {
            node_put(plane, handle.node);
            forward_fallocate(server, in, slab ? SLAB_REQUEST : ALLOCATE_REQUEST, end);
            return;
        }
    }
    if (r == 0 && server->transport->guest && atomic_load(&handle.node->host_cached))
        notify_inode(plane, in->nodeid);
    node_put(plane, handle.node);
    reply_error(server, in->unique, r);
}

/* FLUSH comes on every close of a writer: Python seals if anything is unsealed. */
static void do_flush(struct server *server, struct fuse_in_header *in) {
    struct kvfs_plane *plane = server->plane;
    struct fuse_flush_in *flush = (struct fuse_flush_in *)(void *)(in + 1);
    struct handle handle;
    bool dirty = false, found = handle_find(plane, server->transport, flush->fh, in->nodeid, &handle);
    if (found) {
        pthread_mutex_lock(&handle.node->lock);
        dirty = handle.writer && handle.node->file && !handle.node->file->slab && (handle.node->file->dirty || handle.node->file->sealing);
        pthread_mutex_unlock(&handle.node->lock);
        node_put(plane, handle.node);
    }
    if (!found || !dirty) {
        reply_error(server, in->unique, found ? 0 : -EBADF);
        return;
    }
    flush->fh = in->nodeid;
    mux_flush_file(server);
}

static void do_release(struct server *server, struct fuse_in_header *in) {
    struct fuse_release_in release;
    memcpy(&release, in + 1, sizeof(release));
    bool was_writer = false;
    struct node *node = handle_close(server->plane, server->transport, release.fh, in->nodeid, &was_writer);
    reply_error(server, in->unique, 0);
    if (!node && server->transport->taken)
        lost_close(server->plane, in->nodeid, release.fh);
    if (node) {
        node_released(server->plane, node, was_writer);
        node_put(server->plane, node);
    }
}

/* A request that names something. Its strings have been checked. */
static void made_note(struct kvfs_plane *plane, const struct fuse_in_header *in) {
    const uint8_t *body = (const uint8_t *)(in + 1);
    size_t at = in->opcode == FUSE_CREATE    ? sizeof(struct fuse_create_in)
                : in->opcode == FUSE_MKNOD   ? sizeof(struct fuse_mknod_in)
                : in->opcode == FUSE_MKDIR   ? sizeof(struct fuse_mkdir_in)
                : in->opcode == FUSE_RENAME  ? sizeof(struct fuse_rename_in)
                : in->opcode == FUSE_RENAME2 ? sizeof(struct fuse_rename2_in)
                                             : 0;
    const char *name = (const char *)body + at;
    uint64_t parent = in->nodeid;
    if (in->opcode == FUSE_RENAME || in->opcode == FUSE_RENAME2) {
        memcpy(&parent, body, sizeof(parent)); /* newdir comes first in both */
        name += strlen(name) + 1;
    }
    missed_made(plane, parent, name);
}

/* A user with more names than a share makes no more of them, in C or Python. */
static bool refuse_name(struct server *server, const struct fuse_in_header *in) {
    bool lasting = in->opcode == FUSE_MKDIR || in->opcode == FUSE_SYMLINK;
    int r = names_ask(server->plane, user_get(server->plane, user_id(server->transport, in)), lasting);
    if (r < 0)
        reply_error(server, in->unique, r);
    return r < 0;
}

static void do_create(struct server *server, struct fuse_in_header *in) {
    struct fuse_create_in create;
    memcpy(&create, in + 1, sizeof(create));
    if (refuse_name(server, in))
        return;
    made_note(server->plane, in);
    const char *name = (const char *)(in + 1) + sizeof(create);
    struct kvfs_record record;
    int r = mux_is_open(server->plane) ? name_create(server->plane, in->nodeid, name, create.mode, in->uid, in->gid, &record) : KVFS_NEED_CALLER;
    if (r == 0)
        mux_answer_created(server, create.flags, &record);
    else if (r > 0 || (r == -EEXIST && !(create.flags & O_EXCL))) /* Python opens what another transport has just made */
        mux_forward(server, create.flags, 0);
    else
        reply_error(server, in->unique, r);
}

/* A need is Python's to bring. */
static void answer_change(struct server *server, int r) {
    if (r == 0)
        mux_answer_done(server);
    else if (r > 0)
        mux_forward(server, 0, 0);
    else
        reply_error(server, ((struct fuse_in_header *)(void *)server->head)->unique, r);
}

static void do_unlink(struct server *server, struct fuse_in_header *in) {
    const char *name = (const char *)(in + 1);
    answer_change(server, mux_is_open(server->plane) ? name_unlink(server->plane, in->nodeid, name) : KVFS_NEED_CALLER);
}

static void do_rename(struct server *server, struct fuse_in_header *in) {
    struct fuse_rename2_in rename = {0};
    size_t size = in->opcode == FUSE_RENAME ? sizeof(struct fuse_rename_in) : sizeof(rename);
    memcpy(&rename, in + 1, size); /* newdir comes first in both */
    const char *name = (const char *)(in + 1) + size, *new_name = name + strlen(name) + 1;
    made_note(server->plane, in);
    bool open = mux_is_open(server->plane);
    answer_change(server, open ? name_rename(server->plane, in->nodeid, name, rename.newdir, new_name, rename.flags) : KVFS_NEED_CALLER);
}

static void do_make(struct server *server, struct fuse_in_header *in) {
    if (refuse_name(server, in))
        return;
    made_note(server->plane, in);
    mux_forward(server, 0, 0);
}

static void do_setattr(struct server *server, struct fuse_in_header *in) {
    struct fuse_setattr_in *set = (struct fuse_setattr_in *)(void *)(in + 1);
    if (set->valid & FATTR_FH && !(set->valid & FATTR_SIZE)) {
        set->valid &= ~(uint32_t)FATTR_FH; /* the inode is enough: the handle may be a directory's, which are not looked for here */
    } else if (set->valid & FATTR_FH) {    /* ftruncate(2), whose file is sealed by the handle's close */
        struct handle handle;
        bool found = handle_find(server->plane, server->transport, set->fh, in->nodeid, &handle);
        if (found)
            node_put(server->plane, handle.node);
        if (!found || !handle.writer) {
            reply_error(server, in->unique, -EBADF);
            return;
        }
        set->fh = in->nodeid;
    }
    mux_forward(server, 0, 0);
}

static void do_fsync(struct server *server, struct fuse_in_header *in) {
    struct fuse_fsync_in *sync = (struct fuse_fsync_in *)(void *)(in + 1);
    struct handle handle;
    if (!handle_find(server->plane, server->transport, sync->fh, in->nodeid, &handle)) { /* its writes were lost with an earlier daemon */
        reply_error(server, in->unique, -EBADF);
        return;
    }
    node_put(server->plane, handle.node);
    sync->fh = in->nodeid;
    mux_forward(server, 0, 0);
}

/* Kernels ask for security.* on every buffered write and in execve(2), and `ls -l` asks for system.posix_acl_access of every file. Only user.* and
 * trusted.* exist. EOPNOTSUPP says so, and keeps the caller from asking for a second file. */
static void do_getxattr(struct server *server, struct fuse_in_header *in) {
    const char *name = (const char *)(in + 1) + sizeof(struct fuse_getxattr_in);
    bool connects = strncmp(name, "user.kvfs.connect.", 18) == 0; /* a descriptor of the caller's: a guest's are not here */
    if ((strncmp(name, "user.", 5) != 0 && strncmp(name, "trusted.", 8) != 0) || (connects && server->transport->guest))
        reply_error(server, in->unique, -EOPNOTSUPP);
    else
        mux_forward(server, 0, 0);
}

static void do_readdir(struct server *server, struct fuse_in_header *in) {
    struct fuse_read_in *read = (struct fuse_read_in *)(void *)(in + 1);
    if (in->opcode == FUSE_READDIRPLUS && !server->transport->listing_plus)
        reply_error(server, in->unique, -ENOSYS);
    else if (read->offset > INT64_MAX) /* a cookie is an inode number + 2, or a smaller one for "." and ".." */
        reply_error(server, in->unique, -EINVAL);
    else {
        struct pending p = mux_list(server, in);
        process_lists(server->plane, caller_of(server->transport, in->pid));
        int64_t size;
        uint8_t *out = listing_here(server->plane, &p, &size);
        if (size < 0)
            mux_forward(server, 0, read->offset);
        else
            mux_answer_listing(server, &p, out, (uint32_t)size);
        free(out);
    }
}

static void do_releasedir(struct server *server, struct fuse_in_header *in) {
    struct fuse_release_in *release = (struct fuse_release_in *)(void *)(in + 1);
    listing_end(server->plane, server->transport, release->fh, in->nodeid);
    if (!handle_close_directory(server->plane, server->transport, release->fh, in->nodeid)) {
        reply_error(server, in->unique, 0);
        return;
    }
    release->fh = in->nodeid;
    mux_forward(server, 0, 0);
}

static void do_fsyncdir(struct server *server, struct fuse_in_header *in) {
    struct fuse_fsync_in *sync = (struct fuse_fsync_in *)(void *)(in + 1);
    sync->fh = in->nodeid;
    mux_forward(server, 0, 0);
}

static void do_forward(struct server *server, struct fuse_in_header *in) {
    (void)in;
    mux_forward(server, 0, 0);
}

/* Nobody counts lookups (I26). But what the kernel has forgotten, nobody has open by a handle of before. */
static void forget(struct server *server, uint64_t inode) {
    if (!server->transport->taken)
        return;
    handles_forget(server->plane, inode);
    lost_forget(server->plane, inode);
}

static void do_forget(struct server *server, struct fuse_in_header *in) { forget(server, in->nodeid); }

/* As many as lie in the head of a request, and behind it, where the payload of a WRITE would be. */
static void do_batch_forget(struct server *server, struct fuse_in_header *in) {
    struct fuse_batch_forget_in batch;
    struct fuse_forget_one one;
    memcpy(&batch, in + 1, sizeof(batch));
    size_t at = sizeof(*in) + sizeof(batch);
    for (uint32_t i = 0; server->transport->taken && i < batch.count && at + sizeof(one) <= in->len; i++, at += sizeof(one)) {
        if (at + sizeof(one) <= REQUEST_HEAD)
            memcpy(&one, server->head + at, sizeof(one));
        else
            memcpy(&one, server->landing->data + (at - REQUEST_HEAD), sizeof(one));
        forget(server, one.nodeid);
    }
}

/* INTERRUPT: a forwarded request has its deadline (I24). */
static void do_nothing(struct server *server, struct fuse_in_header *in) {
    (void)server;
    (void)in;
}

static void do_succeed(struct server *server, struct fuse_in_header *in) { reply_error(server, in->unique, 0); }

/* There are no hard links: an inode has one name. */
static void do_link(struct server *server, struct fuse_in_header *in) { reply_error(server, in->unique, -EPERM); }

static void do_ioctl(struct server *server, struct fuse_in_header *in) { reply_error(server, in->unique, -ENOTTY); }

typedef void (*operation)(struct server *server, struct fuse_in_header *in);

/* By opcode; opcodes that are missing here are ENOSYS. */
static const operation operations[] = {
    [FUSE_INIT] = do_init,
    [FUSE_LOOKUP] = do_lookup,
    [FUSE_GETATTR] = do_getattr,
    [FUSE_OPEN] = do_open,
    [FUSE_READ] = do_read,
    [FUSE_WRITE] = do_write,
    [FUSE_FLUSH] = do_flush,
    [FUSE_RELEASE] = do_release,
    [FUSE_FALLOCATE] = do_fallocate,
    [FUSE_FORGET] = do_forget,
    [FUSE_BATCH_FORGET] = do_batch_forget,
    [FUSE_INTERRUPT] = do_nothing,
    [FUSE_DESTROY] = do_succeed,
    [FUSE_SYNCFS] = do_succeed,
    [FUSE_LINK] = do_link,
    [FUSE_IOCTL] = do_ioctl,
    [FUSE_GETXATTR] = do_getxattr,
    [FUSE_SETATTR] = do_setattr,
    [FUSE_FSYNC] = do_fsync,
    [FUSE_CREATE] = do_create,
    [FUSE_READDIR] = do_readdir,
    [FUSE_READDIRPLUS] = do_readdir,
    [FUSE_RELEASEDIR] = do_releasedir,
    [FUSE_FSYNCDIR] = do_fsyncdir,
    [FUSE_SYMLINK] = do_make,
    [FUSE_MKNOD] = do_make,
    [FUSE_MKDIR] = do_make,
    [FUSE_RENAME] = do_rename,
    [FUSE_RENAME2] = do_rename,
    [FUSE_READLINK] = do_forward,
    [FUSE_UNLINK] = do_unlink,
    [FUSE_RMDIR] = do_forward,
    [FUSE_STATFS] = do_forward,
    [FUSE_SETXATTR] = do_forward,
    [FUSE_LISTXATTR] = do_forward,
    [FUSE_REMOVEXATTR] = do_forward,
    [FUSE_OPENDIR] = do_forward,
    [FUSE_ACCESS] = do_forward,
};

void dispatch(struct server *server, size_t size) {
    struct fuse_in_header *in = (struct fuse_in_header *)(void *)server->head;
    server->arrived_ns = now_ns();
    COUNT(server->plane, requests, 1);
    if (size < sizeof(*in) || in->len != size || size < sizeof(*in) + body_minimum(in->opcode)) {
        if (size >= sizeof(*in))
            reply_error(server, in->unique, -EINVAL);
        return;
    }
    if (in->opcode != FUSE_WRITE && in->opcode != FUSE_BATCH_FORGET) { /* the payload of a WRITE is in the landing memory */
        if (size > REQUEST_SMALL) {
            reply_error(server, in->unique, -E2BIG);
            return;
        }
        server->head[size] = 0;
        int r = strings_check(in->opcode, (uint8_t *)(in + 1), size - sizeof(*in));
        if (r < 0) {
            reply_error(server, in->unique, r);
            return;
        }
    }
    operation run = in->opcode < sizeof(operations) / sizeof(operations[0]) ? operations[in->opcode] : NULL;
    if (!run) {
        reply_error(server, in->unique, -ENOSYS);
    } else if (once_begin(server, in)) {
        run(server, in);
        once_end();
    }
}
