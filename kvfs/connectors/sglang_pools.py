"""SGLang's host pools as memory of blocks: one block a page, in pieces where the pool has them apart.

A pool is asked for the addresses of its pages (get_page_buffer_meta). A pool that has no such addresses in its layout
gives and takes copies of whole pages. An anchor without its own memory has no blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Protocol, cast

from kvfs._native import ffi
from kvfs.client.memory import Memory, Pieces
from kvfs.connectors import versions

try:
    import torch
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy
except ImportError as error:
    raise versions.missing("sglang", error) from error

_logger = logging.getLogger("kvfs.connectors.sglang")
_said: set[str] = set()
# Of a host pool: numbers, strings or None.
_SHAPE = ("storage_format_tag", "layer_num", "start_layer", "end_layer", "head_dim", "v_head_dim", "head_group_num")


class Pool(Protocol):
    """indices: of whole pages, as SGLang hands them over, page_size for each.

    geometry: what tells its blocks from another layout's. blocks: of each page, 0 for an anchor without memory.
    """

    geometry: str
    page_size: int
    blocks: int
    block_size: int

    def sources(self, indices: torch.Tensor) -> list[Pieces]: ...

    def destinations(self, indices: torch.Tensor) -> list[Pieces]: ...

    def arrived(self, indices: torch.Tensor, destinations: list[Pieces], loaded: Sequence[bool]) -> None:
        """Those pages are in their destinations."""


def pool_of(host: Any, factor: int = 1, *, in_place: bool = True) -> Pool:
    """factor: blocks that the heads of a page are split into. in_place: unless SGLang copies the pages itself. Raises
    ValueError for a pool that kvfs cannot serve.

    SGLang's pools say in four ways that they have no addresses. They raise ValueError or NotImplementedError for the
    layout, and AssertionError for its sizes; a pool without that method has an AttributeError. Any other error is the
    pool's own, and goes to SGLang."""
    whole = torch.arange(int(host.page_size), dtype=torch.int64)
    try:
        meta = _meta(host, whole, factor)
    except (ValueError, NotImplementedError, AttributeError, AssertionError) as reason:
        if factor > 1:
            raise ValueError(f"kvfs for sglang: {type(host).__name__} cannot split heads: {reason}") from reason
        pool = f"{type(host).__name__} of layout {host.layout}"
        _say_once("kvfs for sglang: %s has no addresses of pages, so each page is copied: %s", pool, _words(reason))
        return CopiedPool(host)
    if meta is None:
        return Anchor(host)
    return PagedPool(host, factor, meta[1]) if in_place else CopiedPool(host)


class PagedPool:
    """Pages that are read and written where they lie."""

    def __init__(self, host: Any, factor: int, sizes: Sequence[int]) -> None:
        self.page_size, self.blocks = int(host.page_size), factor
        self._host, self._factor = host, factor
        self._pieces = len(sizes) // factor
        self.block_size = sum(sizes[: self._pieces])
        self.geometry = _geometry(host, [int(size) for size in sizes[: self._pieces]])

    def sources(self, indices: torch.Tensor) -> list[Pieces]:
        meta = _meta(self._host, indices, self._factor)
        assert meta is not None
        pieces = [memory_at(address, size) for address, size in zip(*meta, strict=True)]
        if self._pieces == 1:
            return list(pieces)
        return [pieces[i : i + self._pieces] for i in range(0, len(pieces), self._pieces)]

    destinations = sources

    def arrived(self, indices: torch.Tensor, destinations: list[Pieces], loaded: Sequence[bool]) -> None:
        pass


