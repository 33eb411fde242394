"""Verbs of the command line on a mounted pool: what they find, what they say, and whom they refuse."""

import contextlib
import ctypes
import errno
import io
import json
import mmap
import os
import pathlib
import pwd
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import REPOSITORY, Pool, content, in_child, opened, requires_root, run, wait_until, write_file

from kvfs import cli
from kvfs.cli import mounting
from kvfs.pool import signatures

SIZE = 100_000
# fusermount3 wants a user who has a name.
NOBODY = pwd.getpwnam("nobody")
CLONE_NEWNS = 0x20000


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(files=2, size="128M") as made:
        yield made


def kvfs(*arguments: object) -> tuple[int, str, str]:
    """Status, stdout and stderr of a command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as ending:
            status = int(ending.code or 0)
    return status, out.getvalue(), err.getvalue()


def filled(pool: Pool, name: str, *files: str) -> pathlib.Path:
    """A directory with these files in it."""
    directory = pool.mount / name
    for file in files:
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        write_file(directory / file, content(SIZE, file))
    return directory


# ---- list ----


def test_list_has_blocks_bytes_hits_and_ages_of_each_namespace(pool: Pool) -> None:
    filled(pool, "llama", "00/a", "00/b", "ff/c")
    filled(pool, "qwen", "deep/er/d")
    os.symlink("a", pool.mount / "llama" / "00" / "link")
    write_file(pool.mount / "loose", content(SIZE))
    for _ in range(3):
        # Past the kernel's cache: pages from there are read unseen, which is no hit.
        with opened(pool.mount / "llama" / "00" / "a", os.O_RDONLY | os.O_DIRECT) as descriptor:
            os.preadv(descriptor, [mmap.mmap(-1, 4096)], 0)
    status, out, error = kvfs("list", pool.mount, "-o", "json")
    assert (status, error) == (0, "")
    found = {row["path"]: row for row in json.loads(out)["namespaces"]}
    assert {path: (row["blocks"], row["bytes"]) for path, row in found.items()} == {
        "/": (1, SIZE), "/llama": (3, 3 * SIZE), "/qwen": (1, SIZE),
    }  # fmt: skip
    assert found["/llama"]["hits"] == 3 and found["/qwen"]["hits"] == 0
    assert 0 <= found["/llama"]["newest_s"] <= found["/llama"]["oldest_s"] < 300
    status, out, _ = kvfs("list", pool.path, "--depth", "2", "-o", "json")
    assert {"/llama/00", "/llama/ff", "/qwen/deep"} < {row["path"] for row in json.loads(out)["namespaces"]}
    status, out, _ = kvfs("list", pool.mount, "--depth", "0")
    assert status == 0 and out.splitlines()[1].split()[:2] == ["/", "5"]


def test_list_of_a_directory_counts_what_is_below_it_alone(pool: Pool) -> None:
    directory = filled(pool, "below", "00/a", "00/b", "ff/c", "d")
    filled(pool, "below-2", "e")
    kvfs("pin", directory / "ff" / "c", pool.mount / "below-2" / "e")
    status, out, error = kvfs("list", directory, "--fresh", "-o", "json")
    assert (status, error) == (0, "")
    found = json.loads(out)
    rows = {row["path"]: row["blocks"] for row in found["namespaces"]}
    assert rows == {"/below": 1, "/below/00": 2, "/below/ff": 1} and found["age_s"] == 0
    assert [pin["path"] for pin in found["pins"]] == ["/below/ff/c"]
    assert (found["total"]["blocks"], found["total"]["bytes"]) == (4, 4 * SIZE)
    # One sum, as du has it; and of a file.
    status, out, _ = kvfs("list", directory, "--depth", "0", "--fresh")
    assert status == 0 and [line.split()[:2] for line in out.splitlines()[1:2]] == [["/below", "4"]]
    status, out, _ = kvfs("list", directory / "00" / "a", "-o", "json")
    assert [(row["path"], row["kind"], row["blocks"]) for row in json.loads(out)["namespaces"]] == [
        ("/below/00/a", "file", 1)
    ]
    kvfs("unpin", directory / "ff" / "c", pool.mount / "below-2" / "e")
    status, _, error = kvfs("list", directory / "gone")
    assert status == 1 and "/below/gone: no such file or directory" in error


def test_list_says_how_old_its_counts_are_and_counts_anew_when_asked(pool: Pool) -> None:
    directory = filled(pool, "aged", "a")
    kvfs("list", directory, "--fresh")
    write_file(directory / "b", content(SIZE))

    def old() -> str:
        _, out, _ = kvfs("list", directory)
        return out if "s ago (--fresh: now)" in out else ""

    out = wait_until(old, "an answer that is a tenth of a second old", timeout_s=4)
    assert out.splitlines()[1].split()[:2] == ["/aged", "1"]
    status, out, _ = kvfs("list", directory, "--fresh")
    assert status == 0 and out.splitlines()[1].split()[:2] == ["/aged", "2"] and "ago" not in out


def test_an_eviction_counts_every_segment_that_it_freed(tmp_path: pathlib.Path) -> None:
    """The parts of a large block lie in many segments, and one of them is the one that is evicted."""
    with Pool(files=1, size="160M", format_args=["--segment-size", "2M"]) as made:
        with open(made.mount / "large", "wb") as file:
            for index in range(40):
                file.write(content(1 << 20, index))
        evicted: dict[str, int] = {}

        def goes() -> bool:
            """Not while the kernel has yet to tell of the close."""
            status, out, error = kvfs("evict", made.mount, "--all", "-o", "json")
            assert status == 0, error
            evicted.update(json.loads(out))
            return evicted["evicted_blocks"] > 0

        wait_until(goes, "the block is evicted")
        assert evicted["evicted_blocks"] == 1 and evicted["evicted_segments"] >= 15, evicted
        status, out, _ = kvfs("evict", made.mount, "--all")
        assert out.splitlines()[0] == "evicted 0 blocks of 0; 0 segments freed"
        status, _, error = kvfs("evict", made.mount, "--size", "1G")
        assert status == 1 and error.endswith("0 of 1G could be evicted\n")


def test_list_has_what_is_pinned(pool: Pool) -> None:
    directory = filled(pool, "pinned", "a", "b", "below/c")
    assert kvfs("pin", directory, directory / "a")[0] == 0
    _, out, _ = kvfs("list", pool.mount, "--pins", "--depth", "3", "-o", "json")
    found = {row["path"]: (row["kind"], row["blocks"], row["bytes"]) for row in json.loads(out)["pins"]}
    assert found == {"/pinned": ("directory", 3, 3 * SIZE), "/pinned/a": ("file", 1, SIZE)}
    assert "/pinned/a" in kvfs("list", pool.mount, "--pins")[1]
    kvfs("unpin", directory, directory / "a")


# ---- pins ----


def test_unpin_says_what_stays_pinned(pool: Pool) -> None:
    directory = filled(pool, "kept", "below/a", "below/b")
    below = directory / "below"
    assert kvfs("pin", directory, below, below / "a") == (0, "", "")
    status, _, error = kvfs("unpin", below)
    assert status == 0
    assert error.splitlines() == [
        f"kvfs: {below}: stays pinned by {directory}, which it lies in",
        f"kvfs: {below}: stays pinned below it: {below / 'a'}",
    ]
    status, out, error = kvfs("unpin", directory, "-o", "json")
    assert (status, error) == (0, "")
    assert json.loads(out)["stays"] == [{"path": str(directory), "above": [], "below": [str(below / "a")]}]
    assert kvfs("unpin", below / "a") == (0, "", "")


def test_a_pinned_name_moves_no_cursor(pool: Pool) -> None:
    directory = filled(pool, "cursor", "a\x1b[31mb")
    kvfs("pin", directory / "a\x1b[31mb")
    status, out, error = kvfs("unpin", directory)
    assert status == 0 and out == ""
    assert error == f"kvfs: {directory}: stays pinned below it: {directory}/a\\x1b[31mb\n"
    kvfs("unpin", directory / "a\x1b[31mb")


# ---- prestage ----


def test_prestage_reads_into_the_page_cache(pool: Pool) -> None:
    directory = filled(pool, "staged", "a", "below/b", "below/c")
    # The kernel tells of a close behind close()'s back; a file with a writer keeps no pages.
    wait_until(lambda: pool.status()["counters"]["open_handles"] == 0, "the release of what was written")
    before = pool.status()["counters"]["reads"]
    status, out, _ = kvfs("prestage", directory, "-o", "json")
    assert status == 0 and json.loads(out) == {"version": 1, "blocks": 3, "bytes": 3 * SIZE, "missed": 0}
    read = pool.status()["counters"]["reads"]
    assert read > before
    for name in ("a", "below/b", "below/c"):
        assert (directory / name).read_bytes() == content(SIZE, name)
    assert pool.status()["counters"]["reads"] == read, "read again"
    assert "1 block of" in kvfs("prestage", directory / "a")[1]


def test_prestage_is_about_mounts(tmp_path: pathlib.Path) -> None:
    assert kvfs("prestage", tmp_path)[2] == f"kvfs: {tmp_path}: not in a kvfs mount\n"


# ---- errors in JSON ----


@pytest.mark.parametrize(
    ("arguments", "status", "number", "words"),
    [
        (["status", "{base}/none", "-o", "json"], 1, errno.ENOENT, "none: no such pool"),
        (["umount", "-o", "json", "/proc"], 1, errno.EINVAL, "not a kvfs mount"),
        (["evict", "{pool}", "-o", "json"], 2, errno.EINVAL, "--size"),
        (["frobnicate", "--output=json"], 2, errno.EINVAL, "frobnicate"),
        (["mount", "{pool}", "{mount}", "-o", "json"], 1, errno.EINVAL, "busy"),
        (["list", "{pool}", "--depth", "1000", "-ojson"], 1, errno.EINVAL, "depth 1000"),
    ],
)
def test_an_error_is_a_document_too(pool: Pool, arguments: list[str], status: int, number: int, words: str) -> None:
    got, out, error = kvfs(*(word.format(base=pool.base, pool=pool.path, mount=pool.mount) for word in arguments))
    document = json.loads(out)
    assert got == status
    assert document["version"] == 1 and words in document["error"] and error.count("\n") == 1
    assert document["errno"] == number, document


def test_a_result_and_the_failure_that_came_with_it_are_one_document(pool: Pool) -> None:
    status, out, error = kvfs("evict", pool.mount, "--size", "1T", "-o", "json")
    document = json.loads(out)
    assert status == 1 and document["evicted_bytes"] < 1 << 40 and "kept" in document
    assert f"kvfs: {document['error']}\n" == error and document["errno"] == errno.EIO


# ---- users that are not root ----


def as_a_user(base: pathlib.Path, user: pwd.struct_passwd, function: Callable[[], Any]) -> Any:
    """In a child with mounts of its own: /dev/fuse, Python and these sources may be root's alone on this machine."""

    def child() -> Any:
        assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
        run("mount", "--make-rprivate", "/")
        (base / "dev").mkdir(parents=True)
        run("mount", "-t", "tmpfs", "none", base / "dev")
        os.mknod(base / "dev" / "fuse", stat.S_IFCHR, os.stat("/dev/fuse").st_rdev)
        os.chmod(base / "dev" / "fuse", 0o666)
        run("mount", "--bind", base / "dev" / "fuse", "/dev/fuse")
        closed = {place: place_closed(place) for place in (pathlib.Path(sys.base_prefix), REPOSITORY)}
        for number, place in enumerate(closed):
            (base / f"{number}").mkdir()
            run("mount", "--bind", place, base / f"{number}")
        for top in {top for top in closed.values() if top is not None}:
            run("mount", "-t", "tmpfs", "-o", "mode=0755", "none", top)
        for number, (place, top) in enumerate(closed.items()):
            if top is not None:
                place.mkdir(parents=True)
                run("mount", "--bind", base / f"{number}", place)
        return in_child(function, user=user.pw_uid, group=user.pw_gid)

    return in_child(child)


