/* The inodes that are open for writing, in memory that outlives this process: a list in a memfd that another process keeps.
 *
 * A kernel that outlives the daemon has pages of such a file that were never sealed. The next daemon serves what was sealed before. So it reads the
 * list: no handle of an earlier daemon reads such an inode on, and no open of one keeps the kernel's pages. An entry that a daemon finds stays as
 * long as the list does, since the earlier handles may, too.
 *
 * A file that was sealed and has a writer yet, whose RELEASE is under way perhaps, has a mark. The next daemon drops it: no WRITE was begun since, and
 * the kernel drops the page of one that fails. A writer that may have a mapping gets no mark.
 *
 * A page with a header, then a place of 8 bytes for each inode: its number, with bit 63 as the mark, or 0. Each is changed by one store. */
#include "base/sealed_memory.h"
#include "content/content.h"

#include <unistd.h>

#define WRITTEN_MAGIC 0x315f4e5454525756ull /* "VWRTTN_1" */
#define WRITTEN_PLACES 65536u
#define WRITTEN_SEALED (UINT64_C(1) << 63)
#define WRITTEN_SIZE (KVFS_PAGE_SIZE + WRITTEN_PLACES * sizeof(uint64_t))

struct written_header {
    uint64_t magic;
    uint32_t version, places;
};
struct written {
    struct written_header *memory;
    atomic_ullong *places;
    atomic_uint next;  /* where the search for a free place begins */
    uint64_t *earlier; /* of earlier daemons, ascending */
    uint32_t earlier_count;
};

int kvfs_written_make(void) {
    struct written_header header = {.magic = WRITTEN_MAGIC, .version = KVFS_WRITTEN_VERSION, .places = WRITTEN_PLACES};
    return sealed_create("kvfs-written", WRITTEN_SIZE, &header, sizeof(header));
}

static int by_number(const void *a, const void *b) {
    const uint64_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

/* Those that are there already are of earlier daemons. */
static int earlier_find(struct written *written) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < WRITTEN_PLACES; i++) {
        if (atomic_load(&written->places[i]) & WRITTEN_SEALED)
            atomic_store(&written->places[i], 0);
        count += atomic_load(&written->places[i]) != 0;
    }
    written->earlier = malloc((count + 1) * sizeof(*written->earlier));
    if (!written->earlier)
        return -ENOMEM;
    for (uint32_t i = 0; i < WRITTEN_PLACES && written->earlier_count < count; i++) {
        uint64_t inode = atomic_load(&written->places[i]);
        if (inode)
            written->earlier[written->earlier_count++] = inode;
    }
    qsort(written->earlier, written->earlier_count, sizeof(*written->earlier), by_number);
    return 0;
}

int kvfs_written_check(int fd, struct kvfs_versions *out) {
    struct written_header header;
    *out = (struct kvfs_versions){.oldest = KVFS_WRITTEN_OLDEST, .newest = KVFS_WRITTEN_VERSION};
    int r = sealed_version(fd, WRITTEN_MAGIC, out->oldest, out->newest, &out->found);
    if (r == 0)
        r = sealed_peek(fd, &header, sizeof(header));
    if (r == 0 && (header.places != WRITTEN_PLACES || sealed_size(fd) != WRITTEN_SIZE))
        r = -EBADMSG;
    return r;
}

int written_keep(struct kvfs_plane *plane, int fd) {
    struct kvfs_versions versions;
    int r = kvfs_written_check(fd, &versions);
    assert(!plane->written);
    if (r < 0)
        return r;
    struct written *written = calloc(1, sizeof(*written));
    if (!written)
        return -ENOMEM;
    void *memory = mmap(NULL, WRITTEN_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    r = memory == MAP_FAILED ? -errno : 0;
    if (r == 0) {
        written->memory = memory;
        written->places = (atomic_ullong *)(void *)((uint8_t *)memory + KVFS_PAGE_SIZE);
        r = earlier_find(written);
    }
    if (r < 0) {
        written_free(written);
        return r;
    }
    plane->written = written;
    return 0;
}

void written_free(struct written *written) {
    if (!written)
        return;
    if (written->memory)
        munmap(written->memory, WRITTEN_SIZE);
    free(written->earlier);
    free(written);
}

int written_add(struct kvfs_plane *plane, uint64_t inode, uint32_t *place) {
    struct written *written = plane->written;
    *place = 0;
    if (!written)
        return 0;
    uint32_t from = atomic_fetch_add(&written->next, 1);
    for (uint32_t i = 0; i < WRITTEN_PLACES; i++) {
        uint32_t at = (from + i) % WRITTEN_PLACES;
        unsigned long long none = 0;
        if (atomic_load_explicit(&written->places[at], memory_order_relaxed) == 0 &&
            atomic_compare_exchange_strong(&written->places[at], &none, inode)) {
            *place = at + 1;
            return 0;
        }
    }
    return -ENFILE;
}

static void replace(struct kvfs_plane *plane, const struct file *file, uint64_t value) {
    unsigned long long own = file->inode | (file->told_sealed ? WRITTEN_SEALED : 0);
    assert(file->written_place <= WRITTEN_PLACES);
    bool replaced = atomic_compare_exchange_strong(&plane->written->places[file->written_place - 1], &own, value);
    assert(replaced);
}

void written_remove(struct kvfs_plane *plane, const struct file *file) {
    if (file->written_place)
        replace(plane, file, 0);
}

void written_is_sealed(struct kvfs_plane *plane, struct file *file, bool sealed) {
    if (!file->written_place || file->told_sealed == sealed)
        return;
    replace(plane, file, file->inode | (sealed ? WRITTEN_SEALED : 0));
    file->told_sealed = sealed;
}

bool written_earlier(const struct kvfs_plane *plane, uint64_t inode) {
    const struct written *written = plane->written;
    return written && written->earlier_count && bsearch(&inode, written->earlier, written->earlier_count, sizeof(inode), by_number);
}
