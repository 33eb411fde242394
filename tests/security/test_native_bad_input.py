"""Bad input of the native path: what callers, daemons and devices may do wrong ends as an error that says so.

Below Python's own checks, which tests/native has: the C functions themselves, and a daemon that lies (a double between
client and daemon changes the daemon's words). Also a device that hangs (stoppable.py), and users of other groups.
Clients run in forked children: a crash is one child's, and what it leaves open is counted there.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import gc
import mmap
import os
import pathlib
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import helpers
import pytest
import trio
from helpers import KIB, MIB, Pool, assert_same, content, in_child, wait_until

import kvfs
from kvfs.errors import BusyBufferError, ClientError, KvfsError, PoolChangedError, PutError

pytestmark = pytest.mark.usefixtures("only_root")

NOBODY = 65534
SEED = int(os.environ.get("KVFS_FUZZ_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)


# ---- the C functions ----


class Native:
    """libkvfs's own functions, without Python's checks before them."""

    def __init__(self, path: pathlib.Path, timeout_ms: int = 20_000) -> None:
        from kvfs._native import ffi, lib

        self.ffi, self.lib = ffi, lib
        out = ffi.new("struct kvfs_client **")
        options = ffi.new("struct kvfs_options *", (ffi.sizeof("struct kvfs_options"), 0, timeout_ms, 0, 0))
        assert lib.kvfs_connect(bytes(path), b"c", options, out) == 0, self.said()
        self.client = out[0]

    def said(self) -> str:
        return self.ffi.string(self.lib.kvfs_error()).decode()

    def keys(self, *keys: bytes) -> Any:
        self.data, self.sizes = b"".join(keys), array.array("I", map(len, keys))
        self.kept = (self.ffi.from_buffer(self.data), self.ffi.from_buffer("uint32_t[]", self.sizes))
        return self.ffi.new("struct kvfs_keys *", [*self.kept, len(keys), 0])

    def buffers(self, *places: tuple[int, int]) -> Any:
        return self.ffi.new(
            "struct kvfs_buffer[]", [(self.ffi.cast("void *", address), size) for address, size in places]
        )

    def call(self, name: str, *arguments: Any) -> int:
        return getattr(self.lib, name)(self.client, *arguments)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_c_keys_of_no_or_too_many_bytes_are_refused_by_every_function(directory: pathlib.Path) -> None:
    def body() -> None:
        c = Native(directory)
        memory = mmap.mmap(-1, 1 << 16)
        places = c.buffers(*[(_address(memory) + 4096 * i, 4096) for i in range(3)])
        results, flags, lease = c.ffi.new("int64_t[3]"), c.ffi.new("uint8_t[3]"), c.ffi.new("uint64_t *")
        vectors = c.ffi.new("struct kvfs_vector[3]", [(places + i, 1, 0, 0) for i in range(3)])
        for bad, size in ((b"", 0), (b"k" * 256, 256), (b"k" * 300, 300)):
            keys = c.keys(b"good", bad, b"other")
            for name, arguments in (
                ("kvfs_exists", (keys, flags)),
                ("kvfs_sizes", (keys, results)),
                ("kvfs_get", (keys, places, results)),
                ("kvfs_put", (keys, places, results)),
                ("kvfs_delete", (keys, flags)),
                ("kvfs_lease", (keys, 1000, lease, flags)),
                ("kvfs_claim", (keys, 1000)),
                ("kvfs_unclaim", (keys,)),
                ("kvfs_touch", (keys,)),
                ("kvfs_prestage", (keys,)),
                ("kvfs_put_vectors", (keys, vectors, c.ffi.NULL, results)),
            ):
                assert c.call(name, *arguments) == -errno.EINVAL, name
                assert f"{size} bytes: 1 to 255 are possible" in c.said(), f"{name}: {c.said()}"
        assert c.call("kvfs_list", b"k" * 300, 300, _ptr(c, memory), 4096, c.ffi.new("uint32_t[4]"), 4) == -errno.EINVAL
        c.lib.kvfs_close(c.client)

    in_child(body)


def _ptr(c: Native, memory: mmap.mmap) -> Any:
    return c.ffi.cast("void *", _address(memory))


def test_c_an_empty_batch_is_nothing(directory: pathlib.Path) -> None:
    def body() -> None:
        c = Native(directory)
        keys = c.ffi.new("struct kvfs_keys *", [c.ffi.NULL, c.ffi.NULL, 0, 0])
        null = c.ffi.NULL
        for name, arguments in (
            ("kvfs_exists", (null,)),
            ("kvfs_sizes", (null,)),
            ("kvfs_get", (null, null)),
            ("kvfs_put", (null, null)),
            ("kvfs_put_vectors", (null, null, null)),
            ("kvfs_delete", (null,)),
            ("kvfs_lease", (1000, c.ffi.new("uint64_t *"), null)),
            ("kvfs_claim", (1000,)),
            ("kvfs_unclaim", ()),
            ("kvfs_touch", ()),
            ("kvfs_prestage", ()),
            ("kvfs_exists_prefix", ()),
        ):
            assert c.call(name, keys, *arguments) == 0, f"{name}: {c.said()}"
        assert c.call("kvfs_busy", null, 0) == 0
        c.lib.kvfs_close(c.client)

    in_child(body)


def test_c_buffers_that_cannot_be_are_refused_before_anything_is_done(directory: pathlib.Path) -> None:
    def body() -> None:
        c = Native(directory)
        memory = mmap.mmap(-1, 1 << 20)
        at = _address(memory)
        results = c.ffi.new("int64_t[2]")
        memory[:8192] = b"x" * 8192
        assert c.call("kvfs_put", c.keys(b"a", b"b"), c.buffers((at, 4096), (at, 4096)), results) == 2, c.said()
        for first, second, words in (
            ((at, 4096), (at, 4096), "overlap"),
            ((at, 4096), (at + 4095, 4096), "overlap"),
            ((at + 4095, 4096), (at, 4096), "overlap"),
            ((at, 65536), (at + 4096, 16), "overlap"),
            ((at, 4096), (0, 4096), "buffer 1: 4096 bytes at 0x0"),
            ((at, 4096), ((1 << 64) - 4096, 8192), "buffer 1: 8192 bytes at 0xfffffffffffff000"),
        ):
            assert c.call("kvfs_get", c.keys(b"a", b"b"), c.buffers(first, second), results) == -errno.EINVAL
            assert words in c.said(), c.said()
        assert c.call("kvfs_put", c.keys(b"a", b"b"), c.buffers((at, 4096), (0, 4096)), results) == -errno.EINVAL
        assert "buffer 1: 4096 bytes at 0" in c.said(), c.said()
        # The same key twice: each its buffer in a get, no answer to which is to be stored in a put.
        assert c.call("kvfs_get", c.keys(b"a", b"a"), c.buffers((at, 4096), (at + 4096, 4096)), results) == 2
        assert c.call("kvfs_put", c.keys(b"a", b"a"), c.buffers((at, 4096), (at, 8192)), results) == -errno.EINVAL
        assert "keys 0 and 1 are the same" in c.said(), c.said()
        assert c.call("kvfs_sizes", c.keys(b"a", b"b"), results) == 0 and list(results) == [4096, 4096]
        # Too small, by one byte: nothing of it is touched.
        memory[65536 : 65536 + 4096] = b"y" * 4096
        assert c.call("kvfs_get", c.keys(b"a"), c.buffers((at + 65536, 4095)), results) == 0
        assert results[0] == -errno.ERANGE and memory[65536 : 65536 + 4096] == b"y" * 4096
        c.lib.kvfs_close(c.client)

    in_child(body)


def test_c_a_read_never_touches_what_is_behind_its_buffer(directory: pathlib.Path) -> None:
    """The page behind cannot be written: a byte too much would be EFAULT or a signal."""

    def body() -> None:
        c = Native(directory)
        libc = helpers.libc
        libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_long] * 5]
        room = 1 << 20
        at = libc.mmap(None, room + 4096, 3, 0x22, -1, 0)
        assert libc.mprotect(ctypes.c_void_p(at + room), 4096, 0) == 0
        results = c.ffi.new("int64_t[1]")
        for size in (1, 511, 4095, 4096, 4097, 131072, 131073, 500_001):
            data = content(size, size)
            c.ffi.memmove(c.ffi.cast("void *", at), data, size)
            assert c.call("kvfs_put", c.keys(b"k"), c.buffers((at, size)), results) == 1, c.said()
            for start in {at + room - size, at + room - (size + 4095 & ~4095)}:
                assert c.call("kvfs_get", c.keys(b"k"), c.buffers((start, size)), results) == 1, (size, c.said())
                assert_same(bytes(c.ffi.buffer(c.ffi.cast("char *", start), size)), data, f"{size} bytes")
                assert c.call("kvfs_put", c.keys(b"k"), c.buffers((start, size)), results) == 1, (size, c.said())
        c.lib.kvfs_close(c.client)

    in_child(body)


def test_c_a_put_never_reads_behind_a_piece(directory: pathlib.Path) -> None:
    """Each piece ends where memory ends: a byte too much would be a signal."""

    def body() -> None:
        c = Native(directory)
        libc = helpers.libc
        libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_long] * 5]
        room = 64 << 10
        at = libc.mmap(None, 3 * (room + 4096), 3, 0x22, -1, 0)
        ends = [at + i * (room + 4096) + room for i in range(3)]
        for end in ends:
            assert libc.mprotect(ctypes.c_void_p(end), 4096, 0) == 0
        results = c.ffi.new("int64_t[1]")
        for sizes in ((4096, 8192, 4096), (4096, 65536, 1), (1, 4095, 4097), (4096, 511, 0), (65536, 0, 513)):
            parts = [content(size, str(sizes) + str(i)) for i, size in enumerate(sizes)]
            for end, part in zip(ends, parts, strict=True):
                c.ffi.memmove(c.ffi.cast("void *", end - len(part)), part, len(part))
            pieces = c.buffers(*[(end - size, size) for end, size in zip(ends, sizes, strict=True)])
            vector = c.ffi.new("struct kvfs_vector *", (pieces, 3, 0, 0))
            assert c.call("kvfs_put_vectors", c.keys(b"k"), vector, c.ffi.NULL, results) == 1, (sizes, c.said())
            memory = mmap.mmap(-1, 1 << 20)
            whole = b"".join(parts)
            assert c.call("kvfs_get", c.keys(b"k"), c.buffers((_address(memory), len(whole))), results) == 1
            assert_same(memory[: len(whole)], whole, str(sizes))
        c.lib.kvfs_close(c.client)

    in_child(body)


def test_c_options_that_are_unknown_are_refused(directory: pathlib.Path) -> None:
    from kvfs._native import ffi, lib

    size = ffi.sizeof("struct kvfs_options")
    out = ffi.new("struct kvfs_client **")
    for values in (
        (size, 4, 0, 0, 0),
        (size, 1 << 31, 0, 0, 0),
        (size, 0, 0, 65, 0),
        (size, 0, 3_600_001, 0, 0),
        (size, 0, 0, 0, 1 << 42),
    ):
        assert lib.kvfs_connect(bytes(directory), b"", ffi.new("struct kvfs_options *", values), out) == -errno.EINVAL
        assert ffi.string(lib.kvfs_error()).startswith(b"options: "), ffi.string(lib.kvfs_error())
    # A caller of an older header: what it does not know is as it was.
    assert lib.kvfs_connect(bytes(directory), b"", ffi.new("struct kvfs_options *", (8, 1, 1 << 31, 99, 0)), out) == 0
    lib.kvfs_close(out[0])


def test_c_a_list_into_little_memory_ends_within_it(directory: pathlib.Path) -> None:
    with kvfs.connect(directory, "c", gpu=None) as client:
        client.put([(f"key {i}".encode() * (i + 1), b"data") for i in range(10)])

    def body() -> None:
        c = Native(directory)
        found: list[bytes] = []
        data, sizes = c.ffi.new("char[]", b"\xee" * 400), c.ffi.new("uint32_t[]", [0xEEEEEEEE] * 8)
        while True:
            after = found[-1] if found else b""
            count = c.call("kvfs_list", c.ffi.from_buffer(after), len(after), data, 3 * 127, sizes, 3)
            if count <= 0:
                break
            assert count <= 3 and sizes[3] == 0xEEEEEEEE and bytes(c.ffi.buffer(data, 400)[381:]) == b"\xee" * 19
            at = 0
            for size in sizes[0:count]:
                found.append(bytes(c.ffi.buffer(data, 400)[at : at + size]))
                at += size
        assert count == 0, c.said()
        assert sorted(found) == found == sorted(f"key {i}".encode() * (i + 1) for i in range(10))
        # No room for a single key is an error, not a list that ends.
        assert c.call("kvfs_list", c.ffi.NULL, 0, data, 4, sizes, 3) < 0, "the end, though there are keys"
        c.lib.kvfs_close(c.client)

    in_child(body)


# ---- Python ----


def test_an_error_whose_traceback_refers_to_itself_is_collected_in_peace(directory: pathlib.Path) -> None:
    """Regression: CPython crashed when a memoryview and what libkvfs had exported of it were garbage together."""

    def body() -> None:
        with kvfs.connect(directory, "cycle", gpu=None, read_only=True) as client:
            for call in (lambda items: client.put(items), lambda items: client.get_into(items)):
                held = []
                try:
                    call([(b"a", memoryview(bytearray(10))), (b"\xff" * 127, memoryview(b"read-only"))])
                except KvfsError as error:
                    held.append(error)
                    held.append(held)
                    del error
                assert held
                del held
                gc.collect()

    in_child(body)


# ---- who may connect ----


@pytest.fixture
def pool(own_pool: Callable[..., Pool]) -> Pool:
    """A pool with blocks k0 to k9, to which clients of the namespace "bad" connect."""
    made = own_pool(files=2, size="64M")
    with kvfs.connect(made.mount, "bad", gpu=None) as client:
        client.put(BLOCKS.items())
    return made


BLOCKS = {f"k{i}".encode(): content(30_000 * i + i, f"bad {i}") for i in range(10)}


def _become(uid: int, gid: int, groups: list[int]) -> None:
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def assert_reads(client: kvfs.Client) -> None:
    memory = {key: bytearray(len(data)) for key, data in BLOCKS.items()}
    assert client.get_into(memory.items()) == [len(data) for data in BLOCKS.values()]
    for key, data in BLOCKS.items():
        assert_same(memory[key], data, f"block {key!r}")


@pytest.mark.parametrize(("gid", "groups"), [(0, [4711]), (4711, [0]), (4711, [5, 0, 7])])
def test_a_member_of_the_daemons_group_reads_and_writes_and_controls_nothing(
    pool: Pool, gid: int, groups: list[int]
) -> None:
    pool.path.chmod(0o710)  # the way to the socket is the administrator's to open; what else lies there stays closed
    (pool.mount / "own").mkdir(mode=0o777)
    (pool.mount / "own").chmod(0o777)

    def body() -> None:
        _become(NOBODY, gid, groups)
        with kvfs.connect(pool.mount, "bad", gpu=None) as client:
            assert_reads(client)
        with kvfs.connect(pool.mount / "own", "space", gpu=None) as client:
            client.put([(b"key", b"data")])
            assert bytes(client.get(b"key") or b"") == b"data"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(pool.path / "control.sock"))
            connection.sendall(b'{"command": "stop"}\n')
            assert b"user 65534 may not control this pool" in connection.recv(4096)
        for private in ("pool.toml", "index", "devices/0"):
            with pytest.raises(PermissionError):
                os.open(pool.path / private, os.O_RDONLY)

    in_child(body)
    about = os.stat(pool.mount / "own" / "space" / "6b" / "6b6579")
    assert (about.st_uid, about.st_gid) == (NOBODY, gid)
    assert pool.status()["pool"]["state"] == "mounted"


@pytest.mark.parametrize(("gid", "groups"), [(NOBODY, []), (4711, [5, 7])])
def test_a_user_of_another_group_gets_nothing(pool: Pool, gid: int, groups: list[int]) -> None:
    def body() -> tuple[int, str]:
        _become(NOBODY, gid, groups)
        with pytest.raises(ClientError) as caught:
            kvfs.connect(pool.mount, "bad", gpu=None)
        return caught.value.errno, str(caught.value)

    number, text = in_child(body)
    assert number == errno.EACCES and str(pool.path) in text, text


# ---- a daemon that lies ----

HELLO, DESCRIPTORS, RESERVE, COMMIT, DELETE, LIST = range(1, 7)
CLOSE = 11
FRAME = struct.Struct("<IHHiI")
HANG_UP = b"hang up"  # an edit returns it to say nothing more, and close
SILENCE = b"silence"  # ... and stay

# (kind, frame head and payload, descriptors) -> what to send instead, and the descriptors with its first byte.
Edit = Callable[[int, bytearray, list[int]], "bytes | tuple[bytes, list[int]]"]


class Liar:
    """A double between clients and the daemon: it sits on the pool's socket and changes what the daemon says."""

    def __init__(self, pool: Pool, edit: Edit) -> None:
        self._path, self._real, self._edit = pool.path / "control.sock", pool.path / "control.real", edit

    def __enter__(self) -> None:
        self._path.rename(self._real)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._path))
        listener.listen(8)
        self._pid = os.fork()
        if self._pid == 0:
            with contextlib.suppress(BaseException):
                signal.setitimer(signal.ITIMER_REAL, 0)
                while True:
                    client, _ = listener.accept()
                    threading.Thread(target=self._serve, args=(client,), daemon=True).start()
            os._exit(0)
        listener.close()

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._path.unlink()
        self._real.rename(self._path)

    def _serve(self, client: socket.socket) -> None:
        daemon = socket.socket(socket.AF_UNIX)
        daemon.connect(str(self._real))
        threading.Thread(target=self._pass_on, args=(client, daemon), daemon=True).start()
        pending, fds = bytearray(), []
        with contextlib.suppress(OSError):
            while True:
                data, more, _, _ = socket.recv_fds(daemon, 1 << 20, 128)
                if not data:
                    break
                pending += data
                fds += more
                while len(pending) >= FRAME.size and len(pending) >= FRAME.size + FRAME.unpack_from(pending)[0]:
                    size = FRAME.size + FRAME.unpack_from(pending)[0]
                    frame = bytearray(pending[:size])
                    del pending[:size]
                    kind = FRAME.unpack_from(frame)[1]
                    sent = self._edit(kind, frame, fds if kind == DESCRIPTORS else [])
                    piece, with_it = sent if isinstance(sent, tuple) else (sent, fds if kind == DESCRIPTORS else [])
                    if kind == DESCRIPTORS:
                        fds = []
                    if piece == HANG_UP:
                        raise OSError
                    if piece == SILENCE:
                        time.sleep(60)
                    if with_it:
                        socket.send_fds(client, [piece[:1]], with_it)
                        piece = piece[1:]
                    client.sendall(piece)
        for end in (client, daemon):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, client: socket.socket, daemon: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                daemon.sendall(data)
        with contextlib.suppress(OSError):
            daemon.shutdown(socket.SHUT_RDWR)


