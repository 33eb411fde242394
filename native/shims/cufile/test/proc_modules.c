/* Test double of a file: /proc/modules, empty, where a kernel without modules has none. libcufile's cuFileDriverOpen reads it with an
 * ifstream and spins for ever on one that cannot be opened. Preloaded into the reference program only where the file is missing. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static const char *stand_in(const char *path) { return path && strcmp(path, "/proc/modules") == 0 ? "/dev/null" : path; }

FILE *fopen(const char *path, const char *mode) {
    FILE *(*next)(const char *, const char *) = (FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, "fopen");
    return next(stand_in(path), mode);
}

FILE *fopen64(const char *path, const char *mode) {
    FILE *(*next)(const char *, const char *) = (FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, "fopen64");
    return next(stand_in(path), mode);
}
