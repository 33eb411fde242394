"""The kernel's read-ahead of a mount: set at the mount, told by status, and what it makes of reads."""

import json
import mmap
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from helpers import MIB, Pool, assert_same, content, in_child, mount_device, run, wait_until, write_file

from kvfs.daemon.host import fuse_pages

SIZE = 2 * MIB
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root sets the kernel's read-ahead")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(files=2, size="256M") as made:
        yield made


def setting(pool: Pool) -> pathlib.Path:
    return pathlib.Path(f"/sys/class/bdi/0:{mount_device(pool.mount)}/read_ahead_kb")


def in_force(pool: Pool) -> int:
    """Of the kernel, in KiB."""
    return int(setting(pool).read_text())


def stored(pool: Pool, name: str) -> pathlib.Path:
    """A block that no page cache has: new files bypass it."""
    path = pool.mount / name
    write_file(path.with_suffix(".tmp"), content(SIZE, name))
    os.rename(path.with_suffix(".tmp"), path)
    # The kernel tells of a close behind close()'s back; a file with a writer keeps no pages.
    wait_until(lambda: pool.status()["counters"]["open_handles"] == 0, "the release of what was written")
    return path


def reads_of(pool: Pool, work: Callable[[], None]) -> tuple[int, int]:
    """READs and their bytes that the work makes."""
    before = pool.status()["counters"]
    work()
    after = pool.status()["counters"]
    return after["reads"] - before["reads"], after["read_bytes"] - before["read_bytes"]


def test_a_mount_reads_2_mib_ahead_and_status_says_so(pool: Pool) -> None:
    assert in_force(pool) == 2048
    assert pool.status()["read_ahead"] == {"size": 2 * MIB, "asked": 2 * MIB, "why": None}
    assert "\n ahead: the kernel reads 2.00M ahead\n" in pool.command("status", str(pool.path)).stdout


def test_a_block_of_2_mib_is_one_read_by_read_and_by_a_mapping(pool: Pool) -> None:
    largest = fuse_pages() * 4096
    expected = -(-SIZE // min(largest, 4 * MIB))
    path = stored(pool, "read")

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            assert_same(file.read(SIZE), content(SIZE, "read"), "read")

    assert reads_of(pool, read) == (expected, SIZE)
    path = stored(pool, "mapped")

    def mapped() -> None:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ) as memory:
            assert_same(memory[:], content(SIZE, "mapped"), "mapped")

    assert reads_of(pool, lambda: in_child(mapped)) == (expected, SIZE)


def test_a_read_at_random_takes_its_bytes_alone_and_so_does_a_mapping_that_says_so(pool: Pool) -> None:
    path = stored(pool, "random")

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            assert os.pread(file.fileno(), 4096, MIB) == content(SIZE, "random")[MIB : MIB + 4096]

    assert reads_of(pool, read) == (1, 4096)

    def fault() -> None:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ) as memory:
            memory.madvise(mmap.MADV_RANDOM)
            assert memory[MIB // 2] == content(SIZE, "random")[MIB // 2]

    assert reads_of(pool, lambda: in_child(fault)) == (1, 4096)


@pytest.mark.parametrize(("asked", "kib", "reads"), [("kernel", 128, 16), ("0", 128, 16), ("512K", 512, 4)])
def test_the_option_says_how_far(asked: str, kib: int, reads: int) -> None:
    with Pool(files=1, size="128M", mount_args=("--allow-other", "--read-ahead", asked)) as pool:
        assert in_force(pool) == kib
        own = kib == 128
        assert pool.status()["read_ahead"] == {"size": kib << 10, "asked": None if own else kib << 10, "why": None}
        path = stored(pool, "a")
        assert reads_of(pool, lambda: assert_same(path.read_bytes(), content(SIZE, "a"), "a")) == (reads, SIZE)


def test_who_changes_it_under_a_mount_is_told_of() -> None:
    with Pool(files=1, size="64M") as pool:
        setting(pool).write_text("64\n")
        told = pool.status()["read_ahead"]
        assert told == {"size": 64 << 10, "asked": 2 * MIB, "why": f"another has set {setting(pool)}"}
        run("mount", "-i", "-o", "remount,noatime", pool.mount)
        assert in_force(pool) == 64, "a remount leaves it"


def test_where_sys_is_read_only_the_mount_goes_on_and_status_says_why() -> None:
    """As in a container."""
    with Pool(files=1, size="64M", started=False) as pool:
        kvfs = f"{shlex.quote(sys.executable)} -m kvfs"
        script = (
            "mount -o remount,bind,ro /sys\n"
            f"{kvfs} mount {pool.path} {pool.mount} >&2\n"
            f"{kvfs} status {pool.path} -o json && {kvfs} status {pool.path} >&2\n"
            f"echo data >{pool.mount}/a && grep -q data {pool.mount}/a\n"
            f"{kvfs} umount {pool.mount} >&2\n"
        )
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-e", "-c", script],
            capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **pool.environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)["read_ahead"]
        assert (found["size"], found["asked"]) == (128 << 10, 2 * MIB)
        assert found["why"].startswith("/sys/class/bdi/") and found["why"].endswith(": Read-only file system")
        assert f"ahead: the kernel reads 128K ahead, not 2.00M: {found['why']}" in done.stderr
        assert f"read-ahead stays as it is: {found['why']}" in (pool.path / "kvfs.log").read_text()


def test_a_mount_that_is_taken_over_gets_what_the_next_command_line_says(tmp_path: pathlib.Path) -> None:
    with Pool(files=1, size="64M", started=False) as pool:
        socket = str(pool.base / "hold.sock")
        holder = subprocess.Popen([sys.executable, "-m", "kvfs", "hold", socket], stdout=subprocess.DEVNULL)
        try:
            wait_until(lambda: os.path.exists(socket), "the holder's socket")
            pool.start("--hold", socket)
            assert in_force(pool) == 2048
            pid = int((pool.path / "kvfs.pid").read_text())
            os.kill(pid, 15)
            wait_until(lambda: not (pool.path / "kvfs.pid").exists(), "the daemon's end")
            pool.start("--hold", socket, "--read-ahead", "1M")
            assert in_force(pool) == 1024
            pool.command("umount", str(pool.mount))
        finally:
            holder.terminate()
            holder.wait(20)
