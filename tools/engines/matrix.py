"""tools/engine-matrix: versions of engines that kvfs works with.

    tools/engine-matrix                all: folders, a probe of seconds each, a drive of a minute each; a table
    tools/engine-matrix --probe        no drives
    tools/engine-matrix --folders      only have the environments
    tools/engine-matrix --plan         say which versions would be tried, and why
    tools/engine-matrix --only NAME    of one engine, or of one version: --only sglang, --only vllm==0.31.0
    tools/engine-matrix --minutes N    begin nothing after that: the rest is said to be not tried (default: 30)
    tools/engine-matrix --write        write kvfs/connectors/tried.py and the table of docs/engines.md
    tools/engine-matrix --known        a version that the list does not have yet may fail: it is told of, and no failure
    tools/engine-matrix --json         the rows, instead of the table

Versions are the newest three releases of each engine, and those that stacks pin in their metadata: the index says so.
Each has a folder beside one base environment (tools/engines/environments.py), made once, used by every clone. A probe
looks for all that a connector uses of its engine. A drive runs tests of tests/connectors and tests/engines in that
version. They have mounts of their own: blocks come back bit for bit in several layouts, and an evicted one is a miss.

A folder that cannot be had is named with the reason, and its version is not tried. Where the index is away the versions
are those of the last time. Exit status: 0, 1 if a version failed, 3 if nothing could be tried.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import os
import signal
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from engines import environments, index, kvfs_site, tried
from engines.environments import say
from engines.index import Chosen
from engines.tried import FAILED, NOT_TRIED, PASSED, REFUSED, Row
from kvfs.connectors.tried import DATE, VERSIONS

REPOSITORY = Path(__file__).resolve().parents[2]
MINUTES = 30.0
PROBE_TIMEOUT_S = 300
DRIVE_TIMEOUT_S = 900
END_TIMEOUT_S = 60
AT_ONCE = 2
SAVED = "matrix-versions.json"
NOTHING_TRIED = 3

_VLLM, _SGLANG = "tests/connectors/test_vllm.py::", "tests/connectors/test_sglang.py::"
_LMCACHE, _NIXL = "tests/connectors/test_lmcache.py::", "tests/connectors/test_nixl.py::"
_UCM = "tests/connectors/test_ucm.py::"
_FILES = "tests/engines/test_engines.py::"


@dataclasses.dataclass(frozen=True)
class Interface:
    """A part of an engine that kvfs serves, and the tests that drive it. optional: older versions have no such part,
    and a connector that says so is right."""

    name: str
    engine: str
    drive: tuple[str, ...]
    optional: bool = False


INTERFACES = (
    Interface("vllm", "vllm", (
        f"{_VLLM}test_what_is_stored_is_found_in_the_same_step_and_loads_the_same",
        f"{_VLLM}test_eviction_in_a_small_pool_is_a_miss_and_never_a_wrong_block",
        f"{_VLLM}test_a_damaged_block_is_recomputed_and_stored_again",
        f"{_VLLM}test_two_engines_share_a_pool_and_other_layouts_miss",
    )),
    Interface("sglang", "sglang", (
        f"{_SGLANG}test_pages_of_every_layout_come_back_as_they_were",
        f"{_SGLANG}test_pages_that_are_lost_are_misses_and_sglang_lives_on",
        f"{_SGLANG}test_a_hybrid_model_restores_what_all_its_pools_have",
    )),
    Interface("sglang linker", "sglang", (
        f"{_SGLANG}test_pages_of_a_device_come_back_by_layers_in_another_process",
        f"{_SGLANG}test_a_linked_page_that_is_lost_aborts_one_load_and_is_stored_again",
        f"{_SGLANG}test_what_a_linked_look_up_found_is_leased_until_it_is_loaded",
    ), optional=True),
    Interface("lmcache", "lmcache", (
        f"{_LMCACHE}test_lmcaches_benchmark_verifies_what_it_stored",
        f"{_LMCACHE}test_blocks_that_are_lost_are_misses_and_lmcache_lives_on",
        f"{_LMCACHE}test_an_object_of_another_size_is_a_miss_and_is_replaced",
    )),
    Interface("nixl", "nixl", (
        f"{_NIXL}test_objects_are_stored_found_and_loaded",
        f"{_NIXL}test_a_hole_fails_the_transfer_and_nothing_else",
        f"{_NIXL}test_parts_of_an_object",
        f"{_NIXL}test_files_by_path_and_by_descriptor",
        f"{_NIXL}test_a_damaged_block_is_a_miss",
        f"{_NIXL}test_with_telemetry_transfers_are_counted",
    )),
    Interface("mooncake", "mooncake", (
        f"{_FILES}test_what_is_lost_is_a_miss_and_the_engine_lives_on[mooncake-bucket]",
        f"{_FILES}test_what_is_lost_is_a_miss_and_the_engine_lives_on[mooncake-file]",
        f"{_FILES}test_a_preallocated_pool_is_a_slab_that_eviction_leaves_alone[mooncake-offset]",
    )),
    Interface("ucm", "ucm", (f"{_UCM}test_ucms_factory_makes_a_store_and_its_blocks_come_back",)),
)  # fmt: skip


class Clock:
    """The time there is for all of it."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        return self._end - time.monotonic()


