"""Other users of the machine: what they can prepare where root works, and what their names do to a terminal."""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import REPOSITORY, Pool, in_child, requires_root, run

from kvfs import cli
from kvfs.cli.mounting import _watch_daemon
from kvfs.daemon.reporter import log_to_file
from kvfs.errors import PoolError
from kvfs.pool import nvme_tcp
from kvfs.pool.config import load
from kvfs.pool.directory import open_own
from kvfs.pool.lock import locked
from kvfs.pool.making import FormatRequest, format_devices
from kvfs.pool.opening import write_config
from kvfs.status import top
from kvfs.status.document import offline_status
from kvfs.status.text import render_device_list, render_status
from kvfs.store.fsck import fsck

MALLORY = 12_321
PRECIOUS = b"another's\n"
# A colour, a window's title, a line of its own.
NAME = "a\x1b[31m\x1b]0;x\x07\nb"
SIZE = 32 << 20


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_bytes(PRECIOUS)
    return path


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    format_devices(FormatRequest(path, files=1, file_size=SIZE))
    return path


@pytest.fixture
def mallorys() -> Iterator[Path]:
    """A directory of Mallory's, whom root's temporary ones do not let in."""
    requires_root()
    path = Path(tempfile.mkdtemp(prefix="kvfs-mallory-"))
    try:
        os.chown(path, MALLORY, MALLORY)
        yield path
    finally:
        shutil.rmtree(path)


@pytest.mark.parametrize("name", ["kvfs.log", "kvfs.pid", "lock"])
def test_a_planted_link_is_not_written_through(name: str, precious: Path, own_pool: Callable[..., Pool]) -> None:
    pool = own_pool(files=1, size="64M", started=False)
    (pool.path / name).unlink(missing_ok=True)
    (pool.path / name).symlink_to(precious)
    failed = run(sys.executable, "-m", "kvfs", "mount", pool.path, pool.mount, check=False)
    assert failed.returncode == 1
    assert f"{pool.path / name}: is a symbolic link" in failed.stderr
    assert precious.read_bytes() == PRECIOUS
    assert not os.path.ismount(pool.mount)


def test_the_configuration_is_not_written_through_a_link(pool: Path, precious: Path) -> None:
    config = load(pool)
    assert config is not None
    (pool / "pool.toml.new").symlink_to(precious)
    with locked(pool), pytest.raises(PoolError, match="symbolic link"):
        write_config(pool, config)
    assert precious.read_bytes() == PRECIOUS


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kvfs.log")
    with pytest.raises(PoolError, match=r"kvfs\.log"):
        open_own(tmp_path / "kvfs.log", os.O_WRONLY | os.O_CREAT, 0o644)
    with pytest.raises(PoolError, match="not a plain file"):
        open_own(tmp_path / "kvfs.log", os.O_RDWR | os.O_CREAT, 0o644)


def test_a_log_that_was_rotated_is_made_anew_and_never_through_a_link(tmp_path: Path, precious: Path) -> None:
    path = tmp_path / "kvfs.log"

    def rotate() -> None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  pytest's own leads elsewhere
        logging.getLogger().setLevel(logging.INFO)
        log_to_file(path)
        log = logging.getLogger("kvfs.test")
        log.info("one")
        path.rename(tmp_path / "kvfs.log.1")
        log.info("two")
        path.rename(tmp_path / "kvfs.log.2")
        path.symlink_to(precious)
        log.info("three")
        path.unlink()
        log.info("four %s", NAME)
        logging.shutdown()

    in_child(rotate)
    assert precious.read_bytes() == PRECIOUS
    assert [line.split()[-1] for line in (tmp_path / "kvfs.log.2").read_text().splitlines()] == ["two"]
    # The error goes where the daemon's standard error goes.
    first = (tmp_path / "kvfs.log.1").read_text().splitlines()
    assert [line.split()[-1] for line in first] == ["one", "three"]
    last = path.read_text().splitlines()
    assert len(last) == 1 and last[0].endswith(r"four a\x1b[31m\x1b]0;x\x07\nb")


@pytest.mark.parametrize("verb", ["mount", "format", "fsck", "status"])
def test_root_refuses_a_pool_of_another_user(verb: str, pool: Path, tmp_path: Path) -> None:
    requires_root()
    (pool / "lock").unlink(missing_ok=True)
    os.chown(pool, MALLORY, MALLORY)
    (tmp_path / "mnt").mkdir()
    more = {"mount": [tmp_path / "mnt"], "format": ["--files", "1", "--size", "32M", "--force"]}.get(verb, [])
    failed = run(sys.executable, "-m", "kvfs", verb, pool, *more, check=False)
    assert failed.returncode == 1
    assert f"{pool}: belongs to user {MALLORY}" in failed.stderr
    assert sorted(entry.name for entry in pool.iterdir()) == ["devices", "index", "pool.toml"]


def test_root_refuses_a_pool_that_others_can_write(pool: Path) -> None:
    requires_root()
    for mode in (0o770, 0o702):
        pool.chmod(mode)
        with pytest.raises(PoolError, match=f"mode {mode:04o}") as refused, locked(pool):
            pass
        assert refused.value.errno == errno.EPERM
    pool.chmod(0o755)
    with locked(pool):
        pass


