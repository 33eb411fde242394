"""The [pod] table: what it may say, what must agree, and whose a segment is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pods import ENGINE, device_files

from kvfs.errors import PoolError, UsageError
from kvfs.pool.config import PoolConfig, compare, new_config, parse
from kvfs.pool.geometry import LABEL_SIZE, POD_SEGMENTS_MAX, Geometry, _choose_zone, layout
from kvfs.pool.making import FormatRequest, format_devices
from kvfs.pool.opening import latest_config
from kvfs.pool.pod import POD_SEGMENT_PAGES_MAX, PodConfig, choose_lot, zones_offset
from kvfs.types import PAGE_SIZE

POD = PodConfig(engine=(ENGINE, "rediss+sentinel://user@one:26379,two:26379/kv"), nodes=3, lot=4)
FULL = replace(POD, map_size=1 << 30, lookup_wait_ms=5, password_file='/etc/kvfs/"pass"', retired=(0, 2))


def config(pod: PodConfig | None = POD) -> PoolConfig:
    made = new_config(Geometry(2, 16384, 1 << 20), [("/dev/a", 1 << 28), ("/dev/b", 1 << 28)])
    return replace(made, pod=pod)


@pytest.mark.parametrize("pod", [None, POD, FULL])
def test_the_table_is_read_back_as_it_was_written(pod: PodConfig | None) -> None:
    made = config(pod)
    assert parse(made.dump(), "pool.toml") == made


def test_a_pool_without_the_table_has_one_owner_and_no_word_of_pods() -> None:
    alone = config(None)
    assert "pod" not in alone.dump().partition("# A kvfs pool.")[2].replace("pool", "")
    assert list(alone.segments_of(0)) == list(range(alone.segment_count)) and alone.owner(17) == 0


@pytest.mark.parametrize(
    ("line", "wrong", "words"),
    [
        ("nodes = 3", "nodes = 0", r"pod\.nodes is 0; 1 to 4096"),
        ("nodes = 3", "nodes = 4097", r"pod\.nodes is 4097"),
        ("nodes = 3", 'nodes = "3"', r"pod\.nodes is '3'; a whole number"),
        ("nodes = 3", "nodes = 241", r"zones_offset is 1048576; the pages of 241 nodes end at 2097152"),
        ("lot = 4", "lot = 3", r"pod\.lot is 3; a power of two"),
        ("lot = 4", "lot = 128", r"pod\.lot is 128; 1 to 64"),
        ("lot = 4", "", r"pod\.lot is missing"),
        ("lot = 4", "lot = 4\nlots = 1", r"pod\.lots is not a key"),
        ("lot = 4", "lot = 4\nmap_size = 1", r"pod\.map_size is 1; 1048576 to"),
        ("lot = 4", "lot = 4\nlookup_wait_ms = 99999", r"pod\.lookup_wait_ms is 99999; 0 to 10000"),
        ("lot = 4", "lot = 4\nretired = [3]", r"pod\.retired is \[3\]; slots from 0 to 2"),
        ("lot = 4", "lot = 4\nretired = [1, 0]", r"pod\.retired is \[1, 0\]"),
        ("lot = 4", "lot = 4\nretired = [true]", r"pod\.retired: an array"),
    ],
)
def test_a_wrong_key_is_named_with_what_is_possible(line: str, wrong: str, words: str) -> None:
    text = config().dump().replace(line, wrong)
    with pytest.raises(PoolError, match=words):
        parse(text, "pool.toml")


@pytest.mark.parametrize(
    ("engines", "words"),
    [
        ((), "1 to 8 URLs"),
        ((ENGINE, ENGINE), "named 2 times"),
        (("engine:6379",), "not one of redis://"),
        (("redis:/engine",), "not one of redis://"),
        (("redis://",), "is no HOST"),
        (("redis://engine:0",), "no port 0"),
        (("redis://engine:99999",), "no port 99999"),
        (("redis://eng ine",), "is no HOST"),
        (("redis://engine?depth=3",), "no option depth"),
    ],
)
def test_an_engine_is_a_url(engines: tuple[str, ...], words: str) -> None:
    with pytest.raises(PoolError, match=rf"pod\.engine.*{words}"):
        parse(config(replace(POD, engine=engines)).dump(), "pool.toml")


@pytest.mark.parametrize(
    "url", ["redis://:hunter2@engine", "redis://user:hunter2@engine:1/0", "rediss://engine?password=hunter2"]
)
def test_a_url_with_a_password_is_refused_and_the_password_is_not_repeated(url: str) -> None:
    with pytest.raises(PoolError, match=r"a password has no place in a URL.*into a file") as refused:
        parse(config(replace(POD, engine=(url,))).dump(), "pool.toml")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("change", [{"engine": ("redis://other",)}, {"nodes": 4}, {"lot": 8}, {"map_size": 1 << 20},
                                    {"lookup_wait_ms": 1}])  # fmt: skip
def test_labels_must_agree_about_the_pod(change: dict[str, object]) -> None:
    found = config()
    other = replace(found, pod=replace(POD, **change))  # type: ignore[arg-type]
    with pytest.raises(PoolError, match=rf"label: pod\.{next(iter(change))} is .*pool\.toml says"):
        compare(other, "label", found, "pool.toml")


def test_a_pool_is_a_pod_by_all_labels_or_by_none() -> None:
    found = config()
    for own in (None, 0):
        with pytest.raises(PoolError, match=r"label: pod is not there, but pool\.toml says there"):
            compare(replace(found, pod=None), "label", found, "pool.toml", own)


def test_paths_and_who_is_retired_may_differ() -> None:
    found = config()
    compare(replace(found, pod=replace(POD, password_file="/x", retired=(1,))), "label", found, "pool.toml")


def test_of_several_labels_the_latest_holds_with_this_nodes_paths_and_all_that_are_retired() -> None:
    mine = replace(config(), pod=replace(POD, password_file="/mine"))
    devices = tuple(replace(device, path=f"/theirs/{device.index}") for device in mine.devices)
    labels = [replace(mine, devices=devices, pod=replace(POD, retired=(slot,)), revision=slot) for slot in (1, 2)]
    latest = latest_config(mine, labels)
    assert latest.devices == mine.devices and latest.revision == 2
    assert latest.pod == replace(POD, password_file="/mine", retired=(1, 2))


# ---- lots ----


@given(st.integers(1, 80), st.sampled_from([1, 2, 4, 64]), st.integers(0, 3000))
def test_each_segment_has_one_owner_and_lots_go_round(nodes: int, lot: int, count: int) -> None:
    pod = replace(POD, nodes=nodes, lot=lot)
    found = {segment: slot for slot in range(nodes) for segment in pod.segments_of(slot, count)}
    assert found == {segment: pod.owner(segment) for segment in range(count)}
    assert sum(len(pod.segments_of(slot, count)) for slot in range(nodes)) == count
    assert all(pod.owner(segment) == segment // lot % nodes for segment in range(count))
    assert sum(pod.lots_of(slot, count) for slot in range(nodes)) == -(-count // lot)


@pytest.mark.parametrize(
    ("segments", "nodes", "lot"), [(10, 3, 1), (32768, 2, 64), (32768, 72, 4), (256, 2, 2), (4 << 20, 72, 64)]
)
def test_the_default_lot_is_a_power_of_two_with_some_64_for_each_node(segments: int, nodes: int, lot: int) -> None:
    assert choose_lot(segments, nodes) == lot


@pytest.mark.parametrize(("nodes", "mib"), [(1, 1), (240, 1), (241, 2), (496, 2), (4096, 17)])
def test_zones_begin_behind_a_page_for_each_slot(nodes: int, mib: int) -> None:
    assert zones_offset(nodes) == mib << 20
    assert LABEL_SIZE + nodes * PAGE_SIZE <= zones_offset(nodes)


@pytest.mark.parametrize(("devices", "nodes", "tib"), [(4, 16, 1), (72, 72, 8), (72, 72, 256)])
def test_each_node_has_hundreds_of_segments_and_a_pod_not_too_many(devices: int, nodes: int, tib: int) -> None:
    segment = _choose_zone(devices * tib << 40, devices * (LABEL_SIZE + zones_offset(nodes)), 4, nodes) * 4
    assert 200 * nodes <= devices * tib << 40 >> segment.bit_length() - 1 <= POD_SEGMENTS_MAX
    assert segment <= POD_SEGMENT_PAGES_MAX * PAGE_SIZE


@given(st.lists(st.integers(0, 12), min_size=1, max_size=7), st.integers(1, 7))
def test_the_layout_is_that_of_the_rule(zones: list[int], width: int) -> None:
    """As docs/format.md says it: each segment in turn takes the devices with the most unused zones."""
    width = min(width, len(zones))
    left, used, last = list(zones), [0] * len(zones), list(range(-len(zones), 0))
    expected, turn = [], 0
    while True:
        chosen = sorted(range(len(zones)), key=lambda device: (-left[device], last[device]))[:width]
        if left[chosen[-1]] == 0:
            break
        members = []
        for device in chosen:
            members.append((device, used[device]))
            used[device], left[device], last[device], turn = used[device] + 1, left[device] - 1, turn, turn + 1
        expected.append(tuple(members))
    assert layout(zones, width) == expected


def test_a_pool_with_too_few_segments_for_its_nodes_is_refused_with_the_numbers(tmp_path: Path) -> None:
    devices = tuple(device_files(tmp_path))
    for pod, words in (
        (replace(POD, nodes=30, lot=0), r"61 segments in lots of 1 give slot 29 of 30 2 segments; .* at least 8"),
        (replace(POD, nodes=3, lot=64), r"61 segments in lots of 64 give slot 2 of 3 0 segments"),
    ):
        with pytest.raises(UsageError, match=words):
            format_devices(FormatRequest(pool=tmp_path / "pool", devices=devices, segment_size=1 << 20, pod=pod))
    assert devices[0].read_bytes()[:4096] == bytes(4096) and not (tmp_path / "pool").exists()
