/* Batches of cuFile: the items that lie in a pool are done by threads here, all others by the real library. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>

#include "base/base.h"
#include "shim.h"

#define THREADS_MAX 64
#define THREADS_DEFAULT 8
#define ITEM_SIZE_MAX ((size_t)1 << 30) /* larger ones are the real library's: memory is checked whole before an item is taken */
#define FOREIGN_POLL_NS 200000          /* waiting for both libraries at once */

struct job {
    struct job *next;
    struct batch *batch;
    struct handle *handle;
    struct cufile_item item;
    unsigned epoch;
    bool mapped;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all that follows, and of batches */
static pthread_cond_t queued = PTHREAD_COND_INITIALIZER;
static struct batch *batches;
static struct job *queue, **queue_end = &queue;
static unsigned thread_count, thread_idle;

/* ---- batches; locked ---- */

static struct batch **linked(void *key) {
    struct batch **link = &batches;
    while (*link && (*link)->key != key)
        link = &(*link)->next;
    return link;
}

static void put(struct batch *batch) {
    if (--batch->refs == 0) {
        pthread_cond_destroy(&batch->changed);
        free(batch);
    }
}

static void job_end(struct job *job) {
    handle_put(job->handle);
    put(job->batch);
    free(job);
}

/* Drops items that were submitted and not yet seen, and waits for reads that have begun. */
static void clear(struct batch *batch) {
    batch->epoch++;
    for (struct job **link = &queue, *job; (job = *link);) {
        if (job->batch != batch) {
            link = &job->next;
            continue;
        }
        *link = job->next;
        job_end(job);
    }
    queue_end = &queue;
    while (*queue_end)
        queue_end = &(*queue_end)->next;
    while (batch->running)
        pthread_cond_wait(&batch->changed, &lock);
    batch->waiting = batch->done_count = batch->foreign = 0;
}

struct batch *batch_find(void *key) {
    pthread_mutex_lock(&lock);
    struct batch *batch = *linked(key);
    if (batch)
        batch->refs++;
    pthread_mutex_unlock(&lock);
    return batch;
}

void batch_put(struct batch *batch) {
    pthread_mutex_lock(&lock);
    put(batch);
    pthread_mutex_unlock(&lock);
}

void batch_clear(struct batch *batch) {
    pthread_mutex_lock(&lock);
    clear(batch);
    pthread_mutex_unlock(&lock);
}

bool batch_add(void *real_batch, unsigned capacity, void **key) {
    struct batch *batch = calloc(1, sizeof(*batch));
    pthread_condattr_t attributes;
    if (!batch)
        return false;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&batch->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    batch->own = !real_batch;
    batch->key = real_batch ? real_batch : batch;
    batch->capacity = capacity;
    batch->refs = 1;
    *key = batch->key;
    pthread_mutex_lock(&lock);
    batch->next = batches;
    batches = batch;
    pthread_mutex_unlock(&lock);
    return true;
}

void batch_remove(void *key) {
    pthread_mutex_lock(&lock);
    struct batch **link = linked(key), *batch = *link;
    if (batch) {
        *link = batch->next;
        clear(batch);
        put(batch);
    }
    pthread_mutex_unlock(&lock);
}

bool batch_is_idle(struct batch *batch) {
    pthread_mutex_lock(&lock);
    bool idle = !batch->waiting && !batch->done_count;
    pthread_mutex_unlock(&lock);
    return idle;
}

void batches_forget(void) {
    pthread_mutex_lock(&lock);
    while (batches) {
        struct batch *batch = batches;
        batches = batch->next;
        clear(batch);
        put(batch);
    }
    pthread_mutex_unlock(&lock);
}

void batches_lock(void) { pthread_mutex_lock(&lock); }
void batches_unlock(void) { pthread_mutex_unlock(&lock); }

void batches_forked(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&queued, NULL);
    queue = NULL; /* the parent reads them */
    queue_end = &queue;
    thread_count = thread_idle = 0;
    for (struct batch *batch = batches; batch; batch = batch->next)
        batch->waiting = batch->running = 0;
}

/* ---- threads ---- */

static void run(struct job *job) {
    const struct cufile_item *item = &job->item;
    uint8_t *at = (uint8_t *)item->base + item->buffer_offset;
    int64_t result = -1;
    if (item->opcode == 0)
        result = native_read(job->handle, at, item->size, (uint64_t)item->file_offset, job->mapped);
    if (result < 0 && !job->handle->own) {
        result = real_read(job->handle, job->handle->key, item->base, item->size, item->file_offset, item->buffer_offset);
        result = result < 0 ? -errno : result;
    } else if (result < 0) {
        result = item->opcode ? descriptor_write(job->handle, at, item->size, (uint64_t)item->file_offset)
                              : descriptor_read(job->handle, at, item->size, (uint64_t)item->file_offset);
    }
    pthread_mutex_lock(&lock);
    struct batch *batch = job->batch;
    batch->running--;
    if (batch->epoch == job->epoch) {
        batch->waiting--;
        batch->done[batch->done_count++] = (struct cufile_event){item->cookie, result < 0 ? CUFILE_FAILED : CUFILE_COMPLETE, (size_t)result};
    }
    pthread_cond_broadcast(&batch->changed);
    job_end(job);
    pthread_mutex_unlock(&lock);
}

