"""Another build of kvfs: a copy of the package with another version, which speaks a newer protocol with the holder, and
the older one too."""

from __future__ import annotations

import pathlib
import shutil

import helpers

_RUN = "import runpy\nrunpy.run_module('kvfs', run_name='__main__', alter_sys=True)\n"


def make_build(base: pathlib.Path, version: str, *, oldest: int = 1, newest: int = 2) -> tuple[str, ...]:
    """The words for Python in place of `-m kvfs`: a build that speaks these versions of the holder's words."""
    root = base / f"build-{version}"
    shutil.copytree(helpers.REPOSITORY / "kvfs", root / "kvfs", ignore=shutil.ignore_patterns("__pycache__"))
    _change(root / "kvfs/__init__.py", '__version__ = "', f'__version__ = "{version}"  # "')
    _change(root / "kvfs/hold/words.py", "VERSION, OLDEST = 1, 1", f"VERSION, OLDEST = {newest}, {oldest}")
    program = root / "run.py"  # its directory is the first that modules are looked for in
    program.write_text(_RUN)
    return (str(program),)


def _change(path: pathlib.Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path}: {old!r} is there {text.count(old)} times"
    path.write_text(text.replace(old, new))
