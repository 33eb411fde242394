"""A signal that asks for an end is not lost, wherever in Python it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY

# Python drops an exception of such a callback. An import has callbacks of this kind.
LOST = """
import signal, sys, time, weakref
from kvfs import signals

class Thing:
    pass

def run():
    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(int(sys.argv[1])))
    del thing
    time.sleep(600)

with signals.handled() as heard:
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(heard.text)
"""


# The signal comes within the step that tells.
EARLY = """
import importlib, pathlib, signal, sys

module = importlib.import_module(f"kvfs.cli.{sys.argv[1]}")
from kvfs.cli.command import main

def tell(*_):
    assert pathlib.Path("front").exists()
    signal.raise_signal(signal.SIGXCPU)

module.emit_line = tell
sys.exit(main(sys.argv[2:]))
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}


@pytest.mark.parametrize(
    ("number", "parent"),
    [
        (signal.SIGINT, "--default-signal"),
        (signal.SIGTERM, "--default-signal"),
        (signal.SIGPWR, "--default-signal"),
        (signal.SIGTERM, "--ignore-signal=INT"),  # as of a script's background
    ],
)
def test_one_that_comes_where_python_drops_what_is_raised_comes_again(number: signal.Signals, parent: str) -> None:
    words = ["env", parent, sys.executable, "-c", LOST, str(int(number))]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=REPOSITORY, check=False)
    check(ended, number)


def test_one_that_comes_again_waits_until_python_would_not_drop_it_once_more() -> None:
    """A machine may be so busy that the start of a thread takes longer than the pause before the signal."""
    slow = "import threading, time\nstart = threading.Thread.start\n"
    slow += "threading.Thread.start = lambda thread: (start(thread), [time.sleep(0.01) for _ in range(50)])\n"
    words = [sys.executable, "-c", slow + LOST, str(int(signal.SIGTERM))]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=REPOSITORY, check=False)
    check(ended, signal.SIGTERM)


def check(ended: subprocess.CompletedProcess[str], number: signal.Signals) -> None:
    told = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert (ended.stderr, ended.returncode) == (f"{told}\n", 1)


@pytest.mark.parametrize("verb", ["keep", "hold"])
def test_a_socket_goes_with_its_command_however_early_the_signal_comes(tmp_path: Path, verb: str) -> None:
    """Who has read the command's first line may end it before its next step."""
    words = ["keep", "front", "back"] if verb == "keep" else ["hold", "front"]
    module = {"keep": "mounting", "hold": "holding"}[verb]
    result = subprocess.run(
        ["env", "--default-signal", sys.executable, "-c", EARLY, module, *words], cwd=tmp_path, env=ENVIRONMENT,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 128 + signal.SIGXCPU, result.stderr
    assert list(tmp_path.iterdir()) == []
