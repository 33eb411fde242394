"""tools/pod-demo: three nodes on one machine, each step right, and nothing left behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY, run
from servers import needs_redis

DEMO = REPOSITORY / "tools/pod-demo"
TIMEOUT_S = 300


def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ, "TMPDIR": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    }  # fmt: skip


def demo(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = run(DEMO, *words, environment=environment(tmp_path), timeout_s=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{done.stderr}\nIt ended with {done.returncode} after\n{done.stdout}"
    return done


def nothing_is_left(tmp_path: Path) -> None:
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            said = (process / "cmdline").read_bytes()
        except OSError:
            continue
        assert str(tmp_path).encode() not in said or process.name == str(os.getpid()), said


@needs_redis
@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--plain",)], ids=["namespaces", "plain"])
def test_the_demo_shows_a_pod_and_leaves_nothing(tmp_path: Path, words: tuple[str, ...]) -> None:
    said = demo(tmp_path, *words).stdout
    assert re.search(r"node0 stored 24 blocks .* node1, node2 loaded each, every byte right: p50 \d+ ms", said), said
    assert "node1 loaded all 24 blocks of node2" in said and "node1 sees 0 of 24 new blocks of node0" in said
    assert said.count("every byte right") >= 10 and "pod: slot 0 of 3" in said
    if words:
        assert "Devices are files" in said and "Nodes are processes of this machine" in said
    elif os.geteuid() == 0 and shutil.which("ip"):
        assert "a network namespace of its own" in said or "no network namespaces: " in said
    nothing_is_left(tmp_path)


@needs_redis
@pytest.mark.slow
def test_a_demo_that_is_kept_is_stopped_by_its_directory(tmp_path: Path) -> None:
    said = demo(tmp_path, "--keep").stdout
    found = re.search(r"tools/pod-demo --stop (\S+)", said)
    assert found is not None, said
    base = Path(found.group(1))
    try:
        assert (base / "node1/mnt/first/0000").stat().st_size == 1 << 20
    finally:
        demo(tmp_path, "--stop", str(base))
    nothing_is_left(tmp_path)


def test_the_demo_says_what_is_missing_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    wrong = run(DEMO, "--frobnicate", check=False)
    assert wrong.returncode == 2 and wrong.stderr.startswith("usage: tools/pod-demo")
    wrong = run(DEMO, "--stop", str(tmp_path), check=False)
    assert wrong.returncode == 1 and "the directory that tools/pod-demo --keep named" in wrong.stderr
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "awk", "dirname", "sed", "env"):
        there = shutil.which(name)
        assert there is not None
        (tools / name).symlink_to(there)
    (tools / "python3").symlink_to(sys.executable)
    bare = {**environment(tmp_path), "PATH": str(tools)}
    missing = run(DEMO, environment=bare, check=False)
    assert missing.returncode == 1 and "missing here: redis-server (apt-get install redis-server)" in missing.stderr