static struct job *next_job(void) {
    struct job *job = queue;
    if (job) {
        queue = job->next;
        if (!queue)
            queue_end = &queue;
        job->batch->running++;
    }
    return job;
}

static void *worker(void *unused) {
    for (;;) {
        struct job *job;
        pthread_mutex_lock(&lock);
        thread_idle++;
        while (!(job = next_job()))
            pthread_cond_wait(&queued, &lock);
        thread_idle--;
        pthread_mutex_unlock(&lock);
        run(job);
    }
    return unused;
}

static unsigned thread_limit(void) {
    const char *given = getenv("KVFS_CUFILE_THREADS");
    int count = given ? atoi(given) : THREADS_DEFAULT;
    return count < 1 ? 1 : count > THREADS_MAX ? THREADS_MAX : (unsigned)count;
}

/* False: there is no thread at all. Locked. */
static bool start_threads(unsigned wanted) {
    unsigned limit = thread_limit();
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (unsigned i = thread_idle; i < wanted && thread_count < limit; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, NULL) != 0)
            break;
        pthread_detach(thread);
        thread_count++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return thread_count > 0;
}

/* ---- submitting ---- */

enum verdict { VERDICT_REAL, VERDICT_OURS, VERDICT_EMPTY, VERDICT_ODD };
/* The verdict on an item; a higher value is the reason why the submit is refused. ODD: a read of a kvfs file that is not plain. */
static int judge(struct batch *batch, struct handle *handle, const struct cufile_item *item, struct buffer *buffer) {
    bool own = batch->own || (handle && handle->own);
    *buffer = buffer_find(item->base);
    if (!own && (!handle || item->opcode == 1))
        return VERDICT_REAL;
    int refused = own ? emulate_check_item(handle, item) : 0;
    if (refused)
        return refused;
    if (own && !item->size)
        return VERDICT_EMPTY;
    bool plain = own || (item->mode == 1 && item->opcode == 0 && item->buffer_offset >= 0 && item->size <= ITEM_SIZE_MAX &&
                         read_is_plain(handle, item->base, item->size, item->file_offset, item->buffer_offset, buffer));
    if (plain && (buffer->mapped || memory_is_good((uint8_t *)item->base + item->buffer_offset, item->size)))
        return VERDICT_OURS;
    return own ? CUFILE_SUBMIT_FAILED : VERDICT_ODD;
}

/* Our items become jobs, linked at *jobs; the others go into foreign. Returns 0, or the error by which the submit is refused. */
static int sort_items(struct batch *batch, unsigned count, const struct cufile_item *items, struct job **jobs, unsigned *job_count,
                      struct cufile_item *foreign, unsigned *foreign_count) {
    struct handle *handles[BATCH_SIZE_MAX];
    struct buffer buffers[BATCH_SIZE_MAX];
    int verdicts[BATCH_SIZE_MAX], error = 0;
    bool odd = false;
    for (unsigned i = 0; i < count; i++) {
        handles[i] = handle_find(items[i].handle);
        verdicts[i] = error ? VERDICT_EMPTY : judge(batch, handles[i], &items[i], &buffers[i]);
        odd = odd || verdicts[i] == VERDICT_ODD;
        if (verdicts[i] > VERDICT_ODD)
            error = verdicts[i] == CUFILE_SUBMIT_FAILED && i == 0 ? CUFILE_SUBMIT_REFUSED : verdicts[i];
    }
    for (unsigned i = 0; i < count && !error; i++) {
        /* The real library's answer to an odd item depends on the items beside it, so it then gets all of them. */
        bool ours = verdicts[i] == VERDICT_OURS && (!odd || handles[i]->own);
        struct job *job = ours ? calloc(1, sizeof(*job)) : NULL;
        if (job) {
            *job = (struct job){.batch = batch, .handle = handles[i], .item = items[i]};
            job->mapped = buffers[i].mapped || items[i].opcode == 0; /* or was seen to be a moment ago */
            handles[i] = NULL;
            *jobs = job;
            jobs = &job->next;
            ++*job_count;
        } else if (ours) {
            error = CUFILE_NO_MEMORY;
        } else if (verdicts[i] != VERDICT_EMPTY) {
            foreign[(*foreign_count)++] = items[i];
            if (handles[i] && items[i].opcode == 0)
                COUNT(forwarded_reads, 1);
        }
    }
    for (unsigned i = 0; i < count; i++)
        handle_put(handles[i]);
    return error;
}

