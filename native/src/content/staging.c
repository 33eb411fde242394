/* Memory of files being written: what each user has of it, and which files give theirs up where it is short.
 *
 * A user beyond the share leaves one share to others. A user who may have no more waits while files are spilled. These are the user's own, if the user is
 * beyond the share, else those of users who are, else anybody's. Files that were not written lately go first, whatever their size. */
#include "content/content.h"

#define LOOKED_MAX 4096u        /* files, of one user in one go */
#define FAILED_NS 1000000000ull /* a file whose spill has failed is left alone for so long */
#define TRIES 3u                /* spills that devices fail, before nobody waits for the file's next: as Python's of a seal, each to other segments */
#define SHORT_NS 10000000000ull
#define BATCH_PART 16u /* of staging, is asked for at once */

static struct user *owner(struct kvfs_plane *plane, const struct file *file) { return file->payer ? file->payer : &plane->users[USERS_MAX]; }

/* ---- the lists: files with staged bytes, by user, that of the longest stay first. All with the lock held ---- */

static void list_add(struct staged_list *list, struct file *file) {
    file->staged_next = NULL;
    file->staged_previous = list->last;
    if (list->last)
        list->last->staged_next = file;
    else
        list->first = file;
    list->last = file;
    list->count++;
}

static void list_remove(struct staged_list *list, struct file *file) {
    assert(list->count > 0);
    assert(file->staged_previous || list->first == file);
    assert(file->staged_next || list->last == file);
    if (file->staged_previous)
        file->staged_previous->staged_next = file->staged_next;
    else
        list->first = file->staged_next;
    if (file->staged_next)
        file->staged_next->staged_previous = file->staged_previous;
    else
        list->last = file->staged_previous;
    list->count--;
}

static void asked_add(struct kvfs_plane *plane, struct file *file, uint64_t bytes) {
    file->asked_bytes += bytes; /* modulo 2^64, as all three, where it shrinks */
    owner(plane, file)->staged.asked_bytes += bytes;
    plane->asked_bytes += bytes;
}

void staged_count(struct kvfs_plane *plane, struct file *file, int64_t bytes) {
    pthread_mutex_lock(&plane->staged_lock);
    struct user *user = owner(plane, file);
    uint64_t before = file->staged_bytes;
    file->staged_bytes += (uint64_t)bytes;
    assert(bytes >= 0 || before >= (uint64_t)-bytes);
    atomic_fetch_add(&user->staged_bytes, (uint64_t)bytes);
    atomic_fetch_add(&plane->staged_bytes, (uint64_t)bytes);
    if (!before && file->staged_bytes)
        list_add(&user->staged, file);
    else if (before && !file->staged_bytes)
        list_remove(&user->staged, file);
    pthread_mutex_unlock(&plane->staged_lock);
}

void staged_charge(struct kvfs_plane *plane, struct file *file, struct user *user) {
    pthread_mutex_lock(&plane->staged_lock);
    uint64_t asked = file->asked_bytes;
    asked_add(plane, file, 0 - asked);
    if (file->staged_bytes)
        list_remove(&owner(plane, file)->staged, file);
    atomic_fetch_sub(&owner(plane, file)->staged_bytes, file->staged_bytes);
    file->payer = user;
    atomic_fetch_add(&owner(plane, file)->staged_bytes, file->staged_bytes);
    if (file->staged_bytes)
        list_add(&owner(plane, file)->staged, file);
    asked_add(plane, file, asked);
    pthread_mutex_unlock(&plane->staged_lock);
}

/* ---- spills ---- */

/* With the lock held. False: the event was lost, for want of memory. */
static bool ask(struct kvfs_plane *plane, struct file *file, bool whole) {
    if (!event_add(plane, KVFS_EVENT_SPILL, file->inode, file->staged_bytes))
        return false;
    file->spill_asked = true;
    file->spill_whole = whole;
    asked_add(plane, file, file->staged_bytes);
    return true;
}

void spill_ask(struct kvfs_plane *plane, struct file *file) {
    pthread_mutex_lock(&plane->staged_lock);
    if (!file->spill_asked && now_ns() >= file->spill_failed_until_ns)
        ask(plane, file, false);
    pthread_mutex_unlock(&plane->staged_lock);
}

bool spill_is_whole(struct kvfs_plane *plane, const struct file *file) {
    pthread_mutex_lock(&plane->staged_lock);
    bool whole = file->spill_whole;
    pthread_mutex_unlock(&plane->staged_lock);
    return whole;
}

void spill_ended(struct kvfs_plane *plane, struct file *file, int error) {
    const uint64_t now = now_ns();
    pthread_mutex_lock(&plane->staged_lock);
    asked_add(plane, file, 0 - file->asked_bytes);
    file->spill_asked = file->spill_whole = false;
    file->spill_failed_until_ns = error ? now + FAILED_NS : 0;
    if (error == -EIO) {
        owner(plane, file)->staged.failed_ns = plane->spill_failed_ns = now;
        file->spill_tries += file->spill_tries < TRIES;
    } else {
        file->spill_tries = error ? TRIES : 0; /* where there is no place for it, nobody waits for one */
    }
    pthread_mutex_unlock(&plane->staged_lock);
}

/* Asks spills of a user's files until *need bytes will come, those first that nobody has written to since the last look. True: others will do the next
 * time. */
