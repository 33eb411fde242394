/* sources: base block names io content pod frames fuse virtiofs plane.c */
/* Connections of native clients against peers that mean harm: frames in pieces, floods, descriptors, hang-ups in every state, peers that do not read. A
 * thread is Python's double: it takes what is left to it, and answers, drops or remembers. */
#include "kernel_harness.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include "frames/frames.h"

#define END_PAGE 4096u
#define SPACE_INODE 77u
#define USER 7u
#define CLIENTS_MAX 64u
#define SECONDS(n) ((n) * slowness())

void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size);
static __thread uint32_t failures; /* so many calls of this thread get no memory */
void *__wrap_malloc(size_t size) { return failures && failures-- ? NULL : __real_malloc(size); }

static struct kvfs_names *names;
static struct kvfs_place *places;
static struct kvfs_shard shards[KVFS_SHARDS];

/* ---- Python's double ---- */

enum manner { ANSWERS, KEEPS, DROPS, ANY };
static _Atomic(enum manner) manner;
static atomic_bool python_ends;
static atomic_uint frames_taken, ended_count, running;
static pthread_mutex_t told_lock = PTHREAD_MUTEX_INITIALIZER; /* of what follows */
static uint32_t kept_count;
static struct kvfs_client_frame *kept[1u << 16];
static char told_rule[256]; /* of the last that broke one */
static uint64_t numbers_ended[1u << 16];
static pthread_t python;
static int told_fd;

static void bury_all(void) {
    const struct kvfs_run *runs;
    uint32_t count;
    uint64_t number;
    while ((number = kvfs_reservation_returned(plane, &runs, &count)))
        kvfs_reservation_buried(plane, number);
}

static void frame_do(struct kvfs_client_frame *frame, enum manner how) {
    if (frame->type == WIRE_REPORT || frame->type == WIRE_BAD_BLOCK || frame->type == WIRE_FOREIGN || how == DROPS) {
        kvfs_client_answer(plane, frame, KVFS_CLIENT_NO_ANSWER, NULL, 0, -1);
        return;
    }
    if (frame->type == WIRE_RESERVE && !frame->reserve && frame->size >= sizeof(struct wire_where)) {
        struct wire_where where;
        memcpy(&where, frame->payload, sizeof(where));
        uint32_t size = where.space_size < 1024 && sizeof(where) + where.space_size <= frame->size ? where.space_size : 0;
        kvfs_client_remember(plane, frame->client, where.base, (const char *)frame->payload + sizeof(where), size, shards);
    }
    if (frame->reserve) {
        if (frame->next == KVFS_FRAME_PLACE)
            kvfs_reserve_place(plane, frame->reserve, NULL, 0, -EIO);
        kvfs_reserve_finish(plane, frame->reserve, now_ns() + 1000000000);
        kvfs_client_answer(plane, frame, 0, NULL, 0, -1);
    } else if (frame->commit) {
        int next = frame->next;
        while (next != KVFS_FRAME_DONE) {
            if (next == KVFS_FRAME_NAMES)
                kvfs_commit_item(plane, frame->commit, -EIO);
            next = kvfs_commit(plane, frame->commit);
        }
        kvfs_client_answer(plane, frame, 0, NULL, 0, -1);
    } else if (frame->type == WIRE_EVENTS) {
        kvfs_client_answer(plane, frame, 0, "feed", 4, device_fds[0]);
    } else {
        kvfs_client_answer(plane, frame, -EAGAIN, "again", 5, -1);
    }
}

static void *python_main(void *unused) {
    (void)unused;
    unsigned seed = 5;
    while (!atomic_load(&python_ends)) {
        struct pollfd ready = {.fd = told_fd, .events = POLLIN};
        struct kvfs_client_frame *taken[8];
        poll(&ready, 1, 5);
        for (int n; (n = kvfs_clients_take(plane, taken, 8)) > 0;)
            for (int i = 0; i < n; i++) {
                enum manner how = atomic_load(&manner);
                how = how == ANY ? (enum manner)(rand_r(&seed) % 3) : how;
                if (taken[i]->what == KVFS_CLIENT_ENDED) {
                    pthread_mutex_lock(&told_lock);
                    if (taken[i]->size)
                        snprintf(told_rule, sizeof(told_rule), "%.*s", (int)taken[i]->size, (const char *)taken[i]->payload);
                    numbers_ended[atomic_fetch_add(&ended_count, 1) & 0xffff] = taken[i]->client;
                    pthread_mutex_unlock(&told_lock);
                    kvfs_client_answer(plane, taken[i], KVFS_CLIENT_NO_ANSWER, NULL, 0, -1);
                    atomic_fetch_sub(&running, 1);
                    continue;
                }
                atomic_fetch_add(&frames_taken, 1);
                pthread_mutex_lock(&told_lock);
                bool keep = how == KEEPS && kept_count < 60000;
                if (keep)
                    kept[kept_count++] = taken[i];
                pthread_mutex_unlock(&told_lock);
                if (!keep)
                    frame_do(taken[i], how);
            }
        bury_all();
        struct kvfs_holder *changed[64];
        kvfs_holders_changed(plane, changed, 64);
    }
    return NULL;
}

static void answer_kept(void) {
    for (;;) {
        pthread_mutex_lock(&told_lock);
        struct kvfs_client_frame *frame = kept_count ? kept[--kept_count] : NULL;
        pthread_mutex_unlock(&told_lock);
        if (!frame)
            return;
        frame_do(frame, ANSWERS);
    }
}

/* ---- peers ---- */

struct peer {
    int fd, theirs;
    uint64_t number;
    struct kvfs_holder *holder;
};

static void wait_for(bool (*there)(uint64_t), uint64_t what, const char *name) {
    for (double until = seconds_of(CLOCK_MONOTONIC) + SECONDS(20); !there(what); usleep(500))
        CHECK_SAY(seconds_of(CLOCK_MONOTONIC) < until, "%s", name);
}
static bool none_runs(uint64_t unused) { return (void)unused, atomic_load(&running) == 0; }
static bool were_taken(uint64_t count) { return atomic_load(&frames_taken) >= count; }
static bool is_ended(uint64_t number) {
    bool found = false;
    pthread_mutex_lock(&told_lock);
    for (uint32_t i = 0; i < atomic_load(&ended_count) && !found; i++)
        found = numbers_ended[i & 0xffff] == number;
    pthread_mutex_unlock(&told_lock);
    return found;
}

static struct peer connect_as(uint32_t uid, const void *begun, uint64_t begun_size) {
    struct peer peer;
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    peer.fd = pair[0];
    peer.theirs = pair[1];
    fcntl(pair[1], F_SETFL, O_NONBLOCK);
    CHECK((peer.holder = kvfs_holder_create(plane, uid)));
    struct kvfs_client client = {
        .fd = pair[1], .uid = uid, .version = 5, .writable = 1, .holder = peer.holder, .begun = begun, .begun_size = begun_size};
    atomic_fetch_add(&running, 1);
    int64_t number = kvfs_client_serve(plane, &client);
    CHECK(number > 0);
    peer.number = (uint64_t)number;
    return peer;
}

