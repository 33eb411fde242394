"""Options in fstab: the table of docs/operations.md holds, for every option of `kvfs mount` and those of mount(8)."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from helpers import REPOSITORY

from kvfs.cli.command import parser
from kvfs.cli.settings import Settings
from kvfs.frontend import mount

HELPER = REPOSITORY / "tools/mount.kvfs"
START = ["/bin/true", "mount", "/srv/pool", "/mnt/kv"]


def helped(options: str) -> list[str]:
    """The command that mount.kvfs would run."""
    command = [str(HELPER), "/srv/pool", "/mnt/kv", "-n", "-f", "-o", options]
    environment = {**os.environ, "KVFS": "/bin/true"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()


def table() -> list[tuple[list[str], str]]:
    """Rows of the page's table: words for fstab, and their meaning."""
    text = (REPOSITORY / "docs/operations.md").read_text()
    body = text.partition("| in fstab | meaning |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in body.splitlines()]
    return [(re.findall(r"`([^`]+)`", words), meaning) for words, meaning in rows]


def test_every_option_of_a_mount_has_its_form_and_does_what_the_table_says() -> None:
    settings: Settings = parser().parse_args(["mount", "p", "m"]).settings
    told: set[str] = set()
    for words, meaning in table()[:-2]:
        options = re.findall(r"`--([^`]+)`", meaning)
        assert len(options) == len(words)
        for word, option in zip(words, options, strict=True):
            value = word.partition("=")[2].replace(":", ",")
            assert helped(word) == [*START, f"--{option}", *([value] if value else [])]
            told.add(option)
    assert told == set(settings.actions) - {"options"} | {"config"}


def test_options_of_mount_8_are_taken_or_ignored() -> None:
    (taken, _), (ignored, _) = table()[-2:]
    command = helped(",".join(taken))
    assert command[:-1] == [*START, "--options"] and sorted(command[-1].split(",")) == sorted(taken)
    assert helped(",".join([*ignored, "comment=a", "X-other"])) == START
    known = mount._FLAG_OPTIONS.keys() | mount._OTHER_OPTIONS
    assert set(taken) <= known and set(mount._FLAG_OPTIONS) <= set(taken)
    with pytest.raises(mount.UsageError, match=r"option nonsense: not known; known are .*nodiratime"):
        mount.mount("/srv/pool", "/mnt/kv", max_read=4096, options=("ro", "nonsense"))


def test_a_word_with_a_star_is_no_pattern(tmp_path: Path) -> None:
    assert helped("metrics=/*,staging=1G")[-4:] == ["--metrics", "/*", "--staging", "1G"]


def test_a_remount_changes_what_is_the_kernel_s_and_refuses_the_rest() -> None:
    start, end = ["mount", "-i", "-o"], ["/srv/pool", "/mnt/kv"]
    repeated = "nosuid,user_id=0,group_id=0,default_permissions,max_read=4096"
    assert helped(f"rw,{repeated},remount,ro") == [*start, "remount,nosuid,ro", *end]
    assert helped(f"ro,{repeated},remount,rw") == [*start, "remount,nosuid,rw", *end]
    assert helped("remount,rw,noexec") == [*start, "remount,noexec,rw", *end]
    command = [str(HELPER), "/srv/pool", "/mnt/kv", "-f", "-o", "remount,staging=3G"]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr == (
        "mount.kvfs: /mnt/kv: a remount cannot change staging=3G: unmount, and mount it anew\n"
    )  # fmt: skip
