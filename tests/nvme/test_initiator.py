"""Pools on NVMe/TCP devices, by the data plane's own initiator against the test enclosure: the mount, native clients,
discovery, and enclosures that break, vanish and come back.
"""

import contextlib
import functools
import json
import os
import pathlib
import random
import sys
import threading
import time

import pytest
from enclosure import Enclosure

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from helpers import MIB, Pool, requires_program, run, wait_until

import kvfs
from kvfs.errors import DeviceError, UsageError
from kvfs.store import nvme

pytestmark = pytest.mark.timeout(300)

NQNS = ["nqn.2026-11.test:a", "nqn.2026-11.test:b"]
DEADLINE_MS = 1500  # of the daemon's device I/O, in tests of faults
# Every kind that native/enclosure knows, as it hits commands of the I/O queues.
FAULTS = [
    "drop what=command", "drop what=answer", "delay ms=40", "delay ms=2500", "reset", "digest what=header",
    "digest what=data", "status status=641", "flip what=wire op=read", "half", "slow factor=50",
    *(f"protocol what={what}" for what in ("type", "hlen", "plen", "cid", "twice", "term", "flags", "short")),
    *(f"protocol what={what} op=read" for what in ("pdo", "offset", "size")), "protocol what=r2t op=write",
]  # fmt: skip


@contextlib.contextmanager
def files(count, size=256 * MIB):
    """Sparse files in memory, for an enclosure to serve."""
    base = pathlib.Path("/dev/shm") / f"kvfs-test-nvme-{os.getpid()}-{random.randrange(1 << 32):x}"
    base.mkdir()
    try:
        paths = [base / str(index) for index in range(count)]
        for path in paths:
            path.touch()
            os.truncate(path, size)
        yield paths
    finally:
        for path in base.iterdir():
            path.unlink()
        base.rmdir()


def urls(port, nqn, count, options=""):
    return [f"nvme-tcp://127.0.0.1:{port}/{nqn}?nsid={nsid}{options}" for nsid in range(1, count + 1)]


@functools.cache
def content(number, size):
    return random.Random(number).randbytes(size)


def pairs(count, size):
    return [(b"%032x" % number, content(number, size)) for number in range(count)]


@pytest.mark.parametrize("options", ["", "&hdgst=1", "&ddgst=1", "&hdgst=1&ddgst=1&depth=4"])
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
            names = {path.name for path in pool.mount.iterdir()}
            assert "f69" in names and "f0" not in names
            for name in names & {f"f{number}" for number in range(70)}:
                assert (pool.mount / name).read_bytes() == content(int(name[1:]), 8 * MIB)
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
            with kvfs.connect(str(pool.mount), namespace="n") as client:
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
            with pytest.raises(DeviceError, match=words):
                nvme.Controller(url)
    for url in ("nvme-tcp://h/nqn.x?nsid=0", "nvme-tcp://h/nqn.x?nsid=1&nsid=2", "nvme-tcp://h/x?nsid=1",
                "nvme-tcp:///nqn.x?nsid=1", "nvme-tcp://h:99999/nqn.x", "nvme-tcp://h/nqn.x?colour=1",
                "nvme-tcp://h/nqn.x?hdgst=2", f"nvme-tcp://h/nqn.{'x' * 220}?nsid=1"):  # fmt: skip
        with pytest.raises(UsageError):
            nvme.parse(url)


def read_all(pool, count, size):
    """How many blocks came back, and how many did not; a wrong byte fails. No read is longer than the deadline."""
    good = bad = 0
    for number in range(count):
        began = time.monotonic()
        try:
            data = (pool.mount / f"f{number}").read_bytes()
        except OSError:
            bad += 1
        else:
            assert data == content(number, size), f"f{number} is wrong"
            good += 1
        # A read may be several I/Os one after the other: header and data, and once more.
        assert time.monotonic() - began < 4 * DEADLINE_MS / 1000, f"f{number}"
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
            wait_until(lambda: "unreachable" in {d["state"] for d in pool.status()["devices"]}, "the loss is seen")
            good, bad = read_all(pool, 60, MIB)
            assert bad > 0
            with Enclosure({NQNS[1]: paths[2:]}, port=second.port):
                wait_until(
                    lambda: {d["state"] for d in pool.status()["devices"]} == {"online"}, "the return", timeout_s=30
                )
                again, _ = read_all(pool, 60, MIB)
                assert again >= good
                pool.umount()


@pytest.mark.parametrize("seed", [1])
def test_faults_in_random_order_under_load_never_give_wrong_bytes(seed):
    random_ = random.Random(seed)
    with files(4) as paths, Enclosure({NQNS[0]: paths[:2], NQNS[1]: paths[2:]}) as enclosure:
        options = "&hdgst=1&ddgst=1&kato=2000"
        devices = urls(enclosure.port, NQNS[0], 2, options) + urls(enclosure.port, NQNS[1], 2, options)
        arguments = ("--allow-other", "--io-timeout", str(DEADLINE_MS))
        with Pool(devices=devices, mount_args=arguments) as pool:
            descriptors = len(os.listdir(f"/proc/{pool.pid()}/fd"))
            stop, wrong, good = threading.Event(), [], [0]

            def load(which):
                number = which * 100_000
                while not stop.is_set():
                    number += 1
                    path = pool.mount / f"n{number}"
                    with contextlib.suppress(OSError):
                        path.write_bytes(content(number, 300_000))
                    back = random.Random(number).randrange(max(which * 100_000 + 1, number - 50), number + 1)
                    try:
                        data = (pool.mount / f"n{back}").read_bytes()
                    except OSError:
                        continue
                    # A write that failed leaves a shorter file or none, never other bytes.
                    if data != content(back, 300_000)[: len(data)]:
                        wrong.append(back)
                    good[0] += 1

            threads = [threading.Thread(target=load, args=(which,)) for which in range(3)]
            for thread in threads:
                thread.start()
            try:
                for round_ in range(100):
                    if round_ % 20 == 0:
                        enclosure.control("clear")
                    fault = random_.choice(FAULTS)
                    enclosure.control(f"fault {fault} queue=io count={random_.randrange(1, 4)}")
                    time.sleep(random_.uniform(0.05, 0.25))
                    if random_.random() < 0.1:
                        enclosure.control("reset")
                enclosure.control("clear")
            finally:
                stop.set()
                for thread in threads:
                    thread.join(60)
            assert not any(thread.is_alive() for thread in threads), "a call hangs"
            assert not wrong and good[0] > 20
            wait_until(lambda: {d["state"] for d in pool.status()["devices"]} == {"online"}, "the return", timeout_s=30)

            def works():
                try:
                    (pool.mount / "last").write_bytes(content(0, MIB))
                    return (pool.mount / "last").read_bytes() == content(0, MIB)
                except OSError:
                    return False

            wait_until(works, "the pool works again", interval_s=0.2)
            assert len(os.listdir(f"/proc/{pool.pid()}/fd")) < descriptors + 80
            pool.umount()
