"""Two builds of kvfs beside each other: a commit in a git worktree of its own, and this tree as it is.

Of another build only its `kvfs` command line and its libkvfs are used, so its modules may lie elsewhere than ours. The
packages that it imports are those of our Python.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from benches.common import REPOSITORY, BenchError, Json, needs_program, run_command, say

WORKTREES = REPOSITORY / "build/compare"


@dataclass(frozen=True, slots=True)
class Build:
    """A tree with its data plane and its libkvfs built. name: `old` or `new`; commit: as `git describe` tells it."""

    name: str
    tree: Path
    commit: str

    def environment(self) -> dict[str, str]:
        """`python -m kvfs` then runs this tree's package, whatever the working directory is."""
        return {"PYTHONPATH": str(self.tree), "PYTHONSAFEPATH": "1"}

    @property
    def library(self) -> Path:
        """The folder of libkvfs.so.1."""
        return self.tree / "kvfs/lib"

    def document(self) -> Json:
        return {"name": self.name, "commit": self.commit}


def here(name: str) -> Build:
    """This tree, with its uncommitted changes."""
    return _built(name, REPOSITORY)


def checked_out(name: str, commit: str) -> Build:
    """The tree of a commit, under build/compare; it stays there for the next time."""
    git = needs_program("git")
    found = run_command(git, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}", check=False)
    if found.returncode:
        raise BenchError(f"{commit}: no such commit")
    digits = found.stdout.strip()
    tree = WORKTREES / digits[:12]
    if not (tree / ".git").exists():
        # A worktree that was removed by hand is still registered: --force takes its place.
        run_command(git, "worktree", "add", "--quiet", "--force", "--detach", tree, digits)
    return _built(name, tree)


def _built(name: str, tree: Path) -> Build:
    """Build files that are older than their sources."""
    sources = [path for room in ("src", "include") for path in (tree / "native" / room).rglob("*") if path.is_file()]
    newest = max(path.stat().st_mtime for path in (*sources, tree / "native/build_ffi.py"))
    modules = [path.stat().st_mtime for path in (tree / "kvfs").glob("_native.*.so")]
    if not modules or min(modules) < newest:
        say(f"building the data plane of {tree}")
        run_command(sys.executable, "native/build_ffi.py", directory=tree)
    run_command("make", "-s", "-C", "native", directory=tree)
    described = run_command(
        needs_program("git"), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*", directory=tree
    )
    build = Build(name, tree, described.stdout.strip())
    code = "import kvfs; print(kvfs.__file__)"
    found = run_command(sys.executable, "-c", code, environment=build.environment()).stdout.strip()
    if not Path(found).is_relative_to(tree):
        raise BenchError(f"{tree}: Python takes kvfs from {found}")
    return build
