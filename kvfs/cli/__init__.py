"""The command line. A file for each family of verbs, with its parser; command.py puts them together."""

from kvfs.cli.command import main

__all__ = ["main"]