def place_closed(place: pathlib.Path) -> pathlib.Path | None:
    """The first directory on the way to a place that others cannot pass."""
    way = [place, *place.parents][::-1]
    return next((directory for directory in way if not directory.stat().st_mode & stat.S_IXOTH), None)


def test_another_user_is_told_who_may(pool: Pool, tmp_path: pathlib.Path) -> None:
    requires_root()
    lines = [("status", pool.mount), ("umount", pool.mount, "-o", "json"), ("umount", pool.path), ("status",)]
    looked, mount, other, every = as_a_user(tmp_path, NOBODY, lambda: [kvfs(*line) for line in lines])
    may_not = f"kvfs: {pool.path}: user {NOBODY.pw_uid} may not ask its daemon: only root and user 0 may\n"
    assert looked == (1, "", may_not)
    refusal = f"kvfs: {pool.mount}: mounted by user 0: only root and that user may unmount it\n"
    assert mount[0] == 1 and json.loads(mount[1])["errno"] == errno.EPERM and mount[2] == refusal
    assert other == (1, "", refusal)
    assert every[:2] == (1, "") and may_not in every[2], "of all pools"
    pool.umount()
    try:
        assert as_a_user(tmp_path / "again", NOBODY, lambda: kvfs("umount", pool.path)) == (1, "", may_not)
    finally:
        pool.start()


