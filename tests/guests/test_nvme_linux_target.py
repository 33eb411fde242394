"""Our NVMe/TCP initiator against Linux's target (nvmet-tcp) in a guest, which knows nothing of ours.

Its namespaces: two disks of 512-byte blocks, and a file of 4 KiB blocks.
"""

import contextlib
import json
import mmap
import os
import pathlib
import socket
import sys
import tempfile

import pytest
from helpers import KIB, MIB, Pool, content, requires_program, run, wait_until

from benches.guest import Guest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DISKS, FILE = "nqn.2026-11.test:disks", "nqn.2026-11.test:file"
SIZE = 40 * MIB
BLOCK_SIZE = 256 * KIB
PORT = 4420  # in the guest
TARGET = pathlib.Path(__file__).with_name("linux_target.sh")
NAMESPACE = f"/sys/kernel/config/nvmet/subsystems/{DISKS}/namespaces/2"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def target():
    """The guest, and the port here that leads to its target."""
    with tempfile.TemporaryDirectory(prefix="kvfs-test-", dir="/dev/shm") as directory:
        disks = [pathlib.Path(directory, str(number)) for number in range(2)]
        for disk in disks:
            with disk.open("wb") as file:
                file.truncate(SIZE)
        port = free_port()
        modules = ("nvmet_tcp", "crc32c_generic")
        with Guest([], disks=disks, modules=modules, network=True, forwards={port: PORT}, lifetime_s=2400) as guest:
            guest.run(f"{TARGET} {DISKS} {PORT} /dev/nvme0n1 /dev/nvme1n1")
            guest.run(f"truncate -s {SIZE} /run/tmp/file && {TARGET} {FILE} {PORT} /run/tmp/file")
            yield guest, port


def urls(port, options=""):
    return [
        f"nvme-tcp://127.0.0.1:{port}/{nqn}?nsid={nsid}{options}" for nqn, nsid in ((DISKS, 1), (DISKS, 2), (FILE, 1))
    ]


def test_discovery_finds_its_subsystems(target):
    _, port = target
    listed = run(sys.executable, "-m", "kvfs", "discover", f"127.0.0.1:{port}", "-o", "json").stdout
    found = {
        (entry["nqn"], entry["kind"], entry["transport"], entry["port"]) for entry in json.loads(listed)["subsystems"]
    }
    assert {(DISKS, "nvm", "tcp", str(PORT)), (FILE, "nvm", "tcp", str(PORT))} <= found


def test_the_doctor_describes_its_namespaces(target):
    _, port = target
    words = ("doctor", *urls(port), "-o", "json")
    checks = json.loads(run(sys.executable, "-m", "kvfs", *words).stdout)["checks"][-3:]
    assert [check["name"] for check in checks] == urls(port)
    for check, nqn, block_size in zip(checks, (DISKS, DISKS, FILE), (512, 512, 4096), strict=True):
        assert check["state"] == "ok" and nqn in check["found"] and f"blocks of {block_size} bytes" in check["found"]


@pytest.mark.parametrize("options", ["", "&hdgst=1&ddgst=1"], ids=("plain", "digests"))
def test_a_pool_is_written_verified_evicted_and_remounted(target, options):
    requires_program("fio")
    _, port = target
    arguments = ("--allow-other", "--io-timeout", "60000")  # the guest's emulated CPU is everybody's
    with Pool(devices=urls(port, options), format_args=("--force",), mount_args=arguments) as pool:
        words = [
            "fio", "--name=v", f"--directory={pool.mount}", "--size=16M", "--bs=256k", "--numjobs=2", "--thread",
            "--verify=crc32c", "--verify_fatal=1", "--fallocate=none", "--verify_state_save=0",
        ]  # fmt: skip
        run(*words, "--rw=write", "--do_verify=1", timeout_s=180)
        pool.umount()
        pool.start()
        run(*words, "--rw=read", "--verify_only=1", timeout_s=180)
        for number in range(18):  # more than the pool holds
            (pool.mount / f"f{number}").write_bytes(content(8 * MIB, number))
        names = {path.name for path in pool.mount.iterdir()} & {f"f{number}" for number in range(18)}
        assert "f17" in names and len(names) < 18
        right = 0
        for name in names:
            # The evictor may still be making room: what it takes now is a miss.
            with contextlib.suppress(FileNotFoundError):
                assert (pool.mount / name).read_bytes() == content(8 * MIB, int(name[1:]))
                right += 1
        assert right > 3
        devices = pool.status()["devices"]
        assert {device["state"] for device in devices} == {"online"}
        assert sum(device["errors"] + device["timeouts"] for device in devices) == 0
        pool.umount()
        assert "nothing is damaged" in pool.command("fsck", str(pool.path), "--verify-data").stdout


def test_a_namespace_that_goes_is_misses_and_is_used_when_it_is_back(target):
    """And one URL names both namespaces of the subsystem."""
    guest, port = target
    url = f"nvme-tcp://127.0.0.1:{port}/{DISKS}"
    with Pool(devices=[url], format_args=("--force", "--stripe-width", "1")) as pool:
        assert [device["path"] for device in pool.status()["devices"]] == [f"{url}?nsid=1", f"{url}?nsid=2"]
        for number in range(30):  # several in a segment, which is one device's
            (pool.mount / f"f{number}").write_bytes(content(BLOCK_SIZE, number))
        pool.umount()
        pool.start()

        def good():
            count = 0
            for number in range(30):
                with contextlib.suppress(OSError):
                    fd = os.open(pool.mount / f"f{number}", os.O_RDONLY | os.O_DIRECT)
                    try:
                        with mmap.mmap(-1, BLOCK_SIZE) as memory:
                            assert os.preadv(fd, [memory], 0) == BLOCK_SIZE
                            assert memory[:] == content(BLOCK_SIZE, number)
                            count += 1
                    finally:
                        os.close(fd)
            return count

        assert good() == 30
        guest.run(f"echo 0 > {NAMESPACE}/enable")
        remaining = good()
        assert 0 < remaining < 30
        guest.run(f"echo 1 > {NAMESPACE}/enable")
        wait_until(lambda: {device["state"] for device in pool.status()["devices"]} == {"online"}, "the return")
        assert good() >= remaining
        (pool.mount / "new").write_bytes(content(8 * MIB, 99))
        assert (pool.mount / "new").read_bytes() == content(8 * MIB, 99)
        pool.umount()
