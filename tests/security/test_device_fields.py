"""A device that lies: structures with valid checksums whose fields no kvfs can have written.

Each costs at most what it describes: the pool mounts, everything else is there, and fsck says what it found.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from helpers import slow
from hypothesis import given
from hypothesis import strategies as st
from image import Image, with_checksum
from store_pools import crashed_store, make, make_pool, names, settle, verify_all, with_store, write

from kvfs.checks import check_records
from kvfs.errors import DeviceError, FormatError
from kvfs.index.lmdb import LmdbIndex
from kvfs.pool.format import Summary, pack_summary
from kvfs.record import Extent, Inode, InodeFlags, Kind
from kvfs.store.fsck import fsck
from kvfs.store.segment import usage
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber, SegmentIndex

NAMES = {b"%d" % i for i in range(12)}
EPOCH = 7
SEGMENT_COUNT, END_PAGE = 8, 1000
U32, U64 = (1 << 32) - 1, (1 << 64) - 1


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pool of twelve blocks, closed, and the same as a kill left it."""
    made: dict[str, Path] = {}
    for state, end in (("closed", with_store), ("killed", crashed_store)):
        made[state] = make_pool(tmp_path_factory.mktemp(state) / "pool")

        async def work(store: Store) -> None:
            for name in sorted(NAMES):
                await write(store, name, 5 * 4096)
            await settle(store)

        end(made[state], work)
    return made


