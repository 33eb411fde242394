/* Counters of the calls, written as one line of JSON when the process ends. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/descriptor.h"
#include "shim.h"

struct counters counters;

/* KVFS_CUFILE_STATS=FILE: at the end, one line of JSON is added to it. */
static __attribute__((destructor)) void report(void) {
    const char *path = getenv("KVFS_CUFILE_STATS");
    char line[512];
    if (!path || !atomic_load(&counters.handles))
        return;
    int fd = descriptor_above(open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    int size = snprintf(line, sizeof(line),
                        "{\"pid\": %d, \"handles\": %llu, \"native_reads\": %llu, \"native_bytes\": %llu, \"gpu_bytes\": %llu, "
                        "\"forwarded_reads\": %llu, \"forwarded_bytes\": %llu, \"writes\": %llu, \"batches\": %llu, "
                        "\"async_reads\": %llu}\n",
                        (int)getpid(), atomic_load(&counters.handles), atomic_load(&counters.native_reads), atomic_load(&counters.native_bytes),
                        atomic_load(&counters.gpu_bytes), atomic_load(&counters.forwarded_reads), atomic_load(&counters.forwarded_bytes),
                        atomic_load(&counters.writes), atomic_load(&counters.batches), atomic_load(&counters.async_reads));
    if (fd >= 0) {
        if (write(fd, line, (size_t)size) != size)
            fprintf(stderr, "libkvfs_cufile: KVFS_CUFILE_STATS=%s: cannot be written\n", path);
        close(fd);
    }
}
