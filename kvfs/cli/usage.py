"""Documents made from the command line's parser: completion for bash, zsh and fish, and manual pages.

read() turns the parser into verbs and their arguments; each function below it writes one language. Nothing here knows
a verb. roff: groff_man(7); zsh: zshcompsys(1), _arguments; fish: complete(1).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

# Values with these names are no paths; nor are those that the parser converts to a number.
NO_PATHS = frozenset({"LIST", "HOST:PORT", "[HOST:]PORT"})
# Completions find mounted pools there (proc(5)).
MOUNTS = "/proc/self/mounts"

EXIT_STATUS = (
    ("0", "Done."),
    ("1", "Failed, with one line on stderr that names the object."),
    ("2", "The command line makes no sense."),
    ("130", "Interrupted."),
)
ENVIRONMENT = (("KVFS_DEBUG", "1: a failure shows its traceback."),)


@dataclass(frozen=True)
class Argument:
    """names are an option's; a positional has none. value is the name of the option's value, empty where it takes
    none."""

    names: tuple[str, ...]
    value: str
    choices: tuple[str, ...]
    text: str
    is_path: bool
    is_pool: bool  # a pool, or where one is mounted
    is_command: bool
    optional: bool
    repeated: bool


@dataclass(frozen=True)
class Verb:
    """A verb, or the command itself. synopsis begins without the verb's name."""

    name: str
    text: str
    synopsis: str
    arguments: tuple[Argument, ...]

    @property
    def options(self) -> list[Argument]:
        return [argument for argument in self.arguments if argument.names]

    @property
    def positionals(self) -> list[Argument]:
        return [argument for argument in self.arguments if not argument.names]

    @property
    def asks_for_pool(self) -> bool:
        return any(argument.is_pool for argument in self.arguments)


def read(top: argparse.ArgumentParser) -> tuple[Verb, list[Verb]]:
    """The command itself, and its verbs in the parser's order."""
    (subparsers,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    texts = {action.dest: action.help or "" for action in subparsers._choices_actions}
    verbs = [_verb(name, texts[name], sub) for name, sub in subparsers.choices.items()]
    return _verb(top.prog, top.description or "", top), verbs


def _verb(name: str, text: str, parser: argparse.ArgumentParser) -> Verb:
    # Wide, as the wrapping of a usage depends on the terminal. A terminal may also have the usage coloured.
    formatter = argparse.HelpFormatter(parser.prog, width=1 << 20)
    formatter.add_usage(None, parser._actions, parser._mutually_exclusive_groups, prefix="")
    usage = re.sub(r"\x1b\[[0-9;]*m", "", formatter.format_help()).strip()
    arguments = [
        _argument(action, formatter._expand_help(action) if action.help else "")
        for action in parser._actions
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._SubParsersAction)
    ]
    return Verb(name, text.removesuffix("."), usage.removeprefix(parser.prog).strip(), tuple(arguments))


def _argument(action: argparse.Action, text: str) -> Argument:
    choices = tuple(map(str, action.choices or ()))
    value = "" if action.nargs == 0 else str(action.metavar or "|".join(choices) or action.dest.upper())
    return Argument(
        names=tuple(action.option_strings),
        value=value,
        choices=choices,
        text=text,
        is_path=bool(value) and not choices and action.type is None and value not in NO_PATHS,
        is_pool=not action.option_strings and bool({"POOL", "MOUNTPOINT"} & set(value.split("|"))),
        is_command=action.nargs == argparse.REMAINDER,
        optional=action.nargs in ("?", "*"),
        repeated=action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction),
    )


# ---- shells ----


