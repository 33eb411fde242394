"""Linux's own NVMe/TCP initiator, run in a guest as `linux_host.py VERB WORDS...`; prints one line of JSON.

connect NQN PORT COUNT [OPTION[=VALUE]...]  by /dev/nvme-fabrics, until COUNT block devices are there
disconnect CONTROLLER
wait CONTROLLER COUNT              until it is connected and has that many
log CONTROLLER                     the discovery log, raw, in hexadecimal
fill DEVICE SEED                   every block written, in requests of 4 KiB to 1 MiB
sum DEVICE SEED                    SHA-256 of the device, read in such requests
discard | zero DEVICE OFFSET SIZE  BLKDISCARD, BLKZEROOUT
storm DEVICE STOP SEED             blocks that describe themselves are written and read until a file STOP is there;
                                   requests may fail. A block that is read is what was last written there; where a
                                   write failed, also the one before
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import mmap
import os
import pathlib
import random
import re
import struct
import sys
import time

HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555"
ADDRESS = "10.0.2.2"
BLOCK, MIB = 4096, 1 << 20
TIMEOUT_S = 60
BLKDISCARD, BLKZEROOUT = 0x1277, 0x127F
# Outcomes: statuses by name, and the loss of a connection.
FAILURES = (errno.EIO, errno.ENODATA, errno.ENOSPC, errno.EREMOTEIO, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOLINK,
            errno.EILSEQ)  # fmt: skip
NVME_IOCTL_ADMIN_CMD = 0xC0484E41


def connect(nqn, port, count, *options):
    words = ["transport=tcp", f"traddr={ADDRESS}", f"trsvcid={port}", f"nqn={nqn}", f"hostnqn={HOST}"]
    words += [f"hostid={HOST.rpartition(':')[2]}", *options]
    with open("/dev/nvme-fabrics", "r+b", buffering=0) as fabrics:
        fabrics.write(",".join(words).encode())
        answer = fabrics.read(200).decode()
    name = "nvme" + answer.partition("instance=")[2].partition(",")[0]
    deadline = time.monotonic() + TIMEOUT_S
    while len(found := devices(name)) != int(count) or state(name) != "live" or not os.path.exists(f"/dev/{name}"):
        assert time.monotonic() < deadline, f"{name} is {state(name)}; {found}"
        time.sleep(0.05)
    return {"controller": name, "devices": found}


def state(controller):
    return pathlib.Path(f"/sys/class/nvme/{controller}/state").read_text().strip()


def wait_devices(controller, count):
    """Until the controller has that many namespaces, and is connected."""
    deadline = time.monotonic() + TIMEOUT_S
    while state(controller) != "live" or len(found := devices(controller)) != int(count):
        assert time.monotonic() < deadline, f"{controller} is {state(controller)}; {devices(controller)}"
        time.sleep(0.05)
    return {"devices": found}


def devices(controller):
    """The block devices of its namespaces that one can open; a path below a multipath head has a head beside it."""
    found = []
    for path in pathlib.Path(f"/sys/class/nvme/{controller}").glob("nvme*n*"):
        head = re.sub(r"c\d+", "", path.name)
        # A disk that is being added or removed has its node in /dev before, and after, its entry in /sys/block.
        with contextlib.suppress(FileNotFoundError):
            if os.path.exists(f"/dev/{head}") and int(pathlib.Path(f"/sys/block/{head}/size").read_text()):
                found.append(f"/dev/{head}")
    return sorted(found)


def disconnect(controller):
    pathlib.Path(f"/sys/class/nvme/{controller}/delete_controller").write_text("1")
    return {}


def log(controller):
    size = 16 * 1024
    data = ctypes.create_string_buffer(size)
    # struct nvme_passthru_cmd: Get Log Page, log 0x70
    dword10 = (size // 4 - 1) << 16 | 0x70
    words = (2, 0, 0, 0, 0, 0, 0, ctypes.addressof(data), 0, size, dword10, *[0] * 7)
    command = bytearray(struct.pack("<BBHIIIQQ10I", *words))
    with open(f"/dev/{controller}", "r+b", buffering=0) as file:
        fcntl.ioctl(file, NVME_IOCTL_ADMIN_CMD, command)
    return {"log": data.raw.hex()}


def requests(size, seed):
    """(offset, size) in random order, each block once."""
    dice, found, at = random.Random(seed), [], 0
    while at < size:
        length = min(size - at, dice.choice((1, 1, 2, 3, 8, 33, 128, 256)) * BLOCK)
        found.append((at, length))
        at += length
    dice.shuffle(found)
    return found


def size_of(fd):
    return os.lseek(fd, 0, os.SEEK_END)


def fill(device, seed):
    fd = os.open(device, os.O_RDWR | os.O_DIRECT)
    memory = mmap.mmap(-1, size_of(fd))
    memory[:] = random.Random(int(seed)).randbytes(len(memory))
    view = memoryview(memory)
    for at, size in requests(len(memory), int(seed)):
        assert os.pwrite(fd, view[at : at + size], at) == size
    os.fsync(fd)
    return {"sha256": hashlib.sha256(memory).hexdigest()}


def sum_of(device, seed):
    fd = os.open(device, os.O_RDONLY | os.O_DIRECT)
    memory = mmap.mmap(-1, size_of(fd))
    view = memoryview(memory)
    for at, size in requests(len(memory), int(seed)):
        assert os.preadv(fd, [view[at : at + size]], at) == size
    return {"sha256": hashlib.sha256(memory).hexdigest()}


def discard(device, offset, size, request=BLKDISCARD):
    fd = os.open(device, os.O_RDWR | os.O_DIRECT)
    fcntl.ioctl(fd, request, struct.pack("<QQ", int(offset), int(size)))
    return {}


def zero(device, offset, size):
    return discard(device, offset, size, BLKZEROOUT)


def block_of(index, version):
    """Every 64 bytes of a block name its version."""
    return struct.pack("<QQ", index, version).ljust(64, b"s") * (BLOCK // 64)


def storm(device, stop, seed):
    fd = os.open(device, os.O_RDWR | os.O_DIRECT)
    dice = random.Random(int(seed))
    count = size_of(fd) // BLOCK
    memory = mmap.mmap(-1, 64 * BLOCK)
    view = memoryview(memory)
    possible = {}  # index -> versions that it may hold; absent: never written by this storm
    done = dict(writes=0, reads=0, failed=0, longest_s=0.0)
    version = 0
    while not os.path.exists(stop):
        length = dice.choice((1, 1, 1, 2, 16, 64))
        first = dice.randrange(count - length)
        part = view[: length * BLOCK]
        start = time.monotonic()
        writing = dice.random() < 0.5
        try:
            if writing:
                version += 1
                for index in range(length):
                    memory[index * BLOCK : (index + 1) * BLOCK] = block_of(first + index, version)
                assert os.pwrite(fd, part, first * BLOCK) == len(part)
            else:
                assert os.preadv(fd, [part], first * BLOCK) == len(part)
        except OSError as error:
            if error.errno not in FAILURES:
                raise
            done["failed"] += 1
            for index in range(first, first + length) if writing else ():
                possible.setdefault(index, {None}).add(version)
        else:
            done["writes" if writing else "reads"] += 1
            for index in range(first, first + length):
                if writing:
                    possible[index] = {version}
                elif index in possible:
                    found = bytes(view[(index - first) * BLOCK :][:BLOCK])
                    told = struct.unpack_from("<QQ", found)[1]
                    if None in possible[index] and told not in possible[index]:
                        continue  # still what was there before the storm
                    assert told in possible[index] and found == block_of(index, told), (
                        f"block {index} is {found[:16].hex()}, not of versions {possible[index]}"
                    )
                    possible[index] = {told}  # a version that was read once stays
        done["longest_s"] = max(done["longest_s"], time.monotonic() - start)
    return done


VERBS = {
    "connect": connect, "disconnect": disconnect, "wait": wait_devices, "log": log, "fill": fill, "sum": sum_of,
    "discard": discard, "zero": zero, "storm": storm,
}  # fmt: skip

if __name__ == "__main__":
    print(json.dumps(VERBS[sys.argv[1]](*sys.argv[2:])))
