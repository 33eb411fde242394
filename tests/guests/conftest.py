"""Real guests: a Debian kernel under QEMU's software emulation mounts a pool by virtio-fs (kvfs/bench/guest.py)."""

import helpers
import pytest

from kvfs.bench.common import MissingError
from kvfs.bench.guest import prepare


@pytest.fixture(scope="session", autouse=True)
def _guests_can_be_had():
    helpers.requires_root()  # its root directory, read by the guest
    try:
        prepare()
    except MissingError as error:
        pytest.skip(f"no guests here: {error}")
