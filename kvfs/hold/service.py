"""systemd as the holder: its store of a unit's descriptors (FileDescriptorStoreMax= of systemd.service(5)).

The daemon puts descriptors there by sd_notify(3), each with a name. systemd gives them to the unit's next main process
(sd_listen_fds(3)), which it starts once the one before has ended. The words of a mount lie with them in memory: those
of a holder's answer (kvfs/hold/words.py), with its pool and mount point.

systemd says neither that it keeps a descriptor nor that its store is full. So the last that goes there is the end of a
pipe: systemd closes what it does not keep, and the other end tells.
"""

from __future__ import annotations

import array
import json
import logging
import os
import select
import socket
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvfs.descriptors import above, all_above
from kvfs.errors import printable
from kvfs.hold.claim import ANSWER_TIMEOUT_S, Claim, Left, left_of
from kvfs.hold.words import (
    FDS_MAX,
    FUSE,
    ROLES,
    SIZE_MAX,
    VERSION,
    HoldError,
    close_all,
    is_alive,
    is_spoken,
    parse,
    text_of,
    version_of,
)

# One logger name for the whole room: it is in every line of the log.
log = logging.getLogger(__package__)

SYSTEMD = Path("systemd")
_PREFIX = "kvfs-"
_STATE, _WATCH = "state", "watch"
_NAMES = (*ROLES, _STATE, _WATCH)
_STOP = "stopping the unit ends what systemd keeps"
_FIRST = 3  # SD_LISTEN_FDS_START
_HINT = "start it as the main process of a unit with Type=notify (kvfs@.service), or use kvfs hold SOCKET"


def notify(state: str, fds: Sequence[int] = ()) -> None:
    """A message to the service manager that has started this process. HoldError: there is none, or it is gone."""
    path = _address()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(ANSWER_TIMEOUT_S)
            sender.connect(path.replace("@", "\0", 1) if path[0] == "@" else path)
            sender.sendmsg([state.encode()], rights, socket.MSG_NOSIGNAL)
    except OSError as error:
        raise HoldError(f"NOTIFY_SOCKET {path}: {error.strerror or error}") from error


def _address() -> str:
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        raise HoldError(f"NOTIFY_SOCKET is {path!r}: {_HINT}")
    return path


