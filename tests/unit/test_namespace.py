"""The namespace over a double of the store: an index of dicts and a plane that knows which inodes are open."""

from __future__ import annotations

import errno
import functools
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio
import trio.testing

from kvfs import errors
from kvfs.names import Names
from kvfs.namespace.attributes import ALLOCATE_REQUEST, PIN_ATTRIBUTE, SLAB_ATTRIBUTE, SLAB_REQUEST, SYMLINK_KEY
from kvfs.namespace.files import USED_PERCENT_MAX, XATTRS_SIZE_MAX, Changes, Namespace
from kvfs.record import Inode, InodeFlags, Kind
from kvfs.types import ROOT_INODE, InodeNumber

SLAB_SIZE = 256 << 20


def in_trio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test; pytest sees its arguments."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        trio.run(functools.partial(test, *args, **kwargs))

    return run


@dataclass(frozen=True)
class Space:
    size: int
    used: int
    pinned: int
    inodes: int
    inodes_max: int
    inodes_kept: int = 0
    slabs: int = 0


class IndexDouble:
    """Inodes as packed records, so that nobody can change one without putting it back."""

    def __init__(self) -> None:
        self.records: dict[InodeNumber, bytes] = {}
        self.dentries: dict[tuple[InodeNumber, bytes], InodeNumber] = {}

    def get(self, inode: InodeNumber) -> Inode | None:
        record = self.records.get(inode)
        return None if record is None else Inode.unpack(record)

    def raw(self, inode: int) -> bytes | None:
        return self.records.get(InodeNumber(inode))

    def lookup(self, parent: InodeNumber, name: bytes) -> InodeNumber | None:
        return self.dentries.get((parent, name))

    def _unname(self, inode: Inode) -> None:
        if self.dentries.get((inode.parent, inode.name)) == inode.inode:
            del self.dentries[inode.parent, inode.name]

    def put(self, new: Inode, old: Inode | None, record: bytes | None = None) -> None:
        assert record is None or record == new.pack()
        if old is not None:
            self._unname(old)
        if InodeFlags.NAMELESS not in new.flags and new.inode != ROOT_INODE:
            self.dentries[new.parent, new.name] = new.inode
        self.records[new.inode] = new.pack()

    def replace_directory(self, number: InodeNumber, record: bytes) -> None:
        new, old = Inode.unpack(record), self.get(number)
        assert old is not None and new.kind == old.kind == Kind.DIRECTORY
        assert (new.inode, new.parent, new.name) == (number, old.parent, old.name)
        self.records[number] = record

    def delete(self, old: Inode) -> None:
        self._unname(old)
        del self.records[old.inode]

    def list(self, parent: InodeNumber, after: bytes, limit: int) -> list[tuple[bytes, InodeNumber]]:
        names = sorted((name, number) for (at, name), number in self.dentries.items() if at == parent and name > after)
        return names[:limit]

    def keep(self, number: int) -> None:
        pass

    def hidden(self, number: int) -> bytes | None:
        return None


class PlaneDouble:
    """The block table and the files being written, as far as the namespace can tell."""

    def __init__(self) -> None:
        self.table: dict[int, Inode] = {}
        self.written: dict[int, int] = {}
        self.full = False
        self.sealing = 0  # calls that meet a seal under way
        self.names = Names()

    def name_put(self, record: bytes, replaced: int) -> int:
        if self.full:
            raise errors.NoSpaceError("block table: full")
        assert not replaced
        inode = Inode.unpack(record)
        self.table[inode.inode] = inode
        return 0

    def inode_update(self, record: bytes) -> None:
        inode = Inode.unpack(record)
        assert inode.inode in self.table
        self.table[inode.inode] = inode

    def file_create(self, inode: int) -> None:
        assert inode in self.table
        self.written[inode] = 0

    async def file_rewrite(self, inode: int, keep_content: bool) -> None:
        if inode not in self.table:
            raise errors.NotFoundError(f"inode {inode}: gone")
        self.written.setdefault(inode, self.table[inode].size if keep_content else 0)

    def file_truncate(self, inode: int, size: int) -> None:
        if self.sealing:
            self.sealing -= 1
            raise OSError(errno.EBUSY, "a seal is under way")
        if inode not in self.written:
            raise OSError(errno.ENOENT, "not being written")
        self.written[inode] = size

    def file_allocate(self, inode: int, size: int) -> None:
        self.file_truncate(inode, max(size, self.written.get(inode, 0)))

    def slab_wanted(self, inode: int, size: int) -> bool:
        return size >= SLAB_SIZE

    def file_set_mtime(self, inode: int, mtime_ns: int) -> None:
        if inode not in self.written:
            raise errors.NotFoundError(f"inode {inode}: not being written")


