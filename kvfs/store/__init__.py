"""Where blocks live: devices, segments, their summaries, eviction and recovery. Knows inodes and extents, but
neither FUSE nor paths."""
