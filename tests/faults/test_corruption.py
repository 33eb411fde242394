"""Damaged devices: whatever is flipped, torn, wiped or written late, a read is right, EIO or a miss, and it is counted.

Most tests damage a copy of one pool with a known content. The pool comes in two states: unmounted, and as kill -9 left
it (quiet for long enough that nothing of it was only in memory). KVFS_FAULTS_ALL=1 runs every damage in every state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import mmap
import os
import pathlib
import random
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import helpers
import image
import pytest
from helpers import KIB, MIB, Pool, assert_same, content, raises_errno, read_file, run, wait_until

SEED = int(os.environ.get("KVFS_CORRUPTION_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
ALL = bool(os.environ.get("KVFS_FAULTS_ALL"))


def quiet(pool: Pool) -> None:
    """Wait until all of it is on the devices."""
    wait_until(lambda: pool.status()["counters"]["index_pending"] == 0, "the commit of the index")
    pool.wait_summaries()


@dataclasses.dataclass
class Stored:
    """The contents of a pool: contents and inode numbers by path; and contents that were removed or replaced, by
    path."""

    template: dict[str, pathlib.Path]
    files: dict[str, bytes]
    inodes: dict[str, int]
    removed: dict[str, list[bytes]]
    old_names: dict[str, str]


def put(path: pathlib.Path, data: bytes) -> None:
    """As engines do: a temporary file, then a rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    helpers.write_file(temporary, data)
    os.rename(temporary, path)


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    helpers.requires_fuse()
    base = tmp_path_factory.mktemp("pools")
    chooser = random.Random(1)
    files: dict[str, bytes] = {}
    removed: dict[str, list[bytes]] = {}
    old_names: dict[str, str] = {}
    with Pool(files=4, size="32M") as pool:
        for name in ("kv/aa", "kv/bb", "other"):
            (pool.mount / name).mkdir(parents=True)
        sizes = [0, 1, 4095, 4096, 4097, 100_000, MIB + 100, 3 * MIB + 5]
        sizes += [chooser.randrange(1, 500 * KIB) for _ in range(48)]
        for index, size in enumerate(sizes):
            name = f"{('kv/aa', 'kv/bb', 'other')[index % 3]}/{index:03d}"
            files[name] = content(size, ("first", index))
            put(pool.mount / name, files[name])
        for index, name in enumerate(sorted(files)[10:40]):
            if index % 3 == 0:
                removed[name] = [files.pop(name)]
                os.unlink(pool.mount / name)
            elif index % 3 == 1:
                new = f"other/moved-{index}"
                files[new] = files.pop(name)
                removed[name] = []
                old_names[new] = name
                os.rename(pool.mount / name, pool.mount / new)
            else:
                removed[name] = [files[name]]
                files[name] = content(len(files[name]) + 1, ("second", index))
                put(pool.mount / name, files[name])
        quiet(pool)  # claims from here on are about older changes
        inodes = {name: os.stat(pool.mount / name).st_ino for name in files}
        pool.kill()
        helpers.detach(pool.mount)
        template = {"killed": base / "killed", "clean": base / "clean"}
        run("cp", "--archive", "--sparse=always", pool.path, template["killed"])
        pool.start()
        quiet(pool)
        pool.umount()
        run("cp", "--archive", "--sparse=always", pool.path, template["clean"])
    yield Stored(template, files, inodes, removed, old_names)


# ---- reading ----


