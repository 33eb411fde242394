"""Pools on NVMe/TCP devices, by the data plane's own initiator against the test enclosure: the mount, native clients,
and discovery. Enclosures break, vanish and come back.
"""

import concurrent.futures
import contextlib
import json
import os
import signal
import time

import pytest
from enclosure import Enclosure
from helpers import MIB, Pool, requires_program, run, slow, slowness, wait_until
from load import DEADLINE_MS, DEADLINE_S, MountLoad, content, files, running, states, urls
from noise import Noise

import kvfs
from kvfs.errors import DeviceError, UsageError
from kvfs.pool import nvme_tcp

pytestmark = pytest.mark.timeout(300)

NQNS = ["nqn.2026-11.test:a", "nqn.2026-11.test:b"]


def pairs(count, size):
    return [(b"%032x" % number, content(number, size)) for number in range(count)]


@pytest.mark.parametrize("options", [slow(""), slow("&ddgst=1"), "&hdgst=1&ddgst=1&depth=4"])
def test_a_pool_is_written_verified_evicted_and_remounted(options):
    requires_program("fio")
    with files(4, 128 * MIB) as paths, Enclosure({NQNS[0]: paths[:2], NQNS[1]: paths[2:]}) as enclosure:
        devices = urls(enclosure.port, NQNS[0], 2, options) + urls(enclosure.port, NQNS[1], 2, options)
        with Pool(devices=devices) as pool:
            words = [
                "fio", "--name=v", f"--directory={pool.mount}", "--size=64M", "--bs=256k", "--numjobs=2", "--thread",
                "--verify=crc32c", "--verify_fatal=1", "--fallocate=none", "--verify_state_save=0",
            ]  # fmt: skip
            run(*words, "--rw=write", "--do_verify=1")
            pool.umount()
            pool.start()
            run(*words, "--rw=read", "--verify_only=1")
            for number in range(70):  # more than the pool holds
                (pool.mount / f"f{number}").write_bytes(content(number, 8 * MIB))
            names = {path.name for path in pool.mount.iterdir()} & {f"f{number}" for number in range(70)}
            assert "f69" in names and len(names) < 70
            right = 0
            for name in names:
                # The evictor may still be making room: what it takes now is a miss.
                with contextlib.suppress(FileNotFoundError):
                    assert (pool.mount / name).read_bytes() == content(int(name[1:]), 8 * MIB)
                    right += 1
            assert right > 20
            status = pool.status()
            assert {device["state"] for device in status["devices"]} == {"online"}
            assert sum(device["errors"] + device["timeouts"] for device in status["devices"]) == 0
            pool.umount()
            assert "nothing is damaged" in pool.command("fsck", str(pool.path)).stdout
        enclosure.wait_connections(0)


def test_a_native_client_reads_and_writes_the_namespaces_itself():
    with files(2) as paths, Enclosure({NQNS[0]: paths}) as enclosure:
        with Pool(devices=urls(enclosure.port, NQNS[0], 2, "&ddgst=1")) as pool:
            before = sum(device["read_bytes"] for device in pool.status()["devices"])
            with kvfs.connect(str(pool.mount), namespace="n", timeout_s=20) as client:
                blocks = [(bytes.fromhex(key.decode()), data) for key, data in pairs(40, 3 * MIB + 4096)]
                client.put(blocks)
                targets = [(key, bytearray(len(data))) for key, data in blocks]
                assert client.get_into(targets) == [len(data) for _, data in blocks]
                assert all(bytes(target) == data for (_, target), (_, data) in zip(targets, blocks, strict=True))
            assert sum(device["read_bytes"] for device in pool.status()["devices"]) - before < 40 * MIB
            assert enclosure.status()["connections"] > 0


def test_discovery_lists_and_a_whole_enclosure_is_formatted_at_once():
    with files(3) as paths, Enclosure({NQNS[0]: paths[:2], NQNS[1]: paths[2:]}) as enclosure:
        with Pool(devices=[f"nvme-tcp://127.0.0.1:{enclosure.port}?depth=16"], started=False) as pool:
            listed = json.loads(pool.command("discover", f"127.0.0.1:{enclosure.port}", "-o", "json").stdout)
            found = [entry["nqn"] for entry in listed["subsystems"] if entry["kind"] == "nvm"]
            assert found == NQNS
            status = pool.status()
            assert [device["path"].partition("/nqn")[2] for device in status["devices"]] == [
                ".2026-11.test:a?nsid=1&depth=16", ".2026-11.test:a?nsid=2&depth=16", ".2026-11.test:b?nsid=1&depth=16",
            ]  # fmt: skip
            url = urls(enclosure.port, NQNS[1], 1)[0]
            held = pool.command("format", str(pool.base / "other"), "--device", url, check=False)
            assert held.returncode == 1 and "holds the label of kvfs pool" in held.stderr


