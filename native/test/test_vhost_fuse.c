/* sources: */
/* vhost_fuse against a double of a back end, that answers rightly or lies in one way. Each lie is an error that names it, within the deadline.
 * Requests come back with their bytes with every set of ring features, and in any order. */
#define _GNU_SOURCE
#include "../tools/vhost_fuse_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <linux/fuse.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "check.h"

#define SIZE 8u
#define MEMORY ((uint64_t)1 << 20)
#define TIMEOUT 300u

enum lie {
    TRUE_ANSWERS,
    USED_INDEX,
    DESCRIPTOR,
    NOT_LIVE,
    LONG,
    SHORT,
    HEADER_LENGTH,
    UNIQUE,
    ERROR_NUMBER,
    ERROR_WITH_BODY,
    ANSWER_TO_FORGET,
    SILENT,
    HANGS_UP,
    TALKS,
    NO_ANSWER_TO_MESSAGE,
    HANGS_UP_AT_MESSAGE,
    OTHER_MESSAGE,
    LONG_MESSAGE,
    REFUSES,
    NO_VERSION_1,
    ONE_QUEUE
};

/* The back end: a thread, with mappings of its own of the memory that it is given. */
struct double_end {
    enum lie lie;
    uint64_t features, protocol;
    char path[96];
    int listen_fd, fd, kicks[2], calls[2];
    struct table table;
    void *maps[VHOST_FUSE_REGIONS_MAX + 1];
    struct address rings[2];
    uint32_t sizes[2];
    uint16_t seen[2], used[2];
    uint32_t held; /* answers that wait, for the other order */
    uint16_t held_heads[SIZE];
    bool reversed;
    pthread_t thread;
};

/* Where an address of the front end lies here. */
static void *at(const struct double_end *end, uint64_t address) {
    for (uint32_t i = 0; i < end->table.count; i++)
        if (address - end->table.regions[i].guest_address < end->table.regions[i].size)
            return (uint8_t *)end->maps[i] + (address - end->table.regions[i].guest_address);
    CHECK_SAY(false, "address %" PRIx64, address);
    return NULL;
}

static bool receive(struct double_end *end, struct header *header, void *payload, int *fds) {
    struct iovec iov = {header, sizeof(*header)};
    union {
        struct cmsghdr align;
        uint8_t bytes[CMSG_SPACE(sizeof(int) * 8)];
    } control;
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
    if (recvmsg(end->fd, &message, MSG_WAITALL | MSG_CMSG_CLOEXEC) != sizeof(*header))
        return false;
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    if (c)
        memcpy(fds, CMSG_DATA(c), c->cmsg_len - CMSG_LEN(0));
    CHECK(header->size <= sizeof(struct table));
    return header->size == 0 || recv(end->fd, payload, header->size, MSG_WAITALL) == (ssize_t)header->size;
}

static bool reply(struct double_end *end, const struct header *header, const void *payload, uint32_t size) {
    struct header answer = {header->request + (end->lie == OTHER_MESSAGE), FLAG_VERSION | FLAG_REPLY, size + (end->lie == LONG_MESSAGE)};
    uint8_t bytes[64];
    memcpy(bytes, &answer, sizeof(answer));
    memcpy(bytes + sizeof(answer), payload, size);
    return send(end->fd, bytes, sizeof(answer) + size, MSG_NOSIGNAL) == (ssize_t)(sizeof(answer) + size);
}

/* The parts of a chain: where its request begins, and its room. Without answer: out is NULL. */
static void chain_read(const struct double_end *end, uint32_t queue, uint16_t head, struct fuse_in_header **in, struct fuse_out_header **out,
                       uint8_t **body, uint32_t *body_size) {
    const struct vring_desc *table = at(end, end->rings[queue].desc), *one = table + head;
    if (one->flags & VRING_DESC_F_INDIRECT)
        table = one = at(end, one->addr);
    *in = at(end, one->addr);
    *out = NULL;
    *body = NULL;
    *body_size = 0;
    for (;; one = table + one->next) {
        if (one->flags & VRING_DESC_F_WRITE && !*out) {
            *out = at(end, one->addr);
        } else if (one->flags & VRING_DESC_F_WRITE && !*body) {
            *body = at(end, one->addr);
            *body_size = one->len;
        }
        if (!(one->flags & VRING_DESC_F_NEXT))
            return;
    }
}

