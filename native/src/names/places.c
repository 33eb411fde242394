/* Places of blocks in segments: the next page, live pages, runs in flight in their order. Python opens, closes and frees segments
 * (kvfs/store/segments.py); it takes notes of all that happens here. */
#include "names/names.h"

struct kvfs_place *kvfs_places_make(struct kvfs_names *names, uint32_t segment_count, uint32_t end_page, uint64_t tick_pages) {
    struct places *places = names_places(names);
    assert(!places->all);
    places->all = calloc(segment_count, sizeof(*places->all));
    places->runs = calloc(segment_count, sizeof(*places->runs));
    places->noted = calloc(segment_count, sizeof(*places->noted));
    if (!places->all || !places->runs || !places->noted) {
        places_free(places);
        return NULL;
    }
    for (uint32_t i = 0; i < segment_count; i++)
        places->all[i].next_page = 1;
    places->count = segment_count;
    places->end_page = end_page;
    places->tick_pages = tick_pages;
    places->client_count = 1;
    for (uint32_t i = 0; i < KVFS_HEADS; i++)
        places->heads[i] = (struct head){.segment = UINT32_MAX, .closed = i != KVFS_HEAD_NEW};
    return places->all;
}

void place_note(struct kvfs_names *names, uint32_t segment, uint32_t notes) {
    struct places *places = names_places(names);
    assert(segment < places->count);
    if (!places->all[segment].notes) {
        assert(places->noted_count < places->count);
        places->noted[places->noted_count++] = segment;
    }
    places->all[segment].notes |= notes;
}

uint32_t kvfs_places_noted(struct kvfs_names *names, struct kvfs_noted *out, uint32_t capacity) {
    kvfs_names_begin(names);
    struct places *places = names_places(names);
    uint32_t count = 0;
    while (count < capacity && places->noted_count) {
        uint32_t segment = places->noted[--places->noted_count];
        out[count++] = (struct kvfs_noted){segment, places->all[segment].notes};
        places->all[segment].notes = 0;
    }
    kvfs_names_end(names);
    return count;
}

/* ---- runs ---- */

/* False: no memory. */
static bool run_add(struct kvfs_names *names, uint32_t segment, uint32_t pages) {
    struct places *places = names_places(names);
    struct kvfs_place *place = &places->all[segment];
    struct place_runs *runs = &places->runs[segment];
    struct run *run = calloc(1, sizeof(*run));
    if (!run)
        return false;
    run->page = place->next_page;
    run->page_count = pages;
    assert(!runs->last || runs->last->page < run->page);
    if (runs->last)
        runs->last->next = run;
    else
        runs->first = run;
    runs->last = run;
    place->next_page += pages;
    place->run_count++;
    place->first_page = runs->first->page;
    places->written += pages;
    return true;
}

static struct run *run_find(const struct places *places, uint32_t segment, uint32_t page) {
    struct run *run = places->runs[segment].first;
    while (run && run->page != page)
        run = run->next;
    return run;
}

uint32_t kvfs_place_take(struct kvfs_names *names, uint32_t segment, uint32_t pages) {
    kvfs_names_begin(names);
    uint32_t page = names_places(names)->all[segment].next_page;
    assert(page + (uint64_t)pages <= names_places(names)->end_page);
    bool taken = run_add(names, segment, pages);
    kvfs_names_end(names);
    return taken ? page : 0; /* page 0 is the segment's header: no run begins there */
}

/* The head goes on to the next segment of the supply; false: there is none. */
static bool lead_next(struct kvfs_names *names, struct head *head) {
    struct places *places = names_places(names);
    if (!places->supply_count)
        return false;
    if (head->segment != UINT32_MAX)
        place_note(names, head->segment, KVFS_NOTE_LEFT);
    head->segment = places->supply[0].segment;
    head->generation = places->supply[0].generation;
    memmove(places->supply, places->supply + 1, --places->supply_count * sizeof(places->supply[0]));
    place_note(names, head->segment, KVFS_NOTE_LED);
    places->wake = true;
    return true;
}

/* A tail shorter than this is not worth an extent of its own (kvfs/store/segments.py). */
#define PIECE_PAGES_MIN 16

static uint32_t head_room(const struct places *places, const struct head *head) {
    return head->segment == UINT32_MAX ? 0 : places->end_page - places->all[head->segment].next_page;
}

