/* Shared by the C tests of the plane: wait for a completion, as a loop without Python's event loop does. */
#ifndef KVFS_TEST_COMPLETIONS_H
#define KVFS_TEST_COMPLETIONS_H

#include "base/base.h"
#include "kvfs_plane.h"

#include <unistd.h>

/* Whether one was taken within timeout_ms. */
static inline bool wait_completion(struct kvfs_plane *of, struct kvfs_completion *out, uint32_t timeout_ms) {
    for (uint64_t until = now_ns() + timeout_ms * UINT64_C(1000000); kvfs_take_completions(of, out, 1) != 1; usleep(100))
        if (now_ns() >= until)
            return false;
    return true;
}

#endif
