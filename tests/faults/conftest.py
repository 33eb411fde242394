"""Faults: dead daemons, damaged devices, wrong input, pressure."""

import helpers
import pytest
from remounts import only_root, own_pool

__all__ = ["only_root", "own_pool"]

helpers.give_devices_time()


@pytest.fixture(autouse=True)
def _root(only_root: None) -> None:
    """Every test here kills, remounts or damages."""
