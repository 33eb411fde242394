"""The code lies as docs/architecture.md says: tools/house measures it, and these are the limits."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import shutil
import sys
from types import ModuleType
from typing import Any

import pytest
from helpers import REPOSITORY

from kvfs.lent import Part, lent

LINES_OF_A_FILE = 900
LINES_OF_A_FUNCTION = 100
# It is to fall. 291 before three for packing commits, which took a record's keys out of Python, and 11 for frames of
# native clients. Those for a frame's parts go when Python has no part of a RESERVE, COMMIT or DELETE any more.
CALLS_OF_C = 304
# Headers of libkvfs, for programs in C, too.
PUBLIC = {"kvfs.h", "kvfs_gpu.h"}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("house", str(REPOSITORY / "tools/house"))
    spec = importlib.util.spec_from_loader("house", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def house(tool: ModuleType) -> Any:
    return tool.measure(REPOSITORY)


def test_imports_and_includes_point_down(house: Any) -> None:
    assert house.upward() == []


def test_no_files_go_in_a_circle(house: Any) -> None:
    assert house.circles() == []


def test_no_file_and_no_function_is_too_long(house: Any) -> None:
    assert {name: size for name, size in house.lines.items() if size > LINES_OF_A_FILE} == {}
    assert {name: size for name, size in house.functions.items() if size > LINES_OF_A_FUNCTION} == {}


def test_every_room_is_in_the_order(tool: ModuleType) -> None:
    """Else a new folder's arrows would be an error with no reason."""
    rooms = {path.name for path in (REPOSITORY / "native/src").iterdir() if path.is_dir()}
    assert rooms == {room for room in tool.C_ROOMS if not room.endswith(".c")}
    there = {
        path.name for path in (REPOSITORY / "kvfs").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert there == set(tool.PYTHON_ROOMS)


def test_every_product_file_is_named(tool: ModuleType, house: Any) -> None:
    """`tools/house --files > docs/internals/files.md` mends it, and a file without a heading wants one."""
    assert [name for name, heading in house.first.items() if not heading and house.lines[name]] == []
    assert (REPOSITORY / "docs/internals/files.md").read_text() == tool.files_page(house)


def test_every_room_is_in_the_map(tool: ModuleType) -> None:
    text = (REPOSITORY / "docs/architecture.md").read_text()
    missing = [room for room in tool.C_ROOMS + tool.PYTHON_ROOMS if f"{room}" not in text]
    assert missing == []


def uncalled(house: Any) -> list[str]:
    return sorted(name for name, header in house.declared.items() if name not in house.called and header not in PUBLIC)


def test_python_calls_no_more_of_c_than_before_and_all_that_it_is_given(house: Any) -> None:
    """A function that C alone calls is declared in a header of its room, below native/src."""
    assert uncalled(house) == []
    assert len(house.called) <= CALLS_OF_C


def test_no_double_is_in_the_package(house: Any) -> None:
    """A double of an engine or a library belongs to the tests."""
    assert [name for name, heading in house.first.items() if name.startswith("kvfs/") and "a double" in heading] == []


# Each lends what callers gave, and lets go of a memoryview before it returns.
LENDERS = {"kvfs/lent.py", "kvfs/client/memory.py"}


def lent_in(text: str) -> list[int]:
    """Lines that lend a buffer to C by themselves."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and node.attr == "from_buffer"
        and isinstance(node.value, ast.Name)
        and node.value.id == "ffi"
    ]


def test_every_posix_test_runs_in_a_guest_or_is_the_daemon_s_own() -> None:
    tree = ast.parse((REPOSITORY / "tests/guests/test_virtiofs.py").read_text())
    lists = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("SUITE", "OF_THE_DAEMON")
    }
    named = [name for names in (*lists["SUITE"].values(), lists["OF_THE_DAEMON"]) for name in names]
    assert sorted(named) == sorted(path.name for path in (REPOSITORY / "tests/posix").glob("test_*.py"))


def test_memory_is_lent_to_c_at_one_door_which_refuses_memoryviews() -> None:
    """The garbage collector clears a memoryview that has exports, and their end is a SIGSEGV."""
    found = {
        (str(path.relative_to(REPOSITORY)), line)
        for path in (REPOSITORY / "kvfs").rglob("*.py")
        for line in lent_in(path.read_text())
    }
    assert [place for place in found if place[0] not in LENDERS] == []
    assert lent_in("a = 1\nb = ffi.from_buffer(memoryview(a))\n") == [2]
    for wrong in (memoryview(b"12345678"), memoryview(bytearray(8))):
        with pytest.raises(AssertionError, match="memoryview"):
            lent(wrong)
        with pytest.raises(AssertionError, match="memoryview"):
            Part(wrong, 4)


# ---- the measure itself: each fault is seen, in one copy that has them all ----

ARROWS = [
    ("kvfs/pool/geometry.py", "from kvfs.store import store\n", ("kvfs/pool/geometry.py", "kvfs/store/store.py")),
    ("native/src/io/ring.c", '#include "fuse/fuse.h"\n', ("native/src/io/ring.c", "native/src/fuse/fuse.h")),
    (
        "native/src/io/ring.c",
        "void never(void);\nvoid never(void) { mux_close(0); }\n",
        ("native/src/io/ring.c", "native/src/fuse/mux.c"),
    ),
    (
        "native/src/client/get.c",
        '#include "content/content.h"\n',
        ("native/src/client/get.c", "native/src/content/content.h"),
    ),
]


@pytest.fixture(scope="module")
def faulty(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("faulty")
    for folder in ("kvfs", "native/src", "native/shims", "native/include"):  # and build_ffi.py, which names the headers
        ignored = shutil.ignore_patterns("*.so*", "__pycache__", "lib", "*.o")
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=ignored)
    added = [(file, line) for file, line, _ in ARROWS]
    added.append(("kvfs/pool/one.py", "if TYPE_CHECKING:\n    from kvfs.pool import two\n"))
    added.append(("kvfs/pool/two.py", "from kvfs.pool import one\n"))
    added.append(("native/src/io/ring.c", "static int long_one(int a) {\n" + "    a++;\n" * 120 + "    return a;\n}\n"))
    added.append(("kvfs/units.py", "def long_one():\n" + "    a = 1\n" * 120))
    shutil.copy(REPOSITORY / "native/build_ffi.py", root / "native/build_ffi.py")
    added.append(("native/include/kvfs_worth.h", "void kvfs_worth_never(\n    int a);\nint kvfs_worth_now(void);\n"))
    added.append(("kvfs/worth.py", "lib.kvfs_worth_now()\n"))
    for file, text in added:
        with (root / file).open("a") as out:
            out.write(text)
    return tool.measure(root)


@pytest.mark.parametrize("seen", [seen for _, _, seen in ARROWS], ids="->".join)
def test_an_arrow_upward_is_seen(faulty: Any, house: Any, seen: tuple[str, str]) -> None:
    assert seen in faulty.upward() and seen not in house.upward()


def test_a_circle_under_type_checking_is_seen(faulty: Any) -> None:
    assert {"kvfs/pool/one.py", "kvfs/pool/two.py"} in [set(circle) for circle in faulty.circles()]


def test_a_long_function_is_seen(faulty: Any) -> None:
    sizes = faulty.functions
    assert sizes[("native/src/io/ring.c", "long_one")] == 123 and sizes[("kvfs/units.py", "long_one")] == 121


def test_a_function_that_python_does_not_call_is_seen(faulty: Any, house: Any) -> None:
    assert uncalled(faulty) == ["kvfs_worth_never"]
    assert len(faulty.called) == len(house.called) + 1