static void answer(struct double_end *end, uint32_t queue, uint16_t head) {
    struct vring_used *used = at(end, end->rings[queue].used);
    struct fuse_in_header *in;
    struct fuse_out_header *out;
    uint8_t *body;
    uint32_t size, length = 0;
    enum lie lie = end->lie;
    chain_read(end, queue, head, &in, &out, &body, &size);
    if (out) {
        length = (uint32_t)sizeof(*out) + size;
        if (size)
            memset(body, (int)in->unique, size);
        *out = (struct fuse_out_header){.len = length + (lie == HEADER_LENGTH), .unique = in->unique + (lie == UNIQUE)};
        out->error = lie == ERROR_NUMBER ? 5 : lie == ERROR_WITH_BODY ? -5 : 0;
    }
    length = lie == LONG ? length + 4096 : lie == SHORT ? 15 : lie == ANSWER_TO_FORGET && !out ? 16 : length;
    uint32_t id = lie == DESCRIPTOR ? end->sizes[queue] : lie == NOT_LIVE ? (head + 1u) % end->sizes[queue] : head;
    used->ring[end->used[queue]++ & (end->sizes[queue] - 1)] = (struct vring_used_elem){id, length};
    __atomic_store_n(&used->idx, (uint16_t)(end->used[queue] + (lie == USED_INDEX ? 3 : 0)), __ATOMIC_RELEASE);
    uint64_t one = 1;
    CHECK(write(end->calls[queue], &one, sizeof(one)) == sizeof(one));
}

static void ring_serve(struct double_end *end, uint32_t queue) {
    if (!end->rings[queue].avail)
        return;
    const struct vring_avail *avail = at(end, end->rings[queue].avail);
    struct vring_used *used = at(end, end->rings[queue].used);
    uint16_t *event = (uint16_t *)(void *)&used->ring[end->sizes[queue]];
    for (;;) {
        __atomic_store_n(event, end->seen[queue], __ATOMIC_SEQ_CST); /* the wish for a kick before the look */
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        if (end->seen[queue] == __atomic_load_n(&avail->idx, __ATOMIC_ACQUIRE))
            return;
        uint16_t head = avail->ring[end->seen[queue]++ & (end->sizes[queue] - 1)];
        if (end->lie == SILENT || end->lie == TALKS)
            continue;
        if (end->reversed && end->held < 1) {
            end->held_heads[end->held++] = head;
            continue;
        }
        answer(end, queue, head);
        while (end->held)
            answer(end, queue, end->held_heads[--end->held]);
    }
}

static bool message_serve(struct double_end *end) {
    struct header header;
    union {
        uint64_t u64;
        struct state state;
        struct address address;
        struct table table;
    } payload = {.u64 = 0};
    int fds[VHOST_FUSE_REGIONS_MAX + 1];
    if (!receive(end, &header, &payload, fds) || end->lie == HANGS_UP_AT_MESSAGE)
        return false;
    uint32_t index = payload.state.index & 1;
    if (end->lie == NO_ANSWER_TO_MESSAGE)
        return true;
    switch (header.request) {
    case GET_FEATURES: return reply(end, &header, &end->features, 8);
    case GET_PROTOCOL_FEATURES: return reply(end, &header, &end->protocol, 8);
    case GET_QUEUE_NUM: payload.u64 = end->lie == ONE_QUEUE ? 1 : 2; return reply(end, &header, &payload, 8);
    case GET_VRING_BASE: payload.state.number = end->seen[index]; return reply(end, &header, &payload, 8);
    case SET_MEM_TABLE:
        end->table = payload.table;
        for (uint32_t i = 0; i < payload.table.count; i++) {
            end->maps[i] = mmap(NULL, payload.table.regions[i].size, PROT_READ | PROT_WRITE, MAP_SHARED, fds[i], 0);
            CHECK(end->maps[i] != MAP_FAILED);
            close(fds[i]);
        }
        break;
    case SET_VRING_NUM: end->sizes[index] = payload.state.number; break;
    case SET_VRING_ADDR: end->rings[index] = payload.address; break;
    case SET_VRING_KICK: end->kicks[index] = fds[0]; break;
    case SET_VRING_CALL: end->calls[index] = fds[0]; break;
    case SET_VRING_ENABLE: ring_serve(end, index); break;
    default: break;
    }
    uint64_t refused = end->lie == REFUSES && header.request == SET_MEM_TABLE;
    return !(header.flags & FLAG_NEED_REPLY) || reply(end, &header, &refused, 8);
}

