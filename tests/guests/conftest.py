"""Real guests: a Debian kernel under QEMU's software emulation mounts a pool by virtio-fs (tools/benches/guest.py)."""

import helpers
import pytest

from benches.common import MissingError
from benches.guest import prepare


@pytest.fixture(scope="session", autouse=True)
def _guests_can_be_had():
    helpers.requires_root()  # its root directory, read by the guest
    try:
        prepare()
    except MissingError as error:
        pytest.skip(f"no guests here: {error}")