def test_a_user_s_own_mount_is_the_user_s_to_look_at_and_to_unmount() -> None:
    requires_root()
    if shutil.which("fusermount3") is None or not os.stat(shutil.which("fusermount3") or "/").st_mode & 0o4000:
        pytest.skip("fusermount3 is not setuid root: no mount without root")
    home = pathlib.Path("/tmp") / f"kvfs-test-user-{os.getpid()}"
    home.mkdir(mode=0o755)
    (home / "own").mkdir()
    os.chown(home / "own", NOBODY.pw_uid, NOBODY.pw_gid)

    def life() -> list[tuple[int, str, str]]:
        pool, mount = home / "own" / "pool", home / "own" / "mount"
        mount.mkdir()
        done = [kvfs("format", pool, "--files", "2", "--size", "64M")]
        done.append(kvfs("mount", pool, mount, "-o", "json"))
        (mount / "a").write_bytes(b"mine")
        done += [kvfs("status", mount, "-o", "json"), kvfs("status", "-o", "json"), kvfs("list", mount)]
        with open(mount / "a", "rb"):
            done.append(kvfs("umount", mount))
        done.append(kvfs("umount", pool, "-o", "json"))
        return done

    try:
        formatted, mounted, looked, every, listed, busy, unmounted = as_a_user(home, NOBODY, life)
        assert formatted[0] == mounted[0] == 0, (formatted, mounted)
        assert looked[0] == 0 and json.loads(looked[1])["pool"]["state"] == "mounted"
        assert str(home / "own" / "pool") in [one["pool"]["path"] for one in json.loads(every[1])["pools"]]
        assert every[0] == listed[0] == 0
        assert busy[0] == 1 and "busy" in busy[2], busy
        assert unmounted[0] == 0 and json.loads(unmounted[1])["clean"] is True, unmounted
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((home / "own" / "pool" / "kvfs.pid").read_text()), signal.SIGKILL)
        shutil.rmtree(home)


