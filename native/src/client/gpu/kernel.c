/* The checksums as a kernel for the GPU: leaf.h, compiled by NVRTC. */
#include "client/client.h"
#include "client/gpu/driver.h"

#include <dlfcn.h>
#include <stdio.h>

#define GPU_LEAF(...) #__VA_ARGS__
static const char kernel_source[] = "#define GPU_KERNEL extern \"C\" __global__\n"
                                    "#define GPU_FUNCTION static __device__\n"
                                    "#define GPU_INDEX (blockIdx.x * (gpu_u64)blockDim.x + threadIdx.x)\n"
#include "client/gpu/leaf.h"
    ;

#define NVRTC_FUNCTIONS(X)                                                                                                                    \
    X(CreateProgram, (void **program, const char *source, const char *name, int headers, const char *const *texts, const char *const *names)) \
    X(CompileProgram, (void *program, int count, const char *const *options))                                                                 \
    X(GetProgramLogSize, (void *program, size_t *size))                                                                                       \
    X(GetProgramLog, (void *program, char *log))                                                                                              \
    X(GetPTXSize, (void *program, size_t *size))                                                                                              \
    X(GetPTX, (void *program, char *ptx))                                                                                                     \
    X(DestroyProgram, (void **program))

static int kernel_compile(const char *path, uint32_t capability, char **out) {
    static const char *const usual[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"};
    struct {
#define NVRTC_MEMBER(function, parameters) int(*function) parameters;
        NVRTC_FUNCTIONS(NVRTC_MEMBER)
#undef NVRTC_MEMBER
    } compiler;
    const char *missing = NULL;
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    for (size_t i = 0; !path && !library && i < sizeof(usual) / sizeof(usual[0]); i++)
        library = dlopen(usual[i], RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return client_fail(-EOPNOTSUPP, "no gds: no libnvrtc, which compiles the checksums for the GPU: %s", dlerror());
#define LOAD(function, parameters)                           \
    do {                                                     \
        void *symbol = dlsym(library, "nvrtc" #function);    \
        memcpy(&compiler.function, &symbol, sizeof(symbol)); \
        missing = symbol ? missing : "nvrtc" #function;      \
    } while (0);
    NVRTC_FUNCTIONS(LOAD)
#undef LOAD
    if (missing)
        return client_fail(-EOPNOTSUPP, "no gds: libnvrtc lacks %s", missing);
    char architecture[40], *text = NULL;
    const char *options[] = {architecture};
    void *program = NULL;
    size_t size = 0;
    int error = compiler.CreateProgram(&program, kernel_source, "kvfs_leaf.cu", 0, NULL, NULL);
    if (error)
        return client_fail(-EOPNOTSUPP, "no gds: nvrtcCreateProgram: error %d", error);
    snprintf(architecture, sizeof(architecture), "--gpu-architecture=compute_%u", capability);
    error = compiler.CompileProgram(program, 1, options);
    bool compiled = error == 0;
    error = compiled ? compiler.GetPTXSize(program, &size) : compiler.GetProgramLogSize(program, &size);
    text = error ? NULL : calloc(1, size + 1);
    if (text)
        error = compiled ? compiler.GetPTX(program, text) : compiler.GetProgramLog(program, text);
    compiler.DestroyProgram(&program);
    if (compiled && text && !error) {
        *out = text;
        return 0;
    }
    int r = client_fail(-EOPNOTSUPP, "no gds: libnvrtc makes no kernel for compute capability %u.%u: %.150s", capability / 10, capability % 10,
                        text && !compiled ? text : "no text");
    free(text);
    return r;
}

/* The kernel is compiled once in a process, by the compiler that was named first; the text stays. */
int kvfs_gpu_kernel(const char *nvrtc, uint32_t capability, const char **ptx) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct {
        uint32_t capability;
        char *ptx;
    } made[8];
    uint32_t i = 0;
    pthread_mutex_lock(&lock);
    while (i < 7 && made[i].ptx && made[i].capability != capability)
        i++;
    int r = 0;
    if (!made[i].ptx) {
        made[i].capability = capability;
        r = kernel_compile(library_name(nvrtc, "KVFS_NVRTC_LIBRARY", NULL), capability, &made[i].ptx);
    } else if (made[i].capability != capability) {
        r = client_fail(-EOPNOTSUPP, "no gds: GPUs of more than 8 kinds");
    }
    *ptx = r == 0 ? made[i].ptx : NULL;
    pthread_mutex_unlock(&lock);
    return r;
}
