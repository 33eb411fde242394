"""tools/setup-engines with doubles of pip and of the index: what is made, made again, left alone, and said."""

from __future__ import annotations

import http.server
import importlib.machinery
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers import REPOSITORY, process_alive, wait_until


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module."""
    loader = importlib.machinery.SourceFileLoader("setup_engines", str(REPOSITORY / "tools/setup-engines"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(sys.modules, loader.name, module)
    loader.exec_module(module)
    return module


@pytest.fixture
def tool(program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Its environments are doubles: a script that starts this Python, made in no time."""
    module = program
    monkeypatch.setenv("KVFS_ENGINES", str(tmp_path / "engines"))

    def make_venv(environment: Path) -> None:
        (environment / "bin").mkdir(parents=True)
        python = environment / "bin/python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        module.made.append(environment.name)  # type: ignore[attr-defined]

    module.made = []  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "make_venv", make_venv)
    monkeypatch.setattr(module, "plan", lambda name, environment: module.Plan((), ("a==1",), 1, 0))
    monkeypatch.setattr(module, "again", lambda *command, timeout_s: None)
    monkeypatch.setattr(module, "run", lambda *command, timeout_s: None)
    return module


def test_an_environment_is_made_once_and_has_a_link(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.ensure("vllm") and tool.ensure("vllm")
    assert tool.made == ["vllm-0.33.0"]
    assert os.readlink(tool.directory() / "vllm") == "vllm-0.33.0"
    said = capsys.readouterr().err
    assert "vllm 0.33.0: 1 packages, 0 MB to bring, into " in said and said.endswith("vllm 0.33.0: there\n")
    stamp = json.loads((tool.directory() / "vllm/kvfs-engine.json").read_text())
    assert stamp["requirements"] == ["a==1"]


@pytest.mark.parametrize("damage", ["no stamp", "half a stamp", "another recipe", "no python", "a file left over"])
def test_one_that_is_not_whole_is_removed_and_made_again(tool: ModuleType, damage: str) -> None:
    assert tool.ensure("nixl")
    place = tool.place("nixl")
    stamp = place / tool.STAMP
    (place / "left over").touch()
    if damage == "half a stamp":
        stamp.write_text(stamp.read_text()[:20])
    elif damage == "another recipe":
        stamp.write_text(json.dumps({"recipe": "0" * 64}))
    elif damage == "no python":
        (place / "bin/python").unlink()
    elif damage == "no stamp":
        stamp.unlink()
    else:
        # It was made, and another run was ended while it made it again.
        stamp.rename(stamp.with_suffix(".json.new"))
    assert tool.ensure("nixl")
    assert tool.made == ["nixl-1.5.1"] * 2 and not (place / "left over").exists() and tool.is_there("nixl")


def test_one_that_cannot_be_made_is_no_environment_and_says_why(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*command: object, timeout_s: float) -> None:
        raise tool.Failure("the index does not answer")

    monkeypatch.setattr(tool, "again", refuse)
    monkeypatch.setattr(sys, "argv", ["setup-engines", "sglang", "lmcache"])
    assert tool.main() == 1
    said = capsys.readouterr().err
    assert "sglang 0.5.23: cannot be made: the index does not answer" in said
    assert "missing: sglang, lmcache" in said
    monkeypatch.setattr(sys, "argv", ["setup-engines", "--where", "sglang"])
    assert tool.main() == 1 and "no sglang 0.5.23 in " in capsys.readouterr().err
    monkeypatch.setattr(tool, "again", lambda *command, timeout_s: None)
    assert tool.ensure("sglang") and tool.main() == 0
    assert capsys.readouterr().out == f"{tool.place('sglang')}/bin/python\n"


def test_a_disk_without_room_is_said_before_anything_is_brought(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "plan", lambda name, environment: tool.Plan((), (), 1 << 60, 3))
    assert not tool.ensure("vllm")
    said = capsys.readouterr().err
    assert "and 3 packages of unknown size" in said and "are free, and 4 times 1,152,921,504,607 MB are wanted" in said


def test_two_runs_at_once_make_it_once(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(name: str, environment: Path) -> Any:
        time.sleep(0.3)
        return tool.Plan((), (), 0, 0)

    monkeypatch.setattr(tool, "plan", slow)
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(tool.ensure("lmcache"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 4 and tool.made == ["lmcache-0.5.6"]


def test_a_lock_that_stays_held_is_an_error_in_time(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "LOCK_TIMEOUT_S", 0.1)
    tool.directory().mkdir()
    with tool.locked("nixl"):
        assert not tool.ensure("nixl")
    assert "another run has held it" in capsys.readouterr().err


@pytest.fixture
def index() -> Iterator[str]:
    """An index that says how long its files are, and of one that it does not know it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            if "unknown" not in self.path:
                self.send_header("Content-Length", "123456789")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_the_index_says_how_many_bytes_there_are_to_bring(tool: ModuleType, index: str) -> None:
    assert tool.size_of(f"{index}/a.whl") == 123456789
    assert tool.size_of(f"{index}/unknown.whl") is None
    assert tool.size_of("file:///a.whl") == 0
    assert str(tool.Plan((), ("a", "b"), 123456789, 0)) == "2 packages, 123 MB to bring"


def test_an_index_of_pytorch_that_is_away_is_said(
    tool: ModuleType, index: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "TORCH_INDEX", index)  # it knows no GET
    assert tool.torch_index() is None
    assert "taking PyTorch from the ordinary index" in capsys.readouterr().err


def test_a_program_that_does_not_end_is_ended_with_its_children(program: ModuleType, tmp_path: Path) -> None:
    child = tmp_path / "child"
    with pytest.raises(program.Failure, match="had not ended after 1 s"):
        program.run("sh", "-c", f"sleep 600 & echo $! >{child}; wait", timeout_s=1)
    pid = int(child.read_text())
    wait_until(lambda: not process_alive(pid), "the end of the child")