def test_what_cannot_be_opened_is_said():
    with files(1) as paths, Enclosure({NQNS[0]: paths}) as enclosure:
        for url, words in [
            (f"nvme-tcp://127.0.0.1:{enclosure.port}/nqn.2026-11.test:z?nsid=1", "no such subsystem"),
            (f"nvme-tcp://127.0.0.1:{enclosure.port}/{NQNS[0]}?nsid=9", "namespace 9"),
            (f"nvme-tcp://127.0.0.1:1/{NQNS[0]}?nsid=1", "refused"),
        ]:
            with pytest.raises(DeviceError, match=words) as caught:
                nvme_tcp.Controller(url)
            address = url.split("/")[2]
            assert str(caught.value).count(address) == 1, f"the address is told once: {caught.value}"
    with pytest.raises(DeviceError, match="refused") as caught:
        nvme_tcp.discover("nvme-tcp://127.0.0.1:1")
    assert str(caught.value) == "127.0.0.1:1: connect: Connection refused"
    for url in ("nvme-tcp://h/nqn.x?nsid=0", "nvme-tcp://h/nqn.x?nsid=1&nsid=2", "nvme-tcp://h/x?nsid=1",
                "nvme-tcp:///nqn.x?nsid=1", "nvme-tcp://h:99999/nqn.x", "nvme-tcp://h/nqn.x?colour=1",
                "nvme-tcp://h/nqn.x?hdgst=2", f"nvme-tcp://h/nqn.{'x' * 220}?nsid=1"):  # fmt: skip
        with pytest.raises(UsageError):
            nvme_tcp.parse(url)


def read_all(pool, count, size):
    """How many blocks came back, and how many did not; a wrong byte fails, and a read longer than the deadline."""
    good = bad = 0
    noise, calls = Noise(), []
    with running(noise):
        for number in range(count):
            began = time.monotonic()
            try:
                data = (pool.mount / f"f{number}").read_bytes()
            except OSError:
                bad += 1
            else:
                assert data == content(number, size), f"f{number} is wrong"
                good += 1
            calls.append((began, time.monotonic()))
    assert noise.beyond(DEADLINE_S, calls) <= 0.5 * slowness()
    return good, bad


def test_an_enclosure_that_is_killed_is_misses_and_is_used_when_it_is_back():
    with files(4) as paths, Enclosure({NQNS[0]: paths[:2]}) as first, Enclosure({NQNS[1]: paths[2:]}) as second:
        devices = urls(first.port, NQNS[0], 2, "&kato=1000") + urls(second.port, NQNS[1], 2, "&kato=1000")
        arguments = ("--allow-other", "--io-timeout", str(DEADLINE_MS))
        with Pool(devices=devices, format_args=("--stripe-width", "2"), mount_args=arguments) as pool:
            for number in range(60):
                (pool.mount / f"f{number}").write_bytes(content(number, MIB))
            run("sync", "-f", pool.mount)
            pool.umount()
            pool.start()
            second.kill()
            wait_until(lambda: "failed" in {d["state"] for d in pool.status()["devices"]}, "the loss is seen")
            good, bad = read_all(pool, 60, MIB)
            assert bad > 0
            with Enclosure({NQNS[1]: paths[2:]}, port=second.port):
                wait_until(
                    lambda: {d["state"] for d in pool.status()["devices"]} == {"online"}, "the return", timeout_s=30
                )
                again, _ = read_all(pool, 60, MIB)
                assert again >= good
                pool.umount()


def test_a_namespace_that_goes_is_misses_and_is_used_when_it_is_back():
    with files(2) as paths, Enclosure({NQNS[0]: paths}) as enclosure:
        arguments = ("--allow-other", "--io-timeout", str(DEADLINE_MS))
        devices = urls(enclosure.port, NQNS[0], 2)
        with Pool(devices=devices, format_args=("--stripe-width", "1"), mount_args=arguments) as pool:
            for number in range(40):
                (pool.mount / f"f{number}").write_bytes(content(number, MIB))
            pool.umount()
            pool.start()
            enclosure.control(f"detach {NQNS[0]} 2")
            wait_until(lambda: states(pool) == ["online", "failed"], "the loss is seen")
            good, bad = read_all(pool, 40, MIB)
            assert good > 0
            assert bad > 0
            enclosure.control(f"attach {NQNS[0]} 2")
            wait_until(lambda: states(pool) == ["online", "online"], "the return")
            assert read_all(pool, 40, MIB)[0] >= good
            # Its label is what a fault hits when the connection is made again: it alone is looked at later.
            enclosure.control("fault status status=641 op=read namespace=2 queue=io count=2")
            enclosure.control("reset")
            wait_until(lambda: not enclosure.control("faults")["faults"][0]["left"], "the fault hits")
            wait_until(lambda: states(pool) == ["online", "online"], "the return")
            assert read_all(pool, 40, MIB)[0] >= good


