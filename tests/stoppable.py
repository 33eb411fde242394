"""python stoppable.py TARGET MOUNTPOINT: a filesystem of one file, MOUNTPOINT/device, that can be told to be sick.

A test double of a sick device. Reads and writes go through to TARGET. A line "stop read" or "stop write" on stdin holds
later ones. "fail now" fails them with EIO, "slow MS" delays each, "go" lets them all through. Each line is answered by
one. It ends with its stdin, and whoever waits for an answer then gets ENOTCONN.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys

import pyfuse3
import trio

NAME = b"device"
INODE = pyfuse3.ROOT_INODE + 1


class Stoppable(pyfuse3.Operations):
    def __init__(self, target: int) -> None:
        super().__init__()
        self._target = target
        self.gates = {"read": trio.Event(), "write": trio.Event()}
        self.go()

    def go(self) -> None:
        self.failing, self.delay_s = False, 0.0
        for gate in self.gates.values():
            gate.set()

    def stop(self, what: str) -> None:
        self.gates[what] = trio.Event()

    def obey(self, verb: str, what: str) -> None:
        if verb == "stop":
            self.stop(what)
        elif verb == "fail":
            self.failing = True
        elif verb == "slow":
            self.delay_s = int(what) / 1000
        else:
            self.go()

    async def getattr(self, inode, ctx=None):
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = 0o040755 if inode == pyfuse3.ROOT_INODE else 0o100644
        entry.st_size = 0 if inode == pyfuse3.ROOT_INODE else os.fstat(self._target).st_size
        entry.entry_timeout = entry.attr_timeout = 3600
        return entry

    async def lookup(self, parent, name, ctx=None):
        if name != NAME:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(INODE)

    async def open(self, inode, flags, ctx):
        return pyfuse3.FileInfo(fh=inode)

    async def turn(self, kind):
        await self.gates[kind].wait()
        if self.delay_s:
            await trio.sleep(self.delay_s)
        if self.failing:
            raise pyfuse3.FUSEError(errno.EIO)

    async def read(self, fh, offset, size):
        await self.turn("read")
        return os.pread(self._target, size, offset)

    async def write(self, fh, offset, data):
        await self.turn("write")
        return os.pwrite(self._target, data, offset)

    async def fsync(self, fh, datasync):
        os.fdatasync(self._target)

    async def flush(self, fh):
        pass

    async def release(self, fh):
        pass


async def serve(operations: Stoppable) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pyfuse3.main)
        commands = trio.lowlevel.FdStream(os.dup(0))
        pending = b""
        print("ready", flush=True)
        while data := await commands.receive_some():
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                verb, _, what = line.decode().partition(" ")
                operations.obey(verb, what)
                print(verb, flush=True)
        os._exit(0)  # without an answer to what is held: the kernel aborts it


def main() -> None:
    target, mountpoint = sys.argv[1:]
    operations = Stoppable(os.open(target, os.O_RDWR))
    pyfuse3.init(operations, mountpoint, {*pyfuse3.default_options, "fsname=stoppable"})
    with contextlib.suppress(KeyboardInterrupt):
        trio.run(serve, operations)


if __name__ == "__main__":
    main()
