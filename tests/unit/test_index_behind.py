"""Commits of the index fail for long: new names are slowed down, then refused with EIO, and never with ENOSPC."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
from store_pools import make_pool, with_store, write
from test_reservations import reserve

from kvfs.errors import KvfsError
from kvfs.names import Leave
from kvfs.namespace.files import Namespace
from kvfs.store import blocks, segments
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE

SLOW, MOST = 40, 120


def test_names_are_slowed_down_then_refused_and_made_again_when_the_index_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_BEHIND_SLOW", SLOW)
    monkeypatch.setattr(blocks, "_BEHIND_MOST", MOST)
    pool = make_pool(tmp_path)

    def fail(txn: object, batch: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def work(store: Store) -> None:
        namespace = Namespace(store)
        left: list[tuple[Leave, bool]] = []
        leave = store.plane.names.leave
        monkeypatch.setattr(
            store.plane.names, "leave", lambda reason, on: (left.append((reason, on)), leave(reason, on))
        )
        with monkeypatch.context() as patch:
            patch.setattr(store.index, "_write_batch", fail)
            for number in range(SLOW):
                namespace.mkdir(ROOT_INODE, b"%d" % number, 0o755, 0, 0)
            await store._commit_and_flush()
            assert namespace.create_delay_s > 0
            assert left[-1] == (Leave.BEHIND, True), "the data plane makes no files meanwhile"
            with pytest.raises(KvfsError) as caught:
                for number in range(SLOW, 2 * MOST):
                    namespace.mkdir(ROOT_INODE, b"%d" % number, 0o755, 0, 0)
            assert caught.value.errno == errno.EIO
            assert "index" in str(caught.value) and f"{MOST} may" in str(caught.value)
            assert store.index.changes_pending <= MOST + 10
        await store._commit_and_flush()
        assert namespace.create_delay_s == 0
        assert left[-1] == (Leave.BEHIND, False)
        namespace.create(ROOT_INODE, b"after", 0o644, 0, 0)

    with_store(pool, work)


def test_a_full_pool_whose_index_stands_still_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emptied segments are not used again before the index knows. Writers who wait for one hear of the index."""
    monkeypatch.setattr(segments, "SPACE_TIMEOUT_S", 1.0)
    released = threading.Event()

    async def work(store: Store) -> None:
        holder, commit = store.reservations.join(), store.index._write_batch

        def hang(txn: object, batch: object) -> None:
            assert released.wait(100)
            commit(txn, batch)

        monkeypatch.setattr(store.index, "_write_batch", hang)
        try:
            with pytest.raises(KvfsError) as caught:
                for number in range(1000):  # headers of half a megabyte
                    await write(store, b"%d" % number, 1 << 28)
            assert caught.value.errno == errno.EIO and "index" in str(caught.value)
            assert store.segments.waits_for_commit
            places = await reserve(store, holder, [b"%d" % number for number in range(40)], 1 << 20, timeout_s=1.0)
            assert places[-1] == -errno.EIO
        finally:
            released.set()
        await store.sync()
        await write(store, b"after", 1 << 28)
        store.reservations.take_back_all(holder)

    with_store(make_pool(tmp_path), work)
