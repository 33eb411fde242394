"""Options of `kvfs mount` and `kvfs export` from a file: a command line, fstab, a unit and a chart then say the same.

The file is TOML, its keys are the long options' names. The command line wins over the file, and the file over the
defaults. One file is read: that of --config, else mount.toml in the pool, else /etc/kvfs/NAME.toml, where NAME is that
of the pool's directory.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvfs.cli.output import emit
from kvfs.errors import UsageError

DIRECTORY = Path("/etc/kvfs")
IN_POOL = "mount.toml"
SIZE_MAX = 64 << 10
# Options that are about one run of the command, not about the mount.
_NEVER = frozenset({"help", "output", "force", "foreground", "config", "show-config", "show-qemu", "show-libvirt"})


# Raises UsageError for a text that an option does not take; for what the parser of the command line leaves to others.
Check = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Settings:
    """Options that a file may have, by their long names, with their defaults. others: names of another verb's."""

    actions: dict[str, argparse.Action]
    defaults: dict[str, object]
    others: frozenset[str]
    checks: Mapping[str, Check]


@dataclass(slots=True)
class Resolved:
    """The values in force, each with its origin: command line, the file's path, or default."""

    file: Path | None
    values: dict[str, object] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)


def configurable(
    sub: argparse.ArgumentParser, *, others: Sequence[str] = (), checks: Mapping[str, Check] | None = None
) -> None:
    """Let a verb's options be set by a file. Called after all of them were added; resolve() then fills them in."""
    sub.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"a file of these options (default: {IN_POOL} in the pool, else {DIRECTORY}/NAME.toml)",
    )
    sub.add_argument(
        "--show-config", action="store_true", help="start nothing; print the options in force, and where each is from"
    )
    actions: dict[str, argparse.Action] = {}
    for action in sub._actions:
        names = [word[2:] for word in action.option_strings if word.startswith("--")]
        if names and names[0] not in _NEVER:
            actions[names[0]] = action
    settings = Settings(
        actions, {name: action.default for name, action in actions.items()}, frozenset(others), checks or {}
    )
    for action in actions.values():
        action.default = argparse.SUPPRESS  # an option that is not given leaves no trace
    sub.set_defaults(settings=settings)


def resolve(args: argparse.Namespace, pool: Path) -> Resolved:
    """Fill in the options that the command line does not have. UsageError names file, key and value."""
    settings: Settings = args.settings
    path = _find(args.config, pool)
    given = {} if path is None else _read(settings, path, follow=path.parent != pool)
    resolved = Resolved(path)
    for name, action in settings.actions.items():
        if hasattr(args, action.dest):
            value, origin = getattr(args, action.dest), "command line"
        elif name in given:
            value, origin = given[name], str(path)
        else:
            value, origin = settings.defaults[name], "default"
        setattr(args, action.dest, value)
        resolved.values[name], resolved.origins[name] = value, origin
    return resolved


def show(args: argparse.Namespace, resolved: Resolved) -> None:
    """Print the options in force."""
    parts = {name: {"value": value, "from": resolved.origins[name]} for name, value in resolved.values.items()}
    file = None if resolved.file is None else str(resolved.file)

    def text() -> str:
        width = max(map(len, resolved.values))
        lines = [f"file: {file or 'none'}"]
        for name, value in resolved.values.items():
            lines.append(f"{name.ljust(width)}  {_shown(value)}  ({resolved.origins[name]})")
        return "\n".join(lines)

    emit(args, {"file": file, "settings": parts}, text)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value in (None, "") else str(value)


def _find(asked: Path | None, pool: Path) -> Path | None:
    if asked is not None:
        return Path(os.path.abspath(asked))
    for path in (pool / IN_POOL, DIRECTORY / f"{pool.name}.toml"):
        if os.path.lexists(path):
            return path
    return None


def _read(settings: Settings, path: Path, *, follow: bool) -> dict[str, object]:
    """The options of a file, checked and of their types."""
    text = _text(path, follow)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: no TOML: {error}") from None
    found: dict[str, object] = {}
    for name, value in document.items():
        where = f"{path}:{_line(text, name)}: {name} = {value!r}"
        action = settings.actions.get(name)
        if action is not None:
            found[name] = made = _value(action, value, where)
            if name in settings.checks:
                _check(settings.checks[name], made, where)
        elif name not in settings.others:
            known = ", ".join(settings.actions)
            why = "is of one run of the command" if name in _NEVER else "is no option"
            raise UsageError(f"{where}: {name!r} {why}; a file may have {known}")
    return found


def _text(path: Path, follow: bool) -> str:
    """The text of a file that nobody but root and this user can write."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        raise UsageError(f"{path}: the options cannot be read: {error.strerror}") from None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path}: not a regular file")
        if status.st_uid not in (0, os.geteuid()):
            raise UsageError(f"{path}: belongs to user {status.st_uid}: it must be root's or yours")
        if status.st_mode & 0o022:
            raise UsageError(f"{path}: mode {stat.S_IMODE(status.st_mode):04o}: others can write it: chmod go-w {path}")
        data = file.read(SIZE_MAX + 1)
    if len(data) > SIZE_MAX:
        raise UsageError(f"{path}: larger than {SIZE_MAX} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not UTF-8") from None


def _line(text: str, name: str) -> int:
    """The line that sets a key; 1 if it is written in another way."""
    found = re.search(rf"""^[ \t]*\[?["']?{re.escape(name)}["']?[ \t]*[=.\]]""", text, re.MULTILINE)
    return 1 + text.count("\n", 0, found.start()) if found else 1


def _check(check: Check, made: object, where: str) -> None:
    for text in made if isinstance(made, list) else [made]:
        try:
            check(str(text))
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None


def _value(action: argparse.Action, value: object, where: str) -> object:
    """A value of the file as the command line would have made it."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"{where}: true or false is expected")
        return value
    if isinstance(action, argparse._AppendAction):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UsageError(f"{where}: a list of texts is expected")
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise UsageError(f"{where}: a text or a number is expected")
    made: object = str(value)
    if callable(action.type):
        try:
            made = action.type(str(value))
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise UsageError(f"{where}: {error}") from None
    if action.choices is not None and made not in action.choices:
        raise UsageError(f"{where}: one of {', '.join(map(str, action.choices))} is expected")
    return made
