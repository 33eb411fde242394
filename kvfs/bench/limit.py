"""Where the limit is: one sentence, with the numbers that it is based on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfs.units import counted, format_size

# kvfs with so much of what the devices give raw is limited by them.
NEAR_RAW = 0.85
# More at once that give less than this more are no help.
GROWTH = 0.15
# A core, or all of them, so busy: the CPU. If less than this share of that is the measure's own, others are named.
BUSY = 0.90
OWN = 0.50


@dataclass(frozen=True, slots=True)
class Seen:
    """One cell. machine_busy: the share of all cores' time that was used; own_busy: by this process and the daemon.
    thread_busy: of a core, by the thread that used most."""

    depth: int
    bytes_per_s: float
    machine_busy: float = 0.0
    own_busy: float = 0.0
    thread_busy: float = 0.0


@dataclass(frozen=True, slots=True)
class Limit:
    """cause: devices, cpu, latency, kvfs, none."""

    cause: str
    text: str


def limit(work: str, who: str, block_size: int, ours: Sequence[Seen], raw: Sequence[Seen], cores: int) -> Limit:
    """The limit of one kind of work, by `who`, against raw I/O. Each has its cells by depth, the smallest first."""
    verb = work.removesuffix("s")
    size = format_size(block_size)
    best, best_raw = _best(ours), _best(raw)
    if not best.bytes_per_s or not best_raw.bytes_per_s:
        return Limit("none", f"nothing was measured of {work} by {who}")
    share = best.bytes_per_s / best_raw.bytes_per_s
    rates = f"{rate(best.bytes_per_s)} of {rate(best_raw.bytes_per_s)} GB/s in blocks of {size}, {best.depth} at once"
    does = f"{who} {verb}s {share:.2f} of what they give raw ({rates})"
    if share >= NEAR_RAW:
        more = growth(raw)
        if more >= GROWTH:
            does += f"; {raw[-1].depth} at once give {more:.0%} more than {raw[-2].depth}, so more may give more"
        return Limit("devices", f"the devices: {does}")
    if best.machine_busy >= BUSY:
        return Limit("cpu", f"the CPU: {_busy(best, cores)}; {does.replace('they give', 'the devices give')}")
    if best.thread_busy >= BUSY:
        one = f"one thread uses {min(1.0, best.thread_busy):.0%} of a core"
        return Limit("cpu", f"the CPU: {one}; {does.replace('they give', 'the devices give')}")
    more = growth(ours)
    if more >= GROWTH:
        return Limit(
            "latency",
            f"latency: {ours[-1].depth} at once give {more:.0%} more than {ours[-2].depth}, so more may give more; "
            f"{does.replace('they give', 'the devices give')}",
        )
    return Limit(
        "kvfs",
        f"kvfs itself: {does.replace('they give', 'the devices give')}, more at once do not help ({more:+.0%}), and "
        f"the cores are {best.machine_busy:.0%} busy",
    )


def raw_limit(work: str, block_size: int, raw: Sequence[Seen], cores: int) -> Limit:
    """The limit of devices, or of a directory, without kvfs."""
    best, more = _best(raw), growth(raw)
    if not best.bytes_per_s:
        return Limit("none", f"nothing was measured of {work}")
    gives = f"{rate(best.bytes_per_s)} GB/s of {work} in blocks of {format_size(block_size)}"
    if best.machine_busy >= BUSY:
        return Limit("cpu", f"the CPU: {_busy(best, cores)}, at {gives}")
    if more >= GROWTH:
        return Limit(
            "latency",
            f"latency: {gives}, and {raw[-1].depth} at once give {more:.0%} more than {raw[-2].depth}, so more may "
            "give more",
        )
    return Limit(
        "devices", f"the devices: {gives}; {raw[-1].depth} at once give no more than {raw[-2].depth} ({more:+.0%})"
    )


def growth(seen: Sequence[Seen]) -> float:
    """How much more the largest depth gives than the one before it."""
    if len(seen) < 2 or not seen[-2].bytes_per_s:
        return 0.0
    return seen[-1].bytes_per_s / seen[-2].bytes_per_s - 1


def rate(bytes_per_s: float) -> str:
    """In GB/s, 10**9 as data sheets have it, with three digits."""
    value = bytes_per_s / 1e9
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def _best(seen: Sequence[Seen]) -> Seen:
    return max(seen, key=lambda one: one.bytes_per_s)


def _busy(seen: Seen, cores: int) -> str:
    text = f"{counted(cores, 'core')} {'is' if cores == 1 else 'are'} {min(1.0, seen.machine_busy):.0%} busy"
    if seen.own_busy < OWN * seen.machine_busy:
        text += f", with other processes most of it ({seen.own_busy:.0%} are kvfs's)"
    return text
