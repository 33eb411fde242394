/* sources: base io */
/* Rings where io_uring is denied: by a seccomp filter, as a container's is. */
#include "io/ring.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "check.h"

#define DEVICES 2
#define UNIT 65536u
#define RUN_SIZE (DEVICES * UNIT)
#define ZONE ((uint64_t)1 << 20)
#define MS 1000000ull

static struct kvfs_array array;

/* The thread, and all that it makes from here on. */
static void deny(unsigned call, unsigned error) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof(filter) / sizeof(filter[0]), filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

static void array_make(uint32_t timeout_ms) {
    const struct geometry geometry = {.zone_size = ZONE, .stripe_unit = UNIT, .stripe_width = DEVICES, .segment_count = 2};
    memset(&array, 0, sizeof(array));
    array.io_timeout_ms = timeout_ms;
    CHECK(array_init(&array, &geometry, DEVICES) == 0);
    for (uint32_t i = 0; i < DEVICES; i++) {
        char path[] = "/tmp/test_threads.XXXXXX";
        array.devices[i].fd = mkstemp(path);
        CHECK(array.devices[i].fd >= 0 && unlink(path) == 0 && ftruncate(array.devices[i].fd, 2 * (off_t)ZONE) == 0);
        device_kind_set(&array.devices[i], &uring_ops);
        for (uint32_t s = 0; s < 2; s++)
            array.members[s * DEVICES + i] = (struct kvfs_member){.device = i, .zone = s};
    }
}

static void array_end(void) {
    for (uint32_t i = 0; i < DEVICES; i++)
        close(array.devices[i].fd);
    array_free(&array);
}

struct wait {
    bool expired, done;
    int result;
};

static void wait_done(struct io_group *group, bool reaped) {
    struct wait *wait = group->owner;
    CHECK(!wait->done && (!reaped || wait->expired));
    wait->done = reaped || !group->expired;
    wait->expired = group->expired;
    wait->result = group->result;
}

static void io_start(struct ring *ring, bool write, uint8_t *data, uint32_t size, struct wait *wait) {
    *wait = (struct wait){0};
    CHECK(ring_io(ring, write, 1, 0, &(struct iovec){data, size}, 1, NULL, 0, wait_done, wait) == 0);
    ring_submit(ring);
}

static void finish(struct ring *ring, struct wait *wait) {
    uint64_t until = now_ns() + 20000 * MS;
    while (!wait->done) {
        CHECK(now_ns() < until);
        ring_wait(ring, 100 * MS);
        ring_reap(ring);
    }
}

static int io(struct ring *ring, bool write, uint8_t *data, uint32_t size) {
    struct wait wait;
    io_start(ring, write, data, size, &wait);
    finish(ring, &wait);
    return wait.result;
}

static uint8_t *pattern(unsigned seed) {
    uint8_t *data = malloc(RUN_SIZE);
    CHECK(data);
    for (uint64_t i = 0; i < RUN_SIZE; i++)
        data[i] = (uint8_t)((seed = seed * 1103515245u + 12345u) >> 16);
    return data;
}

/* ---- which kind a ring is ---- */

static void check_denied(unsigned call, unsigned error, const char *told) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct ring ring;
        char text[256];
        deny(call, error);
        array_make(5000);
        CHECK(ring_init(&ring, &array, 64) == 0 && ring.threads);
        ring_tell(&array, text, sizeof(text));
        CHECK(strncmp(text, told, strlen(told)) == 0);
        uint8_t *data = pattern(error), *back = calloc(1, RUN_SIZE);
        CHECK(back && io(&ring, true, data, RUN_SIZE) == 0 && io(&ring, false, back, RUN_SIZE) == 0 && memcmp(data, back, RUN_SIZE) == 0);
        free(data);
        free(back);
        ring_free(&ring);
        array_end();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void test_each_call_may_be_denied(void) {
    check_denied(SYS_io_uring_setup, EPERM, "threads (io_uring_setup: Operation not permitted): ");
    check_denied(SYS_io_uring_setup, ENOSYS, "threads (io_uring_setup: Function not implemented): ");
    check_denied(SYS_io_uring_setup, ENOMEM, "threads (io_uring_setup: Cannot allocate memory; CAP_IPC_LOCK or more memlock gives io_uring): ");
    check_denied(SYS_io_uring_register, EPERM, "threads (io_uring_register: Operation not permitted): ");
    check_denied(SYS_io_uring_enter, EPERM, "threads (io_uring_enter: Operation not permitted): ");
    check_denied(SYS_io_uring_enter, ENOSYS, "threads (io_uring_enter: Function not implemented): ");
}

