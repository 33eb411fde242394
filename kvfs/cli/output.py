"""The output of a verb: its result as text or as JSON on stdout, notes and progress on stderr."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from kvfs.errors import KvfsError, printable
from kvfs.units import duration_text

JSON_VERSION = 1
# A step that takes longer than this says how far it is.
PROGRESS_AFTER_S = 2.0


class ToldError(KvfsError):
    """A failure after which there is a result all the same. In JSON both are one document, which is already printed."""


class ToldInterrupt(KeyboardInterrupt):
    """An interrupt after which there is a result all the same, which is already printed."""


def emit(
    args: argparse.Namespace,
    document: Mapping[str, object],
    text: str | Callable[[], str] = "",
    failure: ToldError | None = None,
) -> None:
    """Print a verb's result in the form that is asked for, and raise the failure that came with it.

    text is made only if it is printed; nothing is printed for an empty one.
    """
    if as_json(args):
        print_json({**document, **({} if failure is None else error_part(str(failure), failure))})
    else:
        _print_text(text, flush=False)
    if failure is not None:
        raise failure


def emit_line(args: argparse.Namespace, document: Mapping[str, object], text: str | Callable[[], str] = "") -> None:
    """Print one result of a verb that goes on, so that a reader has it at once."""
    if as_json(args):
        print(json.dumps({"version": JSON_VERSION, **document}), flush=True)
    else:
        _print_text(text, flush=True)


def as_json(args: argparse.Namespace) -> bool:
    return cast(str, args.output) == "json"


def _print_text(text: str | Callable[[], str], *, flush: bool) -> None:
    text = text if isinstance(text, str) else text()
    if text:
        print(text, flush=flush)


def print_json(document: Mapping[str, object]) -> None:
    print(json.dumps({"version": JSON_VERSION, **document}, indent=2))


def note(text: object) -> None:
    """A line for people, beside the result."""
    print(printable(f"kvfs: {text}"), file=sys.stderr)


def note_lines(notes: Sequence[str]) -> list[str]:
    """Lines below a result, of what its reader should know. They are part of it, and no errors."""
    return [f"  note: {said}" for said in notes]


def error_part(message: str, error: object) -> dict[str, object]:
    number = getattr(error, "errno", None)
    return {"error": message, "errno": number if isinstance(number, int) else None}


class ProgressPrinter:
    """Says on stderr how far a long step is: nothing in the first two seconds, then at most a line a second."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock = clock or time.monotonic
        self._next = clock() + PROGRESS_AFTER_S
        self._open_line = False
        # The step that is told of, and when it began.
        self._step, self._began = "", clock()

    def __call__(self, step: str, done: int, total: int, least_s: float = 0.0) -> None:
        """least_s: the rest of the step takes so long at least. Else it goes on at the speed that it had so far."""
        now = self._clock()
        if step != self._step:
            self._step, self._began = step, now
        if now < self._next and not (self._open_line and done >= total > 0):
            return
        self._next = now + 1.0
        share = f"{done} of {total} ({done * 100 // total}%)" if total else str(done)
        if 0 < done < total:
            left_s = max(least_s, (now - self._began) / done * (total - done))
            share += f", some {duration_text(left_s)} left"
        if sys.stderr.isatty():
            print(f"\r\x1b[Kkvfs: {step}: {share}", end="", file=sys.stderr, flush=True)
            self._open_line = True
        else:
            print(f"kvfs: {step}: {share}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._open_line:
            print(file=sys.stderr)
            self._open_line = False
