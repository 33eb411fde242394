"""The namespace over a store: what open, close, truncation, attributes and listings mean for names and blocks."""

from __future__ import annotations

import errno
import stat
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from store_pools import LAZY, in_store, make_pool, with_store

from kvfs import errors
from kvfs.namespace.attributes import ALLOCATE_REQUEST, PIN_ATTRIBUTE, SLAB_ATTRIBUTE, SLAB_REQUEST, SYMLINK_KEY
from kvfs.namespace.files import USED_PERCENT_MAX, Changes, Namespace
from kvfs.plane import OpenState, Plane
from kvfs.record import Inode, InodeFlags
from kvfs.store.sealing import Sealing
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber

SLAB_SIZE = 1 << 20
XATTRS_SIZE_MAX = 4096


@dataclass(frozen=True)
class Space:
    size: int
    used: int
    pinned: int
    inodes: int
    inodes_max: int
    inodes_kept: int = 0
    slabs: int = 0


class SlabsDouble:
    """Notes what was asked of it."""

    def __init__(self, store: Store, namespace: Namespace, patch: pytest.MonkeyPatch) -> None:
        """All from SLAB_SIZE on is one, whatever its handle."""
        self.store = store
        self.full = False
        self.calls: list[tuple[object, ...]] = []
        patch.setattr(namespace, "_slabs", self)
        patch.setattr(store.plane, "slab_wanted", lambda inode, size: size >= SLAB_SIZE)

    async def preallocate(self, number: InodeNumber, size: int) -> bool:
        self.calls.append(("preallocate", number, size))
        if self.full:
            return False
        self.store.blocks.mark(number, on=InodeFlags.SLAB)
        return True

    async def choose(self, number: InodeNumber) -> None:
        await self.preallocate(number, 0)

    async def resize(self, number: InodeNumber, size: int) -> bool:
        self.calls.append(("resize", number, size))
        return True


def being_sealed(patch: pytest.MonkeyPatch, times: int) -> list[int]:
    """So many times a seal is under way. Returns those that have met it."""
    met: list[int] = []
    truncate, allocate = Plane.file_truncate, Plane.file_allocate

    def meet(inode: int) -> None:
        if len(met) < times:
            met.append(inode)
            raise OSError(errno.EBUSY, "a seal is under way")

    def cut(self: Plane, inode: int, size: int) -> int:
        meet(inode)
        return truncate(self, inode, size)

    def allocated(self: Plane, inode: int, size: int) -> int:
        meet(inode)
        return allocate(self, inode, size)

    patch.setattr(Plane, "file_truncate", cut)
    patch.setattr(Plane, "file_allocate", allocated)
    return met


def is_written(store: Store, number: int) -> bool:
    return store.plane.inode_is_open(number) == OpenState.BEING_WRITTEN


async def size_of(store: Store, number: InodeNumber) -> int:
    """Of a file that is being written, by its seal."""
    assert is_written(store, number)
    inode = await store.sealing.seal(number)
    assert inode is not None and not is_written(store, number)
    return inode.size


async def sealed(store: Store, namespace: Namespace, name: bytes) -> Inode:
    inode = namespace.create(ROOT_INODE, name, 0o644, 1000, 1000)
    assert await store.sealing.seal(inode.inode) is not None
    return namespace.get(inode.inode)


def names(namespace: Namespace, parent: InodeNumber = ROOT_INODE) -> list[bytes]:
    return [name for name, _ in namespace.list_entries(parent, b"", 100)]


@in_store
async def test_a_created_file_is_in_index_table_and_being_written(store: Store, namespace: Namespace) -> None:
    inode = namespace.create(ROOT_INODE, b"x", 0o640, 7, 8)
    assert namespace.lookup(ROOT_INODE, b"x") == inode
    assert store.plane.table_find_name(ROOT_INODE, b"x") == inode.inode
    assert is_written(store, inode.inode)
    assert (inode.mode, inode.uid, inode.gid) == (stat.S_IFREG | 0o640, 7, 8)