@pytest.mark.parametrize("name", ["index", "devices"])
def test_root_refuses_a_pool_in_which_others_have_a_directory(pool: Path, name: str) -> None:
    """As one that was another user's, of which root was given the outermost directory alone."""
    requires_root()
    os.chown(pool / name, MALLORY, MALLORY)
    with pytest.raises(PoolError, match=rf"{name}: belongs to user {MALLORY}.*chown -R root {pool}"), locked(pool):
        pass
    os.chown(pool / name, 0, 0)
    (pool / name).chmod(0o777)
    with pytest.raises(PoolError, match=rf"{name}: mode 0777"), locked(pool):
        pass


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "incomplete"])
def test_a_link_that_was_planted_in_the_index_is_not_written_through(pool: Path, precious: Path, name: str) -> None:
    requires_root()
    path = pool / "index" / name
    path.unlink(missing_ok=True)
    path.symlink_to(precious)
    with pytest.raises(PoolError, match=f"{path}: not a plain file of root's"):
        fsck(pool)
    assert precious.read_bytes() == PRECIOUS


def test_a_pipe_in_the_place_of_the_pid_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kvfs.pid")
    assert _watch_daemon(tmp_path) is None


def test_quickstart_uses_no_directory_that_others_prepared(tmp_path: Path, precious: Path) -> None:
    requires_root()

    def quickstart(base: Path) -> str:
        # `true` stands for kvfs: whatever it was asked to do would succeed.
        environment = {"KVFS_QUICKSTART_SKIP_SETUP": "1", "KVFS": "/bin/true", "KVFS_QUICKSTART_DIR": str(base)}
        failed = run(REPOSITORY / "tools/quickstart", environment=environment, check=False)
        assert failed.returncode == 1
        return failed.stderr

    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "mallorys").mkdir()
    os.chown(tmp_path / "mallorys", MALLORY, MALLORY)
    (tmp_path / "file").symlink_to(precious)
    for path in (tmp_path / name for name in ("link", "open", "mallorys", "file")):
        assert f"{path}: not a directory that we own and nobody else can write" in quickstart(path)
    assert not any((tmp_path / "real").iterdir()) and not any((tmp_path / "mallorys").iterdir())


def test_a_user_has_a_pool_of_his_own(mallorys: Path) -> None:
    def use() -> bool:
        pool = mallorys / "pool"
        format_devices(FormatRequest(pool, files=1, file_size=SIZE))
        return not fsck(pool).findings

    assert in_child(use, user=MALLORY, group=MALLORY)


def test_root_has_a_pool_beside_those_of_others(mallorys: Path) -> None:
    mallorys.chmod(0o1777)
    format_devices(FormatRequest(mallorys / "pool", files=1, file_size=SIZE))
    with locked(mallorys / "pool"):
        pass


def test_names_move_no_cursor(tmp_path: Path) -> None:
    device, pool = tmp_path / NAME, tmp_path / "pool"
    with open(device, "wb") as file:
        file.truncate(SIZE)
    # As /dev/disk/by-id has them: a link that the one who runs the pool chose.
    (tmp_path / "link").symlink_to(device)
    format_devices(FormatRequest(pool, devices=(tmp_path / "link",)))
    (tmp_path / "link").unlink()
    (pool / "pool.toml").unlink()
    run(sys.executable, "-m", "kvfs", "import", pool, "--device", device)
    escaped = r"a\x1b[31m\x1b]0;x\x07"
    document = offline_status(pool)
    for text in (render_status(document), "\n".join(render_device_list(document))):
        assert escaped in text
        assert all(line.isprintable() for line in text.splitlines())
    (tmp_path / f"pool {NAME}").symlink_to(pool)
    for command in (
        ("status", pool / NAME),
        ("doctor", device),
        ("fsck", tmp_path / f"pool {NAME}"),
        ("format", tmp_path / "two", "--device", device),
    ):
        done = run(sys.executable, "-m", "kvfs", *command, check=False)
        assert escaped in done.stdout + done.stderr
        assert all(line.isprintable() for line in (done.stdout + done.stderr).splitlines())


def test_what_an_enclosure_calls_its_subsystems_moves_no_cursor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = nvme_tcp.Subsystem("nqn." + NAME, "nvm", "tcp", "10.0.0.7", "4420")
    monkeypatch.setattr(nvme_tcp, "discover", lambda url: [found])
    assert cli.main(["discover", "10.0.0.7"]) == 0
    assert capsys.readouterr().out == "tcp 10.0.0.7:4420 nvm nqn.a\\x1b[31m\\x1b]0;x\\x07\\nb\n"


def test_paths_in_a_live_view_move_no_cursor() -> None:
    console = pytest.importorskip("rich.console")
    found = {"pool": {"path": NAME, "state": "mounted"}, "mounts": [{"mountpoint": f"/mnt/{NAME}"}]}
    screen = console.Console(file=io.StringIO(), width=200)
    screen.print(top.view(found, {}, top.Controls(), 24))
    lines = screen.file.getvalue().splitlines()
    assert lines[0].count(r"a\x1b[31m\x1b]0;x\x07\nb") == 2
    assert all(line.isprintable() for line in lines)