/* As Python does once the end was told. */
static void peer_gone(struct peer *peer) {
    wait_for(is_ended, peer->number, "the end");
    answer_kept(); /* before its holder goes */
    kvfs_holder_leave(plane, peer->holder);
    bury_all();
    for (double until = seconds_of(CLOCK_MONOTONIC) + SECONDS(20); peer->holder->count; usleep(500)) {
        CHECK(seconds_of(CLOCK_MONOTONIC) < until);
        bury_all();
    }
    kvfs_reservations_rested(plane, USER, peer->holder->rested_pages);
    kvfs_holder_free(plane, peer->holder);
    close(peer->fd);
    close(peer->theirs);
}
static void hang_up(struct peer *peer) {
    shutdown(peer->fd, SHUT_RDWR);
    peer_gone(peer);
}

static void send_all(int fd, const void *data, uint64_t size) {
    for (uint64_t at = 0; at < size;) {
        ssize_t n = send(fd, (const char *)data + at, size - at, MSG_NOSIGNAL);
        CHECK(n > 0);
        at += (uint64_t)n;
    }
}
static void send_frame(int fd, uint32_t type, uint32_t id, const void *payload, uint32_t size) {
    struct wire_frame head = {size, (uint16_t)type, 0, 0, id};
    send_all(fd, &head, sizeof(head));
    send_all(fd, payload, size);
}
static struct wire_frame receive(int fd, void *payload, uint32_t capacity) {
    struct wire_frame head;
    struct timeval patience = {SECONDS(20), 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    CHECK(recv(fd, &head, sizeof(head), MSG_WAITALL) == sizeof(head));
    CHECK_SAY(head.size <= capacity, "%u bytes", head.size);
    CHECK(!head.size || recv(fd, payload, head.size, MSG_WAITALL) == (ssize_t)head.size);
    return head;
}

static uint32_t reserve_make(uint8_t *out, const char *prefix, uint32_t first, uint32_t count, uint64_t size) {
    struct wire_where where = {.base = 1, .space_size = 5, .count = count};
    uint32_t at = sizeof(where) + 8;
    memset(out, 0, at);
    memcpy(out, &where, sizeof(where));
    memcpy(out + sizeof(where), "space", 5);
    for (uint32_t i = 0; i < count; i++, at += 24) {
        struct wire_reserve item = {size, 8, 0};
        char name[9];
        snprintf(name, sizeof(name), "%s%06x", prefix, first + i);
        memcpy(out + at, &item, sizeof(item));
        memcpy(out + at + 16, name, 8);
    }
    return at;
}

/* The numbers of a RESERVE's reservations. */
static uint32_t reserve(struct peer *peer, const char *prefix, uint32_t first, uint32_t count, uint64_t *out) {
    static uint8_t request[1 << 18], reply[1 << 22];
    uint32_t made = 0;
    send_frame(peer->fd, WIRE_RESERVE, 9, request, reserve_make(request, prefix, first, count, 3000));
    struct wire_frame head = receive(peer->fd, reply, sizeof(reply));
    CHECK(head.type == WIRE_RESERVE && head.id == 9);
    for (uint64_t at = 0; head.status == 0 && at < head.size;) {
        struct wire_reserved reserved;
        memcpy(&reserved, reply + at, sizeof(reserved));
        at += sizeof(reserved) + reserved.run_count * sizeof(struct wire_run) + round_up(reserved.record_size, 8) +
              round_up(reserved.ancestors_size, 8);
        if (!reserved.error)
            out[made++] = reserved.reservation;
    }
    return made;
}

static uint32_t commit_make(uint8_t *out, const uint64_t *numbers, uint64_t count) {
    memcpy(out, &count, 8);
    for (uint32_t i = 0; i < count; i++)
        memcpy(out + 8 + 16 * i, &(struct wire_commit){numbers[i], 0}, 16);
    return (uint32_t)(8 + 16 * count);
}

static void commit(struct peer *peer, const uint64_t *numbers, uint32_t count) {
    uint8_t request[1 << 14];
    int64_t answers[512];
    send_frame(peer->fd, WIRE_COMMIT, 10, request, commit_make(request, numbers, count));
    struct wire_frame head = receive(peer->fd, answers, sizeof(answers));
    CHECK(head.type == WIRE_COMMIT && head.status == 0 && head.size == 8 * count);
    for (uint32_t i = 0; i < count; i++)
        CHECK_SAY(answers[i] == 0, "%lld", (long long)answers[i]);
}

/* ---- the tests ---- */

static void segment_open(uint32_t segment) { kvfs_place_head(names, 1, segment, 9); }

static void test_a_put_needs_python_once(void) {
    uint64_t numbers[200];
    struct kvfs_record record;
    struct clients_count before, after;
    struct peer peer = connect_as(USER, NULL, 0);
    CHECK(reserve(&peer, "00", 0, 1, numbers) == 0); /* handed: nothing was remembered */
    before = clients_count(plane);
    CHECK(reserve(&peer, "00", 0, 100, numbers) == 100);
    commit(&peer, numbers, 100);
    after = clients_count(plane);
    CHECK(after.frames == before.frames + 2 && after.handed == before.handed);
    CHECK(kvfs_table_find_name(plane->table, SPACE_INODE, "00000063", 8, &record) == 0);
    /* A directory moved or went: it is asked again. */
    kvfs_directories_changed(plane, 0);
    CHECK(reserve(&peer, "00", 100, 1, numbers) == 0);
    CHECK(reserve(&peer, "00", 100, 1, numbers) == 1);
    before = clients_count(plane);
    CHECK(before.handed == after.handed + 1);
    hang_up(&peer);
}

/* A segment that is full is left for the next of the supply; a block goes on there where it fits neither wholly. */
static void test_a_put_goes_on_to_the_next_segment(void) {
    uint64_t numbers[200];
    struct kvfs_noted noted[SEGMENTS];
    struct peer peer = connect_as(USER, NULL, 0);
    reserve(&peer, "06", 0, 1, numbers);
    kvfs_reservations_limit(plane, 100000, 1000);
    kvfs_place_head(names, 2, 4, 9); /* there is one head of clients: this is none */
    segment_open(3);
    while (kvfs_places_noted(names, noted, SEGMENTS))
        ;
    uint32_t filler = kvfs_place_take(names, 3, END_PAGE - places[3].next_page - 3);
    CHECK(kvfs_place_supply(names, 5, 11) == 0 && kvfs_place_supply(names, 6, 12) == 0);
    struct clients_count before = clients_count(plane);
    CHECK(reserve(&peer, "06", 100, 40, numbers) == 40);
    kvfs_place_release(names, 3, filler);
    commit(&peer, numbers, 40);
    CHECK(clients_count(plane).handed == before.handed && kvfs_place_lead(names, 1) == 5);
    uint32_t led = 0, left = 0;
    for (uint32_t count; (count = kvfs_places_noted(names, noted, SEGMENTS));)
        for (uint32_t i = 0; i < count; i++) {
            led |= noted[i].notes & KVFS_NOTE_LED ? 1u << noted[i].segment : 0;
            left |= noted[i].notes & KVFS_NOTE_LEFT ? 1u << noted[i].segment : 0;
        }
    CHECK(led == 1u << 5 && left == 1u << 3);
    CHECK(kvfs_place_withdraw(names, 6) == 1);
    hang_up(&peer);
    kvfs_place_head(names, 2, UINT32_MAX, 0);
    segment_open(1);
}

/* Python looks for a segment for one head of clients: blocks go to others meanwhile. One that was never opened is for Python to open. */
static void test_a_head_that_python_holds_is_passed_over(void) {
    uint64_t numbers[4];
    struct peer peer = connect_as(USER, NULL, 0);
    reserve(&peer, "08", 0, 1, numbers);
    kvfs_place_clients(names, 2);
    kvfs_place_head(names, 2, 4, 9);
    kvfs_place_head(names, 1, KVFS_PLACE_HELD, 0);
    struct clients_count before = clients_count(plane);
    CHECK(reserve(&peer, "08", 1, 1, numbers) == 1 && reserve(&peer, "08", 2, 1, numbers + 1) == 1);
    CHECK(clients_count(plane).handed == before.handed && places[4].run_count == 2);
    commit(&peer, numbers, 2);
    before = clients_count(plane);
    kvfs_place_head(names, 2, KVFS_PLACE_HELD, 0);
    CHECK(reserve(&peer, "08", 3, 1, numbers) == 0 && clients_count(plane).handed == before.handed + 1);
    kvfs_place_head(names, 2, 4, 9);
    kvfs_place_head(names, 1, UINT32_MAX, 0);
    CHECK(reserve(&peer, "08", 3, 1, numbers) == 0 && clients_count(plane).handed == before.handed + 2);
    hang_up(&peer);
    kvfs_place_head(names, 2, UINT32_MAX, 0);
    kvfs_place_clients(names, 1);
    segment_open(1);
}

static void test_frames_in_pieces(void) {
    uint8_t bytes[4096];
    uint64_t numbers[4];
    struct peer peer = connect_as(USER, NULL, 0);
    CHECK(reserve(&peer, "01", 0, 1, numbers) == 0);
    uint32_t size = reserve_make(bytes + 16, "01", 0, 3, 3000);
    memcpy(bytes, &(struct wire_frame){size, WIRE_RESERVE, 0, 0, 77}, 16);
    for (uint32_t i = 0; i < 16 + size; i++) {
        send_all(peer.fd, bytes + i, 1);
        if (i % 16 == 0)
            usleep(100);
    }
    CHECK(receive(peer.fd, bytes, sizeof(bytes)).id == 77);
    hang_up(&peer);
    /* What came behind the hello counts, too. */
    memcpy(bytes, &(struct wire_frame){8, WIRE_RELEASE, 0, 0, 5}, 16);
    peer = connect_as(USER, bytes, 10);
    send_all(peer.fd, bytes + 10, 14);
    struct wire_frame head = receive(peer.fd, bytes, sizeof(bytes));
    CHECK(head.id == 5 && head.status == -EAGAIN);
    hang_up(&peer);
}

static void expect_rule(const struct wire_frame *head, const char *rule) {
    struct peer peer = connect_as(USER, head, sizeof(*head));
    uint8_t byte;
    wait_for(is_ended, peer.number, rule);
    CHECK_SAY(strstr(told_rule, rule), "%s", told_rule);
    CHECK(recv(peer.fd, &byte, 1, MSG_DONTWAIT) <= 0);
    peer_gone(&peer);
}

static void test_heads_that_break_a_rule(void) {
    expect_rule(&(struct wire_frame){0, 77, 0, 0, 0}, "a frame of type 77");
    expect_rule(&(struct wire_frame){0, WIRE_HELLO, 0, 0, 0}, "a frame of type 1");
    expect_rule(&(struct wire_frame){UINT32_MAX, WIRE_RESERVE, 0, 0, 0}, "with 4294967295 bytes");
    expect_rule(&(struct wire_frame){8 * KVFS_WIRE_ITEMS_MAX + 1, WIRE_HITS, 0, 0, 0}, "a frame of type 9");
    expect_rule(&(struct wire_frame){0, WIRE_RELEASE, 1, 0, 0}, "a frame of type 13");
    expect_rule(&(struct wire_frame){0, WIRE_RELEASE, 0, -1, 0}, "status -1");
    struct peer peer = connect_as(USER, NULL, 0);
    send_frame(peer.fd, WIRE_HITS, 0, "1234567", 7);
    wait_for(is_ended, peer.number, "inodes");
    CHECK_SAY(strstr(told_rule, "inodes in 7 bytes"), "%s", told_rule);
    peer_gone(&peer);
    peer = connect_as(USER, NULL, 0);
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(sizeof(int))];
    } rights = {.head = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
    memcpy(CMSG_DATA(&rights.head), &peer.fd, sizeof(int));
    struct iovec part = {(char[16]){0}, 16};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &rights, .msg_controllen = sizeof(rights)};
    CHECK(sendmsg(peer.fd, &message, 0) == 16);
    wait_for(is_ended, peer.number, "a descriptor");
    CHECK_SAY(strstr(told_rule, "sent a descriptor"), "%s", told_rule);
    peer_gone(&peer);
}