/* The head has room for it. */
static bool head_take(struct kvfs_names *names, const struct head *head, uint32_t pages, struct kvfs_run *out) {
    struct places *places = names_places(names);
    assert(pages <= head_room(places, head));
    *out = (struct kvfs_run){head->generation, head->segment, places->all[head->segment].next_page, pages, 0};
    place_note(names, head->segment, KVFS_NOTE_CHANGED);
    return run_add(names, head->segment, pages);
}

int place_take(struct kvfs_names *names, uint32_t number, uint32_t header_pages, uint32_t data_pages, struct kvfs_run runs[PLACE_RUNS_MAX]) {
    struct places *places = names_places(names);
    struct head *head = &places->heads[number];
    const uint64_t area = places->end_page - 1, pages = (uint64_t)header_pages + data_pages;
    if (pages > area)
        return -EAGAIN;
    if (head->closed)
        return -ENOSPC;
    while (head_room(places, head) < pages) {
        uint32_t room = head_room(places, head);
        /* As Segments._allocate() has it: a block goes into one segment unless that wastes too much of this one, or it is large anyway. */
        bool spans = (pages > area / 4 || room > area / 16) && room >= header_pages + PIECE_PAGES_MIN;
        if (spans && places->supply_count) {
            if (!head_take(names, head, room, &runs[0]))
                return -ENOMEM;
            lead_next(names, head);
            if (head_take(names, head, (uint32_t)pages - room + 1, &runs[1]))
                return 2;
            place_fail(names, runs[0].segment, runs[0].page);
            return -ENOMEM;
        }
        if (spans || !lead_next(names, head))
            return -ENOSPC;
    }
    return head_take(names, head, (uint32_t)pages, &runs[0]) ? 1 : -ENOMEM;
}

uint32_t place_client_head(const struct kvfs_names *names) {
    const struct places *places = names_places((struct kvfs_names *)(uintptr_t)names);
    uint32_t best = KVFS_HEAD_NEW + 1;
    for (uint32_t i = 0, least = UINT32_MAX; i < places->client_count; i++) {
        const struct head *head = &places->heads[KVFS_HEAD_NEW + 1 + i];
        if (head->held)
            continue;
        uint32_t in_flight = head->segment == UINT32_MAX ? 0 : places->all[head->segment].run_count;
        if (in_flight < least) {
            least = in_flight;
            best = KVFS_HEAD_NEW + 1 + i;
        }
    }
    return best;
}

void kvfs_place_clients(struct kvfs_names *names, uint32_t count) {
    kvfs_names_begin(names);
    names_places(names)->client_count = count < KVFS_CLIENT_HEADS ? count : KVFS_CLIENT_HEADS;
    kvfs_names_end(names);
}

void kvfs_place_head(struct kvfs_names *names, uint32_t head, uint32_t segment, uint64_t generation) {
    kvfs_names_begin(names);
    bool held = segment == KVFS_PLACE_HELD, none = held || segment == UINT32_MAX;
    assert(head < KVFS_HEADS && (none || segment < names_places(names)->count));
    names_places(names)->heads[head] = (struct head){generation, none ? UINT32_MAX : segment, none, held};
    kvfs_names_end(names);
}

uint32_t kvfs_place_lead(struct kvfs_names *names, uint32_t head) {
    kvfs_names_begin(names);
    uint32_t segment = names_places(names)->heads[head].segment;
    kvfs_names_end(names);
    return segment;
}

int kvfs_place_supply(struct kvfs_names *names, uint32_t segment, uint64_t generation) {
    kvfs_names_begin(names);
    struct places *places = names_places(names);
    int r = places->supply_count < KVFS_SUPPLY_MAX ? 0 : -ENOSPC;
    if (r == 0) {
        places->supply[places->supply_count].segment = segment;
        places->supply[places->supply_count++].generation = generation;
    }
    kvfs_names_end(names);
    return r;
}

int kvfs_place_withdraw(struct kvfs_names *names, uint32_t segment) {
    kvfs_names_begin(names);
    struct places *places = names_places(names);
    uint32_t i = 0;
    while (i < places->supply_count && places->supply[i].segment != segment)
        i++;
    bool there = i < places->supply_count;
    if (there)
        memmove(places->supply + i, places->supply + i + 1, (--places->supply_count - i) * sizeof(places->supply[0]));
    kvfs_names_end(names);
    return there;
}

