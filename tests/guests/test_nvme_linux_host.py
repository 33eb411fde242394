"""The test enclosure as Linux's own initiator sees it, in a guest.

It judges how the enclosure reads the specifications, as our initiator is tested against that. It refuses CPDA.
"""

import hashlib
import json
import pathlib
import random
import shlex
import struct
import sys
import time

import pytest
from enclosure import NQN, Enclosure
from helpers import MIB, REPOSITORY, wait_until

from benches.guest import Guest

LINUX_HOST = pathlib.Path(__file__).with_name("linux_host.py")
DISCOVERY = "nqn.2014-08.org.nvmexpress.discovery"
OTHER = "nqn.2026-01.test:other"
SIZE = 8 * MIB
STOP = "/run/tmp/stop"  # in the guest
# Linux gives a command this long, then ends the connection and asks again.
IO_TIMEOUT_S = 2
# Faults that a host is expected to survive. No flipped bit under a right digest: those are for it to believe.
FAULTS = (
    "delay ms=400 count=3", "drop what=command count=1", "drop what=answer count=1", "reset count=2",
    "status status=0x0082 count=3", "status status=0x4280 op=write count=2", "digest what=header count=1",
    "digest what=data op=read count=1", "flip what=wire op=read count=1", "half what=close at=100 count=1",
    "half what=hang at=2000 op=read count=1", "slow factor=20 count=20", "silence queue=io", "silence",
    "protocol what=type count=1", "protocol what=plen count=1", "protocol what=cid count=1",
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]


@pytest.fixture(scope="module")
def guest():
    with Guest([], modules=("nvme_tcp", "crc32c_generic"), network=True, lifetime_s=3000) as running:
        running.run(f"echo {IO_TIMEOUT_S} > /sys/module/nvme_core/parameters/io_timeout")
        running.run(f"echo {IO_TIMEOUT_S} > /sys/module/nvme_core/parameters/admin_timeout")
        # A command is asked for again until it is answered.
        running.run("echo 100 > /sys/module/nvme_core/parameters/max_retries")
        yield running


@pytest.fixture(autouse=True)
def no_controller_left(guest):
    """A test that fails leaves a controller behind, whose namespaces the next one would find beside its own."""
    yield
    guest.run('for end in /sys/class/nvme/*/delete_controller; do ! test -e "$end" || echo 1 > "$end"; done')


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / name for name in ("first", "second", "third")]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(SIZE)
    return paths


def words_of(verb, *words):
    return shlex.join([sys.executable, str(LINUX_HOST), verb, *map(str, words)])


def ask(guest, verb, *words, timeout_s=60):
    return json.loads(guest.run(words_of(verb, *words), timeout_s=timeout_s).stdout)


def over(enclosure):
    """Whether the fault has hit as many commands as it was to hit."""
    [fault] = enclosure.control("faults")["faults"]
    return fault["left"] == 0


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_linux_finds_every_subsystem(guest, files):
    with Enclosure({NQN: files[:2], OTHER: files[2:]}) as enclosure:
        controller = ask(guest, "connect", DISCOVERY, enclosure.port, 0)["controller"]
        page = bytes.fromhex(ask(guest, "log", controller)["log"])
        ask(guest, "disconnect", controller)
        assert struct.unpack_from("<QH", page, 8) == (2, 0)
        found = set()
        for entry in (page[1024:2048], page[2048:3072]):
            transport, family, kind = entry[:3]
            assert (transport, family, kind) == (3, 1, 2)
            found.add((entry[256:512].rstrip(b"\0").decode(), int(entry[32:64].rstrip(b" \0"))))
        assert found == {(NQN, enclosure.port), (OTHER, enclosure.port)}
        enclosure.wait_connections(0)


