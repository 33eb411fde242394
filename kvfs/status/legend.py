"""Words and columns of the verbs that watch, explained: beneath each one's --help, and in docs/operations.md."""

from __future__ import annotations

import argparse
import textwrap

_HITS = "reads of blocks that are there, since the mount; a block counts 255 at most"
_ASKED = "blocks that files and libkvfs asked for"
_FOUND = "the share of the blocks asked for that were there"
LEGENDS: dict[str, tuple[tuple[str, str], ...]] = {
    "status": (
        ("ahead", "what the kernel reads ahead; where that is less than --read-ahead asks for, the reason"),
        ("advice", "what to look into, worst first"),
        ("use", "bytes of blocks that are kept, of all that the segments hold"),
        ("segments", "free: empty; open: being written; closed: full; evicting: being emptied; lost: on a device that "
                     "is away"),
        ("rd p99, wr p99", "99 of 100 reads, or writes, of a device took no longer, since the mount"),
        ("share", "what one user may hold of the pool, so that eviction leaves it alone"),
        ("held", "by whom the mount is kept over a restart of the daemon; its journal has names that no commit has"),
        ("evicted open", "blocks that were evicted although they were open, since their user held more than a share"),
        ("asked for, found", f"{_ASKED}, and {_FOUND}"),
        ("carried over", "blocks that were worth a copy when their segment was evicted"),
        ("dropped bad", "blocks whose bytes failed their checksum: misses from then on"),
        ("parents known", "blocks of which kvfs knows the block before them in their prefix"),
        ("orphans", "blocks whose prefix was evicted before them: of no use until it is stored again"),
        ("remembered, came back", "evicted blocks whose uses are remembered, and those that were stored again"),
    ),
    "list": (
        ("namespace", "a directory with all that is below it, but for those that have rows of their own"),
        ("blocks, bytes", "closed files, and the sum of their sizes"),
        ("hits", _HITS),
        ("unused", "bytes that were stored in the pool since any of these was used"),
        ("newest, oldest", "how long ago these were written"),
        ("total", "the sum of the rows above"),
    ),
    "stats": (
        ("asked/s", _ASKED),
        ("hit%", _FOUND),
        ("open/s, read/s", "open(2) and read requests that reached the daemon"),
        ("read B/s, write B/s", "bytes of files; libkvfs has a line of its own"),
        ("fwd/s", "requests that the C half handed to Python"),
        ("rd p50, rd p99", "half of the reads, and 99 of 100, took no longer"),
        ("use%", "of the pool"),
        ("evict/s", "blocks evicted"),
        ("r_await, w_await", "the mean time of a device's read or write"),
    ),
    "top": (
        ("ops/s", "requests of files by kind; read ahead and small calls of the kernel count too"),
        ("p50, p99", "half of them, and 99 of 100, took no longer, in the last interval"),
        ("read/s, written/s", "bytes of a device, by the daemon; clients read and store by themselves"),
        ("hits", _HITS),
        ("hits by age", "blocks found, by the time since they were written"),
    ),
}  # fmt: skip


def explain(parser: argparse.ArgumentParser, verb: str) -> None:
    """Put the words of a verb beneath its help."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(len(word) for word, _ in LEGENDS[verb])
    lines = ["words and columns:"]
    for word, text in LEGENDS[verb]:
        lines += textwrap.wrap(
            text, 100, initial_indent=f"  {word.ljust(width)}  ", subsequent_indent=" " * (width + 4)
        )
    parser.epilog = "\n".join(lines)