struct settled *place_end(struct kvfs_names *names, uint32_t segment, uint32_t page, struct settled *own) {
    struct places *places = names_places(names);
    struct kvfs_place *place = &places->all[segment];
    struct place_runs *runs = &places->runs[segment];
    struct run *run = run_find(places, segment, page);
    struct settled *told = NULL, **last = &told;
    assert(run && !run->ended);
    run->ended = true;
    run->settled = own;
    assert(place->run_count > 0);
    place->run_count--;
    bool first = run == runs->first;
    while (runs->first && runs->first->ended) {
        struct run *ended = runs->first;
        runs->first = ended->next;
        if (!runs->first)
            runs->last = NULL;
        if (ended->settled) {
            *last = ended->settled;
            last = &ended->settled->next;
            *last = NULL;
        }
        free(ended);
    }
    place->first_page = runs->first ? runs->first->page : 0;
    place_note(names, segment, KVFS_NOTE_CHANGED | (first ? KVFS_NOTE_SETTLED : 0));
    places->wake |= first && place->awaited;
    return told;
}

void kvfs_place_release(struct kvfs_names *names, uint32_t segment, uint32_t page) {
    kvfs_names_begin(names);
    struct settled *told = place_end(names, segment, page, NULL);
    kvfs_names_end(names);
    settled_tell(told);
}

void settled_tell(struct settled *list) {
    for (struct settled *next; list; list = next) {
        next = list->next;
        list->told(list);
    }
}

void place_fail(struct kvfs_names *names, uint32_t segment, uint32_t page) {
    struct run *run = run_find(names_places(names), segment, page);
    assert(run && !run->ended);
    run->failed = true;
    place_note(names, segment, KVFS_NOTE_FAILED);
    names_places(names)->wake = true;
}

int kvfs_place_failed(struct kvfs_names *names, uint32_t segment, struct kvfs_failed_run *out) {
    kvfs_names_begin(names);
    struct run *run = names_places(names)->runs[segment].first;
    while (run && !run->failed)
        run = run->next;
    if (run) {
        run->failed = false;
        *out = (struct kvfs_failed_run){.page = run->page, .page_count = run->page_count};
    }
    kvfs_names_end(names);
    return run != NULL;
}

uint64_t kvfs_places_written(struct kvfs_names *names) {
    kvfs_names_begin(names);
    uint64_t written = names_places(names)->written;
    kvfs_names_end(names);
    return written;
}

void places_live(struct kvfs_names *names, struct kvfs_weight *segments, uint32_t count) {
    const struct places *places = names_places(names);
    for (uint32_t i = 0; i < count && i < places->count; i++)
        segments[i].live = __atomic_load_n(&places->all[i].live_pages, __ATOMIC_RELAXED);
}

uint32_t place_tick(const struct kvfs_names *names) {
    const struct places *places = names_places((struct kvfs_names *)(uintptr_t)names);
    return (uint32_t)(places->written / places->tick_pages);
}

/* ---- live pages ---- */

static void count_pages(struct kvfs_names *names, uint32_t segment, uint64_t pages, int sign) {
    struct places *places = names_places(names);
    assert(segment < places->count);
    struct kvfs_place *place = &places->all[segment];
    if (sign > 0)
        place->live_pages += (uint32_t)pages;
    else
        place->live_pages -= (uint32_t)min_u64(pages, place->live_pages);
    place_note(names, segment, KVFS_NOTE_CHANGED | (sign > 0 ? KVFS_NOTE_ENTERED : 0));
}

void place_account(struct kvfs_names *names, const struct kvfs_inode_record *record, int sign) {
    if (record->kind != KVFS_KIND_FILE || !(record->flags & KVFS_INODE_SEALED))
        return;
    const struct kvfs_extent *extents = record_extents(record);
    count_pages(names, record->segment, record->header_pages + (record->extent_count ? 0 : pages_of(record->size)), sign);
    for (uint32_t i = 0; i < record->extent_count; i++)
        count_pages(names, extents[i].segment, extents[i].page_count, sign);
}

uint64_t record_pages(const struct kvfs_inode_record *record, uint32_t segment) {
    if (record->kind != KVFS_KIND_FILE || !(record->flags & KVFS_INODE_SEALED))
        return 0;
    bool all = segment == UINT32_MAX;
    uint64_t pages = all || record->segment == segment ? record->header_pages + (record->extent_count ? 0 : pages_of(record->size)) : 0;
    const struct kvfs_extent *extents = record_extents(record);
    for (uint32_t i = 0; i < record->extent_count; i++)
        pages += all || extents[i].segment == segment ? extents[i].page_count : 0;
    return pages;
}
