"""The index: the truth of a running pool. Names, inodes, the inodes of each segment, segment states, counters."""
