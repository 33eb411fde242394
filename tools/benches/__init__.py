"""`tools/bench`: kvfs and its peers in one interleaved run; ratios first, then figures, then JSON.

Knows kvfs by its command line, its files POOL/kvfs.pid and POOL/index, and POSIX; only `million` reads a pool's
geometry, to damage its summaries. The timed loops are in C (native/tools/bench_client.c), the raw jobs are fio's.
docs/internals/benches.md says what each case compares. Everything made here (zram and loop devices, files, mounts) is
gone at the end, however the run ends.
"""

from benches.run import main

__all__ = ["main"]