def use(pool: Pool, *, timeout_s: float = 10, limit_s: float = 20) -> dict[str, str]:
    """Connect and try everything, in a child: "ok" or the name of the KvfsError, by call. Nothing else may happen:
    no other exception, no wrong byte, no call that takes long, no descriptor left."""

    def body() -> dict[str, str]:
        outcome: dict[str, str] = {}

        def attempt(name: str, call: Callable[[], Any]) -> Any:
            begun, value = time.monotonic(), None
            try:
                value = call()
                outcome[name] = "ok"
            except KvfsError as error:
                assert str(error) and "\n" not in str(error)
                outcome[name] = type(error).__name__
            took = time.monotonic() - begun
            assert took < limit_s * helpers.slowness(), f"{name} took {took:.1f} s"
            return value

        kvfs.Client.buffer(1)  # lazy parts are loaded once
        before = len(os.listdir("/proc/self/fd"))
        client = attempt("connect", lambda: kvfs.connect(pool.mount, "bad", timeout_s=timeout_s, gpu=None))
        if client is not None:
            memory = {key: bytearray(len(data)) for key, data in BLOCKS.items()}
            for turn in ("", " again"):
                read = attempt("get" + turn, lambda: client.get_into(memory.items())) or []
                for (key, data), size in zip(BLOCKS.items(), read, strict=False):
                    if size is not None:
                        assert_same(memory[key], data, f"block {key!r}")
                attempt("exists" + turn, lambda: client.exists(BLOCKS))
                attempt("put" + turn, lambda: client.put([(f"new {i}", content(70_000 * i)) for i in range(3)]))
                attempt("list" + turn, lambda: list(client.list()))
                attempt("delete" + turn, lambda: client.delete([b"none", b"new 2"]))
            attempt("close", client.close)
            assert outcome["close"] == "ok"
        assert len(os.listdir("/proc/self/fd")) == before, "descriptors were left open"
        return outcome

    return in_child(body)


