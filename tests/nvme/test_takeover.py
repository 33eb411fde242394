"""Two daemons on one enclosure: no lock of this machine is between them, only what stands on the namespaces."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
from enclosure import Enclosure
from helpers import MIB, REPOSITORY, CommandError, Pool, detach
from load import content, files, urls

import kvfs
from kvfs.errors import DeviceError
from kvfs.pool import fence, nvme_tcp
from kvfs.pool.format import BEAT_OFFSET

NQN = "nqn.2026-11.test:a"


@contextlib.contextmanager
def second_directory(pool: Pool) -> Iterator[tuple[pathlib.Path, pathlib.Path]]:
    """Another directory of the same pool, and a place to mount it."""
    path, mount = pool.base / "second", pool.base / "second-mount"
    mount.mkdir()
    pool.command("import", str(path), *[word for device in pool.devices for word in ("--device", device)])
    try:
        yield path, mount
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((path / "kvfs.pid").read_text()), signal.SIGKILL)
        detach(mount)


def test_an_enclosure_in_use_is_refused_also_while_its_daemon_stands_still_and_not_after_its_death() -> None:
    with files(2) as paths, Enclosure({NQN: paths}) as enclosure:
        with Pool(devices=urls(enclosure.port, NQN, 2)) as pool, second_directory(pool) as (path, mount):
            (pool.mount / "a").write_bytes(content(1, MIB))
            who = f"in use by another kvfs: pid {pool.pid()}, pool {pool.path}, mounted at {pool.mount}"
            device = pool.devices[0]
            refused = [
                ["mount", str(path), str(mount)], ["fsck", str(path)],
                ["format", str(pool.base / "new"), "--device", device, "--force"],
            ]  # fmt: skip
            for words in refused:
                with pytest.raises(CommandError, match=who):
                    pool.command(*words)
            os.kill(pool.pid(), signal.SIGSTOP)
            try:
                with pytest.raises(CommandError, match=who):
                    pool.command(*refused[0])
            finally:
                os.kill(pool.pid(), signal.SIGCONT)
            assert (pool.mount / "a").read_bytes() == content(1, MIB)
            os.sync()
            pool.kill()
            said = pool.command(*refused[0]).stderr
            assert "watching" not in said and "ending" not in said, said
            assert (mount / "a").read_bytes() == content(1, MIB)
            pool.command("umount", str(mount))


def test_force_takes_an_enclosure_from_a_daemon_of_this_machine_which_ends_at_once() -> None:
    with files(2) as paths, Enclosure({NQN: paths}) as enclosure:
        with Pool(devices=urls(enclosure.port, NQN, 2)) as pool, second_directory(pool) as (path, mount):
            (pool.mount / "a").write_bytes(content(1, MIB))
            pid = pool.pid()
            said = pool.command("mount", str(path), str(mount), "--force").stderr
            assert f"taken over by --force: in use by another kvfs: pid {pid}" in said, said
            pool.wait_dead(pid)
            log = pool.log_tail()
            assert "CRITICAL" in log and f"pool {path}, mounted at {mount}" in log, log
            assert (mount / "a").read_bytes() == content(1, MIB)
            pool.command("umount", str(mount))


def test_of_two_mounts_of_an_enclosure_at_the_same_moment_at_most_one_succeeds() -> None:
    with files(2) as paths, Enclosure({NQN: paths}) as enclosure:
        with Pool(devices=urls(enclosure.port, NQN, 2), started=False) as pool, second_directory(pool) as (path, mount):
            mounts = [
                subprocess.Popen([sys.executable, "-m", "kvfs", "mount", str(source), str(at)], cwd=REPOSITORY,
                                 stderr=subprocess.PIPE, text=True)
                for source, at in ((pool.path, pool.mount), (path, mount))
            ]  # fmt: skip
            said = [process.communicate(timeout=120)[1] for process in mounts]
            codes = [process.returncode for process in mounts]
            assert sorted(codes) in ([0, 1], [1, 1]), said
            assert all("in use by another kvfs" in words for words, code in zip(said, codes, strict=True) if code), said
            # The pool is whole, whoever the owner was.
            for at, code in zip((pool.mount, mount), codes, strict=True):
                if code == 0:
                    pool.command("umount", str(at))
            pool.start()
            (pool.mount / "a").write_bytes(content(1, MIB))
            pool.umount()
            assert "nothing is damaged" in pool.command("fsck", str(pool.path)).stdout


HOSTS = ["nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-00000000000a",
         "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-00000000000b"]  # fmt: skip


def reservations(enclosure: Enclosure) -> list[tuple[int, bool]]:
    return [(one["registered"], one["reserved"]) for one in enclosure.status()["namespaces"]]


def test_a_mount_reserves_its_namespaces_for_its_host_and_gives_them_back() -> None:
    with files(2) as paths, Enclosure({NQN: paths}) as enclosure:
        devices = urls(enclosure.port, NQN, 2)
        assert reservations(enclosure) == [(0, False)] * 2
        with Pool(devices=[f"{url}&hostnqn={HOSTS[0]}" for url in devices]) as pool:
            assert reservations(enclosure) == [(1, True)] * 2
            # Native clients have the same host identifier: they write.
            with kvfs.connect(pool.mount, namespace="n", timeout_s=20) as client:
                client.put([(b"key", content(1, MIB))])
            other = nvme_tcp.Controller(f"{devices[0]}&hostnqn={HOSTS[1]}")
            before = other.read(MIB, 4096)
            with pytest.raises(DeviceError, match="status 0x4083") as caught:
                other.write(MIB, b"x" * 4096)
            assert caught.value.errno == errno.EBADE
            assert other.read(MIB, 4096) == before
            other.close()
            # A daemon that was killed leaves it to the next one of its host.
            pool.kill()
            assert reservations(enclosure) == [(1, True)] * 2
            pool.remount()
            assert reservations(enclosure) == [(1, True)] * 2
            with kvfs.connect(pool.mount, namespace="n", timeout_s=20) as client:
                client.put([(b"other", content(2, MIB))])
            pool.umount()
            assert reservations(enclosure) == [(0, False)] * 2


def test_another_host_preempts_the_reservation_and_the_first_can_write_nothing_more() -> None:
    with files(2) as paths, Enclosure({NQN: paths}) as enclosure:
        devices = urls(enclosure.port, NQN, 2)
        with Pool(devices=[f"{url}&hostnqn={HOSTS[0]}" for url in devices]) as pool:
            # Its connections are the first host's as long as they last; the daemon stands still.
            first = nvme_tcp.Controller(pool.devices[0])
            beat = first.read(BEAT_OFFSET, 4096)
            key = fence.key_of(uuid.UUID(bytes=beat[80:96]))
            os.kill(pool.pid(), signal.SIGSTOP)
            try:
                second = [nvme_tcp.Controller(f"{url}&hostnqn={HOSTS[1]}") for url in devices]
                for controller in second:
                    fence.reserve(controller.reservation, 22, key)
                assert reservations(enclosure) == [(1, True)] * 2
                with pytest.raises(DeviceError, match="status 0x4083"):
                    first.write(BEAT_OFFSET, beat)
                second[0].write(MIB, second[0].read(MIB, 4096))
            finally:
                os.kill(pool.pid(), signal.SIGCONT)
            for controller in second:
                fence.give_back(controller.reservation, 22)
                controller.close()
            first.close()
            assert reservations(enclosure) == [(0, False)] * 2
