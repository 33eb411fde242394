/* libkvfs_preload, which takes a program's calls over, has its own of these. The header says what each is for. */
#include "base/descriptor.h"
#include "io/ring.h"

__attribute__((noinline)) int kvfs_own_descriptor(int fd) { return descriptor_above(fd); }
__attribute__((noinline)) void kvfs_own_thread(void) {}