static void test_hang_ups_in_every_state(void) {
    uint8_t bytes[1 << 16];
    uint64_t numbers[64];
    for (uint32_t state = 0; state < 8; state++)
        for (uint32_t round = 0; round < 8; round++) {
            struct peer peer = connect_as(USER, NULL, 0), other = connect_as(USER, NULL, 0);
            atomic_store(&manner, ANSWERS);
            reserve(&peer, "02", 0, 1, numbers);
            reserve(&other, "02", 0, 1, numbers + 32);
            uint32_t size = reserve_make(bytes, "02", 1000 * state + 100 * round, 20, 3000);
            uint32_t before = atomic_load(&frames_taken);
            if (state == 1)
                send_all(peer.fd, "0123456", 7); /* in a head */
            if (state == 2) {
                send_frame(peer.fd, WIRE_RESERVE, 1, bytes, size);
                send_all(peer.fd, &(struct wire_frame){size, WIRE_RESERVE, 0, 0, 2}, 16); /* before a payload */
            }
            if (state == 3) { /* Python has it */
                atomic_store(&manner, KEEPS);
                send_frame(peer.fd, WIRE_LOOKUP, 1, bytes, 20);
                wait_for(were_taken, before + 1, "a frame");
            }
            if (state == 4) /* reserved, and not committed */
                CHECK(reserve(&peer, "02", 100000 + 100 * round, 20, numbers) == 20);
            if (state == 5) { /* commits that wait for another's run before theirs */
                CHECK(reserve(&other, "02", 200000 + 100 * round, 1, numbers + 32) == 1);
                CHECK(reserve(&peer, "02", 200050 + 100 * round, 4, numbers) == 4);
                for (uint32_t i = 0; i < 4; i++)
                    send_frame(peer.fd, WIRE_COMMIT, i, bytes, commit_make(bytes, numbers + i, 1));
                usleep(round * 4000);
            }
            if (state == 6) /* answers that nobody reads */
                for (uint32_t i = 0; i < 40; i++)
                    send_frame(peer.fd, WIRE_RESERVE, i, bytes, reserve_make(bytes, "02", 300000, 50, UINT64_C(1) << 50));
            if (state == 7) { /* no place: Python has what is under way */
                segment_open(UINT32_MAX);
                atomic_store(&manner, KEEPS);
                send_frame(peer.fd, WIRE_RESERVE, 1, bytes, size);
                wait_for(were_taken, before + 1, "a RESERVE without a place");
            }
            shutdown(peer.fd, SHUT_RDWR);
            wait_for(is_ended, peer.number, "the end");
            atomic_store(&manner, ANSWERS);
            peer_gone(&peer);
            if (state == 5)
                commit(&other, numbers + 32, 1);
            segment_open(2);
            hang_up(&other);
        }
    atomic_store(&manner, ANSWERS);
}