static void *serve(void *argument) {
    struct double_end *end = argument;
    end->fd = accept4(end->listen_fd, NULL, NULL, SOCK_CLOEXEC);
    CHECK(end->fd >= 0);
    for (bool alive = true; alive;) {
        struct pollfd polls[3] = {
            {.fd = end->fd, .events = POLLIN}, {.fd = end->kicks[0], .events = POLLIN}, {.fd = end->kicks[1], .events = POLLIN}};
        CHECK(poll(polls, 3, 20000) > 0);
        if (polls[0].revents)
            alive = message_serve(end);
        for (uint32_t i = 0; alive && i < 2; i++) {
            uint64_t count;
            if (!polls[1 + i].revents || read(end->kicks[i], &count, sizeof(count)) < 0)
                continue;
            alive = end->lie != HANGS_UP;
            if (!alive)
                break;
            if (end->lie == TALKS)
                CHECK(send(end->fd, "?", 1, MSG_NOSIGNAL) == 1);
            ring_serve(end, i);
        }
    }
    close(end->fd);
    return NULL;
}

static void double_start(struct double_end *end, enum lie lie, uint64_t features, uint64_t protocol) {
    static int count;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    *end = (struct double_end){.lie = lie, .features = features, .protocol = protocol, .kicks = {-1, -1}, .calls = {-1, -1}};
    snprintf(end->path, sizeof(end->path), "/tmp/kvfs-vhost-fuse-%d-%d", getpid(), count++);
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", end->path);
    end->listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(end->listen_fd, (struct sockaddr *)&address, sizeof(address)) == 0 && listen(end->listen_fd, 1) == 0);
    CHECK(pthread_create(&end->thread, NULL, serve, end) == 0);
}

static void double_end_now(struct double_end *end) {
    CHECK(pthread_join(end->thread, NULL) == 0);
    for (uint32_t i = 0; i < end->table.count; i++)
        munmap(end->maps[i], end->table.regions[i].size);
    close(end->listen_fd);
    unlink(end->path);
    for (int i = 0; i < 2; i++) {
        if (end->kicks[i] >= 0)
            close(end->kicks[i]);
        if (end->calls[i] >= 0)
            close(end->calls[i]);
    }
}

/* ---- requests ---- */

static struct vhost_fuse_region memory;
static int32_t results[SIZE];
static uint32_t result_count;

static void note(void *context, int32_t result) {
    results[(uintptr_t)context] = result;
    result_count++;
}

static int request(struct vhost_fuse *vhost, uint32_t index, uint32_t opcode) {
    uint8_t *at = (uint8_t *)memory.data + index * 16384;
    struct fuse_in_header *in = (void *)at;
    *in = (struct fuse_in_header){.len = 80, .opcode = opcode, .unique = 100 + index};
    struct iovec out[2] = {{in, sizeof(*in)}, {at + 512, 40}}, room[2] = {{at + 1024, 16}, {at + 4096, 4096}};
    bool forgets = opcode == FUSE_FORGET;
    memset(at + 1024, 0xff, 16);
    memset(at + 4096, 0, 4096);
    results[index] = 1;
    return vhost_fuse_submit(vhost, forgets ? VHOST_FUSE_PRIORITY : VHOST_FUSE_REQUESTS, out, 2, room, forgets ? 0 : 2, note,
                             (void *)(uintptr_t)index);
}

static int connect_to(const struct double_end *end, struct vhost_fuse **vhost) {
    struct vhost_fuse_config config = {
        .path = end->path, .queue_size = SIZE, .timeout_ms = TIMEOUT * slowness(), .regions = &memory, .region_count = 1};
    result_count = 0;
    return vhost_fuse_connect(&config, vhost);
}

static int poll_until(struct vhost_fuse *vhost, uint32_t count) {
    int r = 0;
    while (r >= 0 && result_count < count)
        if ((r = vhost_fuse_poll(vhost)) == 0)
            vhost_fuse_wait(vhost, 20);
    return r;
}

static const uint64_t BASE = 1ull << VIRTIO_F_VERSION_1, ALL = FEATURES;
static const uint64_t ALL_PROTOCOL = PROTOCOL_MQ | PROTOCOL_REPLY_ACK;

