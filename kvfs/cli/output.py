"""The output of a verb: its result as text or as JSON on stdout, notes on stderr."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from kvfs.errors import KvfsError, printable

JSON_VERSION = 1


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
    """A line for people, next to the result."""
    print(printable(f"kvfs: {text}"), file=sys.stderr)


def note_lines(notes: Sequence[str]) -> list[str]:
    """Lines below a result, that its reader should know. They are part of it, and no errors."""
    return [f"  note: {said}" for said in notes]


def error_part(message: str, error: object) -> dict[str, object]:
    number = getattr(error, "errno", None)
    return {"error": message, "errno": number if isinstance(number, int) else None}
