"""The model test runs on pools of its own; what it shares with the black-box tests is in tests/helpers.py."""

import helpers

helpers.give_devices_time()
