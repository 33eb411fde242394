"""Percentiles and renderings, from documents as the daemon sends them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import REPOSITORY

from kvfs.cli.command import parser
from kvfs.frontend import read_ahead
from kvfs.status import numbers, prometheus
from kvfs.status.change import difference
from kvfs.status.legend import LEGENDS
from kvfs.status.overview import render_overview
from kvfs.status.text import render_stats, render_stats_header, render_stats_line, render_status
from kvfs.status.top import _head
from kvfs.units import counted, percentile_ns, size_text, told_size

BUCKETS = [0] * 40


def latency(**counts: int) -> dict[str, object]:
    buckets = list(BUCKETS)
    for key, count in counts.items():
        buckets[int(key[1:])] = count
    return {"count": sum(buckets), "total_ns": 1000 * sum(buckets), "buckets": buckets}


def document(**changes: object) -> dict[str, object]:
    base: dict[str, object] = {
        "time_s": 1000.0,
        "pool": {"path": "/srv/pool", "uuid": "u-1", "state": "mounted", "pid": 4, "epoch": 9, "uptime_s": 100.0},
        "mounts": [{"mountpoint": "/mnt/kv"}],
        "space": {"size": 1 << 30, "used": 1 << 29, "pinned": 1 << 20},
        "segments": {
            "count": 256,
            "size": 4 << 20,
            "stripe_width": 4,
            "stripe_unit": 131072,
            "free": 10,
            "open": 2,
            "closed": 244,
            "evicting": 0,
        },
        "blocks": 250,
        "devices": [
            {
                "index": i,
                "path": f"devices/{i}",
                "size": 1 << 28,
                "state": "online",
                "reads": 10,
                "read_bytes": 1 << 20,
                "writes": 5,
                "write_bytes": 1 << 19,
                "errors": 0,
                "timeouts": 0,
                "read_ns": 1_000_000,
                "write_ns": 500_000,
            }
            for i in range(2)
        ],
        "counters": {
            "lookups": 1000,
            "blocks_found": 750,
            "blocks_missed": 250,
            "opens": 500,
            "reads": 400,
            "read_bytes": 4 << 20,
            "write_bytes": 1 << 20,
            "staged_bytes": 5,
            "forwarded": 20,
            "evicted_blocks": 3,
            "checksum_errors": 0,
        },
        "latency": {"lookup": latency(b14=1000), "read": latency(b17=90, b20=10)},
    }
    return {**base, **changes}


HOLDER = {
    "path": "/run/hold.sock",
    "pid": 77,
    "alive": True,
    "takeovers": 3,
    "journal": {"size": 64 << 20, "used": 3 << 10, "lost": 0, "unanswered": 2},
}


def test_percentiles_lie_inside_their_bucket() -> None:
    buckets = list(BUCKETS)
    buckets[10] = 50  # 512 to 1024 ns
    buckets[20] = 50
    assert percentile_ns(buckets, 50) == 1024
    assert 512 < percentile_ns(buckets, 25) < 1024
    assert percentile_ns(buckets, 99) > 1 << 19
    assert percentile_ns(buckets, 100) == 1 << 20
    assert percentile_ns(BUCKETS, 50) == 0


def test_percentiles_grow_with_the_percentage() -> None:
    buckets = [index % 7 for index in range(40)]
    values = [percentile_ns(buckets, percent / 10) for percent in range(1, 1001)]
    assert values == sorted(values)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0"), (1023, "1023"), (1536, "1.50K"), (150 << 10, "150K"), (4 << 30, "4.00G"), (5 << 50, "5.00P"),
     (1000 << 10, "1000K"), (1023 << 20, "1023M"), ((1 << 30) - 1, "1.00G"), (2000 << 50, "2000.00P")],
)  # fmt: skip
def test_sizes_read_as_zpool_prints_them(size: int, text: str) -> None:
    assert size_text(size) == text


def test_no_size_count_or_time_reads_as_a_power_of_ten() -> None:
    for exponent in range(70):
        for size in (1 << exponent, (1 << exponent) - 1, 1000 << exponent, 1023 << exponent):
            texts = (size_text(size), numbers.count_text(size), numbers.time_text(size), numbers.age_text(size))
            assert not any("e+" in text for text in texts), texts
            assert float(size_text(size).rstrip("KMGTP")) < 1024 or size_text(size).endswith("P"), size


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [(0, "block", "0 blocks"), (1, "segment", "1 segment"), (2, "directory", "2 directories"), (1, "entry", "1 entry"),
     (3, "batch of this node", "3 batches of this node"), (1, "thing damaged", "1 thing damaged")],
)  # fmt: skip
def test_a_count_has_its_noun_in_the_right_number(count: int, noun: str, text: str) -> None:
    assert counted(count, noun) == text


def test_counts_in_what_people_read_go_through_one_function() -> None:
    """A number before a plural reads "1 segments" some day."""
    plain = re.compile(
        r"\{[^{}]+\} (blocks|segments|devices|files|directories|requests|things|findings|nodes|slots|lots|errors|names|"
        r"timeouts|clients|batches|entries|changes|slabs|units|sockets)\b"
    )
    rooms = ("cli", "status", "replay", "pool", "pod")
    said = [
        f"{path.name}: {line.strip()}"
        for room in rooms
        for path in sorted((REPOSITORY / "kvfs" / room).glob("*.py"))
        for line in path.read_text().splitlines()
        # Rates, limits and parts of a whole are no counts of things.
        if plain.search(line) and not re.search(r"blocks/s|nodes live|each of \{nodes\}|_MAX\} nodes", line)
    ]
    assert said == []


@pytest.mark.parametrize(
    ("size", "text"),
    [(36 << 20, "36M"), (4097, "4.00K (4097 bytes)"), (17, "17"), ((36 << 20) + 1, "36.00M (37748737 bytes)")],
)
def test_a_size_in_a_message_is_exact_and_readable(size: int, text: str) -> None:
    assert told_size(size) == text


def test_every_word_of_a_watching_verb_that_is_explained_is_one_that_it_prints() -> None:
    top = parser()
    helps = {verb: top._subparsers._group_actions[0].choices[verb].format_help() for verb in LEGENDS}  # type: ignore
    for verb, words in LEGENDS.items():
        for word, text in words:
            assert word in helps[verb] and " ".join(text.split()[:3]) in helps[verb]
    ahead = {"size": 2 << 20, "asked": 2 << 20, "why": None}
    users = [{"name": "eve", "evicted_open": 3}]
    shown = render_status(document(users=users, share=1 << 20, holder=HOLDER, read_ahead=ahead))
    columns = [word for words, _ in LEGENDS["status"] for word in words.split(", ")]
    assert [word for word in columns if word not in shown and word != "segments"] == []


@pytest.mark.parametrize(
    ("size", "asked", "why", "text"),
    [
        (2 << 20, 2 << 20, None, "the kernel reads 2.00M ahead"),
        (128 << 10, None, None, "the kernel reads 128K ahead"),
        (4 << 20, 2 << 20, "/sys/x: Permission denied", "the kernel reads 4.00M ahead"),
        (128 << 10, 2 << 20, "/sys/x: Permission denied", "the kernel reads 128K ahead, not 2.00M: "
         "/sys/x: Permission denied"),
        (None, 2 << 20, "/sys/x: No such file or directory", "unknown: /sys/x: No such file or directory"),
    ],
)  # fmt: skip
def test_read_ahead_is_told_with_the_reason_where_it_is_less_than_asked_for(
    size: int | None, asked: int | None, why: str | None, text: str
) -> None:
    shown = render_status(document(read_ahead={"size": size, "asked": asked, "why": why}))
    assert f" ahead: {text}\n" in shown


def test_read_ahead_that_cannot_be_set_or_read_has_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "DIRECTORY", tmp_path)
    path = tmp_path / "0:9" / "read_ahead_kb"
    missing = f"{path}: No such file or directory"
    assert read_ahead.set_read_ahead("0:9", 1 << 20).status() == {"size": None, "asked": 1 << 20, "why": missing}
    path.parent.mkdir()
    path.write_text("128\n")
    assert read_ahead.set_read_ahead("0:9", 0).status() == {"size": 128 << 10, "asked": None, "why": None}
    assert path.read_text() == "128\n"
    found = read_ahead.set_read_ahead("0:9", 1 << 20)
    assert path.read_text() == "1024\n" and found.status() == {"size": 1 << 20, "asked": 1 << 20, "why": None}
    path.write_text("64\n")
    assert found.status() == {"size": 64 << 10, "asked": 1 << 20, "why": f"another has set {path}"}


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (2.5, "2.5"), (12345, "12.3k"), (3_600_000, "3.6M"), (7e12, "7.0T")]
)
def test_counts_are_short(count: float, text: str) -> None:
    assert numbers.count_text(count) == text


def test_the_holder_and_its_journal_are_shown() -> None:
    line = "by /run/hold.sock (pid 77), taken over 3 times; journal 3.00K of 64.00M, unanswered 2"
    shown = document(holder=HOLDER, memory={"staging_size": 1 << 30, "limit": 4 << 30}, rings="threads")
    text = render_status(shown)
    assert f"  held: {line}\n" in text and " rings: threads\n" in text and "cgroup's limit 4.00G" in text
    assert "advice: nothing to do" in text
    head = _head(difference(shown, None), 1.0)
    assert f"held {line}" in head
    assert any("cgroup's limit 4.00G; I/O by threads" in row for row in head)
    assert "held" not in render_status(document())
    assert not any(row.startswith("held") for row in _head(difference(document(), None), 1.0))
    older = render_status(document(holder={**HOLDER, "journal": None}))
    assert "taken over 3 times\n" in older
    other = render_status(document(holder={**HOLDER, "pid": 0}))  # so says the kernel of a process in another container
    assert "held: by /run/hold.sock (a process in another pid namespace), taken over" in other


def test_a_holder_that_ended_and_a_journal_that_lost_changes_are_told_of() -> None:
    broken = document(holder={**HOLDER, "alive": False, "journal": {"size": 65536, "used": 65536, "lost": 1}})
    text = render_status(broken)
    assert "(pid 77, which has ended)" in text and "unanswered 0, lost 1" in text
    assert "advice: the holder, /run/hold.sock, has ended: the mount ends with this daemon" in text
    assert "the journal of names had no room for 1 change: a kill" in text


def test_the_holder_has_metrics() -> None:
    pytest.importorskip("prometheus_client", reason="the package prometheus-client is not installed")
    shown = prometheus.render([document(holder=HOLDER, memory={"limit": 4 << 30})]).decode()
    for line in (
        'kvfs_holder_up{pool="/srv/pool"} 1.0',
        'kvfs_holder_takeovers_total{pool="/srv/pool"} 3.0',
        'kvfs_journal_size_bytes{pool="/srv/pool"} 6.7108864e+07',
        'kvfs_journal_used_bytes{pool="/srv/pool"} 3072.0',
        'kvfs_journal_unanswered{pool="/srv/pool"} 2.0',
        'kvfs_journal_lost_total{pool="/srv/pool"} 0.0',
        'kvfs_memory_limit_bytes{pool="/srv/pool"} 4.294967296e+09',
    ):
        assert f"{line}\n" in shown
    assert "kvfs_holder" not in prometheus.render([document()]).decode()


def test_status_names_pool_devices_use_and_hits() -> None:
    text = render_status(document())
    for part in (
        "/srv/pool",
        "/mnt/kv",
        "512M of 1.00G (50.0%)",
        "256 segments of 4.00M",
        "10 free",
        "devices/1",
        "asked for 1000, found 75.0%",
        "errors: none known",
    ):
        assert part in text
    assert "advice: nothing to do" in text


def test_status_gives_advice_on_a_failing_device() -> None:
    failing = document()
    failing["devices"] = [{"path": "/dev/nvme1n1", "size": 1, "errors": 3, "timeouts": 1}]
    text = render_status(failing)
    assert "device /dev/nvme1n1: 3 errors, 1 timeout;" in text
    assert "errors: 3, see advice" in text


def test_status_of_an_unmounted_pool_has_no_counters() -> None:
    text = render_status({"pool": {"path": "/p", "uuid": "u", "state": "not mounted"}, "devices": []})
    assert "not mounted" in text and "asked" not in text


def test_a_difference_counts_only_what_happened_since() -> None:
    later = document(time_s=1002.0)
    later["counters"] = {**numbers.section(document(), "counters"), "lookups": 3000, "blocks_found": 2750}
    later["latency"] = {"lookup": latency(b14=1000), "read": latency(b17=90, b20=10, b25=100)}
    change = difference(later, document())
    assert change["seconds"] == 2.0
    assert numbers.number(change, "counters", "lookups") == 2000
    assert numbers.number(change, "latency", "read", "count") == 100
    assert numbers.items(change, "devices")[0]["reads"] == 0
    line = render_stats_line(change).split()
    assert line[0] == "1.0k" and line[1] == "100.0"
    assert len(line) == len(
        render_stats_header({}).replace("read B/s", "a").replace("write B/s", "b").replace("rd ", "").split()
    )


def test_stats_since_the_mount_show_latencies_and_devices() -> None:
    text = render_stats(difference(document(), None))
    assert "lookup" in text and "p99.9" in text and "devices/0" in text


def test_a_quiet_second_divides_by_nothing() -> None:
    change = difference(document(), document())
    assert "-" in render_stats_line(change)


def test_prometheus_text_has_help_and_type_for_every_metric() -> None:
    lines = rendered(document(pool={"path": 'a"b\\c'}))
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    helped = {line.split()[2] for line in lines if line.startswith("# HELP") and len(line.split()) > 4}
    assert typed == helped and len(typed) > 20
    for line in lines:
        if line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        float(value)
        family = name.partition("{")[0]
        assert any(
            family == known or family.removesuffix(suffix) == known
            for known in typed
            for suffix in ("_bucket", "_sum", "_count")
        ), line
        assert 'pool="a\\"b\\\\c"' in name
    assert len(lines) == len(set(lines))
    counts = [
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("kvfs_latency_seconds_bucket") and 'operation="read"' in line
    ]
    assert counts == sorted(counts) and counts[-1] == 100
    assert "# TYPE kvfs_staged_bytes gauge" in lines
    assert "# TYPE kvfs_lookups_total counter" in lines


def test_pools_share_their_families() -> None:
    lines = rendered(document(), document(pool={"path": "/srv/other"}))
    assert lines.count("# TYPE kvfs_blocks gauge") == 1
    assert {line for line in lines if line.startswith("kvfs_blocks{")} == {
        'kvfs_blocks{pool="/srv/pool"} 250.0', 'kvfs_blocks{pool="/srv/other"} 250.0',
    }  # fmt: skip


def rendered(*documents: dict[str, object]) -> list[str]:
    pytest.importorskip("prometheus_client")
    return prometheus.render(documents).decode().splitlines()


EXPORT = {
    "socket": "/run/kvfs/vm1.sock", "tag": "kv", "queues": 2, "connected": 1, "queues_running": 3, "connections": 1,
    "requests": 1000, "bytes_read": 4 << 20, "bytes_written": 1 << 20, "zero_copy_bytes": 3 << 20,
    "copied_bytes": 1 << 20, "protocol_errors": 0, "descriptor_errors": 0, "io_errors": 0,
}  # fmt: skip


def test_exports_are_in_every_text() -> None:
    exported = document(mounts=[], exports=[EXPORT])
    text = render_status(exported)
    assert "export: /run/kvfs/vm1.sock (tag kv): connected" in text and "75.0%" in text and "pid 4" in text
    assert "advice: nothing to do" in text
    row = next(line for line in render_stats(difference(exported, None)).splitlines() if "vm1" in line)
    assert row.split() == ["/run/kvfs/vm1.sock", "connected", "10", "40.96K", "75.0%", "10.24K", "0"]
    lines = rendered(exported)
    labels = 'pool="/srv/pool",socket="/run/kvfs/vm1.sock",tag="kv"'
    assert f"kvfs_virtiofs_requests_total{{{labels}}} 1000.0" in lines
    assert f"kvfs_virtiofs_connected{{{labels}}} 1.0" in lines
    assert "# TYPE kvfs_virtiofs_zero_copy_bytes_total counter" in lines


def test_an_export_s_counters_are_differences_too() -> None:
    later = document(time_s=1002.0, exports=[{**EXPORT, "requests": 1500, "connected": 0}])
    change = difference(later, document(exports=[EXPORT]))
    (export,) = numbers.items(change, "exports")
    assert export["requests"] == 500 and export["bytes_read"] == 0
    assert export["connected"] == 0 and export["queues"] == 2
    assert numbers.items(difference(later, document()), "exports")[0]["requests"] == 1500


def test_a_guest_that_breaks_the_protocol_is_advice() -> None:
    text = render_status(document(exports=[{**EXPORT, "descriptor_errors": 2, "protocol_errors": 1}]))
    assert "export /run/kvfs/vm1.sock: 3 breaches of the protocol" in text


def test_an_overview_is_a_line_for_each_pool() -> None:
    whole = {
        "pool": {"path": "/srv/a", "state": "mounted"}, "mounts": [{"mountpoint": "/mnt/a"}], "exports": [],
        "space": {"size": 1 << 30, "used": 1 << 29}, "blocks": 7, "counters": {"blocks_found": 3, "blocks_missed": 1},
        "advice": ["look at it"],
    }  # fmt: skip
    bare = {"pool": {"path": "/srv/b\n", "state": "not mounted"}, "mounts": [], "devices": []}
    heads, first, second = render_overview([whole, bare]).splitlines()
    assert heads.split() == ["pool", "mounted", "at", "state", "size", "used", "blocks", "found", "advice"]
    assert first.split() == [
        "/srv/a",
        "/mnt/a",
        "mounted",
        size_text(1 << 30),
        "50%",
        "7",
        "75.0%",
        "1:",
        "kvfs",
        "status",
        "/srv/a",
    ]
    assert second.startswith("/srv/b\\n") and second.split()[-1] == "none"
    assert render_overview([]) == ""
