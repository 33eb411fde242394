/* The table of reservations: whose they are, when they expire, and what becomes of those that nobody commits. Entering is in commit.c, making in
 * reserve.c. */
#include "content/content.h"

static struct reservation *of_turn(struct link *link) { return (struct reservation *)(void *)((char *)link - offsetof(struct reservation, turn)); }
static struct reservation *of_owned(struct link *link) { return (struct reservation *)(void *)((char *)link - offsetof(struct reservation, owned)); }
static struct reservation **bucket_of(struct kvfs_plane *plane, uint64_t number) {
    return &plane->reservations.by_number[number % RESERVATION_BUCKETS];
}

void reservations_init(struct kvfs_plane *plane) {
    link_init(&plane->reservations.open);
    link_init(&plane->reservations.returned);
    link_init(&plane->reservations.changed);
    plane->reservations.share_pages = UINT64_MAX;
    plane->reservations.open_max = UINT32_MAX;
}

void reservations_free(struct kvfs_plane *plane) {
    for (uint32_t i = 0; i < RESERVATION_BUCKETS; i++)
        for (struct reservation *at = plane->reservations.by_number[i], *next; at; at = next) {
            next = at->next;
            free(at->record);
            free(at);
        }
}

/* ---- holders ---- */

struct kvfs_holder *kvfs_holder_create(struct kvfs_plane *plane, uint32_t uid) {
    struct holder *holder = calloc(1, sizeof(*holder));
    if (!holder)
        return NULL;
    link_init(&holder->reservations);
    holder->user = user_get(plane, uid);
    kvfs_names_begin(plane->names);
    plane->reservations.users += !holder->user->clients++;
    kvfs_names_end(plane->names);
    return &holder->told;
}

void kvfs_holder_leave(struct kvfs_plane *plane, struct kvfs_holder *told) {
    struct holder *holder = (struct holder *)(void *)told;
    kvfs_names_begin(plane->names);
    while (!link_empty(&holder->reservations)) {
        struct reservation *reservation = of_owned(holder->reservations.after);
        if (reservation->open)
            reservation_take_back(plane, reservation, false, true);
        else
            reservation_end_late(plane, reservation);
    }
    assert(!told->open && !told->open_pages && !told->late_pages && holder->user->clients > 0);
    plane->reservations.users -= !--holder->user->clients;
    plane->reservations.gains++;
    kvfs_names_end(plane->names);
}

void kvfs_holder_free(struct kvfs_plane *plane, struct kvfs_holder *told) {
    struct holder *holder = (struct holder *)(void *)told;
    kvfs_names_begin(plane->names);
    assert(!told->count && !told->pages && !told->late_pages);
    if (holder->changed.after)
        link_drop(&holder->changed);
    kvfs_names_end(plane->names);
    free(holder);
}

uint64_t kvfs_holder_late(struct kvfs_plane *plane, struct kvfs_holder *told) {
    struct holder *holder = (struct holder *)(void *)told;
    kvfs_names_begin(plane->names);
    const struct reservation *oldest = link_empty(&holder->reservations) ? NULL : of_owned(holder->reservations.after);
    uint64_t until = oldest && !oldest->open ? oldest->until : UINT64_MAX;
    kvfs_names_end(plane->names);
    return until;
}

/* So many pages more count as reserved that nobody can commit, or less. */
static void count_resting(struct kvfs_plane *plane, struct user *user, uint64_t more, uint64_t less) {
    atomic_fetch_add(&user->reserved, more - less);
    user->resting += more - less;
    plane->reservations.resting += more - less;
    plane->reservations.gains += less > more;
}

static void limits(const struct kvfs_plane *plane, const struct holder *holder, uint64_t *own, uint64_t *resting) {
    const struct reservations *all = &plane->reservations;
    const struct user *user = holder->user;
    bool alone = !user->resting && all->users == (user->clients > 0);
    uint64_t half = all->share_pages / 2, reserved = atomic_load(&user->reserved) + half;
    *own = alone ? all->share_pages : half;
    *resting = all->resting > all->share_pages ? all->resting : min_u64(all->resting, half);
    if (!alone && reserved > all->pages && reserved - all->pages > *resting)
        *resting = reserved - all->pages;
}

int reservation_ask(struct kvfs_plane *plane, const struct holder *holder, uint64_t pages) {
    const struct reservations *all = &plane->reservations;
    const struct kvfs_holder *told = &holder->told;
    uint64_t own, resting;
    limits(plane, holder, &own, &resting);
    if (all->pages + resting + pages > all->share_pages || all->open_count >= all->open_max)
        /* Others' go in time; one's own only with a commit that comes after this answer. */
        return told->open_pages + pages > own || told->open >= all->open_max / 2 ? -ENOSPC : KVFS_FRAME_ROOM;
    /* Those that are to be buried go in time, and late ones as their holder says that nothing can land there. */
    if (told->count - told->open >= all->open_max / 2)
        return KVFS_FRAME_ROOM;
    return pages > user_room(plane, holder->user) / PAGE ? -ENOSPC : 0;
}

