"""tools/check and tools/test, in a tree of their own with tests that fail, wait and leave things behind.

A failing test is named at once, the counts are right, and a signal ends all that a run has started.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import REPOSITORY, process_alive, slow, wait_until

DEADLINE_S = 120
SCRIPTS = {
    "check": ["tools/check"], "test": ["tools/test", "unit", "c"], "test with words": ["tools/test", "tests/unit"],
}  # fmt: skip

FAILS = """
import os, pathlib, time
import pytest

def test_passes():
    pass

def test_fails():
    assert False, "as it must"

@pytest.mark.skip(reason="the moon is down")
def test_skipped():
    pass

def test_waits(tmp_path):
    deadline = time.monotonic() + 90
    while not pathlib.Path(os.environ["GO"]).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""

LEAVES = """
import os, pathlib, subprocess, sys, threading
import pytest

@pytest.fixture
def torn():
    yield
    pathlib.Path(os.environ["TORN"]).touch()

def test_leaves(torn, tmp_path):
    # As a daemon: in a session of its own, and it does not heed SIGTERM.
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    left = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
    left.stdout.readline()
    named = f"kvfs-{os.getpid()}-test"
    things = [str(left.pid)]
    if os.geteuid() == 0:
        inside, backing = tmp_path / "mounted", tmp_path / "backing"
        inside.mkdir()
        backing.write_bytes(bytes(1 << 20))
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", inside]).returncode == 0:
            things.append(str(inside))
        subprocess.run(["losetup", "--find", backing])
        subprocess.run(["ip", "netns", "add", named])
        things += [str(backing), named]
    pathlib.Path(os.environ["READY"]).write_text("\\n".join(things))
    threading.Event().wait(600)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the two scripts and what they source; the tools that they call say yes."""
    tree = tmp_path / "tree"
    for folder in ("tools", "tests/unit", "tests/posix", ".venv/bin", "native/test", "build"):
        (tree / folder).mkdir(parents=True)
    for file in ("tools/check", "tools/test", "tests/run.sh", "tests/leftovers.py", "tests/tell"):
        shutil.copy(REPOSITORY / file, tree / file)
    shutil.copy(REPOSITORY / "tests/conftest.py", tree / "tests")
    (tree / "pytest.ini").write_text("[pytest]\naddopts = -ra\n")
    (tree / "tests/posix/test_smoke.py").write_text(
        "import pytest\n\n@pytest.mark.smoke\ndef test_smoke():\n    pass\n"
    )
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    for name, text in {"tools/setup": "", ".venv/bin/python": python}.items():
        (tree / name).write_text(text or "#!/bin/sh\n")
    for name in ("ruff", "mypy", "clang-format", "git"):
        (tree / ".venv/bin" / name).write_text("#!/bin/sh\n")
    for file in (tree / "tools/setup", *(tree / ".venv/bin").iterdir()):
        file.chmod(0o755)
    (tree / "native/test/Makefile").write_text(
        "warnings:\nquick check-core: good bad\ngood:\n\t$(RUN) /bin/true\nbad:\n\t$(RUN) $(BAD)\n.PHONY: good bad\n"
    )
    return tree


@contextlib.contextmanager
def running(tree: Path, script: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The script in a session of its own, and the lines that it says."""
    (tree / "temporary").mkdir()
    given = {**os.environ, "PYTHONPATH": str(REPOSITORY / "tests"), "TMPDIR": str(tree / "temporary"), **environment}
    for name in ("KVFS_TEST_TOLD", "KVFS_KEEP_POOL", "PYTEST_ADDOPTS"):
        given.pop(name, None)
    process = subprocess.Popen(
        [str(tree / SCRIPTS[script][0]), *SCRIPTS[script][1:]], cwd=tree, env=given, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines: list[str] = []
    stream = process.stdout
    assert stream is not None

    def read() -> None:
        for line in stream:
            lines.append(line)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield process, lines
        process.wait(DEADLINE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)
        reader.join(DEADLINE_S)
        stream.close()


@pytest.mark.parametrize("script", ["check", "test"])
def test_a_failing_test_is_named_while_others_run_and_all_are_counted(tree: Path, script: str) -> None:
    (tree / "tests/unit/test_inner.py").write_text(FAILS)
    go = tree / "go"
    with running(tree, script, GO=str(go), BAD="/bin/false") as (process, lines):
        try:
            wait_until(
                lambda: any(re.search(r"FAILED .*test_inner.py::test_fails.*as it must", line) for line in lines),
                "the name of the test that fails",
                timeout_s=DEADLINE_S,
            )
            assert process.poll() is None
        finally:
            go.touch()
    said = "".join(lines)
    assert process.returncode == 1, said
    assert "the moon is down" in said, said
    assert "together: " in said and "unit: 2 passed, 1 failed, 1 skipped" in said, said
    assert "c: 1 passed, 1 failed, 0 skipped" in said and "native/test false: status 1" in said, said
    assert not list((tree / "temporary").iterdir())


@pytest.mark.parametrize(("script", "number"), [
    ("check", signal.SIGTERM), ("test", signal.SIGTERM), ("test with words", signal.SIGINT),
    slow("check", signal.SIGINT), slow("test", signal.SIGINT), slow("test with words", signal.SIGTERM),
])  # fmt: skip
def test_a_signal_ends_a_run_and_all_that_it_has_started(tree: Path, script: str, number: signal.Signals) -> None:
    """SIGTERM comes to the script alone, Ctrl-C to all of its group."""
    (tree / "tests/unit/test_inner.py").write_text(LEAVES)
    ready, torn = tree / "ready", tree / "torn"
    with running(tree, script, READY=str(ready), TORN=str(torn), BAD="/bin/true") as (process, lines):
        wait_until(lambda: ready.exists() or process.poll() is not None, "the test that waits", timeout_s=DEADLINE_S)
        assert process.poll() is None, "".join(lines)
        wait_until(lambda: ready.read_text(), "what the test leaves")
        pid, *things = ready.read_text().split("\n")
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    said = "".join(lines)
    assert process.returncode == 128 + number, said
    assert torn.exists(), f"fixtures are torn down\n{said}"
    assert not process_alive(int(pid)), said
    assert f"left over and removed: process {pid}" in said, said
    assert not list((tree / "temporary").iterdir()), said
    assert str(tree) not in Path("/proc/self/mountinfo").read_text()
    if things:
        loops = subprocess.run(["losetup", "--all"], capture_output=True, text=True, check=False).stdout
        assert not any(thing in loops for thing in things), loops
        assert not any(Path("/run/netns", thing).exists() for thing in things)
