"""The verb that plays an engine: replay."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvfs.cli import arguments
from kvfs.cli.arguments import Verbs
from kvfs.cli.output import ToldError, ToldInterrupt, as_json, emit, note
from kvfs.cli.progress import Progress
from kvfs.errors import KvfsError, UsageError
from kvfs.units import counted

# Requests of an invented trace, unless --requests says how many.
_INVENTED = 2000


def add_replay(verbs: Verbs) -> None:
    from kvfs.replay.invent import SHAPES
    from kvfs.replay.trace import BLOCK_TOKENS, MODELS

    sub = verbs.add("replay", _replay, "replay a trace of requests against a directory, as an inference engine would")
    sub.add_argument(
        "trace",
        metavar="TRACE",
        nargs="?",
        help="JSON lines: timestamp (ms), input_length, hash_ids; or --invent",
    )
    sub.add_argument(
        "--invent",
        choices=sorted(SHAPES),
        help="in place of TRACE: requests that are invented, of such use (default: TRACE)",
    )
    sub.add_argument("--seed", type=arguments.count, default=1, metavar="N", help="of --invent (default 1)")
    sub.add_argument(
        "--target", metavar="DIR", required=True, help="required: where the blocks are; any directory will do"
    )
    sub.add_argument("--native", action="store_true", help="DIR is in a kvfs mount: by libkvfs, not by files")
    size = sub.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--model", choices=sorted(MODELS), help="what a token takes, bf16, all ranks; one of these three is required"
    )
    size.add_argument(
        "--bytes-per-token", type=arguments.count, metavar="N", help=f"a block is {BLOCK_TOKENS} tokens; or required"
    )
    size.add_argument("--block-size", type=arguments.size, metavar="SIZE", help="bytes of a block; or required")
    pace = sub.add_mutually_exclusive_group()
    pace.add_argument(
        "--time-scale", type=arguments.positive, default=1.0, metavar="X", help="X times as fast (default 1)"
    )
    pace.add_argument("--full-speed", action="store_true", help="no request waits for its time")
    sub.add_argument("--threads", type=arguments.count, default=4, metavar="N", help="requests at once (default 4)")
    sub.add_argument(
        "--io-threads", type=arguments.count, default=16, metavar="N",
        help="blocks loaded at once, and as many stored (default 16); with --native those of each request",
    )  # fmt: skip
    sub.add_argument("--skip", type=arguments.whole, default=0, metavar="N", help="leave out the first N (default 0)")
    sub.add_argument(
        "--requests", type=arguments.count, metavar="N", help="replay so many (default: all; of --invent 2000)"
    )
    sub.add_argument(
        "--warmup",
        type=arguments.share,
        default=0.0,
        metavar="SHARE",
        help="of the requests, not counted: 0.3 (default 0)",
    )
    sub.add_argument(
        "--prefill-tokens-per-second", type=arguments.positive, default=8000.0, metavar="N",
        help="what the engine computes, for the time to the first token (default 8000)",
    )  # fmt: skip
    sub.add_argument(
        "--memory",
        type=arguments.memory_size,
        default=1 << 30,
        metavar="SIZE",
        help="of blocks on their way (default 1G)",
    )
    sub.add_argument("--buffered", action="store_true", help="files without O_DIRECT")
    sub.add_argument("--verify", action="store_true", help="compare every byte that is loaded")
    sub.add_argument("--touch", action="store_true", help="set a file's atime at each load")
    sub.add_argument(
        "--lru",
        type=arguments.size,
        default=0,
        metavar="SIZE",
        help="keep at most so much in DIR, by an LRU in memory (default: all)",
    )
    sub.add_argument("--plot", metavar="FILE.svg", help="draw hit ratio and load latency over time (default: not)")


def _replay(args: argparse.Namespace) -> int:
    from kvfs.replay.trace import BLOCK_TOKENS, MODELS, invented_trace, read_trace

    if (args.trace is None) == (args.invent is None):
        raise UsageError("replay: give TRACE, or --invent SHAPE for an invented one")
    if args.invent is not None:
        name = f"{args.invent}, invented with seed {args.seed}"
        trace = invented_trace(args.invent, args.seed, args.skip + (args.requests or _INVENTED))
    else:
        name, trace = args.trace, read_trace(Path(args.trace))
    requests = trace[args.skip :][: args.requests]
    if not requests:
        raise UsageError(f"--skip: {name} has {counted(len(trace), 'request')}, {args.skip} are to be left out")
    for option, count, most in (("--threads", args.threads, 256), ("--io-threads", args.io_threads, 1024)):
        if count > most:
            raise UsageError(f"{option}: {count}; {most} at most")
    plot = None if args.plot is None else Path(args.plot)
    if plot is not None and plot.suffix != ".svg":
        raise UsageError(f"--plot: {plot}: an SVG is drawn, so FILE.svg is expected")

    from kvfs.replay import engine, report
    from kvfs.replay.plot import render as render_plot

    tokens = MODELS[args.model] if args.model else args.bytes_per_token
    settings = engine.Settings(
        target=Path(args.target),
        block_size=args.block_size or tokens * BLOCK_TOKENS,
        native=args.native,
        threads=args.threads,
        io_threads=args.io_threads,
        memory=args.memory,
        speed=None if args.full_speed else args.time_scale,
        buffered=args.buffered,
        verify=args.verify,
        touch=args.touch,
        lru_bytes=args.lru,
    )
    engine.check(settings)
    if not as_json(args):
        note(report.estimate(settings, requests))
    with Progress() as progress:

        def tell(done: int, total: int) -> None:
            rest_ms = requests[-1].due_ms - requests[min(done, total - 1)].due_ms
            least_s = 0.0 if settings.speed is None else rest_ms / 1000 / settings.speed
            progress("requests", done, total, least_s=least_s)

        outcome = engine.replay(settings, trace, requests, tell)
    document = report.document(
        settings, name, trace[: args.skip], requests, outcome,
        prefill_tokens_per_s=args.prefill_tokens_per_second, warmup=args.warmup,
    )  # fmt: skip
    if plot is not None:
        try:
            plot.write_text(render_plot({args.target: document}, f"replay of {name}"))
        except OSError as error:
            raise KvfsError(f"{plot}: {error.strerror}") from error
    wrong = sum(record.wrong for record in outcome.records if record is not None)
    failure = ToldError(f"replay: {counted(wrong, 'block')} of {args.target} not as stored") if wrong else None
    emit(args, document, report.render(document), failure)
    if outcome.interrupted:
        raise ToldInterrupt
    return 0
