"""How far a long verb is, on stderr, and how long the rest may take.

A bar by the package rich, where it is installed and stderr is a terminal; otherwise lines, fewer as time goes on. A
verb that ends within two seconds shows neither.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Self

from kvfs.units import duration_text, size_text

AFTER_S = 2.0
# A bar is drawn at most so often. A line follows the one before it after a tenth of the time that has passed, within
# these bounds.
BAR_EVERY_S = 0.1
LINE_EVERY_S = 1.0
LINE_EVERY_MAX_S = 60.0
# The speed is that of the last half minute: devices and caches may be faster or slower than at the beginning.
SPEED_OVER_S = 30.0


class Progress:
    """Use: `with Progress() as progress:`, and call it as often as there is something to tell."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._next = self._began + AFTER_S
        # The step that is told of: when it began, its (time, done) of the last SPEED_OVER_S, whether its end was told.
        self._step, self._step_began = "", self._began
        self._seen: deque[tuple[float, int]] = deque()
        self._is_told = self._is_ended = False
        # The bar, once one is shown; without one there are lines.
        self._bar: Any = None
        self._is_bar_tried = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __call__(self, step: str, done: int, total: int = 0, *, size: bool = False, least_s: float = 0.0) -> None:
        """Report how much of a step is done. total: 0 if unknown. size: both are bytes. least_s: the rest of the step
        takes so long at least."""
        now = self._clock()
        if step != self._step:
            self._step, self._step_began = step, now
            self._seen.clear()
            self._is_told = self._is_ended = False
        self._note(now, done)
        ends = done >= total > 0 and self._is_told and not self._is_ended
        if now < self._next and not ends:
            return
        self._is_told, self._is_ended = True, done >= total > 0
        told = self._text(now, done, total, size, least_s)
        if not self._is_bar_tried:
            self._is_bar_tried = True
            self._bar = _open_bar(self._clock)
        if self._bar is not None:
            self._next = now + BAR_EVERY_S
            self._bar.update(
                self._bar.task_ids[0], description=step, completed=min(done, total), total=total or None, told=told
            )
            self._bar.refresh()
            return
        self._next = now + min(LINE_EVERY_MAX_S, max(LINE_EVERY_S, (now - self._began) / 10))
        print(f"kvfs: {step}: {told}", file=sys.stderr, flush=True)

    def _note(self, now: float, done: int) -> None:
        if self._seen and (done < self._seen[-1][1] or now < self._seen[-1][0]):
            self._seen.clear()
        # At most so many are kept, however often it is called.
        if not self._seen or now - self._seen[-1][0] >= SPEED_OVER_S / 64:
            self._seen.append((now, done))
        while len(self._seen) > 1 and self._seen[1][0] <= now - SPEED_OVER_S:
            self._seen.popleft()

    def _text(self, now: float, done: int, total: int, size: bool, least_s: float) -> str:
        """12.00M of 1.00G (1%), 4.00M/s, some 4 min 13 s left. Of a step without numbers: its time."""
        if not total and not done:
            return duration_text(now - self._step_began)
        number = size_text if size else str
        parts = [f"{number(done)} of {number(total)} ({done * 100 // total}%)" if total else number(done)]
        since, before = self._seen[0]
        speed = (done - before) / (now - since) if now > since else 0.0
        if size and speed:
            parts.append(f"{size_text(speed)}/s")
        if done < total and (speed or least_s):
            left_s = max(least_s, (total - done) / speed if speed else 0.0)
            parts.append(f"some {duration_text(left_s)} left")
        return ", ".join(parts)


def told_by_daemon(progress: Progress, step: str) -> Callable[[Mapping[str, object]], None]:
    """For ControlClient.call: once a second the daemon says that a command goes on, and how many bytes are done."""

    def tell(document: Mapping[str, object]) -> None:
        done, total = document.get("done", 0), document.get("total", 0)
        if isinstance(done, int) and isinstance(total, int):
            progress(step, done, total, size=True)

    return tell


def _open_bar(clock: Callable[[], float]) -> Any:
    """A bar on stderr with one task, which goes at the end without a trace; None where there can be none."""
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars
    except ImportError:
        return None
    console = Console(stderr=True)
    if console.is_dumb_terminal:
        return None
    bars = Bars(
        TextColumn("kvfs: {task.description}", markup=False), BarColumn(),
        TextColumn("{task.fields[told]}", markup=False),
        console=console, auto_refresh=False, transient=True, redirect_stdout=False, get_time=clock,
    )  # fmt: skip
    bars.add_task("", total=None, told="")
    bars.start()
    return bars
