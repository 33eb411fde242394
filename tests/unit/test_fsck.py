"""fsck: damage, detect, repair, recheck."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from store_pools import crashed_store, make_pool, names, settle, verify_all, with_store, write
from test_recovery import flip, lose_index, segment_pages, used_segments, zeroed

from kvfs.errors import PoolError
from kvfs.index.lmdb import LmdbIndex
from kvfs.pool.geometry import LABEL_SIZE
from kvfs.pool.lock import locked
from kvfs.record import Inode
from kvfs.store.fsck import FsckReport, fsck
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    made = make_pool(tmp_path / "pool")

    async def work(store: Store) -> None:
        for i in range(20):
            await write(store, b"%d" % i)
        await settle(store)

    with_store(made, work)
    return made


def kinds(report: FsckReport) -> set[str]:
    return {finding.what for finding in report.findings if not finding.harmless}


def damaged_then_repaired(pool: Path, what: str, blocks_left: int = 20) -> None:
    """Found and not touched without --repair, repaired with it, and then nothing is found."""
    for verify_data in (False, True):
        report = fsck(pool, verify_data=verify_data)
        assert kinds(report) == {what}, report.findings
        assert not report.healthy and not any(finding.repaired for finding in report.findings)
    report = fsck(pool, repair=True, verify_data=True)
    assert report.healthy and kinds(report) == {what}, report.findings
    again = fsck(pool, verify_data=True)
    assert not again.findings, again.findings
    assert again.blocks == blocks_left

    async def check(store: Store) -> None:
        assert len(names(store)) == blocks_left
        await verify_all(store)

    with_store(pool, check)
    assert not fsck(pool, verify_data=True).findings


def test_a_healthy_pool_has_no_findings(pool: Path) -> None:
    steps: set[str] = set()
    report = fsck(pool, verify_data=True, progress=lambda step, done, total: steps.add(step))
    assert report.healthy and report.clean and not report.findings
    assert report.blocks == 20 and report.verified_bytes == 20 * 3 * 4096 and "reading blocks" in steps


@pytest.mark.parametrize("offset", [300, -LABEL_SIZE + 300])
def test_a_damaged_label_copy(pool: Path, offset: int) -> None:
    with (pool / "devices/1").open("r+b") as file:
        file.seek(offset, 2 if offset < 0 else 0)
        file.write(b"damage")
    damaged_then_repaired(pool, "label")


def test_both_label_copies_of_one_device(pool: Path) -> None:
    with (pool / "devices/1").open("r+b") as file:
        for offset in (300, -LABEL_SIZE + 300):
            file.seek(offset, 2 if offset < 0 else 0)
            file.write(b"damage")
    damaged_then_repaired(pool, "label")


def test_a_damaged_block_is_dropped(pool: Path) -> None:
    places: list[tuple[int, int]] = []

    async def find(store: Store) -> None:
        number = store.index.lookup(ROOT_INODE, b"7")
        inode = store.index.get(InodeNumber(number or 0))
        assert inode is not None
        places.append((inode.segment, inode.page))

    with_store(pool, find)
    segment_pages(pool, *places[0], 1, flip)
    damaged_then_repaired(pool, "block", 19)


def test_a_flipped_bit_in_the_data_needs_verify_data(pool: Path) -> None:
    places: list[tuple[int, int]] = []

    async def find(store: Store) -> None:
        for _, number in store.index.list(ROOT_INODE, b"", 100):
            inode = store.index.get(number)
            assert inode is not None
            places.extend((extent.segment, extent.page) for extent in inode.all_extents())

    with_store(pool, find)
    segment_pages(pool, *places[3], 1, flip)
    assert fsck(pool).healthy
    assert kinds(fsck(pool, verify_data=True)) == {"block"}
    assert fsck(pool, verify_data=True, repair=True).healthy
    assert not fsck(pool, verify_data=True).findings


def test_a_lost_summary_is_written_again(pool: Path) -> None:
    numbers, config = used_segments(pool)
    segment_pages(pool, numbers[0], config.geometry.end_page, 2 * config.geometry.summary_pages, zeroed)
    damaged_then_repaired(pool, "summary")


def _key(number: int) -> bytes:
    return struct.pack(">Q", number)


def edit(pool: Path) -> LmdbIndex:
    return LmdbIndex(pool / "index")


def test_a_dangling_name_is_removed(pool: Path) -> None:
    index = edit(pool)
    index.bulk(lambda bulk: bulk.load([], [(_key(1) + b"nobody", struct.pack("<Q", 999))], []))
    index.close()
    damaged_then_repaired(pool, "name")


def test_an_inode_without_a_name_is_dropped(pool: Path) -> None:
    index = edit(pool)
    index.bulk(lambda bulk: bulk.remove_name(1, b"7"))
    index.close()
    damaged_then_repaired(pool, "name", 19)


def test_overlapping_blocks_are_found_out(pool: Path) -> None:
    index = edit(pool)
    first, second = (index.get(InodeNumber(index.lookup(ROOT_INODE, name) or 0)) for name in (b"1", b"2"))
    assert first is not None and second is not None
    moved: Inode = second.copy()
    moved.page, moved.extents = first.page, first.extents
    index.put(moved, second)
    index.commit_now()
    index.close()
    report = fsck(pool)
    assert kinds(report) == {"extent"}
    assert fsck(pool, repair=True).healthy
    assert fsck(pool).healthy


def test_a_block_in_a_segment_of_another_generation_is_dropped(pool: Path) -> None:
    index = edit(pool)
    block = index.get(InodeNumber(index.lookup(ROOT_INODE, b"3") or 0))
    assert block is not None
    stale = block.copy()
    stale.generation -= 1
    index.put(stale, block)
    index.commit_now()
    index.close()
    damaged_then_repaired(pool, "name", 19)


def test_a_wrong_membership_is_removed(pool: Path) -> None:
    index = edit(pool)
    index.bulk(lambda bulk: bulk.load([], [], [(struct.pack(">IQ", 9, 12345), b"")]))
    index.close()
    damaged_then_repaired(pool, "index")


def test_a_missing_index_is_harmless_and_rebuilt(pool: Path) -> None:
    lose_index(pool)
    report = fsck(pool)
    assert report.healthy and report.findings and not (pool / "index").exists()
    report = fsck(pool, repair=True)
    assert report.healthy and report.blocks == 20


def test_an_unreadable_index_is_damage_and_rebuilt(pool: Path) -> None:
    (pool / "index/data.mdb").write_bytes(b"damage" * 2000)
    assert not fsck(pool).healthy
    assert fsck(pool, repair=True).blocks == 20
    assert not fsck(pool).findings


def test_a_crashed_pool_is_reported_as_such_and_recovered(pool: Path) -> None:
    async def work(store: Store) -> None:
        await write(store, b"new")

    crashed_store(pool, work)
    report = fsck(pool)
    assert report.healthy and not report.clean and "not unmounted cleanly" in report.findings[0].message
    assert fsck(pool, repair=True).blocks == 21
    assert not fsck(pool).findings


def test_a_pool_in_use_is_not_checked(pool: Path) -> None:
    with locked(pool), pytest.raises(PoolError, match="in use"):
        fsck(pool)
