"""The public names of kvfs: each says what it does, and is there after `import kvfs`."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest

import kvfs
from kvfs import errors
from kvfs.client import asynchronous, events, leases, library, queue

# The classes that calls of kvfs and of a client return or raise.
CLASSES = [
    kvfs.Client, asynchronous.TrioClient, asynchronous.AsyncioClient, asynchronous.AsyncEvents, asynchronous.AsyncKeys,
    asynchronous.AsyncLease, leases.Lease, queue.Queue, events.Events, events.Stored, events.Removed, events.Gap,
    events.Reset, events.Reason, library.ClientInformation, library.ClientStatistics,
]  # fmt: skip
ERRORS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.KvfsError)]


def members(kind: type) -> Iterator[tuple[str, object]]:
    """The public methods and properties that our code gives a class."""
    for base in kind.__mro__:
        if base.__module__.startswith("kvfs."):
            for name, value in vars(base).items():
                plain = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
                if not name.startswith("_") and isinstance(plain, (types.FunctionType, property)):
                    yield f"{base.__name__}.{name}", plain


def test_kvfs_errors_is_there_after_import_kvfs_alone() -> None:
    code = "import kvfs; kvfs.errors.NotMountedError; kvfs.errors.KvfsError; print(sorted(kvfs.__all__))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and "'errors'" in ran.stdout, ran.stderr


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_public_class_and_method_of_a_client_says_what_it_does(kind: type) -> None:
    silent = [name for name, value in members(kind) if not (value.__doc__ or "").strip()]
    # A dataclass without words of its own has a signature for them.
    if not (kind.__doc__ or "").strip() or (kind.__doc__ or "").startswith(f"{kind.__name__}("):
        silent.append(kind.__name__)
    assert silent == []


def test_every_name_of_kvfs_and_every_error_says_what_it_is() -> None:
    named = [(name, getattr(kvfs, name)) for name in kvfs.__all__ if not name.startswith("__")]
    silent = [name for name, value in named if not (value.__doc__ or "").strip()]
    assert silent + [kind.__name__ for kind in ERRORS if not (vars(kind).get("__doc__") or "").strip()] == []


def test_every_call_of_a_client_has_an_asynchronous_form_or_none_by_intent() -> None:
    calls = {name.partition(".")[2] for name, _ in members(kvfs.Client)}
    there = {name.partition(".")[2] for name, _ in members(asynchronous.TrioClient)}
    # Not of a client that waits in threads: its life, what it makes, GPUs' modes, a queue, which has completions, and
    # claims, which wait for nobody.
    none = {"close", "trio", "asyncio", "queue", "mode", "mode_reason", "gpu_reader", "claim", "unclaim"}
    assert calls - there == none
