/* The CUDA driver's functions that libkvfs uses, found at run time. Own declarations: the API is stable, its header is not ours. */
#ifndef KVFS_GPU_DRIVER_H
#define KVFS_GPU_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvfs_gpu.h"

#define CUDA_SUCCESS 0
#define CUDA_ERROR_INVALID_VALUE 1
#define CUDA_ERROR_INVALID_CONTEXT 201
#define CUDA_ERROR_NOT_READY 600
#define CUDA_MEMHOSTREGISTER_PORTABLE 1u
#define CUDA_STREAM_NON_BLOCKING 1u
#define CUDA_EVENT_DISABLE_TIMING 2u
#define CUDA_MEMORYTYPE_HOST 1u
#define CUDA_MEMORYTYPE_DEVICE 2u
#define CUDA_MEMORYTYPE_UNIFIED 4u
#define CUDA_DEVICE_CAPABILITY_MAJOR 75
#define CUDA_DEVICE_CAPABILITY_MINOR 76
#define CUDA_POINTER_CONTEXT 1
#define CUDA_POINTER_MEMORY_TYPE 2
#define CUDA_POINTER_DEVICE_ORDINAL 9
#define CUDA_POINTER_RANGE_START 11
#define CUDA_POINTER_RANGE_SIZE 12

typedef struct cuda_context_object *cuda_context;
typedef struct cuda_stream_object *cuda_stream;
typedef struct cuda_event_object *cuda_event;
typedef struct cuda_module_object *cuda_module;
typedef struct cuda_function_object *cuda_function;
typedef uint64_t cuda_pointer;

/* X(function, version, parameters): the symbol is the function with the version behind it, that of the 64-bit API since CUDA 4. */
#define GPU_DRIVER_FUNCTIONS(X)                                                                                                         \
    X(cuInit, "", (unsigned flags))                                                                                                     \
    X(cuGetErrorName, "", (int error, const char **name))                                                                               \
    X(cuDeviceGetCount, "", (int *count))                                                                                               \
    X(cuDeviceGet, "", (int *device, int ordinal))                                                                                      \
    X(cuDevicePrimaryCtxRetain, "", (cuda_context * context, int device))                                                               \
    X(cuDevicePrimaryCtxRelease, "_v2", (int device))                                                                                   \
    X(cuCtxPushCurrent, "_v2", (cuda_context context))                                                                                  \
    X(cuCtxPopCurrent, "_v2", (cuda_context * context))                                                                                 \
    X(cuPointerGetAttributes, "", (unsigned count, int *attributes, void **data, cuda_pointer pointer))                                 \
    X(cuMemHostRegister, "_v2", (void *memory, size_t size, unsigned flags))                                                            \
    X(cuMemHostUnregister, "", (void *memory))                                                                                          \
    X(cuMemcpyHtoDAsync, "_v2", (cuda_pointer to, const void *from, size_t size, cuda_stream stream))                                   \
    X(cuStreamCreate, "", (cuda_stream * stream, unsigned flags))                                                                       \
    X(cuStreamDestroy, "_v2", (cuda_stream stream))                                                                                     \
    X(cuStreamIsCapturing, "", (cuda_stream stream, int *status))                                                                       \
    X(cuStreamQuery, "", (cuda_stream stream))                                                                                          \
    X(cuStreamWaitEvent, "", (cuda_stream stream, cuda_event event, unsigned flags))                                                    \
    X(cuEventCreate, "", (cuda_event * event, unsigned flags))                                                                          \
    X(cuEventDestroy, "_v2", (cuda_event event))                                                                                        \
    X(cuEventRecord, "", (cuda_event event, cuda_stream stream))                                                                        \
    X(cuEventQuery, "", (cuda_event event))                                                                                             \
    X(cuDeviceGetAttribute, "", (int *value, int attribute, int device))                                                                \
    X(cuDeviceGetUuid, "", (uint8_t *uuid, int device))                                                                                 \
    X(cuMemAlloc, "_v2", (cuda_pointer * memory, size_t size))                                                                          \
    X(cuMemFree, "_v2", (cuda_pointer memory))                                                                                          \
    X(cuMemsetD8, "_v2", (cuda_pointer to, unsigned char value, size_t size))                                                           \
    X(cuMemcpyDtoH, "_v2", (void *to, cuda_pointer from, size_t size))                                                                  \
    X(cuMemcpyDtoHAsync, "_v2", (void *to, cuda_pointer from, size_t size, cuda_stream stream))                                         \
    X(cuStreamSynchronize, "", (cuda_stream stream))                                                                                    \
    X(cuModuleLoadData, "", (cuda_module * module, const void *image))                                                                  \
    X(cuModuleUnload, "", (cuda_module module))                                                                                         \
    X(cuModuleGetFunction, "", (cuda_function * function, cuda_module module, const char *name))                                        \
    X(cuLaunchKernel, "",                                                                                                               \
      (cuda_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z, \
       unsigned shared_size, cuda_stream stream, void **parameters, void **extra))

struct gpu_driver {
#define GPU_DRIVER_MEMBER(function, version, parameters) int(*function) parameters;
    GPU_DRIVER_FUNCTIONS(GPU_DRIVER_MEMBER)
#undef GPU_DRIVER_MEMBER
};

/* Load libcuda, once a process. 0, -ENODEV, -ECHILD. */
int driver_load(const struct gpu_driver **out);
/* The name of a library: from an option, else from the environment, else `otherwise`. */
const char *library_name(const char *option, const char *variable, const char *otherwise);
/* -EIO, with the message. */
int cuda_fail(const struct gpu_driver *driver, int device, const char *what, int error);
/* 0, or -EIO with the message. `who` has a driver and a device. */
#define CUDA(who, function, ...)                                                         \
    ({                                                                                   \
        int cuda_error = (who)->driver->function(__VA_ARGS__);                           \
        cuda_error ? cuda_fail((who)->driver, (who)->device, #function, cuda_error) : 0; \
    })
#define STALL_TIMEOUTS 5 /* of the client's, until work on the GPU that does not end means that the GPU hangs */

#endif
