"""The command line: arguments in, one function a verb, text or JSON out.

Data goes to stdout, messages to stderr. Exit status 0: done; 1: failed, with one line that names the object; 2: a
request that makes no sense, also with one line. The work on a pool is in the rooms below. They are imported when a verb
runs, so that `kvfs doctor` and `kvfs --help` work where the data plane does not.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import cast

from kvfs import __version__, signals
from kvfs.cli.arguments import Parser, Verbs, WrongCommandLine
from kvfs.cli.output import ToldError, ToldInterrupt, error_part, print_json
from kvfs.cli.programs import RUN_VERBS
from kvfs.errors import KvfsError, UsageError, first_error, printable

# The packages of the extra "daemon" in pyproject.toml: an installation for clients has none of them.
DAEMON_PACKAGES = frozenset({"pyfuse3", "trio", "lmdb", "xxhash"})


# In the order of `kvfs --help`: a file of this room, what adds a verb there, and its verbs' names if they are others.
_VERBS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("pools", "format", ()), ("mounting", "mount", ()), ("mounting", "export", ()), ("mounting", "keep", ()),
    ("holding", "hold", ()), ("mounting", "umount", ()), ("watching", "status", ()), ("watching", "list", ()),
    ("watching", "stats", ()), ("watching", "top", ()), ("watching", "metrics", ()), ("events", "events", ()),
    ("pools", "fsck", ()), ("keeping", "pins", ("pin", "unpin")), ("keeping", "prestage", ()), ("keeping", "evict", ()),
    ("keeping", "rm", ()),
    ("pools", "discover", ()), ("pools", "device", ()), ("pod", "pod", ()), ("pools", "doctor", ()),
    ("pools", "import", ()), ("measuring", "bench", ()), ("replaying", "replay", ()),
    ("completion", "completion", ()), ("programs", "run_verbs", tuple(RUN_VERBS)),
    ("programs", "nixl_plugins", ("nixl-plugins",)), ("completion", "man", ()), ("completion", "help", ()),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with signals.handled() as heard:

        def command() -> int:
            args = parser(arguments[0] if arguments else None).parse_args(arguments)
            args.signals = heard
            return cast(int, args.function(args))

        return _guarded(command, _asks_for_json(arguments), heard)


def guarded(command: Callable[[], int]) -> int:
    """Run a command that is no verb, a tool of this repository: its signals and failures are reported as a verb's."""
    with signals.handled() as heard:
        return _guarded(command, False, heard)


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether an error is told in JSON too. Looked up before the command line is parsed, as the parse may be the
    error."""
    if arguments[:1] and arguments[0] in RUN_VERBS:
        return False
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    pairs = itertools.pairwise(words)
    return any(pair in (("-o", "json"), ("--output", "json")) for pair in pairs) or bool(
        {"-ojson", "--output=json"} & set(words)
    )


def _guarded(command: Callable[[], int], as_json: bool, heard: signals.Signals) -> int:
    """Turn every failure into one line on stderr and a status, and into a document on stdout if JSON is asked for. The
    end by a signal is one of them. KVFS_DEBUG=1 shows the traceback."""
    debug = os.environ.get("KVFS_DEBUG") == "1"

    def fail(error: object, status: int, text: str | None = None) -> int:
        return _fail(error, debug, status, as_json, text)

    try:
        try:
            return command()
        except BaseExceptionGroup as group:
            raise first_error(group) from group
    except UsageError as error:
        return fail(error, 2)
    except KvfsError as error:
        return fail(error, 1)
    except KeyboardInterrupt as error:
        if heard.status == 0:
            return 0
        told = heard.is_until_ended or isinstance(error, ToldInterrupt)
        failure = ToldError(heard.text) if told else InterruptedError(errno.EINTR, heard.text)
        return fail(failure, heard.status, heard.text)
    except BrokenPipeError:
        # The reader of our output has closed the pipe; without this the interpreter complains at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ImportError as error:
        if error.name in DAEMON_PACKAGES:
            needs = "this verb needs what the daemon needs: pip install 'kvfs[daemon]'"
            return fail(error, 1, f"{error.name}: not installed; {needs}")
        return fail(error, 1, f"{error.name or 'kvfs'}: cannot be loaded ({error}); run tools/setup")
    except OSError as error:
        return fail(error, 1, f"{error.filename}: {error.strerror}" if error.filename else None)
    except Exception as error:  # our bug, but the user gets one line
        from kvfs.cgroup import no_thread

        internal = f"internal error: {type(error).__name__}: {error} (KVFS_DEBUG=1 shows where)"
        return fail(error, 1, no_thread(error) or internal)


def _fail(error: object, debug: bool, status: int, as_json: bool, text: str | None) -> int:
    if debug and status < 128:
        import traceback

        traceback.print_exc()
    message = " ".join((text or str(error)).split("\n"))
    if as_json and not isinstance(error, ToldError):
        print_json(error_part(message, error))
    print(printable(message if isinstance(error, WrongCommandLine) else f"kvfs: {message}"), file=sys.stderr)
    return status


def parser(verb: str | None = None) -> argparse.ArgumentParser:
    """The whole command line; completion and manual pages are made from it as well (usage.py). With the name of a verb
    without an alias, only that one: the others' files take longer to load than many a verb runs."""
    top = Parser(prog="kvfs", description="A striped cache of KV blocks, mounted as a filesystem.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"kvfs {__version__}")
    verbs = Verbs(top)
    named = [(family, what) for family, what, names in _VERBS if verb in (names or (what,)) and family != "completion"]
    for family, what in named or [(family, what) for family, what, _ in _VERBS]:
        getattr(importlib.import_module(f"kvfs.cli.{family}"), f"add_{what}")(verbs)
    return top
