"""Changes of a pool's devices: by its daemon, or here for an unused pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import trio

from kvfs.errors import UsageError, first_error
from kvfs.pool.devices import device_address
from kvfs.store.opening import StoreOptions, own_options
from kvfs.store.store import Store

# Bytes that were carried away from a device, and all that lie there.
Drained = Callable[[int, int], None]


def change_device(
    pool: Path, action: str, arguments: Mapping[str, object], drained: Drained | None = None
) -> Mapping[str, object]:
    """Remove or replace a device of an unused pool, as its daemon would. Raises KvfsError."""

    async def change() -> Mapping[str, object]:
        async with Store.open(pool, own_options(pool, StoreOptions())) as store:
            return await device_command(store, action, arguments, drained)

    try:
        return trio.run(change)
    except BaseExceptionGroup as group:
        raise first_error(group) from None


async def device_command(
    store: Store, action: str, arguments: Mapping[str, object], drained: Drained | None = None
) -> Mapping[str, object]:
    """`kvfs device remove` and `replace`."""
    device = store.service.find(str(arguments.get("device")))
    if action == "remove" and arguments.get("dry_run"):
        return {"device": device, "blocks": await store.service.would_lose(device), "dry_run": True}
    if action == "remove":
        drain = bool(arguments.get("drain"))
        return {"device": device, "lost_blocks": await store.remove_device(device, drain=drain, progress=drained)}
    path = arguments.get("path")
    place = device_address(path) if isinstance(path, str) else Path()
    if isinstance(place, Path) and not place.is_absolute():
        raise UsageError(f"device replace: path {path!r} is no absolute path")
    count = await store.replace_device(device, place, force=bool(arguments.get("force")))
    return {"device": device, "path": path, "lost_blocks": count}
