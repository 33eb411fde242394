"""The parts that pyproject.toml cannot describe. The data plane and the libraries beside it are built, and belong to
the wheel. So does what the machine's own programs look for: manual pages, completion, units, mount.kvfs.

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

# Where each shell looks, below the share/ of its own prefix.
COMPLETIONS = {
    "bash": "bash-completion/completions/kvfs",
    "zsh": "zsh/site-functions/_kvfs",
    "fish": "fish/vendor_completions.d/kvfs.fish",
}


class Build(build):
    """A build that begins with nothing: what an earlier one left behind would be in the wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        share = Path(self.build_temp).parent / "share"
        shutil.rmtree(share, ignore_errors=True)
        self._kvfs("man", "--directory", str(share / "man/man1"))
        for shell, place in COMPLETIONS.items():
            path = share / place
            path.parent.mkdir(parents=True)
            path.write_text(self._kvfs("completion", shell))
        files = sorted(path for path in share.rglob("*") if path.is_file())
        self.distribution.data_files = [
            *((str("share" / path.parent.relative_to(share)), [str(path)]) for path in files),
            ("share/man/man8", ["tools/kvfs-csi.8", "tools/mount.kvfs.8"]),
            # Their @bindir@ is the installer's: a wheel does not know where it will lie.
            ("share/kvfs/systemd", sorted(map(str, Path("tools").glob("*.service")))),
        ]

    @staticmethod
    def _kvfs(*words: str) -> str:
        """By the command of these sources: a wheel has no other version of it at hand, and none of its packages."""
        code = "import sys; sys.path.insert(0, '.'); from kvfs.cli import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, *words]
        return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


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
    # Beside the command, where it looks for it: a link in /sbin makes it mount(8)'s.
    scripts=["tools/mount.kvfs"],
    cffi_modules=["native/build_ffi.py:builder"],
    cmdclass={"build": Build, "build_ext": BuildNative, "bdist_wheel": Wheel},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable else {},
)
