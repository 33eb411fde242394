"""Commits of the index fail for long: new names are slowed down, then refused with EIO, and never with ENOSPC."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from store_pools import make_pool, with_store

from kvfs.errors import KvfsError
from kvfs.names import Leave
from kvfs.namespace.files import Namespace
from kvfs.store import blocks
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
