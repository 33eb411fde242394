"""Which pool a verb's argument means, and what its daemon says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvfs.errors import NotFoundError

if TYPE_CHECKING:
    from kvfs.frontend.mount import Mount


def pool_of(target: str) -> Path:
    """The pool that a mount point or a pool's own path means."""
    from kvfs.frontend import mount

    present = mount.find_mount(target)
    if present is not None and present.is_kvfs:
        return _source(target, present)
    if present is None and not os.path.lexists(target):
        raise NotFoundError(f"{target}: no such pool or mount point")
    return Path(target)


def place_of(target: str) -> tuple[Path, str]:
    """The pool, and the path from its mount's root on, that a target means: a pool's directory, a mount point, or
    something in a mount."""
    from kvfs.frontend import mount

    present = mount.mount_of(target)
    if present is None or not present.is_kvfs:
        return pool_of(target), "/"
    inside = os.path.relpath(os.path.realpath(target), present.mountpoint)
    return _source(target, present), "/" if inside == "." else f"/{inside}"


def _source(target: str, present: Mount) -> Path:
    """The pool's directory. NotFoundError: it is elsewhere, as in an engine's container, which has the mount alone."""
    try:
        os.lstat(present.source)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(
            f"{target}: the directory of its pool, {present.source} where it was mounted, is not seen here: ask there, "
            "or by the pool's path here"
        ) from None
    except OSError:  # another user's
        pass
    return Path(present.source)


def pools_mounted() -> list[Path]:
    from kvfs.frontend import mount

    return sorted({Path(present.source) for present in mount.mounts() if present.is_kvfs})


def status_of(pool: Path, timeout_s: float | None = None) -> Mapping[str, object]:
    from kvfs.frontend.asking import ControlClient, NotRunningError
    from kvfs.frontend.mount import mounts_of

    try:
        with ControlClient(pool, timeout_s) as client:
            return _with_holders(pool, cast(Mapping[str, object], client.call("status")))
    except NotRunningError:
        from kvfs.status.document import offline_status

        document = offline_status(pool)
        dead = [present.mountpoint for present in mounts_of(pool)]
        notes = [f"{mountpoint}: its daemon is gone; kvfs mount or kvfs umount clears it" for mountpoint in dead]
        return {**document, "advice": [*notes, *cast(list[str], document["advice"])]}


def _with_holders(pool: Path, document: Mapping[str, object]) -> Mapping[str, object]:
    """A pool's status; where no mount point is left and the daemon goes on, with what keeps the mount."""
    from kvfs.frontend.holders import describe, holders
    from kvfs.frontend.mount import resolve

    device = document.get("mount_device")
    if document.get("mounts") or not isinstance(device, str):
        return document
    kept = [holder for holder in holders(device, resolve(pool)) if holder.pid is not None]
    if not kept and document.get("exports"):
        return document
    advice = f"unmounted here, and kept by {describe(kept)}: kvfs umount {pool} ends it all the same"
    return {**document, "advice": [advice, *cast(Sequence[str], document.get("advice", ()))]}


def in_a_mount(path: str, mounts: Sequence[object]) -> bool:
    from kvfs.frontend.mount import Mount, mount_of

    best = mount_of(path, cast(Sequence[Mount], mounts))
    return best is not None and best.is_kvfs