/* ---- devices ---- */

static void test_errors_and_faults_are_the_device_s(void) {
    struct ring ring;
    array_make(5000);
    CHECK(ring_init(&ring, &array, 64) == 0);
    uint8_t *data = pattern(2), *back = calloc(1, RUN_SIZE);
    CHECK(back && io(&ring, true, data, RUN_SIZE) == 0);
    fault_set(&array.devices[1], KVFS_FAULT_LOST_WRITE, 2, 1, 0);
    CHECK(io(&ring, true, back, RUN_SIZE) == 0 && io(&ring, false, back, RUN_SIZE) == 0);
    CHECK(memcmp(back + UNIT, data + UNIT, UNIT) == 0 && back[0] == 0);
    fault_set(&array.devices[1], KVFS_FAULT_ERROR, 1, 1, ENOSPC);
    CHECK(io(&ring, false, back, RUN_SIZE) == -ENOSPC);
    fault_set(&array.devices[1], KVFS_FAULT_NONE, 1, 1, 0);
    CHECK(ftruncate(array.devices[0].fd, (off_t)ZONE) == 0 && io(&ring, false, back, RUN_SIZE) == -EIO); /* smaller than its label says */
    free(data);
    free(back);
    ring_free(&ring);
    array_end();
}

/* More at once than a device has threads, by many rings. */
#define RINGS 4
#define DEPTH 48
static void *hammer(void *argument) {
    struct ring ring;
    uint8_t *data = pattern(*(unsigned *)argument);
    struct wait waits[DEPTH];
    CHECK(ring_init(&ring, &array, 64) == 0);
    for (unsigned round = 0; round < 5; round++) {
        for (unsigned i = 0; i < DEPTH; i++)
            io_start(&ring, i % 2, data, RUN_SIZE, &waits[i]);
        for (unsigned i = 0; i < DEPTH; i++) {
            finish(&ring, &waits[i]);
            CHECK(waits[i].result == 0);
        }
    }
    free(data);
    ring_free(&ring);
    return NULL;
}

