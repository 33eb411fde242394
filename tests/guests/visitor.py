"""The work of one side, a guest or the host, on a shared tree; runs in both as `visitor.py VERB ROOT ...`.

Every file describes itself (tests/faults/workload.py), so that any bytes read tell whether they are whole and which
version of which name they are. Prints one line of JSON: what was done. Wrong bytes end it with a traceback.

    store ROOT PREFIX COUNT SIZE   PREFIX-0, PREFIX-1, ... by write and rename
    read ROOT PREFIX COUNT SECONDS of these again and again; each is whole, or missing
    churn ROOT WRITER SEED SECONDS replace, unlink and rewrite names of its own, read everybody's
    sums ROOT                      the SHA-256 of every file, read buffered and with O_DIRECT
"""

import contextlib
import errno
import hashlib
import json
import mmap
import os
import pathlib
import random
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "faults"))

import workload

NAMES = 8  # of each writer
SIZES = (100, 300_000)


def store(root, prefix, count, size):
    for index in range(int(count)):
        put(root, f"{prefix}-{index}", time.time_ns(), int(size))
    return {"stored": int(count)}


def read(root, prefix, count, seconds):
    done = dict(reads=0, misses=0)
    deadline = time.monotonic() + float(seconds)
    dice = random.Random(prefix)
    while time.monotonic() < deadline:
        name = f"{prefix}-{dice.randrange(int(count))}"
        data = content_of(f"{root}/{name}", direct=dice.random() < 0.5, may_fail=True)
        if data is None:
            done["misses"] += 1
            continue
        assert workload.check(data, name)[0] == name
        done["reads"] += 1
    return done


def churn(root, writer, seed, seconds, patience):
    """For `seconds`, and for `patience` more at most until it has read another's: on a slow machine some begin late."""
    done = dict(reads=0, misses=0, changes=0, others=0)
    seen = {}
    dice = random.Random(int(seed))
    deadline = time.monotonic() + float(seconds)
    while time.monotonic() < deadline or (not done["others"] and time.monotonic() < deadline + float(patience)):
        own = f"{writer}-{dice.randrange(NAMES)}"
        chance = dice.random()
        if chance < 0.25:
            put(root, own, time.time_ns(), dice.randint(*SIZES))
            done["changes"] += 1
        elif chance < 0.30:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{root}/{own}")
                done["changes"] += 1
        else:
            names = [name for name in os.listdir(root) if not name.startswith(".")]
            if not names:
                continue
            name = dice.choice(names)
            data = content_of(f"{root}/{name}", direct=dice.random() < 0.3)
            if data is None:
                done["misses"] += 1
                continue
            key, version = workload.check(data, name)
            assert key == name, f"{name} has the content of {key}"
            assert version >= seen.get(name, 0), f"{name}: version {version} after {seen[name]}: it went back"
            seen[name] = version
            done["reads"] += 1
            done["others"] = sum(not name.startswith(writer) for name in seen)
    return done


def sums(root):
    found = {}
    for path in sorted(pathlib.Path(root).iterdir()):
        for direct in (False, True):
            data = content_of(path, direct=direct)
            assert data is not None, path
            found[f"{path.name}{' direct' if direct else ''}"] = hashlib.sha256(data).hexdigest()
    return found


def put(root, name, version, size):
    """Every name has one writer, whose clock makes the versions."""
    temporary = f"{root}/.{name}"
    with open(temporary, "wb", buffering=0) as file:
        data = workload.make(name, version, size)
        assert file.write(data) == len(data)
    os.rename(temporary, f"{root}/{name}")


def content_of(path, *, direct, may_fail=False):
    """All bytes, or None if it is not there, or with may_fail if it goes while it is read."""
    allowed = (errno.ENOENT, errno.ESTALE, errno.EIO) if may_fail else (errno.ENOENT, errno.ESTALE)
    try:
        descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    except OSError as error:
        if error.errno in allowed:
            return None
        raise
    try:
        size = os.fstat(descriptor).st_size
        if not direct:
            parts = bytearray()
            while part := os.read(descriptor, 1 << 20):
                parts += part
            return bytes(parts)
        room = size + -size % 4096 + 4096
        memory = mmap.mmap(-1, room)
        got = os.preadv(descriptor, [memory], 0)
        return memory[:got]
    except OSError as error:
        if may_fail and error.errno in allowed:
            return None
        raise
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    verb = {"store": store, "read": read, "churn": churn, "sums": sums}[sys.argv[1]]
    print(json.dumps(verb(*sys.argv[2:])))
