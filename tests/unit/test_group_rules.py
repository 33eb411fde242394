"""Groups: which files belong together, and that eviction takes all of a group or none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from helpers import slowness
from store_pools import crashed_store, make, make_pool, names, rename, settle, unlink, verify_all, with_store, write

from kvfs.errors import PoolError
from kvfs.pool.config import CONFIG_NAME, GroupRule, load, parse
from kvfs.pool.lock import INDEX_NAME
from kvfs.record import GROUP_ATTRIBUTE, Inode, Kind
from kvfs.store.groups import Group, Groups
from kvfs.store.segment import Segment
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber

# Its header alone fills 32 pages, an eighth of a segment of these pools.
LARGE = 128 << 20
METADATA = GroupRule(endings=("", ".metadata"))


def put_group(store: Store, number: InodeNumber, group: bytes | None) -> None:
    """As the namespace sets and removes the attribute."""
    if group is None:
        store.blocks.remove_attribute(number, GROUP_ATTRIBUTE)
    else:
        store.blocks.set_attribute(number, GROUP_ATTRIBUTE, group)


async def found(store: Store, inode: Inode, *rules: GroupRule) -> set[bytes]:
    """The names of the files in this one's group; empty if it has none."""
    groups = await Groups(store.index, rules).of([inode.inode])
    if inode.inode not in groups:
        return set()
    records = [store.index.get(number) for number in groups[inode.inode].inodes]
    return {record.name for record in records if record is not None}


# ---- which files ----


