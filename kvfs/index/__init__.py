"""The index: the truth of a running pool. Names and inodes, which segment holds whose pages, segment states,
counters."""
