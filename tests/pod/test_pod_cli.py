"""kvfs pod: three nodes set up by the command line, looked at, one retired; and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pods import ENGINE, Time, device_files, make_pod

from kvfs import cli
from kvfs.cli.pod_doctor import examine_map, examine_node_clocks, examine_pages
from kvfs.pool import joining, owner
from kvfs.pool.config import load


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "JOIN_S", 0.05)
    monkeypatch.setattr(joining, "RETIRE_WATCH_S", 0.2)
    monkeypatch.setattr(joining, "_POLL_S", 0.05)
    monkeypatch.setattr(owner, "INTERVAL_S", 0.05)


def run(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as ending:
        status = int(ending.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def asked(*arguments: object, capsys: pytest.CaptureFixture[str]) -> Any:
    status, out, error = run(*arguments, "-o", "json", capsys=capsys)
    assert status == 0, error
    return json.loads(out)


def devices(path: Path) -> list[str]:
    return [word for device in sorted(path.glob("device-*")) for word in ("--device", str(device))]


def test_three_nodes_are_set_up_looked_at_and_one_retired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device_files(tmp_path)
    pools = [tmp_path / f"node-{slot}" for slot in range(3)]
    made = asked("pod", "create", pools[0], *devices(tmp_path), "--engine", f"{ENGINE},redis://two", "--nodes", 3,
                 "--lot", 2, "--map-size", "64M", "--lookup-wait", 5, "--password-file", "/etc/kvfs/pass",
                 capsys=capsys)  # fmt: skip
    assert (made["slot"], made["nodes"], made["lot"], made["engine"]) == (0, 3, 2, [ENGINE, "redis://two"])
    config = load(pools[0])
    assert config is not None and config.pod is not None
    assert (config.pod.map_size, config.pod.lookup_wait_ms, config.pod.password_file) == (64 << 20, 5, "/etc/kvfs/pass")
    for slot in (1, 2):
        joined = asked("pod", "join", pools[slot], *devices(tmp_path), capsys=capsys)
        assert joined["slot"] == slot and joined["uuid"] == made["uuid"]
    assert asked("pod", "join", pools[1], capsys=capsys)["slot"] == 1
    looked = asked("pod", "status", pools[1], capsys=capsys)
    assert looked["slot"] == 1 and looked["daemon"] is None and looked["version"] == 1
    assert [slot["state"] for slot in looked["slots"]] == ["left"] * 3
    assert sum(slot["segments"] for slot in looked["slots"]) == looked["segment_count"]
    assert all(slot["frozen"] and slot["node"] and slot["host"] for slot in looked["slots"])
    status, out, _ = run("pod", "retire", pools[0], 2, capsys=capsys)
    assert status == 0 and out == "slot 2: retired; its lots stay frozen\n"
    status, out, _ = run("pod", "status", pools[1], capsys=capsys)
    assert status == 0 and "this node is slot 1" in out and f"engine {ENGINE}" in out
    assert "\n2     retired " in out and ", which all nodes read and none writes" in out
    status, _, error = run("pod", "retire", pools[1], 1, capsys=capsys)
    assert status == 2 and "this node's own" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pod"], "action"),
        (["pod", "frobnicate", "{pool}"], "frobnicate"),
        (["pod", "create", "{pool}"], "--device is missing"),
        (["pod", "create", "{pool}", "--device", "/dev/null"], "--engine is missing"),
        (["pod", "create", "{pool}", "--device", "/dev/null", "--engine", ENGINE], "--nodes is missing"),
        (["pod", "create", "{pool}", "--device", "/dev/null", "--engine", ENGINE, "--nodes", "0"], "'0'"),
        (["pod", "create", "{pool}", "--device", "/dev/null", "--engine", ENGINE, "--nodes", "4097"], "1 to 4096"),
        (["pod", "create", "{pool}", "--device", "/dev/null", "--engine", "redis://:x@a", "--nodes", "2"], "password"),
        (["pod", "create", "{pool}", "--device", "/dev/null", "--engine", ENGINE, "--nodes", "2", "--lot", "3"], "lot"),
        (["pod", "create", "{pool}", "1", "--nodes", "2"], "one word too many"),
        (["pod", "join", "{pool}"], "--device"),
        (["pod", "join", "{pool}", "--nodes", "2"], "--nodes has no meaning there"),
        (["pod", "join", "{pool}", "--slot", "x"], "'x'"),
        (["pod", "status", "{pool}", "--force"], "--force has no meaning there"),
        (["pod", "status", "{pool}", "--slot", "0"], "--slot has no meaning there"),
        (["pod", "retire", "{pool}"], "give SLOT"),
        (["pod", "retire", "{pool}", "x"], "'x'"),
    ],
)
def test_a_command_line_without_sense_is_one_line_and_status_2(
    arguments: Sequence[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, error = run(*[word.format(pool=tmp_path / "pool") for word in arguments], capsys=capsys)
    assert status == 2, error
    assert out == "" and error.startswith("kvfs") and words in error and error.count("\n") == 1, error
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_pod_is_said_to_be_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = tmp_path / "alone"
    assert run("format", alone, "--files", 1, "--size", "32M", capsys=capsys)[0] == 0
    for action in (["status"], ["doctor"], ["join"], ["retire"]):
        words = ["pod", *action, alone, *(["1"] if action == ["retire"] else [])]
        status, _, error = run(*words, capsys=capsys)
        assert status == 2 and error == f"kvfs: {alone}: not a pod; kvfs pod create makes one\n"
    status, _, error = run("pod", "status", tmp_path / "none", capsys=capsys)
    assert status == 1 and "none: no such pool" in error


def test_a_pods_devices_are_not_overwritten_by_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_pod(tmp_path)
    words = [*devices(tmp_path), "--engine", ENGINE, "--nodes", "2"]
    status, _, error = run("pod", "create", tmp_path / "again", *words, capsys=capsys)
    assert status == 1 and "holds the label of kvfs pool" in error
    assert run("pod", "create", tmp_path / "again", *words, "--force", capsys=capsys)[0] == 0
    # The nodes of the pod that was there find other labels.
    assert run("pod", "status", tmp_path / "node-0", capsys=capsys)[0] == 1


def test_an_imported_pod_joins_anew_only_without_its_node_toml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pool,) = make_pod(tmp_path)
    (pool / "pool.toml").unlink()
    assert run("import", pool, *devices(tmp_path), capsys=capsys)[0] == 0
    assert asked("pod", "join", pool, capsys=capsys)["slot"] == 0
    assert run("fsck", pool, capsys=capsys)[0] == 0
    (pool / "node.toml").unlink()
    assert asked("pod", "join", pool, capsys=capsys)["slot"] == 1


def test_the_doctor_without_an_engine_says_so_and_looks_at_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("redis")
    device_files(tmp_path)
    pool = tmp_path / "node-0"
    words = ["--engine", "redis://127.0.0.1:1,redis://127.0.0.1:2", "--nodes", "2"]
    assert run("pod", "create", pool, *devices(tmp_path), *words, capsys=capsys)[0] == 0
    status, out, _ = run("pod", "doctor", pool, capsys=capsys)
    assert status == 1 and "engine 0" in out and "127.0.0.1:2" in out and "-> blocks of this node go on" in out
    status, out, _ = run("pod", "doctor", pool, "-o", "json", capsys=capsys)
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert checks["engine 1"]["state"] == "missing" and checks["engine 1"]["required"]
    assert checks["pod map"]["state"] == checks["node pages"]["state"] == checks["node clocks"]["state"] == "ok"
    assert checks["nodes"]["found"] == "1 left, 1 free" and checks["this node"]["found"] == "slot 0, left"


def test_the_doctor_without_the_engines_client_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (pool,) = make_pod(tmp_path)
    monkeypatch.setitem(sys.modules, "kvfs.pod.redis_engine", None)
    status, _, error = run("pod", "doctor", pool, capsys=capsys)
    assert status == 1 and "kvfs[pod]" in error


def test_the_doctor_finds_a_map_beyond_memory_pages_that_are_missing_and_clocks_that_are_off(tmp_path: Path) -> None:
    (pool,) = make_pod(tmp_path, map_size=1 << 30)
    config, states = joining.slot_states(pool, clock=Time().clock)
    assert examine_map(config, 8 << 30).state == "ok"
    assert examine_map(config, 1 << 30).state == "missing"
    page = states[0].page
    assert page is not None
    frozen = replace(states[0], state="frozen", devices=1)
    found = {one.name: one for one in examine_pages(config, [frozen, *states[1:]], None)}
    assert "slots 0 are frozen" in found["nodes"].action and "no slot" in found["this node"].found
    assert found["node pages"].state == "note" and "slots 0: not on all 2 devices" in found["node pages"].found
    gone = {one.name: one for one in examine_pages(config, [replace(states[0], state="retired"), *states[1:]], 0)}
    assert gone["this node"].required and "retired" in gone["this node"].found
    beating = replace(states[0], state="beating", page=replace(page, written_ns=1_000_000_000))
    assert examine_node_clocks([beating], 2.0).state == "ok"
    assert examine_node_clocks([beating], 61.0).found == "slot 0 -60 s"
