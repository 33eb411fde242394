/* Why a call of libkvfs failed, in words: one message for each thread. */
#include "client/client.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char message[768];

int client_fail(int error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    return error;
}

const char *kvfs_error(void) { return message; }
