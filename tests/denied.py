"""Runs a program where system calls are denied, as a container's seccomp profile does: python denied.py WORD COMMAND...

WORD is ERRNO or ERRNO:CALL, such as EPERM, or ENOSYS:enter. CALL is setup, enter or register of io_uring; without it
all three are denied. It may be clone or clone3: no thread and no process is made. Several words have commas between
them. The filter is the kernel's, by seccomp(2), and holds for all that the program starts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

RINGS = {"setup": 425, "enter": 426, "register": 427}
CALLS = {**RINGS, "clone": 56, "clone3": 435}
PR_SET_NO_NEW_PRIVS = 38
SECCOMP = 277 if os.uname().machine == "aarch64" else 317
SET_MODE_FILTER, FLAG_TSYNC = 1, 1
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def deny(word: str) -> None:
    """All threads of this process, and all that comes from them, for good."""
    steps = [(LOAD, 0, 0, 0)]  # the number of the call
    for one in word.split(","):
        error, _, call = one.partition(":")
        for number in [CALLS[call]] if call else RINGS.values():
            steps += [(JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | int(getattr(errno, error)))]
    steps += [(RETURN, 0, 0, ALLOW)]
    program = Program(len(steps), b"".join(struct.pack("HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if libc.syscall(SECCOMP, SET_MODE_FILTER, FLAG_TSYNC, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    deny(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])
