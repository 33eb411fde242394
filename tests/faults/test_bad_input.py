"""Bad input: each gets one line that names the object, exit status 1 or 2, and nothing has changed then."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import pathlib
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator

import helpers
import image
import pytest
from helpers import (
    MIB,
    Pool,
    content,
    loop_devices,
    mount_device,
    process_alive,
    read_file,
    run,
    wait_until,
    write_file,
)

from kvfs.units import told_size

# Files of a running pool that change by themselves.
_LIVELY = re.compile(r"(kvfs\.log|kvfs\.pid|control\.sock|lock)$")


def kvfs(*words: str | os.PathLike[str], timeout_s: float = 60, **arguments: object) -> tuple[int, str, str]:
    result = run(sys.executable, "-m", "kvfs", *words, check=False, timeout_s=timeout_s, **arguments)  # type: ignore[arg-type]
    return result.returncode, result.stdout, result.stderr


def tree(*roots: pathlib.Path) -> dict[str, str]:
    """Every file below the roots with its kind, mode, size and digest."""
    found = {}
    for root in roots:
        for path in sorted([root, *root.rglob("*")] if root.is_dir() else [root]):
            about = path.lstat()
            text = f"{about.st_mode:o} {about.st_size if path.is_file() else 0}"
            if path.is_file() and not _LIVELY.search(path.name):
                with open(path, "rb") as file:
                    text += hashlib.file_digest(file, "blake2b").hexdigest()
            if not (path.is_socket() or _LIVELY.search(path.name)):
                found[str(path)] = text
    return found


@contextlib.contextmanager
def nothing_changes(*roots: pathlib.Path) -> Iterator[None]:
    before = tree(*roots)
    mounts = pathlib.Path("/proc/self/mountinfo").read_text()
    yield
    after = tree(*roots)
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    assert not changed, f"changed: {changed}"
    ours = [
        line
        for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
        if line not in mounts.splitlines() and any(str(root) in line for root in roots)
    ]
    assert not ours, f"mounted: {ours}"


def assert_refused(outcome: tuple[int, str, str], *names: object, status: tuple[int, ...] = (1, 2)) -> str:
    """One line on stderr with every one of the names, nothing on stdout; returns the line."""
    code, out, error = outcome
    assert code in status, f"exit status {code}: {out}{error}"
    assert out == "", out
    assert error.count("\n") == 1 and error.endswith("\n"), f"not one line:\n{error}"
    assert error.startswith("kvfs"), error
    assert "Traceback" not in error and "internal error" not in error, error
    for name in names:
        assert str(name) in error, f"{name!r} is not named: {error}"
    return error


@pytest.fixture
def pool(own_pool: Callable[..., Pool]) -> Pool:
    """A small pool that is not mounted."""
    return own_pool(files=4, size="32M", started=False)


def mount_command(pool: Pool) -> tuple[str | os.PathLike[str], ...]:
    return (sys.executable, "-m", "kvfs", "mount", pool.path, pool.mount)


def try_mount(pool: Pool, *extra: str) -> tuple[int, str, str]:
    return kvfs("mount", pool.path, pool.mount, *extra)


def still_mounts(pool: Pool) -> None:
    """The pool is as good as new."""
    pool.start()
    write_file(pool.mount / "after", content(MIB, "after"))
    assert read_file(pool.mount / "after") == content(MIB, "after")
    pool.umount()


SLOW = pytest.mark.slow
COPIES = pytest.mark.parametrize(
    "copies",
    [(0, 1), helpers.slow((0,)), helpers.slow((1,))],
    ids=["both labels", "the first label", "the second label"],
)


# ---- no pool, a pool in use ----


@pytest.mark.parametrize("kind", ["missing", "empty directory", "file", "directory with other files"])
@pytest.mark.parametrize("verb", ["mount", "fsck", "status"])
def test_a_path_that_is_no_pool(tmp_path: pathlib.Path, kind: str, verb: str) -> None:
    path, mountpoint = tmp_path / "thing", tmp_path / "mount"
    mountpoint.mkdir()
    if kind == "file":
        path.write_bytes(b"not a pool")
    elif kind != "missing":
        path.mkdir()
        if kind == "directory with other files":
            (path / "notes.txt").write_text("mine")
    with nothing_changes(tmp_path):
        assert_refused(kvfs(verb, path, *([mountpoint] if verb == "mount" else [])), path, status=(1,))


def test_a_mounted_pool_is_neither_mounted_again_nor_formatted_nor_repaired(
    own_pool: Callable[..., Pool], tmp_path: pathlib.Path
) -> None:
    pool = own_pool(files=2, size="32M")
    write_file(pool.mount / "a", content(MIB))
    with nothing_changes(tmp_path):
        for words in (
            ("mount", pool.path, tmp_path),
            ("format", pool.path, "--files", "2", "--size", "32M", "--force"),
            ("fsck", pool.path),
            ("fsck", pool.path, "--repair"),
        ):
            assert_refused(kvfs(*words), pool.path, status=(1,))
    assert_refused(kvfs("mount", pool.path, pool.mount), status=(1,))
    assert read_file(pool.mount / "a") == content(MIB)
    write_file(pool.mount / "b", content(MIB, 1))
    assert read_file(pool.mount / "b") == content(MIB, 1)


# ---- devices ----


@pytest.fixture
def ext4_file(tmp_path: pathlib.Path) -> pathlib.Path:
    program = shutil.which("mkfs.ext4") or shutil.which("mkfs.ext4", path="/usr/sbin:/sbin")
    if program is None:
        pytest.skip("needs the program mkfs.ext4")
    path = tmp_path / "ext4"
    run("truncate", "--size", "64M", path)
    run(program, "-q", path)
    return path


def test_a_device_that_holds_a_filesystem_is_refused_unless_forced(
    tmp_path: pathlib.Path, ext4_file: pathlib.Path
) -> None:
    other = tmp_path / "blank"
    run("truncate", "--size", "64M", other)
    with nothing_changes(tmp_path):
        # The blank device first: it must not have been touched when the second one is refused.
        words = ("format", tmp_path / "pool", "--device", other, "--device", ext4_file)
        error = assert_refused(kvfs(*words), ext4_file, status=(1,))
        assert "ext" in error and "--force" in error, error
    assert kvfs(*words, "--force")[0] == 0


def test_a_loop_device_that_holds_a_filesystem_is_refused_also_while_mounted(
    tmp_path: pathlib.Path, ext4_file: pathlib.Path
) -> None:
    helpers.requires_loop()
    device = run("losetup", "--find", "--show", ext4_file).stdout.strip()
    try:
        with nothing_changes(tmp_path):
            assert_refused(kvfs("format", tmp_path / "pool", "--device", device), device, status=(1,))
        (tmp_path / "elsewhere").mkdir()
        run("mount", device, tmp_path / "elsewhere")
        try:
            assert_refused(kvfs("format", tmp_path / "pool", "--device", device, "--force"), device, status=(1,))
            assert not (tmp_path / "pool").exists()
        finally:
            run("umount", tmp_path / "elsewhere")
    finally:
        run("losetup", "--detach", device)


@COPIES
def test_a_device_with_another_pools_label_is_refused_unless_forced(
    pool: Pool, tmp_path: pathlib.Path, copies: tuple[int, ...]
) -> None:
    for copy in {0, 1} - set(copies):
        image.Image(pool.path).write_label(1, copy, bytes(65536))
    device = pool.path / "devices" / "1"
    with nothing_changes(tmp_path, pool.path):
        assert_refused(kvfs("format", tmp_path / "other", "--device", device), device, "kvfs", status=(1,))
    assert kvfs("format", tmp_path / "other", "--device", device, "--force")[0] == 0
    before = device.read_bytes()
    assert_degraded(pool, device, "kvfs device replace POOL 1 PATH")
    assert device.read_bytes() == before, "it is the other pool's"


def assert_degraded(pool: Pool, *names: object) -> None:
    """It mounts, and says in a line what is missing, after one that says so where every segment is hit."""
    code, out, error = try_mount(pool)
    assert code == 0 and out.startswith(f"{pool.mount}: ") and " away), " in out and out.count("\n") == 1, (out, error)
    *before, last = error.splitlines()
    assert last.startswith("kvfs: degraded: "), error
    assert len(before) <= 1 and all("no segment can be written" in line for line in before), error
    for name in names:
        assert str(name) in error, f"{name!r} is not named: {error}"
    assert "degraded" in pool.status()["pool"]["state"]
    pool.umount()


def test_a_missing_device(pool: Pool) -> None:
    (pool.path / "devices" / "2").rename(pool.path / "away")
    with nothing_changes(pool.base):
        assert_refused(kvfs("fsck", pool.path), pool.path / "devices" / "2", status=(1,))
    assert_degraded(pool, pool.path / "devices" / "2")
    (pool.path / "away").rename(pool.path / "devices" / "2")
    still_mounts(pool)


@pytest.mark.slow
def test_a_device_whose_path_leads_nowhere(pool: Pool) -> None:
    path = pool.path / "pool.toml"
    good = path.read_text()
    path.write_text(good.replace('path = "devices/1"', 'path = "nowhere"'))
    assert_degraded(pool, "nowhere")
    path.write_text(good)
    still_mounts(pool)


def test_a_pool_without_any_of_its_devices_is_refused(pool: Pool) -> None:
    (pool.path / "devices").rename(pool.path / "away")
    with nothing_changes(pool.base):
        assert_refused(try_mount(pool), pool.path / "devices" / "0", status=(1,))


@pytest.mark.parametrize("size", [33554432 - 4096, *map(helpers.slow, (33554432 // 2, 4096, 0))])
def test_a_shrunk_device(pool: Pool, size: int) -> None:
    device = pool.path / "devices" / "1"
    os.truncate(device, size)
    with nothing_changes(pool.base):
        assert_refused(kvfs("fsck", pool.path), device, f": {told_size(size)}, ", "says 32M", status=(1,))
    assert_degraded(pool, device, f": {told_size(size)}, ", "says 32M")


@pytest.mark.parametrize("size", [0, 4096, MIB])
def test_a_device_too_small_for_a_pool(tmp_path: pathlib.Path, size: int) -> None:
    device = tmp_path / "small"
    run("truncate", "--size", str(size), device)
    with nothing_changes(tmp_path):
        assert_refused(kvfs("format", tmp_path / "pool", "--device", device), device)


@pytest.mark.parametrize("what", ["missing", "directory", "character device", "given twice"])
def test_a_device_that_is_none(tmp_path: pathlib.Path, what: str) -> None:
    device = tmp_path / "device"
    words: list[object] = ["format", tmp_path / "pool", "--device", device]
    if what == "directory":
        device.mkdir()
    elif what == "character device":
        device = words[3] = pathlib.Path("/dev/zero")
    elif what == "given twice":
        run("truncate", "--size", "64M", device)
        words += ["--device", device]
    with nothing_changes(tmp_path):
        assert_refused(kvfs(*map(str, words)), device)


def test_devices_that_changed_places(pool: Pool) -> None:
    first, second = pool.path / "devices" / "0", pool.path / "devices" / "1"
    first.rename(pool.path / "aside")
    second.rename(first)
    (pool.path / "aside").rename(second)
    with nothing_changes(pool.base):
        assert_refused(try_mount(pool), first, status=(1,))


def test_a_device_of_another_pool_in_its_place(pool: Pool, own_pool: Callable[..., Pool]) -> None:
    other = own_pool(files=4, size="32M", started=False)
    shutil.copy(other.path / "devices" / "3", pool.path / "devices" / "3")
    before = (pool.path / "devices" / "3").read_bytes()
    assert_degraded(pool, pool.path / "devices" / "3", "kvfs device replace POOL 3 PATH")
    assert (pool.path / "devices" / "3").read_bytes() == before, "it is the other pool's"


@pytest.mark.parametrize("version", [1, 3])
@COPIES
def test_a_label_of_another_format_version(pool: Pool, copies: tuple[int, ...], version: int) -> None:
    """Also when only one copy is of the other version: an upgrade that was cut short must not be undone."""
    devices = image.Image(pool.path)
    for device in range(4):
        for copy in copies:
            label = bytearray(devices.read_label(device, copy))
            label[8:12] = struct.pack("<I", version)
            devices.write_label(device, copy, image.with_checksum(bytes(label)))
    with nothing_changes(pool.base):
        for outcome in (try_mount(pool), kvfs("fsck", pool.path, "--repair")):
            error = assert_refused(outcome, pool.path / "devices", "version", status=(1,))
            assert f"version is {version}" in error and "2" in error, error


def test_both_labels_of_a_device_gone(pool: Pool) -> None:
    devices = image.Image(pool.path)
    for copy in (0, 1):
        devices.write_label(1, copy, bytes(65536))
    assert_degraded(pool, pool.path / "devices" / "1", "label")


# ---- pool.toml ----


def _replace(old: str, new: str) -> Callable[[str], str]:
    def edit(text: str) -> str:
        changed = re.sub(old, new, text, count=1, flags=re.MULTILINE)
        assert changed != text, f"{old!r} is not in pool.toml"
        return changed

    return edit


@pytest.mark.parametrize(
    ("names", "edit"),
    [
        pytest.param(["TOML"], lambda text: text + "\n[[[", id="no TOML"),
        pytest.param(["version"], lambda text: "", id="empty"),
        pytest.param(["uuid"], _replace(r"^uuid = .*$", f'uuid = "{uuid.uuid4()}"'), id="another uuid"),
        pytest.param(["uuid"], _replace(r"^uuid = .*$", 'uuid = "mine"'), id="no uuid", marks=SLOW),
        pytest.param(["uuid"], _replace(r"^uuid = .*\n", ""), id="uuid missing", marks=SLOW),
        pytest.param(
            ["secret"], _replace(r"^secret = .*$", 'secret = "0000000000000000"'), id="another secret", marks=SLOW
        ),
        pytest.param(["secret"], _replace(r"^secret = .*$", "secret = 17"), id="secret a number", marks=SLOW),
        pytest.param(["version"], _replace(r"^version = 2$", "version = 3"), id="newer version"),
        pytest.param(["version"], _replace(r"^version = 2$", 'version = "2"'), id="version a string", marks=SLOW),
        pytest.param(
            ["zone_size"], _replace(r"^zone_size = .*$", "zone_size = 131072"), id="smaller zones", marks=SLOW
        ),
        pytest.param(
            ["zone_size"],
            _replace(r"^zone_size = .*$", "zone_size = 100000"),
            id="zones of no power of two",
            marks=SLOW,
        ),
        pytest.param(
            ["stripe_width"], _replace(r"^stripe_width = 4$", "stripe_width = 2"), id="smaller width", marks=SLOW
        ),
        pytest.param(["stripe_width"], _replace(r"^stripe_width = 4$", "stripe_width = 5"), id="width over devices"),
        pytest.param(["stripe_width"], _replace(r"^stripe_width = 4$", "stripe_width = 0"), id="width 0", marks=SLOW),
        pytest.param(["stripe_unit"], _replace(r"^stripe_unit = .*$", "stripe_unit = 16384"), id="another unit"),
        pytest.param(["size"], _replace(r"^size = 33554432$", "size = 33550336"), id="smaller device", marks=SLOW),
        pytest.param(
            ["pool.toml", "devices/"], _replace(r"^size = 33554432$", "size = 67108864"), id="larger device", marks=SLOW
        ),
        pytest.param(
            ["zone_count"], _replace(r"^zone_count = .*$", "zone_count = 1000000"), id="too many zones", marks=SLOW
        ),
        pytest.param(["index"], _replace(r"^index = 1$", "index = 2"), id="index twice", marks=SLOW),
        pytest.param(["path"], _replace(r'^path = "devices/1"$', 'path = ""'), id="no path", marks=SLOW),
        pytest.param(["device"], _replace(r'^path = "devices/1"$', 'path = "devices/0"'), id="one device twice"),
        pytest.param(
            ["colour"], _replace(r"^version = 2$", 'version = 2\ncolour = "red"'), id="unknown key", marks=SLOW
        ),
        pytest.param(["device"], _replace(r"(?s)\n\[\[device\]\]\nindex = 3.*", "\n"), id="a device less", marks=SLOW),
    ],
)
def test_pool_toml_edited_wrong(pool: Pool, names: list[str], edit: Callable[[str], str]) -> None:
    path = pool.path / "pool.toml"
    good = path.read_text()
    path.write_text(edit(good))
    with nothing_changes(pool.base):
        assert_refused(try_mount(pool), *names, status=(1,))
        assert_refused(kvfs("fsck", pool.path), *names, status=(1,))


def test_pool_toml_that_is_no_text(pool: Pool) -> None:
    (pool.path / "pool.toml").write_bytes(b"\xff\xfe\x00version")
    with nothing_changes(pool.base):
        assert_refused(try_mount(pool), "pool.toml", status=(1,))


# ---- mount points ----


@pytest.mark.parametrize("kind", ["missing", "file", "busy", "the pool", "above the pool"])
def test_a_mount_point_that_cannot_be_one(pool: Pool, tmp_path: pathlib.Path, kind: str) -> None:
    path = tmp_path / "point"
    with contextlib.ExitStack() as stack:
        if kind == "file":
            path.write_bytes(b"")
        elif kind == "busy":
            path.mkdir()
            run("mount", "-t", "tmpfs", "tmpfs", path)
            stack.callback(run, "umount", path)
            (path / "file").write_bytes(b"")  # an empty one may be mounted over
        elif kind == "the pool":
            path = pool.path
        elif kind == "above the pool":
            path = pool.base
        with nothing_changes(pool.base, tmp_path):
            assert_refused(kvfs("mount", pool.path, path), path, status=(1,))
    assert mount_device(pool.mount) is None
    still_mounts(pool)


def test_a_mount_point_where_another_pool_is(own_pool: Callable[..., Pool]) -> None:
    other, pool = own_pool(files=1, size="32M"), own_pool(files=1, size="32M", started=False)
    with nothing_changes(pool.base):
        assert_refused(kvfs("mount", pool.path, other.mount), other.mount, status=(1,))
    write_file(other.mount / "a", b"still there")
    assert read_file(other.mount / "a") == b"still there"


# ---- numbers ----


@pytest.mark.parametrize("size", ["", "M", "64X", "-64M", "6 4M", "64MM", "1e9", "0x100", "99999999999T", "١٢M"])
def test_sizes_that_do_not_parse(tmp_path: pathlib.Path, size: str) -> None:
    with nothing_changes(tmp_path):
        assert_refused(kvfs("format", tmp_path / "pool", "--files", "2", f"--size={size}"), "--size", status=(2,))
        assert_refused(
            kvfs("format", tmp_path / "pool", "--files", "2", "--size", "64M", f"--segment-size={size}"),
            "--segment-size",
            status=(2,),
        )


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--files", "2", "--size", "64M", "--stripe-width", "3"], ["3", "2"]),
        (["--files", "64", "--size", "64M", "--stripe-width", "64"], ["64", "32"]),
        (["--files", "2", "--size", "64M", "--stripe-width", "0"], ["0"]),
        (["--files", "257", "--size", "64M"], ["257", "256"]),
        (["--files", "2", "--size", "100K"], ["--size"]),
        (["--files", "2", "--size", "64M", "--stripe-unit", "5000"], ["5000"]),
        (["--files", "2", "--size", "64M", "--segment-size", "3M"], ["3M"]),
        (["--files", "2", "--size", "64M", "--segment-size", "64M"], []),
        (["--files", "2", "--size", "64M", "--stripe-unit", "16M"], []),
    ],
)
def test_a_geometry_that_is_not_possible(tmp_path: pathlib.Path, words: list[str], names: list[str]) -> None:
    with nothing_changes(tmp_path):
        assert_refused(kvfs("format", tmp_path / "pool", *words), *names)


# ---- a full disk ----


@contextlib.contextmanager
def small_ext4(tmp_path: pathlib.Path, size: str) -> Iterator[pathlib.Path]:
    program = helpers.requires_program("mkfs.ext4")
    point = tmp_path / "disk"
    point.mkdir()
    with loop_devices(tmp_path, 1, size) as (device,):
        run(program, "-q", "-m", "0", device)
        run("mount", device, point)
        try:
            yield point
        finally:
            run("umount", "-l", point)


def test_format_says_that_the_disk_cannot_hold_what_the_files_may_grow_to(tmp_path: pathlib.Path) -> None:
    with small_ext4(tmp_path, "64M") as disk:
        status, said, failures = kvfs("format", disk / "pool", "--files", "4", "--size", "1G")
        assert (status, failures) == (0, "")
        assert said.startswith(f"pool {disk}/pool: 4 devices, 4.00G in all, ")
        assert re.search(rf"\n  note: {disk}/pool: the pool may grow to 4G, and its disk has \d+M free", said), said


@pytest.mark.timeout(180)
def test_a_disk_that_fills_up_under_the_devices_fails_writes_and_spoils_nothing(
    tmp_path: pathlib.Path, own_pool: Callable[..., Pool]
) -> None:
    """Sparse devices larger than their disk: each file is whole or its writer was told; the daemon lives and counts."""
    with small_ext4(tmp_path, "128M") as disk, contextlib.ExitStack() as stack:
        pool = stack.enter_context(Pool(files=2, size="256M", format_args=("--force",), base=str(disk)))
        told = 0
        for index in range(200):
            try:
                write_file(pool.mount / f"{index}", content(MIB, index))
            except OSError as error:
                assert error.errno in (errno.ENOSPC, errno.EIO), error
                told += 1
                if told == 3:
                    break
            else:
                assert told == 0 or index < 200
        assert told > 0, "200 MiB fitted onto 128 MiB"
        right = 0
        for index in range(200):
            with contextlib.suppress(OSError):
                data = read_file(pool.mount / f"{index}")
                assert data == content(MIB, index), f"file {index}: {len(data)} wrong bytes"
                right += 1
        assert right > 50
        status = pool.status()
        assert sum(device["errors"] for device in status["devices"]) > 0, status["devices"]
        assert process_alive(pool.pid())


# ---- an uncooperative machine ----


def test_no_dev_fuse(pool: Pool) -> None:
    """As in a container that was not given the device."""
    script = f"mount -t tmpfs tmpfs /dev && exec {sys.executable} -m kvfs mount {pool.path} {pool.mount}"
    with nothing_changes(pool.base):
        result = run(
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            f"mkdir -p /tmp/x; exec 3</dev/null; {script}",
            check=False,
        )
        assert_refused((result.returncode, result.stdout, result.stderr), "/dev/fuse", status=(1,))
    still_mounts(pool)


# Makes one system call fail in the process that runs it and in its children: seccomp(2), prctl(2), bpf filters in
# linux/filter.h; AUDIT_ARCH_X86_64. Arguments: number of the call, errno, program and its arguments.
_WITHOUT_CALL = """
import ctypes, os, struct, sys
number, error = int(sys.argv[1]), int(sys.argv[2])
def op(code, jt, jf, k): return struct.pack("HBBI", code, jt, jf, k)
program = (op(0x20, 0, 0, 4) + op(0x15, 0, 3, 0xC000003E) + op(0x20, 0, 0, 0) + op(0x15, 0, 1, number)
           + op(0x06, 0, 0, 0x00050000 | error) + op(0x06, 0, 0, 0x7FFF0000))
