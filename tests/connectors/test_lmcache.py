"""kvfs under LMCache: its own factory, benchmark and server load the connector, and lose blocks, daemons and room."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request

import pytest
from engine_players import Player, begun, damage, files_below, press
from helpers import wait_until
from remounts import own_pool

__all__ = ["own_pool"]

COUNT = 8
SIZE = 1 << 20
pytestmark = pytest.mark.timeout(600)


def configuration(mount, *, telling=False, **options):
    """telling: by the adapter that tells LMCache of removals."""
    if telling:
        kind = {"type": "plugin", "module_path": "kvfs.connectors.lmcache_adapter", "class_name": "KvfsAdapter"}
    else:
        kind = {
            "type": "native_plugin", "module_path": "kvfs.connectors.lmcache", "class_name": "KvfsClient",
            "max_capacity_gb": 0,
        }  # fmt: skip
    return json.dumps(kind | {"adapter_params": {"mount": str(mount), "timeout_s": 20, **options}, "shared": True})


@pytest.fixture
def lmcache(engine, tmp_path):
    """lmcache(mount): a process of LMCache's with an adapter there."""
    there, players = engine("lmcache"), []

    def start(mount, **options):
        players.append(Player(there, "lmcache_player.py", [configuration(mount, **options)], tmp_path))
        return players[-1]

    yield start
    for player in players:
        player.stop()


def check(player, blocks, gone=()):
    """Look up and load: what is gone is a miss, everything else is there and right."""
    blocks = list(blocks)
    gone = set(gone)
    assert player.ask("lookup", blocks) == [block not in gone for block in blocks], player.tail()
    assert player.ask("load", blocks) == ["miss" if block in gone else "same" for block in blocks], player.tail()


def store(player, blocks):
    assert all(player.ask("store", blocks)), player.tail()


def test_lmcaches_benchmark_verifies_what_it_stored(engine, directory, tmp_path):
    output = tmp_path / "result.json"
    said = engine("lmcache").run(
        "-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", configuration(directory), "--num-keys", "16",
        "--in-flight", "2", "--rounds", "2", "--data-size-kb", "1024", "--l1-align-bytes", "4096",
        "--lookup-max-hit-rate", "0.5", "--no-skip-verify", "--format", "json", "--output", output,
        HOME=os.fspath(tmp_path),
    )  # fmt: skip
    metrics = json.loads(output.read_text())["metrics"]
    by_name = {metrics[name]["operation"]: metrics[name] for name in ("op_0", "op_1", "op_2")}
    assert {name: result["total_success"] for name, result in by_name.items()} == {
        "Store": 64,
        "Lookup": 32,
        "Load": 64,
    }
    assert "All 32 keys data verified OK" in said.stdout


def test_blocks_that_are_lost_are_misses_and_lmcache_lives_on(own_pool, lmcache):
    pool = own_pool(files=2, size="48M")
    player = lmcache(pool.mount)
    store(player, range(COUNT))
    files = files_below(pool.mount / "lmcache")
    assert len(files) == COUNT
    check(player, range(COUNT))
    check(player, [99], gone=[99])
    assert player.ask("load", range(COUNT), shift=64) == ["same"] * COUNT, "memory that is not aligned"

    # LMCache's own eviction deletes.
    player.ask("delete", [0])
    check(player, range(COUNT), gone=[0])

    # A damaged block is a miss, and stored again: it is not taken for one that is there.
    name = next(path for path in files_below(pool.mount / "lmcache") if (1).to_bytes(32, "big").hex() in key_in(path))
    damage(pool, name)
    assert player.ask("load", [1]) == ["miss"]
    store(player, [1])
    check(player, range(1, COUNT))

    # By the pressure of others, then by hand.
    store(player, range(10, 10 + COUNT))
    files = [path for path in files_below(pool.mount / "lmcache") if number(path) >= 10]
    press(pool, files)
    lost = {number(path) for path in files if not path.exists()}
    assert lost
    check(player, lost, gone=lost)
    pool.command("evict", str(pool.path), "--all")
    check(player, range(20), gone=range(20))

    # No room, as all that is stored is pinned: LMCache is told, and nothing else suffers.
    pool.command("pin", str(pool.mount / "lmcache"))
    stored = player.ask("store", range(100, 220))
    refused = [100 + index for index, is_stored in enumerate(stored) if not is_stored]
    assert 0 < len(refused) < 120, "of 120 MiB a pool of 96 took"
    check(player, refused, gone=refused)
    check(player, set(range(100, 220)) - set(refused))
    pool.command("unpin", str(pool.mount / "lmcache"))
    store(player, range(300, 304))
    check(player, range(300, 304))
    counters = player.ask("counters")
    assert counters["failed_stores"] == len(refused) and counters["dropped"] == counters["lost"] == 0
    player.end()


