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

import pytest
from helpers import REPOSITORY, process_alive, wait_until

from engines import environments


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module."""
    loader = importlib.machinery.SourceFileLoader("setup_engines", str(REPOSITORY / "tools/setup-engines"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, loader.name, module)
    loader.exec_module(module)
    return module


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of those that are made: they are doubles, a script that starts this Python, made in no time."""
    monkeypatch.setenv("KVFS_ENGINES", str(tmp_path / "engines"))
    names: list[str] = []

    def python_of(environment: Path) -> None:
        (environment / "bin").mkdir(parents=True)
        (environment / "lib/python3.11/site-packages").mkdir(parents=True)
        python = environment / "bin/python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        names.append(environment.name)

    def run(*command: str | Path, timeout_s: float) -> None:
        if "--without-pip" in command:
            python_of(Path(command[-1]))

    def again(*command: str | Path, timeout_s: float) -> None:
        if "--target" in command:
            names.append(f"folder {Path(command[command.index('--target') + 1]).name}")

    plan = environments.Plan((), ("a==1",), 1, 0)
    monkeypatch.setattr(environments, "make_venv", python_of)
    monkeypatch.setattr(environments, "base_plan", lambda environment: plan)
    monkeypatch.setattr(environments, "folder_plan", lambda environment, name, version: plan)
    monkeypatch.setattr(environments, "again", again)
    monkeypatch.setattr(environments, "run", run)
    return names


BASE = environments.base_place().name


