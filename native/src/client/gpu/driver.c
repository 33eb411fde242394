/* libcuda: found at run time, and its errors in words. */
#include "client/gpu/driver.h"
#include "client/client.h"

#include <dlfcn.h>
#include <unistd.h>

const char *library_name(const char *option, const char *variable, const char *otherwise) {
    const char *name = option && *option ? option : getenv(variable);
    return name && *name ? name : otherwise;
}

int driver_load(const struct gpu_driver **out) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct gpu_driver driver;
    static pid_t loaded;
    const char *path = library_name(NULL, "KVFS_CUDA_LIBRARY", "libcuda.so.1"), *missing = NULL;
    int r = 0;
    pthread_mutex_lock(&lock);
    if (loaded && loaded != getpid())
        r = client_fail(-ECHILD, "CUDA was started by process %d and does not survive fork(): start processes by spawn", (int)loaded);
    if (!loaded) {
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!library)
            r = client_fail(-ENODEV, "no CUDA here: %s", dlerror());
#define LOAD(function, version, parameters)                \
    if (library) {                                         \
        void *symbol = dlsym(library, #function version);  \
        memcpy(&driver.function, &symbol, sizeof(symbol)); \
        missing = symbol ? missing : #function version;    \
    }
        GPU_DRIVER_FUNCTIONS(LOAD)
#undef LOAD
        if (missing) {
            r = client_fail(-ENODEV, "%s lacks %s: a CUDA driver older than 10.0?", path, missing);
            dlclose(library);
        }
        int error = r == 0 ? driver.cuInit(0) : 0;
        if (error) {
            const char *name = NULL;
            r = client_fail(-ENODEV, "no GPU here: cuInit: %s", driver.cuGetErrorName(error, &name) == 0 && name ? name : "unknown error");
        }
        loaded = r == 0 ? getpid() : 0;
    }
    pthread_mutex_unlock(&lock);
    *out = &driver;
    return r;
}

int cuda_fail(const struct gpu_driver *driver, int device, const char *what, int error) {
    const char *name = NULL;
    if (driver->cuGetErrorName(error, &name) || !name)
        name = "unknown error";
    return client_fail(-EIO, "GPU %d: %s: %s (%d)", device, what, name, error);
}

int kvfs_gpu_device_of(const void *pointer) {
    const struct gpu_driver *driver;
    unsigned type = 0;
    int ordinal = -1, attributes[] = {CUDA_POINTER_MEMORY_TYPE, CUDA_POINTER_DEVICE_ORDINAL}, r = driver_load(&driver);
    void *data[] = {&type, &ordinal};
    if (r < 0)
        return r;
    cuda_context context = NULL;
    int error = driver->cuPointerGetAttributes(2, attributes, data, (cuda_pointer)(uintptr_t)pointer);
    if (error == CUDA_ERROR_INVALID_CONTEXT && driver->cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS) { /* a thread without one */
        if (driver->cuCtxPushCurrent(context) == CUDA_SUCCESS) {
            error = driver->cuPointerGetAttributes(2, attributes, data, (cuda_pointer)(uintptr_t)pointer);
            driver->cuCtxPopCurrent(&context);
        }
        driver->cuDevicePrimaryCtxRelease(0);
    }
    if (error || ordinal < 0 || (type != CUDA_MEMORYTYPE_DEVICE && type != CUDA_MEMORYTYPE_UNIFIED))
        return client_fail(-EINVAL, "%p is no GPU memory", pointer);
    return ordinal;
}