static void test_many_rings(void) {
    pthread_t threads[RINGS];
    unsigned seeds[RINGS];
    uint32_t failed;
    array_make(60000);
    for (unsigned i = 0; i < RINGS; i++) {
        seeds[i] = i;
        CHECK(pthread_create(&threads[i], NULL, hammer, &seeds[i]) == 0);
    }
    for (unsigned i = 0; i < RINGS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(threads_count(&array, &failed) <= DEVICES * 32 && failed == 0);
    array_end();
}

/* A device that gives no answer, as a hung NFS server or a dead disk: a double of preadv2(2) and pwritev2(2). */
static atomic_bool hangs;
static atomic_uint hung;
static ino_t hanging_inode;

static void hang(int fd) {
    struct stat st;
    if (!atomic_load(&hangs) || fstat(fd, &st) < 0 || st.st_ino != hanging_inode)
        return;
    atomic_fetch_add(&hung, 1);
    while (atomic_load(&hangs))
        usleep(1000);
}
ssize_t __real_preadv2(int fd, const struct iovec *iovs, int count, off_t offset, int flags);
ssize_t __wrap_preadv2(int fd, const struct iovec *iovs, int count, off_t offset, int flags);
ssize_t __wrap_preadv2(int fd, const struct iovec *iovs, int count, off_t offset, int flags) {
    hang(fd);
    return __real_preadv2(fd, iovs, count, offset, flags);
}

static void hang_device(uint32_t device) {
    struct stat st;
    CHECK(fstat(array.devices[device].fd, &st) == 0);
    hanging_inode = st.st_ino;
    atomic_store(&hung, 0);
    atomic_store(&hangs, true);
}

#define MANY 70
static void test_a_device_that_hangs_takes_nobody_else_s_threads(void) {
    struct ring ring;
    struct wait waits[MANY], other;
    array_make(300);
    CHECK(ring_init(&ring, &array, 256) == 0);
    uint8_t *data = pattern(3), *back[MANY];
    CHECK(io(&ring, true, data, RUN_SIZE) == 0);
    hang_device(1);
    for (unsigned i = 0; i < MANY; i++) {
        back[i] = calloc(1, RUN_SIZE);
        CHECK(back[i]);
        io_start(&ring, false, back[i], RUN_SIZE, &waits[i]);
    }
    for (unsigned i = 0; i < MANY; i++) /* those that had no turn yet are not expired, but over */
        for (uint64_t until = now_ns() + 20000 * MS; !waits[i].expired && !waits[i].done;) {
            CHECK(now_ns() < until);
            ring_wait(&ring, 10 * MS);
            ring_reap(&ring);
        }
    uint32_t owed = 0;
    for (unsigned i = 0; i < MANY; i++) {
        CHECK(waits[i].result == -ETIMEDOUT);
        ring_wait(&ring, 0);
        ring_reap(&ring);
    }
    for (unsigned i = 0; i < MANY; i++)
        owed += !waits[i].done;
    CHECK(owed == atomic_load(&hung) && owed <= 32 && owed == atomic_load(&array.orphans)); /* those that waited for a thread ended at once */
    io_start(&ring, false, data, UNIT, &other);                                             /* of the other device alone */
    finish(&ring, &other);
    CHECK(other.result == 0 && !other.expired && !ring_idle(&ring) && threads_busy(&array));

    /* The device is another file from now on; its old number is used again. The orphans read what they were to read. */
    int fd = array.devices[1].fd, fresh = memfd_create("other", MFD_CLOEXEC);
    CHECK(fresh >= 0 && ftruncate(fresh, 2 * (off_t)ZONE) == 0 && dup2(fresh, fd) == fd && close(fresh) == 0);
    atomic_fetch_add(&array.devices_changed, 1);
    uint8_t *zeros = malloc(RUN_SIZE);
    CHECK(zeros && io(&ring, false, zeros, RUN_SIZE) == 0 && zeros[UNIT] == 0 && memcmp(zeros, data, UNIT) == 0);
    atomic_store(&hangs, false);
    for (unsigned i = 0; i < MANY; i++)
        finish(&ring, &waits[i]);
    uint32_t whole = 0;
    for (unsigned i = 0; i < MANY; i++) {
        whole += memcmp(back[i] + UNIT, data + UNIT, UNIT) == 0;
        free(back[i]);
    }
    CHECK(whole == owed && ring_idle(&ring) && atomic_load(&array.orphans) == 0);
    free(data);
    free(zeros);
    ring_free(&ring);
    array_end();
}

/* ---- threads ---- */

static atomic_int makes_left = -1;
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    if (atomic_load(&makes_left) >= 0 && atomic_fetch_sub(&makes_left, 1) <= 0) {
        atomic_store(&makes_left, 0);
        return EAGAIN;
    }
    return __real_pthread_create(thread, attributes, run, argument);
}