class SlabsDouble:
    """Notes what was asked of it."""

    def __init__(self, index: IndexDouble) -> None:
        self.index = index
        self.full = False
        self.calls: list[tuple[object, ...]] = []

    async def preallocate(self, number: InodeNumber, size: int) -> bool:
        self.calls.append(("preallocate", number, size))
        if self.full:
            return False
        inode = self.index.get(number)
        assert inode is not None
        inode.flags |= InodeFlags.SLAB
        self.index.put(inode, inode)
        return True

    async def choose(self, number: InodeNumber) -> None:
        await self.preallocate(number, 0)

    async def resize(self, number: InodeNumber, size: int) -> bool:
        self.calls.append(("resize", number, size))
        return True


class StoreDouble:
    """A store, and all its parts that the namespace asks."""

    def __init__(self) -> None:
        self.blocks = self.sealing = self.service = self.bringing = self
        self.directories: object = None
        self.index = IndexDouble()
        self.plane = PlaneDouble()
        self.slabs = SlabsDouble(self.index)
        self.counter = 1
        self.given: list[tuple[InodeNumber, bytes]] = []
        self.dirty_summaries: list[int] = []
        self.syncs = 0
        self.numbers = Space(size=1 << 30, used=0, pinned=0, inodes=0, inodes_max=1000)
        root = Inode(ROOT_INODE, ROOT_INODE, b"", Kind.DIRECTORY, stat.S_IFDIR | 0o755, nlink=2)
        self.index.put(root, None)
        self.plane.name_put(root.pack(), 0)

    def next_inode(self) -> InodeNumber:
        self.counter += 1
        return InodeNumber(self.counter)

    def next_version(self) -> int:
        self.counter += 1
        return self.counter

    def hide_in_table(self, inodes: Sequence[InodeNumber]) -> None:
        assert all(self.index.get(number) is None for number in inodes)

    def entered(self, inode: Inode) -> None:
        assert self.index.get(inode.inode) is not None

    create_delay_s = 0.0

    def check_not_behind(self) -> None:
        pass

    def give_name(self, parent: InodeNumber, name: bytes) -> None:
        assert self.index.lookup(parent, name) is not None
        self.given.append((parent, name))

    def unlink(self, parent: InodeNumber, name: bytes) -> None:
        """As far as an answer shows: C removes and renames."""
        number = self.index.lookup(parent, name)
        inode = None if number is None else self.index.get(number)
        if inode is None:
            raise errors.NotFoundError(f"{name!r}: not found")
        self.index.delete(inode)

    rmdir = unlink

    def rename(self, parent: InodeNumber, name: bytes, new_parent: InodeNumber, new_name: bytes, flags: int) -> None:
        old = self.index.lookup(parent, name)
        self.unlink(parent, name)
        assert old is not None
        self.index.dentries[new_parent, new_name] = old
        self.index.records[old] = Inode(old, new_parent, new_name, Kind.FILE, stat.S_IFREG).pack()

    @asynccontextmanager
    async def turn(self, inode: InodeNumber) -> AsyncIterator[None]:
        yield

    async def rewrite(self, inode: InodeNumber, keep_content: bool) -> None:
        await self.plane.file_rewrite(inode, keep_content)

    async def seal(self, inode: InodeNumber) -> Inode | None:
        return self._seal(inode)

    def seal_soon(self, number: InodeNumber, done: Callable[[errors.KvfsError | None], None]) -> None:
        self._seal(number)
        done(None)

    def _seal(self, inode: InodeNumber) -> Inode | None:
        old = self.index.get(inode)
        if old is None or inode not in self.plane.written:
            return None
        new = old.copy()
        new.size = self.plane.written.pop(inode)
        new.flags |= InodeFlags.REWRITTEN if old.sealed else InodeFlags.SEALED
        new.version = self.next_version()
        self.index.put(new, old)
        self.plane.inode_update(new.pack())
        return new

    def renamed(self, inode: Inode, *, entered: bool = False, rights: bool = True) -> None:
        assert not entered or self.index.records[inode.inode] == inode.pack() == self.plane.table[inode.inode].pack()
        self.dirty_summaries.append(inode.inode)

    async def pin(self, inode: InodeNumber, user: int) -> None:
        self._set_pinned(inode, True)

    async def unpin(self, inode: InodeNumber) -> None:
        self._set_pinned(inode, False)

    def _set_pinned(self, number: InodeNumber, pinned: bool) -> None:
        inode = self.index.get(number)
        assert inode is not None
        inode.flags = inode.flags | InodeFlags.PINNED if pinned else inode.flags & ~InodeFlags.PINNED
        self.index.put(inode, inode)

    async def sync(self) -> None:
        self.syncs += 1

    def space(self) -> Space:
        return self.numbers


