"""Clients of a mounted pool, in the application's own process: blocks by key, without the mount in between.

`kvfs.connect()` is the door (client.py). This package imports nothing by itself: the command line loads parts of it
that need no data plane.
"""
