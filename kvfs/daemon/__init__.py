"""The one process of a pool that is mounted, exported or both."""