def key_in(path):
    return bytes.fromhex(path.name).decode()


def number(path):
    return int(key_in(path).split("@")[3], 16)


def test_an_object_that_is_there_is_not_written_again(own_pool, lmcache):
    pool = own_pool(files=2, size="128M")
    player = lmcache(pool.mount)
    store(player, range(COUNT))
    before = [path.stat().st_ino for path in files_below(pool.mount / "lmcache")]
    store(player, range(COUNT))
    assert [path.stat().st_ino for path in files_below(pool.mount / "lmcache")] == before
    counters = player.ask("counters")
    assert (counters["stored"], counters["present"], counters["stored_bytes"]) == (COUNT, COUNT, COUNT * SIZE)


def test_an_object_of_another_size_is_a_miss_and_is_replaced(own_pool, lmcache):
    """A layout that changed under one name: never a short block, nor one cut off."""
    pool = own_pool(files=2, size="128M")
    player = lmcache(pool.mount)
    store(player, [0, 1])
    path = files_below(pool.mount / "lmcache")[0]
    os.unlink(path)
    path.write_bytes(b"short")
    assert player.ask("load", [0, 1]) == ["miss", "same"]
    store(player, [0])
    check(player, [0, 1])
    assert player.ask("load", [0], size=SIZE // 2) == ["miss"]


def test_names_of_any_length_are_keys(own_pool, lmcache):
    pool = own_pool(files=2, size="128M")
    player = lmcache(pool.mount)
    which = [{"model": "m" * 400}, {"model": "m" * 401}, {"salt": "s" * 128}, {"salt": "t" * 128}, {"model": "ü" * 200}]
    for index, names in enumerate(which):
        assert player.ask("lookup", [index], **names) == [False]
        assert player.ask("store", [index], **names) == [True], player.tail()
    for index, names in enumerate(which):
        others = [other for other in range(len(which)) if other != index]
        assert player.ask("load", [index], **names) == ["same"]
        assert player.ask("lookup", others, **names) == [False] * len(others)
    assert len(files_below(pool.mount / "lmcache")) == len(which)


def test_a_daemon_that_is_killed_costs_stores_and_comes_back(own_pool, lmcache):
    pool = own_pool(files=2, size="128M")
    player = lmcache(pool.mount)
    store(player, range(4))
    pool.kill()
    assert player.ask("store", [4]) == [False]
    assert player.ask("load", range(4)) == ["same"] * 4, "reads need no daemon"
    pool.remount()
    wait_until(lambda: player.ask("store", [5]) == [True], "stores after the restart", interval_s=0.2)
    check(player, [0, 1, 2, 3, 5])
    player.end()
    # LMCache's log gets one line for the change, not one a request.
    assert player.tail(1 << 20).count("the daemon is away") <= 1


def test_a_kvfs_that_is_mounted_later_is_found_by_the_same_descriptor(own_pool, lmcache):
    pool = own_pool(files=2, size="128M", started=False)
    player = lmcache(pool.mount)
    descriptor = player.ask("fd")
    assert player.ask("store", [0]) == [False]
    assert player.ask("lookup", [0]) == [False]
    assert player.ask("load", [0]) == ["miss"]
    pool.start()
    wait_until(lambda: player.ask("store", [0]) == [True], "a store", interval_s=0.2)
    check(player, [0])
    assert player.ask("fd") == descriptor
    pool.umount()
    assert player.ask("lookup", [0]) == [False] and player.ask("load", [0]) == ["miss"]
    pool.start()
    wait_until(lambda: player.ask("load", [0]) == ["same"], "a load after another mount", interval_s=0.2)
    player.end()


def test_two_engines_share_a_pool(own_pool, lmcache):
    pool = own_pool(files=2, size="128M")
    one, other = lmcache(pool.mount), lmcache(pool.mount)
    apart = lmcache(pool.mount, namespace="another")
    store(one, range(4))
    check(other, range(4))
    store(other, range(2, 8))
    check(one, range(8))
    assert len(files_below(pool.mount / "lmcache")) == 8
    check(apart, range(8), gone=range(8))
    other.stop()
    check(one, range(8))


def test_options_that_are_wrong_are_refused_by_name(engine, directory):
    for option, reason in (({"lease_s": -1}, "lease_s -1"), ({"depth": 0}, "depth 0"), ({"namespace": ".."}, "'..'")):
        program = (
            "import sys, json; from kvfs.connectors.lmcache import KvfsClient; KvfsClient(**json.loads(sys.argv[1]))"
        )
        said = engine("lmcache").run("-c", program, json.dumps({"mount": str(directory), **option}), check=False)
        assert said.returncode == 1 and "kvfs for lmcache: " in said.stderr and reason in said.stderr


@pytest.mark.parametrize("salt", ["", "s" * 128])
def test_what_kvfs_removes_lmcache_is_told_of(own_pool, lmcache, salt):
    """A salt of 128 bytes makes names that are too long for keys."""
    pool = own_pool(files=2, size="128M")
    which = {"salt": salt, "model": "org/" + "m" * 40 if salt else "org/a-model"}
    player, other = (lmcache(pool.mount, telling=True) for _ in range(2))
    told = []

    def stored(blocks):
        assert all(player.ask("store", blocks, **which)), player.tail()

    def removed(blocks, what):
        def are_told():
            told.extend(player.ask("removed", **which))
            return set(told) >= set(blocks)

        wait_until(are_told, what)
        assert sorted(set(told)) == sorted(blocks), what
        told.clear()

    stored(range(COUNT))
    assert player.ask("used") == COUNT * SIZE
    pool.command("evict", str(pool.path), "--all")
    removed(range(COUNT), "evicted")
    assert player.ask("used") == 0
    assert player.ask("lookup", range(COUNT), **which) == [False] * COUNT

    # Stored again they count again. A deletion by another is told, too.
    stored(range(COUNT))
    assert player.ask("used") == COUNT * SIZE
    other.ask("delete", [0, 1], **which)
    removed([0, 1], "deleted by another process")
    player.ask("delete", [2], **which)
    removed([2], "deleted by itself")
    assert player.ask("used") == (COUNT - 3) * SIZE

    # While the daemon is away nothing is gone. A deletion does not outlive its death: those three may be back.
    pool.kill()
    assert set(player.ask("removed", **which)) <= {2}, "told twice is told"
    pool.remount()
    pool.command("evict", str(pool.path), "--all")
    wait_until(lambda: player.ask("used") == 0, "evicted by the next daemon")
    assert set(player.ask("removed", **which)) >= set(range(3, COUNT))
    player.end()
    other.end()


# ---- LMCache's server ----


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextlib.contextmanager
def server(engine, mount, home, *more, telling=False):
    """LMCache's server with kvfs behind it: its ports for requests and for HTTP."""
    rpc, http, prometheus = free_ports(3)
    arguments = [
        "server", "--host", "127.0.0.1", "--port", str(rpc), "--http-host", "127.0.0.1",
        "--http-port", str(http), "--prometheus-port", str(prometheus), "--l1-size-gb", "1", "--l1-init-size-gb",
        "1", "--eviction-policy", "LRU", "--chunk-size", "32", "--supported-transfer-mode", "engine_driven",
        "--l2-adapter", configuration(mount, telling=telling), *more,
    ]  # fmt: skip
    with running(engine, arguments, http, home):
        yield rpc, http


@contextlib.contextmanager
def running(engine, arguments, http, home):
    """A process of LMCache's command, which answers at a port for HTTP."""
    with (home / f"{arguments[0]}.log").open("ab") as log:
        process = begun(engine, ["-m", "lmcache.cli.main", *arguments], home, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until(
                lambda: fetched(http, "/") is not None, f"LMCache's {arguments[0]}", timeout_s=120, interval_s=0.5
            )
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
            process.stdin.close()


@pytest.mark.slow
def test_a_new_server_of_lmcaches_finds_in_kvfs_the_chunks_of_the_one_before(engine, own_pool, tmp_path):
    """LMCache's own client stores, looks up and retrieves through a server whose L2 is kvfs, and verifies checksums."""
    pool = own_pool(files=2, size="512M")
    there = engine("lmcache")
    counted = []
    for _ in range(2):
        with server(there, pool.mount, tmp_path) as (rpc, http):
            said = there.run(
                "-m", "lmcache.cli.main", "bench", "server", "--rpc-url", f"tcp://127.0.0.1:{rpc}", "--url",
                f"http://127.0.0.1:{http}", "--mode", "cpu", "--num-tokens", "256", "--start", "0", "--end", "4",
                "--kvcache-shape-spec", "(2,64,16,2,32):float32:2", "--format", "json",
                HOME=os.fspath(tmp_path), LMCACHE_TRACK_USAGE="false",
            )  # fmt: skip
            assert "mismatch" not in (said.stdout + said.stderr).lower()
            wait_until(lambda: len(files_below(pool.mount / "lmcache")) == 4 * 256 // 32, "the chunks in kvfs")
            text = fetched(http, "/metrics") or ""
            lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith("kvfs_connector_")]
            counted.append({name.partition("{")[0]: float(value) for name, _, value in lines if "_total{" in name})
    assert counted[0]["kvfs_connector_stored_total"] == 32 and counted[0]["kvfs_connector_loaded_total"] == 0
    assert counted[1]["kvfs_connector_stored_total"] == 0 and counted[1]["kvfs_connector_loaded_total"] >= 32


@pytest.mark.slow
def test_lmcaches_coordinator_hears_of_what_kvfs_evicts(engine, own_pool, tmp_path):
    """Its directory of a fleet's chunks has those in kvfs, and has them no more when they are gone."""
    pool = own_pool(files=2, size="512M")
    there = engine("lmcache")
    (port,) = free_ports(1)
    with running(there, ["coordinator", "--host", "127.0.0.1", "--port", str(port)], port, tmp_path):
        url = f"http://127.0.0.1:{port}"
        more = ["--coordinator-url", url, "--coordinator-event-reporting"]
        with server(there, pool.mount, tmp_path, *more, telling=True) as (rpc, http):
            there.run(
                "-m", "lmcache.cli.main", "bench", "server", "--rpc-url", f"tcp://127.0.0.1:{rpc}", "--url",
                f"http://127.0.0.1:{http}", "--mode", "cpu", "--num-tokens", "256", "--start", "0", "--end", "4",
                "--kvcache-shape-spec", "(2,64,16,2,32):float32:2", "--format", "json",
                HOME=os.fspath(tmp_path), LMCACHE_TRACK_USAGE="false",
            )  # fmt: skip

            def on_disk():
                return json.loads(fetched(port, "/directory/stats") or "{}")

            wait_until(lambda: on_disk()["l2_count"] == 32, "the chunks in the directory")

            def evicted():
                # Look-ups lease what they find, for some seconds.
                pool.command("evict", str(pool.path), "--all")
                return not files_below(pool.mount / "lmcache")

            wait_until(evicted, "an empty pool", interval_s=1)
            wait_until(lambda: on_disk()["l2_count"] == 0, "none in the directory")


def fetched(port, path):
    """The answer to a GET, whatever it is; None: nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.reason
    except OSError:
        return None


# ---- in the engine's process: LMCache's remote back end ----


@pytest.fixture
def remote(engine, tmp_path):
    """remote(mount): a process with LMCache's remote back end there."""
    there, players = engine("lmcache"), []

    def start(mount, **options):
        given = {
            "module_path": "kvfs.connectors.lmcache_remote", "class_name": "KvfsAdapter", "mount": str(mount),
            "timeout_s": 20, **options,
        }  # fmt: skip
        extra = {f"remote_storage_plugin.kvfs.{name}": value for name, value in given.items()}
        players.append(Player(there, "lmcache_remote_player.py", [json.dumps(extra)], tmp_path))
        return players[-1]

    yield start
    for player in players:
        player.stop()


def test_chunks_of_lmcache_in_process_come_back_as_they_were(own_pool, remote):
    pool = own_pool(files=2, size="256M")
    player, other = remote(pool.mount), remote(pool.mount)
    assert player.ask("load", [1]) == ["miss"] and player.ask("prefix", [1]) == 0
    store(player, range(8))
    check(player, range(10), gone=[8, 9])
    check(other, range(10), gone=[8, 9])
    assert other.ask("prefix", [*range(6), 9, 7]) == 6
    assert other.ask("load", [0, 9, 7], batch=False) == ["same", "miss", "same"]
    # The last chunk of a prompt has fewer tokens, and says so.
    assert player.ask("store", [20], tokens=100) == [True]
    assert other.ask("load", [20], tokens=100) == ["same"]
    # One that is there is not written again.
    store(player, range(8))
    counters = player.ask("counters")
    assert (counters["stored"], counters["present"], counters["failed_stores"]) == (9, 8, 0)
    assert {int(name.split("@")[3], 16) for name in other.ask("names")} == {*range(8), 20}
    assert other.ask("remove", [7, 9]) == [True, False]
    check(player, [7, 6], gone=[7])
    assert player.ask("cancel", range(6)) is True
    wait_until(lambda: player.ask("held") == 0, "the memory of the load that was given up")
    assert other.ask("held") == 0, "LMCache's memory was not given back"
    check(player, range(6))
    player.end()
    other.end()


def test_a_chunk_that_is_lost_is_a_miss_in_process_and_is_stored_again(own_pool, remote):
    pool = own_pool(files=2, size="128M")
    player = remote(pool.mount)
    store(player, range(4))
    damage(
        pool,
        next(path for path in files_below(pool.mount / "lmcache") if bytes.fromhex(path.name).endswith(b"@2@bfloat16")),
    )
    assert player.ask("load", range(4)) == ["same", "same", "miss", "same"]
    store(player, range(4))
    check(player, range(4))
    pool.command("evict", str(pool.path), "--all")
    check(player, range(4), gone=range(4))
    assert player.ask("held") == 0
    player.end()


def test_a_daemon_that_is_killed_costs_lmcache_in_process_stores_and_comes_back(own_pool, remote):
    pool = own_pool(files=2, size="128M")
    player = remote(pool.mount)
    store(player, range(4))
    pool.kill()
    player.ask("store", [7])
    check(player, [0, 1, 2, 3, 7], gone=[7])
    assert player.ask("ping") == 0, "blocks are read while the daemon is away"
    pool.remount()

    def stored():
        player.ask("store", [8])
        return player.ask("lookup", [8]) == [True]

    wait_until(stored, "stores after the restart", interval_s=0.2)
    check(player, [0, 1, 2, 3, 8])
    pool.umount()
    assert player.ask("load", range(4)) == ["miss"] * 4
    assert player.ask("held") == 0
    player.end()
