"""One run: its scale, its rounds in turn, and the JSON of its results."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benches.common import HUGE_PAGES, JSON_VERSION, Json, MissingError, Row, Scale, parse_json, run_command, say
from benches.report import row_text
from kvfs.errors import KvfsError


class Bench:
    """The settings of a run, its findings, and its clients."""

    def __init__(
        self,
        scale: Scale,
        *,
        client: Path,
        passthrough_hp: Path,
        quick: bool,
        trace: Path | None = None,
        plots: Path | None = None,
    ) -> None:
        self.scale, self.client_path, self.passthrough_hp, self.quick = scale, client, passthrough_hp, quick
        self.trace, self.plots = trace, plots
        self.prefix: list[str | Path] = []  # of the clients' command lines: a tracer
        self.rows: list[Row] = []
        self.skipped: list[Json] = []
        self.failed: list[Json] = []

    def client(self, *words: object) -> Json:
        if not self.client_path.exists():
            raise MissingError(f"needs {self.client_path}: tools/bench builds it")
        result = run_command(*self.prefix, self.client_path, *map(str, words), environment=HUGE_PAGES)
        return parse_json(result.stdout, "bench_client")

    def native(self, *words: object, library: Path | None = None) -> Json:
        """`library`: the folder of another build's libkvfs."""
        program = self.client_path.with_name("native_client")
        if not program.exists():
            raise MissingError(f"needs {program}: tools/bench builds it, if tools/setup has built libkvfs")
        environment = HUGE_PAGES if library is None else {**HUGE_PAGES, "LD_LIBRARY_PATH": str(library)}
        result = run_command(*self.prefix, program, *map(str, words), environment=environment)
        return parse_json(result.stdout, "native_client")

    def skip(self, case: str, devices: str, reason: str) -> None:
        say(f"{case} on {devices}: skipped: {reason}")
        self.skipped.append({"case": case, "devices": devices, "reason": reason})

    def add(self, row: Row) -> None:
        self.rows.append(row)
        say(row_text(row.document()))

    def interleave(self, runs: Mapping[str, Callable[[int], Json]], finer: int = 1) -> dict[str, list[Json]]:
        """Each round runs every side once, one after the other. `finer`: a factor for the number of rounds."""
        results: dict[str, list[Json]] = {name: [] for name in runs}
        for index in range(self.scale.rounds * finer):
            for name, run in runs.items():
                results[name].append(run(index))
        return results

    def guarded(self, name: str, devices: str, case: Callable[[], None]) -> None:
        """One case. A lack of this machine skips it, a failure fails it, and the others run either way."""
        say(f"{name} on {devices}")
        started = time.monotonic()
        try:
            case()
        except MissingError as error:
            self.skip(name, devices, str(error))
        except (KvfsError, OSError, ValueError) as error:
            say(f"{name} on {devices} FAILED: {error}")
            self.failed.append({"case": name, "devices": devices, "error": f"{type(error).__name__}: {error}"})
        say(f"{name} on {devices}: {time.monotonic() - started:.1f} s")

    def document(self) -> Json:
        return {
            "version": JSON_VERSION,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "quick": self.quick,
            "machine": machine(),
            "scale": {name: getattr(self.scale, name) for name in Scale.__slots__},
            "rows": [row.document() for row in self.rows],
            "skipped": self.skipped,
            "failed": self.failed,
        }


def machine() -> Json:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "kernel": platform.release(),
        "cpu": model,
        "cores": os.cpu_count(),
        "memory": memory,
        "python": platform.python_version(),
    }
