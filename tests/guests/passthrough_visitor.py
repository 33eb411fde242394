"""A guest's work with pools on its generic NVMe devices, as `passthrough_visitor.py VERB MOUNT [WIDTH]`.

One process for many commands: under emulation an interpreter takes seconds to start.
"""

import contextlib
import io
import json
import os
import pathlib
import random
import subprocess
import sys

import kvfs
from kvfs.cli import main

MIB = 1 << 20
POOL = "/run/tmp/pool"
DEVICES = ("ng:/dev/ng0n1", "ng:/dev/ng1n1")
KEYS = [b"%016d" % number for number in range(8)]
DATA = [random.Random(number).randbytes(1_500_000 + 4096 * number) for number in range(8)]


def command(*words, expected=0):
    """The output on stdout, or on stderr if it is expected to fail."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(words))
    assert status == expected, (words, status, out.getvalue(), err.getvalue())
    return (err if expected else out).getvalue()


def make(*devices, width=1):
    words = [word for device in devices for word in ("--device", device)]
    command("format", POOL, *words, "--stripe-width", str(width), "--force")


def sectors_moved():
    """By the block layer: passthrough is not counted there."""
    texts = [pathlib.Path(f"/sys/block/nvme{number}n1/stat").read_text().split() for number in range(2)]
    return sum(int(text[field]) for text in texts for field in (2, 6))


def content(number):
    return b"".join(b"file %07d page %07d" % (number, page) * 171 for page in range(8 * MIB // 4275))


def cycle(mount, width):
    """The whole life of a pool, with a native client."""
    make(*DEVICES, width=width)
    command("mount", POOL, mount)
    before = sectors_moved()
    fio = ["fio", "--name=v", f"--directory={mount}", "--size=8M", "--bs=512k", "--numjobs=2", "--thread",
           "--verify=crc32c", "--verify_fatal=1", "--fallocate=none", "--verify_state_save=0"]  # fmt: skip
    subprocess.run([*fio, "--rw=write", "--do_verify=1"], check=True, stdout=subprocess.DEVNULL, timeout=180)
    command("umount", mount)
    command("mount", POOL, mount)
    try:
        subprocess.run([*fio, "--rw=read", "--verify_only=1"], check=True, stdout=subprocess.DEVNULL, timeout=180)
        for number in range(14):  # more than the pool holds
            pathlib.Path(f"{mount}/f{number}").write_bytes(content(number))
        names = set(os.listdir(mount)) & {f"f{number}" for number in range(14)}
        assert "f13" in names and len(names) < 14, names
        right = 0
        for name in names:
            # The evictor may still be making room: what it takes now is a miss.
            with contextlib.suppress(FileNotFoundError):
                assert pathlib.Path(f"{mount}/{name}").read_bytes() == content(int(name[1:])), name
                right += 1
        assert right > 3
        devices = json.loads(command("status", POOL, "-o", "json"))["devices"]
        assert [device["path"] for device in devices] == list(DEVICES)
        assert all(device["write_bytes"] > 40 * MIB for device in devices), devices
        assert sum(device["errors"] for device in devices) == 0, devices
        assert sectors_moved() == before
        said = command("format", "/run/tmp/other", "--device", "/dev/nvme0n1", "--force", expected=1)
        assert "in use" in said
        with kvfs.connect(mount, namespace="n", timeout_s=60) as client:
            client.put(list(zip(KEYS, DATA, strict=True)))
        drop = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
        subprocess.run([*drop, sys.executable, __file__, "get", mount], check=True, timeout=180)
    finally:
        command("umount", mount)
    assert "nothing is damaged" in command("fsck", POOL, "--verify-data")


def get(mount):
    """The kernel lets only CAP_SYS_ADMIN pass commands through; this client has it not, and reads the block device."""
    with kvfs.connect(mount, namespace="n", timeout_s=60) as connected:
        targets = [(key, bytearray(len(one))) for key, one in zip(KEYS, DATA, strict=True)]
        assert connected.get_into(targets) == [len(one) for one in DATA]
        assert all(bytes(target) == one for (_, target), one in zip(targets, DATA, strict=True))


def refusals(_):
    make(DEVICES[0])
    other = "/run/tmp/other"
    for device, words in (
        (DEVICES[0], "holds the label of kvfs pool"), ("/dev/nvme0n1", "holds the label of kvfs pool"),
        ("ng:/dev/nvme0n1", "not a generic NVMe device"), ("ng:/dev/null", "not an NVMe namespace"),
    ):  # fmt: skip
        said = command("format", other, "--device", device, expected=1)
        assert words in said, (device, said)
    checks = {check["name"]: check["found"] for check in json.loads(command("doctor", POOL, "-o", "json"))["checks"]}
    said = "pcie, nqn.2019-08.org.qemu:kvfs0, blocks of 512 bytes, MDTS 512 KiB, volatile write cache, no multipath"
    assert checks["nvme0n1"] == said and checks[DEVICES[0]] == f"NVMe passthrough, {said}", checks
    held = os.open("/dev/nvme1n1", os.O_RDWR | os.O_EXCL)
    assert "in use" in command("format", other, "--device", DEVICES[1], "--force", expected=1)
    os.close(held)


if __name__ == "__main__":
    {"cycle": cycle, "get": get, "refusals": refusals}[sys.argv[1]](*sys.argv[2:])
