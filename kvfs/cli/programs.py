"""Verbs that bring a library of kvfs into another program: cufile-run, preload-run, nixl-plugins."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import cast

from kvfs.cli.arguments import Verbs
from kvfs.cli.output import emit

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


def add_nixl_plugins(verbs: Verbs) -> None:
    sub = verbs.add(
        "nixl-plugins", _nixl_plugins, "make a directory of NIXL's plugins and kvfs's, and say how to name it"
    )
    sub.add_argument("directory", metavar="DIR", help="where the links go; made, or brought up to date")
    sub.add_argument(
        "--nixl", metavar="PATH", help="an environment, or what has libnixl.so (default: this Python's nixl)"
    )


def _nixl_plugins(args: argparse.Namespace) -> int:
    from kvfs.client import nixl

    made = nixl.make(Path(args.directory), Path(args.nixl) if args.nixl else None)
    variables = nixl.environment(made)
    document = {"nixl": str(made.nixl), "plugins": made.names, "environment": variables}
    emit(args, document, "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items()))
    return 0