/* Python ends it, at once or with a word; and while it ends it already. */
static void test_ends_from_above(void) {
    uint8_t bytes[64];
    struct peer peer = connect_as(USER, NULL, 0);
    kvfs_client_end(plane, peer.number, 1);
    CHECK(receive(peer.fd, bytes, sizeof(bytes)).type == WIRE_CLOSE);
    peer_gone(&peer);
    for (uint32_t i = 0; i < 50; i++) {
        peer = connect_as(USER, NULL, 0);
        if (i % 2)
            shutdown(peer.fd, SHUT_RDWR);
        kvfs_client_end(plane, peer.number, 0);
        kvfs_client_end(plane, peer.number, i % 3 == 0);
        peer_gone(&peer);
    }
    kvfs_client_end(plane, 4711, 0);
}

static bool send_until_full(int fd, uint32_t type, uint32_t size, uint32_t most) {
    static uint8_t frame[1 << 16];
    memcpy(frame, &(struct wire_frame){size, (uint16_t)type, 0, 0, 1}, 16);
    for (uint32_t i = 0, idle = 0; i < most && idle < 100;) {
        ssize_t n = send(fd, frame, 16 + size, MSG_DONTWAIT | MSG_NOSIGNAL);
        CHECK(n < 0 || n == (ssize_t)(16 + size)); /* a stream of AF_UNIX takes a small one whole */
        i += n > 0;
        idle = n > 0 ? 0 : idle + 1;
        if (n < 0)
            usleep(1000);
    }
    return true;
}

/* A connection may keep 16 MiB, of 16 KiB and more a frame; frames without an answer are few that wait. */
static void test_what_is_kept_is_bounded(void) {
    struct peer peers[6];
    uint32_t before = atomic_load(&frames_taken);
    atomic_store(&manner, KEEPS);
    peers[0] = connect_as(USER, NULL, 0);
    send_until_full(peers[0].fd, WIRE_RELEASE, 8, 3000);
    uint32_t taken = atomic_load(&frames_taken) - before;
    CHECK_SAY(taken > 900 && taken <= 1024, "%u", taken);
    before += taken;
    for (uint32_t i = 1; i < 6; i++) {
        peers[i] = connect_as(USER, NULL, 0);
        send_until_full(peers[i].fd, WIRE_RELEASE, 8, 3000);
    }
    taken = atomic_load(&frames_taken) - before;
    CHECK_SAY(taken > 2900 && taken <= 3072, "%u of the user", taken); /* of 64 MiB, less those of the first */
    /* Another user is answered. */
    atomic_store(&manner, ANSWERS);
    uint8_t bytes[64];
    struct peer other = connect_as(USER + 1, NULL, 0);
    send_frame(other.fd, WIRE_RELEASE, 3, "12345678", 8);
    CHECK(receive(other.fd, bytes, sizeof(bytes)).id == 3);
    atomic_store(&manner, ANSWERS);
    hang_up(&other);
    /* Room that one gives up is another's. */
    hang_up(&peers[0]);
    wait_for(were_taken, before + taken + 900, "frames that waited for room");
    answer_kept();
    for (uint32_t i = 1; i < 6; i++)
        hang_up(&peers[i]);
    answer_kept();
}

/* C has a frame until its end, and Python a copy. */
static void test_a_frame_that_python_has_counts_twice(void) {
    const uint32_t size = 1400000, most = (16 << 20) / (2 * size);
    uint8_t *frame = calloc(1, 16 + size);
    struct peer peer = connect_as(USER, NULL, 0);
    uint32_t before = atomic_load(&frames_taken), begun = 0;
    atomic_store(&manner, KEEPS);
    memcpy(frame, &(struct wire_frame){size, WIRE_RESERVE, 0, 0, 1}, 16);
    fcntl(peer.fd, F_SETFL, O_NONBLOCK);
    for (uint64_t at = 0, idle = 0; idle < 200 && begun < 12;) {
        ssize_t n = send(peer.fd, frame + at, 16 + size - at, MSG_NOSIGNAL);
        idle = n > 0 ? 0 : idle + 1;
        at += n > 0 ? (uint64_t)n : 0;
        begun += at == 16 + size;
        at = at == 16 + size ? 0 : at;
        if (n <= 0)
            usleep(1000);
    }
    free(frame);
    wait_for(were_taken, before + most, "frames within the bound");
    CHECK_SAY(atomic_load(&frames_taken) == before + most, "%u", atomic_load(&frames_taken) - before);
    atomic_store(&manner, ANSWERS);
    answer_kept();
    hang_up(&peer);
}

/* Its user wants the room: after a while it goes. */
static void test_who_does_not_read_goes(void) {
    static uint8_t request[1 << 18], reply[1 << 22];
    uint64_t numbers[4];
    struct peer silent[5], peer = connect_as(USER, NULL, 0);
    for (uint32_t i = 0; i < 5; i++) {
        silent[i] = connect_as(USER, NULL, 0);
        CHECK(reserve(&silent[i], "03", 0, 1, numbers) == 0);
        uint32_t size = reserve_make(request, "03", 0, 4000, UINT64_C(1) << 50);
        struct wire_frame head = {size, WIRE_RESERVE, 0, 0, 1};
        fcntl(silent[i].fd, F_SETFL, O_NONBLOCK);
        for (uint32_t n = 0; n < 400; n++) {
            struct iovec parts[2] = {{&head, 16}, {request, size}};
            if (writev(silent[i].fd, parts, 2) != (ssize_t)(16 + size))
                break;
            usleep(1000);
        }
    }
    CHECK(reserve(&peer, "03", 0, 1, numbers) == 0);
    for (uint32_t i = 0; i < 30; i++) {
        send_frame(peer.fd, WIRE_RESERVE, i, request, reserve_make(request, "03", 0, 4000, UINT64_C(1) << 50));
        CHECK(receive(peer.fd, reply, sizeof(reply)).id == i);
    }
    for (uint32_t i = 0; i < 5; i++)
        hang_up(&silent[i]);
    hang_up(&peer);
}

/* Two seconds of what devices can do at once. */
static void test_uses_that_are_told_have_a_bound(void) {
    uint64_t inodes[512], numbers[1];
    struct kvfs_statistics before, after;
    struct kvfs_record record;
    struct peer peer = connect_as(USER + 2, NULL, 0);
    uint8_t bytes[64];
    CHECK(reserve(&peer, "04", 0, 1, numbers) == 0 && reserve(&peer, "04", 0, 1, numbers) == 1);
    commit(&peer, numbers, 1);
    CHECK(kvfs_table_find_name(plane->table, SPACE_INODE, "04000000", 8, &record) == 0);
    for (uint32_t i = 0; i < 512; i++)
        inodes[i] = record.inode;
    kvfs_statistics_get(plane, &before);
    uint64_t handed = clients_count(plane).handed;
    double begun = seconds_of(CLOCK_MONOTONIC);
    for (uint32_t i = 0; i < 9000; i++)
        send_frame(peer.fd, WIRE_HITS, 0, inodes, sizeof(inodes));
    send_frame(peer.fd, WIRE_RELEASE, 1, inodes, 8);
    CHECK(receive(peer.fd, bytes, sizeof(bytes)).id == 1);
    CHECK(clients_count(plane).handed == handed + 1); /* no use is Python's */
    kvfs_statistics_get(plane, &after);
    double most = (seconds_of(CLOCK_MONOTONIC) - begun + 2) * DEVICES * (double)(UINT64_C(8) << 30) / (16384 + 3000);
    uint64_t told = after.uses - before.uses;
    CHECK_SAY(told > 0 && (double)told <= most + 1, "%llu of %.0f", (unsigned long long)told, most);
    hang_up(&peer);
}