def _is_whole(pool: Pool) -> None:
    """The daemon serves on, nothing is lost, nothing is left reserved."""
    with kvfs.connect(pool.mount, "bad", gpu=None) as client:
        assert_reads(client)
    wait_until(lambda: pool.status()["counters"]["native_clients"] == 0, "the clients to be gone")
    wait_until(lambda: pool.status()["counters"]["reserved_bytes"] == 0, "every reservation to be taken back")
    pool.umount()
    assert pool.command("fsck", str(pool.path), "--verify-data", check=False).returncode == 0


def set_word(kind: int, offset: int, format_: str, value: int) -> Edit:
    """Change one number of every frame of this kind."""

    def edit(got: int, frame: bytearray, fds: list[int]) -> bytes:
        if got == kind:
            struct.pack_into(format_, frame, offset, value)
        return bytes(frame)

    return edit


def replaced(kind: int, make: Callable[[bytes], bytes]) -> Edit:
    return lambda got, frame, fds: make(bytes(frame)) if got == kind else bytes(frame)


def with_payload(kind: int, make: Callable[[bytes], bytes]) -> Edit:
    """Change the payload, and its size in the frame's head accordingly."""

    def whole(frame: bytes) -> bytes:
        payload = make(frame[FRAME.size :])
        return FRAME.pack(len(payload), *FRAME.unpack_from(frame)[1:]) + payload

    return replaced(kind, whole)


