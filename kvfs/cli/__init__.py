"""The command line. A file for each family of verbs, with its parser; command.py puts them together."""

from kvfs.descriptors import fill_standard

# Before anything is opened that stays open.
fill_standard()

from kvfs.cli.command import main  # noqa: E402

__all__ = ["main"]
