"""Real engines with kvfs's connectors in them: `engine("vllm")` is an environment of tools/setup-engines.

In it kvfs is as a user has it: the wheel of this tree, installed without what the daemon needs. A test runs a program
there, against a mount of its own. An engine that is not there is a skip that says which version is wanted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import REPOSITORY

from engines.kvfs_site import install_kvfs

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


def pytest_collection_finish(session: pytest.Session) -> None:
    """The wheel takes a minute or more, and is built before any test's clock runs."""
    if not session.config.option.collectonly and any(
        "engine" in getattr(item, "fixturenames", ()) for item in session.items
    ):
        install_kvfs()


@pytest.fixture(scope="session")
def engine() -> Callable[[str], Engine]:
    """engine(NAME): the environment of an engine of tools/setup-engines, or a skip that says what is missing. Of the
    version in $KVFS_ENGINE_VERSIONS, as tools/engine-matrix sets it: "nixl==1.3.2 sglang==0.5.21"."""
    versions = os.environ.get("KVFS_ENGINE_VERSIONS", "").split()

    def find(name: str) -> Engine:
        wanted = next((each for each in versions if each.startswith(f"{name}==")), name)
        command = [sys.executable, REPOSITORY / "tools/setup-engines", "--where", wanted]
        said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert said.returncode in (0, 1), said.stderr
        if said.returncode == 1:
            pytest.skip(f"NOT RUN: {said.stderr.strip().partition(' ')[2].partition(' ')[2]}")
        return Engine(name, Path(said.stdout.strip()), install_kvfs())

    return find
