"""Every fault that the test enclosure knows, in random order, under load of the mount and of native clients.

KVFS_NVME_FAULTS=4000 makes it longer than the suite's, KVFS_NVME_SEED repeats one.
"""

import collections
import contextlib
import os
import pathlib
import random
import threading
import time

import pytest
from enclosure import Enclosure
from helpers import MIB, Pool, often, slowness, wait_until
from load import Load, MountLoad, NativeLoad, content, files, running, urls
from noise import Noise

from kvfs.frontend.asking import ControlClient

FAULT_COUNT = int(os.environ.get("KVFS_NVME_FAULTS") or often(20, 120))
SEED = int(os.environ.get("KVFS_NVME_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
SANITIZED = bool(os.environ.get("KVFS_TEST_SANITIZED"))
ENCLOSURES = 4
DEADLINE_S = 0.6
# Of commands of the I/O queues; a silence is of all of a connection.
FAULTS = [
    "drop what=command", "drop what=answer", "delay ms=20", "delay ms=900", "reset", "digest what=header",
    "digest what=data", "status status=641", "flip what=wire op=read", "flip what=media op=read", "half",
    "slow factor=50", "silence",
    *(f"protocol what={what}" for what in ("type", "hlen", "plen", "cid", "twice", "term", "flags", "short")),
    *(f"protocol what={what} op=read" for what in ("pdo", "offset", "size")), "protocol what=r2t op=write",
]  # fmt: skip
SILENCE_S = 0.3
# Between two faults of an enclosure: a pool whose devices are all out of service would hide what faults do.
PAUSE_S = 0.25


class Driver(threading.Thread):
    """Gives one enclosure one fault after the other, each when the one before has hit, while it is in service."""

    def __init__(self, enclosure, count, seed):
        super().__init__()
        self.enclosure, self.count, self.random = enclosure, count, random.Random(seed)
        self.halt, self.error, self.hits = threading.Event(), None, collections.Counter()
        self.in_service = threading.Event()

    def run(self):
        try:
            while self.hits.total() < self.count and not self.halt.is_set():
                if self.in_service.wait(1):
                    self._fault(self.random.choice(FAULTS))
                    time.sleep(PAUSE_S)
        except BaseException as error:
            self.error = error

    def _fault(self, fault):
        count = self.random.randrange(1, 4)
        if fault == "silence":
            self.enclosure.control("fault silence")
            time.sleep(SILENCE_S)
            self.hits[fault] += 1
        else:
            self.enclosure.control(f"fault {fault} queue=io count={count}")
            until = time.monotonic() + 2
            while time.monotonic() < until:
                (rule,) = self.enclosure.control("faults")["faults"]
                if not rule["left"]:
                    break
                time.sleep(0.005)
            self.hits[fault] += rule["hits"]
        self.enclosure.control("clear")


def resident_mib(pid):
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) // 1024


def descriptors(pid):
    """How many sockets, how many others."""
    leads = []
    for path in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # the file of this very listing is gone
            leads.append(os.readlink(path))
    sockets = sum(lead.startswith("socket:") for lead in leads)
    return sockets, len(leads) - sockets


def use(pid):
    return descriptors(pid), resident_mib(pid)


def test_all_delays_of_the_time_of_a_call_are_the_machine_s():
    noise = Noise()
    noise.late = [(0.0, 0.9, 0.9), (1.0, 1.4, 0.4), (1.6, 1.9, 0.3), (2.0, 2.4, 0.4), (3.0, 3.5, 0.5)]
    assert noise.beyond(DEADLINE_S, [(1.1, 2.9)]) == pytest.approx(1.8 - DEADLINE_S - 1.1)
    assert noise.beyond(DEADLINE_S, [(1.1, 2.9), (4.0, 5.0)]) == pytest.approx(1.0 - DEADLINE_S)
    assert noise.beyond(DEADLINE_S, []) == 0.0


@pytest.mark.timeout(240 + FAULT_COUNT)
def test_faults_in_random_order_under_load_never_give_wrong_bytes():
    print(f"KVFS_NVME_FAULTS={FAULT_COUNT} KVFS_NVME_SEED={SEED}")
    for number in range(Load.CONTENTS):
        content(number, Load.SIZE)
    with contextlib.ExitStack() as stack:
        paths = stack.enter_context(files(ENCLOSURES, 128 * MIB))
        nqns = [f"nqn.2026-11.test:s{index}" for index in range(ENCLOSURES)]
        enclosures = [stack.enter_context(Enclosure({nqn: [path]})) for nqn, path in zip(nqns, paths, strict=True)]
        devices = [
            url
            for nqn, one in zip(nqns, enclosures, strict=True)
            for url in urls(one.port, nqn, 1, "&hdgst=1&ddgst=1&kato=1000")
        ]
        arguments = ("--allow-other", "--io-timeout", str(round(DEADLINE_S * 1000)))
        with Pool(devices=devices, format_args=("--stripe-width", "1"), mount_args=arguments) as pool:
            loads = [MountLoad(pool, which, DEADLINE_S) for which in range(3)]
            loads += [NativeLoad(pool, which, DEADLINE_S) for which in range(3, 5)]
            drivers = [
                Driver(one, FAULT_COUNT // ENCLOSURES, f"{SEED} {index}") for index, one in enumerate(enclosures)
            ]
            noise = Noise()
            uses, turns, outages = [], 0, collections.Counter()

            def good():
                return sum(load.good for load in loads)

            before, idle = descriptors(os.getpid()), descriptors(pool.pid())
            with running(noise, *loads):
                wait_until(lambda: good() > 500, "the load runs")
                with running(*drivers):
                    seen, seen_at = good(), time.monotonic()
                    while any(driver.is_alive() for driver in drivers):
                        with ControlClient(pool.path) as control:
                            devices = control.call("status")["devices"]
                        for driver, device in zip(drivers, devices, strict=True):
                            (driver.in_service.set if device["state"] == "online" else driver.in_service.clear)()
                            outages[device["index"]] += device["state"] == "failed"
                        turns += 1
                        time.sleep(0.2)
                        if good() > seen + 5:
                            seen, seen_at = good(), time.monotonic()
                        assert time.monotonic() < seen_at + 30 * slowness(), "no block came in 30 s"
                        hits = sum(driver.hits.total() for driver in drivers)
                        if hits * 8 >= FAULT_COUNT * (len(uses) + 1):
                            uses.append((hits, use(pool.pid()), use(os.getpid())))
            hits = sum((driver.hits for driver in drivers), collections.Counter())
            longest = [call for load in loads for call in load.longest]
            beyond = noise.beyond(DEADLINE_S, longest)
            print(f"{hits.total()} hits: {dict(hits)}")
            print(f"{good()} reads, {sum(load.failed for load in loads)} failed, the longest"
                  f" {max((ended - began for began, ended in longest), default=0):.2f} s, {beyond * 1000:.0f} ms over"
                  f" the deadline and the machine's delays; devices were out of service for"
                  f" {100 * outages.total() / (turns * ENCLOSURES):.0f}% of the time")  # fmt: skip
            print("hits, then descriptors and MiB of the daemon, of this process:", *uses)
            assert not any(load.wrong for load in loads)
            assert hits.total() >= FAULT_COUNT // ENCLOSURES * ENCLOSURES
            assert set(hits) == set(FAULTS) or FAULT_COUNT < 1000
            assert beyond <= 0.3 * slowness()
            for which in (1, 2):
                growth = uses[-1][which][1] - uses[0][which][1]
                assert growth < (600 if SANITIZED else 32)  # a sanitizer keeps what is freed
            assert descriptors(os.getpid()) == before, "clients that are closed left something open"
            sockets, others = descriptors(pool.pid())
            # Each thread may have a connection with each enclosure, and each device has two more.
            assert sockets < idle[0] + ENCLOSURES * (len(os.listdir(f"/proc/{pool.pid()}/task")) + 2)
            assert others < idle[1] + 10
            wait_until(lambda: {d["state"] for d in pool.status()["devices"]} == {"online"}, "the return", timeout_s=60)

            def stored():
                with contextlib.suppress(OSError):  # a deadline of 1.5 s is short for a busy machine
                    (pool.mount / "last").write_bytes(content(0, MIB))
                    assert (pool.mount / "last").read_bytes() == content(0, MIB)
                    return True

            wait_until(stored, "a block is stored and read back")
            pool.umount()
            assert "nothing is damaged" in pool.command("fsck", str(pool.path)).stdout
        for one in enclosures:
            one.wait_connections(0)