@pytest.fixture
def store() -> StoreDouble:
    return StoreDouble()


@pytest.fixture
def namespace(store: StoreDouble) -> Namespace:
    return Namespace(store)


async def sealed(namespace: Namespace, name: bytes, parent: InodeNumber = ROOT_INODE) -> Inode:
    inode = namespace.create(parent, name, 0o644, 1000, 1000)
    failures: list[errors.KvfsError | None] = []
    namespace.flush(inode.inode, failures.append)
    assert failures == [None]
    return namespace.get(inode.inode)


def names(namespace: Namespace, parent: InodeNumber = ROOT_INODE) -> list[bytes]:
    return [name for name, _ in namespace.list_entries(parent, b"", 100)]


def test_a_created_file_is_in_index_table_and_being_written(namespace: Namespace, store: StoreDouble) -> None:
    inode = namespace.create(ROOT_INODE, b"x", 0o640, 7, 8)
    assert namespace.lookup(ROOT_INODE, b"x") == inode
    assert store.plane.table[inode.inode] == inode
    assert store.plane.written == {inode.inode: 0}
    assert (inode.mode, inode.uid, inode.gid) == (stat.S_IFREG | 0o640, 7, 8)


def test_a_full_block_table_changes_nothing(namespace: Namespace, store: StoreDouble) -> None:
    store.plane.full = True
    with pytest.raises(errors.NoSpaceError):
        namespace.create(ROOT_INODE, b"x", 0o640, 7, 8)
    assert names(namespace) == []
    assert not store.plane.written


def test_creating_a_name_twice_is_eexist(namespace: Namespace) -> None:
    namespace.create(ROOT_INODE, b"x", 0o640, 7, 8)
    for attempt in (namespace.create, namespace.mkdir):
        with pytest.raises(errors.ExistsError) as caught:
            attempt(ROOT_INODE, b"x", 0o640, 7, 8)
        assert caught.value.errno == errno.EEXIST


def test_names_over_255_bytes_are_refused(namespace: Namespace) -> None:
    namespace.create(ROOT_INODE, b"n" * 255, 0o640, 0, 0)
    with pytest.raises(errors.NameTooLongError):
        namespace.create(ROOT_INODE, b"n" * 256, 0o640, 0, 0)


