"""libplugin_KVFS.so looks at NIXL's own plugins before it serves a version that it was not tried with."""

import os
import shutil
import subprocess
import sys

import helpers
import pytest
from helpers import REPOSITORY

from kvfs.connectors import tried

PLUGIN = REPOSITORY / "kvfs/lib/libplugin_KVFS.so"
DOUBLE = REPOSITORY / "tests/native/nixl_double.cc"
# As NIXL does it: the caller is its library, and the answer a plugin or nothing.
LOAD = """
import ctypes, sys
nixl, plugin = ctypes.CDLL(sys.argv[1]), ctypes.CDLL(sys.argv[2])
nixl.call.restype = ctypes.c_void_p
print(bool(nixl.call(ctypes.cast(plugin.nixl_plugin_init, ctypes.c_void_p))))
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """build(NAME): the library of tests/native/nixl_double.cc, made once, with that macro."""
    compiler = shutil.which("g++")
    if compiler is None or not PLUGIN.exists():
        pytest.skip("NOT RUN: no g++, or libplugin_KVFS.so is not built")
    directory = tmp_path_factory.mktemp("double")

    def made(kind):
        library = directory / f"{kind}.so"
        if not library.exists():
            command = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", f"-D{kind}", DOUBLE, "-o", library]
            subprocess.run(command, check=True, timeout=120 * helpers.SLOWNESS)
        return library

    return made


@pytest.fixture
def load(build, tmp_path):
    """load(PLUGIN, VERSION): is libplugin_KVFS.so given to a wheel of that version whose own plugin has these bytes;
    and what was said."""

    def loaded(plugin, version, **environment):
        libs = tmp_path / f"{len(list(tmp_path.iterdir()))}" / ".nixl_cu12.mesonpy.libs"
        (libs / "plugins").mkdir(parents=True)
        shutil.copy(build("PLAIN"), libs / "libnixl.so")
        if plugin is not None:
            (libs / "plugins/libplugin_POSIX.so").write_bytes(plugin)
        (libs.parent / f"nixl_cu12-{version}.dist-info").mkdir()
        said = subprocess.run(
            [sys.executable, "-c", LOAD, libs / "libnixl.so", PLUGIN], env={**os.environ, **environment},
            capture_output=True, text=True, timeout=60 * helpers.SLOWNESS, check=True,
        )  # fmt: skip
        return said.stdout.strip() == "True", said.stderr

    return loaded


def test_a_version_that_was_tried_is_served_without_a_word(load):
    for version in tried.VERSIONS["nixl"]:
        assert load(None, version) == (True, "")


def test_another_version_with_the_same_interface_is_served_with_a_warning(load, build):
    served, said = load(build("PLAIN").read_bytes(), "9.8.7")
    assert served and "NIXL 9.8.7, which this plugin was not tried with" in said and "its interface is the same" in said
    assert all(version in said for version in tried.VERSIONS["nixl"])


@pytest.mark.parametrize(
    ("kind", "difference"),
    [
        ("EXTRA", "a back end has 28 virtual functions, and not 27"),
        ("SWAPPED", "virtual function 3 is supportsNotif() const, and not supportsLocal() const"),
        ("RETYPED", "virtual function 15 is prepMemView(nixlDescList<nixlRemoteMetaDesc> const&, void*&, int) const"),
        (None, "no plugin of NIXL's own in"),
    ],
)
def test_another_interface_is_refused_by_what_differs(load, build, kind, difference):
    plugin = None if kind is None else build(kind).read_bytes()
    served, said = load(plugin, "9.8.7")
    assert not served and difference in said and "not loaded; KVFS_NIXL_ANY_VERSION=1" in said
    served, said = load(plugin, "9.8.7", KVFS_NIXL_ANY_VERSION="1")
    assert served and difference in said and "loaded all the same" in said


def test_a_plugin_that_is_no_whole_library_tells_nothing(load, build):
    """It is read as a file, and every place in it is checked."""
    whole = build("PLAIN").read_bytes()
    for size in (0, 1, 63, 64, 1000, len(whole) // 2, len(whole) - 1):
        served, said = load(whole[:size], "9.8.7")
        assert not served and "no plugin of NIXL's own in" in said, size
    for at in (40, 58, 60):  # where the sections begin, of which size and how many they are
        served, said = load(whole[:at] + b"\xff\xff" + whole[at + 2 :], "9.8.7")
        assert not served and "no plugin of NIXL's own in" in said, at