def barrier() -> None:
    """Wait until the service manager has taken all messages before this one. HoldError: it did not in its time."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            notify("BARRIER=1", [writing])
        finally:
            os.close(writing)
        if not _hangs_up(reading, ANSWER_TIMEOUT_S):
            raise HoldError(f"the service manager has not answered for {ANSWER_TIMEOUT_S:g} s")
    finally:
        os.close(reading)


def _hangs_up(reading: int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(reading, 0)
    return bool(poller.poll(timeout_s * 1000))


class ServiceClaim(Claim):
    """The mount of this process's unit."""

    def __init__(
        self,
        pool: str,
        mountpoint: str,
        left: Left | None,
        state: int,
        version: int = VERSION,
        others: Sequence[str] = (),
    ) -> None:
        """version: of the words, which stays with the mount, so that the build that made it reads them. others: names
        of descriptors that another build has stored, and this one does not know."""
        super().__init__(SYSTEMD, os.getppid(), left)
        self._pool, self._mountpoint, self._state = pool, mountpoint, state
        self._version, self._others = version, others
        self._watch = -1

    def fileno(self) -> int:
        return self._watch

    def put(self, state: bytes, fuse: Sequence[int], memories: Mapping[str, int]) -> None:
        """systemd knows a descriptor that it has already."""
        takeovers = 0 if self.left is None else self.left.takeovers
        kept = {role: fd for role, fd in memories.items() if is_spoken(role, self._version)}
        roles = [*[FUSE] * len(fuse), *kept]
        words = {"v": self._version, "pool": self._pool, "mountpoint": self._mountpoint, "roles": roles,
                 "state": state.hex(), "last_pid": os.getpid(), "takeovers": takeovers}  # fmt: skip
        _write(self._state, words)
        reading, writing = all_above(list(os.pipe2(os.O_CLOEXEC)))
        if self._watch >= 0:
            os.close(self._watch)
        self._watch = reading
        try:
            for name in (_PREFIX + _WATCH, *self._others):
                notify(f"FDSTOREREMOVE=1\nFDNAME={name}")
            for name, fds in (
                (_STATE, [self._state]), *((role, [fd]) for role, fd in kept.items()), (FUSE, fuse),
                (_WATCH, [writing]),
            ):  # fmt: skip
                notify(f"FDSTORE=1\nFDNAME={_PREFIX}{name}\nFDPOLL=0", fds)
        finally:
            os.close(writing)
        if self.left is not None:
            return  # all but the pipe is there already, and the daemon watches that
        barrier()
        if _hangs_up(reading, 0):
            self.drop()
            raise HoldError(f"systemd does not keep the mount: {_told_max()}; set it to {len(roles) + 2} or more")

    def drop(self) -> None:
        for name in (*(_PREFIX + name for name in _NAMES), *self._others):
            notify(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def close(self) -> None:
        close_all([self._state, *([] if self._watch < 0 else [self._watch])])
        super().close()


def _told_max() -> str:
    """systemd tells its limit from version 254 on."""
    told = os.environ.get("FDSTORE", "")
    return f"FileDescriptorStoreMax= of its unit is {told if told.isdigit() else 'too small, or not set'}"


def _write(fd: int, words: Mapping[str, object]) -> None:
    """Put the words of a mount there. A kill cuts a write between pages alone: it leaves the old words or the new."""
    data = json.dumps(words).encode()
    if len(data) > SIZE_MAX:
        raise HoldError(f"the words of the mount have {len(data)} bytes; {SIZE_MAX} are possible")
    os.pwrite(fd, data.ljust(SIZE_MAX), 0)


def claim(pool: str, mountpoint: str) -> ServiceClaim:
    """The mount that the unit's last main process has left, if there is one. HoldError: no service manager has started
    this process, or it gives descriptors that are no mount, or another one."""
    given: dict[str, list[int]] = {}
    try:
        _address()
        _take_given(given)
        return _claim(pool, mountpoint, given)
    except BaseException as error:
        close_all([fd for fds in given.values() for fd in fds])
        if isinstance(error, HoldError):
            raise HoldError(f"--hold systemd: {error}") from error
        raise


def _take_given(given: dict[str, list[int]]) -> None:
    """The descriptors that systemd has given to this process, by their names. Programs that it starts have none of
    them. HoldError."""
    told = {name: os.environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if not told["LISTEN_PID"]:
        return
    if told["LISTEN_PID"] != str(os.getpid()):
        raise HoldError(f"LISTEN_PID is {told['LISTEN_PID']!r}, and this is process {os.getpid()}: {_HINT}")
    names = told["LISTEN_FDNAMES"].split(":")
    if told["LISTEN_FDS"] != str(len(names)) or len(names) > FDS_MAX:
        raise HoldError(
            f"LISTEN_FDS is {told['LISTEN_FDS']!r}, and LISTEN_FDNAMES has {len(names)} names: the same number, "
            f"{FDS_MAX} at most, is expected"
        )
    for fd, name in enumerate(names, _FIRST):
        try:
            os.set_inheritable(fd, False)
        except OSError as error:
            raise HoldError(f"descriptor {fd}, {printable(name)}: {error.strerror}") from error
        given.setdefault(name, []).append(fd)


def _claim(pool: str, mountpoint: str, given: dict[str, list[int]]) -> ServiceClaim:
    """Takes from `given` what the claim then has."""
    others = sorted(given.keys() - {_PREFIX + name for name in _NAMES})
    for name in others:
        log.warning("descriptors %s, which this kvfs does not put into systemd's store, are closed", printable(name))
        close_all(given.pop(name))
    stored = [name for name in others if name.startswith(_PREFIX)]
    close_all(given.pop(_PREFIX + _WATCH, []))
    if not given:
        return ServiceClaim(pool, mountpoint, None, _new_state(), others=stored)
    roles = [role for role in ROLES for _ in given.get(_PREFIX + role, ())]
    fds = [fd for role in ROLES for fd in given.get(_PREFIX + role, ())]
    states = given.get(_PREFIX + _STATE, [])
    if len(states) != 1:
        raise HoldError(f"{len(states)} descriptors {_PREFIX}{_STATE}: one is expected; {_STOP}")
    try:
        words = parse(_read(states[0]))
        kept = (text_of(words, "pool"), text_of(words, "mountpoint"))
        takeovers = words.get("takeovers")
        counted = takeovers + 1 if isinstance(takeovers, int) else 1
        left = left_of({**words, "roles": roles, "takeovers": counted}, fds)
    except HoldError as error:
        raise HoldError(f"what systemd has kept: {error}; {_STOP}") from error
    if kept != (pool, mountpoint):
        raise HoldError(f"{kept[1]} of pool {kept[0]} is kept for this unit, not {mountpoint} of pool {pool}; {_STOP}")
    if left is None or not is_alive(left.fuse[0]):
        log.info("%s of pool %s: it has been unmounted", mountpoint, pool)
        close_all([*fds, *states])
        given.clear()
        fresh = ServiceClaim(pool, mountpoint, None, _new_state(), others=stored)
        fresh.drop()
        return fresh
    told = words.get("roles")
    known = [role for role in told if role in ROLES] if isinstance(told, list) else []
    if len(known) > len(roles):
        log.error(
            "systemd has kept %d of %d descriptors of %s: requests of the others have failed; FileDescriptorStoreMax= "
            "of its unit must be %d or more", len(roles), len(known), mountpoint, len(known) + 2,
        )  # fmt: skip
    given.clear()
    return ServiceClaim(pool, mountpoint, left, states[0], version_of(words), stored)


def _new_state() -> int:
    return above(os.memfd_create("kvfs-state", os.MFD_CLOEXEC))


def _read(fd: int) -> bytes:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise HoldError(f"{_PREFIX}{_STATE} is no memory")
    return os.pread(fd, SIZE_MAX, 0)
