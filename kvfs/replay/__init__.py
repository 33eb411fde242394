"""`kvfs replay`: a trace of requests against a directory, as an inference engine would use it.

trace.py reads the trace, engine.py replays it (the loop is in C: native/include/kvfs_replay.h), report.py counts,
plot.py draws. Knows kvfs by POSIX, or by libkvfs when asked to; any directory will do as a target.
"""