static void answers_come(uint64_t features, uint64_t protocol, bool reversed) {
    struct double_end end;
    struct vhost_fuse *vhost;
    double_start(&end, TRUE_ANSWERS, features, protocol);
    end.reversed = reversed;
    CHECK_SAY(connect_to(&end, &vhost) == 0, "%s", vhost ? vhost_fuse_error(vhost) : "");
    uint32_t rounds = 70000 / 2 / (slowness() > 3 ? 8 : 2); /* beyond a wrap of the indexes where the machine is quick */
    for (uint32_t i = 0; i < rounds; i++) {
        result_count = 0;
        CHECK(request(vhost, 0, FUSE_READ) == 0 && request(vhost, 1, FUSE_READ) == 0);
        CHECK_SAY(poll_until(vhost, 2) >= 0, "%s", vhost_fuse_error(vhost));
        for (uint32_t j = 0; j < 2; j++) {
            const uint8_t *body = (const uint8_t *)memory.data + j * 16384 + 4096;
            CHECK(results[j] == 4096 && body[0] == 100 + j && body[4095] == 100 + j);
        }
    }
    if (!reversed) {
        result_count = 0;
        CHECK(request(vhost, 0, FUSE_FORGET) == 0 && poll_until(vhost, 1) >= 0 && results[0] == 0);
    }
    vhost_fuse_close(vhost);
    double_end_now(&end);
}

static void test_requests_are_answered_with_every_set_of_features(void) {
    answers_come(ALL, ALL_PROTOCOL, false);
    answers_come(ALL, ALL_PROTOCOL, true);
    answers_come(BASE, 0, false);
    answers_come(BASE, 0, true);
    answers_come(BASE | 1ull << VIRTIO_RING_F_INDIRECT_DESC, 0, true);
    answers_come(BASE | 1ull << VIRTIO_RING_F_EVENT_IDX | FEATURE_PROTOCOL, PROTOCOL_MQ, false);
}

/* The end of a connection with one request: its error, and these words in its text. */
static void lie_is_named(enum lie lie, uint32_t opcode, int error, const char *words) {
    struct double_end end;
    struct vhost_fuse *vhost;
    double_start(&end, lie, ALL, ALL_PROTOCOL);
    CHECK_SAY(connect_to(&end, &vhost) == 0, "%s", vhost ? vhost_fuse_error(vhost) : "");
    uint64_t started = vhost_now_ns();
    CHECK(request(vhost, 0, opcode) == 0);
    int r = poll_until(vhost, 1);
    CHECK_SAY(r == error && strstr(vhost_fuse_error(vhost), words) && strstr(vhost_fuse_error(vhost), end.path), "lie %d: %d, %s", lie, r,
              vhost_fuse_error(vhost));
    CHECK((vhost_now_ns() - started) / 1000000 < 3 * TIMEOUT * slowness());
    CHECK(result_count == 0 && request(vhost, 1, opcode) == -EPIPE && vhost_fuse_poll(vhost) == error);
    vhost_fuse_close(vhost);
    CHECK(result_count == 1 && results[0] == -ECANCELED);
    double_end_now(&end);
}

static void test_each_lie_of_the_rings_is_an_error_that_names_it(void) {
    lie_is_named(USED_INDEX, FUSE_READ, -EPROTO, "the used index went from 0 to 4, with 1 requests");
    lie_is_named(DESCRIPTOR, FUSE_READ, -EPROTO, "an answer to descriptor 8");
    lie_is_named(NOT_LIVE, FUSE_READ, -EPROTO, "an answer to descriptor 1");
    lie_is_named(LONG, FUSE_READ, -EPROTO, "an answer of 8208 bytes, expected 16 to 4112");
    lie_is_named(SHORT, FUSE_READ, -EPROTO, "an answer of 15 bytes");
    lie_is_named(HEADER_LENGTH, FUSE_READ, -EPROTO, "its header says 4113 bytes, the ring 4112");
    lie_is_named(UNIQUE, FUSE_READ, -EPROTO, "an answer to request 101, expected 100");
    lie_is_named(ERROR_NUMBER, FUSE_READ, -EPROTO, "error 5 in an answer");
    lie_is_named(ERROR_WITH_BODY, FUSE_READ, -EPROTO, "error -5 in an answer of 4112 bytes");
    lie_is_named(ANSWER_TO_FORGET, FUSE_FORGET, -EPROTO, "16 bytes of answer to a request that has none");
    lie_is_named(SILENT, FUSE_READ, -ETIMEDOUT, "no answer in");
    lie_is_named(HANGS_UP, FUSE_READ, -ECONNRESET, "the back end closed its socket, with 1 requests");
    lie_is_named(TALKS, FUSE_READ, -EPROTO, "a message that nobody asked for");
}

