"""Attacks that were seen to work, rebuilt: by devices, users, guests and peers."""

import helpers
from remounts import only_root, own_pool

__all__ = ["only_root", "own_pool"]

helpers.give_devices_time()
