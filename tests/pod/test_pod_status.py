"""A pod's numbers, of real nodes on a real redis-server: in `kvfs status`, stats, top, Prometheus, and `kvfs pod`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from helpers import REPOSITORY, wait_until
from podmounts import Pod, block, found
from servers import needs_redis

from kvfs.status import pod as words
from kvfs.status import prometheus
from kvfs.status.change import difference
from kvfs.status.text import render_stats, render_stats_header, render_stats_line, render_status

pytestmark = needs_redis


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    # One slot more than nodes: it is free, and no node of it is missed.
    with Pod(nodes=2, create_args=("--map-size", "2M", "--nodes", "3")) as made:
        for number in range(4):
            (made.nodes[0].mount / f"block-{number}").write_bytes(block(number, 64 << 10))
            found(made.nodes[1].mount / f"block-{number}", block(number, 64 << 10))
        yield made


def status(pod: Pod, node: int = 1) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(pod.kvfs("status", pod.nodes[node].path, "-o", "json").stdout)
    return document


def metrics(document: Mapping[str, Any]) -> dict[str, float]:
    pytest.importorskip("prometheus_client", reason="the package prometheus-client is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    families = list(text_string_to_metric_families(prometheus.render([document]).decode()))
    assert not [family.name for family in families if len(family.documentation) < 10]
    return {
        " ".join([sample.name, *(sample.labels[key] for key in sorted(sample.labels) if key != "pool")]): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("kvfs_pod_")
    }


def test_status_tells_slot_epoch_engines_news_map_and_frozen_slots(pod: Pod) -> None:
    document = status(pod)["pod"]
    assert (document["slot"], document["nodes"], document["frozen"]) == (1, 3, [])
    assert document["epoch"] > 0 and document["lag_ms_p99"] >= document["lag_ms_p50"] > 0
    assert [link["state"] for link in document["engines"]] == ["up"]
    assert document["map"]["entries"] >= 4 and document["map"]["shapes"] >= 1
    text = pod.kvfs("status", pod.nodes[1].path).stdout
    assert re.search(r"pod: slot 1 of 3, epoch \d+; engines 1 of 1 up; frozen slots none", text), text
    assert re.search(r"news: lag p50 \S+, p99 \S+; behind 0, gaps \d+, repeats \d+, own 0 unsent; tombstones 0", text)
    assert re.search(r"map: \d+ names of 63550 \(0\.0%\)", text) and re.search(r"\n  0 +following ", text)


def test_every_number_of_a_pod_is_a_metric_with_words(pod: Pod) -> None:
    document = status(pod)
    parts = [
        ("", document["pod"], words.GAUGES, words.COUNTERS),
        ("feed.", document["pod"]["feed"], words.FEED_GAUGES, words.FEED_COUNTERS),
        ("asks.", document["pod"]["asks"], {}, words.ASKS),
        ("map.", document["pod"]["map"], words.MAP_GAUGES, words.MAP_COUNTERS),
        ("owner.", document["pod"]["owners"][0], words.OWNER_GAUGES, words.OWNER_COUNTERS),
        ("engine.", document["pod"]["engines"][0], {}, words.LINK),
    ]
    # Sums, places in a row, and numbers that are told with other words.
    otherwise = {"gaps", "repeats", "feed.start", "feed.next", "feed.oldest", "map.batches", "map.batches_refused",
                 "owner.slot", "owner.epoch", "owner.next"}  # fmt: skip
    there = {prefix + key for prefix, part, _, _ in parts for key, value in part.items() if isinstance(value, int)}
    known = {prefix + key for prefix, _, gauges, counters in parts for key in (*gauges, *counters)}
    assert there - known == otherwise
    assert known - there == set()


def test_metrics_and_the_dashboard_agree(pod: Pod) -> None:
    have = metrics(status(pod))
    assert have["kvfs_pod_slot"] == 1 and have[f"kvfs_pod_engine_up {pod.redis.url}"] == 1
    assert have["kvfs_pod_owner_batches_total 0"] > 0 and have["kvfs_pod_owner_lag_seconds 0.99 0"] > 0
    assert have["kvfs_pod_frozen_slots"] == 0 and have["kvfs_pod_map_entries"] >= 4
    dashboard = (REPOSITORY / "docs" / "grafana.json").read_text()
    asked = set(re.findall(r"kvfs_pod_\w+", dashboard))
    assert asked <= {name.split()[0] for name in have} and len(asked) > 5


def test_stats_and_top_have_the_news_of_an_interval(pod: Pod) -> None:
    before = status(pod)
    (pod.nodes[0].mount / "more").write_bytes(block(7, 64 << 10))
    found(pod.nodes[1].mount / "more", block(7, 64 << 10))
    change = difference(status(pod), before)
    part: Any = change["pod"]
    assert 0 < part["records"] < 20 and part["owners"][0]["batches"] >= 1
    assert "map%" in render_stats_header(change)
    assert len(render_stats_line(change).split()) == len(render_stats_line({**change, "pod": {}}).split()) + 3
    assert re.search(r"\n0 +following .*\n", render_stats(change) + "\n")
    pytest.importorskip("rich")
    from rich.console import Console

    from kvfs.status import top

    console = Console(width=150)
    with console.capture() as capture:
        console.print(top.view(change, {}, top.Controls(), 60))
    assert "following" in capture.get() and "slot 1 of 3" in capture.get()


def test_pod_status_joins_pages_with_the_daemon_s_numbers(pod: Pod) -> None:
    document = json.loads(pod.kvfs("pod", "status", pod.nodes[1].path, "-o", "json").stdout)
    assert document["slots"][0]["news"]["state"] == "following" and "news" not in document["slots"][1]
    assert document["slots"][0]["state"] == "beating" and document["daemon"]["slot"] == 1
    text = pod.kvfs("pod", "status", pod.nodes[1].path).stdout
    assert re.search(r"\n0 +beating .* following ", text) and re.search(r"\n1 +beating .* this node ", text), text
    assert "map: " in text


def test_the_doctor_asks_the_engine_itself(pod: Pod) -> None:
    document = json.loads(pod.kvfs("pod", "doctor", pod.nodes[0].path, "-o", "json").stdout)
    checks = {check["name"]: check for check in document["checks"]}
    assert checks["engine"]["state"] == "ok" and "redis" in checks["engine"]["found"]
    assert checks["engine eviction"]["found"] == "noeviction" and "of 3 nodes live" in checks["engine streams"]["found"]
    assert checks["nodes"]["found"] == "2 beating, 1 free" and checks["node clocks"]["state"] == "ok"
    pod.redis.command("config", "set", "maxmemory-policy", "allkeys-lru")
    try:
        said = pod.kvfs("pod", "doctor", pod.nodes[0].path).stdout
        assert re.search(r"engine eviction +missing +allkeys-lru\n.*-> maxmemory-policy noeviction", said), said
    finally:
        pod.redis.command("config", "set", "maxmemory-policy", "noeviction")


def test_an_engine_that_is_gone_is_said_and_frozen_slots_are_unknown_then(pod: Pod) -> None:
    pod.redis.stop()
    try:
        wait_until(lambda: status(pod)["pod"]["engines"][0]["state"] == "away", "the engine's end", timeout_s=20)
        document = status(pod)
        assert document["pod"]["frozen"] is None and "kvfs_pod_frozen_slots" not in metrics(document)
        text = render_status(document)
        assert "engines 0 of 1 up; frozen slots unknown while no engine is there" in text
        assert re.search(
            r"advice: engine redis://127\.0\.0\.1:\d+ is away: .*; others' news stop; all else goes on", text
        )
        assert metrics(document)[f"kvfs_pod_engine_up {pod.redis.url}"] == 0
    finally:
        pod.redis.start()
    wait_until(lambda: status(pod)["pod"]["frozen"] == [], "signs of life", timeout_s=30)


def test_a_slot_whose_node_left_is_frozen_also_for_a_node_that_starts_later(pod: Pod) -> None:
    pod.nodes[0].stop()
    try:
        wait_until(lambda: status(pod)["pod"]["frozen"] == [0], "the end of a sign of life", timeout_s=30)
        assert "frozen slots 0" in pod.kvfs("status", pod.nodes[1].path).stdout
        assert metrics(status(pod))["kvfs_pod_frozen_slots"] == 1
        pod.nodes[1].stop()
        pod.nodes[1].start()
        wait_until(lambda: status(pod)["pod"]["frozen"] == [0], "its flash", timeout_s=30)
    finally:
        pod.nodes[0].start()
