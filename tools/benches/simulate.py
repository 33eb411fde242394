"""`tools/simulate`: how many blocks of a trace's prompts a policy finds, beside FIFO, LRU, S3-FIFO and Belady.

The pool's own policy (kvfs/store/eviction.py) runs on whole segments with a budget for copies, as the pool uses it. The
references evict single blocks, at equal bytes, which no log-structured store can. With --pool the real pool is asked:
segments, index, block table and evictor, with small blocks. With --nodes the policy runs on the nodes of a pod
(tools/benches/pod.py), and on as many pools that know nothing of each other. The one pool beside them is the ideal.

A hit is a block of a prompt that is there with all those before it. Blocks of a prompt that are not there are stored.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
import tempfile
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random

import trio

from benches.clairvoyant import clairvoyant, next_uses
from benches.pod import SILENT, Feed, Pod, spread
from benches.segments import SEGMENTS_MIN
from benches.traces import load, mix
from kvfs.errors import KvfsError, UsageError
from kvfs.pool.geometry import LABEL_SIZE, STRIPE_UNIT_MIN, ZONES_OFFSET, Geometry
from kvfs.pool.making import FormatRequest, format_devices
from kvfs.record import Inode, Kind
from kvfs.replay.invent import SHAPES, Prompts, Trace, invent
from kvfs.store.opening import StoreOptions
from kvfs.store.store import Store
from kvfs.types import PAGE_SIZE, ROOT_INODE

SEPARATE, POD = "separate pools", "pod"
_JSON_VERSION = 1
# Of six segments a node has four or five free or half full.
_NODE_SEGMENTS_MIN = 8


@dataclass(frozen=True, slots=True)
class Result:
    policy: str
    capacity: int  # blocks
    segments: int  # of each node; 0: single blocks
    looked_up: int
    hits: int
    stored: int  # blocks
    written: int  # blocks, copies included
    seconds: float
    nodes: int = 1  # with as many segments each
    others: int = 0  # of the hits: in other nodes' blocks
    stale: int = 0  # look-ups of blocks that other nodes had evicted
    dropped: int = 0  # blocks that two nodes had stored

    @property
    def ratio(self) -> float:
        return self.hits / self.looked_up

    @property
    def write_ratio(self) -> float:
        return self.written / max(1, self.stored)


def unique_blocks(prompts: Prompts) -> int:
    return len({block for prompt in prompts for block in prompt})


# ---- references: single blocks ----


def _play(prompts: Prompts, holds: Callable[[int], bool], use: Callable[[int, int], None]) -> tuple[int, int]:
    """Hits, and blocks stored. use(block, place of this look-up in the trace) makes it present."""
    hits = stored = place = 0
    for prompt in prompts:
        whole = True
        for block in prompt:
            present = holds(block)
            whole = whole and present
            hits += whole
            stored += not present
            use(block, place)
            place += 1
    return hits, stored


def fifo(prompts: Prompts, capacity: int) -> tuple[int, int]:
    cache: OrderedDict[int, None] = OrderedDict()

    def use(block: int, place: int) -> None:
        cache[block] = None
        if len(cache) > capacity:
            cache.popitem(last=False)

    return _play(prompts, cache.__contains__, use)


def lru(prompts: Prompts, capacity: int) -> tuple[int, int]:
    cache: OrderedDict[int, None] = OrderedDict()

    def use(block: int, place: int) -> None:
        cache[block] = None
        cache.move_to_end(block)
        if len(cache) > capacity:
            cache.popitem(last=False)

    return _play(prompts, cache.__contains__, use)


def lru_tail_first(prompts: Prompts, capacity: int) -> tuple[int, int]:
    """LRU that takes a prompt's blocks as used from the last to the first: of a chain the tail goes first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = stored = 0
    for prompt in prompts:
        found = 0
        while found < len(prompt) and prompt[found] in cache:
            found += 1
        hits += found
        for block in reversed(prompt):
            stored += block not in cache
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits, stored