def test_a_full_block_table_changes_nothing(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        namespace, count = Namespace(store), 0
        with pytest.raises(errors.NamesFullError):
            while True:
                namespace.mkdir(ROOT_INODE, b"%d" % count, 0o755, 0, 0)
                count += 1
        before, files = namespace.get(ROOT_INODE), store.plane.statistics()["staged_files"]
        for make in (namespace.create, namespace.mkdir):
            with pytest.raises(errors.NamesFullError) as caught:
                make(ROOT_INODE, b"x", 0o640, 7, 8)
            assert caught.value.errno == errno.ENOSPC
        assert namespace.get(ROOT_INODE) == before and store.plane.statistics()["staged_files"] == files
        with pytest.raises(errors.NotFoundError):
            namespace.lookup(ROOT_INODE, b"x")

    with_store(make_pool(tmp_path / "pool", files=1), work, replace(LAZY, records_max=200))


@in_store
async def test_creating_a_name_twice_is_eexist(store: Store, namespace: Namespace) -> None:
    namespace.create(ROOT_INODE, b"x", 0o640, 7, 8)
    for attempt in (namespace.create, namespace.mkdir):
        with pytest.raises(errors.ExistsError) as caught:
            attempt(ROOT_INODE, b"x", 0o640, 7, 8)
        assert caught.value.errno == errno.EEXIST


@in_store
async def test_names_over_255_bytes_are_refused(store: Store, namespace: Namespace) -> None:
    namespace.create(ROOT_INODE, b"n" * 255, 0o640, 0, 0)
    with pytest.raises(errors.NameTooLongError):
        namespace.create(ROOT_INODE, b"n" * 256, 0o640, 0, 0)


@in_store
async def test_setgid_directories_hand_their_group_down(store: Store, namespace: Namespace) -> None:
    shared = namespace.mkdir(ROOT_INODE, b"shared", 0o2775, 1, 50)
    file = namespace.create(shared.inode, b"f", 0o644, 2, 2)
    below = namespace.mkdir(shared.inode, b"d", 0o755, 2, 2)
    assert (file.gid, below.gid) == (50, 50)
    assert below.mode & stat.S_ISGID
    assert not file.mode & stat.S_ISGID


@in_store
async def test_opening_for_write_by_another_user_clears_suid(store: Store, namespace: Namespace) -> None:
    inode = await sealed(store, namespace, b"x")
    await namespace.setattr(inode.inode, Changes(mode=0o4777))
    assert (await namespace.open_for_write(inode.inode)).mode & stat.S_ISUID
    assert not (await namespace.open_for_write(inode.inode, kill_suid=1000)).mode & stat.S_ISUID
    assert not namespace.get(inode.inode).mode & stat.S_ISUID


@in_store
async def test_set_group_id_without_group_execute_goes_with_a_write_of_another_group(
    store: Store, namespace: Namespace
) -> None:
    inode = await sealed(store, namespace, b"x")
    await namespace.setattr(inode.inode, Changes(mode=0o2666, gid=1000))
    assert (await namespace.open_for_write(inode.inode)).mode & stat.S_ISGID, "root keeps it"
    assert (await namespace.open_for_write(inode.inode, kill_suid=1000)).mode & stat.S_ISGID, "so does its group"
    assert not (await namespace.open_for_write(inode.inode, kill_suid=1001)).mode & stat.S_ISGID


@in_store
async def test_truncate_by_path_seals_and_by_handle_does_not(store: Store, namespace: Namespace) -> None:
    inode = await sealed(store, namespace, b"x")
    result = await namespace.setattr(inode.inode, Changes(size=5000))
    assert result.size == 5000 and result.sealed and not is_written(store, inode.inode)
    await namespace.setattr(inode.inode, Changes(size=100, through_handle=True))
    assert await size_of(store, inode.inode) == 100
    with pytest.raises(errors.IsDirectoryError):
        await namespace.setattr(ROOT_INODE, Changes(size=0))


@in_store
async def test_truncate_waits_for_a_seal_under_way(
    store: Store, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    inode = await sealed(store, namespace, b"x")
    met = being_sealed(monkeypatch, 3)
    assert (await namespace.setattr(inode.inode, Changes(size=7))).size == 7 and len(met) == 3


@in_store
async def test_opening_a_block_that_is_evicted_meanwhile_is_estale(
    store: Store, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    inode = await sealed(store, namespace, b"x")
    rewrite = Sealing.rewrite

    async def late(self: Sealing, number: InodeNumber, keep_content: bool) -> None:
        assert store.blocks.evict(store.segments.all[inode.segment], [number]).blocks == 1
        await rewrite(self, number, keep_content)

    monkeypatch.setattr(Sealing, "rewrite", late)
    with pytest.raises(errors.StaleInodeError):
        await namespace.open_for_write(inode.inode)


@in_store
async def test_a_sealed_record_keeps_the_size_of_its_header_until_it_is_sealed_again(
    store: Store, namespace: Namespace
) -> None:
    inode = await sealed(store, namespace, b"x")
    await namespace.setattr(inode.inode, Changes(size=5000))
    await namespace.setattr(inode.inode, Changes(size=100, through_handle=True))
    assert namespace.get(inode.inode).size == 5000 and await size_of(store, inode.inode) == 100


@in_store
async def test_setattr_changes_only_what_it_is_told(store: Store, namespace: Namespace) -> None:
    inode = await sealed(store, namespace, b"x")
    changed = await namespace.setattr(inode.inode, Changes(mode=0o100600, mtime_ns=5, atime_ns=6))
    assert (changed.mode, changed.mtime_ns, changed.atime_ns) == (stat.S_IFREG | 0o600, 5, 6)
    assert (changed.uid, changed.gid, changed.size) == (inode.uid, inode.gid, inode.size)
    assert changed.version > inode.version
    assert changed.ctime_ns >= inode.ctime_ns
    assert namespace.get(inode.inode) == changed


@in_store
async def test_a_change_of_owner_clears_suid(store: Store, namespace: Namespace) -> None:
    inode = await sealed(store, namespace, b"x")
    await namespace.setattr(inode.inode, Changes(mode=0o6755))
    assert (await namespace.setattr(inode.inode, Changes(uid=3))).mode & 0o7777 == 0o755
    await namespace.setattr(inode.inode, Changes(mode=0o6745))
    assert (await namespace.setattr(inode.inode, Changes(gid=3))).mode & 0o7777 == 0o2745


@in_store
async def test_opening_for_write_keeps_the_inode(store: Store, namespace: Namespace) -> None:
    inode = await sealed(store, namespace, b"x")
    assert (await namespace.open_for_write(inode.inode, truncate=True)).inode == inode.inode
    assert await size_of(store, inode.inode) == 0
    with pytest.raises(errors.IsDirectoryError):
        await namespace.open_for_write(ROOT_INODE)


@in_store
async def test_fsync_is_durable(store: Store, namespace: Namespace) -> None:
    inode = namespace.create(ROOT_INODE, b"x", 0o644, 0, 0)
    await namespace.fsync(inode.inode)
    assert namespace.get(inode.inode).sealed and not store.index.changes_pending


@in_store
async def test_symlinks_keep_their_target_to_themselves(store: Store, namespace: Namespace) -> None:
    link = namespace.symlink(ROOT_INODE, b"link", b"../target", 0, 0)
    assert namespace.readlink(link.inode) == b"../target"
    assert namespace.get(link.inode).size == 9
    assert namespace.listxattr(link.inode) == []
    with pytest.raises(errors.NoAttributeError):
        namespace.getxattr(link.inode, SYMLINK_KEY)
    with pytest.raises(errors.InvalidArgumentError):
        namespace.readlink(ROOT_INODE)
    with pytest.raises(errors.NameTooLongError):
        namespace.symlink(ROOT_INODE, b"long", b"x" * 4096, 0, 0)


@in_store
async def test_xattrs(store: Store, namespace: Namespace) -> None:
    inode = await sealed(store, namespace, b"x")
    await namespace.setxattr(inode.inode, b"user.vllm.kv_crc32c", b"\x01\x02\x03\x04")
    assert namespace.getxattr(inode.inode, b"user.vllm.kv_crc32c") == b"\x01\x02\x03\x04"
    assert namespace.listxattr(inode.inode) == [b"user.vllm.kv_crc32c"]
    await namespace.removexattr(inode.inode, b"user.vllm.kv_crc32c")
    with pytest.raises(errors.NoAttributeError):
        namespace.getxattr(inode.inode, b"user.vllm.kv_crc32c")
    with pytest.raises(errors.NoAttributeError):
        await namespace.removexattr(inode.inode, b"user.vllm.kv_crc32c")
    with pytest.raises(errors.NotSupportedError):
        await namespace.setxattr(inode.inode, b"system.posix_acl_access", b"x")
    with pytest.raises(errors.NoSpaceError):
        await namespace.setxattr(inode.inode, b"user.big", b"x" * XATTRS_SIZE_MAX)
    assert namespace.listxattr(inode.inode) == []


@in_store
async def test_the_pin_attribute_pins(store: Store, namespace: Namespace) -> None:
    inode = await sealed(store, namespace, b"x")
    with pytest.raises(errors.NoAttributeError):
        namespace.getxattr(inode.inode, PIN_ATTRIBUTE)
    await namespace.setxattr(inode.inode, PIN_ATTRIBUTE, b"1")
    assert InodeFlags.PINNED in namespace.get(inode.inode).flags
    assert namespace.getxattr(inode.inode, PIN_ATTRIBUTE) == b"1"
    assert namespace.listxattr(inode.inode) == [PIN_ATTRIBUTE]
    await namespace.removexattr(inode.inode, PIN_ATTRIBUTE)
    assert InodeFlags.PINNED not in namespace.get(inode.inode).flags


@in_store
async def test_slabs_are_made_by_attribute_request_and_size(
    store: Store, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    slabs = SlabsDouble(store, namespace, monkeypatch)
    chosen = namespace.create(ROOT_INODE, b"chosen", 0o644, 0, 0).inode
    with pytest.raises(errors.InvalidArgumentError):
        await namespace.setxattr(chosen, SLAB_ATTRIBUTE, b"yes")
    with pytest.raises(errors.InvalidArgumentError):
        await namespace.setxattr(ROOT_INODE, SLAB_ATTRIBUTE, b"1")
    with pytest.raises(errors.NoAttributeError):
        namespace.getxattr(chosen, SLAB_ATTRIBUTE)
    await namespace.setxattr(chosen, SLAB_ATTRIBUTE, b"1")
    assert namespace.getxattr(chosen, SLAB_ATTRIBUTE) == b"1"
    assert namespace.listxattr(chosen) == [SLAB_ATTRIBUTE]
    with pytest.raises(errors.NotPermittedError):
        await namespace.removexattr(chosen, SLAB_ATTRIBUTE)
    asked = namespace.create(ROOT_INODE, b"asked", 0o644, 0, 0).inode
    for wrong in (b"", b"x", b"-1", b"9" * 20):
        with pytest.raises(errors.InvalidArgumentError):
            await namespace.setxattr(asked, SLAB_REQUEST, wrong)
    await namespace.setxattr(asked, SLAB_REQUEST, b"4096")
    cut = namespace.create(ROOT_INODE, b"cut", 0o644, 0, 0).inode
    await namespace.setattr(cut, Changes(size=SLAB_SIZE))  # by truncate(2)
    by_handle = namespace.create(ROOT_INODE, b"handle", 0o644, 0, 0).inode
    await namespace.setattr(by_handle, Changes(size=SLAB_SIZE, through_handle=True))
    await namespace.setattr(by_handle, Changes(size=10, through_handle=True))
    assert slabs.calls == [
        ("preallocate", chosen, 0), ("preallocate", asked, 4096), ("preallocate", by_handle, SLAB_SIZE),
        ("resize", by_handle, 10),
    ]  # fmt: skip
    assert namespace.get(by_handle).size == 10
    for number in (chosen, asked, by_handle):
        store.blocks.mark(number, off=InodeFlags.SLAB)


@in_store
async def test_what_finds_no_room_as_a_slab_is_a_file(
    store: Store, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    SlabsDouble(store, namespace, monkeypatch).full = True
    asked = namespace.create(ROOT_INODE, b"asked", 0o644, 0, 0).inode
    await namespace.setxattr(asked, SLAB_REQUEST, b"%d" % SLAB_SIZE)
    by_handle = namespace.create(ROOT_INODE, b"handle", 0o644, 0, 0).inode
    await namespace.setattr(by_handle, Changes(size=SLAB_SIZE, through_handle=True))
    assert await size_of(store, asked) == await size_of(store, by_handle) == SLAB_SIZE


@in_store
async def test_a_preallocation_waits_for_the_seal_and_makes_nothing_smaller(
    store: Store, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = namespace.create(ROOT_INODE, b"file", 0o644, 0, 0).inode
    met = being_sealed(monkeypatch, 3)
    await namespace.setxattr(number, ALLOCATE_REQUEST, b"8192")
    await namespace.setxattr(number, ALLOCATE_REQUEST, b"4096")
    assert met == [number] * 3 and await size_of(store, number) == 8192


@in_store
async def test_a_preallocation_of_what_its_last_writer_has_just_closed_writes_it_again(
    store: Store, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    inode = await sealed(store, namespace, b"file")
    assert not is_written(store, inode.inode)
    await namespace.setxattr(inode.inode, ALLOCATE_REQUEST, b"8192")
    assert await size_of(store, inode.inode) == 8192
    gone = namespace.create(ROOT_INODE, b"gone", 0o644, 0, 0)

    def none(self: Plane, number: int, size: int) -> int:
        raise OSError(errno.ENOENT, "not being written")

    monkeypatch.setattr(Plane, "file_allocate", none)
    with pytest.raises(errors.StaleInodeError):
        await namespace.setxattr(gone.inode, ALLOCATE_REQUEST, b"8192")


@in_store
async def test_a_preallocation_gives_up_at_its_deadline(
    store: Store, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.namespace.files._SEAL_TIMEOUT_S", 0.05)
    number = namespace.create(ROOT_INODE, b"file", 0o644, 0, 0).inode
    with monkeypatch.context() as patch:
        being_sealed(patch, 1 << 30)
        with pytest.raises(errors.DeadlineError, match=f"inode {number}"):
            await namespace.setxattr(number, ALLOCATE_REQUEST, b"8192")
        with pytest.raises(errors.DeadlineError, match=f"inode {number}"):
            await namespace.setattr(number, Changes(size=10))


@in_store
async def test_statfs_never_looks_full_unless_pinned(
    store: Store, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_so(**numbers: int) -> None:
        monkeypatch.setattr(store, "space", lambda: Space(**numbers))

    is_so(size=100 << 20, used=99 << 20, pinned=0, inodes=10, inodes_max=100)
    space = namespace.statfs()
    assert space.block_count == 100 << 8
    assert space.block_count - space.free_count == space.block_count * USED_PERCENT_MAX // 100
    assert (space.inode_count, space.free_inode_count) == (100, 90)
    is_so(size=100 << 20, used=0, pinned=0, inodes=99, inodes_max=100, inodes_kept=20)
    assert namespace.statfs().free_inode_count == 100 - USED_PERCENT_MAX
    is_so(size=100 << 20, used=0, pinned=0, inodes=99, inodes_max=100, inodes_kept=98)
    assert namespace.statfs().free_inode_count == 2
    is_so(size=100 << 20, used=99 << 20, pinned=90 << 20, inodes=10, inodes_max=100)
    assert namespace.statfs().free_count == 10 << 8
    is_so(size=100 << 20, used=99 << 20, pinned=60 << 20, inodes=10, inodes_max=100, slabs=30 << 20)
    assert namespace.statfs().free_count == 10 << 8


@in_store
async def test_listing_resumes_behind_any_name(store: Store, namespace: Namespace) -> None:
    for index in range(25):
        namespace.create(ROOT_INODE, b"%02d" % index, 0o644, 0, 0)
    first = namespace.list_entries(ROOT_INODE, b"", 10)
    rest = namespace.list_entries(ROOT_INODE, first[-1][0], 100)
    assert [name for name, _ in first + rest] == [b"%02d" % index for index in range(25)]
    assert namespace.list_entries(ROOT_INODE, b"24", 10) == []


@in_store
async def test_a_parent_directory_takes_the_time_of_the_change(store: Store, namespace: Namespace) -> None:
    before = namespace.get(ROOT_INODE).mtime_ns
    inode = namespace.create(ROOT_INODE, b"x", 0o644, 0, 0)
    assert namespace.get(ROOT_INODE).mtime_ns == inode.mtime_ns > before
    # Within the step of the kernel's own clock a second change is not written again.
    namespace.create(ROOT_INODE, b"y", 0o644, 0, 0)
    assert namespace.get(ROOT_INODE).mtime_ns >= inode.mtime_ns
