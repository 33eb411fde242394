"""Signals to kvfs's processes: the ones that end it cleanly, and the ones that are ignored and logged.

By default Linux ends a process by nearly every signal, at once and without a word (signal(7)). Here a signal that asks
for an end unwinds a command as Ctrl-C does, and each other one is a line on stderr. A daemon hears the same signals in
its loop (daemon/daemon.py). Signals of faults (SEGV, BUS, ABRT and such) and job control keep their meaning.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPT = signal.SIGINT
_AGAIN_S = 0.01
# They ask for an end. PWR: the power fails. XCPU: SIGKILL comes next.
ENDING = (signal.SIGTERM, signal.SIGQUIT, signal.SIGPWR, signal.SIGXCPU)
# A terminal that is closed ends a command; a service goes on, and a daemon reads its files again.
HANGUP = signal.SIGHUP
IGNORED = (
    signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGSTKFLT,
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)  # fmt: skip


def name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


class Signals:
    """The signals of a command, while handled() is entered."""

    def __init__(self) -> None:
        self._ended_by: int | None = None
        self._stops_at_hangup = True
        self._until_ended = False

    def until_ended(self) -> None:
        """The command ends by a signal alone. So it hears interrupts also if its parent ignores them, as a script's
        background does, and SIGTERM is its usual end."""
        self._until_ended = True
        if threading.current_thread() is threading.main_thread():
            signal.signal(INTERRUPT, signal.default_int_handler)

    def outlive_terminal(self) -> None:
        """The command is a service: a terminal that is closed does not end it."""
        self._stops_at_hangup = False

    @property
    def is_until_ended(self) -> bool:
        return self._until_ended

    @property
    def status(self) -> int:
        """The exit status of a command that a signal ended."""
        if self._ended_by is None:
            return 128 + INTERRUPT
        return 0 if self._until_ended and self._ended_by == signal.SIGTERM else 128 + self._ended_by

    @property
    def text(self) -> str:
        return "interrupted" if self._ended_by is None else f"ended by {name_of(self._ended_by)}"

    def forget(self) -> int:
        """The signal that ended the command, which did not end: the next one is heard again."""
        number, self._ended_by = self._ended_by or INTERRUPT, None
        return number

    def handle(self, number: int, frame: FrameType | None) -> None:
        if number in IGNORED or (number == HANGUP and not self._stops_at_hangup):
            with suppress(OSError):  # not print: its buffer may be in use right now
                os.write(2, f"kvfs: {name_of(number)}: ignored\n".encode())
            return
        if self._ended_by is not None:
            return  # it is ending
        self._ended_by = number
        # As an interrupt: trio has a handler of its own for it, which knows where a task can be interrupted.
        interrupt = signal.getsignal(INTERRUPT)
        if callable(interrupt):
            interrupt(INTERRUPT, frame)
        else:
            raise KeyboardInterrupt


def _again_if_lost(
    signals: Signals, before: Callable[[UnraisableHookArgs], object]
) -> Callable[[UnraisableHookArgs], object]:
    """For sys.unraisablehook. Python drops what is raised in a finalizer or a weak reference's callback, such as an
    import has. A signal that came in one comes again, a moment later, as what is raised here is dropped, too."""

    inside = False

    def hook(lost: UnraisableHookArgs) -> None:
        nonlocal inside
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            before(lost)
            return
        inside = True
        try:
            threading.Thread(target=again, daemon=True).start()
        finally:
            inside = False

    def again() -> None:
        time.sleep(_AGAIN_S)
        while inside:  # a start may take long on a busy machine
            time.sleep(_AGAIN_S)
        main = threading.main_thread().ident
        if main is not None and sys.unraisablehook is hook:  # the command has not ended meanwhile
            signal.pthread_kill(main, signals.forget())

    return hook


@contextmanager
def handled() -> Iterator[Signals]:
    """Handle the signals of a command, and leave the process as it was. A signal that the parent ignores stays ignored.
    In a thread that is not the main one nothing is changed: Python hears signals in the main thread alone."""
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {number: signal.getsignal(number) for number in (INTERRUPT, HANGUP, *ENDING, *IGNORED)}
    for number, handler in before.items():
        if number != INTERRUPT and handler == signal.SIG_DFL:
            signal.signal(number, signals.handle)
    unraisable = sys.unraisablehook
    sys.unraisablehook = _again_if_lost(signals, unraisable)
    try:
        yield signals
    finally:
        sys.unraisablehook = unraisable
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)


def reset() -> None:
    """In a child that is no command: what handled() has taken gets its default meaning."""
    for number in (HANGUP, *ENDING, *IGNORED):
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            signal.signal(number, signal.SIG_DFL)
