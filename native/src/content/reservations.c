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

struct kvfs_holder *kvfs_holder_create(struct kvfs_plane *plane) {
    (void)plane;
    struct holder *holder = calloc(1, sizeof(*holder));
    if (!holder)
        return NULL;
    link_init(&holder->reservations);
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
    assert(!told->open && !told->open_pages && !told->late_pages);
    kvfs_names_end(plane->names);
}

void kvfs_holder_free(struct kvfs_holder *holder) {
    assert(!holder->count && !holder->pages && !holder->late_pages);
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

void reservation_charge(struct kvfs_plane *plane, struct holder *holder, uint64_t pages) {
    holder->told.pages += pages;
    holder->told.count++;
    plane->reservations.pages += pages;
}

void reservation_discharge(struct kvfs_plane *plane, struct holder *holder, uint64_t pages) {
    assert(holder->told.pages >= pages && plane->reservations.pages >= pages);
    holder->told.pages -= pages;
    plane->reservations.pages -= pages;
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
    plane->reservations.open_count--;
}

/* `rest`: the client is gone, and what it had under way may still land. */
static void end_lending(struct kvfs_plane *plane, struct reservation *reservation, bool rest) {
    struct kvfs_place *places = names_places(plane->names)->all;
    assert(reservation->lent);
    reservation->lent = false;
    reservation->rests = rest;
    link_drop(&reservation->owned);
    if (!reservation->unburied)
        reservation->holder->told.late_pages -= reservation->pages;
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
    if (reservation->rests)
        reservation->holder->told.rested_pages += reservation->pages;
    reservation->holder->told.count--;
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
    if (reservation->lent)
        reservation->holder->told.late_pages += reservation->pages;
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

uint64_t kvfs_reservations_next(struct kvfs_plane *plane) {
    struct link *open = &plane->reservations.open;
    return link_empty(open) ? UINT64_MAX : of_turn(open->after)->until;
}

uint32_t kvfs_reservations_expire(struct kvfs_plane *plane, uint64_t now) {
    struct link *open = &plane->reservations.open;
    uint32_t count = 0;
    kvfs_names_begin(plane->names);
    for (; !link_empty(open) && of_turn(open->after)->until <= now; count++)
        reservation_take_back(plane, of_turn(open->after), true, true);
    kvfs_names_end(plane->names);
    return count;
}

uint64_t kvfs_reservation_returned(struct kvfs_plane *plane, const struct kvfs_run **runs, uint32_t *run_count) {
    struct link *returned = &plane->reservations.returned;
    if (link_empty(returned))
        return 0;
    struct reservation *reservation = of_turn(returned->after);
    link_drop(&reservation->turn);
    *runs = reservation->runs;
    *run_count = reservation->run_count;
    return reservation->number;
}

void kvfs_reservation_buried(struct kvfs_plane *plane, uint64_t number) {
    struct reservation *reservation = *bucket_of(plane, number);
    while (reservation && reservation->number != number)
        reservation = reservation->next;
    assert(reservation && !reservation->open && reservation->unburied && !reservation->turn.after);
    kvfs_names_begin(plane->names);
    struct settled *told = end_runs(plane, reservation);
    unless_needed(plane, reservation);
    kvfs_names_end(plane->names);
    settled_tell(told);
}

void kvfs_reservation_statistics_get(struct kvfs_plane *plane, struct kvfs_reservation_statistics *out) {
    const struct reservations *all = &plane->reservations;
    *out = (struct kvfs_reservation_statistics){all->open_count, all->pages, all->committed, all->superseded, all->reclaimed};
}
