/* Connections of native clients. From the welcome on one thread of the data plane reads and writes their sockets. It answers what is in memory, and
 * hands the rest to Python. kvfs_wire.h has the frames; every byte may be a liar's.
 *
 * What one user may have, whatever its connections say (root is a user like others):
 * - Turns. Work for a user ends after 1 ms, in the middle of a frame if need be. Then all others' ready work is done before its next turn.
 * - Memory. A connection counts 16 KiB, for what it has sent ahead, and the directories that are remembered for it. A frame is counted before its
 *   rest is received and before it is answered. It counts its bytes twice, as C and Python have them, 16 KiB, and its answer. Frames beyond wait
 *   in the socket. An answer that turns out larger takes what is left; without room its further items find no place. A peer that has not read for
 *   2 s is hung up on if its user wants the room.
 * - Time. The rest of a frame comes within 30 s. While it is not read, for want of room or of a turn, it is not late.
 * - Uses. An inode of HITS costs 16 KiB and its block's size, one of TOUCH or FOREIGN 16 KiB. A user may tell 8 GiB a second and device, two seconds'
 *   worth at once. The rest is dropped.
 */
#ifndef KVFS_CLIENTS_H
#define KVFS_CLIENTS_H

#include "kvfs_frames.h"

#define KVFS_CLIENT_SPACES 16 /* namespaces whose directories a connection remembers */

/* ---- connections ---- */

struct kvfs_clients_config {
    int64_t clock_ns;        /* the clock by which reservations expire, less CLOCK_MONOTONIC */
    uint64_t reservation_ns; /* so long after their answer */
};
/* Start the thread. Call once, or again after an error. Returns a descriptor of the plane's, readable while kvfs_clients_take() has something, or
 * -errno. kvfs_plane_destroy() ends it. */
int kvfs_clients_start(struct kvfs_plane *plane, const struct kvfs_clients_config *config);

/* A client that was welcomed. */
struct kvfs_client {
    int fd; /* a socket that does not wait: the thread's to read and write until KVFS_CLIENT_ENDED. The caller closes it */
    uint32_t uid, version, writable;
    struct kvfs_holder *holder; /* outlives the connection and all of its frames */
    const void *begun;          /* what was received already */
    uint64_t begun_size;
};
/* Its number, or -errno. */
int64_t kvfs_client_serve(struct kvfs_plane *plane, const struct kvfs_client *client);
/* Hang up. `tell`: with a CLOSE, for which the client has a second. KVFS_CLIENT_ENDED follows. */
void kvfs_client_end(struct kvfs_plane *plane, uint64_t client, int tell);
/* The directories of keys in a namespace, as they are now. The thread knows them until directories are moved or removed. */
void kvfs_client_remember(struct kvfs_plane *plane, uint64_t client, uint64_t base, const void *space, uint32_t space_size,
                          const struct kvfs_shard shards[KVFS_SHARDS]);

/* ---- what is left to Python ---- */

enum kvfs_client_what {
    KVFS_CLIENT_FRAME = 1,
    KVFS_CLIENT_ENDED = 2 /* nothing of the connection is used any more. payload: the rule that it broke, if it did */
};
struct kvfs_client_frame {
    uint64_t client;
    uint32_t what; /* enum kvfs_client_what */
    uint32_t type; /* enum wire_type */
    uint32_t size; /* of the payload */
    int32_t next;  /* enum kvfs_frame_next, or -errno: what the last call for reserve or commit returned */
    const void *payload;
    struct kvfs_reserve *reserve; /* a RESERVE or COMMIT that is under way: the caller goes on with it. NULL: nothing was done yet */
    struct kvfs_commit *commit;
};
/* At most `count` of them, of each user in turn. Each is the caller's until kvfs_client_answer(), the end of a connection too. */
int kvfs_clients_take(struct kvfs_plane *plane, struct kvfs_client_frame **out, uint32_t count);
/* The end of a frame, and of what is under way for it. status: 0 or -errno, or KVFS_CLIENT_NO_ANSWER. No data with 0: what reserve or commit has to
 * say. fd: of a file that goes along, opened anew for reading while it is sent; it stays open as long as the connection. -1: none.
 * Without memory for a copy of the data its connection ends. */
#define KVFS_CLIENT_NO_ANSWER 1
void kvfs_client_answer(struct kvfs_plane *plane, struct kvfs_client_frame *frame, int32_t status, const void *data, uint64_t size, int fd);

#endif
