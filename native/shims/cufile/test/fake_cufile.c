/* Test double of a libcufile that has a driver but refuses every file, as one without its compatibility mode does on FUSE. Its
 * cuFileObjectInitialize() prints the arguments that arrived. */
#include <stddef.h>

struct status {
    int error, cuda_error;
};

struct status cuFileDriverOpen(void) { return (struct status){0, 0}; }
struct status cuFileDriverClose_v2(void) { return (struct status){0, 0}; }
long cuFileUseCount(void) { return 1; }
struct status cuFileGetVersion(int *out) {
    *out = 1999;
    return (struct status){0, 0};
}
struct status cuFileHandleRegister(void **out, void *description) {
    (void)out;
    return (struct status){description ? 5008 : 5022, 0};
}
struct status cuFileBufRegister(const void *base, size_t size, int flags) {
    (void)flags;
    return (struct status){base && size ? 0 : 5022, 0};
}
long cuFileRead(void *handle, void *base, size_t size, long file_offset, long buffer_offset) {
    (void)handle, (void)base, (void)size, (void)file_offset, (void)buffer_offset;
    return -4711;
}
struct status cuFileBatchIOSetUp(void **out, unsigned count) {
    static int batch;
    *out = &batch;
    return (struct status){count ? 0 : 5022, 0};
}
struct status cuFileBatchIOSubmit(void *batch, unsigned count, void *items, unsigned flags) {
    (void)batch, (void)count, (void)items, (void)flags;
    return (struct status){5027, 0};
}
struct status cuFileBatchIOCancel(void *batch) { return (struct status){batch ? 0 : 5047, 0}; }
void cuFileBatchIODestroy(void *batch) { (void)batch; }

long cuFileObjectInitialize(long a, long b, long c, long d, long e, long f, long g, long h, double x, double y) {
    return a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + (long)(x * 100) + (long)(y * 1000);
}
