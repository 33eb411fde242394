/* Worker threads: each has a ring and does one blocking job at a time. */
#include "content/content.h"

static void *worker_main(void *argument) {
    struct worker *worker = argument;
    struct worker_pool *pool = worker->pool;
    for (;;) {
        pthread_mutex_lock(&pool->lock);
        while (!pool->first && !pool->stopping) {
            if (ring_idle(&worker->ring)) {
                pthread_cond_wait(&pool->more, &pool->lock);
            } else { /* a device still owes an answer: look for it now and then */
                struct timespec until;
                clock_gettime(CLOCK_REALTIME, &until);
                until.tv_nsec += 100000000;
                if (until.tv_nsec >= 1000000000)
                    until.tv_sec++, until.tv_nsec -= 1000000000;
                pthread_cond_timedwait(&pool->more, &pool->lock, &until);
                pthread_mutex_unlock(&pool->lock);
                ring_reap(&worker->ring);
                pthread_mutex_lock(&pool->lock);
            }
        }
        struct job *job = pool->first;
        if (job) {
            pool->first = job->next;
            if (!pool->first)
                pool->last = NULL;
        }
        pthread_mutex_unlock(&pool->lock);
        if (!job)
            return NULL;
        job->run(worker->plane, &worker->ring, job);
    }
}

int pool_start(struct kvfs_plane *plane, struct worker_pool *pool, uint32_t count) {
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->more, NULL);
    pool->workers = calloc(count, sizeof(*pool->workers));
    if (!pool->workers)
        return -ENOMEM;
    pool->count = count;
    for (uint32_t i = 0; i < count; i++) {
        struct worker *worker = &pool->workers[i];
        worker->plane = plane;
        worker->pool = pool;
        int r = ring_init(&worker->ring, &plane->array, 128);
        if (r == 0)
            r = -pthread_create(&worker->thread, NULL, worker_main, worker);
        if (r < 0)
            return r;
        worker->started = true;
    }
    return 0;
}

void pool_stop(struct worker_pool *pool) {
    if (!pool->workers)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->stopping = true;
    pthread_cond_broadcast(&pool->more);
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < pool->count; i++) {
        if (pool->workers[i].started)
            pthread_join(pool->workers[i].thread, NULL);
        ring_free(&pool->workers[i].ring);
    }
    free(pool->workers);
    pool->workers = NULL;
}

void pool_add(struct worker_pool *pool, struct job *job) {
    job->next = NULL;
    pthread_mutex_lock(&pool->lock);
    if (pool->last)
        pool->last->next = job;
    else
        pool->first = job;
    pool->last = job;
    pthread_cond_signal(&pool->more);
    pthread_mutex_unlock(&pool->lock);
}
