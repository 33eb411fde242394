"""A pod on files, with a pool's directory for each node."""

from __future__ import annotations

from pathlib import Path

from still_clock import Time

from kvfs.pool import owner
from kvfs.pool.config import CONFIG_NAME
from kvfs.pool.joining import import_node, join
from kvfs.pool.lock import pool_lock
from kvfs.pool.making import FormatRequest, format_devices
from kvfs.pool.node import Node
from kvfs.pool.pod import PodConfig

ENGINE = "redis://engine.example:6379"


def device_files(path: Path, count: int = 2, size: int = 32 << 20) -> list[Path]:
    files = [path / f"device-{index}" for index in range(count)]
    for file in files:
        with open(file, "xb") as made:
            made.truncate(size)
    return files


def make_pod(path: Path, *, nodes: int = 3, joined: int = 1, width: int | None = None, **of_pod: object) -> list[Path]:
    """Pool directories of the nodes that have joined, on devices in `path`."""
    devices = device_files(path)
    pods = [path / f"node-{slot}" for slot in range(joined)]
    pod = PodConfig(engine=(ENGINE,), nodes=nodes, **{"lot": 0, **of_pod})  # type: ignore[arg-type]
    made = path / "made" if not joined else pods[0]
    format_devices(FormatRequest(pool=made, devices=tuple(devices), pod=pod, stripe_width=width))
    for pool in pods:
        join_node(pool)
    return pods


def join_node(pool: Path, slot: int | None = None, *, force: bool = False, clock: owner.Clock | None = None) -> Node:
    if not (pool / CONFIG_NAME).exists():
        import_node(pool, sorted(pool.parent.glob("device-*")))
    with pool_lock(pool, "joining a pod"):
        return join(pool, slot, force=force, clock=clock or Time().clock)
