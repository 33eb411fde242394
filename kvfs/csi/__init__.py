"""The node plugin of the Container Storage Interface: a pod's volume is a directory of the node's mount.

It runs in a separate container next to the daemon, and knows only the mount: neither pool nor devices.
"""
