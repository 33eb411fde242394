"""Verbs made from the command line itself: completion, man."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from kvfs.cli.arguments import Verbs


def add_completion(verbs: Verbs) -> None:
    sub = verbs.add_plain("completion", "shell completion: source <(kvfs completion); kvfs completion fish | source")
    sub.add_argument("shell", nargs="?", choices=("bash", "zsh", "fish"), default="bash", help="default: bash")
    sub.set_defaults(function=functools.partial(_completion, verbs.top))


def _completion(top: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from kvfs.cli import usage

    print(usage.COMPLETIONS[args.shell](top))
    return 0


def add_help(verbs: Verbs) -> None:
    sub = verbs.add_plain("help", "what a verb does, and its arguments: kvfs help mount")
    sub.add_argument("page", metavar="VERB", nargs="?", choices=(*verbs.names, "help"), help="default: all verbs")
    sub.set_defaults(function=functools.partial(_help, verbs))


def _help(verbs: Verbs, args: argparse.Namespace) -> int:
    (verbs.top if args.page is None else verbs.parser(args.page)).print_help()
    return 0


def add_man(verbs: Verbs) -> None:
    sub = verbs.add_plain("man", "manual pages: kvfs man mount | man -l -")
    page = sub.add_mutually_exclusive_group()
    page.add_argument("--directory", metavar="DIR", help="write every page there (default: print one)")
    sub.set_defaults(function=functools.partial(_man, verbs.top))
    page.add_argument("page", metavar="VERB", nargs="?", choices=verbs.names, help="default: kvfs itself")


def _man(top: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from kvfs import __version__
    from kvfs.cli import usage

    pages = usage.pages(top, f"kvfs {__version__}")
    if args.directory is None:
        print(pages[f"kvfs-{args.page}" if args.page else "kvfs"], end="")
        return 0
    directory = Path(args.directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (directory / f"{name}.1").write_text(text)
    return 0