def read_direct(path: str | os.PathLike[str]) -> bytes:
    """Read a whole file past the page cache."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        size = os.fstat(descriptor).st_size
        with mmap.mmap(-1, size + 4096) as memory:
            at = 0
            while at < size:
                done = os.preadv(descriptor, [memoryview(memory)[at : at + 4 * MIB]], at)
                assert done > 0, f"{path}: end at {at} of {size}"
                at += done
            return memory[:at]
    finally:
        os.close(descriptor)


def survey(root: pathlib.Path, names: Iterator[str] | list[str], contents: dict[str, bytes]) -> dict[str, int]:
    """Read each file; demand that what is read is right. Returns the errno of those that cannot be read."""
    failed = {}
    for name in names:
        try:
            data = read_direct(root / name)
        except OSError as error:
            assert error.errno in (errno.EIO, errno.ENOENT), f"{name}: {error}"
            failed[name] = error.errno or 0
        else:
            assert_same(data, contents[name], name)
    return failed


def listing(root: pathlib.Path) -> set[str]:
    return {
        str(pathlib.Path(directory, name).relative_to(root)) for directory, _, names in os.walk(root) for name in names
    }


def check_content(pool: Pool, stored: Stored, lost: set[str]) -> dict[str, int]:
    """Every file is right, those in `lost` perhaps not there; nothing that was removed is back. Returns errors."""
    failed = survey(pool.mount, list(stored.files), stored.files)
    assert not failed.keys() - lost, f"lost without reason: {failed}; seed {SEED}"
    back = [name for name in stored.removed if name not in stored.files and os.path.lexists(pool.mount / name)]
    assert not back, f"removed and back: {back}"
    strange = listing(pool.mount) - stored.files.keys()
    assert not strange, f"files that never had these names: {strange}"
    return failed


def check_content_by_any_name(pool: Pool, stored: Stored) -> None:
    """When names were lost twice over: each content is there under a name it had, and no file holds anything else."""
    wanted = {name: {stored.files[name], *stored.removed.get(name, [])} for name in stored.files}
    for name, contents in stored.removed.items():
        wanted.setdefault(name, set()).update(contents)
    for new, old in stored.old_names.items():
        wanted.setdefault(old, set()).add(stored.files[new])
    for name in list(wanted):  # and the name each was written under
        wanted[str(pathlib.Path(name).with_name(f".{pathlib.Path(name).name}.tmp"))] = wanted[name]
    found = {name: read_file(pool.mount / name) for name in listing(pool.mount)}
    assert found.keys() <= wanted.keys(), f"strange names: {found.keys() - wanted.keys()}"
    wrong = [name for name, data in found.items() if data not in wanted[name]]
    assert not wrong, f"wrong bytes: {wrong}"
    missing = [name for name, data in stored.files.items() if data not in found.values()]
    assert not missing, f"missing under any name: {missing}"


# ---- damaging ----


def flip(data: bytes, chooser: random.Random) -> bytes:
    return image.flipped(data, chooser.randrange(len(data) * 8))


def tear(data: bytes, chooser: random.Random) -> bytes:
    """Only the first sectors have arrived; behind them is what was there before."""
    at = chooser.randrange(0, len(data) // 512) * 512
    return data[:at] + chooser.randbytes(len(data) - at)


def wipe(data: bytes, chooser: random.Random) -> bytes:
    return bytes(len(data))


DAMAGES = {"flipped": flip, "torn": tear, "wiped": wipe}
STRUCTURES = (
    "block header",
    "data",
    "segment header",
    "older summaries",
    "newest summaries",
    "both summaries",
    "first labels",
    "second labels",
)


def damage(pool: Pool, stored: Stored, structure: str, how: str, chooser: random.Random) -> set[str]:
    """Damage one structure (labels and summaries: of every device and segment). Returns the files it may cost."""
    devices = image.Image(pool.path)
    change = DAMAGES[how]
    victim = chooser.choice(sorted(name for name, data in stored.files.items() if len(data) > 8192))
    block = devices.block_of(stored.inodes[victim])
    if structure == "block header":
        page = block.page + chooser.randrange(block.header_pages)
        devices.write(block.segment, page, change(devices.read(block.segment, page), chooser))
        return {victim}
    if structure == "data":
        segment, page, file_page = chooser.choice(block.data_pages())
        data = devices.read(segment, page)
        inside = min(4096, len(stored.files[victim]) - file_page * 4096)
        changed = change(data, chooser)
        while changed[:inside] == data[:inside]:
            changed = change(data, chooser)
        devices.write(segment, page, changed)
        return {victim}
    if structure == "segment header":
        devices.write(block.segment, 0, change(devices.read(block.segment, 0), chooser))
        inodes = {inode: name for name, inode in stored.inodes.items()}
        return {
            inodes[other.inode.inode]
            for other in [*devices.blocks(), block]
            if other.inode.inode in inodes
            and block.segment in {other.segment, *(place[0] for place in other.data_pages())}
        } | {name for name, inode in stored.inodes.items() if _lies_in(pool, devices, inode, block.segment)}
    if structure in ("first labels", "second labels"):
        copy = int(structure == "second labels")
        for device in range(4):
            devices.write_label(device, copy, change(devices.read_label(device, copy), chooser))
        return set()
    for segment in devices.used_segments():
        newest = devices.newest_summary(segment)
        slots = (
            {0, 1}
            if structure == "both summaries" or newest is None
            else ({newest} if structure == "newest summaries" else {1 - newest})
        )
        for slot in slots:
            page, count = devices.geometry.summary_page(slot), devices.geometry.summary_pages
            summary = devices.summary(segment, slot)
            if summary is None:
                continue
            size = min(count * 4096, -(-(88 + len(summary.entries)) // 512) * 512)
            data = devices.read(segment, page, count)
            # Within what the summary says; the rest of the slot means nothing.
            devices.write(segment, page, change(data[:size], chooser) + data[size:])
            if how == "flipped" and devices.summary(segment, slot) is not None:
                devices.write(segment, page, image.flipped(data, 8 * chooser.randrange(88)))
    return set()


def _lies_in(pool: Pool, devices: image.Image, inode: int, segment: int) -> bool:
    """Whether a block's header lies in this segment, whose own header is damaged now."""
    data = devices.segment_bytes(segment)
    needle = inode.to_bytes(8, "little")
    return any(
        data[at : at + 8] == image.MAGIC_BLOCK.to_bytes(8, "little") and needle in data[at : at + 4096]
        for at in range(0, len(data), 4096)
    )


