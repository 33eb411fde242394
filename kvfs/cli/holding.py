"""The verb `kvfs hold`: a process that keeps mounts while their daemons restart."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from kvfs.cli import arguments
from kvfs.cli.arguments import Verbs
from kvfs.cli.output import emit_line


def add_hold(verbs: Verbs) -> None:
    sub = verbs.add("hold", _hold, "keep mounts while their daemons restart; ends with the last of them")
    sub.add_argument("socket", metavar="SOCKET", help="where kvfs mount --hold SOCKET connects")
    sub.add_argument(
        "--timeout",
        type=arguments.seconds,
        default=600.0,
        metavar="S",
        help="end a mount that no daemon has served for this long (default 600)",
    )


def _hold(args: argparse.Namespace) -> int:
    import logging

    from kvfs.hold.holder import Holder, listen
    from kvfs.hold.service import notify
    from kvfs.hold.words import HoldError

    path = Path(args.socket).absolute()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    args.signals.until_ended()
    args.signals.outlive_terminal()  # mounts need it
    with listen(path) as listener:
        try:
            emit_line(args, {"socket": str(path)})  # who has read it may end this at once
            with suppress(HoldError):
                notify("READY=1")
            Holder(listener, args.timeout).run()
        finally:
            with suppress(OSError):
                path.unlink()
    return 0
