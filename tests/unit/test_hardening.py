"""Every library of ours, as it comes out of the build: what makes a fault of ours an end and not a way in."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "kvfs"
# Empty: other names of libkvfs_cufile.so.
NAMES = {"libcufile.so", "libcufile.so.0"}


def libraries() -> list[pathlib.Path]:
    found = [*PACKAGE.glob("_native*.so"), *PACKAGE.glob("lib/*.so*"), *PACKAGE.glob("lib/cufile/*.so*")]
    return sorted(path for path in found if not path.is_symlink())


def readelf(path: pathlib.Path, *options: str) -> str:
    program = shutil.which("readelf")
    if program is None:
        pytest.skip("no readelf: binutils")
    command = [program, "--wide", *options, path]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_all_that_is_built_is_looked_at() -> None:
    names = {path.name for path in libraries()}
    assert names >= {"libkvfs.so.1", "libkvfs_cufile.so", "libkvfs_preload.so", "libplugin_KVFS.so", *NAMES}
    # One module, whichever Python imports it.
    assert [name for name in names if name.startswith("_native")] == ["_native.abi3.so"]


@pytest.mark.parametrize("path", libraries(), ids=lambda path: path.name)
def test_what_is_relocated_is_read_only_and_no_stack_is_code(path: pathlib.Path) -> None:
    dynamic, segments = readelf(path, "--dynamic"), readelf(path, "--program-headers")
    assert re.search(r"\(FLAGS\).*\bBIND_NOW\b", dynamic) or re.search(r"\(FLAGS_1\).*\bNOW\b", dynamic)
    assert "GNU_RELRO" in segments
    (stack,) = re.findall(r"GNU_STACK(?:\s+0x\w+){5}\s+([RWE ]+?)\s+0x", segments)
    assert stack.split() == ["RW"]
    assert "TEXTREL" not in dynamic
    # No segment is both written and run.
    assert not re.search(r"LOAD\s.*\sRWE\s", segments)


@pytest.mark.parametrize("path", libraries(), ids=lambda path: path.name)
def test_libraries_are_looked_for_beside_it_and_nowhere_else(path: pathlib.Path) -> None:
    dynamic = readelf(path, "--dynamic")
    for found in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic):
        assert all(re.fullmatch(r"\$ORIGIN(/\.\.)?", part) for part in found.split(":")), f"{path.name}: {found}"


@pytest.mark.parametrize("path", [path for path in libraries() if path.name not in NAMES], ids=lambda path: path.name)
def test_stacks_are_guarded_and_copies_checked(path: pathlib.Path) -> None:
    symbols = readelf(path, "--dyn-syms")
    assert "__stack_chk_fail" in symbols
    # Calls that FORTIFY put in the place of the plain ones: only where it could not see that they are right.
    assert re.search(r"UND __\w+_chk@", symbols.replace("__stack_chk_fail", ""))
