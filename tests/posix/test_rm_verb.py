"""`kvfs rm` on a mounted pool: what goes, what it says, and what programs on the mount see of it."""

import contextlib
import io
import json
import os
import pathlib
from collections.abc import Iterator

import pytest
from helpers import Pool, content, opened, write_file

import kvfs
from kvfs import cli
from kvfs.client.events import Reason, Removed

SIZE = 100_000


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(files=2, size="128M") as made:
        yield made


def run(*arguments: object) -> tuple[int, str, str]:
    """Status, stdout and stderr of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(list(map(str, arguments)))
    return status, out.getvalue(), err.getvalue()


def rm(*arguments: object) -> tuple[int, str, str]:
    return run("rm", *arguments)


def filled(pool: Pool, *files: str) -> None:
    for file in files:
        (pool.mount / file).parent.mkdir(parents=True, exist_ok=True)
        write_file(pool.mount / file, content(SIZE, file))


@pytest.mark.smoke
def test_a_namespace_goes_and_the_mount_has_it_no_more_at_once(pool: Pool) -> None:
    filled(pool, "m/r1/00/a", "m/r1/00/b", "m/r1/ff/c", "m/r2/00/a")
    for path in ("m/r1/00/a", "m/r1/ff", "m/r1"):
        os.stat(pool.mount / path)  # the kernel has the name
    assert rm(pool.mount, "m/r1", "--dry-run") == (
        0, "/m/r1: 3 blocks of 293K would go; nothing was removed\n", "",
    )  # fmt: skip
    assert rm(pool.mount, "m/r1") == (0, "/m/r1: removed 3 files of 293K and 3 directories\n", "")
    assert not os.path.lexists(pool.mount / "m/r1/00/a") and not os.path.lexists(pool.mount / "m/r1")
    assert os.listdir(pool.mount / "m") == ["r2"]
    assert (pool.mount / "m/r2/00/a").read_bytes() == content(SIZE, "m/r2/00/a")
    filled(pool, "m/r1/00/a")
    assert rm(pool.mount / "m" / "r1")[:2] == (0, "/m/r1: removed 1 file of 97.66K and 2 directories\n")


def test_what_is_not_there_is_a_failure_unless_it_may_be(pool: Pool) -> None:
    filled(pool, "n/a")
    status, out, error = rm(pool.path, "none", "n")
    assert (status, out) == (1, "/n: removed 1 file of 97.66K and 1 directory\n")
    assert "/none: no such file or directory in this pool" in error and not os.path.lexists(pool.mount / "n")
    assert rm(pool.path, "none", "--force") == (0, "", "")
    assert rm(pool.mount / "none", "--dry-run")[0] == 1
    status, out, _ = rm(pool.path, "none", "-o", "json")
    assert status == 1 and json.loads(out)["places"] == [] and "none" in json.loads(out)["error"]


def test_a_whole_pool_goes_only_when_that_is_said(pool: Pool) -> None:
    filled(pool, "whole/a", "whole/b", "loose")
    for target in (pool.mount, pool.path):
        status, _, error = rm(target)
        assert status == 2 and "is a whole pool: name a namespace in it, or say --all" in error
    for words in (("..",), ("a/../..",), ("/",), ("",), ("whole", "--all")):
        assert rm(pool.mount, *words)[0] == 2
    assert sorted(os.listdir(pool.mount)) == sorted({*os.listdir(pool.mount), "whole", "loose"})
    status, out, _ = rm(pool.mount, "--all", "-o", "json")
    (place,) = json.loads(out)["places"]
    assert status == 0 and place["path"] == "/" and place["files"] >= 3 and os.listdir(pool.mount) == []


def test_open_blocks_are_read_on_and_a_link_goes_itself(pool: Pool) -> None:
    filled(pool, "o/a", "o/b", "away/c")
    os.symlink("../away", pool.mount / "o" / "link")
    with opened(pool.mount / "o" / "a", os.O_RDONLY) as descriptor:
        status, out, _ = rm(pool.mount / "o")
        assert status == 0 and out == (
            "/o: removed 3 files of 195K and 1 directory\n"
            "  note: 1 of them is open; its space is free after the last close\n"
        )
        assert os.pread(descriptor, SIZE, 0) == content(SIZE, "o/a")
    assert (pool.mount / "away" / "c").exists()
    os.symlink("away", pool.mount / "link")
    assert rm(pool.mount / "link")[0] == 0
    assert not os.path.lexists(pool.mount / "link") and (pool.mount / "away" / "c").exists()


def test_clients_are_told_of_each_removal_and_find_none_of_it(pool: Pool, tmp_path: pathlib.Path) -> None:
    keys = [b"%04d" % i for i in range(200)]
    with kvfs.connect(pool.mount, namespace="told") as client, kvfs.events(pool.mount, "told") as events:
        client.put([(key, b"x" * 100) for key in keys])
        lease = client.lease(keys[:50], 60)
        assert rm(pool.mount, "told")[0] == 0
        assert client.exists(keys) == [False] * len(keys)
        removed = set()
        while len(removed) < len(keys):
            event = events.next_event(10.0)
            assert event is not None, f"{len(removed)} of {len(keys)} removals were told"
            if isinstance(event, Removed):
                assert event.reason == Reason.DELETED
                removed.add(event.key)
        assert removed == set(keys)
        lease.release()
        client.put([(keys[0], b"again")])
        assert bytes(client.get(keys[0]) or b"") == b"again"


def test_list_shows_each_namespace_however_deep_and_which_is_not_used_any_more(pool: Pool) -> None:
    rm(pool.mount, "--all")
    for space, count in (("models/@r1/a", 3), ("models/@r2/a", 2), ("models/@r2/b", 1)):
        with kvfs.connect(pool.mount, namespace=space) as client:
            client.put([(b"%d" % i, b"x" * 1000) for i in range(count)])
            client.put([(b"k" * 200, b"long key")])
    filled(pool, "models/@r2/b/files/one")
    with kvfs.connect(pool.mount, namespace="models/@r2/a") as client:
        for _ in range(40):  # a tick is a part in 1,024 of the pool
            client.put([(b"large", os.urandom(1 << 20))])
        assert client.get(b"0") is not None
    status, out, error = run("list", pool.mount, "--namespaces", "--fresh", "-o", "json")
    assert (status, error) == (0, "")
    found = {row["path"]: row for row in json.loads(out)["namespaces"]}
    assert {path: row["blocks"] for path, row in found.items()} == {
        "/models/@r1/a": 4, "/models/@r2/a": 4, "/models/@r2/b": 2, "/models/@r2/b/files": 1,
    }  # fmt: skip
    assert found["/models/@r2/a"]["unused_bytes"] < 1 << 20 < 30 << 20 < found["/models/@r1/a"]["unused_bytes"]
    status, out, _ = run("list", pool.mount, "--namespaces")
    assert status == 0 and out.splitlines()[0].split()[:5] == ["namespace", "blocks", "bytes", "hits", "unused"]
    assert run("list", pool.mount, "--namespaces", "--depth", "2")[0] == 2
