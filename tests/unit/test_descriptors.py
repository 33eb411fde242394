"""Descriptors of ours are above 2: the helpers, and that every call which makes one goes through them."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import subprocess
import sys

import pytest
from helpers import REPOSITORY

from kvfs.descriptors import above, all_above, reason

# Calls of C that make a descriptor. fopen(3) is let be: its files are of /proc, and only read.
MAKERS = re.compile(
    r"(?<![\w.>])(?:::)?(?:open|openat|open64|socket|socketpair|accept4?|eventfd|memfd_create|epoll_create1?|dup|"
    r"timerfd_create|signalfd|pipe2?|inotify_init1?|pidfd_open|opendir|creat)\("
)
FDDUP = re.compile(r"F_DUPFD(?:_CLOEXEC)?, (?!DESCRIPTOR_MIN|from[)])")  # from: 768, or three quarters of the limit
RINGS = re.compile(r"io_uring_queue_init\w*\(")
RECEIVERS = re.compile(r"SCM_RIGHTS")
# Definitions and real calls of the functions that libkvfs_preload takes over: its own descriptors go to high numbers.
TAKEN = REPOSITORY / "native/shims/preload/preload.c"
# Those that move what they receive or send, or their ring's.
MOVE = {
    "native/src/client/wire.c", "native/src/frames/connection.c", "native/src/virtiofs/vhost_user.c",
    "native/src/virtiofs/porter.c", "native/src/io/ring.c", "native/src/virtiofs/virtqueue.c",
}  # fmt: skip


def makers_in(text: str) -> list[int]:
    """Lines of C that make a descriptor and let it have any number."""
    text = re.sub(r"/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    return [
        number
        for number, line in enumerate(text.split("\n"), 1)
        if (FDDUP.search(line) or any("_above(" not in line[: at.start()] for at in MAKERS.finditer(line)))
        # A declaration.
        and not re.match(r"\s*(static |extern )?(int|DIR \*) ?(PathMode::)?\w*\(|\s*int (PathMode::)?open\(", line)
    ]


def test_every_descriptor_of_c_is_made_above_2():
    found = [
        (str(path.relative_to(REPOSITORY)), line)
        for room in ("native/src", "native/shims")
        for path in sorted((REPOSITORY / room).rglob("*"))
        if path.suffix in (".c", ".h", ".cc") and "test" not in path.parts and path != TAKEN
        for line in makers_in(path.read_text())
    ]
    assert found == []
    assert makers_in("fd = open(path, O_RDONLY);\nint fd = descriptor_above(open(path, 0));\n") == [1]
    assert makers_in("a = fcntl(fd, F_DUPFD_CLOEXEC, 0);\nb = device_open(1);\n/* open( */\n") == [1]


@pytest.mark.parametrize("what", [RECEIVERS, RINGS], ids=["SCM_RIGHTS", "io_uring"])
def test_those_that_receive_descriptors_or_make_rings_are_known(what):
    found = {
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "native/src").rglob("*.c")
        if what.search(path.read_text())
    }
    assert found and found <= MOVE
    for path in found - {"native/src/virtiofs/porter.c"}:  # its table has something else at 0 to 2
        # kvfs_own_descriptor() is descriptor_above(), or what libkvfs_preload has for it.
        assert re.search(r"descriptor_above\(|kvfs_own_descriptor\(", (REPOSITORY / path).read_text()), path


def test_every_descriptor_of_an_engine_s_process_is_made_above_2_by_python_too():
    made = re.compile(
        r"(?<!\w)os\.(open|eventfd|dup|memfd_create|pipe2?)\(|socket\.(socket|socketpair)\(|recv_fds\(|select\.epoll\("
    )
    moved = re.compile(r"(?<!\w)(all_)?above\(")
    found = []
    for path in sorted((REPOSITORY / "kvfs").rglob("*.py")):
        engine = path.parent.name in ("client", "connectors")
        lines = path.read_text().split("\n")
        for number, line in enumerate(lines, 1):
            match = made.search(line)
            # A receiver's descriptors are moved in the next lines; files of the daemon's and the command line's own
            # come after fill_standard().
            near = "\n".join(lines[number - 1 : number + 2])
            if match and (engine or "recv_fds" in match[0]) and not moved.search(near):
                found.append((str(path.relative_to(REPOSITORY)), number))
    assert found == []


def closed(code: str, *descriptors: int) -> list[str]:
    """Lines of a Python that starts without these descriptors, by another one."""
    reading, writing = os.pipe()
    script = f"import os, sys\nsaid = os.fdopen({writing}, 'w')\n{code}\nsaid.close()\n"
    shut = " ".join(f"{fd}>&-" for fd in descriptors)
    words = ["sh", "-c", f'exec "$0" -c "$1" {shut}', sys.executable, script]
    process = subprocess.Popen(words, pass_fds=[writing], cwd=REPOSITORY)
    os.close(writing)
    with os.fdopen(reading) as stream:
        lines = stream.read().split("\n")
    assert process.wait(60) == 0
    return lines[:-1]


def test_descriptors_below_3_are_moved():
    said = closed(
        """