static void test_a_descriptor_goes_along(void) {
    struct peer peer = connect_as(USER, NULL, 0);
    send_frame(peer.fd, WIRE_EVENTS, 8, (char[16]){1}, 16);
    char data[64];
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(sizeof(int))];
    } rights;
    struct iovec part = {data, 20};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &rights, .msg_controllen = sizeof(rights)};
    CHECK(recvmsg(peer.fd, &message, MSG_WAITALL | MSG_CMSG_CLOEXEC) == 20);
    CHECK(message.msg_controllen && rights.head.cmsg_type == SCM_RIGHTS && memcmp(data + 16, "feed", 4) == 0);
    int fd;
    memcpy(&fd, CMSG_DATA(&rights.head), sizeof(fd));
    close(fd);
    hang_up(&peer);
}

/* Python's errors are any number. */
static void test_a_status_that_no_answer_has_is_another(void) {
    static const int32_t statuses[] = {-4096, INT32_MIN, 7, INT32_MAX, -KVFS_WIRE_ERRNO_MAX};
    uint8_t bytes[64];
    struct peer peer = connect_as(USER, NULL, 0);
    for (uint32_t i = 0; i < sizeof(statuses) / sizeof(statuses[0]); i++) {
        uint32_t before = atomic_load(&frames_taken);
        atomic_store(&manner, KEEPS);
        send_frame(peer.fd, WIRE_RELEASE, i, "12345678", 8);
        wait_for(were_taken, before + 1, "a frame");
        pthread_mutex_lock(&told_lock);
        struct kvfs_client_frame *frame = kept[--kept_count];
        pthread_mutex_unlock(&told_lock);
        kvfs_client_answer(plane, frame, statuses[i], NULL, 0, -1);
        struct wire_frame head = receive(peer.fd, bytes, sizeof(bytes));
        CHECK_SAY(head.id == i && head.status == (i < 4 ? -EIO : -KVFS_WIRE_ERRNO_MAX), "%d", head.status);
    }
    atomic_store(&manner, ANSWERS);
    hang_up(&peer);
}

/* The answer's size is the client's to choose: without memory for it the connection ends, and Python does not wait. */
static void test_an_answer_without_memory_ends_its_connection(void) {
    uint8_t bytes[64];
    struct peer peer = connect_as(USER, NULL, 0);
    uint32_t before = atomic_load(&frames_taken);
    atomic_store(&manner, KEEPS);
    send_frame(peer.fd, WIRE_LIST, 1, bytes, 8);
    wait_for(were_taken, before + 1, "a frame");
    pthread_mutex_lock(&told_lock);
    struct kvfs_client_frame *frame = kept[--kept_count];
    pthread_mutex_unlock(&told_lock);
    failures = 3;
    kvfs_client_answer(plane, frame, 0, bytes, sizeof(bytes), -1);
    CHECK_SAY(failures == 2, "%u", failures);
    failures = 0;
    wait_for(is_ended, peer.number, "the end");
    CHECK(recv(peer.fd, bytes, 1, MSG_DONTWAIT) < 0);
    atomic_store(&manner, ANSWERS);
    peer_gone(&peer);
}

/* ---- without the thread, at any time ---- */

static struct clients *stand_alone(void) {
    struct clients *made = calloc(1, sizeof(*made));
    *made = (struct clients){.plane = plane, .sweep_ns = UINT64_MAX, .account_ns = UINT64_MAX};
    pthread_mutex_init(&made->lock, NULL);
    link_init(&made->turns);
    link_init(&made->settling);
    link_init(&made->handing);
    made->poll = epoll_create1(EPOLL_CLOEXEC);
    made->told = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    CHECK(made->poll >= 0 && made->told >= 0);
    return made;
}

static struct connection *alone_as(struct clients *clients, int fd, uint32_t uid, struct kvfs_holder *holder) {
    struct kvfs_client client = {.fd = fd, .uid = uid, .version = 5, .writable = 1, .holder = holder};
    struct connection *made = connection_new(&client);
    made->number = ++clients->last_number;
    connection_enter(clients, made);
    CHECK(!made->ended && made->work.after);
    return made;
}
static struct connection *alone_with(struct clients *clients, int fd) { return alone_as(clients, fd, USER, NULL); }

/* Whether a frame is there, in its turn, after which it is ready no more. */
static bool has_turn(struct clients *clients, struct connection *connection) {
    if (connection->work.after && !connection->starved)
        link_drop(&connection->work);
    connection->readable = true;
    return connection_frame(clients, connection);
}

static void stand_down(struct clients *clients) {
    for (uint32_t i = 0; i < CONNECTION_BUCKETS; i++)
        while (clients->buckets[i])
            connection_end(clients, clients->buckets[i], NULL);
    for (struct frame *frame; (frame = frame_handed(clients));)
        frame_free(frame);
    for (struct connection *at = clients->dead, *next; at; at = next) {
        next = at->next;
        if (!--at->user->refs)
            free(at->user);
        connection_free(at);
    }
    pthread_mutex_destroy(&clients->lock);
    close(clients->poll);
    close(clients->told);
    free(clients);
}

static void test_a_large_frame_leaves_no_memory_behind(void) {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
    struct clients *clients = stand_alone();
    struct connection *connection = alone_with(clients, pair[1]);
    uint32_t size = 1 << 20;
    uint8_t *frame = calloc(1, 16 + size);
    memcpy(frame, &(struct wire_frame){size, WIRE_RESERVE, 0, 0, 1}, 16);
    for (uint32_t round = 0; round < 3; round++) {
        bool there = false;
        for (uint64_t at = 0; !there; there = has_turn(clients, connection)) {
            ssize_t n = at < 16 + size ? send(pair[0], frame + at, 16 + size - at, MSG_NOSIGNAL) : 0;
            at += n > 0 ? (uint64_t)n : 0;
        }
        /* Of the next frame something is there already. */
        connection_used(connection);
        CHECK_SAY(connection->capacity <= CONNECTION_SIZE, "%llu bytes", (unsigned long long)connection->capacity);
        connection_give(clients, connection, connection->cost);
    }
    free(frame);
    stand_down(clients);
    close(pair[0]);
    close(pair[1]);
}

