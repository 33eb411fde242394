"""`kvfs cufile-run`: run a program with libkvfs_cufile.so in the place of libcufile.so.0.

Knows where both libraries lie and how the dynamic linker finds ours; what that does is in native/shims/cufile/. The
real libcufile is looked for where the program would have found it; the library itself looks in fewer places.
"""

from __future__ import annotations

import glob
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvfs.errors import MissingFeatureError, UsageError

LIB = Path(__file__).resolve().parents[1] / "lib"
LIBRARY = LIB / "libkvfs_cufile.so"
# Leads to it by the names that programs open: libcufile.so.0, libcufile.so.
NAMES = LIB / "cufile"
REAL_NAME = "libcufile.so.0"
# An absolute path, or "none": do without the real library.
REAL_VARIABLE = "KVFS_CUFILE_REAL"


def library() -> Path:
    """The library. MissingFeatureError if it is not built."""
    if not LIBRARY.exists() or not (NAMES / REAL_NAME).exists():
        raise MissingFeatureError(f"{LIBRARY}: not built; run tools/setup")
    # The dynamic linker takes these for separators and knows no escape.
    if any(character in str(LIBRARY) for character in ": \t\n"):
        raise MissingFeatureError(f"{LIBRARY}: LD_PRELOAD cannot name a path with a space or a colon in it")
    return LIBRARY


def _directories(program: str, base: Mapping[str, str]) -> Iterator[str]:
    """Where a libcufile.so.0 may be, as patterns, the most special first."""

    def packages(prefix: str | os.PathLike[str]) -> Iterator[str]:
        # cufile/lib has CUDA 12's, cu13/lib CUDA 13's.
        yield f"{glob.escape(os.fspath(prefix))}/lib/python3*/site-packages/nvidia/*/lib"
        yield f"{glob.escape(os.fspath(prefix))}/lib/python3*/dist-packages/nvidia/*/lib"

    yield from (glob.escape(path) for path in base.get("LD_LIBRARY_PATH", "").split(":") if os.path.isabs(path))
    # Not resolved: the python of a virtual environment is a link out of it.
    found = shutil.which(program, path=base.get("PATH"))
    for prefix in (found and Path(os.path.abspath(found)).parent.parent, base.get("VIRTUAL_ENV"), sys.prefix):
        if prefix:
            yield from packages(prefix)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.path.isabs(base.get(variable, "")):
            yield f"{glob.escape(base[variable])}/lib64"
    machine = platform.machine()
    yield from ("/usr/local/cuda/lib64", "/usr/local/cuda-*/lib64", "/usr/local/cuda*/targets/*/lib")
    yield from (f"/usr/lib/{machine}-linux-gnu", "/usr/lib64", "/usr/lib", "/opt/cuda/lib64")


def _of_linker() -> str | None:
    """The entry of the dynamic linker's cache."""
    ldconfig = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    if ldconfig is None:
        return None
    try:
        listed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(rf"^\s*{re.escape(REAL_NAME)} \(.*=> (/.+)$", listed, flags=re.M)
    return match[1] if match else None


def find_real(program: str, base: Mapping[str, str]) -> Path | None:
    """The libcufile that this program would have used; None if there is none on this machine."""

    def candidates() -> Iterator[str]:
        for directory in _directories(program, base):
            yield from sorted(glob.glob(f"{directory}/{REAL_NAME}"), reverse=True)
        if listed := _of_linker():
            yield listed

    ours = (LIBRARY, *(NAMES / name for name in (REAL_NAME, "libcufile.so")))

    def is_real(path: str) -> bool:
        return os.path.exists(path) and not any(own.exists() and own.samefile(path) for own in ours)

    return next((Path(path) for path in candidates() if is_real(path)), None)


def environment(program: str, base: Mapping[str, str]) -> dict[str, str]:
    """`base`, with the library preloaded, found under its other name, and told where the real one is."""
    result = dict(base)
    result["LD_PRELOAD"] = ":".join(filter(None, (str(library()), base.get("LD_PRELOAD", ""))))
    result["LD_LIBRARY_PATH"] = ":".join(filter(None, (str(NAMES), base.get("LD_LIBRARY_PATH", ""))))
    if not base.get(REAL_VARIABLE):
        result[REAL_VARIABLE] = str(find_real(program, base) or "none")
    return result


def run(command: Sequence[str]) -> int:
    """Become the command. Returns only by an exception: MissingFeatureError, or UsageError if it cannot be run."""
    if not command:
        raise UsageError("cufile-run: no command given")
    given = environment(command[0], os.environ)
    if given[REAL_VARIABLE] == "none" and not os.environ.get(REAL_VARIABLE):
        print("kvfs: no libcufile.so.0 on this machine: cuFile will know files on kvfs mounts only", file=sys.stderr)
    try:
        os.execvpe(command[0], list(command), given)
    except OSError as error:
        raise UsageError(f"{command[0]}: {os.strerror(error.errno or 0)}") from error