static void refused_at_start(enum lie lie, uint64_t features, int error, const char *words) {
    struct double_end end;
    struct vhost_fuse *vhost;
    double_start(&end, lie, features, ALL_PROTOCOL);
    int r = connect_to(&end, &vhost);
    CHECK(vhost);
    CHECK_SAY(r == error && strstr(vhost_fuse_error(vhost), words), "lie %d: %d, %s", lie, r, vhost_fuse_error(vhost));
    vhost_fuse_close(vhost);
    double_end_now(&end);
}

static void test_each_lie_of_the_messages_is_an_error_that_names_it(void) {
    refused_at_start(NO_ANSWER_TO_MESSAGE, ALL, -ETIMEDOUT, "message 1: 0 of 12 bytes");
    refused_at_start(HANGS_UP_AT_MESSAGE, ALL, -ECONNRESET, "before it answered message 1");
    refused_at_start(OTHER_MESSAGE, ALL, -EPROTO, "message 1: an answer to 2");
    refused_at_start(LONG_MESSAGE, ALL, -EPROTO, "of 9 bytes, expected 8");
    refused_at_start(REFUSES, ALL, -EPROTO, "message 5: refused");
    refused_at_start(NO_VERSION_1, ALL & ~BASE, -EPROTO, "without VERSION_1");
    refused_at_start(ONE_QUEUE, ALL, -EPROTO, "1 queues, needs 2");
    struct vhost_fuse *vhost;
    struct vhost_fuse_config config = {.path = "/nonexistent/socket", .queue_size = SIZE, .timeout_ms = TIMEOUT};
    CHECK(vhost_fuse_connect(&config, &vhost) == -ENOENT && strstr(vhost_fuse_error(vhost), "/nonexistent/socket: connect: No such file"));
    vhost_fuse_close(vhost);
}

static void test_a_caller_s_mistakes_are_refused(void) {
    struct double_end end;
    struct vhost_fuse *vhost;
    struct vhost_fuse_config config = {.path = "/tmp/x", .queue_size = 6, .timeout_ms = TIMEOUT};
    CHECK(vhost_fuse_connect(&config, &vhost) == -EINVAL && !vhost);
    double_start(&end, SILENT, ALL & ~(1ull << VIRTIO_RING_F_INDIRECT_DESC), ALL_PROTOCOL);
    CHECK(connect_to(&end, &vhost) == 0);
    uint8_t *at = memory.data, ours[64] = {0};
    struct iovec head = {at, sizeof(struct fuse_in_header)}, room = {at + 1024, 16}, outside = {ours, 40}, over = {at + MEMORY - 8, 16};
    struct iovec small = {at, 39}, many[SIZE + 1] = {head};
    CHECK(vhost_fuse_submit(vhost, VHOST_FUSE_REQUESTS, &outside, 1, &room, 1, note, NULL) == -EFAULT);
    CHECK(vhost_fuse_submit(vhost, VHOST_FUSE_REQUESTS, &head, 1, &over, 1, note, NULL) == -EFAULT);
    CHECK(vhost_fuse_submit(vhost, VHOST_FUSE_REQUESTS, &small, 1, &room, 1, note, NULL) == -EINVAL);
    CHECK(vhost_fuse_submit(vhost, VHOST_FUSE_REQUESTS, &head, 0, &room, 1, note, NULL) == -EINVAL);
    CHECK(vhost_fuse_submit(vhost, VHOST_FUSE_REQUESTS, many, SIZE + 1, NULL, 0, note, NULL) == -EINVAL);
    CHECK(request(vhost, 0, FUSE_READ) == 0 && request(vhost, 1, FUSE_READ) == 0);
    CHECK(request(vhost, 2, FUSE_READ) == -EAGAIN); /* two of four descriptors have all eight */
    CHECK(result_count == 0);
    vhost_fuse_close(vhost);
    CHECK(result_count == 2 && results[0] == -ECANCELED && results[1] == -ECANCELED);
    double_end_now(&end);
}

int main(void) {
    memory.fd = memfd_create("test-vhost-fuse", MFD_CLOEXEC);
    memory.size = MEMORY;
    CHECK(memory.fd >= 0 && ftruncate(memory.fd, (off_t)MEMORY) == 0);
    memory.data = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd, 0);
    CHECK(memory.data != MAP_FAILED);
    RUN(test_requests_are_answered_with_every_set_of_features);
    RUN(test_each_lie_of_the_rings_is_an_error_that_names_it);
    RUN(test_each_lie_of_the_messages_is_an_error_that_names_it);
    RUN(test_a_caller_s_mistakes_are_refused);
    return 0;
}
