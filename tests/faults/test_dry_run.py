"""`--dry-run`: a verb says what it would do, and changes nothing. The verb itself then does just that."""

from __future__ import annotations

import hashlib
import json
import pathlib

from helpers import KIB, Pool, content, read_file, write_file

BLOCKS = 24
SIZE = 64 * KIB


def fill(pool: Pool) -> None:
    for i in range(BLOCKS):
        write_file(pool.mount / f"{i}", content(SIZE, i))


def asked(pool: Pool, *words: str, check: bool = True) -> dict[str, object]:
    return json.loads(pool.command(*words, "-o", "json", check=check).stdout)


def state(directory: pathlib.Path) -> dict[str, str]:
    """All files but LMDB's table of readers."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*")) if path.is_file() and path.name != "lock.mdb"
    }  # fmt: skip


def test_format_checks_and_writes_nothing(own_pool, tmp_path: pathlib.Path) -> None:
    pool = own_pool(files=1, size="64M", started=False)
    words = ("--files", "3", "--size", "64M")
    told = asked(pool, "format", str(tmp_path / "new"), *words, "--dry-run")
    assert told["dry_run"] is True and not (tmp_path / "new").exists()
    made = asked(pool, "format", str(tmp_path / "new"), *words)
    same = ("segment_count", "segment_size", "stripe_width", "stripe_unit")
    assert {key: told[key] for key in same} == {key: made[key] for key in same}
    # A pool that is there is refused, and left, also with --force.
    before = state(pool.path)
    refused = pool.command("format", str(pool.path), *words, "--dry-run", check=False)
    assert refused.returncode == 1 and "holds a kvfs pool" in refused.stderr
    assert "nothing was written" in pool.command("format", str(pool.path), *words, "--dry-run", "--force").stdout
    device = tmp_path / "device"
    with device.open("wb") as file:
        file.truncate(64 << 20)
    pool.command("format", str(tmp_path / "other"), "--device", str(device), "--dry-run")
    assert not device.read_bytes().strip(b"\0") and not (tmp_path / "other").exists()
    assert state(pool.path) == before


def test_fsck_says_what_repair_would_act_on(own_pool) -> None:
    pool = own_pool(files=1, size="64M", started=False)
    device = pool.path / "devices" / "0"
    with device.open("r+b") as file:
        file.write(b"\xff" * 4096)  # the first label
    before = state(pool.path)
    result = pool.command("fsck", str(pool.path), "--repair", "--dry-run", check=False)
    assert result.returncode == 1 and "would act on: label" in result.stdout and "--repair acts" in result.stdout
    assert state(pool.path) == before
    assert "repaired: label" in pool.command("fsck", str(pool.path), "--repair").stdout
    wrong = pool.command("fsck", str(pool.path), "--dry-run", check=False)
    assert wrong.returncode == 2 and "only with --repair" in wrong.stderr


def test_evict_says_what_may_go(own_pool) -> None:
    pool = own_pool(files=1, size="64M")
    fill(pool)
    pool.command("pin", str(pool.mount / "0"))
    told = asked(pool, "evict", str(pool.mount), "--all", "--dry-run")
    assert told["evictable_blocks"] == BLOCKS - 1
    assert told["kept"]["pinned"]["names"] == ["/0"]  # type: ignore[index]
    text = pool.command("evict", str(pool.mount), "--size", "1M", "--dry-run").stdout
    assert f"{BLOCKS - 1} blocks of " in text and "nothing was evicted" in text
    less = pool.command("evict", str(pool.mount), "--size", "1G", "--dry-run", check=False)
    assert less.returncode == 1 and less.stderr.endswith("may go\n")
    for i in range(BLOCKS):
        assert read_file(pool.mount / f"{i}") == content(SIZE, i)
    assert asked(pool, "evict", str(pool.mount), "--all")["evicted_blocks"] == told["evictable_blocks"]


def test_device_remove_says_what_would_go_with_it(own_pool) -> None:
    pool = own_pool(files=4, size="64M", format_args=("--stripe-width", "2", "--stripe-unit", "64K"))
    fill(pool)
    told = asked(pool, "device", "remove", str(pool.path), "1", "--dry-run")
    assert told["blocks"] > 0 and "lost_blocks" not in told  # type: ignore[operator]
    text = pool.command("device", "remove", str(pool.path), "1", "--drain", "--dry-run").stdout
    assert (
        f"can be removed, with {told['blocks']} blocks; those that are pinned, open or were read are carried over"
        in text
    )
    pool.umount()
    before = state(pool.path)
    refused = pool.command("device", "remove", str(pool.path), "1", "--dry-run", check=False)
    assert (refused.returncode, refused.stderr) == (
        1, f"kvfs: {pool.path}: not mounted: kvfs mount {pool.path} MOUNTPOINT\n"
    )  # fmt: skip
    assert state(pool.path) == before
    pool.start()
    for i in range(BLOCKS):
        assert read_file(pool.mount / f"{i}") == content(SIZE, i)
    assert asked(pool, "device", "list", str(pool.path))["devices"][1]["state"] == "online"  # type: ignore[index]
    assert asked(pool, "device", "remove", str(pool.path), "1")["lost_blocks"] == told["blocks"]
    again = pool.command("device", "remove", str(pool.path), "1", "--dry-run", check=False)
    assert again.returncode == 1 and "removed already" in again.stderr
