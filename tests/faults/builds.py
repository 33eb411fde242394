"""Another build of kvfs: a copy of the package with another version, which speaks a newer protocol with the holder, and
the older one too. Its data plane is another one as well, if it is to know other versions of what a holder keeps.

The other data plane is compiled from a copy of the sources. All its versions are newer, and its list of written inodes
has another layout from version 2 on. Objects of unchanged sources come from build/native, where they are up to date.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import helpers

_RUN = "import runpy\nrunpy.run_module('kvfs', run_name='__main__', alter_sys=True)\n"
NATIVE = helpers.REPOSITORY / "native"
_BUILT = helpers.REPOSITORY / "build/native"
# Of each kind of memory that a holder keeps.
_VERSIONS = re.compile(r"(#define KVFS_(\w+)_(VERSION|OLDEST)) 1\b")
_LAYOUT = (
    (
        "#define WRITTEN_SIZE (KVFS_PAGE_SIZE + WRITTEN_PLACES * sizeof(uint64_t))",
        "#define WRITTEN_SIZE(version) (KVFS_PAGE_SIZE + WRITTEN_PLACES * (version) * sizeof(uint64_t))",
    ),
    ("    uint32_t earlier_count;\n", "    uint32_t earlier_count, stride;\n"),
    (
        'sealed_create("kvfs-written", WRITTEN_SIZE,',
        'sealed_create("kvfs-written", WRITTEN_SIZE(KVFS_WRITTEN_VERSION),',
    ),
    ("sealed_size(fd) != WRITTEN_SIZE)", "sealed_size(fd) != (int64_t)WRITTEN_SIZE(out->found))"),
    ("mmap(NULL, WRITTEN_SIZE,", "mmap(NULL, WRITTEN_SIZE(versions.found),"),
    (
        "        written->memory = memory;\n",
        "        written->memory = memory;\n        written->stride = versions.found;\n",
    ),
    ("munmap(written->memory, WRITTEN_SIZE);", "munmap(written->memory, WRITTEN_SIZE(written->stride));"),
)
_PLACE = re.compile(r"\b((?:plane->)?written)->places\[([^\]]+)\]")
_kept = tempfile.TemporaryDirectory(prefix="kvfs-builds-")


def make_build(
    base: pathlib.Path, version: str, *, oldest: int = 1, newest: int = 3, held: tuple[int, int] | None = None
) -> tuple[str, ...]:
    """The words for Python in place of `-m kvfs`: a build that speaks these versions of the holder's words. `held`: the
    oldest and the newest version that it knows of what a holder keeps."""
    root = base / f"build-{version}"
    shutil.copytree(helpers.REPOSITORY / "kvfs", root / "kvfs", ignore=shutil.ignore_patterns("__pycache__"))
    _change(root / "kvfs/__init__.py", '__version__ = "', f'__version__ = "{version}"  # "')
    _change(root / "kvfs/hold/words.py", "VERSION, OLDEST = 2, 1", f"VERSION, OLDEST = {newest}, {oldest}")
    if held is not None:
        (module,) = (root / "kvfs").glob("_native.*.so")
        module.unlink()
        shutil.copy2(_data_plane(*held), module)
    program = root / "run.py"  # its directory is the first that modules are looked for in
    program.write_text(_RUN)
    return (str(program),)


def _change(path: pathlib.Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path}: {old!r} is there {text.count(old)} times"
    path.write_text(text.replace(old, new))


@functools.cache
def _data_plane(oldest: int, newest: int) -> pathlib.Path:
    """A module kvfs._native that knows these versions."""
    root = pathlib.Path(_kept.name) / f"{oldest}-{newest}"
    for folder in ("include", "src"):
        shutil.copytree(NATIVE / folder, root / folder)
    names = {name for header in (root / "include").glob("*.h") for name in _raise(header, oldest, newest)}
    assert {"HELD_VERSION", "HELD_OLDEST", "WRITTEN_VERSION", "JOURNAL_VERSION"} <= names
    written = root / "src/content/written.c"
    for old, new in _LAYOUT:
        _change(written, old, new)
    text, count = _PLACE.subn(r"\1->places[(\2) * \1->stride + \1->stride - 1]", written.read_text())
    assert count >= 6, f"{written}: {count} places"
    written.write_text(text)
    uses = re.compile("|".join(f"KVFS_{name}" for name in names))
    sources = sorted((root / "src").rglob("*.c"))
    changed = [path for path in sources if path == written or uses.search(path.read_text())]
    build = _build_script()
    flags = [*build.FLAGS, "-Werror", "-O0", "-fPIC", f"-I{root}/include", f"-I{root}/src"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda path: _object(root, path, flags, made=path in changed), sources))
    objects.append(_wrapper(root, build))
    module = root / "_native.so"
    _run(["gcc", "-shared", *objects, "-o", module, *build.uring(), "-lpthread", "-Wl,-z,nodelete"])
    return module


def _raise(header: pathlib.Path, oldest: int, newest: int) -> list[str]:
    """Change the versions in a header of the copy. Returns their names."""
    text = header.read_text()
    kinds = {match[2] for match in _VERSIONS.finditer(text) if match[3] == "OLDEST"}
    found = []

    def change(match: re.Match[str]) -> str:
        if match[2] not in kinds:  # a version of something else
            return match[0]
        found.append(f"{match[2]}_{match[3]}")
        return f"{match[1]} {newest if match[3] == 'VERSION' else oldest}"

    header.write_text(_VERSIONS.sub(change, text))
    return found


def _object(root: pathlib.Path, source: pathlib.Path, flags: Sequence[str], *, made: bool) -> pathlib.Path:
    within = source.relative_to(root).with_suffix(".o")
    ready = _BUILT / "native" / within
    if not made and _is_fresh(ready, NATIVE / source.relative_to(root)):
        return ready
    _run(["gcc", *flags, "-c", source, "-o", source.with_suffix(".o")])
    return source.with_suffix(".o")


def _is_fresh(built: pathlib.Path, *sources: pathlib.Path) -> bool:
    headers = [*(NATIVE / "include").glob("*.h"), *(NATIVE / "src").rglob("*.h")]
    return built.exists() and built.stat().st_mtime >= max(path.stat().st_mtime for path in [*sources, *headers])


def _wrapper(root: pathlib.Path, build: ModuleType) -> pathlib.Path:
    """The wrapper that cffi makes of the headers. It has the former versions, which Python does not ask for."""
    ready = _BUILT / "build/native/kvfs._native.o"
    if _is_fresh(ready, NATIVE / "build_ffi.py"):
        return ready
    before = pathlib.Path.cwd()
    os.chdir(helpers.REPOSITORY)  # its paths are relative
    try:
        build.builder().emit_c_code(os.fspath(root / "wrapper.c"))
    finally:
        os.chdir(before)
    include = sysconfig.get_path("include")
    flags = ["-std=gnu11", "-O0", "-fPIC", f"-I{NATIVE}/include", f"-I{include}"]
    _run(["gcc", *flags, "-c", root / "wrapper.c", "-o", root / "wrapper.o"])
    return root / "wrapper.o"


def _build_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_ffi", NATIVE / "build_ffi.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(words: Sequence[str | pathlib.Path]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stderr}"