def bash(top: argparse.ArgumentParser) -> str:
    command, verbs = read(top)
    words = [verb.name for verb in verbs] + [name for option in command.options for name in option.names]
    options, values, firsts = [], [], []
    pools = [verb.name for verb in verbs if verb.asks_for_pool] or ["''"]
    for verb in verbs:
        names = [name for option in verb.options for name in option.names if name.startswith("--")]
        options.append(f"        {verb.name}) options='{' '.join(sorted(names))}' ;;")
        for option in verb.options:
            if option.value and not option.is_path:
                pattern = "|".join(f"'{verb.name} {name}'" for name in option.names)
                values.append(f"        {pattern}) {_bash_reply(option.choices)}; return ;;")
        for first in verb.positionals[:1]:
            if first.is_command:
                firsts.append(f'        {verb.name}) COMPREPLY=($(compgen -c -- "$word")); return ;;')
            elif first.choices:
                firsts.append(f"        {verb.name}) {_bash_reply(first.choices)}; return ;;")
    return "\n".join([
        "# bash completion for kvfs; use it with: source <(kvfs completion)",
        "# Mounted pools and their mount points. No name is expanded.",
        "_kvfs_pools() {",
        "    local source point type rest name",
        "    while read -r source point type rest; do",
        "        [[ $type == fuse.kvfs ]] || continue",
        '        for name in "$source" "$point"; do',
        "            printf -v name '%b' \"$name\"",
        '            [[ $name != "$word"* ]] || COMPREPLY+=("$name")',
        "        done",
        f"    done <{MOUNTS}",
        "}",
        "_kvfs() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" verb="${COMP_WORDS[1]}" options=""',
        f"    if ((COMP_CWORD == 1)); then {_bash_reply(words)}; return; fi",
        '    case "$verb" in', *options, "    esac",
        '    case "$verb ${COMP_WORDS[COMP_CWORD-1]}" in', *values, "    esac",
        '    if [[ $word == -* ]]; then COMPREPLY=($(compgen -W "$options" -- "$word")); return; fi',
        "    if ((COMP_CWORD == 2)); then",
        '        case "$verb" in', *(f"    {line}" for line in firsts), "        esac",
        "    fi",
        '    COMPREPLY=($(compgen -f -- "$word"))',
        f"    case \"$verb\" in {'|'.join(pools)}) _kvfs_pools ;; esac",
        "}",
        "complete -o filenames -F _kvfs kvfs",
    ])  # fmt: skip


def _bash_reply(words: Sequence[str]) -> str:
    return f'COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word"))' if words else "COMPREPLY=()"


def zsh(top: argparse.ArgumentParser) -> str:
    command, verbs = read(top)
    cases = []
    for verb in verbs:
        specs = [spec for option in verb.options for spec in _zsh_option(option)] + _zsh_positionals(verb)
        # Without a single spec, _arguments fails.
        cases.append(f"        {verb.name}) " + (f"_arguments -S {' '.join(specs)} ;;" if specs else "_files ;;"))
    own = " ".join(spec for option in command.options for spec in _zsh_option(option))
    return "\n".join([
        "#compdef kvfs",
        "# zsh completion for kvfs: a file _kvfs in $fpath, or after compinit: source <(kvfs completion zsh)",
        "_kvfs_pools() {",
        "    local source point type rest",
        "    local -a found",
        "    while read -r source point type rest; do",
        '        [[ $type == fuse.kvfs ]] && found+=("${(g:o:)source}" "${(g:o:)point}")',
        f"    done <{MOUNTS}",
        '    compadd -f -- "${found[@]}"',
        "    _files",
        "}",
        "_kvfs() {",
        "    local -a verbs=(",
        *(f"        {_zsh_quoted(_zsh_colons(verb.name) + ':' + verb.text)}" for verb in verbs),
        "    )",
        f"    if ((CURRENT == 2)) && [[ $PREFIX == -* ]]; then _arguments {own}; return; fi",
        "    if ((CURRENT == 2)); then _describe -t commands verb verbs; return; fi",
        "    shift words",
        "    ((CURRENT--))",
        "    case $words[1] in",
        *cases,
        "    esac",
        "}",
        'if [ "$funcstack[1]" = _kvfs ]; then _kvfs "$@"; else compdef _kvfs kvfs; fi',
    ])  # fmt: skip


def _zsh_option(option: Argument) -> list[str]:
    before = "*" if option.repeated else f"({' '.join(option.names)})"
    text = re.sub(r"([\\\[\]:])", r"\\\1", option.text)
    after = f":{_zsh_colons(option.value)}:{_zsh_action(option)}" if option.value else ""
    joined = {name: ("=" if name.startswith("--") else "+") if option.value else "" for name in option.names}
    return [_zsh_quoted(f"{before}{name}{joined[name]}[{text}]{after}") for name in option.names]


def _zsh_positionals(verb: Verb) -> list[str]:
    specs = []
    for number, argument in enumerate(verb.positionals, 1):
        if argument.is_command:
            specs += ["(-)1:command:_command_names -e", "*::arguments:_normal"]
            continue
        where = "*" if argument.repeated else f"{number}:" if argument.optional else str(number)
        specs.append(f"{where}:{_zsh_colons(argument.value)}:{_zsh_action(argument)}")
    return list(map(_zsh_quoted, specs))


def _zsh_action(argument: Argument) -> str:
    if argument.is_pool:
        return "_kvfs_pools"
    return f"({' '.join(argument.choices)})" if argument.choices else "_files" if argument.is_path else " "


def _zsh_colons(text: str) -> str:
    return text.replace("\\", "\\\\").replace(":", "\\:")


