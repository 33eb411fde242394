"""Options of a mount from a file: which file, whose words win, and what a wrong file is answered."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from kvfs import cli
from kvfs.cli import mounting, settings
from kvfs.cli.command import parser


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(settings, "DIRECTORY", tmp_path / "etc")
    (tmp_path / "etc").mkdir()
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def put(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o644)
    return path


def shown(
    capsys: pytest.CaptureFixture[str], pool: Path, *words: str, verb: str = "mount"
) -> tuple[int, dict[str, object], str]:
    """Status, the document of --show-config, and stderr."""
    place = [str(pool), "/mnt/kv"] if verb == "mount" else [str(pool)]
    status = cli.main([verb, *place, *words, "--show-config", "-o", "json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out), captured.err


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(
    pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = put(
        pool / "mount.toml",
        'staging = "64M"\nread-memory = "32M"\nallow-other = true\nmetrics = 9464\nio-timeout = 500\n'
        'virtiofs = ["/run/a.sock", "/run/b.sock"]\ntimeout = 2.5\nlog-format = "json"\n',
    )
    status, document, _ = shown(capsys, pool, "--staging", "48M", "--slow-ops", "0")
    assert status == 0 and document["file"] == str(file)
    found = document["settings"]
    assert isinstance(found, dict)
    here, line = str(file), "command line"
    for name, value, origin in (
        ("staging", 48 << 20, line), ("slow-ops", 0, line), ("read-memory", 32 << 20, here),
        ("allow-other", True, here),
        ("metrics", "9464", here), ("io-timeout", 500, here), ("virtiofs", ["/run/a.sock", "/run/b.sock"], here),
        ("timeout", 2.5, here), ("log-format", "json", here), ("threads", None, "default"), ("options", "", "default"),
        ("read-ahead", 2 << 20, "default"),
    ):  # fmt: skip
        assert found[name] == {"value": value, "from": origin}, name
    _, document, _ = shown(capsys, pool, "--virtiofs", "/run/c.sock")
    assert document["settings"]["virtiofs"] == {"value": ["/run/c.sock"], "from": line}  # type: ignore[index]
    assert cli.main(["mount", str(pool), "/mnt/kv", "--show-config"]) == 0
    text = capsys.readouterr().out
    assert f"file: {file}\n" in text and f"true  ({file})" in text and "threads" in text


@pytest.mark.parametrize(("asked", "size"), [("kernel", 0), ("0", 0), ("4K", 4096), ("1M", 1 << 20), ("1G", 1 << 30)])
def test_read_ahead_is_a_size_or_the_kernel_s_own(
    pool: Path, capsys: pytest.CaptureFixture[str], asked: str, size: int
) -> None:
    file = put(pool / "mount.toml", f'read-ahead = "{asked}"\n')
    _, document, _ = shown(capsys, pool)
    assert document["settings"]["read-ahead"] == {"value": size, "from": str(file)}  # type: ignore[index]
    _, document, _ = shown(capsys, pool, "--read-ahead", asked)
    assert document["settings"]["read-ahead"] == {"value": size, "from": "command line"}  # type: ignore[index]


def test_the_file_asked_for_comes_before_the_pool_s_and_that_before_etc(
    pool: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert shown(capsys, pool)[1]["file"] is None
    for path in (tmp_path / "etc" / "cache.toml", pool / "mount.toml"):
        put(path, "threads = 3\n")
        assert shown(capsys, pool)[1]["file"] == str(path)
    asked = put(tmp_path / "other.toml", "threads = 5\n")
    (tmp_path / "link").symlink_to(asked)  # as a ConfigMap's files are
    _, document, _ = shown(capsys, pool, "--config", str(tmp_path / "link"))
    assert document["file"] == str(tmp_path / "link") and document["settings"]["threads"]["value"] == 5  # type: ignore[index]


def test_a_file_is_for_both_verbs(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(pool / "mount.toml", 'allow-other = true\nnative-in = ["/"]\nread-ahead = "1M"\nvirtiofs = ["/run/a.sock"]\n')
    status, document, _ = shown(capsys, pool, verb="export")
    found = document["settings"]
    assert status == 0 and isinstance(found, dict) and "allow-other" not in found
    assert found["virtiofs"]["value"] == ["/run/a.sock"]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('a = 1\nstagin = "1G"\n', 1, "a = 1: 'a' is no option"),
        ('threads = 2\n# more\nstagin = "1G"\n', 3, "stagin = '1G': 'stagin' is no option"),
        ("staging = 'much'\n", 1, "staging = 'much': SIZE: 'much' is not a size"),
        ("\nallow-other = 1\n", 2, "allow-other = 1: true or false is expected"),
        ("allow-other = 'yes'\n", 1, "true or false is expected"),
        ("virtiofs = '/run/a.sock'\n", 1, "a list of texts is expected"),
        ("virtiofs = [1]\n", 1, "a list of texts is expected"),
        ("threads = true\n", 1, "threads = True: a text or a number is expected"),
        ("threads = 0\n", 1, "threads = 0: '0': not a positive number"),
        ("threads = 1.5\n", 1, "not a positive number"),
        ("threads = [2]\n", 1, "a text or a number is expected"),
        ("[threads]\nn = 2\n", 1, "a text or a number is expected"),
        ("read-ahead = '2.0001M'\n", 1, "'2.0001M': 4K to 1G, in whole pages of 4K, or kernel, is expected"),
        ("read-ahead = 512\n", 1, "'512': 4K to 1G, in whole pages of 4K, or kernel, is expected"),
        ("read-ahead = '2G'\n", 1, "'2G': 4K to 1G, in whole pages of 4K, or kernel, is expected"),
        ("read-ahead = 'far'\n", 1, "SIZE: 'far' is not a size"),
        ("log-format = 'xml'\n", 1, "one of text, json is expected"),
        ("force = true\n", 1, "'force' is of one run of the command"),
        ("foreground = true\n", 1, "'foreground' is of one run of the command"),
        ("timeout = nan\n", 1, "not a number of seconds"),
        ("mount = 2001-01-01\n", 1, "is no option"),
        ("\nmetrics = 'a:b'\n", 2, "metrics = 'a:b': metrics: 'a:b' is no HOST:PORT"),
        ("metrics = 70000\n", 1, "'70000' is no HOST:PORT"),
        ("virtiofs = ['/run/a.sock', '/run/b.sock,queues=0']\n", 1, "queues=0: 1 to 64 request queues"),
        ("native-in = ['/a', '/a/../b']\n", 1, "--native-in '/a/../b': a directory from the pool's root on"),
        ("options = 'ro,nonsense'\n", 1, "mount option nonsense: not known; known are "),
        ("hold = ''\n", 1, "hold = '': --hold '': the socket of kvfs hold, or systemd, is expected"),
    ],
)
def test_a_wrong_file_is_named_with_line_key_and_value(
    pool: Path, capsys: pytest.CaptureFixture[str], text: str, line: int, words: str
) -> None:
    file = put(pool / "mount.toml", text)
    status, document, errors = shown(capsys, pool)
    assert status == 2 and errors.startswith(f"kvfs: {file}:{line}: ") and words in errors and errors.count("\n") == 1
    assert document["errno"]


def test_what_cannot_be_trusted_or_read_is_refused(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = pool / "mount.toml"

    def refused(words: str) -> None:
        status, _, errors = shown(capsys, pool)
        assert status == 2 and str(file) in errors and words in errors, errors

    put(file, "threads = 2\n").chmod(0o664)
    refused("mode 0664: others can write it")
    put(file, "threads = = 2\n")
    refused("no TOML: ")
    put(file, "threads = 2\nthreads = 3\n")
    refused("no TOML: ")
    file.write_bytes(b"# \xff\n")
    refused("byte 2 is not UTF-8")
    file.write_text("#" * (settings.SIZE_MAX + 1))
    refused("larger than 65536 bytes")
    file.unlink()
    os.mkfifo(file)
    refused("not a regular file")
    file.unlink()
    file.symlink_to("/etc/hostname")  # in a pool links are not followed
    refused("cannot be read")
    file.unlink()
    if os.geteuid() == 0:
        put(file, "threads = 2\n")
        os.chown(file, 65534, 65534)
        refused("belongs to user 65534")
    status, _, errors = shown(capsys, pool, "--config", "/nonexistent/kvfs.toml")
    assert status == 2 and "/nonexistent/kvfs.toml: the options cannot be read: No such file" in errors


def test_every_option_of_a_mount_is_in_a_file_or_about_one_run() -> None:
    mount, export = (_options(verb) for verb in ("mount", "export"))
    assert not settings._NEVER & set(mount) and {"staging", "metrics", "log-format", "native-in"} <= set(mount)
    assert set(mount) - set(export) == set(mounting.MOUNT_ALONE)


def _options(verb: str) -> dict[str, argparse.Action]:
    args = parser().parse_args([verb, "p", *(["m"] if verb == "mount" else [])])
    found: settings.Settings = args.settings
    return found.actions
