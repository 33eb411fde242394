"""`kvfs bench`: a minute's measure of a pool, a directory or devices against raw I/O, and where the limit is.

plan.py and limit.py decide, and touch nothing. targets.py knows what is measured, engine.py runs one cell in C.
"""
