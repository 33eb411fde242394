/* Which nodes have a directory: the map has one entry for all of them, with the rights that were set last. It goes with the last node that has it.
 *
 * Each node tells in order whether it has a directory, so what it said last counts, whatever the versions. A version is of the rights alone.
 * A directory here is found by its whole key, through chains. Two sets of slots follow each: those that have it, and in which repeat they said so. All
 * of this is with the mutex. Memory is touched from the front on as directories come. Beyond the bound their holders are not known: the entry goes
 * with the first of them. It goes with the last that told of it, too, if that one repeats all but it. */
#include "pod/pod_layout.h"

#include <sys/mman.h>

#define COUNT_MIN UINT64_C(1024)
#define COUNT_MAX (UINT64_C(1) << 24)

struct pod_directory {
    uint64_t key_low, key_high;
    uint32_t next; /* of its chain, or of those that are free: + 1 */
    uint32_t holders;
};

struct pod_directories {
    struct pod_directory *all;
    uint64_t *sets; /* two of each: who has it, and the parity of the repeat in which each said so */
    uint32_t *chains;
    uint64_t size; /* of the memory, which begins at all */
    uint32_t count, chain_count;
    uint32_t words; /* of a set */
    uint32_t fresh; /* never used from here on */
    uint32_t free;  /* + 1: given back */
};

int pod_directories_create(struct kvfs_pod *pod) {
    struct pod_directories *directories = calloc(1, sizeof(*directories));
    uint64_t count = pod->constants.entries_max, words = (pod->constants.nodes + 63) / 64;
    uint64_t each = sizeof(struct pod_directory) + 2 * words * sizeof(uint64_t) + sizeof(uint32_t);
    uint8_t *memory;

    if (!directories)
        return -ENOMEM;
    pod->writer->directories = directories;
    /* As much memory as the map at most: few entries are directories. */
    count = min_u64(min_u64(count, COUNT_MAX), pod->constants.size / each);
    if (count < COUNT_MIN)
        count = COUNT_MIN;
    directories->count = directories->chain_count = (uint32_t)count;
    directories->words = (uint32_t)words;
    directories->size = count * each;
    memory = mmap(NULL, directories->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        directories->size = 0;
        return -ENOMEM;
    }
    directories->all = (void *)memory;
    directories->sets = (void *)(memory + count * sizeof(*directories->all));
    directories->chains = (void *)(memory + count * (sizeof(*directories->all) + 2 * words * sizeof(uint64_t)));
    return 0;
}

void pod_directories_destroy(struct kvfs_pod *pod) {
    struct pod_directories *directories = pod->writer->directories;

    if (directories && directories->size)
        munmap(directories->all, directories->size);
    free(directories);
}

uint64_t pod_directories_size(const struct kvfs_pod *pod) { return pod->writer->directories->size; }

/* By the fingerprint alone, which is all that an entry of the map has. */
static uint32_t *chain_of(struct pod_directories *directories, uint64_t high) {
    return &directories->chains[pod_reduce(pod_mix(high ? high : 1), directories->chain_count)];
}

/* The set of those that have it, then the set of parities. */
static uint64_t *sets_of(const struct pod_directories *directories, const struct pod_directory *directory) {
    return &directories->sets[(uint64_t)(directory - directories->all) * 2 * directories->words];
}

static bool is_in(const uint64_t *set, uint32_t slot) { return set[slot / 64] >> slot % 64 & 1; }

static void put_in(uint64_t *set, uint32_t slot, bool in) {
    uint64_t bit = UINT64_C(1) << slot % 64;

    set[slot / 64] = in ? set[slot / 64] | bit : set[slot / 64] & ~bit;
}

static struct pod_directory *find(struct pod_directories *directories, uint64_t low, uint64_t high) {
    for (uint32_t at = *chain_of(directories, high); at; at = directories->all[at - 1].next)
        if (directories->all[at - 1].key_low == low && directories->all[at - 1].key_high == high)
            return &directories->all[at - 1];
    return NULL;
}

static struct pod_directory *make(struct pod_directories *directories, uint64_t low, uint64_t high) {
    uint32_t *chain = chain_of(directories, high), at = directories->free;
    struct pod_directory *made;

    if (!at && directories->fresh == directories->count)
        return NULL;
    if (at)
        directories->free = directories->all[at - 1].next;
    else
        at = ++directories->fresh;
    made = &directories->all[at - 1];
    *made = (struct pod_directory){.key_low = low, .key_high = high, .next = *chain};
    *chain = at;
    return made;
}

static void unmake(struct pod_directories *directories, struct pod_directory *directory) {
    uint32_t number = (uint32_t)(directory - directories->all) + 1, *link = chain_of(directories, directory->key_high);

    while (*link != number)
        link = &directories->all[*link - 1].next;
    *link = directory->next;
    *directory = (struct pod_directory){.next = directories->free};
    directories->free = number;
}

bool pod_holders_known(const struct kvfs_pod *pod, uint64_t fingerprint) {
    struct pod_directories *directories = pod->writer->directories;

    for (uint32_t at = *chain_of(directories, fingerprint); at; at = directories->all[at - 1].next)
        if ((directories->all[at - 1].key_high ? directories->all[at - 1].key_high : 1) == fingerprint)
            return true;
    return false;
}

bool pod_holder_add(struct kvfs_pod *pod, uint64_t key_low, uint64_t key_high, uint32_t slot) {
    struct pod_directories *directories = pod->writer->directories;
    struct pod_directory *directory = find(directories, key_low, key_high);
    uint64_t *sets;

    if (!directory && !(directory = make(directories, key_low, key_high)))
        return false;
    sets = sets_of(directories, directory);
    directory->holders += !is_in(sets, slot);
    put_in(sets, slot, true);
    put_in(sets + directories->words, slot, pod->writer->repeat_parity[slot]);
    return true;
}

int pod_holder_remove(struct kvfs_pod *pod, uint64_t key_low, uint64_t key_high, uint32_t slot) {
    struct pod_directories *directories = pod->writer->directories;
    struct pod_directory *directory = find(directories, key_low, key_high);
    uint64_t *set = directory ? sets_of(directories, directory) : NULL;

    if (!directory)
        return -ENOENT;
    directory->holders -= is_in(set, slot);
    put_in(set, slot, false);
    if (!directory->holders) {
        unmake(directories, directory);
        return -ENOENT;
    }
    for (uint32_t word = 0;; word++)
        if (set[word])
            return (int)(word * 64 + (uint32_t)__builtin_ctzll(set[word]));
}

void pod_holder_flip(struct kvfs_pod *pod, uint64_t key_low, uint64_t key_high, uint32_t slot) {
    struct pod_directories *directories = pod->writer->directories;
    struct pod_directory *directory = find(directories, key_low, key_high);
    uint64_t *parities = directory ? sets_of(directories, directory) + directories->words : NULL;

    if (parities)
        put_in(parities, slot, !is_in(parities, slot));
}

bool pod_directories_next(struct kvfs_pod *pod, uint32_t *at, uint32_t slot, unsigned parity, uint64_t *key_low, uint64_t *key_high) {
    struct pod_directories *directories = pod->writer->directories;
    const struct pod_directory *directory = &directories->all[*at];
    const uint64_t *sets = sets_of(directories, directory);

    if (*at >= directories->fresh)
        return false;
    ++*at;
    *key_low = *key_high = 0; /* no name has this key */
    if (directory->holders && is_in(sets, slot) && is_in(sets + directories->words, slot) == parity) {
        *key_low = directory->key_low;
        *key_high = directory->key_high;
    }
    return true;
}
