"""Traces of requests: Mooncake's JSON lines, and the bytes that models store for a token.

A line is a request: {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}. hash_ids are
the 512-token blocks of its prompt in order. Each id stands for its block and all before it, so equal ids are equal
prefixes. The last block may be partial; it is stored whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvfs.errors import UsageError
from kvfs.replay.invent import invent

BLOCK_TOKENS = 512
# Bytes of KV cache that a token takes, bf16, all layers, all ranks.
MODELS = {"deepseek-v3": 70_272, "llama-3-8b": 131_072, "llama-3-70b": 327_680}
_HASH_END = 1 << 64
_TOKENS_END = 1 << 32


@dataclass(frozen=True, slots=True)
class Request:
    """due_ms: after the trace's start. blocks: its hash ids, in the order of the prompt."""

    due_ms: float
    input_tokens: int
    blocks: tuple[int, ...]


def read_trace(path: Path) -> list[Request]:
    """Raises UsageError with FILE:LINE and the fault there, or for a trace without requests."""
    requests: list[Request] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    request = _request(line)
                    if requests and request.due_ms < requests[-1].due_ms:
                        raise ValueError(
                            f"timestamp {request.due_ms:g} is before the last one, {requests[-1].due_ms:g}"
                        )
                except (ValueError, RecursionError) as error:
                    raise UsageError(f"{path}:{number}: {error}") from error
                requests.append(request)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if not requests:
        raise UsageError(f"{path}: no requests in it")
    return requests


def invented_trace(shape: str, seed: int, count: int) -> list[Request]:
    """A number of requests of one of invent.SHAPES; the same for the same seed."""
    trace = invent(shape, seed, count)
    prompts = zip(trace.times_s, trace.prompts, strict=True)
    return [Request(1000 * due_s, BLOCK_TOKENS * len(prompt), tuple(prompt)) for due_s, prompt in prompts]


def _request(line: bytes) -> Request:
    try:
        document = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    for name in ("timestamp", "input_length", "hash_ids"):
        if name not in document:
            raise ValueError(f"no {name}")
    due, tokens, blocks = document["timestamp"], document["input_length"], document["hash_ids"]
    if type(due) not in (int, float) or not 0 <= due < 1e15:
        raise ValueError(f"timestamp {_shown(due)}: milliseconds, 0 or more, are expected")
    if type(tokens) is not int or not 0 <= tokens < _TOKENS_END:
        raise ValueError(f"input_length {_shown(tokens)}: a number of tokens is expected")
    if not isinstance(blocks, list):
        raise ValueError(f"hash_ids {_shown(blocks)}: a list is expected")
    for block in blocks:
        if type(block) is not int or not 0 <= block < _HASH_END:
            raise ValueError(f"hash_ids: {_shown(block)} is not a number from 0 to {_HASH_END - 1}")
    if len(set(blocks)) != len(blocks):
        twice = next(block for place, block in enumerate(blocks) if block in blocks[:place])
        raise ValueError(f"hash_ids: {twice} is in it twice, but an id stands for one place of one prefix")
    return Request(float(due), tokens, tuple(blocks))


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def unlimited_hits(before: Sequence[Request], requests: Sequence[Request]) -> int:
    """Blocks that requests, one after the other, would find in a cache that loses nothing and has served `before`."""
    known = {block for request in before for block in request.blocks}
    hits = 0
    for request in requests:
        for block in request.blocks:
            if block not in known:
                break
            hits += 1
        known.update(request.blocks)
    return hits
