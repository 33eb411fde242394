/* The real libcufile: where it is found, and the addresses of its calls. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <glob.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "shim.h"

static struct real calls;
static void *library; /* NULL: none */
/* Set while this thread loads it: its constructors may call functions found here first. */
static _Thread_local const char *loading;

static bool is_this_library(const char *path) {
    Dl_info here;
    struct stat a, b;
    return dladdr(&calls, &here) && stat(here.dli_fname, &a) == 0 && stat(path, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* Or one of its other names: an empty library that needs it. */
static bool leads_here(void *opened) {
    Dl_info here, there;
    void *found = dlsym(opened, "cuFileDriverOpen");
    return found && dladdr(&calls, &here) && dladdr(found, &there) && here.dli_fbase == there.dli_fbase;
}

/* NULL also for this library under any name: *itself. */
static void *open_real(const char *path, bool *itself) {
    *itself = is_this_library(path);
    if (*itself)
        return NULL;
    loading = path;
    void *found = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    loading = NULL;
    if (found && (*itself = leads_here(found))) {
        dlclose(found);
        found = NULL;
    }
    return found;
}

/* Directory patterns, separated by colons; "" and patterns that are not absolute are left out. */
static void *load_from(const char *patterns, const char *below) {
    void *found = NULL;
    while (patterns && *patterns && !found) {
        size_t size = strcspn(patterns, ":");
        char path[PATH_MAX];
        glob_t matches;
        bool itself;
        int n = snprintf(path, sizeof(path), "%.*s%s/libcufile.so.0", (int)size, patterns, below);
        if (*patterns == '/' && n < (int)sizeof(path) && glob(path, 0, NULL, &matches) == 0) {
            for (size_t i = matches.gl_pathc; i-- > 0 && !found;) /* the last: the newest of several versions */
                found = open_real(matches.gl_pathv[i], &itself);
            globfree(&matches);
        }
        patterns += size + (patterns[size] == ':');
    }
    return found;
}

static void *load(void) {
    const char *given = getenv("KVFS_CUFILE_REAL");
    if (given && *given) {
        if (strcmp(given, "none") == 0)
            return NULL;
        bool itself = false;
        void *found = *given == '/' ? open_real(given, &itself) : NULL;
        if (!found)
            fprintf(stderr, "libkvfs_cufile: KVFS_CUFILE_REAL=%s: %s\n", given,
                    *given != '/' ? "not an absolute path"
                    : itself      ? "this is libkvfs_cufile itself"
                                  : dlerror());
        return found;
    }
    void *found = load_from(getenv("VIRTUAL_ENV"), "/lib/python3*/site-packages/nvidia/*/lib");
    if (!found)
        found = load_from(getenv("LD_LIBRARY_PATH"), "");
    if (!found)
        found = load_from(getenv("CUDA_HOME"), "/lib64");
    if (!found)
        found = load_from("/usr/local/cuda/lib64:/usr/local/cuda-*/lib64:/usr/local/cuda*/targets/*/lib:"
                          "/usr/lib64:/usr/lib/x86_64-linux-gnu:/usr/lib/aarch64-linux-gnu:/opt/cuda/lib64",
                          "");
    return found;
}

static struct cufile_status absent(void) { return ERROR(CUFILE_UNSUPPORTED); }
static ssize_t absent_transfer(void) {
    errno = CUFILE_UNSUPPORTED;
    return -1;
}

static void find_calls(void) {
    library = load();
    if (!library)
        return;
#define X(type, name, parameters, arguments)     \
    calls.name = dlsym(library, "cuFile" #name); \
    if (!calls.name)                             \
        calls.name = __builtin_types_compatible_p(type, ssize_t) ? (void *)absent_transfer : (void *)absent;
    CUFILE_CALLS(X)
#undef X
}

const struct real *real(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (loading)
        return NULL;
    pthread_once(&once, find_calls);
    return library ? &calls : NULL;
}

/* For forward.S: the address of a symbol of the real library. Without a real library, a call of cuFile answers CUFILE_NO_DRIVER; a C++ function,
 * 0. */
static struct cufile_status nothing(void) { return ERROR(CUFILE_NO_DRIVER); }
static void *nothing_internal(void) { return NULL; }
void *kvfs_cufile_symbol(const char *name);
void *kvfs_cufile_symbol(const char *name) {
    int error = errno;
    void *where = loading ? dlopen(loading, RTLD_LAZY | RTLD_NOLOAD) : real() ? library : NULL;
    void *found = where ? dlsym(where, name) : NULL;
    errno = error;
    return found ? found : *name == '_' ? (void *)nothing_internal : (void *)nothing;
}