from kvfs.descriptors import above, all_above
low = os.open('/dev/zero', os.O_RDONLY)
high = above(low)
lows = [os.open('/dev/zero', os.O_RDONLY) for _ in range(3)]
both = all_above(lows + [high])
print(low, high > 2, min(both) > 2, len(set(both)), both[-1] == high, os.get_inheritable(high), file=said)
print(*(fd for fd in range(3) if os.path.exists(f'/proc/self/fd/{fd}')), file=said)
""",
        0, 1, 2,
    )  # fmt: skip
    assert said == ["0 True True 4 True False", ""]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert above(ours.fileno()) == ours.fileno() and all_above([theirs.fileno()]) == [theirs.fileno()]


def test_the_preloaded_library_s_are_above_2_where_no_high_number_is_free():
    said = closed(
        """
import ctypes, resource, kvfs
library = ctypes.CDLL(os.path.join(os.path.dirname(kvfs.__file__), "lib", "libkvfs_preload.so"))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))  # its own go to 48 and above
def full():
    try:
        while True:
            os.open('/dev/zero', os.O_RDONLY)
    except OSError:
        pass
full()
library.kvfs_own_thread()
os.close(40)
print(library.kvfs_own_descriptor(0), os.path.exists('/proc/self/fd/0'), file=said)
os.close(41)
print(os.open('/dev/zero', os.O_RDONLY), file=said)
full()
print(library.kvfs_own_descriptor(1), file=said)
print(os.open('/dev/zero', os.O_RDONLY), file=said)
""",
        0,
    )  # fmt: skip
    # The second finds no number above 2; it is closed, and its number is the next that is free.
    assert said == ["40 False", "0", "-1", "1"]


@pytest.mark.parametrize("descriptors", [(1,), (2,), (0, 1, 2)])
def test_the_command_line_stands_on_dev_null_where_a_stream_was_closed(descriptors):
    said = closed(
        """
import kvfs.cli
print(*(os.readlink(f'/proc/self/fd/{fd}') == '/dev/null' for fd in (DESCRIPTORS)), file=said)
print("lost", flush=True)
sys.stderr.write("lost")
sys.stdout.flush()
print(os.get_inheritable(0), file=said)
""".replace("DESCRIPTORS", ", ".join(map(str, descriptors)) + ","),
        *descriptors,
    )
    assert said == [" ".join(["True"] * len(descriptors)), "True"]


def test_a_limit_of_descriptors_says_whose_it_is():
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert f"all the {soft} descriptors" in reason(OSError(errno.EMFILE, "x"))
    assert f"process {os.getpid()} " in reason(OSError(errno.EMFILE, "x"))
    assert "the machine" in reason(OSError(errno.ENFILE, "x"))
    assert reason(OSError(errno.EACCES, "denied")) == "denied"
