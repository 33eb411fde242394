/* Why a call of libkvfs failed, in words: one sentence for each thread. */
#include "client/client.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char sentence[768];

int client_fail(int error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof(sentence), format, arguments);
    va_end(arguments);
    return error;
}

const char *kvfs_error(void) { return sentence; }
