/* Names of evicted blocks that hosts may still believe in, by 64-bit hashes: two names that share one only cost an epoch more. */
#include "names/names_state.h"

#define UNTOLD_MIN 1024u

/* The place of the hash, or the empty one where it belongs. */
static uint64_t *hash_place(const struct untold *untold, uint64_t hash) {
    uint64_t at = (hash >> 1) & untold->mask; /* all are odd */
    while (untold->hashes[at] && untold->hashes[at] != hash)
        at = (at + 1) & untold->mask;
    return &untold->hashes[at];
}

/* False: no memory. */
static bool grow(struct untold *untold) {
    struct untold grown = *untold;
    grown.mask = untold->hashes ? untold->mask * 2 + 1 : UNTOLD_MIN - 1;
    grown.hashes = calloc(grown.mask + 1, sizeof(*grown.hashes));
    if (!grown.hashes)
        return false;
    for (uint64_t i = 0; untold->hashes && i <= untold->mask; i++)
        if (untold->hashes[i])
            *hash_place(&grown, untold->hashes[i]) = untold->hashes[i];
    free(untold->hashes);
    *untold = grown;
    return true;
}

void untold_add(struct kvfs_names *names, uint64_t parent, const char *name, uint32_t name_size) {
    struct untold *untold = &names->untold;
    if ((!untold->hashes || untold->count * 2 > untold->mask) && !grow(untold)) {
        untold->all = true;
        return;
    }
    uint64_t hash = name_hash_of(names, parent, name, name_size) | 1, *place = hash_place(untold, hash);
    untold->count += !*place;
    *place = hash;
}

static void untold_clear(struct untold *untold) {
    free(untold->hashes);
    *untold = (struct untold){0};
}

bool names_is_untold(const struct kvfs_names *names, uint64_t parent, const char *name, uint32_t name_size) {
    const struct untold *untold = &names->untold;
    return untold->all || (untold->count && *hash_place(untold, name_hash_of(names, parent, name, name_size) | 1));
}

void kvfs_names_untold(struct kvfs_names *names, uint64_t parent, const char *name, uint32_t name_size) {
    pthread_mutex_lock(&names->lock);
    if (name_size)
        untold_add(names, parent, name, name_size);
    else
        untold_clear(&names->untold);
    pthread_mutex_unlock(&names->lock);
}
