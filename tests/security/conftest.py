"""Attacks that were seen to work, rebuilt: by devices, users, guests and peers."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "faults"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "unit"))

import helpers

for _name in helpers.FIXTURES:
    globals()[_name] = getattr(helpers, _name)

helpers.give_devices_time()
