"""The parts that pyproject.toml cannot describe. The data plane and the libraries beside it are built, and belong to
the wheel; so do the manual pages.

The module has the stable ABI: one wheel is for every Python from 3.11 on. It holds the daemon's plane and the client.
Both need libc and nothing else: a module for the client alone would save an engine 2 MB, and no package.
build_ffi.py says how the module is built, the Makefiles say it of the libraries.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

MODULE = runpy.run_path("native/build_ffi.py", run_name="build_ffi")
# Of a machine with glibc: all that a manylinux wheel of ours may need of it (PEP 600 lets it need more). The plugin of
# NIXL needs the libstdc++ that NIXL has.
OF_THE_MACHINE = re.compile(
    r"ld-linux[\w-]*\.so\.\d+|lib(?:c|m|dl|rt|pthread)\.so\.\d+|libstdc\+\+\.so\.6|libgcc_s\.so\.1"
)
# PEP 600 begins there.
OLDEST_GLIBC = (2, 17)
# A wheel that holds a copy of liburing brings its licence.
LICENCE_OF_LIBURING = Path("/usr/share/doc/liburing-dev/copyright")


class Build(build):
    """A build that begins with nothing: what an earlier one left behind would be in the wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        # By the command of these sources: a wheel has no other version of it at hand, and none of its packages.
        pages = Path(self.build_temp).parent / "man"
        shutil.rmtree(pages, ignore_errors=True)
        code = "import sys; sys.path.insert(0, '.'); from kvfs.cli import main; sys.exit(main(sys.argv[1:]))"
        subprocess.run([sys.executable, "-c", code, "man", "--directory", pages], check=True)
        self.distribution.data_files = [("share/man/man1", sorted(map(str, pages.glob("*.1"))))]


class BuildNative(MODULE["BuildModule"]):  # type: ignore[misc]
    """The module, and the libraries beside it."""

    def run(self) -> None:
        super().run()
        library = Path(self.get_ext_fullpath("kvfs._native")).resolve().parent / "lib"
        subprocess.run(["make", "-s", "-C", "native", f"LIB={library}"], check=True, env=self._environment())
        if "-luring" not in MODULE["uring"]() and LICENCE_OF_LIBURING.exists():
            shutil.copyfile(LICENCE_OF_LIBURING, library / "liburing.copyright")

    @staticmethod
    def _environment() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}


class Wheel(bdist_wheel):
    """A wheel whose tag says where it runs. It is manylinux, with the newest glibc that a library of it asks for.
    If one of them needs more of the machine, it is linux alone."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        libraries = sorted(Path(self.bdist_dir).rglob("*.so*")) if self.bdist_dir else []
        own, newest = {path.name for path in libraries}, OLDEST_GLIBC
        for path in libraries:
            said = subprocess.run(["objdump", "-p", path], capture_output=True, text=True, check=True).stdout
            needed = set(re.findall(r"NEEDED\s+(\S+)", said)) - own
            if not all(map(OF_THE_MACHINE.fullmatch, needed)):
                return python, abi, platform
            versions = re.findall(r"\bGLIBC_(\d+)\.(\d+)", said)
            newest = max(newest, *((int(major), int(minor)) for major, minor in versions), OLDEST_GLIBC)
        if not libraries or not platform.startswith("linux_"):
            return python, abi, platform
        return python, abi, f"manylinux_{newest[0]}_{newest[1]}_{platform.removeprefix('linux_')}"


# A Python without the global lock has a stable ABI of its own, from 3.15 on.
stable = not sysconfig.get_config_var("Py_GIL_DISABLED")
setup(
    cffi_modules=["native/build_ffi.py:builder"],
    cmdclass={"build": Build, "build_ext": BuildNative, "bdist_wheel": Wheel},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable else {},
)