def versions() -> list[Chosen]:
    """Versions to try, by the index; those of the last time where it is away. Raises Bad if there are none."""
    saved = environments.directory() / SAVED
    try:
        chosen = index.choose()
    except index.Bad as error:
        say(f"the index does not say which versions there are: {error}")
        chosen = last_time(saved)
        say(f"taking the {len(chosen)} versions of the last time, {saved}")
        return chosen
    saved.parent.mkdir(parents=True, exist_ok=True)
    staged = saved.with_name(f".{SAVED}.{os.getpid()}")
    staged.write_text(json.dumps([dataclasses.asdict(one) for one in chosen], indent=1))
    staged.rename(saved)
    return chosen


def last_time(saved: Path) -> list[Chosen]:
    """Raises Bad for a file that is not there, or is no list of versions."""
    try:
        chosen = [Chosen(one["engine"], one["version"], tuple(one["why"])) for one in json.loads(saved.read_text())]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise index.Bad(f"{saved}: no versions of the last time: {error}") from error
    for one in chosen:
        known = one.engine in environments.ENGINES and isinstance(one.version, str) and index.is_version(one.version)
        if not known or not all(isinstance(word, str) for word in one.why):
            raise index.Bad(f"{saved}: {one} is no version of an engine")
    return chosen


def only(chosen: Iterable[Chosen], wanted: str | None) -> list[Chosen]:
    name, _, version = (wanted or "").partition("==")
    return [one for one in chosen if name in ("", one.engine) and version in ("", one.version)]


# ---- one version ----


def environment_of(python_path: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    quiet = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "LMCACHE_TRACK_USAGE": "false", "OMP_NUM_THREADS": "2"}
    return kept | quiet | {"PYTHONPATH": str(python_path), "PYTHONNOUSERSITE": "1"} | more


def ended(command: Sequence[str | Path], environment: dict[str, str], timeout_s: float) -> tuple[int | None, str]:
    """As environments.ended(), in this tree. It is asked to end before it is made to."""
    return environments.ended(
        command, max(1.0, timeout_s), environment=environment, directory=REPOSITORY, end_timeout_s=END_TIMEOUT_S
    )


def probed(interface: Interface, version: str, timeout_s: float) -> tuple[str, str]:
    """How the probe ended, and what is missing. One that passed may do without something."""
    python = environments.place(interface.engine, version) / "bin/python"
    with tempfile.TemporaryDirectory() as home:
        program = REPOSITORY / "tools/engines/probe.py"
        status, output = ended(
            (python, program, interface.name, REPOSITORY), environment_of(kvfs_site.SITE, HOME=home), timeout_s
        )
    if status is None:
        return FAILED, f"the probe had not ended after {timeout_s:.0f} s"
    lines = output.strip().splitlines()
    try:
        said = json.loads(lines[-1])
        missing, without = ([str(each) for each in said.get(name, ())] for name in ("missing", "without"))
        said["missing"]
    except (IndexError, ValueError, KeyError, TypeError):
        return FAILED, f"the probe ended with {status}: {' '.join(lines[-3:])[-300:]}"
    if not missing:
        return PASSED, f"it does without {'; '.join(without)}" if without else ""
    refused = interface.optional and missing[0].startswith("import kvfs.connectors.")
    return REFUSED if refused else FAILED, "; ".join(missing)


