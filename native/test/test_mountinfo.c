/* sources: client/mountinfo.c */
/* Lines of /proc/self/mountinfo, as proc_pid_mountinfo(5) has them. */
#include "client/mountinfo.h"

#include <stdio.h>
#include <string.h>

#include "check.h"

static void test_a_line_is_taken_apart(void) {
    char line[] = "36 35 98:7 /root\\040a /mnt/a\\011b\\134c rw,noatime master:1 propagate_from:2 - fuse.kvfs /pool\\040x rw,user_id=0\n";
    struct mountinfo mount;
    CHECK(mountinfo_parse(line, &mount));
    CHECK(mount.id == 36 && mount.major == 98 && mount.minor == 7);
    CHECK(strcmp(mount.root, "/root a") == 0 && strcmp(mount.path, "/mnt/a\tb\\c") == 0);
    CHECK(strcmp(mount.flags, "rw,noatime") == 0);
    CHECK(strcmp(mount.kind, "fuse.kvfs") == 0 && strcmp(mount.source, "/pool x") == 0 && strcmp(mount.options, "rw,user_id=0") == 0);
}

static void test_optional_fields_may_be_absent_and_a_path_may_look_like_the_separator(void) {
    char line[] = "1 1 0:1 / /- rw - ext4 /dev/sda1 rw";
    struct mountinfo mount;
    CHECK(mountinfo_parse(line, &mount) && strcmp(mount.path, "/-") == 0 && strcmp(mount.kind, "ext4") == 0);
    char shorter[] = "1 1 0:1 / / rw - tmpfs";
    CHECK(mountinfo_parse(shorter, &mount) && !mount.source && !mount.options);
}

static void test_other_lines_are_refused(void) {
    static const char *const lines[] = {"",
                                        "\n",
                                        "36",
                                        "36 35 98:7 /root",
                                        "36 35 98:7 / /mnt rw fuse.kvfs x rw",
                                        "36 35 98:7 / /mnt rw -",
                                        "x 35 98:7 / /mnt rw - a b c",
                                        "36 35 98 / /mnt rw - a b c",
                                        "36 35 98:x / /mnt rw - a b c"};
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        char line[64];
        struct mountinfo mount;
        snprintf(line, sizeof(line), "%s", lines[i]);
        CHECK_SAY(!mountinfo_parse(line, &mount), "%zu: %s", i, lines[i]);
    }
}

static void test_a_backslash_that_escapes_nothing_stays(void) {
    char line[] = "1 1 0:1 / /a\\9\\04 rw - ext4 /dev/\\400 rw";
    struct mountinfo mount;
    CHECK(mountinfo_parse(line, &mount) && strcmp(mount.path, "/a\\9\\04") == 0 && strcmp(mount.source, "/dev/\\400") == 0);
}

int main(void) {
    RUN(test_a_line_is_taken_apart);
    RUN(test_optional_fields_may_be_absent_and_a_path_may_look_like_the_separator);
    RUN(test_other_lines_are_refused);
    RUN(test_a_backslash_that_escapes_nothing_stays);
    return 0;
}