WELCOME = FRAME.size  # where its fields begin
_WELCOMES = {
    "the version before": (set_word(HELLO, WELCOME, "<I", 3), "VersionError"),
    "the version behind": (set_word(HELLO, WELCOME, "<I", 6), "VersionError"),
    "no device": (set_word(HELLO, WELCOME + 64, "<I", 0), "VersionError"),
    "more devices than it tells of": (set_word(HELLO, WELCOME + 64, "<I", 3), "VersionError"),
    "2**32-1 devices": (set_word(HELLO, WELCOME + 64, "<I", 0xFFFFFFFF), "VersionError"),
    "width 0": (set_word(HELLO, WELCOME + 56, "<I", 0), "VersionError"),
    "width over devices": (set_word(HELLO, WELCOME + 56, "<I", 3), "VersionError"),
    "no segment": (set_word(HELLO, WELCOME + 60, "<I", 0), "VersionError"),
    "2**32-1 segments": (set_word(HELLO, WELCOME + 60, "<I", 0xFFFFFFFF), "VersionError"),
    "2**31 segments": (set_word(HELLO, WELCOME + 60, "<I", 1 << 31), "VersionError"),
    "stripe unit 0": (set_word(HELLO, WELCOME + 48, "<Q", 0), "VersionError"),
    "stripe unit 5000": (set_word(HELLO, WELCOME + 48, "<Q", 5000), "VersionError"),
    "stripe unit 2**63": (set_word(HELLO, WELCOME + 48, "<Q", 1 << 63), "VersionError"),
    "zone size 0": (set_word(HELLO, WELCOME + 40, "<Q", 0), "VersionError"),
    "zone size 2**63": (set_word(HELLO, WELCOME + 40, "<Q", 1 << 63), "VersionError"),
    "another epoch": (set_word(HELLO, WELCOME + 24, "<Q", 77), "VersionError"),
    "another secret": (set_word(HELLO, WELCOME + 32, "<Q", 77), None),
    "zones elsewhere": (set_word(HELLO, WELCOME + 80, "<Q", 1 << 20), "ok"),
    "zones behind the end": (set_word(HELLO, WELCOME + 80, "<Q", 1 << 62), "ok"),
    "zones at no page": (set_word(HELLO, WELCOME + 80, "<Q", 12345), None),
    "a member on device 2**32-1": (set_word(HELLO, WELCOME + 80 + 16, "<I", 0xFFFFFFFF), "VersionError"),
    "a member in zone 2**32-1": (set_word(HELLO, WELCOME + 80 + 16 + 4, "<I", 0xFFFFFFFF), "ok"),
    "cut": (with_payload(HELLO, lambda payload: payload[:-8]), "VersionError"),
    "cut in its head": (with_payload(HELLO, lambda payload: payload[:40]), "VersionError"),
    "empty": (with_payload(HELLO, lambda payload: b""), "VersionError"),
    "too long": (with_payload(HELLO, lambda payload: payload + bytes(8)), "VersionError"),
    "half, then the end": (lambda kind, frame, fds: frame[:100] if kind == HELLO else HANG_UP, "NotMountedError"),
    "half, then nothing": (lambda kind, frame, fds: frame[:100] if kind == HELLO else SILENCE, "DeadlineError"),
    "nothing": (lambda kind, frame, fds: SILENCE, "DeadlineError"),
    "the end": (lambda kind, frame, fds: HANG_UP, "NotMountedError"),
    "4 GiB": (set_word(HELLO, 0, "<I", 0xFFFFFFFF), "VersionError"),
    "200 MiB that never come": (set_word(HELLO, 0, "<I", 200 << 20), "DeadlineError"),
    "of another type": (set_word(HELLO, 4, "<H", COMMIT), "VersionError"),
    "with a status and no message": (
        replaced(HELLO, lambda frame: FRAME.pack(0, HELLO, 0, -errno.EPERM, 0)),
        "ClientError",
    ),
    "with a status and a message that never ends": (
        replaced(HELLO, lambda frame: FRAME.pack(1 << 30, HELLO, 0, -errno.EPERM, 0) + b"no " * 10000),
        "ClientError",
    ),
    "close": (replaced(HELLO, lambda frame: FRAME.pack(0, CLOSE, 0, 0, 0)), "VersionError"),
    "zeros": (replaced(HELLO, lambda frame: bytes(len(frame))), "VersionError"),
    "JSON": (replaced(HELLO, lambda frame: b'{"ok": false, "error": "no command"}\n'), "VersionError"),
}