def test_setgid_directories_hand_their_group_down(namespace: Namespace) -> None:
    shared = namespace.mkdir(ROOT_INODE, b"shared", 0o2775, 1, 50)
    file = namespace.create(shared.inode, b"f", 0o644, 2, 2)
    below = namespace.mkdir(shared.inode, b"d", 0o755, 2, 2)
    assert (file.gid, below.gid) == (50, 50)
    assert below.mode & stat.S_ISGID
    assert not file.mode & stat.S_ISGID


@in_trio
async def test_opening_for_write_by_another_user_clears_suid(namespace: Namespace) -> None:
    inode = await sealed(namespace, b"x")
    await namespace.setattr(inode.inode, Changes(mode=0o4777))
    assert (await namespace.open_for_write(inode.inode)).mode & stat.S_ISUID
    assert not (await namespace.open_for_write(inode.inode, kill_suid=1000)).mode & stat.S_ISUID
    assert not namespace.get(inode.inode).mode & stat.S_ISUID


@in_trio
async def test_set_group_id_without_group_execute_goes_with_a_write_of_another_group(namespace: Namespace) -> None:
    inode = await sealed(namespace, b"x")
    await namespace.setattr(inode.inode, Changes(mode=0o2666, gid=1000))
    assert (await namespace.open_for_write(inode.inode)).mode & stat.S_ISGID, "root keeps it"
    assert (await namespace.open_for_write(inode.inode, kill_suid=1000)).mode & stat.S_ISGID, "so does its group"
    assert not (await namespace.open_for_write(inode.inode, kill_suid=1001)).mode & stat.S_ISGID


@in_trio
async def test_truncate_by_path_seals_and_by_handle_does_not(namespace: Namespace, store: StoreDouble) -> None:
    inode = await sealed(namespace, b"x")
    result = await namespace.setattr(inode.inode, Changes(size=5000))
    assert result.size == 5000 and result.sealed and store.plane.written == {}
    await namespace.setattr(inode.inode, Changes(size=100, through_handle=True))
    assert store.plane.written == {inode.inode: 100}
    with pytest.raises(errors.IsDirectoryError):
        await namespace.setattr(ROOT_INODE, Changes(size=0))


@in_trio
async def test_truncate_waits_for_a_seal_under_way(namespace: Namespace, store: StoreDouble) -> None:
    inode = await sealed(namespace, b"x")
    store.plane.sealing = 3
    assert (await namespace.setattr(inode.inode, Changes(size=7))).size == 7


@in_trio
async def test_opening_a_block_that_is_evicted_meanwhile_is_estale(namespace: Namespace, store: StoreDouble) -> None:
    inode = await sealed(namespace, b"x")
    del store.plane.table[inode.inode]
    with pytest.raises(errors.StaleInodeError):
        await namespace.open_for_write(inode.inode)


@in_trio
async def test_a_sealed_record_keeps_the_size_of_its_header_until_it_is_sealed_again(
    namespace: Namespace, store: StoreDouble
) -> None:
    inode = await sealed(namespace, b"x")
    await namespace.setattr(inode.inode, Changes(size=5000))
    await namespace.setattr(inode.inode, Changes(size=100, through_handle=True))
    assert store.plane.table[inode.inode].size == 5000


@in_trio
async def test_setattr_changes_only_what_it_is_told(namespace: Namespace) -> None:
    inode = await sealed(namespace, b"x")
    changed = await namespace.setattr(inode.inode, Changes(mode=0o100600, mtime_ns=5, atime_ns=6))
    assert (changed.mode, changed.mtime_ns, changed.atime_ns) == (stat.S_IFREG | 0o600, 5, 6)
    assert (changed.uid, changed.gid, changed.version, changed.size) == (
        inode.uid,
        inode.gid,
        inode.version,
        inode.size,
    )
    assert changed.ctime_ns >= inode.ctime_ns
    assert namespace.get(inode.inode) == changed


