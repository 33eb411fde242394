"""Worths that are learnt from all uses: also from evicted blocks' uses, by their ghosts.

A block's value is the best rate of uses that it may have, over all times for which it could be kept. It would be
dropped at its next use: the index of Gittins (Bandit processes and dynamic allocation indices, 1979). The value
follows from the chance of a use at each age, by hits: uses at an age over the time that blocks spent at it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from kvfs.worth import AGES, WORTH_CLASSES, Table

# Two of AGES are one bin from 4 on, so two bins are an octave.
_BIN_OF = [min(i, i // 2 + 2) for i in range(len(AGES))]
_BINS = _BIN_OF[-1] + 1
_STARTS = [AGES[_BIN_OF.index(b)] for b in range(_BINS)] + [2 * AGES[-1]]
_WIDTHS = [_STARTS[b + 1] - _STARTS[b] for b in range(_BINS)]
# Where nothing was seen, chances fall as 1/(age + 10) from the last bin on where something was.
_SHAPE = [1 / (_STARTS[b] + _WIDTHS[b] / 2 + 10) for b in range(_BINS)]
# Uses that are assumed in each bin.
_ASSUMED = 5.0
_ROW = struct.Struct(f"<{_BINS}d")
# No pool comes to that: 2^32 blocks for 2^32 ticks.
_LARGEST = 2.0**64


class Learner:
    """Uses seen, and time spent, by class and bin."""

    def __init__(self) -> None:
        self._uses = [[0.0] * _BINS for _ in range(WORTH_CLASSES)]
        self._time = [[0.0] * _BINS for _ in range(WORTH_CLASSES)]

    def learn(self, uses: Table, there: Table, ticks: int) -> None:
        """uses: since the last time, by the class and age that blocks had at them. there: blocks and ghosts by class
        and age, which were so for `ticks`."""
        for seen, now in ((self._uses, uses), (self._time, there)):
            weight = 1 if now is uses else ticks
            for sums, numbers in zip(seen, now, strict=True):
                for i, number in enumerate(numbers):
                    if number:
                        sums[_BIN_OF[i]] += weight * number

    def pack(self) -> bytes:
        return b"".join(_ROW.pack(*row) for rows in (self._uses, self._time) for row in rows)

    def unpack(self, data: bytes) -> bool:
        """As pack() made it. False, and nothing is changed: it did not, or these numbers cannot be."""
        if len(data) != 2 * WORTH_CLASSES * _ROW.size:
            return False
        rows = [list(row) for row in _ROW.iter_unpack(data)]
        if not all(0 <= number < _LARGEST for row in rows for number in row):
            return False
        self._uses, self._time = rows[:WORTH_CLASSES], rows[WORTH_CLASSES:]
        return True

    def values(self) -> Table:
        """The value of blocks, in the shape of a table of worths."""
        of_all: list[float] = []
        # Sums by map(): a generator is entered for each number, a thousand times in all.
        for b, (uses, time) in enumerate(
            zip(map(sum, zip(*self._uses, strict=True)), map(sum, zip(*self._time, strict=True)), strict=True)
        ):
            assumed = of_all[-1] * _SHAPE[b] / _SHAPE[b - 1] if b else _SHAPE[0]
            of_all.append((uses + _ASSUMED) / (time + _ASSUMED / assumed))
        return [self._row(of_all, uses, time) for uses, time in zip(self._uses, self._time, strict=True)]

    def _row(self, of_all: Sequence[float], uses: Sequence[float], time: Sequence[float]) -> list[float]:
        chances = [(u + _ASSUMED) / (t + _ASSUMED / c) for u, t, c in zip(uses, time, of_all, strict=True)]
        values = _best_rates(chances)
        return [
            # Between two bins' beginnings worths lie on a line.
            values[b] if AGES[i] == _STARTS[b] else (values[b] + values[min(b + 1, _BINS - 1)]) / 2
            for i, b in enumerate(_BIN_OF)
        ]  # fmt: skip


def _best_rates(chances: Sequence[float]) -> list[float]:
    """For each bin: the most uses by the tick that a block which enters it may have, if it is kept up to some age.

    It goes from the last bin to the first. To keep a block on pays as long as the rate of what follows is better than
    the rate so far. So the best run from each bin is a row of best runs of later bins.
    """
    rates = [0.0] * _BINS
    runs: list[tuple[float, float, float, float]] = []  # the last is next: rate; uses, ticks; share still unused behind
    for b in reversed(range(_BINS)):
        uses = 1 - math.exp(-chances[b] * _WIDTHS[b])
        ticks, left = uses / chances[b], 1 - uses  # mean ticks in the bin
        while runs and runs[-1][0] > uses / ticks:
            _, more, longer, unused = runs.pop()
            uses, ticks, left = uses + left * more, ticks + left * longer, left * unused
        rates[b] = uses / ticks
        runs.append((rates[b], uses, ticks, left))
    return rates
