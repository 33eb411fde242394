"""The model test runs on pools of its own; what it shares with the black-box tests is in tests/helpers.py."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import helpers

for _name in helpers.FIXTURES:
    globals()[_name] = getattr(helpers, _name)

helpers.give_devices_time()
