"""Which version of an engine is installed, and which ones a connector was tried with."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Sequence

SGLANG = ("0.5.23",)


def check(engine: str, tried: Sequence[str], logger: logging.Logger) -> None:
    """Warn of a version that was not tried: engines change these interfaces monthly."""
    there = installed(engine)
    if there is not None and there not in tried:
        logger.warning(
            "kvfs for %s: version %s is installed, tried are: %s (docs/engines.md)", engine, there, ", ".join(tried)
        )


def missing(engine: str, tried: Sequence[str], error: ImportError) -> ImportError:
    """The error for an engine that does not import, or lacks what the connector builds on."""
    there = installed(engine)
    how = "it is not installed here" if there is None else f"version {there} is installed"
    return ImportError(
        f"kvfs for {engine}: {error} ({how}; this connector was tried with {engine} {', '.join(tried)})",
        name=error.name,
    )


def installed(engine: str) -> str | None:
    try:
        return importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return None
