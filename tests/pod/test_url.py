"""URLs of engines and password files: all that is wrong is said, and no password is shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvfs.errors import PoolError, UsageError
from kvfs.pod.url import EngineUrl, parse_url, parse_urls, read_password


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("redis://h", EngineUrl("standalone", (("h", 6379),))),
        ("valkey://news@h:1/3", EngineUrl("standalone", (("h", 1),), user="news", database=3)),
        ("redis://[fd00::1]:7000", EngineUrl("standalone", (("fd00::1", 7000),))),
        ("unix://news@/run/redis.sock?database=2", EngineUrl("standalone", (), Path("/run/redis.sock"), "news", 2)),
        (
            "redis+sentinel://a,b:1/mymaster/4",
            EngineUrl("sentinel", (("a", 26379), ("b", 1)), database=4, master="mymaster"),
        ),
        ("redis+cluster://a:1,b:2", EngineUrl("cluster", (("a", 1), ("b", 2)))),
        (
            "rediss://h?ca=/ca.pem&password_file=/run/pw",
            EngineUrl("standalone", (("h", 6379),), tls=True, ca=Path("/ca.pem"), password_file=Path("/run/pw")),
        ),
        (
            "rediss+sentinel://a/m?sentinel_login=1",
            EngineUrl("sentinel", (("a", 26379),), master="m", tls=True, sentinel_login=True),
        ),
    ],
)
def test_a_url_of_each_kind_is_read(text: str, wanted: EngineUrl) -> None:
    assert parse_url(text) == wanted
    assert parse_url(str(wanted)).hosts == wanted.hosts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://h", "not one of redis://"),
        ("h:6379", "not one of redis://"),
        ("redis://", "'' is no HOST"),
        ("redis://h:0", "no port 0"),
        ("redis://h:70000", "no port 70000"),
        ("redis://a,b", "several hosts"),
        ("redis://h/x", "'x' is no number of a database"),
        ("redis://@h", "no user before the @"),
        ("redis+sentinel://a", "no name of a master"),
        ("redis+cluster://a/1", "database 0 alone"),
        ("redis://h?ca=/ca.pem", "write rediss://"),
        ("rediss://h?ca=ca.pem", "no absolute path"),
        ("redis://h?timeout=1", "no option timeout"),
        ("redis://h?database=1&database=2", "stands there twice"),
        ("redis://h/1?database=2", "two databases"),
        ("rediss+sentinel://a/m?sentinel_login=yes", "neither 0 nor 1"),
        ("unix://relative", "no absolute path of a socket"),
    ],
)
def test_a_url_that_is_none_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_url(text)


@pytest.mark.parametrize(
    "text",
    [
        "redis://:hunter2@h",
        "redis://news:hunter2@h:1/2",
        "redis://news:hunter2@@h",
        "redis://news:a@hunter2@h",
        "redis://h?password=hunter2",
        "redis+sentinel://news:hunter2@a,b/m",
        "unix://news:hunter2@/run/s",
        "http://news:hunter2@h",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_url(text)
    assert "hunter2" not in str(caught.value)
    assert text.startswith("http") or "a password has no place in a URL" in str(caught.value)


def test_an_engine_is_named_once() -> None:
    assert len(parse_urls(["redis://a", "redis://b"])) == 2
    with pytest.raises(UsageError, match="redis://a:6379: named 2 times"):
        parse_urls(["redis://a", "valkey://a:6379"])


# ---- password files ----


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.touch(mode=0o600)
    path.write_text("käse and spaces \nsecond line")
    return path


def test_a_password_is_the_first_line(file: Path) -> None:
    assert read_password(file) == "käse and spaces "


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o620])
def test_a_file_that_others_may_touch_is_refused_with_its_mode(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(PoolError, match=f"mode {mode:04o}"):
        read_password(file)


def test_links_directories_and_empty_files_are_refused(file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(PoolError, match="link"):
        read_password(tmp_path / "link")
    with pytest.raises(PoolError, match="not a plain file"):
        read_password(tmp_path)
    with pytest.raises(PoolError, match="No such file"):
        read_password(tmp_path / "none")
    for content in (b"", b"\nsecond", b"\xff\xfe", b"x" * 5000):
        file.write_bytes(content)
        with pytest.raises(PoolError, match=str(file)):
            read_password(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, 12345, 12345)
    with pytest.raises(PoolError, match="belongs to user 12345"):
        read_password(file)
