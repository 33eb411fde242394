/* Why a call of libkvfs failed, in words: one message for each thread. */
#include "client/client.h"

#include <stdarg.h>
#include <stdio.h>
#include <sys/resource.h>

static _Thread_local char message[768];

int client_fail(int error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    return error;
}

/* In words: why there is no descriptor (errno). */
const char *descriptor_reason(int error) {
    static _Thread_local char text[128];
    struct rlimit limit;
    if (error == EMFILE && getrlimit(RLIMIT_NOFILE, &limit) == 0)
        snprintf(text, sizeof(text), "this process has all the %llu descriptors that it may have (RLIMIT_NOFILE)",
                 (unsigned long long)limit.rlim_cur);
    else
        snprintf(text, sizeof(text), "%s", error == ENFILE ? "the machine has no descriptor left (fs.file-max)" : strerror(error));
    return text;
}

const char *kvfs_error(void) { return message; }
