/* sources: base block names io content pod frames fuse plane.c virtiofs */
/* FUSE over io_uring, the parts that need no kernel: its list of CPUs, the sizes of a request, and whose a number is. */
#include "check.h"

#include "fuse/fuse.h"

static void test_a_list_of_cpus_is_counted_and_nonsense_is_none(void) {
    CHECK(uring_cpus_count("0\n") == 1);
    CHECK(uring_cpus_count("0-1\n") == 2);
    CHECK(uring_cpus_count("0-3,8,10-11\n") == 7);
    CHECK(uring_cpus_count("0-191") == 192);
    CHECK(uring_cpus_count("") == 0);
    CHECK(uring_cpus_count("none") == 0);
    CHECK(uring_cpus_count("0-") == 0);
    CHECK(uring_cpus_count("3-1") == 0);
    CHECK(uring_cpus_count("0-4294967295") == 0);
}

static void test_sizes_that_do_not_fit_together_are_refused(void) {
    const uint32_t head = sizeof(struct fuse_in_header), write = sizeof(struct fuse_write_in);
    struct fuse_in_header in = {.opcode = FUSE_WRITE, .len = head + write + 4096};
    CHECK(uring_operation_size(&in, 4096, 1 << 20) == (int)write);
    CHECK(uring_operation_size(&in, 4096, 4096) == (int)write);
    CHECK(uring_operation_size(&in, 4096, 4095) == -EINVAL);    /* more than the buffer */
    CHECK(uring_operation_size(&in, 4095, 1 << 20) == -EINVAL); /* no fuse_write_in in front */
    CHECK(uring_operation_size(&in, 4097, 1 << 20) == -EINVAL);
    CHECK(uring_operation_size(&in, UINT32_MAX, UINT64_MAX) == -EINVAL);
    in = (struct fuse_in_header){.opcode = FUSE_LOOKUP, .len = head + 5};
    CHECK(uring_operation_size(&in, 5, 1 << 20) == 0);
    CHECK(uring_operation_size(&in, 0, 1 << 20) == 5);
    CHECK(uring_operation_size(&in, 6, 1 << 20) == -EINVAL); /* the whole is smaller than its parts */
    in.len = head + 128;
    CHECK(uring_operation_size(&in, 0, 1 << 20) == 128);
    in.len = head + 129; /* more than the header has room for */
    CHECK(uring_operation_size(&in, 0, 1 << 20) == -EINVAL);
    in.len = head - 1;
    CHECK(uring_operation_size(&in, 0, 1 << 20) == -EINVAL);
    in.len = 0;
    CHECK(uring_operation_size(&in, 0, 1 << 20) == -EINVAL);
}

/* A request that the kernel sends again has bit 63 in its number, also by /dev/fuse. Its answer is none of an entry. */
static void test_a_request_that_is_sent_again_is_none_of_the_rings(void) {
    const uint64_t again = (uint64_t)1 << 63, ours = (uint64_t)1 << 62;
    CHECK(!uring_owns(2));
    CHECK(!uring_owns(again | 2));
    CHECK(!uring_owns(again | (uint64_t)UINT32_MAX));
    CHECK(uring_owns(ours));
    CHECK(uring_owns(ours | (uint64_t)0x3fffffff << 32 | UINT32_MAX));
}

int main(void) {
    test_a_list_of_cpus_is_counted_and_nonsense_is_none();
    test_sizes_that_do_not_fit_together_are_refused();
    test_a_request_that_is_sent_again_is_none_of_the_rings();
    return 0;
}