def _cases() -> list[Any]:
    """Each structure is damaged in each state, and without --run-slow in one."""
    cases: list[Any] = []
    hows = itertools.cycle(DAMAGES)
    for structure in STRUCTURES:
        for state, index in (("clean", "kept"), ("clean", "deleted"), ("killed", "kept"), ("killed", "deleted")):
            cases += [(structure, how, state, index) for how in (DAMAGES if ALL else [next(hows)])]
        next(hows)
    states = len(cases) // len(STRUCTURES)
    return [
        case if place % states == place // states % states else helpers.slow(*case) for place, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("structure", "how", "state", "index"), _cases())
def test_damage_costs_at_most_the_blocks_it_hit(
    stored: Stored, own_pool: Callable[..., Pool], structure: str, how: str, state: str, index: str
) -> None:
    chooser = random.Random(f"{SEED} {structure} {how} {state} {index}")
    pool = own_pool(template=stored.template[state], started=False)
    lost = damage(pool, stored, structure, how, chooser)
    if index == "deleted":
        shutil.rmtree(pool.path / "index")
    pool.start()
    if index == "deleted":
        twice = structure in ("newest summaries", "both summaries")
        pool.wait_rebuilt()
        if twice:
            check_content_by_any_name(pool, stored)
            return
    failed = check_content(pool, stored, lost)
    if structure in ("block header", "data") and index == "kept":
        assert failed.keys() == lost, "the damage was not noticed"
    if errno.EIO in failed.values() or (failed and index == "kept" and state == "clean"):
        counters = pool.status()["counters"]
        assert counters["checksum_errors"] > 0, counters
    # A block that was found bad stays gone, a good one stays good, and the next mount agrees.
    pool.umount()
    pool.start()
    again = survey(pool.mount, list(stored.files), stored.files)
    assert again.keys() <= lost


@pytest.mark.parametrize(
    "structure", [*STRUCTURES[::4], *(helpers.slow(one) for one in STRUCTURES if one not in STRUCTURES[::4])]
)
def test_fsck_reports_damage_and_repair_mends_it(stored: Stored, own_pool: Callable[..., Pool], structure: str) -> None:
    """Reporting changes no byte; after --repair a check finds nothing, and what was not hit is there and right."""
    chooser = random.Random(f"{SEED} fsck {structure}")
    pool = own_pool(template=stored.template["clean"], started=False)
    assert pool.command("fsck", str(pool.path), "--verify-data", check=False).returncode == 0, "damaged from the start"
    lost = damage(pool, stored, structure, "torn", chooser)
    before = {path: path.read_bytes() for path in sorted((pool.path / "devices").iterdir())}
    report = pool.command("fsck", str(pool.path), "--verify-data", check=False)
    said = report.stdout + report.stderr
    if structure == "segment header":  # nothing is lost by it: a note
        (segment,) = _damaged_headers(pool)
        assert f"segment {segment}" in said, said
    elif structure != "older summaries":  # nobody reads those
        assert report.returncode == 1, f"nothing reported: {said}"
        words = {"labels": "label", "summaries": "summar", "header": "block", "data": "block"}
        assert words[structure.split()[-1]] in said, said
    assert all(path.read_bytes() == data for path, data in before.items()), "a report changed the devices"
    repair = pool.command("fsck", str(pool.path), "--verify-data", "--repair", check=False)
    assert repair.returncode == 0, f"not repaired: {repair.stdout}{repair.stderr}"
    after = pool.command("fsck", str(pool.path), "--verify-data", check=False)
    assert after.returncode == 0, f"left after the repair: {after.stdout}{after.stderr}"
    pool.start()
    check_content(pool, stored, lost)


def _damaged_headers(pool: Pool) -> list[int]:
    """Segments with a summary but without a valid header."""
    devices = image.Image(pool.path)
    return [
        segment
        for segment in range(len(devices.members))
        if devices.generation(segment) is None and any(devices.summary(segment, slot) for slot in (0, 1))
    ]


def test_fsck_of_a_killed_pool_finds_nothing_wrong(stored: Stored, own_pool: Callable[..., Pool]) -> None:
    """An unclean end is no damage; fsck neither complains of it nor hides the blocks from the next mount."""
    pool = own_pool(template=stored.template["killed"], started=False)
    report = pool.command("fsck", str(pool.path), "--verify-data", check=False)
    assert report.returncode == 0, report.stdout + report.stderr
    pool.start()
    assert check_content(pool, stored, set()) == {}


# ---- the pool's own files ----


@pytest.mark.parametrize("state", [helpers.slow("clean"), "killed"])
@pytest.mark.parametrize(
    "how", ["deleted", *map(helpers.slow, ("empty", "noise", "cut off", "a bit flipped everywhere"))]
)
def test_without_its_index_a_pool_finds_every_block_again(
    stored: Stored, own_pool: Callable[..., Pool], state: str, how: str
) -> None:
    pool = own_pool(template=stored.template[state], started=False)
    database = pool.path / "index" / "data.mdb"
    assert database.exists()
    size = database.stat().st_size
    if how == "deleted":
        shutil.rmtree(pool.path / "index")
    elif how == "empty":
        os.truncate(database, 0)
    elif how == "noise":
        database.write_bytes(random.Random(SEED).randbytes(size))
    elif how == "cut off":
        os.truncate(database, database.stat().st_blocks * 512 // 2 // 4096 * 4096)  # the rest is a hole
    else:
        data = bytearray(database.read_bytes())
        for at in range(0, len(data), 512):
            data[at] ^= 0x10
        database.write_bytes(data)
    pool.start()
    pool.wait_rebuilt()
    assert check_content(pool, stored, set()) == {}
    for name in ("kv/aa/new", "kv/bb/new"):
        put(pool.mount / name, content(MIB, name))
    pool.umount()
    pool.start()
    assert survey(pool.mount, list(stored.files), stored.files) == {}
    assert_same(read_file(pool.mount / "kv/aa/new"), content(MIB, "kv/aa/new"), "written after the rebuild")


def test_a_deleted_pool_toml_is_written_again_from_the_labels(stored: Stored, own_pool: Callable[..., Pool]) -> None:
    pool = own_pool(template=stored.template["clean"], started=False)
    text = (pool.path / "pool.toml").read_text()
    (pool.path / "pool.toml").unlink()
    pool.start()
    assert (pool.path / "pool.toml").read_text() == text
    assert check_content(pool, stored, set()) == {}


def test_pool_toml_index_and_one_label_of_each_device_lost_together(
    stored: Stored, own_pool: Callable[..., Pool]
) -> None:
    pool = own_pool(template=stored.template["clean"], started=False)
    devices = image.Image(pool.path)
    for device in range(4):
        devices.write_label(device, device % 2, bytes(65536))
    (pool.path / "pool.toml").unlink()
    shutil.rmtree(pool.path / "index")
    pool.start()
    pool.wait_rebuilt()
    assert check_content(pool, stored, set()) == {}
    pool.umount()
    for device, copy in itertools.product(range(4), (0, 1)):
        assert devices.read_label(device, copy)[:8] == b"KVFSLABL", f"label {copy} of device {device} is still missing"


# ---- late writes of a dead daemon ----


def epoch_of(pool: Pool) -> int:
    return int(pool.status()["pool"]["epoch"])


@pytest.mark.slow
@pytest.mark.parametrize("copies", [(0,), (1,)], ids=["first", "second"])
def test_labels_that_land_late_do_not_turn_the_epoch_back(
    own_pool: Callable[..., Pool], copies: tuple[int, ...]
) -> None:
    """The dead daemon's label writes arrive after the new mount: generations would repeat if its epoch came back."""
    pool = own_pool(files=4, size="32M")
    files = {}
    for index in range(20):
        files[f"a{index}"] = content(200 * KIB, ("a", index))
        put(pool.mount / f"a{index}", files[f"a{index}"])
    devices = image.Image(pool.path)
    old = {(device, copy): devices.read_label(device, copy) for device in range(4) for copy in copies}
    quiet(pool)
    pool.kill()
    pool.remount()
    second = epoch_of(pool)
    for index in range(20):
        files[f"b{index}"] = content(200 * KIB, ("b", index))
        put(pool.mount / f"b{index}", files[f"b{index}"])
    quiet(pool)
    for (device, copy), data in old.items():
        devices.write_label(device, copy, data)
    pool.kill()
    pool.remount()
    assert epoch_of(pool) > second
    assert survey(pool.mount, list(files), files) == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_block_writes_that_land_late_never_give_wrong_bytes(
    own_pool: Callable[..., Pool], tmp_path: pathlib.Path
) -> None:
    """A daemon dies with writes in flight; they arrive while its successor serves, reuses segments and removes files.

    The past is forged: a copy of the pool from before some blocks were written takes its place. The bytes that those
    blocks changed on the devices are written into it later.
    """
    pool = own_pool(files=4, size="16M")
    old, late, new = {}, {}, {}
    for index in range(60):
        old[f"old{index}"] = content(300 * KIB, ("old", index))
        put(pool.mount / f"old{index}", old[f"old{index}"])
    quiet(pool)
    before = tmp_path / "before"
    run("cp", "--archive", "--sparse=always", pool.path, before)
    for index in range(40):
        name = f"late{index}" if index % 2 else f"old{index}"
        late[name] = content(300 * KIB, ("late", index))
        put(pool.mount / name, late[name])
    pool.kill()
    helpers.detach(pool.mount)
    after = {device: (pool.path / "devices" / str(device)).read_bytes() for device in range(4)}
    shutil.rmtree(pool.path)
    run("cp", "--archive", "--sparse=always", before, pool.path)
    pool.start()
    assert survey(pool.mount, list(old), old) == {}, "the forged past is not sound"
    for index in range(0, 60, 3):
        os.unlink(pool.mount / f"old{index}")
        del old[f"old{index}"]
    for index in range(100):
        new[f"new{index}"] = content(300 * KIB, ("new", index))
        put(pool.mount / f"new{index}", new[f"new{index}"])
    quiet(pool)
    devices, written = image.Image(pool.path), 0
    for device, data in after.items():
        past = (before / "devices" / str(device)).read_bytes()
        for at in range(65536, len(data) - 65536, 4096):
            if data[at : at + 4096] != past[at : at + 4096]:
                devices.write_device(device, at, data[at : at + 4096])
                written += 1
    assert written > 1000
    served = {**old, **new}
    failed = survey(pool.mount, list(served), served)
    assert len(failed) < len(served)
    for index in range(0, 60, 3):
        with raises_errno(errno.ENOENT):
            os.stat(pool.mount / f"old{index}")
    pool.kill()
    pool.remount()
    served = {name: data for name, data in served.items() if name not in failed}
    more = survey(pool.mount, list(served), served)
    pool.kill()
    helpers.detach(pool.mount)
    shutil.rmtree(pool.path / "index")
    pool.start()
    pool.wait_rebuilt()
    for name in listing(pool.mount):
        with contextlib.suppress(OSError):
            data = read_direct(pool.mount / name)
            key = name.removeprefix(".").removesuffix(".tmp")
            possible = [contents[key] for contents in (old, new, late) if key in contents]
            possible += [content(300 * KIB, ("old", int(key[3:])))] if key.startswith("old") else []
            assert data in possible, f"{name}: wrong bytes"
    print(f"{written} pages late, {len(failed)} + {len(more)} of {len(served)} blocks hit")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_summaries_that_land_late_do_not_change_what_is_served(own_pool: Callable[..., Pool]) -> None:
    """Old summaries over newer ones: the index is the truth of a pool that has one."""
    pool = own_pool(files=4, size="16M")
    files = {}
    for index in range(60):
        files[f"a{index}"] = content(200 * KIB, ("a", index))
        put(pool.mount / f"a{index}", files[f"a{index}"])
    quiet(pool)
    devices = image.Image(pool.path)
    pages = devices.geometry.summary_pages
    old = {
        (segment, slot): devices.read(segment, devices.geometry.summary_page(slot), pages)
        for segment in devices.used_segments()
        for slot in (0, 1)
    }
    pool.kill()
    pool.remount()
    for index in range(60):
        if index % 2:
            os.unlink(pool.mount / f"a{index}")
            del files[f"a{index}"]
    for index in range(40):
        files[f"b{index}"] = content(200 * KIB, ("b", index))
        put(pool.mount / f"b{index}", files[f"b{index}"])
    quiet(pool)
    for (segment, slot), data in old.items():
        devices.write(segment, devices.geometry.summary_page(slot), data)
    for _ in range(2):
        assert survey(pool.mount, list(files), files) == {}
        assert listing(pool.mount) == files.keys()
        pool.kill()
        pool.remount()
    assert survey(pool.mount, list(files), files) == {}
    assert listing(pool.mount) == files.keys()


# ---- bits that flip under a running daemon ----


@dataclasses.dataclass(frozen=True)
class Target:
    """A place for a flipped bit: on a device, and the file it belongs to, if any."""

    device: int
    offset: int
    kind: str
    name: str | None
    significant: int = 4096


def _targets(devices: image.Image, inodes: dict[int, str], files: dict[str, bytes]) -> dict[str, list[Target]]:
    found: dict[str, list[Target]] = {"data": [], "header": [], "other": []}
    newest: dict[int, image.Block] = {}
    for block in devices.blocks():
        name = inodes.get(block.inode.inode)
        if name is not None and (name not in newest or newest[block.inode.inode].inode.version < block.inode.version):
            newest[block.inode.inode] = block
    for number, block in newest.items():
        name = inodes[number]
        for page in range(block.header_pages):
            found["header"].append(Target(*devices.place(block.segment, block.page + page), "header", name))
        for segment, page, file_page in block.data_pages():
            inside = min(4096, len(files[name]) - file_page * 4096)
            found["data"].append(Target(*devices.place(segment, page), "data", name, inside))
    for segment in devices.used_segments():
        found["other"].append(Target(*devices.place(segment, 0), "segment header", None))
        for page in range(devices.geometry.end_page, devices.geometry.segment_pages):
            found["other"].append(Target(*devices.place(segment, page), "summary", None))
    for device, copy, page in itertools.product(range(len(devices.paths)), (0, 1), range(16)):
        found["other"].append(Target(device, devices.label_offset(device, copy) + page * 4096, "label", None))
    return found


@pytest.mark.timeout(600)
def test_a_flipped_bit_anywhere_is_found_on_read_and_counted(own_pool: Callable[..., Pool]) -> None:
    """One random bit at a time, under a running daemon: exactly the file it hit fails, with EIO, and it counts."""
    pool = own_pool(files=4, size="32M")
    chooser = random.Random(SEED)
    print(f"seed {SEED} (KVFS_CORRUPTION_SEED)")
    files = {f"{index:03d}": content(chooser.randrange(4097, 300 * KIB), (SEED, index)) for index in range(120)}
    for name, data in files.items():
        put(pool.mount / name, data)
    with helpers.opened(pool.mount, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)
    assert survey(pool.mount, list(files), files) == {}
    devices = image.Image(pool.path)
    inodes = {os.stat(pool.mount / name).st_ino: name for name in files}
    targets = _targets(devices, inodes, files)
    assert {target.name for target in targets["data"]} == files.keys()
    counted = pool.status()["counters"]["checksum_errors"]
    hits = 0
    kinds = chooser.sample(["data"] * 6 + ["header"] * 2 + ["other"] * 2, 10)  # of ten flips in a row six hit data
    for number in range(int(os.environ.get("KVFS_FLIPS") or helpers.often(10, 25))):
        kind = kinds[number % len(kinds)]
        target = chooser.choice([target for target in targets[kind] if target.name is None or target.name in files])
        bit = chooser.randrange(target.significant * 8)
        page = devices.read_device(target.device, target.offset, 4096)
        devices.write_device(target.device, target.offset, image.flipped(page, bit))
        where = f"flip {number}: bit {bit} of {target}, seed {SEED}"
        failed = survey(pool.mount, list(files), files)
        if kind == "data":
            assert failed == {target.name: errno.EIO}, f"{where}: {failed}"
            now = pool.status()["counters"]["checksum_errors"]
            assert now > counted, f"{where}: not counted ({now})"
            counted, hits = now, hits + 1
        else:
            assert failed.keys() <= {target.name}, f"{where}: {failed}"
        if kind == "other":
            devices.write_device(target.device, target.offset, page)
        for name in failed:
            # Dropped: from now on a miss, never half a file.
            wait_until(lambda name=name: not os.path.exists(pool.mount / name), f"the drop of {name}")  # type: ignore[misc]
            del files[name]
        if kind == "header" and target.name in files:
            devices.write_device(target.device, target.offset, page)
    assert hits > 5
    pool.umount()
    pool.start()
    assert survey(pool.mount, list(files), files) == {}
    assert listing(pool.mount) == files.keys()


def test_a_bit_flipped_under_an_open_file_is_eio_for_each_way_of_reading(own_pool: Callable[..., Pool]) -> None:
    """read, O_DIRECT, mmap: none gives the flipped page; the others of the same file are EIO or right."""
    pool = own_pool(files=4, size="32M")
    data = content(MIB)
    helpers.write_file(pool.mount / "a", data)
    pool.umount()  # so that no page is cached
    pool.start()
    with (
        helpers.opened(pool.mount / "a", os.O_RDONLY | os.O_DIRECT) as direct,
        helpers.opened(pool.mount / "a", os.O_RDONLY) as buffered,
    ):
        devices = image.Image(pool.path)
        segment, page, file_page = devices.block_of(os.fstat(direct).st_ino).data_pages()[100]
        devices.write(segment, page, image.flipped(devices.read(segment, page), 12345))
        at = file_page * 4096
        with mmap.mmap(-1, 4096) as memory:
            with raises_errno(errno.EIO):
                os.preadv(direct, [memory], at)
        with raises_errno(errno.EIO):
            os.pread(buffered, 4096, at)
        died = "the child died with status"
        with pytest.raises(AssertionError, match=died):
            helpers.in_child(lambda: _map(buffered)[at : at + 4096])


def _map(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, MIB, mmap.MAP_SHARED, mmap.PROT_READ)


def test_a_device_cut_short_under_a_running_daemon_is_eio_never_short(own_pool: Callable[..., Pool]) -> None:
    """A device file truncated to nothing while mounted: each read is right or EIO; the daemon lives and counts."""
    pool = own_pool(files=4, size="32M")
    files = {f"{index}": content(600 * KIB, index) for index in range(20)}
    for name, data in files.items():
        put(pool.mount / name, data)
    os.truncate(pool.path / "devices" / "2", MIB)
    failed = survey(pool.mount, list(files), files)
    assert failed
    status = pool.status()
    assert sum(device["errors"] for device in status["devices"]) + status["counters"]["read_errors"] > 0
    with contextlib.suppress(AssertionError):
        pool.umount()