/* All that a connection has counts, also while it waits for room: what lies ahead, and the directories that it remembers. */
static void test_what_is_received_ahead_counts(void) {
    static uint8_t frames[128 << 10];
    static struct space space = {.base = 1, .size = 5, .path = "space"};
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
    struct clients *clients = stand_alone();
    struct connection *connection = alone_with(clients, pair[1]);
    CHECK(connection->kept == CONNECTION_SIZE && connection->user->kept == CONNECTION_SIZE);
    for (uint32_t i = 0; i < 2 * KVFS_CLIENT_SPACES; i++) {
        space.base = i;
        connection_remember(connection, &space);
    }
    uint64_t base = CONNECTION_SIZE + KVFS_CLIENT_SPACES * sizeof(space);
    CHECK_SAY(connection->kept == base, "%llu", (unsigned long long)connection->kept);
    CHECK(atomic_load(&connection->user->user->kept) == base);
    for (uint32_t i = 0; i < sizeof(frames) / 24; i++)
        memcpy(frames + 24 * i, &(struct wire_frame){8, WIRE_RELEASE, 0, 0, i}, 16);
    for (ssize_t n = 1, at = 0; n > 0; at += n) /* as much as the socket takes */
        n = send(pair[0], frames + at, sizeof(frames) - (size_t)at, MSG_NOSIGNAL);
    connection_keep(connection, KVFS_CLIENT_MEMORY);
    for (uint32_t i = 0; i < 5; i++) {
        CHECK(!has_turn(clients, connection) && connection->starved);
        connection_ready(clients, connection);
    }
    CHECK_SAY(connection->capacity <= CONNECTION_SIZE, "%llu bytes", (unsigned long long)connection->capacity);
    stand_down(clients);
    /* There is no room for more directories. */
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair + 0) == 0);
    clients = stand_alone();
    connection = alone_with(clients, pair[1]);
    connection_keep(connection, KVFS_CLIENT_MEMORY - CONNECTION_SIZE);
    connection_remember(connection, &space);
    CHECK(!connection->spaces[0] && connection->user->kept == KVFS_CLIENT_MEMORY);
    stand_down(clients);
}

/* Python has accounts to take where something was reserved or ended, and not else: a client costs nothing by saying much. */
static void test_commits_of_nothing_change_no_account(void) {
    int pair[2];
    uint8_t request[4096], reply[4096];
    uint64_t nothing[3] = {1, 4711, 0};
    struct kvfs_holder *holder = kvfs_holder_create(plane, USER);
    struct clients *clients = stand_alone();
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    fcntl(pair[1], F_SETFL, O_NONBLOCK);
    struct connection *connection = alone_as(clients, pair[1], USER, holder);
    struct space space = {.base = 1, .size = 5, .path = "space"};
    space.moves = atomic_load(&plane->reservations.changes);
    memcpy(space.shards, shards, sizeof(shards));
    connection_remember(connection, &space);
    /* A block that finds a place, one that finds none, and no block at all. */
    for (uint32_t i = 0; i < 3; i++) {
        if (i < 2)
            send_frame(pair[0], WIRE_RESERVE, i, request, reserve_make(request, "07", 0, 1, i ? UINT64_C(1) << 50 : 3000));
        else
            send_frame(pair[0], WIRE_COMMIT, i, nothing, sizeof(nothing));
        connection->readable = true;
        connection_ready(clients, connection);
        clients->changed = false;
        while (!link_empty(&clients->turns))
            clients_turn(clients);
        CHECK(receive(pair[0], reply, sizeof(reply)).id == i);
        CHECK_SAY(clients->changed == (i == 0), "%u", i);
    }
    CHECK(holder->open == 1);
    stand_down(clients);
    close(pair[0]);
    close(pair[1]);
    kvfs_holder_leave(plane, holder);
    bury_all();
    for (double until = seconds_of(CLOCK_MONOTONIC) + SECONDS(20); holder->count; usleep(500))
        CHECK(seconds_of(CLOCK_MONOTONIC) < until);
    kvfs_reservations_rested(plane, USER, holder->rested_pages);
    kvfs_holder_free(plane, holder);
}

static void gain(bool awaited) {
    kvfs_names_begin(names);
    plane->reservations.awaited += awaited;
    plane->reservations.gains++;
    kvfs_names_end(names);
}
static bool is_told(struct clients *clients, uint64_t now) {
    clients->changed = true;
    clients_account(clients, now);
    return !clients->changed;
}

/* Python takes accounts every 20 ms. While somebody waits, every millisecond at most, and only for what has come. */
static void test_accounts_are_taken_now_and_then(void) {
    const uint64_t us = 1000, ms = 1000 * us;
    struct clients *clients = stand_alone();
    clients->accounted_ns = 99 * ms;
    CHECK(!is_told(clients, 100 * ms) && clients->account_ns == 120 * ms);
    gain(false);
    CHECK(!is_told(clients, 119 * ms) && is_told(clients, 120 * ms) && clients->account_ns == UINT64_MAX);
    CHECK(!is_told(clients, 130 * ms) && clients->account_ns == 150 * ms);
    gain(true);
    CHECK(is_told(clients, 130 * ms));
    CHECK(!is_told(clients, 140 * ms)); /* nothing has come */
    gain(false);
    CHECK(is_told(clients, 140 * ms));
    gain(false);
    CHECK(!is_told(clients, 140 * ms + 300 * us) && clients->account_ns == 141 * ms);
    CHECK(!is_told(clients, 140 * ms + 600 * us) && is_told(clients, 141 * ms));
    kvfs_names_begin(names);
    plane->reservations.awaited--;
    kvfs_names_end(names);
    stand_down(clients);
}

/* A user with work for long has a turn; then the next has its own. */
static void test_after_a_turn_of_one_user_comes_the_next(void) {
    int pairs[9][2];
    struct clients *clients = stand_alone();
    uint64_t nothing[3] = {1, 4711, 0};
    int64_t answer;
    struct kvfs_holder *holder = kvfs_holder_create(plane, USER + 1);
    for (uint32_t i = 0; i < 9; i++) {
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pairs[i]) == 0);
        fcntl(pairs[i][1], F_SETFL, O_NONBLOCK);
        if (i < 8)
            send_until_full(pairs[i][0], WIRE_HITS, 0, 1 << 16);
        else
            send_frame(pairs[i][0], WIRE_COMMIT, 5, nothing, sizeof(nothing));
        alone_as(clients, pairs[i][1], i < 8 ? USER : USER + 1, holder);
    }
    struct client_user *other = clients->users, *busy = other->next;
    CHECK(busy->uid == USER && clients->turns.after == &busy->turn);
    clients_turn(clients);
    CHECK(atomic_load(&clients->frames) > 0 && !link_empty(&busy->ready)); /* there is more, which waits */
    CHECK(clients->turns.after == &other->turn && other->turn.after == &busy->turn);
    clients_turn(clients);
    CHECK(receive(pairs[8][0], &answer, sizeof(answer)).id == 5 && answer == -ETIMEDOUT);
    CHECK(clients->turns.after == &busy->turn && !other->turn.after);
    stand_down(clients);
    kvfs_holder_leave(plane, holder);
    kvfs_holder_free(plane, holder);
    for (uint32_t i = 0; i < 9; i++) {
        close(pairs[i][0]);
        close(pairs[i][1]);
    }
}