@pytest.mark.timeout(300)
def test_a_welcome_that_is_wrong_is_refused_or_harmless(pool: Pool) -> None:
    for name, (edit, expected) in _WELCOMES.items():
        try:
            with Liar(pool, edit):
                outcome = use(pool, timeout_s=1 if expected in ("DeadlineError", None) else 10)
            assert expected is None or outcome["connect"] == expected, outcome
        except BaseException as error:
            error.add_note(f"a welcome: {name}")
            raise
    # Zones that are elsewhere may have been written to: a daemon is trusted with that.
    with kvfs.connect(pool.mount, "bad", gpu=None) as client:
        assert client.exists([b"none"]) == [False]


def _memfd(data: bytes) -> int:
    fd = os.memfd_create("double")
    os.write(fd, data)
    return fd


def _half_of(fd: int) -> int:
    """The table, its file cut in half."""
    half = os.memfd_create("half")
    os.truncate(half, os.fstat(fd).st_size // 2)
    os.pwrite(half, os.pread(fd, 1 << 16, 0), 0)
    return half


def descriptors(make: Callable[[list[int]], list[int]]) -> Edit:
    def edit(kind: int, frame: bytearray, fds: list[int]) -> bytes | tuple[bytes, list[int]]:
        return (bytes(frame), make(fds)) if kind == DESCRIPTORS else bytes(frame)

    return edit


def _opened(path: str, flags: int = os.O_RDWR) -> int:
    return os.open(path, flags)


_DESCRIPTORS = {
    "none": (descriptors(lambda fds: []), "VersionError"),
    "nothing, ever": (lambda kind, frame, fds: frame if kind == HELLO else SILENCE, "DeadlineError"),
    "the end": (lambda kind, frame, fds: frame if kind == HELLO else HANG_UP, "NotMountedError"),
    "one too few": (descriptors(lambda fds: fds[:-1]), "DeadlineError"),
    "one too many": (descriptors(lambda fds: [*fds, fds[0]]), "VersionError"),
    "a hundred": (descriptors(lambda fds: [fds[0]] * 100), "VersionError"),
    "with a payload": (with_payload(DESCRIPTORS, lambda payload: b"payload"), "VersionError"),
    "no table but a device": (descriptors(lambda fds: [fds[1], *fds[1:]]), "VersionError"),
    "an empty table": (descriptors(lambda fds: [_memfd(b""), *fds[1:]]), "VersionError"),
    "a table of noise": (descriptors(lambda fds: [_memfd(random.Random(1).randbytes(MIB)), *fds[1:]]), "VersionError"),
    "half a table": (descriptors(lambda fds: [_half_of(fds[0]), *fds[1:]]), "VersionError"),
    "a pipe for a table": (descriptors(lambda fds: [os.pipe()[0], *fds[1:]]), "VersionError"),
    "devices that changed places": (descriptors(lambda fds: [fds[0], fds[2], fds[1]]), "ok"),
    "/dev/zero for a device": (descriptors(lambda fds: [*fds[:2], _opened("/dev/zero")]), "ok"),
    "/dev/null for a device": (descriptors(lambda fds: [*fds[:2], _opened("/dev/null")]), "ok"),
    "a pipe for a device": (descriptors(lambda fds: [*fds[:2], os.pipe()[0]]), None),
    "a directory for a device": (descriptors(lambda fds: [*fds[:2], _opened("/", os.O_RDONLY)]), None),
    "a device for reading": (
        descriptors(lambda fds: [*fds[:2], _opened(f"/proc/self/fd/{fds[2]}", os.O_RDONLY)]),
        "ok",
    ),
    "a short file for a device": (descriptors(lambda fds: [*fds[:2], _memfd(bytes(1 << 20))]), "ok"),
}


@pytest.mark.timeout(300)
def test_descriptors_that_are_wrong_are_refused_or_harmless(pool: Pool) -> None:
    for name, (edit, expected) in _DESCRIPTORS.items():
        try:
            with Liar(pool, edit):
                outcome = use(pool, timeout_s=1 if expected in ("DeadlineError", None) else 10)
            assert expected is None or outcome["connect"] == expected, outcome
        except BaseException as error:
            error.add_note(f"descriptors: {name}")
            raise
    with kvfs.connect(pool.mount, "bad", gpu=None) as client:
        assert client.exists([b"none"]) == [False]


_ANSWERS: dict[str, Callable[[int], Edit]] = {
    "of another id": lambda kind: set_word(kind, 12, "<I", 999_999),
    "of another type": lambda kind: set_word(kind, 4, "<H", 7),
    "of no type": lambda kind: set_word(kind, 4, "<H", 0xFFFF),
    "of 4 GiB": lambda kind: set_word(kind, 0, "<I", 0xFFFFFFFF),
    "an error": lambda kind: replaced(kind, lambda frame: _refusal(frame, -errno.EPERM, b"no")),
    "an error without words": lambda kind: replaced(kind, lambda frame: _refusal(frame, -errno.ENOSPC, b"")),
    "an error that is none": lambda kind: set_word(kind, 8, "<i", -(1 << 31)),
    "a positive status": lambda kind: set_word(kind, 8, "<i", 5),
    "close": lambda kind: replaced(kind, lambda frame: FRAME.pack(0, CLOSE, 0, 0, 0)),
    "empty": lambda kind: with_payload(kind, lambda payload: b""),
    "half": lambda kind: with_payload(kind, lambda payload: payload[: len(payload) // 2]),
    "half, then the end": lambda kind: _once(kind, lambda frame: frame[: FRAME.size + 4]),
    "half a head, then the end": lambda kind: _once(kind, lambda frame: frame[:7]),
    "the end": lambda kind: replaced(kind, lambda frame: HANG_UP),
    "too long": lambda kind: with_payload(kind, lambda payload: payload + b"\xff" * 64),
    "zeros": lambda kind: with_payload(kind, lambda payload: bytes(len(payload))),
    "ones": lambda kind: with_payload(kind, lambda payload: b"\xff" * len(payload)),
    "noise": lambda kind: with_payload(kind, lambda payload: random.Random(kind).randbytes(len(payload))),
    "twice": lambda kind: replaced(kind, lambda frame: frame + frame),
}


def _refusal(frame: bytes, status: int, text: bytes) -> bytes:
    _, kind, _, _, number = FRAME.unpack_from(frame)
    return FRAME.pack(len(text), kind, 0, status, number) + text


def _once(kind: int, make: Callable[[bytes], bytes]) -> Edit:
    """The first such frame as made, then nothing more."""
    done = []

    def edit(got: int, frame: bytearray, fds: list[int]) -> bytes:
        if done:
            return HANG_UP
        if got == kind:
            done.append(got)
            threading.Timer(0.1, os._exit, (0,)).start()  # the double's process
            return make(bytes(frame))
        return bytes(frame)

    return edit


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [RESERVE, COMMIT, DELETE, LIST], ids=["reserve", "commit", "delete", "list"])
def test_an_answer_that_is_wrong_fails_that_call_and_harms_nothing(pool: Pool, kind: int) -> None:
    for name, make in _ANSWERS.items():
        try:
            with Liar(pool, make(kind)):
                outcome = use(pool)
            assert outcome["connect"] == outcome["exists"] == outcome["get"] == "ok", outcome
        except BaseException as error:
            error.add_note(f"an answer: {name}")
            raise
    _is_whole(pool)


@pytest.mark.timeout(300)
def test_reservations_with_single_wrong_numbers_are_found_out(pool: Pool) -> None:
    """Every field of the first item of a reservation, at its bounds. The client writes only to places it was given, and
    never outside the memory that it got for them."""
    item = FRAME.size
    fields = {
        "error": (8, "<i"),
        "header_pages": (12, "<I"),
        "run_count": (16, "<I"),
        "record_size": (20, "<I"),
        "ancestors_size": (24, "<I"),
        "segment": (40, "<I"),
        "page": (44, "<I"),
        "page_count": (48, "<I"),
    }
    for name, (offset, format_) in fields.items():
        large = (0xFFFFFFFF, 0x80000000) if format_ == "<I" else (-1, -(1 << 31))
        for value in (0, 1, 7, 255, 4096, 0x7FFFFFFF, *large):
            try:
                with Liar(pool, set_word(RESERVE, item + offset, format_, value)):
                    outcome = use(pool)
                assert outcome["get"] == "ok", outcome
            except BaseException as error:
                error.add_note(f"a reservation with {name} {value}")
                raise
    with kvfs.connect(pool.mount, "bad", gpu=None) as client:
        client.put([(b"after", b"data")])
        assert bytes(client.get(b"after") or b"") == b"data"


@pytest.mark.timeout(400)
def test_noise_in_what_the_daemon_says_neither_crashes_nor_hangs_a_client(pool: Pool) -> None:
    """KVFS_FUZZ_SEED repeats it, KVFS_FUZZ_ROUNDS makes it longer."""
    for number in range(int(os.environ.get("KVFS_FUZZ_ROUNDS") or helpers.often(8, 40))):
        chooser = random.Random(f"{SEED} {number}")
        kind = chooser.choice((HELLO, RESERVE, RESERVE, COMMIT, DELETE, LIST))

        def edit(
            got: int, frame: bytearray, fds: list[int], wanted: int = kind, chooser: random.Random = chooser
        ) -> bytes:
            if got == wanted:
                for _ in range(chooser.choice((1, 1, 2, 8))):
                    at = chooser.randrange(0 if chooser.random() < 0.1 else min(FRAME.size, len(frame) - 1), len(frame))
                    size = min(chooser.choice((1, 2, 4, 8)), len(frame) - at)
                    frame[at : at + size] = chooser.choice((chooser.randbytes(size), bytes(size), b"\xff" * size))
            return bytes(frame)

        try:
            with Liar(pool, edit):
                # A size that is too large is waited for: 30 s where the daemon may have to evict.
                use(pool, timeout_s=1, limit_s=35)
        except BaseException as error:
            error.add_note(f"round {number}; repeat with KVFS_FUZZ_SEED={SEED}")
            raise


def test_a_daemon_of_another_pool_is_never_taken_for_the_old_one(pool: Pool, own_pool: Callable[..., Pool]) -> None:
    """Another daemon answers at the same place: its blocks are not those of these keys."""
    other = own_pool(files=1, size="32M")
    with kvfs.connect(pool.mount, "bad", gpu=None) as client:
        assert_reads(client)
        pool.kill()
        wait_until(lambda: not client.information().connected, "the end of the daemon's last thread")
        (pool.path / "control.sock").unlink(missing_ok=True)
        (pool.path / "control.sock").symlink_to(other.path / "control.sock")
        for call in (
            lambda: client.get_into([(b"k1", bytearray(MIB))]),
            lambda: client.exists([b"k1"]),
            lambda: client.put([(b"k1", b"data")]),
        ):
            with pytest.raises(PoolChangedError, match="another pool"):
                call()
        (pool.path / "control.sock").unlink()
        pool.remount()
        assert_reads(client)


# ---- a device that hangs ----


class Stuck:
    """A pool of two devices, the second on a filesystem that can be stopped (stoppable.py)."""

    def __init__(self, base: pathlib.Path) -> None:
        self.mountpoint = base / "stoppable"
        self.mountpoint.mkdir()
        target = base / "target"
        helpers.run("truncate", "--size", "64M", target)
        helpers.run("truncate", "--size", "64M", base / "sound")
        self.devices = (str(base / "sound"), str(self.mountpoint / "device"))
        script = helpers.REPOSITORY / "tests/stoppable.py"
        self._process = subprocess.Popen(
            [sys.executable, script, target, self.mountpoint], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def __call__(self, command: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == command.partition(" ")[0]

    def close(self) -> None:
        """End it, and with it every request that waits: the kernel aborts the connection."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(20)
        finally:
            self._process.kill()
            helpers.detach(self.mountpoint)


@pytest.fixture
def stuck(tmp_path: pathlib.Path) -> Iterator[tuple[Pool, Stuck]]:
    helpers.requires_fuse()
    filesystem = Stuck(tmp_path)
    try:
        with Pool(devices=filesystem.devices, format_args=("--stripe-width", "1")) as pool:
            try:
                yield pool, filesystem
            finally:
                filesystem("go")
    finally:
        filesystem.close()


MANY = {f"block {i}".encode(): content(200 * KIB + i, f"stuck {i}") for i in range(60)}


def _on_stuck(client: kvfs.Client, filesystem: Stuck) -> list[bytes]:
    """The keys whose blocks lie on the stuck device: those that do not answer."""
    filesystem("stop read")
    memory = {key: bytearray(len(data)) for key, data in MANY.items()}
    results = client.get_into(memory.items())
    filesystem("go")
    wait_until(lambda: client.statistics().busy == 0, "the device's late answers")
    on_it = [key for key, size in zip(MANY, results, strict=True) if size is None]
    assert 0 < len(on_it) < len(MANY), f"{len(on_it)} of {len(MANY)} blocks are on the stuck device"
    wait_until(lambda: client.get(on_it[0]) is not None, "the device to be tried again")
    return on_it


@pytest.mark.timeout(180)
def test_a_stuck_device_costs_one_deadline_and_keeps_the_memory(stuck: tuple[Pool, Stuck]) -> None:
    pool, filesystem = stuck
    with kvfs.connect(pool.mount, gpu=None, timeout_s=5) as client:
        client.put(MANY.items())
        on_it = _on_stuck(client, filesystem)
        filesystem("stop read")
        memory = {key: bytearray(len(data)) for key, data in MANY.items()}
        begun = time.monotonic()
        results = client.get_into(memory.items())
        took = time.monotonic() - begun
        assert took < 15 * helpers.slowness(), f"{took:.1f} s for a deadline of 5 s; one after the other they take 20"
        for key, size in zip(MANY, results, strict=True):
            assert (size is None) == (key in on_it), key
            if size is not None:
                assert_same(memory[key], MANY[key], f"block {key!r} of the sound device")
        counted = client.statistics()
        busy = [key for key in on_it if _is_held(memory[key])]
        assert 0 < counted.busy == len(busy) <= counted.timeouts, (counted, len(busy))
        for start in (0, 1000):
            with pytest.raises(BusyBufferError, match="may still write into it"):
                client.get_into([(b"none", memoryview(memory[busy[0]])[start:])])
        # Elsewhere all goes on, and a second call does not wait for the same device.
        begun = time.monotonic()
        sound = [key for key in MANY if key not in on_it]
        assert None not in client.get_into([(key, bytearray(len(MANY[key]))) for key in sound])
        assert all(client.exists(MANY))
        assert client.get(on_it[-1]) is None
        assert time.monotonic() - begun < 15 * helpers.slowness()
        filesystem("go")
        wait_until(lambda: client.statistics().busy == 0, "the device's late answers")
        gc.collect()  # the tracebacks of the errors above
        assert client.library.held == 0 and not any(_is_held(memory[key]) for key in busy)
        wait_until(lambda: client.get(on_it[0]) is not None, "the device's return")
        assert client.get_into(memory.items()) == [len(data) for data in MANY.values()]
        for key, data in MANY.items():
            assert_same(memory[key], data, f"block {key!r} after the device's return")


def _is_held(memory: bytearray) -> bool:
    try:
        memory.append(0)
    except BufferError:
        return True
    memory.pop()
    return False


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_memory_given_away_too_early_gets_no_late_bytes_where_it_was_mapped_anew(stuck: tuple[Pool, Stuck]) -> None:
    """Against the rules, in C: what was unmapped stays the device's, and what comes in its place is not written to."""
    pool, filesystem = stuck
    with kvfs.connect(pool.mount, "c", gpu=None, timeout_s=2) as client:
        client.put(MANY.items())
        on_it = _on_stuck(client, filesystem)

    def body() -> None:
        c = Native(pool.mount, 2000)
        libc = helpers.libc
        libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_long] * 5]
        size = 256 * KIB
        at = libc.mmap(None, size, 3, 0x22, -1, 0)
        results = c.ffi.new("int64_t[1]")
        filesystem("stop read")
        assert c.call("kvfs_get", c.keys(on_it[0]), c.buffers((at, size)), results) == 0
        assert results[0] == -errno.ETIMEDOUT and c.call("kvfs_busy", c.ffi.cast("void *", at), size) == 1
        assert libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size)) == 0
        assert libc.mmap(at, size, 3, 0x32, -1, 0) == at  # MAP_FIXED
        anew = c.ffi.buffer(c.ffi.cast("char *", at), size)
        anew[:] = b"\xaa" * size
        assert c.call("kvfs_get", c.keys(on_it[0]), c.buffers((at, size)), results) == -errno.EBUSY
        filesystem("go")
        wait_until(lambda: c.call("kvfs_busy", c.ffi.cast("void *", at), size) == 0, "the late answer")
        assert bytes(anew) == b"\xaa" * size
        c.lib.kvfs_close(c.client)

    in_child(body)


