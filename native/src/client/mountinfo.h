/* Lines of /proc/self/mountinfo; proc_pid_mountinfo(5). The libraries in native/shims share this file with libkvfs, and run it inside calls that
 * they have taken over. So it calls nothing, allocates nothing and takes no lock. */
#ifndef KVFS_CLIENT_MOUNTINFO_H
#define KVFS_CLIENT_MOUNTINFO_H

#include <stdbool.h>

struct mountinfo {
    unsigned long long id;
    unsigned major, minor;
    char *root, *path;             /* in its filesystem, and where it is mounted */
    char *flags;                   /* of this mount alone: "rw,nosuid,idmapped" */
    char *kind, *source, *options; /* options: of the filesystem. NULL where the line ends before them. */
};
/* Take a line apart, in place: out's texts are parts of it, without escapes. False: it is no such line. */
bool mountinfo_parse(char *line, struct mountinfo *out);

#endif
