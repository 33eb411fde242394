"""The POSIX contract: what engines rely on, asserted through the mount.

`pytest tests/posix` mounts kvfs on a pool of its own; `pytest tests/posix --directory DIR` asserts the same of
any directory (ext4, or a FUSE peer), to tell a wrong test from a wrong filesystem.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import helpers

for _name in helpers.FIXTURES:
    globals()[_name] = getattr(helpers, _name)