def _zsh_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def fish(top: argparse.ArgumentParser) -> str:
    command, verbs = read(top)
    lines = [
        "# fish completion for kvfs; use it with: kvfs completion fish | source",
        "function __kvfs_pools",
        "    while read -l source point type rest",
        "        test \"$type\" = fuse.kvfs; and printf '%b\\n' $source $point",
        f"    end <{MOUNTS}",
        "end",
        "# Whether the command line has this verb, or none; and so many words, where that is asked.",
        "function __kvfs_at",
        "    set -l words (commandline -opc)",
        '    test "$words[2]" = "$argv[1]"; and begin; not set -q argv[2]; or test (count $words) -eq $argv[2]; end',
        "end",
        "complete -c kvfs -n '__kvfs_at \"\"' -f",
        *(_fish_option('""', option) for option in command.options),
    ]
    for verb in verbs:
        lines.append(f"complete -c kvfs -n '__kvfs_at \"\"' -a {verb.name} -d {_fish_quoted(verb.text)}")
    for verb in verbs:
        here = f"complete -c kvfs -n '__kvfs_at {verb.name}"
        lines += [_fish_option(verb.name, option) for option in verb.options]
        if not any(positional.is_path for positional in verb.positionals):
            lines.append(f"{here}' -f")
        if verb.asks_for_pool:
            lines.append(f"{here}' -a '(__kvfs_pools)'")
        for number, positional in enumerate(verb.positionals, 2):
            if positional.is_command:
                lines.append(f"{here}' -x -a '(__fish_complete_subcommand --fcs-skip=2)'")
            elif positional.choices:
                lines.append(f"{here} {number}' -f -a '{' '.join(positional.choices)}'")
    return "\n".join(lines)


def _fish_option(verb: str, option: Argument) -> str:
    names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
    value = f" -x -a '{' '.join(option.choices)}'" if option.choices else ""
    if option.value and not option.choices:
        value = " -r -F" if option.is_path else " -x"
    return f"complete -c kvfs -n '__kvfs_at {verb}' {names}{value} -d {_fish_quoted(option.text)}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


COMPLETIONS = {"bash": bash, "zsh": zsh, "fish": fish}


# ---- manual pages ----


def pages(top: argparse.ArgumentParser, version: str) -> dict[str, str]:
    """Every manual page of section 1 by its name: kvfs, and kvfs-VERB for each verb. No page has a date: the same
    sources give the same pages."""
    command, verbs = read(top)
    names = {verb: f"{command.name}-{verb.name}" for verb in verbs}
    made = {
        command.name: _page(
            command, command.name, command.name, version, [f"{name}(1)" for name in names.values()],
            ("COMMANDS", [(_bold(verb.name), verb.text) for verb in verbs]),
        )
    }  # fmt: skip
    for verb, name in names.items():
        made[name] = _page(verb, name, f"{command.name} {verb.name}", version, [f"{command.name}(1)"])
    return made


def _page(
    verb: Verb, name: str, call: str, version: str, see_also: list[str],
    *more: tuple[str, list[tuple[str, str]]],
) -> str:  # fmt: skip
    sections = [
        *more,
        ("ARGUMENTS", [(_italic(one.value), _described(one)) for one in verb.positionals]),
        ("OPTIONS", [(_option(one), one.text) for one in verb.options]),
        ("EXIT STATUS", [(_bold(status), text) for status, text in EXIT_STATUS]),
        ("ENVIRONMENT", [(_bold(variable), text) for variable, text in ENVIRONMENT]),
    ]
    lines = [
        f'.TH "{_roff(name.upper())}" 1 "" "{_roff(version)}" "kvfs manual"',
        ".SH NAME", f"{_roff(name)} \\- {_roff(verb.text)}",
        # A synopsis is neither hyphenated nor stretched.
        ".SH SYNOPSIS", ".nh", ".ad l", f"{_bold(call)} {_roff(verb.synopsis)}".rstrip(), ".ad", ".hy",
    ]  # fmt: skip
    for title, entries in sections:
        if entries:
            lines.append(f".SH {title}")
        for head, text in entries:
            lines += [".TP", head, _roff(text)]
    lines += [".SH SEE ALSO", ",\n".join(_bold(one[:-3]) + one[-3:] for one in sorted(see_also))]
    return "\n".join(lines) + "\n"


def _described(argument: Argument) -> str:
    choices = f"one of {', '.join(argument.choices)}" if argument.choices else ""
    return "; ".join(filter(None, (argument.text, choices)))


def _option(option: Argument) -> str:
    value = f" {_italic(option.value)}" if option.value else ""
    return ", ".join(_bold(name) for name in option.names) + value


def _bold(text: str) -> str:
    return f"\\fB{_roff(text)}\\fR"


def _italic(text: str) -> str:
    return f"\\fI{_roff(text)}\\fR"


def _roff(text: str) -> str:
    """Text taken literally: no letter of it is an escape or, at the beginning of a line, a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq").replace("`", "\\(ga")
    text = text.replace("^", "\\(ha").replace("~", "\\(ti")
    return f"\\&{text}" if text.startswith((".", "'")) else text