def driven(interface: Interface, version: str, timeout_s: float) -> tuple[str, str]:
    """How its tests ended, and which of them did not pass. A test that was skipped did not."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = (
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--run-slow", f"--junitxml={report}",
            *interface.drive,
        )  # fmt: skip
        chosen = f"{interface.engine}=={version}"
        status, output = ended(command, environment_of(REPOSITORY, KVFS_ENGINE_VERSIONS=chosen), timeout_s)
        if status is None:
            if timeout_s < DRIVE_TIMEOUT_S:
                return NOT_TRIED, f"there was no time for the end of its drive, cut after {timeout_s:.0f} s"
            return FAILED, f"the drive had not ended after {timeout_s:.0f} s: {output[-300:]}"
        try:
            cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
        except (OSError, xml.etree.ElementTree.ParseError) as error:
            return FAILED, f"pytest ended with {status}: {error}: {output[-300:]}"
    told = [
        f"{case.get('name')}: {' '.join((each.get('message') or '').split())[:300]}"
        for case in cases
        for each in case
        if each.tag in ("failure", "error", "skipped")
    ]
    if status or told or len(cases) < len(interface.drive):
        (log := REPOSITORY / "build" / "matrix").mkdir(parents=True, exist_ok=True)
        (log / f"{interface.name.replace(' ', '-')}-{version}.log").write_text(output)
        return FAILED, "; ".join(told) or f"pytest ended with {status}, {len(cases)} tests: {output[-300:]}"
    return PASSED, ""


# ---- all of them ----


def have_folders(chosen: list[Chosen], clock: Clock) -> dict[Chosen, str]:
    """Have the environments, as far as the time goes. Of those that cannot be had, the reason."""
    without = {}
    environments.give_up_at = time.monotonic() + clock.left()
    for one in chosen:
        if environments.is_there(one.engine, one.version):
            continue
        try:
            if clock.left() <= 0:
                raise environments.Failure("there was no time to make its folder")
            for package in environments.ENGINES[one.engine].packages:
                if one.version not in index.project(package).versions:
                    raise environments.Failure(f"the index has no {package} {one.version}")
            environments.make(one.engine, one.version)
        except (environments.Failure, index.Bad, OSError) as error:
            without[one] = " ".join(str(error).split())[-300:]
            say(f"{one.engine} {one.version}: not tried: {error}")
    return without


def timed(call: Callable[[], tuple[str, str]]) -> tuple[str, str, float]:
    begun = time.monotonic()
    outcome, detail = call()
    return outcome, detail, time.monotonic() - begun


def tell(row: Row) -> None:
    say(f"{row.interface} {row.version}: probe {row.probe}, drive {row.drive}, {row.seconds:.0f} s {row.detail[:400]}")


def try_all(chosen: list[Chosen], clock: Clock, drive: bool) -> list[Row]:
    """Folders, then the probes, then the drives, two at once, the newest of every engine first."""
    without = have_folders(chosen, clock)
    rows = [
        Row(interface.name, one.version, one.why, NOT_TRIED, NOT_TRIED, without.get(one, ""))
        for interface in INTERFACES
        for one in chosen
        if one.engine == interface.engine
    ]
    by_name = {interface.name: interface for interface in INTERFACES}
    there = [row for row in rows if not row.detail]
    if there:
        kvfs_site.install_kvfs()

    def probe(row: Row) -> None:
        if clock.left() <= 0:
            row.detail = "there was no time for its probe"
            return
        limit = PROBE_TIMEOUT_S
        row.probe, row.detail, row.seconds = timed(lambda: probed(by_name[row.interface], row.version, limit))
        tell(row)

    def run(row: Row) -> None:
        if clock.left() <= 0:
            row.detail = "there was no time for its drive"
            return
        limit = min(DRIVE_TIMEOUT_S, max(END_TIMEOUT_S, clock.left()))
        row.drive, detail, seconds = timed(lambda: driven(by_name[row.interface], row.version, limit))
        row.detail = "; ".join(filter(None, (detail, row.detail)))
        row.seconds += seconds
        tell(row)

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(probe, there))
        if drive:
            places = {id(row): sum(each.interface == row.interface for each in rows[:i]) for i, row in enumerate(rows)}
            passed = [row for row in there if row.probe == PASSED]
            list(threads.map(run, sorted(passed, key=lambda row: places[id(row)])))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    for name, words in (
        ("--plan", "say which versions would be tried, and why"),
        ("--folders", "only have the environments"),
        ("--probe", "no drives"),
        ("--write", "write kvfs/connectors/tried.py and the table of docs/engines.md"),
    ):
        what.add_argument(name, action="store_true", help=words)
    parser.add_argument("--only", metavar="NAME[==VERSION]", help="of one engine, or of one version")
    limit = f"begin nothing after that (default: {MINUTES:.0f})"
    parser.add_argument("--minutes", type=float, default=MINUTES, help=limit)
    parser.add_argument("--known", action="store_true", help="only a version that is in the list counts as a failure")
    parser.add_argument("--json", action="store_true", help="the rows as JSON, instead of the table")
    arguments = parser.parse_args()
    if arguments.only and arguments.write:
        parser.error("--write is about all engines, and --only about one")
    clock = Clock(arguments.minutes)
    try:
        chosen = only(versions(), arguments.only)
    except index.Bad as error:
        say(str(error))
        return NOTHING_TRIED
    if not chosen:
        parser.error(f"--only {arguments.only}: no such version is to be tried; --plan says which are")
    if arguments.plan:
        for one in chosen:
            print(f"{one.engine} {one.version}: {', '.join(one.why)}")
        return 0
    if arguments.folders:
        return NOTHING_TRIED if len(have_folders(chosen, clock)) == len(chosen) else 0
    begun = time.monotonic()
    rows = try_all(chosen, clock, drive=not arguments.probe)
    load = os.getloadavg()[1]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    else:
        print(tried.table(rows))
        print(f"\n{time.monotonic() - begun:.0f} s, load {load:.1f}")
    if arguments.write:
        try:
            tried.write(REPOSITORY, rows, datetime.date.today())
        except tried.Refused as error:
            say(str(error))
            return 1
    if all(row.probe == NOT_TRIED for row in rows):
        return NOTHING_TRIED
    failed = [row for row in rows if FAILED in (row.probe, row.drive)]
    new = [row for row in failed if arguments.known and row.version not in VERSIONS.get(row.interface, ())]
    for row in new:
        say(f"{row.interface} {row.version} failed, and is not in the list of {DATE}: not counted")
    return int(len(failed) > len(new))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
