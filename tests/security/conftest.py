"""Attacks that were seen to work, rebuilt: by devices, users, guests and peers."""

import pathlib
import sys

import helpers
from remounts import only_root, own_pool

__all__ = ["only_root", "own_pool"]

for _room in ("unit", "faults"):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / _room))

helpers.give_devices_time()