/* A user may leave thousands of frames to Python: another's first one comes behind one of these. */
static void test_frames_for_python_are_taken_from_each_user_in_turn(void) {
    int pairs[3][2];
    struct clients *clients = stand_alone();
    for (uint32_t i = 0; i < 3; i++) {
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pairs[i]) == 0);
        fcntl(pairs[i][1], F_SETFL, O_NONBLOCK);
        for (uint32_t n = 0; n < (i == 2 ? 2 : 20); n++)
            send_frame(pairs[i][0], WIRE_RELEASE, n, "12345678", 8);
        struct connection *made = alone_as(clients, pairs[i][1], i < 2 ? USER : USER + 1, NULL);
        while (!link_empty(&clients->turns))
            clients_turn(clients);
        if (i == 1)
            connection_end(clients, made, NULL);
    }
    uint32_t counts[3] = {0}, taken = 0;
    for (struct frame *frame; (frame = frame_handed(clients)); taken++) {
        uint32_t client = (uint32_t)frame->told.client - 1;
        bool end = frame->told.what == KVFS_CLIENT_ENDED;
        CHECK(client == 2 ? taken == 1 || taken == 3 : client < 2);
        CHECK(end ? client == 1 && counts[1] == 20 : frame->id == counts[client]++);
        frame_free(frame);
    }
    CHECK(taken == 43 && counts[0] == 20 && counts[2] == 2);
    stand_down(clients);
    for (uint32_t i = 0; i < 3; i++) {
        close(pairs[i][0]);
        close(pairs[i][1]);
    }
}

/* Commits that wait are looked at in their user's turn: a part of them, then others have theirs. */
static void test_commits_that_wait_have_turns(void) {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
    struct clients *clients = stand_alone();
    struct connection *connection = alone_with(clients, pair[1]);
    struct kvfs_holder *holder = kvfs_holder_create(plane, USER);
    struct client_user *user = connection->user;
    uint32_t run = kvfs_place_take(names, 7, 10), behind = kvfs_place_take(names, 7, 1);
    const struct kvfs_run last = {9, 7, behind, 1, 0};
    link_drop(&connection->work);
    link_drop(&user->turn);
    for (uint32_t i = 0; i < 5; i++) {
        struct frame *frame = calloc(1, sizeof(*frame) + 8);
        *frame = (struct frame){.told = {.client = 1, .what = KVFS_CLIENT_FRAME, .type = WIRE_COMMIT, .size = 8},
                                .plane = plane,
                                .connection = connection,
                                .settles_until_ns = UINT64_MAX,
                                .id = i,
                                .fd = -1};
        frame->told.commit = kvfs_commit_begin(holder, frame->payload, 0);
        frame->told.commit->runs = &last;
        frame->told.commit->run_count = 1;
        frames_add(&user->settling, frame);
    }
    link_add(&clients->settling, &user->settles);
    clients->settle_ns = 1000;
    frames_settle_soon(clients, 999);
    CHECK(!user->looks && !user->turn.after); /* nothing has ended, and it was looked a moment ago */
    frames_settle_soon(clients, 1000);
    CHECK(user->looks && user->turn.after && clients->settle_ns > 1000);
    frames_settle(clients, user, 1); /* the turn is over after one */
    CHECK(user->looks && user->settling.first->id == 1 && user->settling.last->id == 0);
    frames_settle(clients, user, UINT64_MAX);
    CHECK(!user->looks && user->settling.first->id == 1);
    kvfs_place_release(names, 7, run);
    clients->runs_ended = true;
    frames_settle_soon(clients, 1001);
    CHECK(user->looks && !clients->runs_ended);
    uint8_t bytes[64];
    for (uint32_t i = 1; i < 4; i++) {
        frames_settle(clients, user, 1);
        CHECK(user->looks && receive(pair[0], bytes, sizeof(bytes)).id == i);
        CHECK(recv(pair[0], bytes, 1, MSG_DONTWAIT) < 0);
    }
    close(pair[0]); /* the end of one takes along those that wait, also in the middle of a look */
    frames_settle(clients, user, UINT64_MAX);
    CHECK(connection->ended && !user->settling.first && !user->looks);
    frames_settle_soon(clients, UINT64_MAX);
    CHECK(link_empty(&clients->settling));
    stand_down(clients);
    kvfs_place_release(names, 7, behind);
    kvfs_holder_leave(plane, holder);
    kvfs_holder_free(plane, holder);
    close(pair[1]);
}

/* Nobody is woken because a peer reads, unless there is something to send that had no room. */
static void test_a_peer_that_reads_wakes_who_waits_for_it(void) {
    static uint8_t bytes[1 << 20];
    int pair[2];
    struct epoll_event event;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
    struct clients *clients = stand_alone();
    struct connection *connection = alone_with(clients, pair[1]);
    const struct frame frame = {.told = {.type = WIRE_LIST}};
    CHECK(epoll_wait(clients->poll, &event, 1, 0) == 0);
    for (uint32_t round = 0; round < 3; round++) {
        connection_answer(clients, connection, &frame, 0, NULL, 0, -1);
        CHECK(connection->sendable && recv(pair[0], bytes, 16, 0) == 16);
        CHECK(epoll_wait(clients->poll, &event, 1, 0) == 0);
        connection_answer(clients, connection, &frame, 0, calloc(1, sizeof(bytes)), sizeof(bytes), -1);
        CHECK(!connection->sendable && epoll_wait(clients->poll, &event, 1, 0) == 0);
        for (uint64_t got = 0; got < 16 + sizeof(bytes);) {
            ssize_t n = recv(pair[0], bytes, sizeof(bytes), 0);
            got += n > 0 ? (uint64_t)n : 0;
            if (epoll_wait(clients->poll, &event, 1, 0) == 1) {
                CHECK(event.events == EPOLLOUT && event.data.ptr == connection);
                connection->sendable = true;
                connection_flush(clients, connection);
            }
        }
        CHECK(connection->sendable && !connection->first && epoll_wait(clients->poll, &event, 1, 0) == 0);
    }
    stand_down(clients);
    close(pair[0]);
    close(pair[1]);
}

/* Where there are more users than numbers, what is kept for those together is one sum. */
static void test_users_without_a_number_of_their_own_are_counted_together(void) {
    int pairs[2][2];
    struct clients *clients = stand_alone();
    for (uint32_t uid = 100000; user_get(plane, uid) != user_get(plane, uid + 1); uid++)
        CHECK(uid < 200000);
    struct user *others = &plane->users[USERS_MAX];
    uint32_t uid = 200000, count = 0;
    for (; count < 2; uid++)
        if (user_get(plane, uid) == others) {
            CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pairs[count]) == 0);
            alone_as(clients, pairs[count++][1], uid, NULL);
        }
    CHECK(atomic_load(&others->kept) == 2 * CONNECTION_SIZE);
    connection_end(clients, clients->buckets[1], NULL);
    CHECK(atomic_load(&others->kept) == CONNECTION_SIZE);
    stand_down(clients);
    CHECK(atomic_load(&others->kept) == 0);
    for (uint32_t i = 0; i < 2; i++) {
        close(pairs[i][0]);
        close(pairs[i][1]);
    }
}

