"""The data plane's NVMe/TCP initiator against bare TCP: the same bytes into the same memory, over loopback.

The enclosure and bare TCP's sender are on the first CPU, the measured code is on the last.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benches.common import KIB, MIB, REPOSITORY, BenchError, Json, MissingError, column_at, parse_json, run_command
from benches.rig import Rig

NQN = "nqn.2026-11.bench:a"
SIZE = 64 * MIB  # of what is read
START_TIMEOUT_S = 60
PEER = "bare TCP"


def case_nvme(rig: Rig) -> None:
    """4 KiB reads one at a time, and 1 MiB reads eight at a time."""
    program = rig.bench.client_path.with_name("bench_nvme")
    if not program.exists():
        raise MissingError(f"needs {program}: tools/bench builds it")
    (device,) = rig.make_block_devices("nvme", 1, SIZE)
    with device.open("r+b", buffering=0) as file:
        for _ in range(SIZE // MIB):
            file.write(os.urandom(MIB))
        os.fsync(file.fileno())
    with enclosure({NQN: [device]}) as port:
        result = run_command(program, str(port), NQN, str(rig.scale.rounds), str(rig.scale.reads))
    rounds = [parse_json(line, "bench_nvme") for line in result.stdout.splitlines()]
    small = [one for one in rounds if one["size"] == 4 * KIB]
    large = [one for one in rounds if one["size"] == MIB]
    if not small or not large:
        raise BenchError(f"bench_nvme reported {len(rounds)} rounds")
    what = "4 KiB reads at depth 1 by NVMe/TCP, mean"
    rig.add("nvme", what, "us", column_at(small, "nvme_us"), PEER, column_at(small, "bare_us"), "extra", 20.0)
    what = "1 MiB reads at depth 8 by NVMe/TCP"
    rig.add("nvme", what, "GB/s", _rates(large, "nvme_us"), PEER, _rates(large, "bare_us"), "share", 0.8)
    ours, theirs = column_at(large, "nvme_cpu_s_per_gib"), column_at(large, "bare_cpu_s_per_gib")
    rig.add("nvme", f"{what}: CPU of the reader", "s/GiB", ours, PEER, theirs, "cost", 1.3)


def _rates(rounds: list[Json], name: str) -> list[float]:
    return [MIB / 1000 / microseconds for microseconds in column_at(rounds, name)]


@contextlib.contextmanager
def enclosure(subsystems: Mapping[str, Sequence[Path]]) -> Iterator[int]:
    """The port of an enclosure that serves these devices, on the first CPU."""
    target = REPOSITORY / "tools/nvme_tcp_target"
    if not target.exists():
        raise MissingError(f"needs {target}")
    words = ["--listen", "127.0.0.1:0"]
    for nqn, devices in subsystems.items():
        words += ["--subsystem", f"{nqn}={','.join(map(str, devices))}"]
    process = subprocess.Popen(
        ["taskset", "-c", "0", target, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline().decode() if selector.select(START_TIMEOUT_S) else ""
        if not line.startswith("listening "):
            raise BenchError(f"{target}: did not start: {line!r}")
        yield int(line.rpartition(":")[2])
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
