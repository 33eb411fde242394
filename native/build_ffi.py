"""Builds the data plane as the cffi module `kvfs._native` (API mode), in place or into another directory.

    python native/build_ffi.py [--sanitize] [--output DIR]

The declarations that cffi sees are the public headers themselves: what is not C declarations is stripped, so header
and module cannot disagree. --sanitize builds with AddressSanitizer and UndefinedBehaviorSanitizer; run it with libasan
preloaded.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

from cffi import FFI

NATIVE = Path(__file__).resolve().parent
HEADERS = ["kvfs_format.h", "kvfs_checksum.h", "kvfs_table.h", "kvfs_plane.h", "kvfs.h", "kvfs_gpu.h", "kvfs_replay.h"]
# cffi's own generated code is not held to -Werror: its casts warn. `make -C native/test warnings` holds ours to it.
FLAGS = ["-std=gnu11", "-O2", "-g", "-fno-strict-aliasing", "-Wall", "-Wextra", "-UNDEBUG", "-fvisibility=hidden"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-O1"]


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


def builder(sanitize: bool) -> FFI:
    ffi = FFI()
    ffi.cdef(declarations())
    sources = sorted(str(path) for path in (NATIVE / "src").glob("*.c"))
    flags = FLAGS + (SANITIZE if sanitize else [])
    ffi.set_source(
        "kvfs._native",
        "\n".join(f'#include "{name}"' for name in HEADERS),
        sources=sources,
        include_dirs=[str(NATIVE / "include")],
        libraries=["uring", "pthread"],
        extra_compile_args=flags,
        extra_link_args=(["-fsanitize=address,undefined"] if sanitize else []),
    )
    return ffi


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--output", type=Path, default=NATIVE.parent, help="directory that holds the kvfs package")
    arguments = parser.parse_args()
    work = NATIVE.parent / "build" / ("native-sanitized" if arguments.sanitize else "native")
    work.mkdir(parents=True, exist_ok=True)
    built = Path(builder(arguments.sanitize).compile(tmpdir=str(work)))
    target = arguments.output / "kvfs" / built.name
    target.parent.mkdir(parents=True, exist_ok=True)
    # A new file, not new content: a daemon that runs keeps the old one mapped.
    staged = target.with_suffix(".new")
    shutil.copy2(built, staged)
    staged.rename(target)
    print(target)


if __name__ == "__main__":
    main()