/* Late is who does not send, and not who is not read. */
static void test_who_waits_for_a_turn_or_for_room_is_not_late(void) {
    int pair[2];
    uint8_t bytes[80] = {0};
    const uint64_t second = 1000000000;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0);
    struct clients *clients = stand_alone();
    struct connection *connection = alone_with(clients, pair[1]);
    memcpy(bytes, &(struct wire_frame){64, WIRE_LOOKUP, 0, 0, 5}, 16);
    send_all(pair[0], bytes, 76);
    CHECK(!has_turn(clients, connection) && connection->counted); /* it lacks 4 bytes */
    connection_ready(clients, connection);
    uint64_t now = now_ns() + 31 * second;
    connections_sweep(clients, now);
    CHECK(!connection->ended); /* others' turns have lasted long */
    send_all(pair[0], bytes + 76, 4);
    CHECK(has_turn(clients, connection));
    connection_used(connection);
    connection_give(clients, connection, connection->cost);
    /* Its user's other frames have all of the room, for a minute. */
    uint64_t most = KVFS_CLIENT_MEMORY;
    connection_keep(connection, most);
    send_all(pair[0], bytes, 76);
    CHECK(!has_turn(clients, connection) && connection->starved);
    now = now_ns();
    for (uint32_t i = 0; i < 240; i++)
        connections_sweep(clients, now += second / 4);
    CHECK(!connection->ended);
    connection_give(clients, connection, most);
    CHECK(!connection->starved && connection->work.after);
    link_drop(&connection->work); /* it has its turn, and waits for the peer */
    connections_sweep(clients, now += second / 4);
    CHECK(!connection->ended);
    connections_sweep(clients, now += 31 * second);
    CHECK(connection->ended);
    stand_down(clients);
    close(pair[0]);
    close(pair[1]);
}

/* Any bytes, any ends, while Python does anything. */
static void test_a_storm(void) {
    struct peer peers[CLIENTS_MAX];
    bool there[CLIENTS_MAX] = {false};
    uint8_t bytes[1 << 15];
    uint64_t numbers[64] = {0};
    unsigned seed = 11;
    atomic_store(&manner, ANY);
    for (uint32_t step = 0; step < 6000; step++) {
        uint32_t i = (uint32_t)rand_r(&seed) % CLIENTS_MAX, what = (uint32_t)rand_r(&seed) % 20;
        if (!there[i]) {
            peers[i] = connect_as(USER, NULL, 0);
            int size = 4096 << rand_r(&seed) % 6;
            setsockopt(peers[i].theirs, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
            there[i] = true;
        }
        static const uint32_t types[] = {WIRE_RESERVE, WIRE_COMMIT, WIRE_HITS, WIRE_RELEASE, WIRE_REPORT, WIRE_LIST, WIRE_EVENTS, WIRE_DELETE};
        uint32_t type = types[(uint32_t)rand_r(&seed) % 8], size = (uint32_t)rand_r(&seed) % 300 & ~7u;
        if (what < 12) {
            for (uint32_t n = 0; n < 64; n++)
                numbers[n] = (uint64_t)rand_r(&seed) % 5000;
            size = type == WIRE_RESERVE   ? reserve_make(bytes + 16, "05", (uint32_t)rand_r(&seed) % 500, 1 + (uint32_t)rand_r(&seed) % 90, 3000)
                   : type == WIRE_COMMIT  ? commit_make(bytes + 16, numbers, 1 + (uint32_t)rand_r(&seed) % 64)
                   : type == WIRE_EVENTS  ? 16
                   : type == WIRE_RELEASE ? 8
                                          : size;
        } else if (what < 13) {
            for (uint32_t n = 0; n < 400; n++)
                bytes[n] = (uint8_t)rand_r(&seed);
        }
        if (what != 12)
            memcpy(bytes, &(struct wire_frame){size, (uint16_t)type, 0, 0, step}, 16);
        if (what < 17) {
            uint32_t whole = what == 16 ? (uint32_t)rand_r(&seed) % (16 + size) : 16 + size;
            ssize_t n = send(peers[i].fd, bytes, whole, MSG_DONTWAIT | MSG_NOSIGNAL);
            there[i] = n == (ssize_t)whole && what != 16;
        } else if (what == 17) {
            while (recv(peers[i].fd, bytes, sizeof(bytes), MSG_DONTWAIT) > 0)
                ;
        } else if (what == 18 && rand_r(&seed) % 8 == 0) {
            kvfs_client_end(plane, peers[i].number, rand_r(&seed) % 2);
            there[i] = false;
        } else if (what == 19) {
            segment_open((uint32_t)rand_r(&seed) % 4 ? 3 : UINT32_MAX);
            there[i] = rand_r(&seed) % 4 != 0;
            kvfs_directories_changed(plane, rand_r(&seed) % 2);
        }
        if (!there[i])
            hang_up(&peers[i]);
        answer_kept();
    }
    for (uint32_t i = 0; i < CLIENTS_MAX; i++)
        if (there[i])
            hang_up(&peers[i]);
    atomic_store(&manner, ANSWERS);
}

int main(void) {
    (void)pattern;
    plane_begin();
    names = kvfs_plane_names(plane);
    kvfs_names_number(names, UINT64_C(3) << KVFS_COUNTER_BITS, 0);
    CHECK((places = kvfs_places_make(names, SEGMENTS, END_PAGE, 1u << 20)));
    directory_put(1, 1, "");
    directory_put(SPACE_INODE, 1, "space");
    kvfs_names_leave(names, KVFS_LEAVE_CLOSED, 0);
    for (uint32_t i = 0; i < KVFS_SHARDS; i++)
        shards[i] = (struct kvfs_shard){SPACE_INODE, 8, 0};
    CHECK((told_fd = kvfs_clients_start(plane, &(struct kvfs_clients_config){0, 30000000000})) >= 0);
    CHECK(pthread_create(&python, NULL, python_main, NULL) == 0);
    segment_open(1);
    RUN(test_a_put_needs_python_once);
    RUN(test_a_put_goes_on_to_the_next_segment);
    RUN(test_a_head_that_python_holds_is_passed_over);
    RUN(test_frames_in_pieces);
    RUN(test_heads_that_break_a_rule);
    RUN(test_hang_ups_in_every_state);
    RUN(test_ends_from_above);
    RUN(test_a_descriptor_goes_along);
    RUN(test_uses_that_are_told_have_a_bound);
    RUN(test_what_is_kept_is_bounded);
    RUN(test_a_frame_that_python_has_counts_twice);
    RUN(test_who_does_not_read_goes);
    RUN(test_a_status_that_no_answer_has_is_another);
    RUN(test_an_answer_without_memory_ends_its_connection);
    RUN(test_a_large_frame_leaves_no_memory_behind);
    RUN(test_what_is_received_ahead_counts);
    RUN(test_commits_of_nothing_change_no_account);
    RUN(test_accounts_are_taken_now_and_then);
    RUN(test_after_a_turn_of_one_user_comes_the_next);
    RUN(test_frames_for_python_are_taken_from_each_user_in_turn);
    RUN(test_commits_that_wait_have_turns);
    RUN(test_a_peer_that_reads_wakes_who_waits_for_it);
    RUN(test_users_without_a_number_of_their_own_are_counted_together);
    RUN(test_who_waits_for_a_turn_or_for_room_is_not_late);
    RUN(test_a_storm);
    wait_for(none_runs, 0, "the end of all");
    struct kvfs_reservation_statistics reserved;
    struct clients_count all = clients_count(plane);
    kvfs_reservation_statistics_get(plane, &reserved);
    CHECK(all.connections == 0 && reserved.open == 0 && reserved.pages == 0 && reserved.resting == 0);
    atomic_store(&python_ends, true);
    pthread_join(python, NULL);
    /* A plane that comes down beside a connection takes it along. */
    plane_end();
    printf("ok the plane comes down with nothing left\n");
    return 0;
}
