"""python leftovers.py RUN SECONDS [PID | -GROUP]...: end what a run of tests has started, remove what it has made.

RUN is the run's directory: TMPDIR of all that it starts, and $KVFS_TEST_RUN. A process is the run's if its environment
or its command line names RUN. The tests themselves, each a process or a group of processes, have SECONDS to end and to
tear down what they have made. Then all that is left gets SIGTERM, and SIGKILL some seconds later. Mounts below RUN are
detached, loop devices over files below it freed, and RUN is removed. Network namespaces go whose names say a process
that has ended (podmounts.py). Each thing that was left is told in a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SETTLE_S = 0.5  # for processes that end as their tests do
TERM_S = 3.0
KILL_S = 5.0
NAMESPACES = Path("/run/netns")


def _command(*words: str) -> str:
    """The output of a command of ours; "" where it fails, is late, or is missing."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20).stdout
    return ""


def _ancestors() -> set[int]:
    """This process and all above it: the script that asks is of the run too."""
    found, pid = set(), os.getpid()
    while pid > 1:
        found.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found


def processes(run: str) -> dict[int, str]:
    """The run's processes, with their command lines; those above this one, and zombies, are left out."""
    found, spared = {}, _ancestors()
    mark = re.compile(rb"(^|[\0=:])" + re.escape(os.fsencode(run)) + rb"(/|\0|$)")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in spared:
            continue
        try:
            words = (entry / "cmdline").read_bytes()
            if words and (mark.search(words) or mark.search((entry / "environ").read_bytes())):
                found[int(entry.name)] = words.replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def _running(number: int) -> bool:
    """Whether a process, or with a negative number one of a group, has not ended. A zombie has."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if number in (int(entry.name), -int(group)) and state not in "ZX":
                    return True
    return False


def _await_tests(numbers: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(_running(number) for number in numbers) and time.monotonic() < deadline:
        time.sleep(0.05)


def _await_end(run: str, seconds: float) -> dict[int, str]:
    """The processes that are there after so many seconds; returns as soon as there are none."""
    deadline = time.monotonic() + seconds
    while (left := processes(run)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _end_processes(run: str) -> Iterator[str]:
    left = _await_end(run, SETTLE_S)
    told = dict(left)
    for number, grace_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, number)
        if left:
            left = _await_end(run, grace_s)
            told |= left
    for pid, words in told.items():
        yield f"process {pid}: {words[:150]}" + (", which does not die" if pid in left else "")


def _mounts(run: str) -> list[str]:
    """Mountpoints below the run's directory, the latest first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    points = [point.encode().decode("unicode_escape") for point in points]
    return [point for point in reversed(points) if point.startswith(run + "/")]


def _detach_mounts(run: str) -> Iterator[str]:
    for point in _mounts(run):
        if os.geteuid() == 0:
            _command("umount", "--lazy", point)
        else:
            _command("fusermount3", "-u", "-z", point)
        yield f"mount {point}" + (", which stays" if point in _mounts(run) else "")


def _free_loop_devices(run: str) -> Iterator[str]:
    told = _command("losetup", "--json", "--output", "NAME,BACK-FILE")
    for device in json.loads(told)["loopdevices"] if told.strip() else ():
        if (device["back-file"] or "").startswith(run + "/"):
            _command("losetup", "--detach", device["name"])
            yield f"loop device {device['name']} over {device['back-file']}"


def _delete_namespaces() -> Iterator[str]:
    for name in sorted(path.name for path in NAMESPACES.glob("kvfs-*-*")) if os.geteuid() == 0 else ():
        pid = name.split("-")[1]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            _command("ip", "netns", "del", name)
            yield f"network namespace {name}"


def end(run: str) -> list[str]:
    """Remove all of it and say what it was. The directory alone is no leftover: a run has one."""
    left = [
        *_end_processes(run),
        *_detach_mounts(run),
        *_free_loop_devices(run),
        *_delete_namespaces(),
    ]
    if not _mounts(run):  # never what is mounted there
        shutil.rmtree(run, ignore_errors=True)
    return left


if __name__ == "__main__":
    _await_tests([int(word) for word in sys.argv[3:]], float(sys.argv[2]))
    for left_over in end(os.path.realpath(sys.argv[1])):
        print("left over and removed:", left_over, file=sys.stderr, flush=True)
