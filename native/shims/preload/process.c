/* State of the process that all files here use. */
#include "preload.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

atomic_bool preload_active;
atomic_int preload_pid;
_Thread_local unsigned preload_inside;
struct counters preload_count;

bool preload_is_owner(void) { return getpid() == atomic_load(&preload_pid); }

void preload_give_up(void) { atomic_store(&preload_active, false); }

uint64_t preload_now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

struct inside inside_begin(void) {
    struct inside inside = {.error = errno};
    preload_inside++;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &inside.cancel_state);
    return inside;
}

void inside_end(struct inside inside) {
    pthread_setcancelstate(inside.cancel_state, &inside.cancel_state);
    preload_inside--;
    errno = inside.error;
}

int real_close(int fd) { return REAL(int (*)(int), close)(fd); }
