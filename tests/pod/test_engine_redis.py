"""The engine on a real redis-server: its verbs, the ways to find it and to log in, and all that may happen to it."""

from __future__ import annotations

import logging
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import slowness
from members import QUICK, Node
from servers import Sentinel, Server, needs_redis, wait_until

from kvfs.errors import EngineAwayError, EngineError, FreshError
from kvfs.pod import redis_engine
from kvfs.pod.doctor import examine
from kvfs.pod.engine import BEGINNING, Engine, Names
from kvfs.pod.limits import Limits
from kvfs.pod.redis_engine import RedisEngine
from kvfs.pod.url import parse_url

pytestmark = needs_redis
STREAM = "kvfs:{u}:0"
PASSWORD = "correct-horse-battery"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    # A socket's path may have 107 bytes.
    return tmp_path


@pytest.fixture
def server(directory: Path) -> Iterator[Server]:
    one = Server(directory / "a").start()
    yield one
    one.kill()


@pytest.fixture
def second(directory: Path) -> Iterator[Server]:
    one = Server(directory / "b").start()
    yield one
    one.kill()


@pytest.fixture
def nodes() -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(*arguments: object, **options: object) -> Node:
        made.append(Node(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for node in made:
        node.stop()


def two(nodes: Callable[..., Node], *servers: Server, **options: object) -> tuple[Node, Node]:
    """Two nodes that follow each other."""
    make = [server.engine for server in servers]
    a, b = nodes(0, 2, make, **options), nodes(1, 2, make, **options)
    wait_until(lambda: a.follows(1) and b.follows(0))
    return a, b


# ---- verbs ----


def test_entries_are_read_in_order_behind_a_position(server: Server) -> None:
    engine = server.engine()
    assert engine.tails([STREAM]) == [BEGINNING]
    first = engine.append(STREAM, {b"b": b"\0" * 70_000, b"t": b"1"})
    second = engine.append(STREAM, {b"c": b"two"})
    assert BEGINNING < first < second and engine.tails([STREAM]) == [second]
    entries = engine.read({STREAM: BEGINNING, "kvfs:{u}:1": BEGINNING}, wait_s=0, count=10)
    assert [(entry.stream, entry.position) for entry in entries] == [(STREAM, first), (STREAM, second)]
    assert entries[0].fields == {b"b": b"\0" * 70_000, b"t": b"1"}
    assert engine.read({STREAM: second}, wait_s=0, count=10) == []
    engine.close()


def test_a_read_waits_for_an_entry_and_no_longer_than_it_may(server: Server) -> None:
    engine, other = server.engine(), server.engine()
    begin = time.monotonic()
    assert engine.read({STREAM: BEGINNING}, wait_s=0.15, count=1) == []
    assert 0.1 < time.monotonic() - begin < 2.0 * slowness()
    position = other.append(STREAM, {b"c": b"x"})
    assert [entry.position for entry in engine.read({STREAM: BEGINNING}, wait_s=5, count=1)] == [position]
    engine.close()
    other.close()


def test_an_interrupted_read_returns_soon_and_the_engine_goes_on(server: Server) -> None:
    engine = server.engine()
    engine.interrupt()
    begin = time.monotonic()
    assert engine.read({STREAM: BEGINNING}, wait_s=30, count=1) == []
    assert time.monotonic() - begin < 10.0 * slowness()
    engine.append(STREAM, {b"c": b"x"})
    assert len(engine.read({STREAM: BEGINNING}, wait_s=30, count=1)) == 1
    engine.close()


def test_streams_are_trimmed_by_position(server: Server) -> None:
    engine = server.engine()
    positions = [engine.append(STREAM, {b"b": bytes(5000)}) for _ in range(8)]
    engine.trim(STREAM, oldest=positions[5], expire_s=100)
    left = engine.read({STREAM: BEGINNING}, wait_s=0, count=10)
    assert [entry.position for entry in left] == positions[5:]
    engine.append(STREAM, {b"b": bytes(5000)}, oldest=positions[7])
    assert engine.read({STREAM: BEGINNING}, wait_s=0, count=1)[0].position >= positions[6]
    assert 0 < int(server.command("PTTL", STREAM)) <= 100_000
    size = engine.sizes([STREAM, "kvfs:{u}:none"])
    assert size[0].entries in (2, 3) and size[0].size > 5000 and size[1].entries == 0
    engine.close()


def test_small_values_expire(server: Server) -> None:
    engine = server.engine()
    engine.put("k", b"\xff\0", expire_s=0.1)
    engine.put("l", b"stays")
    assert engine.get(["k", "none", "l"]) == [b"\xff\0", None, b"stays"]
    wait_until(lambda: engine.get(["k"]) == [None])
    engine.remove("l")
    assert engine.get(["l"]) == [None]
    engine.close()


def test_a_server_says_what_it_is(server: Server) -> None:
    engine = server.engine()
    engine.ping()
    found = engine.information()
    assert found.version >= (6, 2) and found.mode == "standalone" and found.role == "master"
    assert found.eviction_policy == "noeviction" and found.memory > 0 and found.cpu_s > 0 and found.run_id
    before = time.time()
    assert before - 1 < engine.time_s() < time.time() + 1
    engine.close()


def test_a_refused_call_says_why_and_the_connection_stays_good(server: Server) -> None:
    engine = server.engine()
    engine.put(STREAM, b"no stream")
    with pytest.raises(EngineError, match=r"redis://127.0.0.1:\d+: .*WRONGTYPE") as caught:
        engine.append(STREAM, {b"c": b"x"})
    assert not isinstance(caught.value, EngineAwayError)
    assert engine.get([STREAM]) == [b"no stream"]
    engine.close()


# ---- logging in ----


@pytest.fixture
def password_file(directory: Path) -> Path:
    path = directory / "password"
    path.touch(mode=0o600)
    path.write_text(PASSWORD + "\n")
    return path


def acl(directory: Path) -> Server:
    """A server that lets in one user, with no more rights than docs name."""
    rights = "~kvfs:* +xadd +xread +xtrim +xrevrange +xlen +memory|usage +set +get +del +pexpire +ping +time +info"
    file = directory / "users.acl"
    directory.mkdir(parents=True, exist_ok=True)
    file.write_text(f"user default off\nuser news on >{PASSWORD} {rights}\n")
    return Server(directory, "--aclfile", str(file))


def test_a_user_with_a_password_file_has_all_that_the_feed_needs(
    directory: Path, password_file: Path, nodes: Callable[..., Node]
) -> None:
    server = acl(directory / "acl").start()
    try:
        url = server.url.replace("//", "//news@")
        make = [lambda: server.engine(url=url, password_file=password_file)]
        a, b = nodes(0, 2, make), nodes(1, 2, make)
        wait_until(lambda: a.follows(1) and b.follows(0))
        b.sink.wait_next(0, a.source.put(3))
        a.pod.fresh(5.0)
        findings = examine(parse_url(url), Names("u"), [0, 1], password_file=password_file)
        assert {finding.name for finding in findings} >= {"engine", "engine latency", "engine clock"}
    finally:
        server.kill()


def test_a_wrong_password_is_refused_and_never_shown(
    directory: Path, password_file: Path, caplog: pytest.LogCaptureFixture, nodes: Callable[..., Node]
) -> None:
    caplog.set_level(logging.DEBUG)
    server = acl(directory / "acl").start()
    password_file.write_text("a-wrong-secret\n")
    try:
        url = server.url.replace("//", "//news@")
        engine = server.engine(url=url, password_file=password_file)
        with pytest.raises(EngineError, match=r"//news@127.0.0.1:\d+: user news is refused") as caught:
            engine.ping()
        node = nodes(0, 2, [lambda: server.engine(url=url, password_file=password_file)])
        wait_until(lambda: node.pod.statistics().links[0].failures > 1)
        shown = [str(caught.value), repr(caught.value), repr(engine), str(node.pod.statistics()), caplog.text]
        shown += [repr(caught.value.__cause__), repr(vars(engine)), Path("/proc/self/cmdline").read_text()]
        assert "news is refused" in node.pod.statistics().links[0].error
        assert not any("a-wrong-secret" in text for text in shown)
        # It is read anew for each connection.
        password_file.write_text(PASSWORD)
        wait_until(lambda: node.pod.statistics().links[0].state == "up")
        assert PASSWORD not in repr(vars(engine)) and PASSWORD not in str(node.pod.statistics())
    finally:
        server.kill()


def test_a_password_file_that_others_can_read_is_refused_with_its_mode(server: Server, password_file: Path) -> None:
    password_file.chmod(0o640)
    with pytest.raises(EngineError, match=r"mode 0640, so others can read it; chmod 0600"):
        server.engine(url=server.url.replace("//", "//news@"), password_file=password_file).ping()


def test_tls_with_a_certificate_of_ones_own(directory: Path) -> None:
    key, cert = directory / "key.pem", directory / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", key, "-out", cert, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    plain = Server(directory / "tls")
    server = Server(
        directory / "tls", "--tls-port", "0", "--tls-cert-file", str(cert), "--tls-key-file", str(key),
        "--tls-ca-cert-file", str(cert), "--tls-auth-clients", "no", "--tls-replication", "no", port=plain.port,
    )  # fmt: skip
    server.options = (*server.options[2:], "--tls-port", str(Server(directory / "x").port))
    port = server.options[-1]
    try:
        server.start()
    except AssertionError as error:
        if "tls" in str(error).lower():
            pytest.skip("this redis-server has no TLS")
        raise
    try:
        engine = server.engine(url=f"rediss://127.0.0.1:{port}?ca={cert}")
        engine.ping()
        engine.close()
        with pytest.raises(EngineAwayError, match="certificate verify failed"):
            server.engine(url=f"rediss://127.0.0.1:{port}").ping()
        with pytest.raises(EngineAwayError):
            server.engine(url=f"redis://127.0.0.1:{port}").ping()
    finally:
        server.kill()


# ---- other shapes of an engine ----


@pytest.mark.slow
def test_behind_sentinels_the_feed_goes_on_at_the_new_master(
    directory: Path, nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    master = Server(directory / "m").start()
    replica = Server(directory / "r", "--replicaof", "127.0.0.1", str(master.port)).start()
    wait_until(lambda: "master_link_status:up" in replica.command("INFO", "replication"))
    sentinel = Sentinel(directory / "s", master).start()
    try:
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/mymaster"
        a, b = two(nodes, _Elsewhere(url))
        b.sink.wait_next(0, a.source.put())
        engine = master.engine(url=url)
        assert engine.information().role == "master"
        wait_until(lambda: f"port={replica.port}" in sentinel_said(sentinel, "REPLICAS"))
        master.kill()
        b.sink.wait_next(0, a.source.put(), 60.0)
        a.sink.wait_next(1, b.source.put(), 60.0)
        assert b.sink.is_whole(0) and a.sink.is_whole(1)
        wait_until(lambda: _role(engine) == "master")
        # Sentinels that are gone spoil no connection that works.
        sentinel.kill()
        monkeypatch.setattr(redis_engine, "_VERIFY_S", 0.0)
        assert engine.information().role == "master"
        engine.close()
    finally:
        for one in (sentinel, replica, master):
            one.kill()


def sentinel_said(sentinel: Server, what: str) -> str:
    said = subprocess.run(
        ["redis-cli", "-p", str(sentinel.port), "SENTINEL", what, "mymaster"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    return re.sub(r"\nport\n", "\nport=", said.stdout)


def _role(engine: Engine) -> str:
    try:
        return engine.information().role
    except EngineError:
        return ""


class _Elsewhere:
    """Stands for a server of which only the URL is known."""

    def __init__(self, url: str) -> None:
        self.url = url

    def engine(self) -> RedisEngine:
        return RedisEngine(parse_url(self.url), pool_key=STREAM)


def test_in_a_cluster_the_node_that_has_the_keys_is_found(directory: Path, nodes: Callable[..., Node]) -> None:
    members = [Server(directory / f"c{index}", "--cluster-enabled", "yes").start() for index in range(3)]
    try:
        hosts = [f"127.0.0.1:{member.port}" for member in members]
        subprocess.run(
            ["redis-cli", "--cluster", "create", *hosts, "--cluster-yes"], check=True, capture_output=True, timeout=60
        )
        wait_until(lambda: all("cluster_state:ok" in member.command("CLUSTER", "INFO") for member in members))
        url = f"redis+cluster://127.0.0.1:1,{hosts[0]},{hosts[2]}"
        a, b = two(nodes, _Elsewhere(url))  # type: ignore[arg-type]
        b.sink.wait_next(0, a.source.put(2))
        assert a.pod.fresh(5.0) is None
        # Its slot moves to another node: the one that had it says so.
        slot = int(members[0].command("CLUSTER", "KEYSLOT", STREAM))
        owner = next(one for one in members if one.command("EXISTS", STREAM).isdigit())
        target = next(one for one in members if one is not owner)
        identity = target.command("CLUSTER", "MYID")
        for one in members:
            one.command("FLUSHALL")
        for one in (target, owner, *members):
            one.command("CLUSTER", "SETSLOT", str(slot), "NODE", identity)
        b.sink.wait_next(0, a.source.put(2))
        assert b.sink.is_whole(0)
    finally:
        for member in members:
            member.kill()


# ---- all that may happen to an engine ----


def test_one_of_two_engines_is_killed_and_nobody_notices(
    server: Server, second: Server, nodes: Callable[..., Node]
) -> None:
    a, b = two(nodes, server, second)
    b.sink.wait_next(0, a.source.put())
    server.kill()
    begin = time.monotonic()
    for _ in range(20):
        b.sink.wait_next(0, a.source.put())
    a.pod.fresh(5.0)
    # Some 20 ms here; with a deadline for each batch it would be 20 s.
    assert time.monotonic() - begin < 10.0 * slowness()
    wait_until(lambda: [link.state for link in b.pod.statistics().links] == ["away", "up"])
    server.start()
    wait_until(lambda: [link.state for link in b.pod.statistics().links] == ["up", "up"])
    second.kill()
    b.sink.wait_next(0, a.source.put())
    assert b.sink.is_whole(0) and b.sink.reloads == [0]


def test_one_of_two_engines_hangs_and_nobody_notices(
    server: Server, second: Server, nodes: Callable[..., Node]
) -> None:
    a, b = two(nodes, server, second)
    server.signal(signal.SIGSTOP)
    try:
        begin = time.monotonic()
        for _ in range(20):
            b.sink.wait_next(0, a.source.put())
        a.pod.fresh(5.0)
        assert time.monotonic() - begin < 10.0 * slowness()
        assert b.sink.is_whole(0)
    finally:
        server.signal(signal.SIGCONT)


def test_with_a_hung_engine_no_call_outlasts_its_deadline(server: Server, nodes: Callable[..., Node]) -> None:
    engine = server.engine(deadline_s=0.3)
    engine.ping()
    a, _ = two(nodes, server)
    server.signal(signal.SIGSTOP)
    try:
        calls: list[Callable[[], object]] = [
            engine.ping,
            engine.ping,
            lambda: engine.append(STREAM, {b"c": b"x"}),
            lambda: engine.read({STREAM: BEGINNING}, wait_s=0.2, count=1),
            lambda: engine.get(["k"]),
            lambda: server.engine(deadline_s=0.3).ping(),
        ]
        for call in calls:
            begin = time.monotonic()
            with pytest.raises(EngineAwayError, match=rf"127.0.0.1:{server.port}: no answer within 0.3 s"):
                call()
            assert time.monotonic() - begin < 3.0 * slowness()
        a.source.put()
        begin = time.monotonic()
        with pytest.raises((FreshError, EngineAwayError)):
            a.pod.fresh(0.1)
        assert a.pod.lease(1, [b"k" * 16], 1.0, 0.05).held == (False,)
        assert time.monotonic() - begin < 2.0 * slowness()
        begin = time.monotonic()
        assert a.pod.stop(5.0)
        assert time.monotonic() - begin < 4.0 * slowness()
    finally:
        server.signal(signal.SIGCONT)


def test_news_go_on_after_an_engine_was_away(server: Server, nodes: Callable[..., Node]) -> None:
    a, b = two(nodes, server)
    b.sink.wait_next(0, a.source.put())
    server.kill()
    for _ in range(50):
        a.source.put()
    wait_until(lambda: a.pod.statistics().links[0].state == "away")
    with pytest.raises(EngineAwayError, match=str(server.port)):
        a.pod.fresh()
    assert b.sink.next(0) == 1
    server.start()
    b.sink.wait_next(0, 51)
    assert b.sink.is_whole(0) and b.sink.reloads == [0]


def test_an_engine_away_for_long_costs_the_oldest_news_and_flash_is_read(
    server: Server, nodes: Callable[..., Node]
) -> None:
    limits = Limits(**{**{name: getattr(QUICK, name) for name in QUICK.__slots__}, "history_size": 4000})
    a, b = two(nodes, server, limits=limits)
    b.sink.wait_next(0, a.source.put())
    server.kill()
    wait_until(lambda: a.pod.statistics().links[0].state == "away")
    for _ in range(100):
        a.source.put()
    wait_until(lambda: a.pod.statistics().feed.dropped > 50)
    assert a.pod.statistics().feed.history_size <= 4000
    server.start()
    b.sink.wait_next(0, 101)
    wait_until(lambda: b.sink.reloads == [0, 0])
    assert b.pod.statistics().owners[0].lost > 50


def test_a_flushed_engine_costs_nothing_but_a_repeat(server: Server, nodes: Callable[..., Node]) -> None:
    a, b = two(nodes, server)
    b.sink.wait_next(0, a.source.put())
    for _ in range(10):
        server.command("FLUSHALL")
        b.sink.wait_next(0, a.source.put(2))
    assert b.sink.is_whole(0) and b.sink.reloads == [0]


def test_an_engine_as_it_was_yesterday_costs_nothing_but_a_repeat(
    server: Server, directory: Path, nodes: Callable[..., Node]
) -> None:
    old = nodes(0, 2, [server.engine], start=77, epoch=1)
    old.source.put(5)
    wait_until(lambda: old.pod.statistics().feed.unsent_batches == 0)
    assert old.pod.stop()
    server.command("SAVE")
    shutil.copy(directory / "a" / "dump.rdb", directory / "yesterday")
    server.kill()
    (directory / "a" / "dump.rdb").unlink()
    server.start()
    a, b = nodes(0, 2, [server.engine], epoch=2), nodes(1, 2, [server.engine], epoch=2)
    wait_until(lambda: a.follows(1) and b.follows(0))
    b.sink.wait_next(0, a.source.put(10))
    server.kill()
    shutil.copy(directory / "yesterday", directory / "a" / "dump.rdb")
    for _ in range(3):
        a.source.put()
    server.start()
    assert server.command("EXISTS", "kvfs:{u}:0") == "1"
    b.sink.wait_next(0, 13)
    b.sink.wait_next(0, a.source.put())
    assert b.sink.is_whole(0) and b.sink.reloads == [0] and b.pod.statistics().owners[0].epoch == 2


def test_a_stream_that_is_trimmed_under_a_slow_reader_is_repeated(server: Server, nodes: Callable[..., Node]) -> None:
    a, b = two(nodes, server)
    b.sink.wait_next(0, a.source.put())
    for _ in range(20):
        server.command("XTRIM", "kvfs:{u}:0", "MAXLEN", "0")
        for _ in range(20):
            a.source.put()
        server.command("XTRIM", "kvfs:{u}:0", "MAXLEN", "0")
    b.sink.wait_next(0, a.source.number)
    assert b.sink.is_whole(0) and b.sink.reloads == [0]


def test_a_node_that_starts_anew_is_read_from_flash_and_then_followed(
    server: Server, nodes: Callable[..., Node]
) -> None:
    a, b = two(nodes, server)
    b.sink.wait_next(0, a.source.put(3))
    assert a.pod.stop()
    again = nodes(0, 2, [server.engine], start=555, epoch=2)
    wait_until(lambda: b.sink.reloads == [0, 0])
    again.source.put(7)
    wait_until(lambda: (0, 7) in b.sink.numbers[0])


def test_a_forged_entry_does_nothing(server: Server, nodes: Callable[..., Node]) -> None:
    a, b = two(nodes, server)
    engine = server.engine()
    for data in (b"", b"KVFSNEWS", bytes(56), b"x" * 70_000):
        engine.append("kvfs:{u}:0", {b"b": data, b"t": b"too long for a time"})
        engine.append("kvfs:{u}:1:in", {b"b": data, b"c": data})
        engine.append("kvfs:{u}:0", {b"c": data})
        engine.append("kvfs:{u}:0", {b"z": data})
    engine.close()
    b.sink.wait_next(0, a.source.put())
    statistics = b.pod.statistics()
    assert statistics.forged == 8 and statistics.owners[0].damaged >= 4 and b.pod.failed is None


# ---- the barrier and leases ----


def test_fresh_brings_what_owners_hold_back(server: Server, nodes: Callable[..., Node]) -> None:
    a, b = two(nodes, server)
    a.source.hold(3)
    b.pod.fresh(5.0)
    assert b.sink.next(0) == 3
    assert b.pod.statistics().asks.fresh == 1


def test_fresh_names_an_owner_that_does_not_answer(server: Server, nodes: Callable[..., Node]) -> None:
    _, b = two(nodes, server)
    dead = nodes(2, 3, [server.engine])  # its beat is read by those who know of slot 2
    c = nodes(0, 3, [server.engine], start=9, epoch=5)
    wait_until(lambda: c.follows(2) and c.follows(1))
    dead.member._do = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(FreshError, match="slot 2 gave no answer") as caught:
        c.pod.fresh(0.2)
    assert caught.value.slots == (2,) and b.pod.failed is None


def test_a_lease_is_held_if_the_owner_says_so_in_time(server: Server, nodes: Callable[..., Node]) -> None:
    a, b = two(nodes, server)
    mine, none = b"m" * 16, b"n" * 16
    b.keeper.keys.add(mine)
    ask = a.pod.lease(1, [mine, none], 1.0, 5.0)
    assert ask.held == (True, False) and list(b.keeper.leases) == [(0, a.start, ask.number)]
    a.pod.release(ask)
    wait_until(lambda: not b.keeper.leases)
    b.keeper.delay_s = 1.0
    begin = time.monotonic()
    assert a.pod.lease(1, [mine], 1.0).held == (False,)
    assert time.monotonic() - begin < 0.9 * slowness()
    # The answer comes late, nobody waits for it, and the lease is given back.
    wait_until(lambda: b.keeper.granted == 2 and not b.keeper.leases)
    a.pod.touch(1, [mine, none])
    wait_until(lambda: b.keeper.touched == [mine, none])