# ---- what is refused, and what is made ----


def test_a_pool_in_a_mount_is_refused(pool: Pool, tmp_path: pathlib.Path) -> None:
    inside = pool.mount / "nested"
    status, _, error = kvfs("format", inside, "--files", "2", "--size", "64M")
    assert status == 1 and error.startswith(f"kvfs: {inside}: a pool cannot lie in a kvfs mount")
    assert not inside.exists()
    write_file(pool.mount / "device", b"")
    os.truncate(pool.mount / "device", 1 << 20)
    status, _, error = kvfs("format", tmp_path / "pool", "--device", pool.mount / "device")
    assert status == 1 and "a device of a pool cannot lie in a kvfs mount" in error
    assert kvfs("format", tmp_path / "outside", "--files", "1", "--size", "16M")[0] == 0
    shutil.copytree(tmp_path / "outside", inside)
    (tmp_path / "mount").mkdir()
    status, _, error = kvfs("mount", inside, tmp_path / "mount")
    assert status == 1 and "a pool cannot lie in a kvfs mount" in error


@pytest.mark.parametrize("at_mib", [3, 150, 299])
def test_a_plain_file_with_data_is_not_formatted(
    tmp_path: pathlib.Path, at_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its beginning, at its end, and, beyond what is read whole, where a page of it is looked at."""
    monkeypatch.setattr(signatures, "_CONTENT_MAX", 1 << 20)
    device = tmp_path / "thesis.tar"
    with open(device, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 300 << 20)
        for place, data in ((0, bytes(2 << 20)), (298 << 20, bytes(2 << 20)), (at_mib << 20, b"work" * (1 << 18))):
            file.seek(place)
            file.write(data)
    before = device.stat()
    status, _, error = kvfs("format", tmp_path / "pool", "--device", device)
    assert status == 1
    assert error.startswith(f"kvfs: {device}: holds data: it is a plain file") and "--force" in error
    assert device.stat().st_mtime_ns == before.st_mtime_ns and not (tmp_path / "pool").exists()
    assert kvfs("format", tmp_path / "pool", "--device", device, "--force")[0] == 0


def test_a_file_of_zeros_is_a_device(tmp_path: pathlib.Path) -> None:
    device = tmp_path / "device"
    device.write_bytes(bytes(16 << 20))
    assert kvfs("format", tmp_path / "pool", "--device", device)[0] == 0


def test_replay_makes_its_directory(tmp_path: pathlib.Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 512, "hash_ids": [1]}) + "\n")
    target = tmp_path / "not" / "there"
    status, _, error = kvfs("replay", trace, "--target", target, "--block-size", "4K", "--full-speed", "--buffered")
    assert status == 0 and target.is_dir(), error


# ---- the log ----


def test_the_log_of_a_quiet_life_has_no_errors_and_no_words_without_a_time(tmp_path: pathlib.Path) -> None:
    """libfuse takes the end of its session for a short read, and said so on stderr, which is the log."""
    with Pool(files=2, size="64M") as pool:
        write_file(pool.mount / "a", content(SIZE))
        pool.umount()
        lines = (pool.path / "kvfs.log").read_text().splitlines()
    assert lines and not [line for line in lines if not line.startswith("20") or " ERROR " in line], lines


def test_a_device_that_is_back_is_not_called_away() -> None:
    """While a device that is back is compared with the index, nothing is said: it ends in a moment."""
    with Pool(files=2, size="64M") as pool:
        write_file(pool.mount / "a", content(SIZE))
        pool.kill()
        # As a crash between two labels leaves it: one device has missed a mount.
        old = (pool.path / "devices" / "1").read_bytes()[:65536]
        end = (pool.path / "devices" / "1").stat().st_size - 65536
        pool.remount()
        pool.umount()
        for at in (0, end):
            with open(pool.path / "devices" / "1", "r+b") as device:
                device.seek(at)
                device.write(old)
        (pool.path / "kvfs.log").unlink()
        pool.start()
        wait_until(lambda: pool.status()["devices"][1]["state"] == "online", "the device that missed a mount")
        assert "no segment can be written" not in (pool.path / "kvfs.log").read_text()
        assert (pool.mount / "a").read_bytes() == content(SIZE)


def test_a_verb_that_asks_the_daemon_loads_nothing_of_the_daemon(own_pool: Callable[..., Pool]) -> None:
    """Imports were nine tenths of half a second."""
    asked = own_pool(files=2, size="128M")
    verbs = [["status"], ["stats"], ["list"], ["evict", "--all"], ["device", "list"], ["umount"]]
    by_mount = own_pool(files=1, size="64M")
    for verb in (*((*verb, str(asked.path)) for verb in verbs), ("umount", str(by_mount.mount))):
        done = run(sys.executable, "-X", "importtime", "-m", "kvfs", *verb)
        loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import ")}
        assert "kvfs.frontend.asking" in loaded, verb
        assert not loaded & {"trio", "lmdb", "pyfuse3", "kvfs._native", "kvfs.plane", "kvfs.store.store"}, verb


# ---- the line of a mount ----


def test_mount_says_in_a_line_what_it_did_and_json_has_the_same() -> None:
    with Pool(files=3, size="128M", started=False, format_args=("--stripe-width", "1")) as pool:
        line = pool.command("mount", str(pool.path), str(pool.mount)).stdout
        pid = (pool.path / "kvfs.pid").read_text().strip()
        assert line.count("\n") == 1 and line.startswith(f"{pool.mount}: pool {pool.path}, 3 devices, ")
        assert " free of " in line and ", I/O by " in line
        assert line.endswith(f", 0 blocks, pid {pid}, log {pool.path}/kvfs.log\n")
        write_file(pool.mount / "block", content(SIZE))
        pool.umount()
        (pool.path / "devices" / "2").rename(pool.path / "away")
        found = json.loads(pool.command("mount", str(pool.path), str(pool.mount), "-o", "json").stdout)
        assert found["devices"] == 3 and found["devices_away"] == 1 and 0 < found["free"] < found["size"]
        assert found["pool"] == str(pool.path) and found["mountpoint"] == str(pool.mount) and found["exports"] == []
        assert found["log"] == f"{pool.path}/kvfs.log" and found["pid"] > 0 and found["rings"]
        pool.umount()
        (pool.path / "away").rename(pool.path / "devices" / "2")


def test_an_export_says_its_sockets_and_a_daemon_that_tells_nothing_has_started_all_the_same() -> None:
    export = {"socket": "/run/vm1.sock"}
    facts = {"devices": 1, "size": 2 << 30, "free": 1 << 30, "blocks": 12345, "rings": "io_uring"}
    end = {"pid": 4711, "log": "/srv/pool/kvfs.log"}
    assert (
        mounting.started_text({"pool": "/srv/pool", "exports": [export, export], **facts, **end})
        == "/srv/pool exported at /run/vm1.sock and /run/vm1.sock, 1 device, 1.00G free of 2.00G, I/O by io_uring, "
        "12,345 blocks, pid 4711, log /srv/pool/kvfs.log"
    )
    said = mounting.started_text({"pool": "/srv/p\n", "mountpoint": "/mnt/kv", "exports": [], **end})
    assert said == "/mnt/kv: pool /srv/p\\n, pid 4711, log /srv/pool/kvfs.log"


# ---- mount(8) ----


def test_mount_8_s_options_reach_the_kernel_and_a_remount_changes_them() -> None:
    requires_root()
    helper = str(REPOSITORY / "tools/mount.kvfs")
    with Pool(files=2, size="128M", started=False) as pool:

        def options() -> set[str]:
            for line in pathlib.Path("/proc/self/mounts").read_text().splitlines():
                if line.split()[1] == str(pool.mount):
                    return set(line.split()[3].split(","))
            return set()

        words = "nodiratime,lazytime,sync,exec,nofail,allow_other,io_timeout=20000,staging=32M"
        quiet = run(helper, str(pool.path), str(pool.mount), "-o", words)
        assert quiet.stdout == "" and {"nodiratime", "lazytime", "sync", "allow_other", "rw"} <= options()
        write_file(pool.mount / "block", content(SIZE))
        run(helper, str(pool.path), str(pool.mount), "-o", "rw,allow_other,max_read=4096,remount,ro")
        assert "ro" in options()
        with pytest.raises(OSError) as caught:
            write_file(pool.mount / "other", b"x")
        assert caught.value.errno == errno.EROFS
        run(helper, str(pool.path), str(pool.mount), "-o", "remount,rw")
        write_file(pool.mount / "other", b"x")
        refused = run(helper, str(pool.path), str(pool.mount), "-o", "remount,staging=64M", check=False)
        assert refused.returncode == 1 and "a remount cannot change staging=64M" in refused.stderr
