/* sources: base io */
/* The NVMe/TCP initiator against bare TCP, in turns, in one process: bench_nvme PORT NQN ROUNDS READS [digests: 1 header, 2 data]. The target is a
 * process of its own, best on CPU 0, with a namespace 1 of 64 MiB or more. The other end of bare TCP is a child of this process, there too. Reads
 * into the same memory, in a thread on the last CPU, whose CPU time counts. A line of JSON a round.
 */
#include "io/nvme/tcp.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define MIB ((uint64_t)1 << 20)
#define DEPTH 8u

static uint8_t *memory;
static struct kvfs_array array;
static struct ring ring;

static uint64_t cpu_ns(void) {
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return (uint64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000000u +
           (uint64_t)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1000u;
}

static void run_on(uint32_t cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    CHECK(sched_setaffinity(0, sizeof(set), &set) == 0);
}

/* Sends as many bytes as each 8 byte message asks for. */
static void bare_peer(int fd) {
    uint8_t *data = calloc(1, 4 * MIB);
    uint64_t wanted;
    while (recv(fd, &wanted, sizeof(wanted), MSG_WAITALL) == sizeof(wanted))
        for (uint64_t at = 0; at < wanted;) {
            ssize_t n = send(fd, data, min_u64(wanted - at, MIB), MSG_NOSIGNAL);
            if (n <= 0)
                _exit(0);
            at += (uint64_t)n;
        }
    _exit(0);
}

static int bare_open(pid_t *child) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof(address);
    int listener = socket(AF_INET, SOCK_STREAM, 0), fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    CHECK(bind(listener, (struct sockaddr *)&address, size) == 0 && listen(listener, 1) == 0 &&
          getsockname(listener, (struct sockaddr *)&address, &size) == 0);
    if ((*child = fork()) == 0) {
        close(fd);
        run_on(0);
        int peer = accept(listener, NULL, NULL);
        setsockopt(peer, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
        bare_peer(peer);
    }
    CHECK(connect(fd, (struct sockaddr *)&address, size) == 0);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    close(listener);
    return fd;
}

static void bare_run(int fd, uint64_t size, uint32_t depth, uint32_t count) {
    uint32_t asked = 0;
    for (uint32_t got = 0; got < count; got++) {
        for (; asked < count && asked < got + depth; asked++)
            CHECK(send(fd, &size, sizeof(size), MSG_NOSIGNAL) == sizeof(size));
        CHECK(recv(fd, memory + got % DEPTH * MIB, size, MSG_WAITALL) == (ssize_t)size);
    }
}

static void io_done(struct io_group *group, bool reaped) {
    CHECK(!reaped && group->result == 0);
    ++*(uint32_t *)group->owner;
}

static void nvme_run(uint64_t size, uint32_t depth, uint32_t count) {
    uint32_t asked = 0, got = 0;
    while (got < count) {
        for (; asked < count && asked < got + depth; asked++) {
            struct iovec iov = {memory + asked % DEPTH * MIB, size};
            CHECK(ring_io(&ring, false, asked % 32, 0, &iov, 1, NULL, 0, io_done, &got) == 0);
        }
        ring_submit(&ring);
        if (!ring_reap(&ring))
            ring_wait(&ring, 1000000000), ring_reap(&ring);
    }
}

int main(int argc, char **argv) {
    if (argc < 5)
        return 0; /* `make bench` runs it without a target */
    run_on((uint32_t)sysconf(_SC_NPROCESSORS_ONLN) - 1);
    struct kvfs_nvme_target target = {.nsid = 1, .port = (uint32_t)atoi(argv[1]), .host = "127.0.0.1", .hostnqn = "nqn.2026-11.test:bench"};
    strncpy(target.nqn, argv[2], sizeof(target.nqn) - 1);
    target.header_digest = argc > 5 ? (uint32_t)atoi(argv[5]) & 1 : 0;
    target.data_digest = argc > 5 ? (uint32_t)atoi(argv[5]) >> 1 : 0;
    int target_fd = kvfs_nvme_descriptor(&target);
    const struct geometry geometry = {.stripe_unit = MIB, .zone_size = MIB, .stripe_width = 1, .segment_count = 32};
    CHECK(array_init(&array, &geometry, 1) == 0);
    array.io_timeout_ms = 5000;
    array.devices[0].fd = target_fd;
    array.devices[0].zones_offset = MIB;
    device_probe(&array.devices[0]);
    for (uint32_t i = 0; i < 32; i++)
        array.members[i] = (struct kvfs_member){0, i};
    char error[NVME_REASON];
    CHECK(posix_memalign((void **)&memory, 2 * MIB, DEPTH * MIB) == 0);
    memset(memory, 1, DEPTH * MIB);
    CHECK_SAY(target_fd >= 0 && nvme_hosts_start(&array, &target_fd, true, error, sizeof(error)) == 0, "%s", error);
    CHECK(ring_init(&ring, &array, 256) == 0);
    pid_t child;
    int bare = bare_open(&child);
    const struct {
        uint64_t size;
        uint32_t depth, count;
    } cases[] = {{4096, 1, (uint32_t)atoi(argv[4])}, {MIB, DEPTH, (uint32_t)atoi(argv[4]) / 8}};
    for (uint32_t c = 0; c < 2; c++)
        for (int round = 0; round < atoi(argv[3]); round++) {
            uint64_t ns[2], cpu[2];
            for (uint32_t which = 0; which < 2; which++) {
                uint64_t began = now_ns(), began_cpu = cpu_ns();
                if (which)
                    nvme_run(cases[c].size, cases[c].depth, cases[c].count);
                else
                    bare_run(bare, cases[c].size, cases[c].depth, cases[c].count);
                ns[which] = now_ns() - began, cpu[which] = cpu_ns() - began_cpu;
            }
            double gib = (double)cases[c].size * cases[c].count / (double)(1 << 30);
            printf(
                "{\"size\": %llu, \"depth\": %u, \"bare_us\": %.2f, \"nvme_us\": %.2f, \"bare_cpu_s_per_gib\": %.4f, \"nvme_cpu_s_per_gib\": %.4f}\n",
                (unsigned long long)cases[c].size, cases[c].depth, (double)ns[0] / cases[c].count / 1000, (double)ns[1] / cases[c].count / 1000,
                (double)cpu[0] / 1e9 / gib, (double)cpu[1] / 1e9 / gib);
            fflush(stdout);
        }
    kill(child, SIGTERM);
    waitpid(child, NULL, 0);
    ring_free(&ring);
    nvme_hosts_stop(&array);
    array_free(&array);
    return 0;
}
