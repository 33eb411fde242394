"""The Prometheus endpoint of a mount and of a machine: what it has, and that nobody who asks holds up the mount."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from helpers import REPOSITORY, Pool, read_file, wait_until, write_file

from kvfs.status import prometheus

pytest.importorskip("prometheus_client", reason="the package prometheus-client is not installed")
from prometheus_client.parser import text_string_to_metric_families


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def pool(port: int) -> Iterator[Pool]:
    with Pool(files=2, size="128M", mount_args=("--allow-other", "--metrics", f"127.0.0.1:{port}")) as made:
        yield made


def scrape(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        assert answer.headers["Content-Type"] == prometheus.CONTENT_TYPE
        return answer.read().decode()


def values(text: str, name: str) -> dict[str, float]:
    """A metric's samples by pool."""
    return {
        sample.labels["pool"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_a_mount_s_metrics_move_with_what_is_asked_for(pool: Pool, port: int) -> None:
    before = values(scrape(port), "kvfs_blocks_found_total")[str(pool.path)]
    write_file(pool.mount / "block", b"x" * 10_000)
    for _ in range(5):
        read_file(pool.mount / "block")
    text = scrape(port)
    assert values(text, "kvfs_blocks_found_total")[str(pool.path)] == before + 5
    assert values(text, "kvfs_up") == {str(pool.path): 1}


def test_every_metric_of_a_live_pool_has_words_of_its_own(pool: Pool, port: int) -> None:
    families = list(text_string_to_metric_families(scrape(port)))
    for family in families:
        assert family.type in ("gauge", "counter", "histogram") and len(family.documentation) > 10, family.name
    assert not [family.name for family in families if family.documentation == "See kvfs status."]
    assert set(pool.status()["counters"]) == set(prometheus.COUNTERS) | set(prometheus.GAUGES)


def test_the_dashboard_asks_for_metrics_that_there_are(pool: Pool, port: int) -> None:
    dashboard = json.loads((REPOSITORY / "docs" / "grafana.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())  # a row has none
        for name in re.findall(r"kvfs_\w+", target["expr"])
        if not name.startswith("kvfs_pod_")  # tests/pod/test_pod_status.py has a pod
    }
    have = {sample.name for family in text_string_to_metric_families(scrape(port)) for sample in family.samples}
    assert asked <= have and len(asked) > 10, asked - have


def test_what_is_not_there_is_refused(pool: Pool, port: int) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/etc/passwd", timeout=60)
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(request, timeout=60)


def test_slow_scrapes_hold_up_neither_the_mount_nor_the_next_scrape_for_long(pool: Pool, port: int) -> None:
    """Each begins a request and never ends it: they are hung up on, those beyond the places at once."""
    held = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(60)]
    try:
        for sock in held:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        write_file(pool.mount / "meanwhile", b"x" * 4096)
        assert read_file(pool.mount / "meanwhile") == b"x" * 4096
        assert pool.status()["pool"]["state"] == "mounted"
        for sock in held:
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(100) == b""
    finally:
        for sock in held:
            sock.close()
    wait_until(lambda: "kvfs_up" in scrape(port), "a scrape")


def test_a_head_that_does_not_end_is_cut_off(pool: Pool, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        with contextlib.suppress(OSError):
            while True:
                sock.sendall(b"x" * 4096)
    assert "kvfs_up" in scrape(port)


def test_one_endpoint_serves_every_pool_of_the_machine(pool: Pool) -> None:
    with Pool(files=1, size="64M") as other:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvfs", "metrics", "0", "-o", "json"], stdout=subprocess.PIPE, text=True,
            cwd=REPOSITORY,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            port = int(json.loads(process.stdout.readline())["address"].rpartition(":")[2])
            up = values(scrape(port), "kvfs_up")
            assert up[str(pool.path)] == up[str(other.path)] == 1
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            process.stdout.close()


def test_an_address_that_is_taken_leaves_nothing_mounted(own_pool, tmp_path: pathlib.Path) -> None:
    pool = own_pool(files=1, size="64M")
    pool.umount()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = pool.command("mount", str(pool.path), str(pool.mount), "--metrics", f"{port}", check=False)
        assert result.returncode == 1
        assert f"metrics: 127.0.0.1:{port}: Address already in use" in result.stderr
        assert not os.path.ismount(pool.mount)
    pool.start()


def test_stats_has_the_same_text(pool: Pool) -> None:
    text = pool.command("stats", str(pool.mount), "--prometheus").stdout
    assert values(text, "kvfs_up") == {str(pool.path): 1}


# ---- probes and the log ----


def probe(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_probes_tell_what_lacks_and_the_log_is_json() -> None:
    port = free_port()
    words = ("--metrics", str(port), "--log-format", "json")
    with Pool(files=2, size="128M", mount_args=words) as pool:
        assert probe(port, "/healthz") == (200, "ok\n") and probe(port, "/readyz") == (200, "ok\n")
        device = pool.path / "devices" / "1"
        lines = [json.loads(line) for line in (pool.path / "kvfs.log").read_text().splitlines()]
        assert {"time", "level", "logger", "message"} == set(lines[0])
        assert any(line["message"].startswith(f"pool {pool.path} mounted at") for line in lines)
        pool.umount()
        device.rename(pool.base / "away")
        pool.command("mount", str(pool.path), str(pool.mount), *words)
        assert probe(port, "/healthz") == (200, "ok\n")
        status, text = probe(port, "/readyz")
        assert status == 503 and text.startswith("no segment can be written") and text.count("\n") == 1
        (pool.base / "away").rename(device)


def test_a_daemon_whose_mount_is_gone_is_healthy_and_not_ready() -> None:
    port = free_port()
    with Pool(files=2, size="128M", started=False) as pool:
        pool.mount_args = ("--metrics", str(port), "--virtiofs", str(pool.base / "guest.sock"))
        pool.start()
        assert probe(port, "/readyz") == (200, "ok\n")
        pool.command("umount", str(pool.mount))
        assert probe(port, "/healthz") == (200, "ok\n")
        assert probe(port, "/readyz") == (503, f"{pool.mount}: not mounted\n")
        pool.command("umount", str(pool.path))
