"""The node plugin of the Container Storage Interface: a pod's volume is a directory of the node's mount.

It runs beside the daemon, in a container of its own, and knows the mount alone: neither pool nor devices.
"""