static bool victims_ask(struct kvfs_plane *plane, struct user *user, uint64_t *need, uint64_t now) {
    struct staged_list *list = &user->staged;
    bool later = false;
    const uint32_t lap = list->count;
    for (uint32_t looked = 0; *need && looked < lap * 2ull && looked < LOOKED_MAX; looked++) {
        struct file *file = list->first;
        list_remove(list, file);
        list_add(list, file);
        if (file->spill_asked)
            continue;
        if (now < file->spill_failed_until_ns) {
            later |= file->spill_tries < TRIES;
            continue;
        }
        if (atomic_exchange_explicit(&file->touched, false, memory_order_relaxed)) {
            later = true;
            continue;
        }
        /* One that is being written on keeps its last chunk, which is not full: the next write would load it again. */
        if (ask(plane, file, looked < lap || file->staged_bytes <= CHUNK_SIZE * 2))
            *need -= min_u64(*need, file->staged_bytes);
    }
    return later;
}

/* Whether the user has more than the share, if `more` bytes come. */
static bool beyond(struct kvfs_plane *plane, const struct user *user, uint64_t more) {
    return atomic_load(&user->staged_bytes) + more > atomic_load(&plane->staging_share) && !user_is_exempt(plane, user);
}

static bool lacks(struct kvfs_plane *plane, const struct user *user, uint64_t more) {
    uint64_t has = atomic_load(&plane->staged_bytes) + more, size = plane->config.staging_size, share = atomic_load(&plane->staging_share);
    return has > size || (beyond(plane, user, more) && has + min_u64(share, size) > size);
}

/* Whether memory will come back: that of `only`, or if it is NULL anybody's. */
static bool reclaim(struct kvfs_plane *plane, struct user *only, uint64_t more) {
    const uint64_t now = now_ns(), want = more + plane->config.staging_size / BATCH_PART;
    pthread_mutex_lock(&plane->staged_lock);
    uint64_t asked = only ? only->staged.asked_bytes : plane->asked_bytes, need = asked < want ? want - asked : 0;
    bool later = false;
    if (only)
        later = victims_ask(plane, only, &need, now);
    for (int pass = only ? 2 : 0; pass < 2; pass++)
        for (uint32_t i = 0; i <= USERS_MAX && need; i++)
            if (plane->users[i].staged.count && (pass == 1 || beyond(plane, &plane->users[i], 0)))
                later |= victims_ask(plane, &plane->users[i], &need, now);
    bool comes = later || (only ? only->staged.asked_bytes : plane->asked_bytes);
    pthread_mutex_unlock(&plane->staged_lock);
    return comes;
}

/* The error of a WRITE for which no memory comes. A device's fault is not told as a want of space. */
static int refusal(struct kvfs_plane *plane, struct user *own, uint64_t arrived_ns) {
    pthread_mutex_lock(&plane->staged_lock);
    uint64_t failed_ns = own ? own->staged.failed_ns : plane->spill_failed_ns;
    pthread_mutex_unlock(&plane->staged_lock);
    int error = atomic_load(&plane->space_error); /* EIO: no device takes anything */
    if (error == EIO || (failed_ns && failed_ns + FAILED_NS > arrived_ns))
        return -EIO;
    return own ? -EDQUOT : error ? -error : -ENOSPC;
}

int staging_ask(struct kvfs_plane *plane, struct node *node, struct request *request, uint64_t more) {
    assert(is_locked(&node->lock));
    struct user *user = owner(plane, node->file);
    if (!more)
        return 0;
    bool own;
    for (;;) {
        uint64_t unparks = atomic_load(&plane->unparks);
        if (!lacks(plane, user, more))
            return 0;
        own = beyond(plane, user, more);
        const uint64_t now = now_ns();
        bool waits = now - request->arrived_ns < plane->config.request_timeout_ms * 1000000ull && reclaim(plane, own ? user : NULL, more);
        atomic_store_explicit(&plane->staging_short_until_ns, now + SHORT_NS, memory_order_relaxed);
        if (!waits) {
            if (!lacks(plane, user, more)) /* the last spill has just ended */
                return 0;
            break;
        }
        if (!request->waited)
            COUNT(plane, staging_waits, 1);
        request->waited = true;
        if (memory_park(plane, request, unparks))
            return -EAGAIN;
    }
    COUNT(plane, staging_refusals, 1);
    atomic_fetch_add_explicit(&user->staging_refusals, 1, memory_order_relaxed);
    return refusal(plane, own ? user : NULL, request->arrived_ns);
}

bool staging_is_short(struct kvfs_plane *plane) { return now_ns() < atomic_load_explicit(&plane->staging_short_until_ns, memory_order_relaxed); }

bool staging_fills(struct kvfs_plane *plane, const struct file *file) {
    uint64_t size = plane->config.staging_size, bytes = atomic_load(&plane->staged_bytes);
    return file->staged_bytes > size / 4 || bytes > (beyond(plane, owner(plane, file), 0) ? size / 2 : size / 4 * 3);
}

void kvfs_set_staging_share(struct kvfs_plane *plane, uint64_t bytes) {
    atomic_store(&plane->staging_share, bytes < STAGING_SHARE_MIN ? STAGING_SHARE_MIN : bytes);
}
