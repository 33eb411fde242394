/* Processes that use files, as far as their order tells of chains and of uses. Those that load and store the blocks of a prefix do so from its head on.
 * And a walk, which looks at all there is, uses nothing.
 *
 * All is a guess and a hint. A place may be another process's in the next moment. */
#include "base/descriptor.h"
#include "content/chains.h"
#include "content/content.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* A thread's number may be another process's after a while. */
#define THREAD_KNOWN_S 10u
/* Files that are stored one after another are of one prefix; one that is begun so long after the last may be of another. */
#define BURST_MS 100u

static uint64_t milliseconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000 + 1000;
}

/* The process of a thread: Tgid in /proc/TID/status (proc(5)). The thread itself if there is no telling. */
static uint32_t process_read(uint32_t thread) {
    char path[32], text[512];
    snprintf(path, sizeof(path), "/proc/%u/status", thread);
    int fd = descriptor_above(open(path, O_RDONLY | O_CLOEXEC));
    if (fd < 0)
        return thread;
    ssize_t size = read(fd, text, sizeof(text) - 1);
    close(fd);
    text[size > 0 ? size : 0] = 0;
    const char *line = strstr(text, "\nTgid:");
    unsigned found = 0;
    return line && sscanf(line, "\nTgid: %u", &found) == 1 && found ? found : thread;
}

static uint64_t key_of(struct caller caller, uint32_t number) { return (uint64_t)caller.guest << 32 | number; }

static struct thread *thread_of(struct kvfs_plane *plane, struct caller caller) {
    struct thread *thread = &plane->processes.threads[(caller.thread ^ caller.guest * 31u) % THREADS_KNOWN];
    uint64_t key = key_of(caller, caller.thread);
    uint32_t now = (uint32_t)(milliseconds_now() / 1000);
    bool known = atomic_load_explicit(&thread->key, memory_order_relaxed) == key;
    if (known && now - atomic_load_explicit(&thread->read_s, memory_order_relaxed) < THREAD_KNOWN_S)
        return thread;
    /* A guest's threads are its own business: each is taken for a process. */
    uint32_t process = caller.guest ? caller.thread : process_read(caller.thread);
    if (!known || atomic_load_explicit(&thread->process, memory_order_relaxed) != process)
        atomic_store_explicit(&thread->listed, false, memory_order_relaxed);
    atomic_store_explicit(&thread->process, process, memory_order_relaxed);
    atomic_store_explicit(&thread->key, key, memory_order_relaxed);
    atomic_store_explicit(&thread->read_s, now, memory_order_relaxed);
    return thread;
}

static struct process *process_of(struct kvfs_plane *plane, struct caller caller, const struct thread *thread) {
    uint32_t number = atomic_load_explicit(&thread->process, memory_order_relaxed);
    struct process *process = &plane->processes.all[(number ^ caller.guest * 31u) % PROCESSES_KNOWN];
    uint64_t key = key_of(caller, number);
    if (atomic_load_explicit(&process->key, memory_order_relaxed) != key) {
        atomic_store_explicit(&process->last, 0, memory_order_relaxed);
        atomic_store_explicit(&process->made_ms, 0, memory_order_relaxed);
        atomic_store_explicit(&process->did, 0, memory_order_relaxed);
        atomic_store_explicit(&process->key, key, memory_order_relaxed);
    }
    return process;
}

/* A walk lists directories: in one thread, or as a process that stores nothing. Engines list theirs at the start, and go on with stores. */
static bool is_walk(const struct thread *thread, uint32_t did) {
    return atomic_load_explicit(&thread->listed, memory_order_relaxed) || (did & (PROCESS_LISTS | PROCESS_STORES)) == PROCESS_LISTS;
}

void process_lists(struct kvfs_plane *plane, struct caller caller) {
    struct thread *thread = thread_of(plane, caller);
    struct process *process = process_of(plane, caller, thread);
    atomic_store_explicit(&thread->listed, true, memory_order_relaxed);
    atomic_fetch_or_explicit(&process->did, PROCESS_LISTS, memory_order_relaxed);
}

bool process_opens(struct kvfs_plane *plane, struct caller caller, const struct kvfs_record *block) {
    const struct thread *thread = thread_of(plane, caller);
    struct process *process = process_of(plane, caller, thread);
    if (is_walk(thread, atomic_load_explicit(&process->did, memory_order_relaxed)))
        return false;
    atomic_fetch_or_explicit(&process->did, PROCESS_LOADS, memory_order_relaxed);
    atomic_store_explicit(&process->last, block->inode, memory_order_relaxed);
    atomic_store_explicit(&process->made_ms, 0, memory_order_relaxed);
    return true;
}

void process_looks(struct kvfs_plane *plane, struct caller caller, const struct kvfs_record *block) {
    const struct thread *thread = thread_of(plane, caller);
    struct process *process = process_of(plane, caller, thread);
    uint32_t did = atomic_load_explicit(&process->did, memory_order_relaxed);
    if (!(did & (PROCESS_LOADS | PROCESS_STORES)) || is_walk(thread, did))
        return;
    uint64_t last = atomic_exchange_explicit(&process->last, block->inode, memory_order_relaxed);
    struct kvfs_record before;
    /* Blocks of a prefix, looked up from its head on. A poller of some file uses nothing. */
    if (last && last != block->inode && kvfs_table_find_inode(plane->table, last, &before) == 0 &&
        kvfs_chains_parent(plane->chains, block->slot) == before.slot) {
        use_look(plane, &before);
        use_look(plane, block);
    }
    atomic_store_explicit(&process->made_ms, 0, memory_order_relaxed);
}

void process_makes(struct kvfs_plane *plane, struct caller caller, uint64_t inode) {
    struct thread *thread = thread_of(plane, caller);
    struct process *process = process_of(plane, caller, thread);
    atomic_store_explicit(&thread->listed, false, memory_order_relaxed);
    atomic_fetch_or_explicit(&process->did, PROCESS_STORES, memory_order_relaxed);
    uint64_t before = atomic_exchange_explicit(&process->last, inode, memory_order_relaxed), now = milliseconds_now();
    uint64_t made = atomic_exchange_explicit(&process->made_ms, now, memory_order_relaxed);
    bool follows = !made || now - made <= BURST_MS;
    if (before && before != inode && follows && names_try(plane->names)) {
        inode_follow(plane, inode, before);
        kvfs_names_end(plane->names);
    }
}

void process_made(struct kvfs_plane *plane, struct caller caller) {
    struct process *process = process_of(plane, caller, thread_of(plane, caller));
    if (atomic_load_explicit(&process->made_ms, memory_order_relaxed))
        atomic_store_explicit(&process->made_ms, milliseconds_now(), memory_order_relaxed);
}
