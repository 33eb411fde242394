"""Plays file calls that it is told, one JSON list a line, and answers each with what the call gave.

Run with and without libkvfs_preload.so, both must say the same. Uses the C library's calls as Python and ctypes do.
"""

import ctypes
import errno
import fcntl
import hashlib
import json
import mmap
import os
import sys
import threading

libc = ctypes.CDLL(None, use_errno=True)
FILL = b"\xee"
PR_SET_DUMPABLE = 4
SYS_CLOSE, SYS_OPENAT = (3, 257) if os.uname().machine == "x86_64" else (57, 56)


def fields(status):
    return [
        status.st_dev,
        status.st_ino,
        status.st_mode,
        status.st_nlink,
        status.st_uid,
        status.st_gid,
        status.st_rdev,
        status.st_size,
        status.st_blksize,
        status.st_blocks,
        status.st_atime_ns,
        status.st_mtime_ns,
        status.st_ctime_ns,
    ]


def checked(result):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def memory(size, aligned):
    """Room that is page-aligned or certainly not, filled so that bytes nobody should touch are seen."""
    room = mmap.mmap(-1, size + 8192)
    view = memoryview(room)[0 if aligned else 13 :][:size]
    view[:] = FILL * size
    return view


def digest(count, views):
    """The result of a read, which must have left all other memory alone."""
    total = hashlib.sha256()
    for view in views:
        total.update(view)
    return [count, total.hexdigest()]


class Player:
    def __init__(self):
        self.files = {}

    def become(self, user, groups):
        os.setgroups(groups)
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        assert libc.prctl(PR_SET_DUMPABLE, 1) == 0  # or /proc/self belongs to root

    def stat(self, path):
        return fields(os.stat(path))

    def lstat(self, path):
        return fields(os.lstat(path))

    def fstat(self, name):
        return fields(os.fstat(self.files[name]))

    def fstatat(self, path, follow):
        """By a path below the root directory."""
        root = os.open("/", os.O_PATH)
        try:
            return fields(os.stat(path[1:], dir_fd=root, follow_symlinks=follow))
        finally:
            os.close(root)

    def statx(self, path, flags, mask):
        out = (ctypes.c_ubyte * 256)()
        checked(libc.statx(-100, os.fsencode(path), flags, mask, out))
        return bytes(out).hex()

    def access(self, path, mode):
        return os.access(path, mode)

    def faccessat(self, path, mode, flags):
        return checked(libc.faccessat(-100, os.fsencode(path), mode, flags))

    def chdir(self, path):
        os.chdir(path)

    def open(self, name, path, flags):
        descriptor = os.open(path, flags)
        if name in self.files:
            os.close(self.files[name])
        self.files[name] = descriptor

    def close(self, name):
        os.close(self.files.pop(name))

    def dup(self, name, other):
        self.files[other] = os.dup(self.files[name])

    def dup2(self, name, other):
        os.dup2(self.files[name], self.files[other])

    def set_direct(self, name):
        flags = fcntl.fcntl(self.files[name], fcntl.F_GETFL)
        fcntl.fcntl(self.files[name], fcntl.F_SETFL, flags | os.O_DIRECT)

    def read(self, name, sizes, aligned):
        views = [memory(size, aligned) for size in sizes]
        return digest(os.readv(self.files[name], views), views)

    def pread(self, name, sizes, offset, aligned):
        views = [memory(size, aligned) for size in sizes]
        return digest(os.preadv(self.files[name], views, offset), views)

    def read_plain(self, name, size):
        data = os.read(self.files[name], size)
        return [len(data), hashlib.sha256(data).hexdigest()]

    def pread_plain(self, name, size, offset):
        data = os.pread(self.files[name], size, offset)
        return [len(data), hashlib.sha256(data).hexdigest()]

    def lseek(self, name, offset, whence):
        return os.lseek(self.files[name], offset, whence)

    def whole(self, path):
        with open(path, "rb") as file:
            data = file.read()
        return [len(data), hashlib.sha256(data).hexdigest()]

    def map(self, name, size):
        with mmap.mmap(self.files[name], size, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapped:
            return hashlib.sha256(mapped).hexdigest()

    def raw_replace(self, name, path):
        """Close by a system call that no library sees, and open another file, which gets the number."""
        number = self.files[name]
        assert libc.syscall(SYS_CLOSE, number) == 0
        opened = checked(libc.syscall(SYS_OPENAT, -100, os.fsencode(path), os.O_RDONLY, 0))
        assert opened == number, (opened, number)

    def close_all(self):
        """As daemons do. The pipes to the test stay."""
        os.closerange(3, 1 << 16)
        self.files.clear()

    def close_each(self):
        closed = 0
        for descriptor in range(3, 4096):
            try:
                os.close(descriptor)
                closed += 1
            except OSError as error:
                assert error.errno == errno.EBADF
        self.files.clear()
        return closed

    def fork_read(self, name, size, path):
        """A child reads on from the shared offset and opens a file itself; then its parent reads on."""
        source, sink = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                given = [self.read_plain(name, size), self.stat(path), self.whole(path), self.stat(path)]
            except OSError as error:
                given = errno.errorcode[error.errno]
            os.write(sink, json.dumps(given).encode())
            os._exit(0)
        os.close(sink)
        with open(source, "rb") as stream:
            given = json.loads(stream.read())
        assert os.waitpid(child, 0)[1] == 0
        return [given, self.read_plain(name, size)]

    def threads_read(self, path, size, count):
        """Threads share one file offset: each piece is read once, by one of them, whole."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        pieces, lock = [], threading.Lock()

        def work():
            while True:
                view = memory(size, True)
                done = os.readv(descriptor, [view])
                with lock:
                    pieces.append([done, hashlib.sha256(view[:done]).hexdigest()])
                if done < size:
                    return

        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.close(descriptor)
        return [sorted(piece for piece in pieces if piece[0]), end]

    def threads_churn(self, paths, rounds):
        """Threads open, read and close, so that descriptor numbers move between files all the time."""
        digests, failures = {}, []

        def work(turn):
            try:
                for index in range(rounds):
                    path = paths[(turn + index) % len(paths)]
                    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
                    view = memory(os.fstat(descriptor).st_size, True)
                    done = os.preadv(descriptor, [view], 0)
                    os.close(descriptor)
                    digests.setdefault(path, set()).add((done, hashlib.sha256(view).hexdigest()))
            except Exception as error:
                failures.append(repr(error))

        threads = [threading.Thread(target=work, args=(turn,)) for turn in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [failures, sorted((path, sorted(found)) for path, found in digests.items())]

    def descriptors(self):
        """Those of the process: the numbers that an application may stumble over, and what they are."""
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                found.append([int(name), os.readlink(f"/proc/self/fd/{name}")])
            except OSError:
                continue
        return sorted(found)


def main():
    player = Player()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = getattr(player, name)(*arguments)
        except OSError as error:
            answer = errno.errorcode[error.errno]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


main()