@pytest.fixture
def copy(templates: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    def make(state: str) -> Path:
        target = tmp_path / "pool"
        for source in templates[state].rglob("*"):
            there = target / source.relative_to(templates[state])
            if source.is_dir():
                there.mkdir(parents=True)
            elif source.name != "lock":
                there.parent.mkdir(parents=True, exist_ok=True)
                _copy_sparse(source, there)
        return target

    return make


def _copy_sparse(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("wb") as written:
        while data := read.read(1 << 20):
            if any(data):
                written.write(data)
            else:
                written.seek(len(data), 1)
        written.truncate(source.stat().st_size)


def lose_index(pool: Path) -> None:
    shutil.rmtree(pool / "index")


def found(pool: Path) -> set[bytes]:
    result: set[bytes] = set()

    async def work(store: Store) -> None:
        result.update(names(store))
        await verify_all(store)

    with_store(pool, work)
    return result


def summed(secret: int, page: bytes) -> bytes:
    """The page with its seeded checksum made right."""
    zeroed = page[:16] + bytes(8) + page[24:]
    return zeroed[:16] + struct.pack("<Q", xxhash.xxh3_64_intdigest(zeroed, secret)) + zeroed[24:]


def changed(data: bytes, offset: int, layout: str, *values: int) -> bytes:
    return data[:offset] + struct.pack(layout, *values) + data[offset + struct.calcsize(layout) :]


# ---- segment headers ----

HEADERS: dict[str, tuple[int, str, *tuple[int, ...]]] = {
    "stream 4": (80, "<I", 4),
    "a mount that has not been": (24, "<QQ", (9 << 40) + 1, 9),
    "stream 300": (80, "<I", 300),
    "stream 0xffffffff": (80, "<I", U32),
    "generation 2**64 - 1": (24, "<Q", U64),
    "generation of another mount": (24, "<Q", (9 << 40) + 1),
    "owner of a mount that has not been": (32, "<Q", 9),
    "slot 4096": (84, "<I", 4096),
}


@pytest.mark.parametrize("what", list(HEADERS))
@pytest.mark.parametrize("state", ["closed", "killed", "without index"])
def test_a_segment_header_that_cannot_be_never_keeps_a_pool_from_mounting(
    copy: Callable[[str], Path], what: str, state: str
) -> None:
    pool = copy("closed" if state == "closed" else "killed")
    image = Image(pool)
    used = image.used_segments()
    free = next(segment for segment in range(len(image.members)) if segment not in used)
    # The header of a used segment, with a later generation, so that it would be taken for the segment's newest life.
    page = bytearray(image.read(used[0], 0))
    struct.pack_into("<Q", page, 24, max(filter(None, map(image.generation, used))) + 1000)
    struct.pack_into("<I", page, 56, free)
    for i, (device, zone) in enumerate(image.members[free]):
        struct.pack_into("<II", page, 88 + 8 * i, device, zone)
    image.write(free, 0, summed(image.config.secret, changed(bytes(page), *HEADERS[what])))
    if state == "without index":
        lose_index(pool)
    else:
        report = fsck(pool)
        assert any(f.what == "segment" and f"segment {free}:" in f.message and not f.harmless for f in report.findings)
        assert not report.healthy
    assert found(pool) == NAMES
    assert found(pool) == NAMES
    repaired = fsck(pool, repair=True, verify_data=True)
    assert repaired.healthy and repaired.blocks == len(NAMES), repaired.findings
    again = fsck(pool, verify_data=True)
    assert not again.findings, again.findings
    assert found(pool) == NAMES


@pytest.mark.parametrize("what", [what if i < 3 else slow(what) for i, what in enumerate(HEADERS)])
def test_the_header_of_a_segment_with_blocks_costs_no_block(copy: Callable[[str], Path], what: str) -> None:
    """Block headers prove themselves; the index, or a summary, says of which generation they must be."""
    for state in ("closed", "killed", "without index"):
        pool = copy("killed" if state == "killed" else "closed")  # an open segment has no summary yet
        image = Image(pool)
        for segment in image.used_segments():
            page = changed(image.read(segment, 0), *HEADERS[what])
            image.write(segment, 0, summed(image.config.secret, page))
        if state == "without index":
            lose_index(pool)
        assert found(pool) == NAMES, state
        shutil.rmtree(pool)


# ---- summaries ----


def _spoil_record(offset: int, layout: str, value: int) -> Callable[[Summary], Summary]:
    return lambda summary: replace(summary, entries=changed(summary.entries, offset, layout, value))


SUMMARIES: dict[str, Callable[[Summary], Summary]] = {
    "covers page 0": lambda summary: replace(summary, covered_page=0),
    "covers more than there is": lambda summary: replace(summary, covered_page=U32),
    "more entries than it has": lambda summary: replace(summary, entry_count=summary.entry_count + 1),
    "sequence of no mount": lambda summary: replace(summary, sequence=U64),
    "entries that do not unpack": lambda summary: summary.with_compressed(b"no zlib stream"),
    "a name that is longer than its record": _spoil_record(6, "<H", 0xFFFF),
    "a home that is no segment": _spoil_record(48, "<I", U32),
    "a header of 2**32 - 1 pages": _spoil_record(56, "<I", U32),
    "2**32 - 1 extents": _spoil_record(60, "<I", U32),
    "an inode of a mount that has not been": _spoil_record(8, "<Q", U64),
    "a version of a mount that has not been": _spoil_record(24, "<Q", U64),
    "more bytes than pages": _spoil_record(32, "<Q", U64),
    "flags that are in memory only": _spoil_record(5, "<B", 1 | InodeFlags.ASK),
    "a slash for a name": _spoil_record(128, "<B", ord("/")),
}


@pytest.mark.parametrize("what", list(SUMMARIES))
def test_a_summary_that_cannot_be_is_left_out(copy: Callable[[str], Path], what: str) -> None:
    pool = copy("closed")
    image = Image(pool)
    count = 0
    for segment in image.used_segments():
        slot = image.newest_summary(segment)
        summary = None if slot is None else image.summary(segment, slot)
        if slot is not None and summary is not None and summary.entry_count:
            data = pack_summary(image.config, SUMMARIES[what](summary), summary.sequence >> 40)
            image.write(segment, image.geometry.summary_page(slot), data)
            count += 1
    assert count
    report = fsck(pool)
    assert sum(f.what == "summary" and not f.harmless for f in report.findings) >= count, report.findings
    lose_index(pool)
    assert found(pool) == NAMES


# ---- block headers ----

RECORDS: dict[str, tuple[int, str, int]] = {
    "an inode of a mount that has not been": (8, "<Q", U64),
    "no directory": (16, "<Q", 0),
    "a version of a mount that has not been": (24, "<Q", U64),
    "links": (100, "<I", U32),
    "flags that are in memory only": (5, "<B", 1 | InodeFlags.SLAB),
    "never sealed": (5, "<B", 0),
    "mode of a directory": (92 - 4, "<I", 0o040755),
    "a zero in its name": (128, "<B", 0),
    "a name that the key is not of": (128, "<B", ord("!")),
    "another directory than the key's": (16, "<Q", EPOCH),
}
# Of the header itself.
BLOCK_FIELDS: dict[str, tuple[int, str, int]] = {
    "another key": (24, "<Q", 1),
    "a parent that no node can be": (80, "<Q", U64),
    "a parent without its check": (80, "<Q", 77),
    "a check without a parent": (88, "<Q", 77),
    "a time before 1970": (96, "<q", -1),
}


@pytest.mark.parametrize("what", [*RECORDS, *BLOCK_FIELDS])
def test_a_block_header_that_cannot_be_costs_its_block_alone(copy: Callable[[str], Path], what: str) -> None:
    pool = copy("killed")
    image = Image(pool)
    block = sorted(image.blocks(), key=lambda b: (b.segment, b.page))[3]
    assert block.header_pages == 1
    page = image.read(block.segment, block.page)
    (record_offset,) = struct.unpack_from("<I", page, 56)
    offset, layout, value = RECORDS[what] if what in RECORDS else BLOCK_FIELDS[what]
    page = changed(page, offset + (record_offset if what in RECORDS else 0), layout, value)
    image.write(block.segment, block.page, summed(image.config.secret, page))
    # Without index and summaries the headers are all that there is.
    lose_index(pool)
    for segment in image.used_segments():
        image.write(segment, image.geometry.end_page, bytes(2 * image.geometry.summary_pages * 4096))
    assert found(pool) == NAMES - {block.inode.name}


def _directories(store: Store) -> tuple[Inode, Inode]:
    outer = make(store, ROOT_INODE, b"outer", Kind.DIRECTORY)
    return outer, make(store, outer.inode, b"inner", Kind.DIRECTORY)


def test_a_block_header_whose_directories_lie_below_themselves_costs_what_is_in_them(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")

    async def work(store: Store) -> None:
        for name in sorted(NAMES):
            await write(store, name, 5 * 4096)
        await write(store, b"block", 5 * 4096, _directories(store)[1].inode)
        await settle(store)

    crashed_store(pool, work)
    image = Image(pool)
    (block,) = [block for block in image.blocks() if block.inode.name == b"block"]
    page = image.read(block.segment, block.page)
    (at,) = struct.unpack_from("<I", page, 60)
    # First comes the directory that the block is in, then the one above it.
    (size,) = struct.unpack_from("<I", page, at)
    (inner,) = struct.unpack_from("<Q", page, at + 8)
    assert block.inode.parent == inner
    page = changed(page, at + size + 16, "<Q", inner)
    image.write(block.segment, block.page, summed(image.config.secret, page))
    lose_index(pool)
    for segment in image.used_segments():
        image.write(segment, image.geometry.end_page, bytes(2 * image.geometry.summary_pages * 4096))

    async def look(store: Store) -> None:
        # Of the two only one is left, which lies nowhere.
        assert sum(store.index.get(InodeNumber(number)) is not None for number in (inner, inner - 1)) == 1
        assert names(store) == NAMES

    with_store(pool, look)
    assert fsck(pool, repair=True).healthy
    assert not fsck(pool).findings
    assert found(pool) == NAMES


def test_fsck_finds_directories_that_lie_below_themselves(copy: Callable[[str], Path]) -> None:
    pool = copy("closed")

    async def work(store: Store) -> None:
        outer, inner = _directories(store)
        await write(store, b"block", 5 * 4096, inner.inode)
        below = outer.copy()
        below.parent = inner.inode
        store.index.put(below, outer)

    with_store(pool, work)
    report = fsck(pool)
    assert sum("lies below itself" in f.message and not f.harmless for f in report.findings) == 2, report.findings
    assert fsck(pool, repair=True).healthy
    assert not fsck(pool).findings
    assert found(pool) == NAMES


# ---- labels: their checksum is not seeded, so anybody can make one ----

LABELS = {
    "a mount beyond the last": (56, "<Q", U64),
    "the last mount": (56, "<Q", (1 << 28) - 1),
    "device 9": (64, "<I", 9),
    "device 1 on device 0": (64, "<I", 1),
    "300 devices": (68, "<I", 300),
    "another size": (72, "<Q", 1 << 62),
    "zones of nothing": (80, "<Q", 0),
    "zones beyond the end": (104, "<Q", U64),
    "text that is no TOML": (4096, "<B", 0),
}


@pytest.mark.parametrize("what", list(LABELS))
def test_one_label_that_cannot_be_is_made_up_for_by_the_other(copy: Callable[[str], Path], what: str) -> None:
    pool = copy("closed")
    image = Image(pool)
    image.write_label(0, 0, with_checksum(changed(image.read_label(0, 0), *LABELS[what])))
    report = fsck(pool)
    assert [f.what for f in report.findings if not f.harmless] == ["label"], report.findings
    assert found(pool) == NAMES
    assert not fsck(pool).findings


def test_a_device_whose_labels_both_cannot_be_is_named(copy: Callable[[str], Path]) -> None:
    pool = copy("closed")
    image = Image(pool)
    for device in (0, 1):
        for number in (0, 1):
            label = with_checksum(changed(image.read_label(device, number), *LABELS["a mount beyond the last"]))
            image.write_label(device, number, label)
    with pytest.raises(DeviceError, match=rf"no valid kvfs label.*mount {U64}"):
        found(pool)


# ---- the index: made anew from the devices ----


def _edit(pool: Path, change: Callable[[LmdbIndex], None]) -> None:
    index = LmdbIndex(pool / "index")
    change(index)
    index.commit_now()
    index.close()


def _state(layout: str, offset: int, value: int) -> Callable[[LmdbIndex], None]:
    def change(index: LmdbIndex) -> None:
        number, data = max(index.segment_items(), key=lambda item: item[1])
        index.segment_put(number, changed(data, offset, layout, value))

    return change


def _record(spoil: Callable[[Inode], None]) -> Callable[[LmdbIndex], None]:
    def change(index: LmdbIndex) -> None:
        number = index.lookup(ROOT_INODE, b"3")
        inode = None if number is None else index.get(number)
        assert inode is not None
        spoil(inode)
        index.put(inode, inode)

    return change


def _to_page(inode: Inode) -> None:
    inode.page = U32 - 1


def _to_epoch(inode: Inode) -> None:
    inode.version = U64


INDEX: dict[str, Callable[[LmdbIndex], None]] = {
    "a segment of stream 200": _state("<B", 2, 200),
    "a segment in state 9": _state("<B", 1, 9),
    "a segment full to page 2**32 - 1": _state("<I", 4, U32),
    "a segment of a generation to come": _state("<Q", 8, U64),
    "a segment that is not there": lambda index: index.segment_put(SegmentIndex(100_000), bytes(32)),
    "a version of three bytes": lambda index: index.meta_put(b"version", b"abc"),
    "half a version in flight": lambda index: index.meta_put(b"in_flight", b"abcd"),
    "an epoch beyond the last": lambda index: index.meta_put(b"epoch", struct.pack("<Q", U64)),
    "a block beyond its segment": _record(_to_page),
    "a version of a mount that has not been": _record(_to_epoch),
}


@pytest.mark.parametrize("what", list(INDEX))
def test_an_index_that_cannot_be_is_made_anew(copy: Callable[[str], Path], what: str) -> None:
    for state in ("closed", "killed"):
        pool = copy(state)
        _edit(pool, INDEX[what])
        if what != "an epoch beyond the last":
            assert any(f.what == "index" and "rebuilds it" in f.message for f in fsck(pool).findings)
        assert found(pool) == NAMES
        shutil.rmtree(pool)


# ---- any record ----


def _check(record: bytes) -> int:
    return check_records(record, epoch_max=EPOCH, segment_count=SEGMENT_COUNT, end_page=END_PAGE, origin="here")


def _file() -> Inode:
    return Inode(
        inode=InodeNumber((EPOCH << 40) + 3), parent=InodeNumber(1), name=b"block", kind=Kind.FILE, mode=0o100644,
        flags=InodeFlags.SEALED, version=(EPOCH << 40) + 9, size=40 * 4096 - 5, generation=(EPOCH << 40) + 2,
        segment=SegmentIndex(7), page=900, header_pages=1, xattrs={b"user.a": b"value"},
        extents=(Extent(5, SegmentIndex(0), 1, 30, 0), Extent(6, SegmentIndex(7), END_PAGE - 8, 8, 32)),
    )  # fmt: skip


def test_sound_records_are_counted() -> None:
    directory = Inode(inode=InodeNumber(2), parent=InodeNumber(1), name=b"d", kind=Kind.DIRECTORY, mode=0o040755)
    assert _check(_file().pack() + directory.pack()) == 2
    assert _check(b"") == 0


@pytest.mark.parametrize("spoil", [
    {"segment": 8}, {"page": 0}, {"page": 1000}, {"header_pages": 0}, {"header_pages": 101}, {"size": 39 * 4096},
    {"size": 1 << 60}, {"name": b""}, {"name": b"."}, {"name": b".."}, {"name": b"a/b"}, {"name": b"a\0b"},
    {"mode": 0o120777}, {"mode": 1 << 20}, {"inode": 0}, {"parent": 0}, {"parent": (EPOCH << 40) + 3},
    {"inode": (EPOCH + 1) << 40}, {"generation": (EPOCH + 1) << 40}, {"nlink": 1 << 31}, {"flags": InodeFlags.NONE},
    {"flags": InodeFlags.SEALED | InodeFlags.ASK}, {"kind": Kind.DIRECTORY, "mode": 0o040755},
    {"extents": (Extent(5, SegmentIndex(8), 1, 1, 0),)}, {"extents": (Extent(5, SegmentIndex(0), 0, 1, 0),)},
    {"extents": (Extent(5, SegmentIndex(0), 1, 0, 0),)}, {"extents": (Extent(5, SegmentIndex(0), 999, 2, 0),)},
    {"extents": (Extent(5, SegmentIndex(0), U32, U32, 0),)}, {"extents": (Extent(5, SegmentIndex(0), 1, 1, 40),)},
    {"extents": (Extent(U64, SegmentIndex(0), 1, 1, 0),)},
    {"extents": (Extent(5, SegmentIndex(0), 1, 2, 0), Extent(5, SegmentIndex(0), 9, 2, 1))},
    {"xattrs": {b"": b"x"}}, {"extents": (), "page": END_PAGE - 40},
], ids=str)  # fmt: skip
def test_an_impossible_record_is_refused_and_named(spoil: dict[str, object]) -> None:
    inode = _file()
    for field, value in spoil.items():
        setattr(inode, field, value)
    with pytest.raises(FormatError, match=rf"^here: record at 0 of \d+, inode {inode.inode}: "):
        _check(inode.pack())


@given(st.integers(0, 255), st.integers(0, 63), st.data())
def test_what_passes_is_read_and_lies_inside(value: int, position: int, data: st.DataObject) -> None:
    record = bytearray(_file().pack())
    for at in [position, *data.draw(st.lists(st.integers(0, len(record) - 1), max_size=3))]:
        record[at] = value
    try:
        _check(bytes(record))
    except FormatError:
        return
    inode = Inode.unpack(bytes(record))
    assert all(segment < SEGMENT_COUNT for segment in usage(inode))
    for extent in inode.all_extents():
        assert extent.page > 0 and extent.page + extent.page_count <= END_PAGE