static void test_no_more_threads(void) {
    struct ring ring;
    char text[256];
    array_make(5000);
    for (int made = 0; made < DEVICES; made++) {
        atomic_store(&makes_left, made);
        CHECK(ring_init(&ring, &array, 64) == -EAGAIN && !atomic_load(&array.threads));
    }
    CHECK(strstr(ring_advice(-EAGAIN), "pids.max") && strstr(ring_advice(-EAGAIN), "ulimit -u"));
    atomic_store(&makes_left, DEVICES); /* one a device: slower, and all is done */
    CHECK(ring_init(&ring, &array, 64) == 0);
    uint8_t *data = pattern(4);
    struct wait waits[8];
    for (unsigned i = 0; i < 8; i++)
        io_start(&ring, true, data, RUN_SIZE, &waits[i]);
    for (unsigned i = 0; i < 8; i++) {
        finish(&ring, &waits[i]);
        CHECK(waits[i].result == 0);
    }
    hang_device(1); /* its one thread is busy: what comes next asks for another, however fast I/O is */
    uint8_t *back = malloc(2 * (size_t)RUN_SIZE);
    CHECK(back);
    io_start(&ring, false, back, RUN_SIZE, &waits[0]);
    for (uint64_t until = now_ns() + 5000 * MS; !atomic_load(&hung); usleep(1000))
        CHECK(now_ns() < until);
    io_start(&ring, false, back + RUN_SIZE, RUN_SIZE, &waits[1]);
    ring_tell(&array, text, sizeof(text));
    CHECK(strstr(text, ": 2 of them; more were refused: raise pids.max or ulimit -u"));
    atomic_store(&hangs, false);
    for (unsigned i = 0; i < 2; i++) {
        finish(&ring, &waits[i]);
        CHECK(waits[i].result == 0 && memcmp(back + i * (size_t)RUN_SIZE, data, RUN_SIZE) == 0);
    }
    atomic_store(&makes_left, -1);
    free(back);
    free(data);
    ring_free(&ring);
    array_end();
}

#ifndef __SANITIZE_THREAD__
static void test_after_fork(void) {
    struct ring ring;
    array_make(5000);
    CHECK(ring_init(&ring, &array, 64) == 0);
    uint8_t *data = pattern(5);
    CHECK(io(&ring, true, data, RUN_SIZE) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct ring own;
        array_make(5000); /* as a client of the child has */
        CHECK(ring_init(&own, &array, 64) == 0 && io(&own, true, data, RUN_SIZE) == 0);
        ring_free(&own);
        array_end();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(io(&ring, false, data, RUN_SIZE) == 0);
    free(data);
    ring_free(&ring);
    array_end();
}
#endif

/* ---- descriptors that a ring polls ---- */

static void test_polls(void) {
    struct ring ring;
    uint64_t value = 1;
    array_make(5000);
    CHECK(ring_init(&ring, &array, 64) == 0);
    int once = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), edges = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    ring_poll(&ring, once, 2, false);
    ring_poll(&ring, edges, 3, true);
    uint64_t begun = now_ns();
    ring_wait(&ring, 20 * MS);
    CHECK(now_ns() - begun >= 20 * MS && ring.armed == (1u << 2 | 1u << 3));
    CHECK(write(once, &value, 8) == 8);
    ring_wait(&ring, 5000 * MS);
    CHECK(ring.armed == 1u << 3);
    ring_wait(&ring, 0); /* readable still, and not polled */
    CHECK(ring.armed == 1u << 3);
    ring_poll(&ring, once, 2, false); /* readable already */
    ring_wait(&ring, 5000 * MS);
    CHECK(ring.armed == 1u << 3);
    for (int i = 0; i < 3; i++) { /* every write, and nobody reads */
        CHECK(write(edges, &value, 8) == 8);
        begun = now_ns();
        ring_wait(&ring, 5000 * MS);
        CHECK(now_ns() - begun < 4000 * MS && ring.armed == 1u << 3);
    }
    close(once); /* the number is another file's: a new poll is of that one */
    int again = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    CHECK(again == once);
    ring_poll(&ring, again, 2, false);
    CHECK(write(again, &value, 8) == 8);
    ring_wait(&ring, 5000 * MS);
    CHECK(ring.armed == 1u << 3);
    close(again);
    close(edges);
    ring_free(&ring);
    array_end();
}

int main(void) {
    RUN(test_each_call_may_be_denied);
    deny(SYS_io_uring_setup, EPERM); /* from here on */
    RUN(test_errors_and_faults_are_the_device_s);
    RUN(test_many_rings);
    RUN(test_a_device_that_hangs_takes_nobody_else_s_threads);
    RUN(test_no_more_threads);
#ifndef __SANITIZE_THREAD__ /* it lets no child make threads */
    RUN(test_after_fork);
#endif
    RUN(test_polls);
    return 0;
}