class CopiedPool:
    """Pages that SGLang copies: into a separate tensor, and out of one."""

    def __init__(self, host: Any) -> None:
        self.page_size, self.blocks = int(host.page_size), 1
        self._host = host
        try:
            page = host.get_dummy_flat_data_page()
        except (ValueError, NotImplementedError, AttributeError) as reason:
            raise ValueError(
                f"kvfs for sglang: {type(host).__name__} of layout {host.layout} has neither addresses of pages nor "
                f"copies of them: {reason}"
            ) from reason
        self.block_size = int(page.numel() * page.element_size())
        self.geometry = _geometry(host, ["copied", self.block_size])

    def sources(self, indices: torch.Tensor) -> list[Pieces]:
        pages = self._pages(indices)
        return [flat(self._host.get_data_page(page, flat=True)) for page in pages]

    def destinations(self, indices: torch.Tensor) -> list[Pieces]:
        return [flat(self._host.get_dummy_flat_data_page()) for _ in self._pages(indices)]

    def arrived(self, indices: torch.Tensor, destinations: list[Pieces], loaded: Sequence[bool]) -> None:
        dtype = self._host.get_dummy_flat_data_page().dtype
        for page, memory, is_loaded in zip(self._pages(indices), destinations, loaded, strict=True):
            if is_loaded:
                self._host.set_from_flat_data_page(page, cast(Any, memory).view(dtype))

    def _pages(self, indices: torch.Tensor) -> list[int]:
        return cast("list[int]", indices[:: self.page_size].tolist())


class Anchor:
    """The KV pool of a model whose KV lies in side pools alone: it has indices, and no memory."""

    block_size = 0

    def __init__(self, host: Any) -> None:
        self.page_size, self.blocks = int(host.page_size), 0
        self.geometry = _geometry(host, ["anchor"])

    def sources(self, indices: torch.Tensor) -> list[Pieces]:
        return []

    destinations = sources

    def arrived(self, indices: torch.Tensor, destinations: list[Pieces], loaded: Sequence[bool]) -> None:
        pass


def lengths(there: Sequence[bool], policy: Any, window: int) -> set[int]:
    """The lengths of prefixes, in pages, for which a pool has what it must have: all of them, or the last `window`."""
    if policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, [*there, False].index(False) + 1))
    if policy == PoolHitPolicy.TRAILING_PAGES:
        window = max(1, window)
        return {length for length in range(1, len(there) + 1) if all(there[max(0, length - window) : length])}
    raise ValueError(f"policy {policy} is not known")


def flat(tensor: torch.Tensor) -> Memory:
    """A tensor's bytes, of any dtype, and contiguous."""
    return cast(Memory, tensor.contiguous().view(-1).view(torch.uint8))


def _meta(host: Any, indices: torch.Tensor, factor: int) -> tuple[list[int], list[int]] | None:
    meta = host.get_split_heads_page_buffer_meta(indices, factor) if factor > 1 else host.get_page_buffer_meta(indices)
    return cast("tuple[list[int], list[int]] | None", meta)


def memory_at(address: int, size: int) -> Memory:
    """Host memory of a pool, which outlives the connector."""
    return cast(Memory, ffi.buffer(ffi.cast("char *", address), size))


def own_revision() -> str:
    """The revision of weights that SGLang was started with (--revision); "": none, or this process was not told."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return str(get_server_args().revision or "")
    except Exception as reason:  # it was not published here, or this version has it elsewhere
        _say_once(
            "kvfs for sglang: SGLang does not tell the revision of its weights here (%s): give `revision` if weights "
            "are exchanged under one name",
            _words(reason),
        )
        return ""


def options_given(extra: Mapping[str, object] | None) -> dict[str, object]:
    """A user's extra configuration, and what holds without it."""
    options: dict[str, object] = {"namespace": "sglang", **(extra or {})}
    if "revision" not in options:
        options["revision"] = own_revision()
    return options


def _say_once(message: str, *words: str) -> None:
    text = message % words
    if text not in _said:
        _said.add(text)
        _logger.warning("%s", text)


def _words(reason: Exception) -> str:
    return f"{type(reason).__name__}: {' '.join(str(reason).split())[:200]}"


def _geometry(host: Any, parts: Sequence[object]) -> str:
    """The class of the pool stands for the order of the bytes in a page, the rest for their number and meaning."""
    shape = [getattr(host, name, None) for name in _SHAPE]
    text = repr([type(host).__name__, str(host.layout), str(host.dtype), int(host.page_size), shape, *parts])
    return sha256(text.encode()).hexdigest()[:16]