def test_an_environment_is_made_once_and_has_a_link(made: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert environments.ensure("vllm") and environments.ensure("vllm")
    assert made == [BASE, "folder vllm-0.33.0", "vllm-0.33.0"]
    root = environments.directory()
    assert os.readlink(root / "vllm") == "environments/vllm-0.33.0"
    said = capsys.readouterr().err
    assert "vllm 0.33.0: 1 packages, 0 MB to bring, into " in said and said.endswith("vllm 0.33.0: there\n")
    assert json.loads((root / "folders/vllm-0.33.0/kvfs-engine.json").read_text())["requirements"] == ["a==1"]
    # Its own packages come before those of the base.
    seen = (root / "vllm/lib/python3.11/site-packages/kvfs-engine.pth").read_text().splitlines()
    assert seen == [str(root / "folders/vllm-0.33.0"), str(root / BASE / "lib/python3.11/site-packages")]


def test_another_version_has_a_folder_of_its_own_and_the_same_base(made: list[str]) -> None:
    environments.make("vllm")
    environments.make("vllm", "0.31.0")
    environments.make("nixl", "1.3.2")
    assert made[3:] == ["folder vllm-0.31.0", "vllm-0.31.0", "folder nixl-1.3.2", "nixl-1.3.2"]
    assert environments.is_there("vllm", "0.31.0") and not environments.is_there("vllm", "0.32.0")
    assert not (environments.directory() / "vllm").exists(), "the link is to the one that tests use"


@pytest.mark.parametrize("version", ["../0.33.0", "0.33.0/..", "", " 1.0", "--pre"])
def test_a_version_is_one(made: list[str], version: str) -> None:
    with pytest.raises(environments.Failure, match="is no version"):
        environments.make("vllm", version)
    assert made == []


@pytest.mark.parametrize("damage", ["no stamp", "half a stamp", "another recipe", "no python", "a file left over"])
def test_one_that_is_not_whole_is_removed_and_made_again(made: list[str], damage: str) -> None:
    assert environments.ensure("nixl")
    place = environments.place("nixl")
    stamp = place / environments.STAMP
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
    assert environments.ensure("nixl")
    assert made == [BASE, "folder nixl-1.5.1", "nixl-1.5.1", "nixl-1.5.1"]
    assert not (place / "left over").exists() and environments.is_there("nixl")


@pytest.mark.parametrize("part", ["base", "folder"])
def test_a_base_or_a_folder_that_is_not_whole_is_made_again(made: list[str], part: str) -> None:
    assert environments.ensure("nixl")
    whole = environments.base_place() if part == "base" else environments.folder_place("nixl", "1.5.1")
    (whole / environments.STAMP).unlink()
    (whole / "left over").touch()
    assert not environments.is_there("nixl") and environments.ensure("nixl")
    assert made[3:] == [BASE if part == "base" else "folder nixl-1.5.1"] and not (whole / "left over").exists()


def test_one_that_cannot_be_made_is_no_environment_and_says_why(
    made: list[str], program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    again = environments.again

    def refuse(*command: object, timeout_s: float) -> None:
        raise environments.Failure("the index does not answer")

    monkeypatch.setattr(environments, "again", refuse)
    monkeypatch.setattr(sys, "argv", ["setup-engines", "sglang", "lmcache"])
    assert program.main() == 1
    said = capsys.readouterr().err
    assert "sglang 0.5.23: cannot be made: the index does not answer" in said
    assert "missing: sglang, lmcache" in said
    monkeypatch.setattr(sys, "argv", ["setup-engines", "--where", "sglang"])
    assert program.main() == 1 and "no sglang 0.5.23 in " in capsys.readouterr().err
    monkeypatch.setattr(environments, "again", again)
    assert environments.ensure("sglang") and program.main() == 0
    assert capsys.readouterr().out == f"{environments.place('sglang')}/bin/python\n"
    monkeypatch.setattr(sys, "argv", ["setup-engines", "--where", "sglang==0.5.21"])
    assert program.main() == 1
    assert "no sglang 0.5.21 in " in (said := capsys.readouterr().err) and "tools/engine-matrix --folders" in said


def test_a_disk_without_room_is_said_before_anything_is_brought(
    made: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environments, "base_plan", lambda environment: environments.Plan((), (), 1 << 60, 3))
    assert not environments.ensure("vllm")
    said = capsys.readouterr().err
    assert "and 3 packages of unknown size" in said and "are free, and 4 times 1,152,921,504,607 MB are wanted" in said


def test_two_runs_at_once_make_it_once(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(environment: Path, name: str, version: str) -> environments.Plan:
        time.sleep(0.3)
        return environments.Plan((), (), 0, 0)

    monkeypatch.setattr(environments, "folder_plan", slow)
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(environments.ensure("lmcache"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 4 and made == [BASE, "folder lmcache-0.5.6", "lmcache-0.5.6"]


def test_a_lock_that_stays_held_is_an_error_in_time(
    made: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environments, "LOCK_TIMEOUT_S", 0.1)
    environments.directory().mkdir()
    with environments.locked("base"):
        assert not environments.ensure("nixl")
    assert "another run has held it" in capsys.readouterr().err


def test_a_place_of_its_own_has_a_lock_of_its_own(tmp_path: Path) -> None:
    """The wheel of each clone: another clone's run is not waited for."""
    for clone in ("one", "other"):
        (tmp_path / clone).mkdir()
    with environments.locked("wheel", tmp_path / "one"), environments.locked("wheel", tmp_path / "other"):
        with pytest.raises(environments.Failure, match=r"held it for 0.1 s"):
            with environments.locked("wheel", tmp_path / "one", 0.1):
                pass


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


def test_the_index_says_how_many_bytes_there_are_to_bring(index: str) -> None:
    assert environments.size_of(f"{index}/a.whl") == 123456789
    assert environments.size_of(f"{index}/unknown.whl") is None
    assert environments.size_of("file:///a.whl") == 0
    assert str(environments.Plan((), ("a", "b"), 123456789, 0)) == "2 packages, 123 MB to bring"


def test_an_index_of_pytorch_that_is_away_is_said(
    index: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environments, "TORCH_INDEX", index)  # it knows no GET
    assert environments.torch_index() is None
    assert "taking PyTorch from the ordinary index" in capsys.readouterr().err


def test_a_program_that_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    with pytest.raises(environments.Failure, match="had not ended after 1 s"):
        environments.run("sh", "-c", f"sleep 600 & echo $! >{child}; wait", timeout_s=1)
    pid = int(child.read_text())
    wait_until(lambda: not process_alive(pid), "the end of the child")