void kvfs_reservations_limit(struct kvfs_plane *plane, uint64_t share_pages, uint32_t open_max) {
    kvfs_names_begin(plane->names);
    plane->reservations.share_pages = share_pages;
    plane->reservations.open_max = open_max;
    plane->reservations.gains++;
    kvfs_names_end(plane->names);
}

void kvfs_reservations_rested(struct kvfs_plane *plane, uint32_t uid, uint64_t pages) {
    kvfs_names_begin(plane->names);
    count_resting(plane, user_get(plane, uid), 0, pages);
    kvfs_names_end(plane->names);
}

void kvfs_directories_changed(struct kvfs_plane *plane, int moved) {
    kvfs_names_begin(plane->names);
    plane->reservations.moves += moved != 0;
    atomic_fetch_add(&plane->reservations.changes, 1);
    kvfs_names_end(plane->names);
}

/* ---- what Python takes in ---- */

bool reservations_have_come(struct kvfs_plane *plane, uint64_t *gains) {
    kvfs_names_begin(plane->names);
    bool awaited = plane->reservations.awaited > 0 || !link_empty(&plane->reservations.returned);
    bool come = awaited && plane->reservations.gains != *gains;
    if (come)
        *gains = plane->reservations.gains;
    kvfs_names_end(plane->names);
    return come;
}

bool holder_change(struct kvfs_plane *plane, struct holder *holder) {
    kvfs_names_begin(plane->names);
    bool moved = holder->moved;
    holder->moved = false;
    if (moved && !holder->changed.after)
        link_add(&plane->reservations.changed, &holder->changed);
    kvfs_names_end(plane->names);
    return moved;
}

/* All in one step: its caller would never be done with a list to which the thread of clients adds meanwhile. */
uint32_t kvfs_holders_changed(struct kvfs_plane *plane, struct kvfs_holder **out, uint32_t capacity) {
    uint32_t count = 0;
    kvfs_names_begin(plane->names);
    while (count < capacity && !link_empty(&plane->reservations.changed)) {
        struct holder *holder = (void *)((char *)plane->reservations.changed.after - offsetof(struct holder, changed));
        link_drop(&holder->changed);
        out[count++] = &holder->told;
    }
    kvfs_names_end(plane->names);
    return count;
}

void reservation_charge(struct kvfs_plane *plane, struct holder *holder, uint64_t pages) {
    atomic_fetch_add(&holder->user->reserved, pages);
    holder->told.pages += pages;
    holder->told.count++;
    holder->moved = true;
    plane->reservations.pages += pages;
}

void reservation_discharge(struct kvfs_plane *plane, struct holder *holder, uint64_t pages) {
    assert(holder->told.pages >= pages && plane->reservations.pages >= pages && atomic_load(&holder->user->reserved) >= pages);
    atomic_fetch_sub(&holder->user->reserved, pages);
    holder->told.pages -= pages;
    holder->moved = true;
    plane->reservations.pages -= pages;
    plane->reservations.gains++;
}

/* ---- one reservation ---- */

struct reservation *reservation_find(struct kvfs_plane *plane, const struct holder *holder, uint64_t number) {
    struct reservation *at = *bucket_of(plane, number);
    while (at && at->number != number)
        at = at->next;
    return at && at->holder == holder && at->lent ? at : NULL;
}

void reservation_open(struct kvfs_plane *plane, struct reservation *reservation, struct link *made) {
    struct reservations *all = &plane->reservations;
    struct kvfs_place *places = names_places(plane->names)->all;
    reservation->number = ++all->last_number;
    struct reservation **bucket = bucket_of(plane, reservation->number);
    reservation->next = *bucket;
    *bucket = reservation;
    link_add(&reservation->holder->reservations, &reservation->owned);
    link_add(made, &reservation->turn);
    reservation->open = reservation->lent = reservation->unburied = true;
    reservation->holder->told.open++;
    reservation->holder->told.open_pages += reservation->pages;
    all->open_count++;
    for (uint32_t i = 0; i < reservation->run_count; i++) {
        places[reservation->runs[i].segment].lent++;
        place_note(plane->names, reservation->runs[i].segment, KVFS_NOTE_CHANGED);
    }
}

void reservations_stamp(struct kvfs_plane *plane, struct link *made, uint64_t until) {
    while (!link_empty(made)) {
        struct reservation *reservation = of_turn(made->after);
        link_drop(&reservation->turn);
        reservation->until = until;
        link_add(&plane->reservations.open, &reservation->turn);
        reservation->holder->moved = true; /* there is one more to expire */
    }
}

/* It cannot be committed any more. */
static void close_one(struct kvfs_plane *plane, struct reservation *reservation) {
    struct kvfs_holder *told = &reservation->holder->told;
    assert(reservation->open && told->open > 0 && told->open_pages >= reservation->pages && plane->reservations.open_count > 0);
    reservation->open = false;
    link_drop(&reservation->turn);
    told->open--;
    told->open_pages -= reservation->pages;
    reservation->holder->moved = true;
    plane->reservations.open_count--;
    plane->reservations.gains++;
}

