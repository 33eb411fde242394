"""Verbs that become another program, with a library of kvfs under it: cufile-run, preload-run."""

from __future__ import annotations

import argparse
from typing import cast

from kvfs.cli.arguments import Verbs

# Verbs that become another program. The first word of each is its module in kvfs.client.
RUN_VERBS = {
    "cufile-run": "run a program whose cuFile reads on kvfs mounts take the native path",
    "preload-run": "run a program whose file reads on kvfs mounts take the native path",
}


def add_run_verbs(verbs: Verbs) -> None:
    for name, text in RUN_VERBS.items():
        sub = verbs.add_plain(name, text, description=text)
        sub.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="a program and its arguments")
        sub.set_defaults(function=_run)


def _run(args: argparse.Namespace) -> int:
    import importlib

    module = importlib.import_module(f"kvfs.client.{args.verb.partition('-')[0]}")
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    return cast(int, module.run(command))
