"""kvfs: a cache with a filesystem's face, for KV blocks on striped devices."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from kvfs import errors

if TYPE_CHECKING:
    from kvfs.client.client import Client, connect, events

__all__ = ["Client", "__version__", "connect", "errors", "events"]

if not __debug__:
    _REFUSAL = "kvfs: python -O: kvfs refuses to run without its assertions, they stand before the devices"
    # The command line (`kvfs`, or `python -m`, which sets argv[0] so while it imports the package) says so in one line.
    if sys.argv and os.path.basename(sys.argv[0]) in ("-m", "kvfs"):
        raise SystemExit(_REFUSAL)
    raise ImportError(_REFUSAL)

__version__ = "0.1.0"


def _load_native(path: str) -> None:
    """Use another build of the data plane: one with sanitizers, for tests."""
    spec = importlib.util.spec_from_file_location("kvfs._native", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"KVFS_NATIVE={path}: not an extension module")
    module = importlib.util.module_from_spec(spec)
    sys.modules["kvfs._native"] = module
    spec.loader.exec_module(module)


if os.environ.get("KVFS_NATIVE"):
    _load_native(os.environ["KVFS_NATIVE"])


def __getattr__(name: str) -> object:
    """The client, loaded when it is first asked for: the command line and the daemon do without."""
    if name in ("connect", "events", "Client"):
        from kvfs.client import client

        return getattr(client, name)
    raise AttributeError(f"module 'kvfs' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Also what is loaded when it is first asked for."""
    return sorted({*globals(), *__all__})