def test_connections_that_break_and_are_made_again_take_no_device_out_of_service():
    with files(2) as paths, Enclosure({NQNS[0]: paths}) as enclosure:
        with Pool(devices=urls(enclosure.port, NQNS[0], 2)) as pool:  # with the usual deadline, on a busy machine too
            loads = [MountLoad(pool, which) for which in range(3)]

            def good():
                return sum(load.good for load in loads)

            def lost():
                return "connection lost" in (pool.path / "kvfs.log").read_text()

            with running(*loads):
                for _ in range(5):
                    before = good()
                    wait_until(lambda before=before: good() > before + 100, "the load goes on")
                    enclosure.control("reset")
                    wait_until(lost, "the loss to be noticed")
                before = good()
                wait_until(lambda: good() > before + 100, "the load goes on")
            log = (pool.path / "kvfs.log").read_text()
            assert "failed:" not in log, log
            assert states(pool) == ["online", "online"]


def test_a_silent_enclosure_costs_one_deadline_and_is_used_when_it_speaks_again():
    with files(4) as paths, Enclosure({NQNS[0]: paths[:2]}) as first, Enclosure({NQNS[1]: paths[2:]}) as second:
        devices = urls(first.port, NQNS[0], 2) + urls(second.port, NQNS[1], 2)
        arguments = ("--allow-other", "--io-timeout", str(DEADLINE_MS))
        with Pool(devices=devices, format_args=("--stripe-width", "1"), mount_args=arguments) as pool:
            for number in range(60):
                (pool.mount / f"f{number}").write_bytes(content(number, MIB))
            pool.umount()
            pool.start()
            os.kill(second.pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                good, bad = read_all(pool, 60, MIB)
                assert good > 0
                assert bad > 0
                # The first read that is not answered, and then keep alive has a second: the rest fails at once.
                assert time.monotonic() - began < 5 * DEADLINE_S * slowness(), "a deadline for each block"
                wait_until(lambda: "failed" in states(pool), "the loss is seen")
                began = time.monotonic()
                assert read_all(pool, 60, MIB) == (good, bad)
                assert time.monotonic() - began < 5 * DEADLINE_S * slowness()
            finally:
                os.kill(second.pid, signal.SIGCONT)
            wait_until(lambda: set(states(pool)) == {"online"}, "the return", timeout_s=30)
            assert read_all(pool, 60, MIB)[0] >= good
            pool.umount()


def test_a_pool_that_evicts_outlives_devices_that_take_no_writes():
    with files(2, 64 * MIB) as paths, Enclosure({NQNS[0]: paths}) as enclosure:
        arguments = ("--allow-other", "--io-timeout", str(DEADLINE_MS))
        with Pool(devices=urls(enclosure.port, NQNS[0], 2), mount_args=arguments) as pool:
            loads = [MountLoad(pool, which) for which in range(3)]

            def good():
                return sum(load.good for load in loads)

            with running(*loads):
                wait_until(lambda: pool.status()["counters"]["evicted_segments"] > 5, "the load evicts", interval_s=0.2)
                for _ in range(3):
                    enclosure.control("fault status status=641 op=write queue=io")
                    time.sleep(2)
                    enclosure.control("clear")
                    before = good()
                    # One that failed again and again is looked for every 15 s.
                    wait_until(lambda before=before: good() > before + 20, "the load goes on", timeout_s=60)
            assert not any(load.wrong for load in loads)


@pytest.mark.parametrize("queues", [2, 8])
def test_threads_share_the_queues_that_a_controller_grants(queues):
    """Fewer queues than the daemon has threads: each waits its turn, and nothing counts as an error of the device."""
    blocks = pairs(96, MIB // 4)
    with files(2, 64 * MIB) as paths, Enclosure({NQNS[0]: paths}) as enclosure:
        with Pool(devices=urls(enclosure.port, NQNS[0], 2, f"&queues={queues}")) as pool:

            def store(some):
                for name, data in some:
                    (pool.mount / name.decode()).write_bytes(data)

            def load(some):
                return sum((pool.mount / name.decode()).read_bytes() == data for name, data in some)

            with concurrent.futures.ThreadPoolExecutor(8) as threads:
                list(threads.map(store, [blocks[i::8] for i in range(8)]))
            pool.umount()
            pool.start()  # nothing of it is in a page cache
            with concurrent.futures.ThreadPoolExecutor(8) as threads:
                assert sum(threads.map(load, [blocks[i::8] for i in range(8)])) == len(blocks)
            for device in pool.status()["devices"]:
                assert (device["state"], device["errors"], device["timeouts"]) == ("online", 0, 0)
