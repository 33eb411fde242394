"""tools/ttft: time to the first token of a long prompt, its KV cache computed against loaded from kvfs.

A Llama of random weights, in plain PyTorch. The prompt's KV cache is computed, and timed up to the first token. It is
stored block by block, then loaded into fresh memory of the model's device. The rest of the prompt is computed on
top. Every loaded byte and the token have to be the same. The loads come from the devices, past the page cache.

Weights and prompt are random: time and bytes are those of the shape that is named, the tokens mean nothing.
Exit status: 0 all right; 1 a byte or the token differs, or a block was missing; 2 usage.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvfs
from benches.gpu_check import CheckedPool
from kvfs.errors import KvfsError

MIB = 1 << 20
# Tokens that are computed at one time, as engines do with long prompts.
CHUNK = 2048
PUT_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama, and the element type of its weights and cache."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    theta: float
    dtype: str
    block_tokens: int

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    def token_bytes(self, torch: Any) -> int:
        """Of the KV cache."""
        return int(2 * self.layers * self.kv_heads * self.head_size * getattr(torch, self.dtype).itemsize)


SHAPES = {
    # Sizes of its config.json; 16 tokens of bfloat16 are a block of 2 MiB.
    "llama-3-8b": Shape(32, 4096, 32, 8, 14336, 128256, 500_000.0, "bfloat16", 16),
    "tiny": Shape(4, 256, 8, 2, 688, 1024, 10_000.0, "float32", 64),
}


class Model:
    """The weights, and one prompt's pass through them. Shapes of tensors: T tokens, H heads, D head_size."""

    def __init__(self, torch: Any, shape: Shape, device: str) -> None:
        self._torch, self.shape, self.device = torch, shape, device
        self.dtype = getattr(torch, shape.dtype)
        self._random = torch.Generator(device=device).manual_seed(1)
        kv = shape.kv_heads * shape.head_size
        self._layers = [
            {
                "q": self._weights(shape.hidden, shape.hidden),
                "k": self._weights(shape.hidden, kv),
                "v": self._weights(shape.hidden, kv),
                "o": self._weights(shape.hidden, shape.hidden),
                "gate": self._weights(shape.hidden, shape.feed_forward),
                "up": self._weights(shape.hidden, shape.feed_forward),
                "down": self._weights(shape.feed_forward, shape.hidden),
            }
            for _ in range(shape.layers)
        ]
        self._embedding = self._weights(shape.vocabulary, shape.hidden) * shape.hidden**0.5
        half = torch.arange(0, shape.head_size, 2, device=device, dtype=torch.float32) / shape.head_size
        self._frequencies = shape.theta**-half

    def _weights(self, rows: int, columns: int) -> Any:
        torch = self._torch
        values = torch.randn(rows, columns, generator=self._random, device=self.device, dtype=self.dtype)
        return values * rows**-0.5

    def prompt(self, tokens: int) -> Any:
        return self._torch.randint(self.shape.vocabulary, (tokens,), generator=self._random, device=self.device)

    def cache(self, tokens: int) -> Any:
        """Memory of a prompt's KV cache: (blocks, layers, 2, block_tokens, kv_heads, head_size). A block is one run of
        bytes."""
        shape = self.shape
        blocks = -(-tokens // shape.block_tokens)
        return self._torch.full(
            (blocks, shape.layers, 2, shape.block_tokens, shape.kv_heads, shape.head_size),
            float("nan"), dtype=self.dtype, device=self.device,
        )  # fmt: skip

    def first_token(self, prompt: Any, cache: Any, known: int) -> int:
        """Compute the prompt from token `known` on, a multiple of block_tokens, into the cache; return the token that
        follows it."""
        last = None
        for begin in range(known, len(prompt), CHUNK):
            last = self._chunk(prompt[begin : begin + CHUNK], cache, begin)
        assert last is not None, (len(prompt), known)
        return int((self._norm(last) @ self._embedding.T).argmax())

    def _norm(self, x: Any) -> Any:
        wide = x.float()
        return (wide * self._torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    def _rotate(self, x: Any, begin: int) -> Any:
        """Rotary positions (RoFormer, arXiv:2104.09864) of (T, H, D), the halves of D as the pairs."""
        torch = self._torch
        angles = torch.outer(torch.arange(begin, begin + len(x), device=self.device).float(), self._frequencies)
        cosine, sine = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)

    def _chunk(self, tokens: Any, cache: Any, begin: int) -> Any:
        """The last token's hidden state after these tokens, which are numbers begin, begin + 1, ... of the prompt."""
        torch, shape = self._torch, self.shape
        count, end = len(tokens), begin + len(tokens)
        x = self._embedding[tokens]
        # Query i sees keys 0 to begin + i.
        mask = torch.ones(count, end, dtype=torch.bool, device=self.device).tril(begin)
        for number, weights in enumerate(self._layers):
            y = self._norm(x)
            query = self._rotate((y @ weights["q"]).view(count, shape.heads, -1), begin)
            key = self._rotate((y @ weights["k"]).view(count, shape.kv_heads, -1), begin)
            value = (y @ weights["v"]).view(count, shape.kv_heads, -1)
            keys, values = (self._cached(cache, number, part, new, begin) for part, new in enumerate((key, value)))
            attended = torch.nn.functional.scaled_dot_product_attention(
                query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask
            )
            x = x + attended[0].transpose(0, 1).reshape(count, -1) @ weights["o"]
            y = self._norm(x)
            x = x + (torch.nn.functional.silu(y @ weights["gate"]) * (y @ weights["up"])) @ weights["down"]
        return x[-1]

    def _cached(self, cache: Any, layer: int, part: int, new: Any, begin: int) -> Any:
        """Keys or values (heads, tokens, D) of all tokens so far, the new ones entered."""
        shape = self.shape
        first, count = begin // shape.block_tokens, len(new)
        for at in range(0, count, shape.block_tokens):
            piece = new[at : at + shape.block_tokens]
            cache[first + at // shape.block_tokens, layer, part, : len(piece)] = piece
        blocks = -(-(begin + count) // shape.block_tokens)
        whole = cache[:blocks, layer, part].reshape(-1, shape.kv_heads, shape.head_size)[: begin + count]
        return whole.repeat_interleave(shape.heads // shape.kv_heads, dim=1).transpose(0, 1)


def measure(client: kvfs.Client, model: Model, torch: Any, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of each part, medians of the rounds; and what was wrong. KvfsError: a block was not stored."""
    wait = torch.cuda.synchronize if model.device != "cpu" else lambda: None
    prompt, shape = model.prompt(tokens), model.shape
    known = (tokens - 1) // shape.block_tokens * shape.block_tokens
    blocks = known // shape.block_tokens
    keys = [b"ttft %d" % i for i in range(blocks)]
    computed, loaded, model_after = [], [], []
    wrong: list[str] = []
    cache = model.cache(tokens)
    token = model.first_token(prompt, cache, 0)  # unmeasured: libraries make their plans
    for _ in range(rounds):
        began = time.perf_counter()
        token = model.first_token(prompt, cache, 0)
        wait()
        computed.append(time.perf_counter() - began)
    began = time.perf_counter()
    for at in range(0, blocks, PUT_BLOCKS):
        part = cache[at : min(at + PUT_BLOCKS, blocks)]
        client.put([(keys[at + i], block.view(torch.uint8)) for i, block in enumerate(part)])
    stored = time.perf_counter() - began
    for _ in range(rounds):
        fresh = model.cache(tokens)
        wait()
        began = time.perf_counter()
        read = client.get_into([(key, fresh[i].view(torch.uint8)) for i, key in enumerate(keys)])
        middle = time.perf_counter()
        found = model.first_token(prompt, fresh, known)
        wait()
        loaded.append(middle - began)
        model_after.append(time.perf_counter() - middle)
        if missing := read.count(None):
            wrong.append(f"{missing} of {blocks} blocks were missing")
        elif not torch.equal(fresh[:blocks].view(torch.uint8), cache[:blocks].view(torch.uint8)):
            wrong.append("a block that was loaded is not the one that was stored")
        if found != token:
            wrong.append(f"the first token is {found} with blocks that were loaded, {token} with those computed")
    compute_s, load_s, rest_s = map(statistics.median, (computed, loaded, model_after))
    size = cache[0].numel() * cache.element_size()
    return {
        "tokens": tokens, "blocks": blocks, "block_bytes": size, "compute_s": compute_s, "store_s": stored,
        "load_s": load_s, "rest_s": rest_s, "ratio": compute_s / (load_s + rest_s), "mode": client.mode,
        "load_bytes_per_s": blocks * size / load_s, "wrong": wrong,
    }  # fmt: skip


def _print(result: dict[str, Any]) -> None:
    loaded, speed = result["load_s"] + result["rest_s"], result["load_bytes_per_s"] / 1e9
    print(f"{result['shape']} of random weights on {result['device']}, {result['tokens']} tokens")
    print(f"{result['blocks']} blocks of {result['block_bytes']} bytes")
    print(f"computed   {result['compute_s']:9.3f} s to the first token")
    print(f"from kvfs  {loaded:9.3f} s: {result['load_s']:.3f} s of loads, {result['rest_s']:.3f} s of the rest")
    print(f"ratio      {result['ratio']:9.2f}")
    print(f"loads      {speed:9.2f} GB/s, mode {result['mode']}")
    print(f"stored in  {result['store_s']:9.3f} s")


def _pool(stack: ExitStack, options: argparse.Namespace, size: int) -> Path:
    """Mounted until the stack ends."""
    base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfs-ttft-", dir=options.directory)))
    command = [options.kvfs] if options.kvfs else []
    return stack.enter_context(CheckedPool(base, max(1024 * MIB, size), (), command)).mount


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/ttft", description="Time to first token: computed, and from kvfs.")
    parser.add_argument("--shape", choices=SHAPES, help="default: llama-3-8b on a GPU, tiny on a CPU")
    parser.add_argument("--tokens", type=int, help="of the prompt; default: 32768, of the tiny shape 2048")
    parser.add_argument("--device", help="cpu, or cuda:0; default: a GPU if PyTorch finds one")
    parser.add_argument("--mount", type=Path, help="a mounted pool; default: a pool of its own, removed at the end")
    parser.add_argument("--directory", type=Path, help="where that pool's files go")
    parser.add_argument("--kvfs", default="", help="the kvfs that makes that pool; default: this Python's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    options = parser.parse_args(arguments)
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        print(f"tools/ttft: PyTorch is needed in {sys.executable}: {error}", file=sys.stderr)
        return 2
    device = options.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    name = options.shape or ("tiny" if device == "cpu" else "llama-3-8b")
    shape, tokens = SHAPES[name], options.tokens or (2048 if name == "tiny" else 32768)
    if tokens <= shape.block_tokens or not 1 <= options.rounds <= 100:
        parser.error(f"--tokens {tokens}, --rounds {options.rounds}: more than {shape.block_tokens}, and 1 to 100")
    with ExitStack() as stack, torch.inference_mode():
        try:
            mount = options.mount or _pool(stack, options, 2 * tokens * shape.token_bytes(torch))
            client = stack.enter_context(kvfs.connect(mount, f"ttft-{name}", gpu=None if device == "cpu" else "auto"))
            result: dict[str, Any] = {"shape": name, "device": device}
            result |= measure(client, Model(torch, shape, device), torch, tokens, options.rounds)
        except KvfsError as error:
            print(f"tools/ttft: {error}", file=sys.stderr)
            return 1
    if options.output == "json":
        print(json.dumps(result))
    else:
        _print(result)
    for text in result["wrong"]:
        print(f"WRONG: {text}", file=sys.stderr)
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
