"""node.toml: which node of a pod this pool's directory makes of this machine. Reading and writing it.

The uuid is written before the node has a slot: a join that was cut off finds its page again.
"""

from __future__ import annotations

import os
import tomllib
import uuid as uuids
from dataclasses import dataclass
from pathlib import Path

from kvfs.errors import PoolError
from kvfs.pool.directory import open_own, replace_own
from kvfs.pool.pod import NODES_MAX

NODE_NAME = "node.toml"
_TEXT_MAX = 4096


@dataclass(frozen=True, slots=True)
class Node:
    uuid: uuids.UUID
    # A node that has not joined yet has none.
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """A node that has a slot."""

    slot: int
    uuid: uuids.UUID


def load_node(pool: Path) -> Node | None:
    """The node, or None if there is no node.toml. PoolError names the key that is wrong."""
    path = pool / NODE_NAME
    if not os.path.lexists(path):
        return None
    fd = open_own(path, os.O_RDONLY, 0)
    try:
        document = tomllib.loads(os.read(fd, _TEXT_MAX).decode())
    except (OSError, ValueError) as error:
        raise PoolError(f"{path}: {error}") from error
    finally:
        os.close(fd)
    slot, text = document.pop("slot", None), document.pop("uuid", None)
    for key in document:
        raise PoolError(f"{path}: {key} is not a key that kvfs knows")
    if slot is not None and (not isinstance(slot, int) or isinstance(slot, bool) or not 0 <= slot < NODES_MAX):
        raise PoolError(f"{path}: slot is {slot!r}; 0 to {NODES_MAX - 1} is possible")
    try:
        return Node(uuids.UUID(text), slot)
    except (TypeError, ValueError, AttributeError) as error:
        raise PoolError(f"{path}: uuid is {text!r}, which is no UUID") from error


def write_node(pool: Path, node: Node) -> None:
    """Replace node.toml, durably. PoolError."""
    slot = "" if node.slot is None else f"slot = {node.slot}\n"
    text = f'# This node of a pod: never copy it to another machine.\n{slot}uuid = "{node.uuid}"\n'
    replace_own(pool / NODE_NAME, text.encode())
