"""The engines' own clients on the mount.

`pytest tests/engines` mounts kvfs on a pool of its own. `pytest tests/engines --directory DIR` asserts the same of any
directory (ext4, or a FUSE peer), to tell a wrong test from a wrong filesystem.
"""
