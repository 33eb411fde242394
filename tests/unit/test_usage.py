"""Documents made from the parser: completion, answered by the shells themselves, and manual pages for roff."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from kvfs import cli
from kvfs.cli import usage
from kvfs.cli.command import parser

DEADLINE_S = 30


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    """A shell's completion, on a machine where these filesystems are mounted."""
    assert cli.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert text.count("/proc/self/mounts") == 1
    return text.replace("/proc/self/mounts", str(MOUNTS))


def needed(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"no {program} on this machine")
    return path


def verbs() -> list[str]:
    return [verb.name for verb in usage.read(parser())[1]]


MOUNTS = Path(__file__).with_name("mounts.txt")

# Command lines that end where the key is pressed, what must be offered, and what must not.
LINES = [
    ("kvfs mo", {"mount"}, {"umount"}),
    ("kvfs fsck --re", {"--repair"}, {"--verify-data"}),
    ("kvfs device ", {"list", "add", "remove", "replace"}, {"mount"}),
    ("kvfs device list ", {"a-file"}, {"replace"}),
    ("kvfs pod ", {"create", "join", "status", "retire", "doctor"}, {"a-file"}),
    ("kvfs pod create --lo", {"--lot", "--lookup-wait"}, {"--slot"}),
    ("kvfs completion ", {"bash", "zsh", "fish"}, set()),
    ("kvfs status -o ", {"text", "json"}, {"a-file"}),
    ("kvfs import --device ", {"a-file"}, {"json"}),
    ("kvfs mount --staging ", set(), {"a-file"}),
    ("kvfs pin a", {"a-file"}, set()),
    ("kvfs device list --dr", {"--drain"}, {"--pins"}),
    ("kvfs cufile-run basena", {"basename"}, {"a-file"}),
    ("kvfs bench --wr", {"--write"}, {"a-file"}),
    ("kvfs status /srv/a", {"/srv/a-pool"}, {"/srv/no-pool", "/mnt/kv"}),
    ("kvfs device list /mnt/k", {"/mnt/kv"}, {"/srv/a-pool"}),
]