struct cufile_status batch_submit(struct batch *batch, unsigned count, const struct cufile_item *items, unsigned flags) {
    struct job *jobs = NULL;
    struct cufile_item foreign[BATCH_SIZE_MAX];
    unsigned job_count = 0, foreign_count = 0, foreign_events = 0;
    int error = sort_items(batch, count, items, &jobs, &job_count, foreign, &foreign_count);
    for (unsigned i = 0; i < foreign_count; i++)
        foreign_events += foreign[i].size != 0; /* the real library reports no event of an empty item */
    pthread_mutex_lock(&lock);
    /* If all items are the real library's, its own count decides. */
    if (!error && batch->waiting + batch->done_count + job_count &&
        batch->waiting + batch->done_count + batch->foreign + job_count + foreign_events > batch->capacity)
        error = CUFILE_BATCH_FULL;
    if (!error && jobs && !start_threads(job_count))
        error = CUFILE_NO_MEMORY;
    pthread_mutex_unlock(&lock);
    struct cufile_status result = ERROR(error);
    if (!error && foreign_count)
        result = real()->BatchIOSubmit(batch->key, foreign_count, foreign, flags);
    else if (error && !batch->own)
        real()->BatchIOCancel(batch->key);
    pthread_mutex_lock(&lock);
    if (result.error) {
        clear(batch); /* like the real library: after an error, earlier items are reported no more */
        while (jobs) {
            struct job *job = jobs;
            jobs = job->next;
            handle_put(job->handle);
            free(job);
        }
    }
    batch->foreign += result.error ? 0 : foreign_events;
    for (struct job *job = jobs; job; job = job->next) {
        job->epoch = batch->epoch;
        batch->refs++;
        batch->waiting++;
    }
    *queue_end = jobs;
    while (*queue_end)
        queue_end = &(*queue_end)->next;
    pthread_cond_broadcast(&queued);
    pthread_mutex_unlock(&lock);
    COUNT(batches, 1);
    return result;
}

/* ---- waiting ---- */

static int64_t nanoseconds(const struct timespec *time) { return (int64_t)time->tv_sec * 1000000000 + time->tv_nsec; }

/* Locked: wait until there is news, or the time is over. */
static void wait_until(struct batch *batch, int64_t deadline_ns) {
    struct timespec time = {deadline_ns / 1000000000, deadline_ns % 1000000000};
    if (deadline_ns == INT64_MAX)
        pthread_cond_wait(&batch->changed, &lock);
    else
        pthread_cond_timedwait(&batch->changed, &lock, &time);
}

static unsigned take_done(struct batch *batch, struct cufile_event *events, unsigned room) {
    unsigned count = batch->done_count < room ? batch->done_count : room;
    for (unsigned i = 0; i < count; i++)
        events[i] = batch->done[i];
    batch->done_count -= count;
    for (unsigned i = 0; i < batch->done_count; i++)
        batch->done[i] = batch->done[i + count];
    return count;
}

/* Events of the real library; least 0: only those that are there. */
struct cufile_status batch_take_foreign(struct batch *batch, unsigned least, unsigned *count, struct cufile_event *events, struct timespec *timeout) {
    struct cufile_status result = real()->BatchIOGetStatus(batch->key, least, count, events, timeout);
    pthread_mutex_lock(&lock);
    if (result.error)
        *count = 0;
    batch->foreign -= *count < batch->foreign ? *count : batch->foreign;
    pthread_mutex_unlock(&lock);
    return result;
}

struct cufile_status batch_status(struct batch *batch, unsigned least, unsigned *count, struct cufile_event *events, struct timespec *timeout) {
    struct cufile_status result = OK;
    int64_t deadline_ns = timeout ? (int64_t)now_ns() + (nanoseconds(timeout) > 0 ? nanoseconds(timeout) : 0) : INT64_MAX;
    unsigned room = *count, got = 0;
    for (;;) {
        pthread_mutex_lock(&lock);
        got += take_done(batch, events + got, room - got);
        unsigned waiting = batch->waiting, foreign = batch->foreign;
        int64_t now = (int64_t)now_ns();
        if (waiting && !foreign && got < least && now < deadline_ns)
            wait_until(batch, deadline_ns);
        pthread_mutex_unlock(&lock);
        if (foreign && got < room) {
            /* Once no read is under way here, the real library may do the waiting. */
            int64_t left = deadline_ns == INT64_MAX || deadline_ns < now ? 0 : deadline_ns - now;
            struct timespec none = {0, 0}, rest = {left / 1000000000, left % 1000000000};
            bool last = !waiting && got < least;
            unsigned more = room - got;
            result = batch_take_foreign(batch, last ? least - got : 0, &more, events + got, !last ? &none : timeout ? &rest : NULL);
            got += more;
            if (result.error || last)
                break;
        }
        if (got >= least || !waiting || now >= deadline_ns)
            break;
        if (foreign) {
            int64_t poll_ns = now + FOREIGN_POLL_NS;
            pthread_mutex_lock(&lock);
            if (!batch->done_count && batch->waiting)
                wait_until(batch, poll_ns < deadline_ns ? poll_ns : deadline_ns);
            pthread_mutex_unlock(&lock);
        }
    }
    *count = got;
    return got ? OK : result;
}
