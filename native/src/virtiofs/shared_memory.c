/* Memory that another process can cut off under our hands: a front end that truncates what it has shared. Touching it is then SIGBUS, which
 * would end the daemon and everybody else's requests. Here such a mapping becomes private zeros for good. Its queues break the rules from then on,
 * and its guest is left to itself. Devices get EFAULT by themselves. */
#include "virtiofs/virtio.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#define MAPPINGS_MAX 4096u
/* A process has 128 TiB of addresses, and a shared file of any size costs its owner nothing: all owners together get half of them. */
#define BYTES_MAX ((uint64_t)64 << 40)
#define OWNER_MAPPINGS_MAX (2 * REGIONS_MAX)

static struct {
    _Atomic(uint8_t *) start; /* NULL: a free place */
    atomic_ullong size;
    const struct shared_owner *owner; /* under the lock */
} mappings[MAPPINGS_MAX];
static atomic_uint used; /* places ever taken */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool installed;
static struct sigaction before;

/* mmap is a plain system call on Linux: it may be called here. */
static void on_sigbus(int number, siginfo_t *info, void *context) {
    uint8_t *address = info->si_addr;
    (void)context;
    for (uint32_t i = 0; i < atomic_load(&used); i++) {
        uint8_t *start = atomic_load(&mappings[i].start);
        uint64_t size = atomic_load(&mappings[i].size);
        if (start && address >= start && address < start + size &&
            mmap(start, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED)
            return;
    }
    sigaction(number, &before, NULL); /* not ours: the fault repeats, for the earlier handler */
}

int shared_check(int fd, const uint64_t *types, uint32_t count) {
    /* Only these files have seals, sealed or not. The kernel answers without asking a filesystem, unlike fstat and fstatfs, which may never
     * return. */
    if (fcntl(fd, F_GET_SEALS) >= 0)
        return 0;
    struct statfs fs;
    if (count && fstatfs(fd, &fs) < 0)
        return -errno;
    for (uint32_t i = 0; i < count; i++)
        if ((uint64_t)fs.f_type == types[i])
            return 0;
    return -EMEDIUMTYPE;
}

/* With the lock: whether its owner may have one more mapping, of so many bytes. */
static bool affords(const struct shared_owner *owner, uint64_t size) {
    uint64_t bytes = 0;
    uint32_t count = 0;
    for (uint32_t i = 0; i < atomic_load(&used); i++)
        if (atomic_load(&mappings[i].start) && mappings[i].owner == owner) {
            bytes += atomic_load(&mappings[i].size);
            count++;
        }
    uint64_t limit = BYTES_MAX / owner->of;
    return count < OWNER_MAPPINGS_MAX && bytes <= limit && size <= limit - bytes;
}

void *shared_map(const struct shared_owner *owner, int fd, uint64_t offset, uint64_t size, int *error) {
    pthread_mutex_lock(&lock);
    uint32_t at = 0;
    while (at < MAPPINGS_MAX && atomic_load(&mappings[at].start))
        at++;
    *error = at == MAPPINGS_MAX ? -ENOSPC : affords(owner, size) ? 0 : -EDQUOT;
    if (*error == 0 && !installed) {
        struct sigaction action = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
        *error = sigaction(SIGBUS, &action, &before) < 0 ? -errno : 0;
        installed = *error == 0;
    }
    void *map = MAP_FAILED;
    if (*error == 0 && (map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, (off_t)offset)) == MAP_FAILED)
        *error = -errno;
    if (map != MAP_FAILED) {
        madvise(map, size, MADV_DONTDUMP);
        mappings[at].owner = owner;
        atomic_store(&mappings[at].size, size);
        atomic_store(&mappings[at].start, map);
        if (at == atomic_load(&used))
            atomic_store(&used, at + 1);
    }
    pthread_mutex_unlock(&lock);
    return map == MAP_FAILED ? NULL : map;
}

void shared_unmap(void *map, uint64_t size) {
    pthread_mutex_lock(&lock);
    bool known = false;
    for (uint32_t i = 0; i < atomic_load(&used); i++)
        if (atomic_load(&mappings[i].start) == map) {
            atomic_store(&mappings[i].start, NULL);
            known = true;
        }
    pthread_mutex_unlock(&lock);
    assert(known);
    munmap(map, size);
}
