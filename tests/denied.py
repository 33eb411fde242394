"""Runs a program where system calls are denied, as a container's seccomp profile does: python denied.py WORD COMMAND...

WORD is ERRNO or ERRNO:CALL, such as EPERM, or ENOSYS:enter; CALL is setup, enter or register of io_uring, and without
it all three are denied. The filter is the kernel's, by prctl(2), and holds for all that the program starts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

CALLS = {"setup": 425, "enter": 426, "register": 427}
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def deny(word: str) -> None:
    """The calling thread, and all that comes from it, for good."""
    error, _, call = word.partition(":")
    numbers = [CALLS[call]] if call else list(CALLS.values())
    steps = [(LOAD, 0, 0, 0)]  # the number of the call
    steps += [(JUMP_IF_EQUAL, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERRNO | int(getattr(errno, error)))]
    program = Program(len(steps), b"".join(struct.pack("HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_SECCOMP")


if __name__ == "__main__":
    deny(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])
