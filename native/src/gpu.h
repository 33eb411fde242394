/* The CUDA driver's functions that libkvfs uses, found at run time. Own declarations: the API is stable, its header is not ours. */
#ifndef KVFS_GPU_INTERNAL_H
#define KVFS_GPU_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

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
#define CUDA_POINTER_CONTEXT 1
#define CUDA_POINTER_MEMORY_TYPE 2
#define CUDA_POINTER_DEVICE_ORDINAL 9
#define CUDA_POINTER_RANGE_START 11
#define CUDA_POINTER_RANGE_SIZE 12

typedef struct cuda_context_object *cuda_context;
typedef struct cuda_stream_object *cuda_stream;
typedef struct cuda_event_object *cuda_event;
typedef uint64_t cuda_pointer;

/* X(function, version, parameters): the symbol is the function with the version behind it, that of the 64-bit API since CUDA 4. */
#define GPU_DRIVER_FUNCTIONS(X)                                                                         \
    X(cuInit, "", (unsigned flags))                                                                     \
    X(cuGetErrorName, "", (int error, const char **name))                                               \
    X(cuDeviceGetCount, "", (int *count))                                                               \
    X(cuDeviceGet, "", (int *device, int ordinal))                                                      \
    X(cuDevicePrimaryCtxRetain, "", (cuda_context *context, int device))                                \
    X(cuDevicePrimaryCtxRelease, "_v2", (int device))                                                   \
    X(cuCtxPushCurrent, "_v2", (cuda_context context))                                                  \
    X(cuCtxPopCurrent, "_v2", (cuda_context *context))                                                  \
    X(cuPointerGetAttributes, "", (unsigned count, int *attributes, void **data, cuda_pointer pointer)) \
    X(cuMemHostRegister, "_v2", (void *memory, size_t size, unsigned flags))                            \
    X(cuMemHostUnregister, "", (void *memory))                                                          \
    X(cuMemcpyHtoDAsync, "_v2", (cuda_pointer to, const void *from, size_t size, cuda_stream stream))   \
    X(cuStreamCreate, "", (cuda_stream *stream, unsigned flags))                                        \
    X(cuStreamDestroy, "_v2", (cuda_stream stream))                                                     \
    X(cuStreamIsCapturing, "", (cuda_stream stream, int *status))                                       \
    X(cuStreamQuery, "", (cuda_stream stream))                                                          \
    X(cuStreamWaitEvent, "", (cuda_stream stream, cuda_event event, unsigned flags))                    \
    X(cuEventCreate, "", (cuda_event *event, unsigned flags))                                           \
    X(cuEventDestroy, "_v2", (cuda_event event))                                                        \
    X(cuEventRecord, "", (cuda_event event, cuda_stream stream))                                        \
    X(cuEventQuery, "", (cuda_event event))

struct gpu_driver {
#define GPU_DRIVER_MEMBER(function, version, parameters) int(*function) parameters;
    GPU_DRIVER_FUNCTIONS(GPU_DRIVER_MEMBER)
#undef GPU_DRIVER_MEMBER
};

#endif
