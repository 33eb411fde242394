"""How a command line is read: the parser's errors, the types of arguments, and how a family of verbs adds its own.

An argument that makes no sense is answered by one line, with a guess where a known word comes near.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import NoReturn

from kvfs.errors import KvfsError, UsageError
from kvfs.types import PAGE_SIZE

Function = Callable[[argparse.Namespace], int]

_SLOW_MS_MAX = 86_400_000
_READ_AHEAD_MAX = 1 << 30


class WrongCommandLine(UsageError):
    """An argument that argparse refuses. Its text begins with the command."""


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line; main() exits with 2."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong:
            message += _guess(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        raise WrongCommandLine(f"{self.prog}: {message} (try {self.prog} --help)")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        known, extra = super().parse_known_args(args, namespace)
        for word in extra:
            guess = _guess(word.partition("=")[0], self._option_string_actions)
            if word.startswith("--") and guess:
                self.error(f"unrecognized arguments: {word}{guess}")
        return known, extra


def _guess(word: str, known: Iterable[str]) -> str:
    """The word that a mistyped one probably means, if one comes near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


class Verbs:
    """The verbs of a command line, in the order of the command's help. Each family adds its own."""

    def __init__(self, top: argparse.ArgumentParser) -> None:
        self.top = top
        self._verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._verbs.choices)

    def parser(self, name: str) -> argparse.ArgumentParser:
        return self._verbs.choices[name]

    def add(self, name: str, function: Function, text: str) -> argparse.ArgumentParser:
        """A verb with a result, which is printed as text or as JSON."""
        sub = self.add_plain(name, text, description=text)
        sub.add_argument(
            "-o", "--output", choices=("text", "json"), default="text", help="form of the result (default: text)"
        )
        sub.set_defaults(function=function)
        return sub

    def add_plain(
        self, name: str, text: str, *, description: str | None = None, add_help: bool = True
    ) -> argparse.ArgumentParser:
        """A verb without a form of its result."""
        return self._verbs.add_parser(name, help=text, description=description, allow_abbrev=False, add_help=add_help)


def size(text: str) -> int:
    from kvfs.units import parse_size

    try:
        return parse_size(text, what="SIZE")
    except (KvfsError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def memory_size(text: str) -> int:
    """A size that this machine's memory can hold."""
    from kvfs.cgroup import machine_memory

    found, memory = size(text), machine_memory()
    if found > memory:
        raise argparse.ArgumentTypeError(f"{text!r} is more than this machine's memory, {memory >> 20}M")
    return found


def read_ahead(text: str) -> int:
    """Bytes of whole pages; 0: the kernel's own."""
    if text in ("0", "kernel"):
        return 0
    found = size(text)
    if found % PAGE_SIZE or not PAGE_SIZE <= found <= _READ_AHEAD_MAX:
        raise argparse.ArgumentTypeError(f"{text!r}: 4K to 1G, in whole pages of 4K, or kernel, is expected")
    return found


def count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: not a positive number")
    return int(text)


def whole(text: str) -> int:
    return 0 if text == "0" else count(text)


def slow_ms(text: str) -> int:
    value = whole(text)
    if value > _SLOW_MS_MAX:
        raise argparse.ArgumentTypeError(f"{text}: at most {_SLOW_MS_MAX} ms, a day")
    return value


def positive(text: str) -> float:
    return _number(text, lambda value: 1e-6 <= value <= 1e12, "a positive number")


def share(text: str) -> float:
    return _number(text, lambda value: 0 <= value < 1, "a share from 0 to below 1")


def seconds(text: str) -> float:
    return _number(text, lambda value: 0.05 <= value <= 86400, "a number of seconds from 0.05 to 86400")


def _number(text: str, accepted: Callable[[float], bool], wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan  # no comparison holds
    if not accepted(value):
        raise argparse.ArgumentTypeError(f"{text!r}: not {wanted}")
    return value
