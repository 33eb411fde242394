"""Engines' storage interfaces on kvfs.connect(): each module is loaded by its engine's own configuration line
(docs/engines.md). Nothing here is imported by the daemon or the command line."""