buffer = ctypes.create_string_buffer(program)
class Fprog(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
fprog = Fprog(len(program) // 8, ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(fprog)) == 0, ctypes.get_errno()
os.execv(sys.argv[3], sys.argv[3:])
"""
_IO_URING_SETUP = 425


def test_too_little_locked_memory(pool: Pool) -> None:
    """Without CAP_IPC_LOCK and with RLIMIT_MEMLOCK at 0: kvfs mounts and works, by small rings or by threads."""
    helpers.requires_program("setpriv")
    without = "-ipc_lock,-sys_resource"
    less = ("prlimit", "--memlock=0:0", "setpriv", f"--bounding-set={without}", f"--inh-caps={without}")
    result = run(*less, *mount_command(pool), check=False)
    assert result.returncode == 0, result.stderr
    write_file(pool.mount / "a", content(3 * MIB))
    assert read_file(pool.mount / "a") == content(3 * MIB)


def test_too_little_memory_for_staging_is_said(pool: Pool) -> None:
    with nothing_changes(pool.base):
        assert_refused(try_mount(pool, "--staging", "16P"), "16P", status=(1, 2))


def test_a_daemon_killed_while_it_starts_leaves_one_line_and_no_mount(pool: Pool, tmp_path: pathlib.Path) -> None:
    """SIGKILL before the mount answers: the waiting command says what happened; the pool mounts afterwards."""
    for _ in range(10):
        outcome = _mount_and_kill(pool, tmp_path / "stdout", tmp_path / "stderr")
        helpers.detach(pool.mount)
        if outcome is not None and outcome[0] != 0:
            assert_refused(outcome, pool.path, "SIGKILL", status=(1,))
            break
    else:
        raise AssertionError("the daemon was ready before it could be killed, ten times")
    still_mounts(pool)


def _mount_and_kill(pool: Pool, out: pathlib.Path, error: pathlib.Path) -> tuple[int, str, str] | None:
    """`kvfs mount`, with its daemon killed as soon as there is one. Returns None if it was seen too late, or not at
    all."""
    with open(out, "wb") as stdout, open(error, "wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvfs", "mount", pool.path, pool.mount],
            stdout=stdout,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            cwd=helpers.REPOSITORY,
        )
    daemon: list[int] = []

    def seen() -> bool:
        found = _daemon_of(process.pid)
        daemon.extend([] if found is None else [found])
        return bool(daemon) or process.poll() is not None

    wait_until(seen, "a daemon, or the end of its parent", interval_s=0.001)
    if daemon:
        with os.fdopen(daemon[0]) as descriptor:
            signal.pidfd_send_signal(descriptor.fileno(), signal.SIGKILL)
            code = process.wait(30 * helpers.slowness())
            assert select.select([descriptor], [], [], 30 * helpers.slowness())[0], "a daemon outlived SIGKILL"
        return code, out.read_text(), error.read_text()
    assert process.returncode == 0, error.read_text()
    pool.umount()
    return None


def _daemon_of(parent: int) -> int | None:
    """A pidfd of the child that leads a session, which is what a daemon does first; other children are its helpers."""
    try:
        children = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:
        return None
    for child in children:
        with contextlib.suppress(OSError), os.fdopen(os.pidfd_open(int(child))) as descriptor:
            about = pathlib.Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            if (about[1], about[3]) == (str(parent), child):
                return os.dup(descriptor.fileno())
    return None


def test_umount_of_a_busy_mount_says_so_and_leaves_it(own_pool: Callable[..., Pool]) -> None:
    pool = own_pool(files=1, size="32M")
    write_file(pool.mount / "a", content(MIB))
    with helpers.opened(pool.mount / "a", os.O_RDONLY) as descriptor:
        assert_refused(kvfs("umount", pool.mount), pool.mount, status=(1,))
        assert os.pread(descriptor, MIB, 0) == content(MIB)
    pool.umount()
    wait_until(lambda: mount_device(pool.mount) is None, "the mount to be gone")


assert ctypes.sizeof(ctypes.c_void_p) == 8, "the seccomp program above assumes a 64-bit machine"
