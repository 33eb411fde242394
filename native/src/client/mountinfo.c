/* A parser of one line of /proc/self/mountinfo that calls and allocates nothing. */
#include "client/mountinfo.h"

#include <stddef.h>

/* The next field, cut off; NULL at the end of the line. */
static char *field(char **rest) {
    char *begin = *rest;
    while (*begin == ' ')
        begin++;
    char *end = begin;
    while (*end && *end != ' ' && *end != '\n')
        end++;
    if (end == begin)
        return NULL;
    *rest = end + (*end != 0);
    *end = 0;
    return begin;
}

static bool octal(char c) { return c >= '0' && c <= '7'; }

/* Space, tab, newline and backslash are written in octal. */
static char *unescaped(char *text) {
    char *out = text;
    for (const char *in = text; in && *in; out++) {
        if (in[0] == '\\' && in[1] >= '0' && in[1] <= '3' && octal(in[2]) && octal(in[3])) {
            *out = (char)((in[1] - '0') * 64 + (in[2] - '0') * 8 + (in[3] - '0'));
            in += 4;
        } else {
            *out = *in++;
        }
    }
    if (out)
        *out = 0;
    return text;
}

/* Digits, to the end or to a colon. */
static const char *number(const char *text, unsigned long long *out) {
    const char *at = text;
    for (*out = 0; *at >= '0' && *at <= '9'; at++)
        *out = *out * 10 + (unsigned long long)(*at - '0');
    return at == text || (*at && *at != ':') ? NULL : at;
}

/* 36 35 98:0 /root /mount/point options optional... - kind source options */
bool mountinfo_parse(char *line, struct mountinfo *out) {
    unsigned long long major_number, minor_number;
    char *id = field(&line), *parent = field(&line), *device = field(&line), *root = field(&line), *path = field(&line), *flags = field(&line);
    char *text = flags;
    if (!parent || !device || !path)
        return false;
    while (text && !(text[0] == '-' && text[1] == 0))
        text = field(&line);
    const char *colon = number(device, &major_number);
    if (!text || !number(id, &out->id) || !colon || *colon != ':' || !number(colon + 1, &minor_number))
        return false;
    out->major = (unsigned)major_number;
    out->minor = (unsigned)minor_number;
    out->root = unescaped(root);
    out->path = unescaped(path);
    out->flags = flags;
    out->kind = field(&line);
    out->source = unescaped(field(&line));
    out->options = field(&line);
    return out->kind != NULL;
}
