"""A FUSE filesystem of one file that never answers one process: what a hostile neighbour can mount.

Speaks /dev/fuse itself, from a thread: linux/fuse.h, mount(2). Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pathlib
import stat
import struct
import subprocess
import threading
from typing import Self

INIT, LOOKUP, GETATTR, OPEN, FORGET = 26, 1, 3, 14, 2
FILE = 2
_libc = ctypes.CDLL(None, use_errno=True)


class SilentFuse:
    """Mounted at `place`; the file is place/memory, of `size` bytes."""

    def __init__(self, place: pathlib.Path, size: int) -> None:
        self._place = place
        self._size = size
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        self.silent_to = 0  # a process
        self.unanswered: list[int] = []  # its requests' opcodes
        options = f"fd={self._fd},rootmode={stat.S_IFDIR:o},user_id=0,group_id=0"
        if _libc.mount(b"silent", str(place).encode(), b"fuse", 0, options.encode()) < 0:
            raise OSError(ctypes.get_errno(), f"mount at {place}")
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._fd, 1 << 20)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                continue
            _, opcode, unique, node, _, _, thread = struct.unpack_from("<IIQQIII", request)
            if self.silent_to and os.path.exists(f"/proc/{self.silent_to}/task/{thread}"):
                self.unanswered.append(opcode)
                continue
            with contextlib.suppress(OSError):
                self._answer(opcode, unique, node)

    def _answer(self, opcode: int, unique: int, node: int) -> None:
        if opcode == FORGET:
            return
        error, body = 0, b""
        if opcode == INIT:
            body = struct.pack("<IIIIHHIIHH32x", 7, 31, 65536, 0, 16, 16, 65536, 1, 0, 0)
        elif opcode == LOOKUP:
            body = struct.pack("<QQQQII", FILE, 0, 3600, 3600, 0, 0) + self._attributes(FILE)
        elif opcode == GETATTR:
            body = struct.pack("<QII", 3600, 0, 0) + self._attributes(node)
        elif opcode == OPEN:
            body = struct.pack("<QII", 0, 0, 0)
        else:
            error = -errno.ENOSYS
        os.write(self._fd, struct.pack("<IiQ", 16 + len(body), error, unique) + body)

    def _attributes(self, node: int) -> bytes:
        mode = stat.S_IFREG | 0o600 if node == FILE else stat.S_IFDIR | 0o700
        size = self._size if node == FILE else 0
        return struct.pack("<QQQQQQIIIIIIIIII", node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the connection: whatever waits for an answer gets an error."""
        minor = os.minor(os.stat(self._place).st_dev)
        pathlib.Path(f"/sys/fs/fuse/connections/{minor}/abort").write_text("1")
        subprocess.run(["umount", "-l", self._place], check=True, timeout=60)
        self._thread.join(60)
        os.close(self._fd)