@pytest.mark.timeout(180)
def test_a_cancelled_read_of_a_stuck_device_ends_at_once_and_keeps_its_memory(stuck: tuple[Pool, Stuck]) -> None:
    pool, filesystem = stuck
    with kvfs.connect(pool.mount, gpu=None, timeout_s=10) as client:
        client.put(MANY.items())
        on_it = _on_stuck(client, filesystem)
        filesystem("stop read")
        memory = bytearray(len(MANY[on_it[0]]))

        async def main() -> int:
            with trio.move_on_after(0.2) as scope:
                await client.trio().get_into([(on_it[0], memory)])
            assert scope.cancelled_caught
            return client.library.under_way()

        assert trio.run(main) == 1, "it waited for its deadline"
        wait_until(lambda: client.library.under_way() == 0, "its deadline")
        assert _is_held(memory), "the device has not answered"
        filesystem("go")
        wait_until(lambda: client.statistics().busy == 0, "the device's late answer")
        wait_until(lambda: not _is_held(memory), "the memory to be let go of")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_writing_to_a_stuck_device_fails_in_time_and_leaves_nothing(stuck: tuple[Pool, Stuck]) -> None:
    pool, filesystem = stuck
    with kvfs.connect(pool.mount, gpu=None, timeout_s=2) as client:
        client.put(MANY.items())
        filesystem("stop write")
        begun = time.monotonic()
        newer = {key: content(150 * KIB, f"newer {key!r}") for key in MANY}
        with pytest.raises(PutError) as caught:
            client.put(newer.items())
        took = time.monotonic() - begun
        assert took < 20 * helpers.slowness(), f"{took:.1f} s: a device has 2 s, the daemon as much for an answer"
        # All of them where both the open segment and the one that is ready lie on that device: then RESERVE waits, too.
        assert 0 < len(caught.value.failed) <= len(newer)
        assert {error.errno for error in caught.value.failed.values()} <= {errno.ETIMEDOUT, errno.ENOSPC}
        filesystem("go")
        for key in MANY:  # old or new, whole, as put said
            stored = client.get(key)
            if stored is not None:
                assert_same(
                    stored,
                    MANY[key] if key not in newer or key in caught.value.failed else newer[key],
                    f"block {key!r}",
                )
    wait_until(
        lambda: pool.status()["counters"]["reserved_bytes"] == 0, "every reservation to be taken back", timeout_s=60
    )
    pool.umount()
    fsck = pool.command("fsck", str(pool.path), "--verify-data", check=False)
    assert fsck.returncode == 0, fsck.stdout + fsck.stderr


@pytest.mark.timeout(180)
def test_a_client_killed_while_a_device_is_stuck_is_gone_for_the_daemon(stuck: tuple[Pool, Stuck]) -> None:
    """The process itself cannot end before its device answers (the kernel's rule); its reservations must not wait."""
    pool, filesystem = stuck
    filesystem("stop write")
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException), kvfs.connect(pool.mount, gpu=None, timeout_s=20) as client:
            client.put(MANY.items())
        os._exit(0)
    try:
        wait_until(lambda: pool.status()["counters"]["reservations_open"] > 0, "the put to begin")
        time.sleep(0.3)
    finally:
        os.kill(pid, signal.SIGKILL)
        filesystem("go")
        os.waitpid(pid, 0)
    wait_until(lambda: pool.status()["counters"]["reserved_bytes"] == 0, "every reservation to be taken back")
    with kvfs.connect(pool.mount, gpu=None) as client:
        client.put(MANY.items())
        for key, data in MANY.items():
            assert_same(client.get(key) or b"", data, f"block {key!r}")
    pool.umount()
    assert pool.command("fsck", str(pool.path), "--verify-data", check=False).returncode == 0
