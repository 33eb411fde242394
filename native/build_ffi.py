"""Builds the data plane as the cffi module `kvfs._native` (API mode, stable ABI), in place or into another directory.

    python native/build_ffi.py [--sanitize] [--output DIR]

The declarations that cffi sees are the public headers themselves: what is not C declarations is stripped, so header
and module cannot disagree. --sanitize builds with AddressSanitizer and UndefinedBehaviorSanitizer; run it with libasan
preloaded. setup.py builds the same for a wheel.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from cffi import FFI
from setuptools import Distribution
from setuptools.command.build_ext import build_ext

NATIVE = Path(__file__).resolve().parent
HEADERS = [
    "kvfs_format.h",
    "kvfs_checksum.h",
    "kvfs_table.h",
    "kvfs_worth.h",
    "kvfs_chains.h",
    "kvfs_names.h",
    "kvfs_pod.h",
    "kvfs_naming.h",
    "kvfs_plane.h",
    "kvfs_wire.h",
    "kvfs_frames.h",
    "kvfs_clients.h",
    "kvfs.h",
    "kvfs_gpu.h",
    "kvfs_replay.h",
    "kvfs_measure.h",
]
# cffi's own generated code is not held to -Werror: its casts warn. `make -C native/test warnings` holds ours to it.
FLAGS = ["-std=gnu11", "-O2", "-g", "-fno-strict-aliasing", "-Wall", "-Wextra", "-UNDEBUG", "-fvisibility=hidden"]
# As hardening.mk has it for the other libraries.
HARDENING = ["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3", "-fstack-protector-strong", "-fstack-clash-protection"]
# nodelete: a thread of a device that has not answered outlives its array (io/threads.c).
HARDENING_LINK = ["-Wl,-z,nodelete", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"]
# The sanitizers look closer than FORTIFY, and want to see the plain calls.
SANITIZE = ["-U_FORTIFY_SOURCE", "-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-O1"]


def declarations() -> str:
    """Everything in the public headers that is a declaration, and the integer macros."""
    text = ""
    for name in HEADERS:
        source = (NATIVE / "include" / name).read_text()
        source = re.sub(r"/\*.*?\*/", "", source, flags=re.S)
        source = re.sub(r"#ifdef __cplusplus.*?#endif", "", source, flags=re.S)
        source = re.sub(r"static_assert\(.*?\);", "", source)
        for macro, value in re.findall(r"^#define (KVFS_\w+) (\d+)\s*$", source, flags=re.M):
            text += f"#define {macro} {value}\n"
        text += re.sub(r"^#.*$", "", source, flags=re.M)
    return text.replace("KVFS_STRIPE_WIDTH_MAX]", "32]")


def uring() -> list[str]:
    """How to link liburing: a copy of it, where the machine has one, so that the module needs libc alone; or as shared
    library. No name of the copy is seen by others: an engine may have a liburing of its own."""
    compiler = shlex.split(os.environ.get("CC", "gcc"))[0]
    found = subprocess.run([compiler, "-print-file-name=liburing.a"], capture_output=True, text=True, check=True).stdout
    return ["-l:liburing.a", "-Wl,--exclude-libs,liburing.a"] if Path(found.strip()).is_absolute() else ["-luring"]


def builder(sanitize: bool = False) -> FFI:
    ffi = FFI()
    ffi.cdef(declarations())
    # Relative: setuptools puts the sources of an extension into the sdist by these names.
    ffi.set_source(
        "kvfs._native",
        "\n".join(f'#include "{name}"' for name in HEADERS),
        sources=sorted(os.path.relpath(path) for path in (NATIVE / "src").rglob("*.c")),
        include_dirs=[os.path.relpath(NATIVE / room) for room in ("include", "src")],
        libraries=["pthread"],
        extra_compile_args=FLAGS + (SANITIZE if sanitize else HARDENING),
        extra_link_args=[*uring(), *(["-fsanitize=address,undefined"] if sanitize else HARDENING_LINK)],
    )
    return ffi


def sanitized() -> FFI:
    return builder(sanitize=True)


def forget_others(module: Path) -> None:
    """A module that lies beside ours and was built for one Python alone would be imported before it."""
    for other in module.parent.glob("_native.*.so"):
        if other.name != module.name:
            other.unlink()


class BuildModule(build_ext):
    """The extension, without what the build's Python was linked with: a library path of that machine."""

    def run(self) -> None:
        super().run()
        forget_others(Path(self.get_ext_fullpath("kvfs._native")))

    def build_extensions(self) -> None:
        own = [word for word in self.compiler.linker_so if not word.startswith(("-L", "-Wl,-rpath"))]
        self.compiler.linker_so = own
        # setuptools compiles one source after the other.
        compile_all = self.compiler.compile
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:

            def compile_beside(sources: list[str], **options: Any) -> list[str]:
                return list(chain.from_iterable(threads.map(lambda one: compile_all([one], **options), sources)))

            self.compiler.compile = compile_beside
            super().build_extensions()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--output", type=Path, default=NATIVE.parent, help="directory that holds the kvfs package")
    arguments = parser.parse_args()
    package = arguments.output.resolve() / "kvfs"
    os.chdir(NATIVE.parent)
    work = Path("build/native-sanitized" if arguments.sanitize else "build/native")
    function = "sanitized" if arguments.sanitize else "builder"
    # setup.py is not run: it would build the libraries as well.
    distribution = Distribution(
        {"name": "kvfs", "cmdclass": {"build_ext": BuildModule}, "cffi_modules": [f"native/build_ffi.py:{function}"]}
    )
    assert len(distribution.ext_modules) == 1  # finalize_options() would add it again
    command = distribution.get_command_obj("build_ext")
    command.build_lib, command.build_temp, command.force = str(work / "lib"), str(work), True
    command.ensure_finalized()
    command.run()
    built = Path(command.get_ext_fullpath("kvfs._native"))
    target = package / built.name
    package.mkdir(parents=True, exist_ok=True)
    # A new file, not new content: a daemon that runs keeps the old one mapped.
    staged = target.with_suffix(".new")
    shutil.copy2(built, staged)
    staged.rename(target)
    forget_others(target)
    print(target)


if __name__ == "__main__":
    main()