/* `rest`: the client is gone, and what it had under way may still land. */
static void end_lending(struct kvfs_plane *plane, struct reservation *reservation, bool rest) {
    struct kvfs_place *places = names_places(plane->names)->all;
    assert(reservation->lent);
    reservation->lent = false;
    reservation->rests = rest;
    reservation->holder->moved = true;
    link_drop(&reservation->owned);
    if (!reservation->unburied) {
        reservation->holder->told.late_pages -= reservation->pages;
        count_resting(plane, reservation->holder->user, 0, reservation->pages);
    }
    for (uint32_t i = 0; i < reservation->run_count; i++) {
        struct kvfs_place *place = &places[reservation->runs[i].segment];
        assert(place->lent > 0);
        place->lent--;
        place_note(plane->names, reservation->runs[i].segment, KVFS_NOTE_CHANGED | (rest ? KVFS_NOTE_RESTS : 0));
    }
}

static void unless_needed(struct kvfs_plane *plane, struct reservation *reservation) {
    if (reservation->lent || reservation->unburied)
        return;
    struct reservation **at = bucket_of(plane, reservation->number);
    while (*at != reservation)
        at = &(*at)->next;
    *at = reservation->next;
    if (reservation->rests) {
        reservation->holder->told.rested_pages += reservation->pages;
        count_resting(plane, reservation->holder->user, reservation->pages, 0);
    }
    reservation->holder->told.count--;
    reservation->holder->moved = true;
    free(reservation->record);
    free(reservation);
}

/* Runs and version are in flight no more. */
static struct settled *end_runs(struct kvfs_plane *plane, struct reservation *reservation) {
    struct settled *told = NULL, **last = &told;
    for (uint32_t i = 0; i < reservation->run_count; i++) {
        *last = place_end(plane->names, reservation->runs[i].segment, reservation->runs[i].page, NULL);
        while (*last)
            last = &(*last)->next;
    }
    version_end(&reservation->version);
    reservation_discharge(plane, reservation->holder, reservation->pages);
    reservation->unburied = false;
    if (reservation->lent) {
        reservation->holder->told.late_pages += reservation->pages;
        count_resting(plane, reservation->holder->user, reservation->pages, 0);
    }
    return told;
}

struct settled *reservation_end(struct kvfs_plane *plane, struct reservation *reservation) {
    close_one(plane, reservation);
    end_lending(plane, reservation, false);
    struct settled *told = end_runs(plane, reservation);
    unless_needed(plane, reservation);
    return told;
}

void reservation_take_back(struct kvfs_plane *plane, struct reservation *reservation, bool late, bool begun) {
    close_one(plane, reservation);
    plane->reservations.reclaimed++;
    free(reservation->record);
    reservation->record = NULL;
    if (!late)
        end_lending(plane, reservation, begun);
    link_add(&plane->reservations.returned, &reservation->turn);
}

void reservation_end_late(struct kvfs_plane *plane, struct reservation *reservation) {
    assert(!reservation->open);
    end_lending(plane, reservation, true);
    unless_needed(plane, reservation);
}

/* ---- taking back ---- */

uint32_t kvfs_reservations_expire(struct kvfs_plane *plane, uint64_t now, uint64_t *next) {
    const struct link *open = &plane->reservations.open;
    uint32_t count = 0;
    kvfs_names_begin(plane->names);
    for (; count < KVFS_EXPIRED_MAX && !link_empty(open) && of_turn(open->after)->until <= now; count++)
        reservation_take_back(plane, of_turn(open->after), true, true);
    *next = link_empty(open) ? UINT64_MAX : of_turn(open->after)->until;
    kvfs_names_end(plane->names);
    return count;
}

uint64_t kvfs_reservation_returned(struct kvfs_plane *plane, const struct kvfs_run **runs, uint32_t *run_count) {
    struct link *returned = &plane->reservations.returned;
    uint64_t number = 0;
    kvfs_names_begin(plane->names);
    if (!link_empty(returned)) {
        struct reservation *reservation = of_turn(returned->after);
        link_drop(&reservation->turn);
        *runs = reservation->runs; /* until it is buried */
        *run_count = reservation->run_count;
        number = reservation->number;
    }
    kvfs_names_end(plane->names);
    return number;
}

void kvfs_reservation_buried(struct kvfs_plane *plane, uint64_t number) {
    kvfs_names_begin(plane->names);
    struct reservation *reservation = *bucket_of(plane, number);
    while (reservation && reservation->number != number)
        reservation = reservation->next;
    assert(reservation && !reservation->open && reservation->unburied && !reservation->turn.after);
    struct settled *told = end_runs(plane, reservation);
    unless_needed(plane, reservation);
    kvfs_names_end(plane->names);
    settled_tell(told);
}

void kvfs_reservation_statistics_get(struct kvfs_plane *plane, struct kvfs_reservation_statistics *out) {
    const struct reservations *all = &plane->reservations;
    kvfs_names_begin(plane->names);
    *out =
        (struct kvfs_reservation_statistics){all->open_count, all->pages, all->resting, all->committed, all->superseded, all->reclaimed, all->gains};
    kvfs_names_end(plane->names);
}