@in_trio
async def test_a_change_of_owner_clears_suid(namespace: Namespace) -> None:
    inode = await sealed(namespace, b"x")
    await namespace.setattr(inode.inode, Changes(mode=0o6755))
    assert (await namespace.setattr(inode.inode, Changes(uid=3))).mode & 0o7777 == 0o755
    await namespace.setattr(inode.inode, Changes(mode=0o6745))
    assert (await namespace.setattr(inode.inode, Changes(gid=3))).mode & 0o7777 == 0o2745


@in_trio
async def test_opening_for_write_keeps_the_inode(namespace: Namespace, store: StoreDouble) -> None:
    inode = await sealed(namespace, b"x")
    assert (await namespace.open_for_write(inode.inode, truncate=True)).inode == inode.inode
    assert store.plane.written == {inode.inode: 0}
    with pytest.raises(errors.IsDirectoryError):
        await namespace.open_for_write(ROOT_INODE)


@in_trio
async def test_fsync_is_durable(namespace: Namespace, store: StoreDouble) -> None:
    inode = namespace.create(ROOT_INODE, b"x", 0o644, 0, 0)
    await namespace.fsync(inode.inode)
    assert namespace.get(inode.inode).sealed and store.syncs == 1


def test_symlinks_keep_their_target_to_themselves(namespace: Namespace) -> None:
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


@in_trio
async def test_xattrs(namespace: Namespace) -> None:
    inode = await sealed(namespace, b"x")
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


@in_trio
async def test_the_pin_attribute_pins(namespace: Namespace) -> None:
    inode = await sealed(namespace, b"x")
    with pytest.raises(errors.NoAttributeError):
        namespace.getxattr(inode.inode, PIN_ATTRIBUTE)
    await namespace.setxattr(inode.inode, PIN_ATTRIBUTE, b"1")
    assert InodeFlags.PINNED in namespace.get(inode.inode).flags
    assert namespace.getxattr(inode.inode, PIN_ATTRIBUTE) == b"1"
    assert namespace.listxattr(inode.inode) == [PIN_ATTRIBUTE]
    await namespace.removexattr(inode.inode, PIN_ATTRIBUTE)
    assert InodeFlags.PINNED not in namespace.get(inode.inode).flags


@in_trio
async def test_slabs_are_made_by_attribute_request_and_size(namespace: Namespace, store: StoreDouble) -> None:
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
    assert store.slabs.calls == [
        ("preallocate", chosen, 0), ("preallocate", asked, 4096), ("preallocate", by_handle, SLAB_SIZE),
        ("resize", by_handle, 10),
    ]  # fmt: skip
    assert namespace.get(by_handle).size == 10


@in_trio
async def test_what_finds_no_room_as_a_slab_is_a_file(namespace: Namespace, store: StoreDouble) -> None:
    store.slabs.full = True
    asked = namespace.create(ROOT_INODE, b"asked", 0o644, 0, 0).inode
    await namespace.setxattr(asked, SLAB_REQUEST, b"%d" % SLAB_SIZE)
    by_handle = namespace.create(ROOT_INODE, b"handle", 0o644, 0, 0).inode
    await namespace.setattr(by_handle, Changes(size=SLAB_SIZE, through_handle=True))
    assert store.plane.written[asked] == store.plane.written[by_handle] == SLAB_SIZE


@in_trio
async def test_a_preallocation_waits_for_the_seal_and_makes_nothing_smaller(
    namespace: Namespace, store: StoreDouble
) -> None:
    number = namespace.create(ROOT_INODE, b"file", 0o644, 0, 0).inode
    store.plane.sealing = 3
    await namespace.setxattr(number, ALLOCATE_REQUEST, b"8192")
    await namespace.setxattr(number, ALLOCATE_REQUEST, b"4096")
    assert store.plane.written[number] == 8192 and store.plane.sealing == 0 and not store.slabs.calls


