/* Checks of memory that a caller names, before a transfer touches it. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shim.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* Faults missing pages in, and fails where a store would. Needs Linux 5.14; before, and for memory of devices, the answer is no. */
bool host_memory_is_good(const void *memory, uint64_t size) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)memory & ~(page - 1), end = (uintptr_t)memory + size;
    int r;
    if (end < start)
        return false;
    do
        r = madvise((void *)start, end - start, MADV_POPULATE_WRITE);
    while (r < 0 && (errno == EINTR || errno == EAGAIN));
    return r == 0;
}

bool memory_is_mapped(const void *memory, uint64_t size) {
    uintptr_t at = (uintptr_t)memory, end = at + size, from, to;
    char line[512], access[8];
    if (cuda_memory_kind(memory))
        return true;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && at < end && fgets(line, sizeof(line), maps))
        if (sscanf(line, "%lx-%lx %7s", &from, &to, access) == 3 && from <= at && at < to && access[0] == 'r' && access[1] == 'w')
            at = to;
    if (maps)
        fclose(maps);
    return end > (uintptr_t)memory && at >= end;
}

bool memory_is_good(const void *memory, uint64_t size) { return cuda_memory_kind(memory) != 0 || host_memory_is_good(memory, size); }
