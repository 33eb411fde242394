/* The locks of the registry and of the batches over a fork(). */
#include <pthread.h>

#include "shim.h"

static void before_fork(void) {
    registry_lock();
    batches_lock();
}

static void in_parent(void) {
    batches_unlock();
    registry_unlock();
}

static void in_child(void) {
    fork_count++;
    registry_forked();
    mounts_forked();
    cuda_forked();
    batches_forked();
}

static void prepare(void) { pthread_atfork(before_fork, in_parent, in_child); }

void fork_guard(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, prepare);
}
