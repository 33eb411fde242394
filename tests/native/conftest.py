"""The native path: libkvfs and what stands on it, against a mounted pool and against the mount's own files."""

import helpers
import pytest

import kvfs

helpers.give_devices_time()


@pytest.fixture
def client(directory):
    """A client in a fresh directory of the mount, namespace "llama"."""
    with kvfs.connect(directory, "llama", gpu=None) as connected:
        yield connected


@pytest.fixture
def block_path(directory):
    """The file of a key of `client`."""

    def path(key):
        name = (key.encode() if isinstance(key, str) else key).hex()
        return directory / "llama" / name[:2] / name

    return path
