"""The parts that pyproject.toml cannot describe. The data plane and the libraries beside it are built, and belong to
the wheel; so do the manual pages.

The module has the stable ABI: one wheel is for every Python from 3.11 on. build_ffi.py says how the module is built,
the Makefiles say it of the libraries.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.build import build

MODULE = runpy.run_path("native/build_ffi.py", run_name="build_ffi")


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

    @staticmethod
    def _environment() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}


# A Python without the global lock has a stable ABI of its own, from 3.15 on.
stable = not sysconfig.get_config_var("Py_GIL_DISABLED")
setup(
    cffi_modules=["native/build_ffi.py:builder"],
    cmdclass={"build": Build, "build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable else {},
)
