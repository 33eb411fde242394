"""Fixtures of the surroundings in which engines run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from boxes import shared
from helpers import Pool, requires_fuse, requires_root


@pytest.fixture
def unmounted() -> Iterator[Pool]:
    """A pool that is not mounted; whatever a test mounts in its directory is seen in all namespaces."""
    requires_root()
    requires_fuse()
    pool = Pool(files=2, size="128M", started=False)
    with pool, shared(pool.base):
        yield pool
