/* WRITEs that wait: for the end of a seal or spill, for a slab, or for staging. */
#include "content/content.h"

static void append(struct kvfs_plane *plane, struct request **first, struct request **last, struct request *request) {
    assert(request->write);
    assert(request->resume);
    assert(!*first == !*last);
    request->next = NULL;
    if (*last)
        (*last)->next = request;
    else
        *first = request;
    *last = request;
    COUNT(plane, parked, 1);
}

static void resume_all(struct kvfs_plane *plane, struct request *request) {
    while (request) {
        struct request *next = request->next;
        unsigned long long before = atomic_fetch_sub(&plane->count.parked, 1);
        assert(before > 0);
        request->resume(request);
        request = next;
    }
}

void file_park(struct kvfs_plane *plane, struct file *file, struct request *request) {
    assert(is_locked(&request->node->lock));
    assert(request->node->file == file);
    append(plane, &file->parked, &file->parked_last, request);
}

void file_unpark(struct kvfs_plane *plane, struct file *file) {
    struct request *request = file->parked;
    file->parked = file->parked_last = NULL;
    resume_all(plane, request);
}

bool memory_park(struct kvfs_plane *plane, struct request *request, uint64_t unparks) {
    pthread_mutex_lock(&plane->request_lock);
    bool parks = atomic_load(&plane->unparks) == unparks;
    if (parks)
        append(plane, &plane->memory_parked, &plane->memory_parked_last, request);
    pthread_mutex_unlock(&plane->request_lock);
    return parks;
}

void memory_unpark(struct kvfs_plane *plane) {
    pthread_mutex_lock(&plane->request_lock);
    atomic_fetch_add(&plane->unparks, 1);
    struct request *request = plane->memory_parked;
    plane->memory_parked = plane->memory_parked_last = NULL;
    pthread_mutex_unlock(&plane->request_lock);
    resume_all(plane, request);
}
