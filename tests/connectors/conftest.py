"""Real engines with kvfs's connectors in them: `engine("vllm")` is an environment of tools/setup-engines.

In it kvfs is as a user has it: the wheel of this tree, installed without what the daemon needs. A test runs a program
there, against a mount of its own. An engine that is not there is a skip that says which version is wanted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import REPOSITORY

BUILD = REPOSITORY / "build"
SITE = BUILD / "engines-site"
BUILD_TIMEOUT_S = 900
SOURCES = (".c", ".h", ".S", ".py", ".map", ".mk", ".toml", "")
# Of this process, and wrong in another environment.
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTEST_CURRENT_TEST")


@dataclasses.dataclass(frozen=True)
class Engine:
    """The environment of one engine, with kvfs's client and connectors of this tree in it."""

    name: str
    python: Path
    site: Path

    def environment(self, **more: str) -> dict[str, str]:
        """The variables of a process in it, and some more. Nothing is fetched from a hub of models."""
        kept = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        return kept | {"PYTHONPATH": str(self.site), "PYTHONNOUSERSITE": "1", "HF_HUB_OFFLINE": "1"} | more

    def start(self, *arguments: str | os.PathLike[str], **environment: str) -> subprocess.Popen[str]:
        """A process of the engine's Python (its first argument: a file, or -c), with pipes; the caller ends it. Its
        working directory is not the tree: Python would take the kvfs that lies there."""
        return subprocess.Popen(
            [self.python, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=self.environment(**environment), start_new_session=True, cwd=self.site.parent,
        )  # fmt: skip

    def run(
        self, *arguments: str | os.PathLike[str], timeout_s: float = 240, check: bool = True, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """The same, to its end. check: a status other than 0 is a failure that shows the end of its output."""
        process = self.start(*arguments, **environment)
        try:
            output, errors = process.communicate(timeout=timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
        assert process.returncode == 0 or not check, (process.returncode, output[-2000:], errors[-4000:])
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def _digest(*parts: str) -> str:
    """Of all sources in these files and directories of the tree."""
    digest = hashlib.sha256()
    for part in parts:
        root = REPOSITORY / part
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            if path.is_file() and path.suffix in SOURCES:
                digest.update(f"{path.relative_to(REPOSITORY)} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock against other runs in this tree."""
    deadline = time.monotonic() + 2 * BUILD_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < deadline, f"{path}: another run has held it for {2 * BUILD_TIMEOUT_S} s"
                time.sleep(0.2)
        yield


def _run(*command: str | Path) -> None:
    """A program to its end, its children too."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(BUILD_TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        assert status == 0, (command, output.read()[-4000:])


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


def pytest_collection_finish(session: pytest.Session) -> None:
    """The wheel takes a minute or more, and is built before any test's clock runs."""
    if not session.config.option.collectonly and any(
        "engine" in getattr(item, "fixturenames", ()) for item in session.items
    ):
        install_kvfs()


@functools.cache
def install_kvfs() -> Path:
    """A directory with the wheel of this tree installed in it: kvfs alone. It is made again when a source changed."""
    BUILD.mkdir(exist_ok=True)
    stamp = SITE / ".kvfs-sources"
    with _locked(BUILD / ".engines-site.lock"):
        native, python = _digest("native", "setup.py", "pyproject.toml"), _digest("kvfs")
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


@pytest.fixture(scope="session")
def engine() -> Callable[[str], Engine]:
    """engine(NAME): the environment of an engine of tools/setup-engines, or a skip that says what is missing."""

    def find(name: str) -> Engine:
        command = [sys.executable, REPOSITORY / "tools/setup-engines", "--where", name]
        said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert said.returncode in (0, 1), said.stderr
        if said.returncode == 1:
            pytest.skip(f"NOT RUN: {said.stderr.strip().partition(' ')[2].partition(' ')[2]}")
        return Engine(name, Path(said.stdout.strip()), install_kvfs())

    return find