def s3fifo(prompts: Prompts, capacity: int) -> tuple[int, int]:
    """Yang et al., SOSP 2023: a tenth small, the rest main, as many ghosts as main has blocks."""
    small_max = max(1, capacity // 10)
    small: deque[int] = deque()
    main: deque[int] = deque()
    ghosts: OrderedDict[int, None] = OrderedDict()
    uses: dict[int, int] = {}

    def evict_small() -> None:
        while small:
            block = small.popleft()
            if uses[block] > 1:
                uses[block] = 0
                main.append(block)
                continue
            del uses[block]
            ghosts[block] = None
            if len(ghosts) > capacity - small_max:
                ghosts.popitem(last=False)
            return

    def evict_main() -> None:
        while main:
            block = main.popleft()
            if not uses[block]:
                del uses[block]
                return
            uses[block] -= 1
            main.append(block)

    def use(block: int, place: int) -> None:
        if block in uses:
            uses[block] = min(3, uses[block] + 1)
            return
        while len(uses) >= capacity:
            evict_small() if len(small) >= small_max or not main else evict_main()
        uses[block] = 0
        if block in ghosts:
            del ghosts[block]
            main.append(block)
        else:
            small.append(block)

    return _play(prompts, uses.__contains__, use)


def belady(prompts: Prompts, capacity: int) -> tuple[int, int]:
    """Evicts the block whose next use is latest: the bound, with the whole trace known."""
    following = next_uses(prompts)
    cache: dict[int, int] = {}
    queue: list[tuple[int, int]] = []

    def use(block: int, place: int) -> None:
        cache[block] = following[place]
        heapq.heappush(queue, (-following[place], block))
        while len(cache) > capacity:
            next_use, victim = heapq.heappop(queue)
            if cache.get(victim) == -next_use:
                del cache[victim]

    return _play(prompts, cache.__contains__, use)


REFERENCES = {"fifo": fifo, "lru": lru, "lru-tail-first": lru_tail_first, "s3-fifo": s3fifo, "belady": belady}


def reference(name: str, prompts: Prompts, capacity: int) -> Result:
    start = time.monotonic()
    hits, stored = REFERENCES[name](prompts, capacity)
    looked_up = sum(map(len, prompts))
    return Result(name, capacity, 0, looked_up, hits, stored, stored, time.monotonic() - start)


# ---- the pool's policy: one pool, separate pools, a pod ----


@dataclass(frozen=True, slots=True)
class Told:
    """A pool is told more than the requests of a trace. done: by the number of a request, the blocks that are needed
    no more after it. restart: before the request of this number it is unmounted and mounted again."""

    done: Mapping[int, Sequence[int]] = field(default_factory=dict)
    restart: int | None = None


def ends_of(trace: Trace) -> dict[int, list[int]]:
    """Told.done, if the end of each session is known: the blocks of a session that no other had until then. Raises
    UsageError: the trace has no sessions."""
    if trace.sessions is None:
        raise UsageError("the trace does not say which requests are of one session")
    last = {session: number for number, session in enumerate(trace.sessions)}
    owner: dict[int, int] = {}
    own: dict[int, dict[int, None]] = {}
    done: dict[int, list[int]] = {}
    for number, (session, prompt) in enumerate(zip(trace.sessions, trace.prompts, strict=True)):
        for block in prompt:
            first = owner.setdefault(block, session)
            if first == session:
                own.setdefault(session, {})[block] = None
            else:
                own.get(first, {}).pop(block, None)
        if last[session] == number:
            done[number] = list(own.pop(session, ()))
    return done


def segmented(prompts: Prompts, capacity: int, segments: int, told: Told | None = None) -> Result:
    """The pool's policy over `segments` segments of `capacity` blocks together. Raises UsageError if those are too
    few."""
    return _played("pool", capacity, segments, 1, SILENT, ((0, prompt, 0.0) for prompt in prompts), told)


def separate(trace: Trace, on: Sequence[int], capacity: int, segments: int, nodes: int) -> Result:
    """A pool on each node, with its part of `capacity` blocks in `segments` segments. on: the node of each request.
    Raises UsageError if blocks or segments are too few."""
    return _played(SEPARATE, capacity, segments, nodes, SILENT, zip(on, trace.prompts, trace.times_s, strict=True))


def podded(trace: Trace, on: Sequence[int], capacity: int, segments: int, nodes: int, feed: Feed) -> Result:
    """The same pools as one pod."""
    return _played(POD, capacity, segments, nodes, feed, zip(on, trace.prompts, trace.times_s, strict=True))


def _played(policy: str, capacity: int, segments: int, nodes: int, feed: Feed,
            requests: Iterable[tuple[int, list[int], float]], told: Told | None = None) -> Result:  # fmt: skip
    """requests: node, prompt, time."""
    _check_segments(capacity, segments, nodes)
    start = time.monotonic()
    pod = Pod(capacity, segments, nodes, feed, Random(0))
    looked_up = 0
    told = told or Told()
    for number, (node, prompt, now_s) in enumerate(requests):
        if number == told.restart:
            for pool in pod.pools:
                pool.restart()
        pod.request(node, prompt, now_s)
        looked_up += len(prompt)
        for block in told.done.get(number, ()):
            if block in pod.pools[node].slots:
                pod.pools[node].done(block)
    stored = sum(pool.stored for pool in pod.pools)
    written = stored + sum(pool.copied for pool in pod.pools)
    return Result(
        policy, capacity // nodes * nodes, pod.pools[0].count, looked_up, pod.hits, stored, written,
        time.monotonic() - start, nodes, pod.others, pod.stale, pod.dropped,
    )  # fmt: skip


def _check_segments(capacity: int, segments: int, nodes: int) -> None:
    least = SEGMENTS_MIN if nodes == 1 else _NODE_SEGMENTS_MIN
    if segments < least or capacity // nodes < segments:
        whose = f" on each of {nodes} nodes" if nodes > 1 else ""
        raise UsageError(
            f"{capacity // nodes} blocks in {segments} segments{whose}: at least {least}, with a block in each"
        )


def foreseen(prompts: Prompts, capacity: int, segments: int) -> Result:
    """The bound of segments: their choice knows the whole trace. Raises UsageError if segments are too few."""
    _check_segments(capacity, segments, 1)
    start = time.monotonic()
    pool, hits = clairvoyant(prompts, capacity, segments)
    looked_up = sum(map(len, prompts))
    return Result(
        "clairvoyant in segments", capacity, pool.count, looked_up, hits, pool.stored, pool.stored + pool.copied,
        time.monotonic() - start,
    )  # fmt: skip


# ---- the real pool ----

_BLOCK_PAGES = 2


def real(prompts: Prompts, capacity: int, segments: int, directory: Path, told: Told | None = None) -> Result:
    """The trace over a pool in a file below `directory`. A block takes two pages, one for its header. Segments are
    powers of two of pages, so there are not quite as many as were asked for. Raises KvfsError."""
    start = time.monotonic()
    geometry = min((Geometry(1, STRIPE_UNIT_MIN, PAGE_SIZE << i) for i in range(6, 20)),
                   key=lambda g: abs(math.log(capacity / _blocks_in(g) / segments)))  # fmt: skip
    area = _blocks_in(geometry)
    count = round(capacity / area)
    options = StoreOptions(
        staging_size=16 << 20, read_memory_size=16 << 20, records_max=2 * capacity + 4096, commit_interval_s=0.2
    )

    told = told or Told()

    async def main(pool: Path) -> tuple[int, int, int]:
        hits = stored = copied = 0
        parts = [0, *([] if told.restart is None else [told.restart]), len(prompts)]
        for begin, end in pairwise(parts):
            async with Store.open(pool, options) as store:
                assert len(store.segments.all) == count
                found, new = await _replay(store, prompts[begin:end], {i - begin: told.done[i] for i in told.done})
                hits, stored = hits + found, stored + new
                copied += store.evictor.counters.carried_blocks
        return hits, stored, stored + copied

    with tempfile.TemporaryDirectory(prefix="kvfs-simulate-", dir=directory) as path:
        request = FormatRequest(
            pool=Path(path) / "pool", files=1, file_size=ZONES_OFFSET + LABEL_SIZE + count * geometry.zone_size,
            stripe_width=1, stripe_unit=geometry.stripe_unit, segment_size=geometry.zone_size,
        )  # fmt: skip
        format_devices(request)
        hits, stored, written = trio.run(main, request.pool)
    looked_up = sum(map(len, prompts))
    return Result("real pool", count * area, count, looked_up, hits, stored, written, time.monotonic() - start)


def _blocks_in(geometry: Geometry) -> int:
    return (geometry.end_page - 1) // _BLOCK_PAGES


async def _replay(store: Store, prompts: Prompts, done: Mapping[int, Sequence[int]]) -> tuple[int, int]:
    hits = stored = 0
    uses = store.plane.uses
    for place, prompt in enumerate(prompts):
        found: list[int] = []
        for block in prompt:
            number = store.plane.table_find_name(ROOT_INODE, b"%d" % block)
            if number is None:
                break
            found.append(number)
        hits += len(found)
        # The clock goes on at commits. No engine uses so many blocks between two of them as this does.
        uses.tick(store.segments.tick)
        uses.touch(found)
        before = found[-1] if found else None
        for block in prompt[len(found) :]:
            number = store.plane.table_find_name(ROOT_INODE, b"%d" % block)
            if number is None:
                number = await _store_block(store, b"%d" % block)
                stored += 1
            else:
                uses.touch([number])  # to be stored unless it is there is a use
            if before is not None:
                uses.follow(number, before)
            before = number
        ended = (store.plane.table_find_name(ROOT_INODE, b"%d" % block) for block in done.get(place, ()))
        uses.done([number for number in ended if number is not None])
        # A prompt takes seconds to compute: the evictor's turn.
        while store.segments.free_count() < store.evictor.low:
            await trio.sleep(0.0005)
    return hits, stored


async def _store_block(store: Store, name: bytes) -> int:
    """Make a file as the namespace does, with a page of zeros, and close it."""
    inode = store.blocks.create(ROOT_INODE, name, 0o644, 0, 0)
    store.plane.file_truncate(inode.inode, PAGE_SIZE)
    await store.sealing.seal(inode.inode)
    return inode.inode


# ---- command line ----


def run(trace: Trace, shares: Sequence[float], segments: Sequence[int], references: Sequence[str],
        pool: Path | None, spreads: Mapping[int, Sequence[int]], feed: Feed,
        told: Told | None = None) -> list[Result]:  # fmt: skip
    """Results for each share of the trace's unique blocks. With `pool` also those of the real pool, in a file there.
    spreads: by number of nodes: the node of each request. For each also those of separate pools and of a pod."""
    results: list[Result] = []
    prompts = trace.prompts
    unique = unique_blocks(prompts)
    for share in shares:
        capacity = max(1, int(share * unique))
        for name in references:
            results.append(reference(name, prompts, capacity))
            _say(results[-1])
        for count in segments:
            if "belady" in references:
                results.append(foreseen(prompts, capacity, count))
                _say(results[-1])
            results.append(segmented(prompts, capacity, count, told))
            _say(results[-1])
            if pool is not None:
                results.append(real(prompts, capacity, count, pool, told))
                _say(results[-1])
            for nodes, on in spreads.items():
                results.append(separate(trace, on, capacity, count, nodes))
                _say(results[-1])
                results.append(podded(trace, on, capacity, count, nodes, feed))
                _say(results[-1])
    return results


def _say(result: Result) -> None:
    print(f"{_name(result)}, {result.capacity} blocks: {result.ratio:.4f} in {result.seconds:.1f} s", file=sys.stderr)


def _name(result: Result) -> str:
    if result.policy == SEPARATE:
        return f"{result.nodes} separate pool{'s' if result.nodes > 1 else ''}"
    return f"pod of {result.nodes}" if result.policy == POD else result.policy


def table(results: Sequence[Result]) -> str:
    """With separate pools or a pod among them: the share of look-ups that others' blocks answered, stale ones, and
    blocks stored by two nodes."""
    heads = ["policy", "blocks", "segments", "prefix hits", "written / stored"]
    nodes = any(r.policy in (SEPARATE, POD) for r in results)
    rows = [[*heads, *(["in others' blocks", "stale", "stored twice"] if nodes else [])]]
    rows.append(["---"] * len(rows[0]))
    for r in results:
        row = [_name(r), f"{r.capacity:,}", str(r.segments or ""), f"{r.ratio:.4f}", f"{r.write_ratio:.3f}"]
        if nodes:
            row += [f"{r.others / r.looked_up:.4f}", f"{r.stale:,}", f"{r.dropped:,}"] if r.policy == POD else [""] * 3
        rows.append(row)
    return "\n".join("|---" * len(row) + "|" if row[0] == "---" else f"| {' | '.join(row)} |" for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if the pool failed; 2 for wrong arguments or a file that is no trace."""
    try:
        arguments = _arguments(argv)
        trace = _trace(arguments)
        spreads = {
            nodes: list(spread(trace, nodes, arguments.sticky, Random(arguments.seed))) for nodes in arguments.nodes
        }
        results = run(trace, arguments.shares, arguments.segments, arguments.references, arguments.pool, spreads,
                      _feed(trace, arguments), _told(trace, arguments))  # fmt: skip
    except UsageError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    except KvfsError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 1
    if arguments.output == "json":
        rows = [{**asdict(r), "ratio": r.ratio, "write_ratio": r.write_ratio} for r in results]
        source = (
            {"traces": [str(path) for path in arguments.trace]} if arguments.trace else {"invent": arguments.invent}
        )
        unique = unique_blocks(trace.prompts)
        print(json.dumps({"version": _JSON_VERSION, **source, "unique_blocks": unique, "results": rows}))
    else:
        print(table(results))
    return 0


def _trace(arguments: argparse.Namespace) -> Trace:
    if arguments.trace:
        return mix([load(path, arguments.session_blocks) for path in arguments.trace])
    return invent(arguments.invent, arguments.seed, arguments.requests, arguments.sessions)


def _told(trace: Trace, arguments: argparse.Namespace) -> Told:
    restart = None if arguments.restart is None else int(arguments.restart * len(trace.prompts))
    return Told(ends_of(trace) if arguments.ends else {}, restart)


def _feed(trace: Trace, arguments: argparse.Namespace) -> Feed:
    until_s = math.inf
    if arguments.engine_lost is not None:
        until_s = trace.times_s[0] + arguments.engine_lost * (trace.times_s[-1] - trace.times_s[0])
    return Feed(arguments.news_ms / 1000, hit_share=arguments.hit_share, until_s=until_s)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__, formatter_class=raw)
    parser.add_argument("trace", nargs="*", type=Path,
                        help="JSON lines with hash_ids, as Mooncake's traces; .gz too. Several: all at once, each "
                        "stretched to the time of the longest")  # fmt: skip
    parser.add_argument("--invent", choices=list(SHAPES), help="make a trace up")
    parser.add_argument("--seed", type=int, default=1, help="of an invented trace, and of sessions' moves")
    parser.add_argument("--requests", type=_count, default=6000, help="of an invented trace (default: 6000)")
    parser.add_argument("--sessions", type=_count, default=150, help="of an invented trace at once (default: 150)")
    parser.add_argument("--shares", type=_list(_share), default=[0.05, 0.1, 0.25], metavar="SHARE,...",
                        help="capacities, of the trace's unique blocks (default: 0.05,0.1,0.25)")  # fmt: skip
    parser.add_argument("--segments", type=_list(int), default=[200], metavar="COUNT,...",
                        help="of a pool, and so of each node of a pod (default: 200)")  # fmt: skip
    parser.add_argument("--references", type=_list(_reference), default=list(REFERENCES), metavar="NAME,...",
                        help=f"of {', '.join(REFERENCES)}; '' for none")  # fmt: skip
    parser.add_argument("--pool", type=Path, metavar="DIRECTORY", help="run the real pool too, in a file there")
    parser.add_argument("--ends", action="store_true",
                        help="the pool is told of each session's end: its blocks are needed no more. Sessions are "
                        "those of --session-blocks")  # fmt: skip
    parser.add_argument("--restart", type=_chance, metavar="SHARE",
                        help="the pool is unmounted and mounted again at this share of the requests")  # fmt: skip
    pod = parser.add_argument_group("a pod", "--pool and the references are of one pool, with all bytes.")
    pod.add_argument("--nodes", type=_list(_count), default=[], metavar="COUNT,...",
                     help="so many separate pools, and a pod of so many nodes, of the same total size")  # fmt: skip
    pod.add_argument("--sticky", type=_chance, default=0.9, metavar="CHANCE",
                     help="that a session stays on its node for the next request, where the trace has sessions "
                     "(invented ones, and lines with session_id); else requests go round (default: 0.9)")  # fmt: skip
    pod.add_argument("--session-blocks", type=_count, default=0, metavar="COUNT",
                     help="prompts of a recorded trace without sessions whose first COUNT blocks are the same are of "
                     "one session")  # fmt: skip
    pod.add_argument("--news-ms", type=_milliseconds, default=20.0, metavar="MS",
                     help="from a store or an eviction until other nodes know (default: 20)")  # fmt: skip
    pod.add_argument("--hit-share", type=_chance, default=1.0, metavar="CHANCE",
                     help="that an owner hears of a hit in its block on another node, up to a second later "
                     "(default: 1)")  # fmt: skip
    pod.add_argument("--engine-lost", type=_chance, metavar="SHARE",
                     help="no news from this share of the trace's time on (default: never)")  # fmt: skip
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    arguments = parser.parse_args(argv)
    if bool(arguments.trace) == bool(arguments.invent):
        parser.error("either traces, or --invent")
    return arguments


def _list(kind: Callable[[str], object]) -> Callable[[str], list[object]]:
    def parse(text: str) -> list[object]:
        return [kind(word) for word in text.split(",") if word]

    parse.__name__ = "list"
    return parse


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return count


def _chance(text: str) -> float:
    chance = float(text)
    if not 0 <= chance <= 1:
        raise argparse.ArgumentTypeError(f"{text}: from 0 to 1")
    return chance


def _milliseconds(text: str) -> float:
    milliseconds = float(text)
    if not 0 <= milliseconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text}: milliseconds, 0 or more")
    return milliseconds


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text}: a share is above 0, and 1 at most")
    return share


def _reference(text: str) -> str:
    if text not in REFERENCES:
        raise argparse.ArgumentTypeError(f"{text}: not one of {', '.join(REFERENCES)}")
    return text


if __name__ == "__main__":
    sys.exit(main())