@in_trio
async def test_a_preallocation_of_what_its_last_writer_has_just_closed_writes_it_again(
    namespace: Namespace, store: StoreDouble
) -> None:
    inode = await sealed(namespace, b"file")
    assert inode.inode not in store.plane.written
    await namespace.setxattr(inode.inode, ALLOCATE_REQUEST, b"8192")
    assert store.plane.written[inode.inode] == 8192
    gone = namespace.create(ROOT_INODE, b"gone", 0o644, 0, 0)
    del store.plane.written[gone.inode]
    with pytest.raises(errors.StaleInodeError):
        await namespace.setxattr(gone.inode, ALLOCATE_REQUEST, b"8192")


def test_a_preallocation_gives_up_at_its_deadline(
    namespace: Namespace, store: StoreDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.namespace.files._SEAL_TIMEOUT_S", 1.0)  # a look every 2 ms: 60 s are 30,000 of them
    number = namespace.create(ROOT_INODE, b"file", 0o644, 0, 0).inode
    store.plane.sealing = 1 << 30

    async def work() -> None:
        with pytest.raises(errors.DeadlineError, match=f"inode {number}"):
            await namespace.setxattr(number, ALLOCATE_REQUEST, b"8192")
        with pytest.raises(errors.DeadlineError, match=f"inode {number}"):
            await namespace.setattr(number, Changes(size=10))

    trio.run(work, clock=trio.testing.MockClock(autojump_threshold=0))


def test_statfs_never_looks_full_unless_pinned(namespace: Namespace, store: StoreDouble) -> None:
    store.numbers = Space(size=100 << 20, used=99 << 20, pinned=0, inodes=10, inodes_max=100)
    space = namespace.statfs()
    assert space.block_count == 100 << 8
    assert space.block_count - space.free_count == space.block_count * USED_PERCENT_MAX // 100
    assert (space.inode_count, space.free_inode_count) == (100, 90)
    store.numbers = Space(size=100 << 20, used=0, pinned=0, inodes=99, inodes_max=100, inodes_kept=20)
    assert namespace.statfs().free_inode_count == 100 - USED_PERCENT_MAX
    store.numbers = Space(size=100 << 20, used=0, pinned=0, inodes=99, inodes_max=100, inodes_kept=98)
    assert namespace.statfs().free_inode_count == 2
    store.numbers = Space(size=100 << 20, used=99 << 20, pinned=90 << 20, inodes=10, inodes_max=100)
    assert namespace.statfs().free_count == 10 << 8
    store.numbers = Space(size=100 << 20, used=99 << 20, pinned=60 << 20, inodes=10, inodes_max=100, slabs=30 << 20)
    assert namespace.statfs().free_count == 10 << 8


def test_listing_resumes_behind_any_name(namespace: Namespace) -> None:
    for index in range(25):
        namespace.create(ROOT_INODE, b"%02d" % index, 0o644, 0, 0)
    first = namespace.list_entries(ROOT_INODE, b"", 10)
    rest = namespace.list_entries(ROOT_INODE, first[-1][0], 100)
    assert [name for name, _ in first + rest] == [b"%02d" % index for index in range(25)]
    assert namespace.list_entries(ROOT_INODE, b"24", 10) == []


def test_a_parent_directory_takes_the_time_of_the_change(namespace: Namespace) -> None:
    before = namespace.get(ROOT_INODE).mtime_ns
    inode = namespace.create(ROOT_INODE, b"x", 0o644, 0, 0)
    assert namespace.get(ROOT_INODE).mtime_ns == inode.mtime_ns > before
    # Within the step of the kernel's own clock a second change is not written again.
    namespace.create(ROOT_INODE, b"y", 0o644, 0, 0)
    assert namespace.get(ROOT_INODE).mtime_ns >= inode.mtime_ns