@pytest.mark.parametrize(("line", "offered", "absent"), LINES)
def test_bash_completes(
    line: str, offered: set[str], absent: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a-file").touch()
    words = line.split(" ")
    call = f'COMP_WORDS=({" ".join(words)} ""); COMP_CWORD={len(words) - 1}; _kvfs; printf "%s\\n" "${{COMPREPLY[@]}}"'
    found = subprocess.run(
        ["bash", "-c", script("bash", capsys) + "\n" + call], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert not found.stderr
    assert offered <= set(found.stdout.split()) and not absent & set(found.stdout.split())


@pytest.mark.parametrize(("line", "offered", "absent"), LINES)
def test_fish_completes(
    line: str, offered: set[str], absent: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fish = needed("fish")
    (tmp_path / "kvfs.fish").write_text(script("fish", capsys))
    work = tmp_path / "work"
    work.mkdir()
    (work / "a-file").touch()
    found = subprocess.run(
        [fish, "--no-config", "-c", f"source ../kvfs.fish; complete -C '{line}'"],
        cwd=work, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = {answer.partition("\t")[0] for answer in found.stdout.splitlines()}
    assert not found.stderr
    assert offered <= words and not absent & words


def test_zsh_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a terminal: completion is the line editor's. ^D lists what is possible, and changes nothing."""
    zsh = needed("zsh")
    (tmp_path / "_kvfs").write_text(script("zsh", capsys))
    work = tmp_path / "work"
    work.mkdir()
    (work / "a-file").touch()
    (tmp_path / ".zshrc").write_text(
        f"PROMPT='ready> '; unsetopt beep; fpath=({tmp_path} $fpath); autoload -U compinit; compinit -u -D\n"
        "LISTMAX=1000; bindkey -e; bindkey '^D' list-choices\n"
    )
    answers = in_a_terminal([zsh, "-d", "-i"], [line for line, _, _ in LINES], tmp_path, work)
    for (line, offered, absent), answer in zip(LINES, answers, strict=True):
        words = set(answer.split())
        assert offered <= words and not absent & words, (line, answer)
        assert "_arguments" not in answer and "error" not in answer, (line, answer)


def in_a_terminal(command: list[str], lines: list[str], home: Path, work: Path) -> list[str]:
    """A shell's output after each line was typed and ^D pressed, without the echo of the line."""
    master, slave = os.openpty()
    environment = {"HOME": str(home), "ZDOTDIR": str(home), "TERM": "dumb", "PATH": os.environ["PATH"], "LANG": "C"}
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, cwd=work, env=environment, start_new_session=True
    )
    os.close(slave)
    answers = []
    try:
        until(master, "ready> ")
        for line in lines:
            # The listing is done when the shell takes the next keys: the line is thrown away, and a word is echoed.
            os.write(master, f'{line}\x04\x15echo the"" end\r'.encode())
            text = until(master, "the end[^$]*ready> ")
            answers.append(text.partition(line)[2].partition("echo the")[0])
        return answers
    finally:
        process.kill()
        process.wait()
        os.close(master)


def until(master: int, words: str) -> str:
    text, deadline = "", time.monotonic() + DEADLINE_S
    while not re.search(words, text):
        assert select.select([master], [], [], max(0, deadline - time.monotonic()))[0], f"no {words!r} in {text!r}"
        text += os.read(master, 65536).decode()
    return text


def test_a_pool_s_name_is_taken_literally(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)
    (tmp_path / "mounts").write_text("/srv/$(touch\\040spoilt) /mnt/a\\040b fuse.kvfs rw 0 0\n")
    text = text.replace(str(MOUNTS), str(tmp_path / "mounts"))
    call = 'COMP_WORDS=(kvfs status ""); COMP_CWORD=2; _kvfs; printf "%s\\n" "${COMPREPLY[@]}"'
    found = subprocess.run(["bash", "-c", text + "\n" + call], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert {"/srv/$(touch spoilt)", "/mnt/a b"} <= set(found.stdout.splitlines())
    assert not (tmp_path / "spoilt").exists()


def options() -> list[tuple[str, argparse.Action, bool]]:
    """Each option with a value of each verb, and whether one of its group has to be given."""
    (verbs,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    found = []
    for name, sub in verbs.choices.items():
        needed = [a for group in sub._mutually_exclusive_groups if group.required for a in group._group_actions]
        found += [
            (name, a, a.required or a in needed)
            for a in sub._actions
            if a.option_strings and a.help != argparse.SUPPRESS and (a.nargs != 0 or a in needed)
        ]
    return found


def test_the_help_of_each_option_says_its_default_or_that_it_is_required() -> None:
    assert len(options()) > 50
    for verb, action, is_required in options():
        words = str(action.help)
        assert ("required" if is_required else "default") in words or "required" in words, (verb, action.option_strings)
        number = action.default
        if number and isinstance(number, (int, float)) and action.nargs != 0:
            short = f"{number >> 30}G" if isinstance(number, int) and number >= 1 << 30 else f"{number:g}"
            assert f"default {short}" in words, (verb, action.option_strings, number)


def test_defaults_of_parts_are_those_of_the_help() -> None:
    from kvfs.store.opening import StoreOptions

    texts = {action.option_strings[-1]: str(action.help) for verb, action, _ in options() if verb == "mount"}
    default = StoreOptions()
    assert f"default {default.staging_size >> 20}M" in texts["--staging"]
    assert f"default {default.read_memory_size >> 20}M" in texts["--read-memory"]
    assert f"default {default.io_timeout_ms}" in texts["--io-timeout"]


@pytest.mark.parametrize("verb", ["mount", "help"])
def test_help_is_a_verb_too(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert cli.main(["help", verb]) == 0
    said = capsys.readouterr().out
    assert f"usage: kvfs {verb} " in said
    with contextlib.suppress(SystemExit):
        cli.main([verb, "--help"])
    assert capsys.readouterr().out == said


def test_help_alone_names_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help"]) == 0
    assert "umount" in capsys.readouterr().out
    assert cli.main(["help", "moont"]) == 2


def test_every_verb_and_option_is_in_every_completion(capsys: pytest.CaptureFixture[str]) -> None:
    _, every = usage.read(parser())
    assert {"mount", "fsck", "man"} <= {verb.name for verb in every}
    for shell in usage.COMPLETIONS:
        text = script(shell, capsys)
        for verb in every:
            assert verb.name in text
            for name in (name for option in verb.options for name in option.names if name.startswith("--")):
                assert (f"-l {name[2:]} " if shell == "fish" else name) in text


def awkward() -> argparse.ArgumentParser:
    """A parser whose texts are full of what shells and roff take for their own."""
    parser = argparse.ArgumentParser(prog="kvfs", description='It\'s "a\\b" $(touch spoilt) `touch spoilt`.')
    verb = parser.add_subparsers().add_parser("mount", help=".so it's: [a] 'b' \\ \"c\" $(touch spoilt) `touch spoilt`")
    text = "'it's [1:2] 100%% \\fB $HOME `touch spoilt` $(touch spoilt) -- \\"
    verb.add_argument("--odd", metavar="A:[B]", help=text)
    verb.add_argument("place", metavar="X:'Y'", help=text)
    return parser


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_no_text_of_the_parser_is_taken_for_code(shell: str, tmp_path: Path) -> None:
    load = tmp_path / "script"
    load.write_text(usage.COMPLETIONS[shell](awkward()))
    code = {
        "bash": f"source {load}; COMP_WORDS=(kvfs mount --o); COMP_CWORD=2; _kvfs; echo ${{COMPREPLY[@]}}",
        "zsh": f"autoload -U compinit; compinit -u -D; source {load} && print -r -- $_comps[kvfs] --odd",
        "fish": f"source {load}; complete -C 'kvfs mount --o'",
    }[shell]
    options = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    found = subprocess.run(
        [needed(shell), *options, "-c", code], cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "--odd" in found.stdout and not found.stderr
    assert not (tmp_path / "spoilt").exists()


def rendered(page: Path) -> str:
    groff = ["groff", "-ww", "-man", "-Tascii", "-P-cbou", "-rLL=400n", str(page)]
    found = subprocess.run(groff, capture_output=True, text=True, check=True)
    assert not found.stderr
    return " ".join(found.stdout.split())


def test_manual_pages_of_every_verb_are_roff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needed("groff")
    assert cli.main(["man", "--directory", str(tmp_path / "man1")]) == 0
    pages = {page.stem: page for page in (tmp_path / "man1").iterdir()}
    assert set(pages) == {"kvfs", *(f"kvfs-{verb}" for verb in verbs())}
    text = rendered(pages["kvfs-evict"])
    assert "SYNOPSIS kvfs evict [-h] [-o {text,json}] [--dry-run] (--size SIZE | --all) POOL|MOUNTPOINT" in text
    assert "--size SIZE free at least this much" in text and "POOL|MOUNTPOINT the pool's directory" in text
    assert "evict free space now" in rendered(pages["kvfs"])
    assert cli.main(["man", "evict"]) == 0
    assert capsys.readouterr().out == pages["kvfs-evict"].read_text()
    assert cli.main(["man"]) == 0
    assert capsys.readouterr().out == pages["kvfs"].read_text()


def test_manual_pages_pass_mandocs_lint(tmp_path: Path) -> None:
    mandoc = needed("mandoc")
    for name, text in usage.pages(parser(), "kvfs 1").items():
        (tmp_path / f"{name}.1").write_text(text)
    lint = [mandoc, "-T", "lint", "-W", "warning", *sorted(tmp_path.iterdir())]
    found = subprocess.run(lint, capture_output=True, text=True, check=False)
    # A date would make two builds of one version differ.
    assert [line for line in found.stdout.splitlines() if "missing date" not in line] == []


def test_a_manual_page_shows_the_parsers_text_as_it_is(tmp_path: Path) -> None:
    needed("groff")
    page = tmp_path / "kvfs-mount.1"
    page.write_text(usage.pages(awkward(), "kvfs 1")["kvfs-mount"])
    text = rendered(page)
    assert "kvfs-mount - .so it's: [a] 'b' \\ \"c\" $(touch spoilt) `touch spoilt`" in text
    assert "--odd A:[B] 'it's [1:2] 100% \\fB $HOME `touch spoilt` $(touch spoilt) -- \\" in text


def test_a_synopsis_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        made.append(usage.pages(parser(), "kvfs 1"))
    assert made[0] == made[1]