def test_names_that_differ_in_an_ending_alone_are_a_group_in_one_directory(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        block = await write(store, b"x")
        metadata = await write(store, b"x.metadata")
        other = await write(store, b"y")
        below = make(store, ROOT_INODE, b"below", Kind.DIRECTORY)
        await write(store, b"y.metadata", parent=below.inode)
        assert await found(store, block, METADATA) == {b"x", b"x.metadata"}
        assert await found(store, metadata, METADATA) == {b"x", b"x.metadata"}
        assert await found(store, other, METADATA) == set(), "its metadata lies in another directory"
        assert await found(store, block) == set(), "no rule, no group"
        pairs = GroupRule(endings=(".bucket", ".meta"))
        assert await found(store, block, pairs) == set()
        bucket = await write(store, b"7.bucket")
        await write(store, b"7.meta")
        assert await found(store, bucket, METADATA, pairs) == set(), "the first rule that fits says what it is"
        assert await found(store, bucket, pairs, METADATA) == {b"7.bucket", b"7.meta"}
        rename(store, metadata.inode, b"z.metadata")
        assert await found(store, block, METADATA) == set(), "renamed away"
        unlink(store, b"7.meta")
        assert await found(store, bucket, pairs) == set()

    with_store(make_pool(tmp_path / "pool"), work)


def test_the_attribute_names_a_group_wherever_its_files_lie(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        below = make(store, ROOT_INODE, b"below", Kind.DIRECTORY)
        here, there = await write(store, b"a"), await write(store, b"b", parent=below.inode)
        assert not store.index.groups_used
        put_group(store, here.inode, b"prompt")
        assert await found(store, here) == set(), "alone"
        put_group(store, there.inode, b"prompt")
        stranger = await write(store, b"c")
        put_group(store, stranger.inode, b"prompt\0")
        assert await found(store, here) == {b"a", b"b"} == await found(store, there)
        await write(store, b"a.metadata")
        assert await found(store, here, METADATA) == {b"a", b"b"}, "the attribute counts before a rule"
        await settle(store)  # now it is LMDB that says so
        assert await found(store, there) == {b"a", b"b"}
        put_group(store, there.inode, b"another")
        assert await found(store, here) == set()
        put_group(store, there.inode, b"prompt")
        assert await found(store, here) == {b"a", b"b"}
        put_group(store, there.inode, None)
        assert await found(store, here) == set()
        for name in (b"a", b"c"):
            unlink(store, name)
        await settle(store)
        assert not store.index.groups_used, "nothing of a group is left behind"

    with_store(make_pool(tmp_path / "pool"), work)


def test_a_directory_is_a_group_by_its_attribute_or_by_a_rule(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        kv = make(store, ROOT_INODE, b"kv", Kind.DIRECTORY)
        prompt = make(store, kv.inode, b"prompt-1", Kind.DIRECTORY)
        deeper = make(store, prompt.inode, b"deeper", Kind.DIRECTORY)
        layers = [await write(store, b"layer-%d" % i, parent=prompt.inode) for i in range(300)]
        await write(store, b"other", parent=deeper.inode)
        top = [await write(store, name, parent=kv.inode) for name in (b"a", b"b")]
        rule = GroupRule(directory="kv/prompt-*")
        assert len(await found(store, layers[7], rule)) == 300
        assert await found(store, top[0], rule) == set(), "a pattern fits whole paths"
        assert await found(store, layers[7], GroupRule(directory="*")) == set()
        assert await found(store, top[0], GroupRule(directory="*")) == {b"a", b"b"}
        put_group(store, kv.inode, b"yes")
        assert await found(store, top[0]) == {b"a", b"b"}
        assert await found(store, layers[7]) == set(), "not what is deeper"
        put_group(store, layers[0].inode, b"own")
        assert len(await found(store, layers[7], rule)) == 299, "it has a group of its own"

    with_store(make_pool(tmp_path / "pool"), work)


# ---- restarts ----


@pytest.mark.parametrize("end", ["clean", "crash", "rebuild"])
def test_groups_are_there_after_a_restart(tmp_path: Path, end: str) -> None:
    pool = make_pool(tmp_path / "pool")

    async def store_some(store: Store) -> None:
        for name in (b"a", b"b", b"c"):
            inode = await write(store, name)
            put_group(store, inode.inode, b"prompt")
        unlink(store, b"c")
        directory = make(store, ROOT_INODE, b"d", Kind.DIRECTORY)
        put_group(store, directory.inode, b"yes")
        for name in (b"1", b"2"):
            await write(store, name, parent=directory.inode)
        await settle(store)

    async def look(store: Store) -> None:
        for parent, pair in ((ROOT_INODE, {b"a", b"b"}), (store.index.lookup(ROOT_INODE, b"d"), {b"1", b"2"})):
            assert parent is not None
            number = store.index.lookup(parent, min(pair))
            assert number is not None
            inode = store.index.get(number)
            assert inode is not None
            assert await found(store, inode) == pair

    (crashed_store if end == "crash" else with_store)(pool, store_some)
    if end == "rebuild":
        for path in (pool / INDEX_NAME).iterdir():
            path.unlink()
    with_store(pool, look)


# ---- eviction ----


def grouped_pool(path: Path) -> Path:
    """Segments of 1 MiB, and the rule of METADATA in pool.toml."""
    pool = make_pool(path)
    config = pool / CONFIG_NAME
    config.write_text(config.read_text() + '\n[[group]]\nsuffixes = ["", ".metadata"]\n')
    return pool


async def pairs_apart(store: Store, count: int) -> None:
    """Pairs of which each half lies in another segment, and the third pair in others than the first two."""
    for ending in (b"", b".metadata"):
        for i in range(count):
            await write(store, b"%d%s" % (i, ending), LARGE)
            if i % 2:
                store.segments.retire_open()


def test_eviction_takes_both_or_neither_wherever_they_lie(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await pairs_apart(store, 4)
        assert await store.evict(1) > 0
        left = names(store)
        assert left == {name for i in range(4) if b"%d" % i in left for name in (b"%d" % i, b"%d.metadata" % i)}
        assert left == {b"2", b"2.metadata", b"3", b"3.metadata"}, "the segment of the first two pairs went"
        await verify_all(store)

    with_store(grouped_pool(tmp_path / "pool"), work)


def test_a_pinned_member_keeps_its_group(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await pairs_apart(store, 4)
        pinned = store.index.lookup(ROOT_INODE, b"2.metadata")
        assert pinned is not None
        await store.blocks.pin(pinned)
        await store.evict(1 << 40)
        assert names(store) == {b"2", b"2.metadata"}
        await verify_all(store)
        await store.blocks.unpin(pinned)
        await store.evict(1 << 40)
        assert names(store) == set()

    with_store(grouped_pool(tmp_path / "pool"), work)


def test_a_member_that_is_being_written_keeps_its_group(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await pairs_apart(store, 2)
        number = store.index.lookup(ROOT_INODE, b"1.metadata")
        assert number is not None
        await store.sealing.rewrite(number, True)
        await store.evict(1 << 40)
        assert names(store) == {b"1", b"1.metadata"}

    with_store(grouped_pool(tmp_path / "pool"), work)


def test_a_group_stays_if_a_member_is_opened_after_the_look_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of its segments goes first is all the same."""

    async def work(store: Store) -> None:
        await pairs_apart(store, 2)
        number = store.index.lookup(ROOT_INODE, b"1.metadata")
        assert number is not None
        drop, opened = store.evictor._drop_blocks, False

        async def drop_late(segment: Segment, inodes: Sequence[InodeNumber], groups: dict[InodeNumber, Group]) -> int:
            nonlocal opened
            if number in groups and not opened:
                opened = True
                assert not groups[number].held
                await store.sealing.rewrite(number, True)
            return await drop(segment, inodes, groups)

        monkeypatch.setattr(store.evictor, "_drop_blocks", drop_late)
        await store.evict(1 << 40)
        assert opened and names(store) == {b"1", b"1.metadata"}

    with_store(grouped_pool(tmp_path / "pool"), work)


def test_an_unlinked_member_leaves_the_others(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await pairs_apart(store, 2)
        unlink(store, b"1.metadata")
        await settle(store)
        assert names(store) == {b"0", b"0.metadata", b"1"}

    with_store(grouped_pool(tmp_path / "pool"), work)


def test_a_large_group_goes_as_one(tmp_path: Path) -> None:
    """More than the evictor takes at a time."""

    async def work(store: Store) -> None:
        for i in range(600):
            inode = await write(store, b"%d" % i)
            put_group(store, inode.inode, b"all")
        single = await write(store, b"single", LARGE)
        assert await store.evict(1) > 0
        assert names(store) <= {single.name}
        with trio.fail_after(50 * slowness()):
            await settle(store)

    with_store(make_pool(tmp_path / "pool"), work)


# ---- rules in pool.toml ----


def test_rules_are_read_written_and_kept_in_the_labels(tmp_path: Path) -> None:
    pool = grouped_pool(tmp_path / "pool")
    path = pool / CONFIG_NAME
    path.write_text(path.read_text() + '\n[[group]]\ndirectory = "kv/*"\n')
    config = load(pool)
    assert config is not None
    assert config.groups == (METADATA, GroupRule(directory="kv/*"))
    assert parse(config.dump(), "again") == config

    async def nothing(store: Store) -> None:
        assert store.config.groups == config.groups

    with_store(pool, nothing)
    path.unlink()
    with_store(pool, nothing)  # from the labels


@pytest.mark.parametrize(("rule", "complaint"), [
    ("", r"group\[0\]: one of suffixes and directory"),
    ('suffixes = ["a", "b"]\ndirectory = "kv"', r"group\[0\]: one of suffixes and directory"),
    ('suffixes = ["a"]', "two or more"),
    ('suffixes = ["a", "a"]', "two or more"),
    ('suffixes = ["a", 3]', "strings"),
    ('suffixes = ["a", "b/c"]', "do not end so"),
    ('suffixes = "a"', "an array of strings is needed"),
    (f"suffixes = {[str(i) for i in range(17)]}", "at most 16"),
    ('directory = ""', "not empty"),
    ('directory = "/kv"', "no path"),
    ('directory = "kv/../a"', "no path"),
    ('directory = "kv/**"', "no path"),
    ("directory = 3", "a string is needed"),
    ('directory = "kv"\nwhat = 1', r"group\[0\].what is not a key"),
])  # fmt: skip
def test_a_rule_that_is_none_is_refused_by_name(tmp_path: Path, rule: str, complaint: str) -> None:
    text = (make_pool(tmp_path / "pool") / CONFIG_NAME).read_text()
    with pytest.raises(PoolError, match=complaint):
        parse(f"{text}\n[[group]]\n{rule}\n", "pool.toml")


def test_too_many_rules_are_refused(tmp_path: Path) -> None:
    text = (make_pool(tmp_path / "pool") / CONFIG_NAME).read_text()
    with pytest.raises(PoolError, match="65 of them; at most 64"):
        parse(text + '\n[[group]]\ndirectory = "kv"\n' * 65, "pool.toml")
