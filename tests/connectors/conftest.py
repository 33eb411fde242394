"""Real engines with kvfs's connectors in them: `engine("vllm")` is an environment of tools/setup-engines.

In it kvfs is as a user has it: the wheel of this tree, installed without what the daemon needs. A test runs a program
there, against a mount of its own. An engine that is not there is a skip that says which version is wanted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import REPOSITORY

BUILD = REPOSITORY / "build"
SITE = BUILD / "engines-site"
BUILD_TIMEOUT_S = 900
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
        """A process of the engine's Python (its first argument: a file, or -c), with pipes; the caller ends it."""
        return subprocess.Popen(
            [self.python, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=self.environment(**environment), start_new_session=True,
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


def _digest() -> str:
    """Of all that the wheel is made from."""
    digest = hashlib.sha256()
    paths = [path for room in ("kvfs", "native") for path in (REPOSITORY / room).rglob("*") if path.is_file()]
    for path in sorted([*paths, REPOSITORY / "setup.py", REPOSITORY / "pyproject.toml"]):
        if path.suffix not in (".pyc", ".o", ".new") and ".so" not in path.name:
            digest.update(f"{path.relative_to(REPOSITORY)} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(*command: str | Path) -> None:
    result = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
    )
    assert result.returncode == 0, (command, result.stdout[-1000:], result.stderr[-3000:])


@pytest.fixture(scope="session")
def engines_site() -> Path:
    """A directory with the wheel of this tree installed in it: kvfs alone. It is made again when a source changed."""
    BUILD.mkdir(exist_ok=True)
    stamp = SITE / ".kvfs-sources"
    with _locked(BUILD / ".engines-site.lock"):
        digest = _digest()
        if stamp.exists() and stamp.read_text() == digest:
            return SITE
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
        with tempfile.TemporaryDirectory(dir=BUILD) as work:
            wheels, site = Path(work, "wheels"), Path(work, "site")
            _run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, REPOSITORY)
            (wheel,) = wheels.glob("kvfs-*.whl")
            _run(*pip, "install", "--no-deps", "--no-compile", "--target", site, wheel)
            (site / stamp.name).write_text(digest)
            shutil.rmtree(SITE, ignore_errors=True)
            site.rename(SITE)
    return SITE


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Callable[[str], Engine]:
    """engine(NAME): the environment of an engine of tools/setup-engines, or a skip that says what is missing."""

    def find(name: str) -> Engine:
        command = [sys.executable, REPOSITORY / "tools/setup-engines", "--where", name]
        said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert said.returncode in (0, 1), said.stderr
        if said.returncode == 1:
            pytest.skip(f"NOT RUN: {said.stderr.strip().partition(' ')[2].partition(' ')[2]}")
        # Not before it is wanted: the wheel takes a minute.
        return Engine(name, Path(said.stdout.strip()), request.getfixturevalue("engines_site"))

    return find
