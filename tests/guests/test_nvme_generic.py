"""Pools on generic NVMe devices (`ng:/dev/ng0n1`, NVMe passthrough), in a guest with NVMe disks of QEMU's."""

import pathlib
import shlex
import sys
import tempfile

import pytest
from helpers import MIB, REPOSITORY

from benches.guest import Guest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

DISK_SIZE = 48 * MIB
MOUNT = "/run/tmp/mount"


@pytest.fixture(scope="module")
def guest():
    with tempfile.TemporaryDirectory(prefix="kvfs-test-", dir="/dev/shm") as directory:
        disks = [pathlib.Path(directory, str(number)) for number in range(2)]
        for disk in disks:
            with disk.open("wb") as file:
                file.truncate(DISK_SIZE)
        with Guest([], disks=disks, memory_mib=1536, lifetime_s=1600) as running:
            running.run(f"mkdir -p {MOUNT}")
            yield running


def visit(guest, verb, *words):
    visitor = pathlib.Path(__file__).with_name("passthrough_visitor.py")
    command = shlex.join([sys.executable, str(visitor), verb, MOUNT, *map(str, words)])
    guest.run(f"cd {REPOSITORY} && PYTHONPATH={REPOSITORY} {command}", timeout_s=450)


@pytest.mark.parametrize("width", [1, 2])
def test_a_pool_is_written_verified_evicted_and_remounted(guest, width):
    """And clients read it. Width 1: a run of a chunk is several commands."""
    visit(guest, "cycle", width)


def test_a_device_in_use_or_of_another_kind_is_refused(guest):
    visit(guest, "refusals")
