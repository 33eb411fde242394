"""The wheel of this tree, installed in a folder of its own: kvfs as it is beside an engine, the client alone."""

from __future__ import annotations

import functools
import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

from engines.environments import ended, locked

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = REPOSITORY / "build"
SITE = BUILD / "engines-site"
BUILD_TIMEOUT_S = 900
SOURCES = (".c", ".cc", ".h", ".S", ".py", ".map", ".mk", ".toml", "")


def _digest(*parts: str) -> str:
    """Of all sources in these files and directories of the tree."""
    digest = hashlib.sha256()
    for part in parts:
        root = REPOSITORY / part
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            if path.is_file() and path.suffix in SOURCES:
                digest.update(f"{path.relative_to(REPOSITORY)} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()


def _run(*command: str | Path) -> None:
    """A program to its end, its children too."""
    status, output = ended(command, BUILD_TIMEOUT_S)
    assert status == 0, (command, status, output[-4000:])


def _copy_python() -> None:
    """Python's modules as they are now: a wheel's are the tree's, and only a change of the others needs a compiler."""
    there = SITE / "kvfs"
    for path in there.rglob("*.py"):
        if not (REPOSITORY / "kvfs" / path.relative_to(there)).exists():
            path.unlink()
    for path in (REPOSITORY / "kvfs").rglob("*.py"):
        target = there / path.relative_to(REPOSITORY / "kvfs")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


@functools.cache
def install_kvfs() -> Path:
    """A directory with the wheel of this tree installed in it: kvfs alone. It is made again when a source changed."""
    BUILD.mkdir(exist_ok=True)
    stamp = SITE / ".kvfs-sources"
    tried = "kvfs/connectors/tried.py"  # NIXL's plugin is built of it, too
    with locked("engines-site", BUILD, 2 * BUILD_TIMEOUT_S):
        native, python = _digest("native", "setup.py", "pyproject.toml", tried), _digest("kvfs")
        before = stamp.read_text().split() if stamp.exists() else []
        if before == [native, python]:
            return SITE
        stamp.unlink(missing_ok=True)
        if before[:1] == [native]:
            _copy_python()
        else:
            _build()
        stamp.write_text(f"{native} {python}")
    return SITE


def _build() -> None:
    """The wheel, of a copy of the sources: a build leaves its traces beside them."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    with tempfile.TemporaryDirectory(dir=BUILD) as work:
        source, wheels, site = (Path(work, name) for name in ("source", "wheels", "site"))
        ignored = shutil.ignore_patterns("__pycache__", "*.so*", "*.o", "*.egg-info", "lib")
        for part in ("native", "kvfs"):
            shutil.copytree(REPOSITORY / part, source / part, ignore=ignored)
        for part in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy2(REPOSITORY / part, source)
        # The wheel brings the machine some of it: units, manual pages.
        shutil.copytree(REPOSITORY / "tools", source / "tools", ignore=ignored)
        _run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, source)
        (wheel,) = wheels.glob("kvfs-*.whl")
        _run(*pip, "install", "--no-deps", "--no-compile", "--target", site, wheel)
        shutil.rmtree(SITE, ignore_errors=True)
        site.rename(SITE)