@pytest.mark.parametrize(
    ("options", "digests"),
    [
        ((), ()),
        (("--no-success", "--c2h-size", "8192", "--r2t-size", "12288", "--max-h2c-data", "4096"), ("hdr_digest",)),
        (("--block-size", "512", "--in-capsule", "8192"), ("hdr_digest", "data_digest")),
    ],
    ids=("plain", "header-split", "both-512"),
)
def test_what_linux_writes_is_in_the_file_and_is_read_back(guest, files, options, digests):
    """The first namespace by requests of every size, the second by fio; the third is zeroed and deallocated."""
    with Enclosure({NQN: files}, *options) as enclosure:
        found = ask(guest, "connect", NQN, enclosure.port, 3, "nr_io_queues=2", "queue_size=64", *digests)
        first, second, third = found["devices"]
        written = ask(guest, "fill", first, 1)["sha256"]
        assert ask(guest, "sum", first, 2)["sha256"] == written == sha256(files[0])
        guest.run(
            f"fio --name=verify --filename={second} --size={SIZE} --direct=1 --ioengine=libaio --iodepth=8 --fsync=16 "
            "--rw=randwrite --bsrange=4k-256k --verify=crc32c --do_verify=1 --verify_fatal=1 --randseed=5"
        )
        data = random.Random(3).randbytes(SIZE)
        files[2].write_bytes(data)
        ask(guest, "discard", third, 8192, 16384)
        ask(guest, "zero", third, MIB, 3 * MIB)
        holes = bytearray(data)
        holes[8192:24576], holes[MIB : 4 * MIB] = bytes(16384), bytes(3 * MIB)
        assert files[2].read_bytes() == holes
        assert ask(guest, "sum", third, 4)["sha256"] == hashlib.sha256(holes).hexdigest()
        ask(guest, "disconnect", found["controller"])
        enclosure.wait_connections(0)


def test_linux_is_told_of_namespaces_that_come_and_go(guest, files):
    with Enclosure({NQN: files}) as enclosure:
        controller = ask(guest, "connect", NQN, enclosure.port, 3)["controller"]
        look = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from kvfs.pool import nvme_kernel as n; "
        told = guest.python(look + "print([one.text for one in n.namespaces()])").text
        assert told.count(f"tcp, {NQN}, blocks of 4096 bytes, MDTS 4096 KiB") == 3, told
        assert told.count(f"multipath (numa): {controller} live traddr=10.0.2.2") == 3, told
        enclosure.control(f"detach {NQN} 2")
        assert len(ask(guest, "wait", controller, 2)["devices"]) == 2
        enclosure.control(f"attach {NQN} 2")
        ask(guest, "wait", controller, 3)
        ask(guest, "disconnect", controller)


def test_linux_comes_back_after_a_reset_of_all_connections(guest, files):
    with Enclosure({NQN: files[:1]}) as enclosure:
        found = ask(guest, "connect", NQN, enclosure.port, 1, "reconnect_delay=1")
        [device] = found["devices"]
        written = ask(guest, "fill", device, 7)["sha256"]
        for _ in range(2):
            assert enclosure.control("reset")["connections"] > 1
            assert ask(guest, "sum", device, 8)["sha256"] == written
        ask(guest, "disconnect", found["controller"])


def test_linux_gets_over_every_fault_and_reads_no_wrong_byte(guest, files):
    """Under load, one fault after another; then the enclosure is sound again, and all is as was last written."""
    with Enclosure({NQN: files[:1]}) as enclosure:
        options = ("reconnect_delay=1", "keep_alive_tmo=2", "hdr_digest", "data_digest")
        found = ask(guest, "connect", NQN, enclosure.port, 1, *options)
        storm = guest.start(words_of("storm", found["devices"][0], STOP, 1), timeout_s=500)
        for fault in random.Random(2).sample(FAULTS, len(FAULTS)):
            if fault.startswith("silence"):
                enclosure.control(f"fault {fault}")
                time.sleep(1)
            else:
                enclosure.control(f"fault {fault} skip=20")  # some work in between
                wait_until(lambda: over(enclosure), f"a command for {fault}", timeout_s=90)
            enclosure.control("clear")
        guest.run(f"touch {STOP}")
        done = json.loads(storm.wait().stdout)
        assert done["writes"] > 30 and done["reads"] > 30
        written = ask(guest, "fill", found["devices"][0], 9)["sha256"]
        assert ask(guest, "sum", found["devices"][0], 9)["sha256"] == written == sha256(files[0])
        ask(guest, "disconnect", found["controller"])
        enclosure.wait_connections(0)
