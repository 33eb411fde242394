"""Descriptors of libkvfs in somebody's process: never 0 to 2, gone after an unmount, and limits that are told of."""

import contextlib
import errno
import os
import pathlib
import resource
import subprocess
import sys

import pytest
from helpers import MIB, REPOSITORY, Pool, content, in_child, wait_until

import kvfs
from kvfs.errors import ClientError, NotMountedError, PutError

# In the child: `said` is a file for its findings.
_CLOSED = """
import os, sys
said = os.fdopen({writing}, "w")
import kvfs
from kvfs.connectors.common import Connection, Options
client = kvfs.connect({mount!r}, "n", timeout_s=20)
connection = Connection(Options({mount!r}, timeout_s=20), "n", engine="test")
with client.queue() as queue:
    queue.put([(b"a", b"of a queue" * 1000)])
    stored = client.put([(b"k", b"v" * 100_000)])
    got = [len(client.get(b"k"))]
client.prestage([b"k"])
events = kvfs.events({mount!r}, "n", timeout_s=20)
low = [fd for fd in range(3) if os.path.exists(f"/proc/self/fd/{{fd}}")]
print(stored, got, low, file=said)
for fd in range(3):
    try:
        os.write(fd, b"a warning of some C library on stderr\\n" + bytes(4058))
    except OSError as error:
        print(error.errno, file=said)
events.close()
client.close()
connection.close()
said.close()
"""


def test_a_process_without_standard_streams_has_nothing_of_kvfs_in_their_place(own_pool):
    pool = own_pool(files=2, size="128M")
    reading, writing = os.pipe()
    script = _CLOSED.format(writing=writing, mount=str(pool.mount))
    words = ["sh", "-c", 'exec "$0" -c "$1" 0>&- 1>&- 2>&-', sys.executable, script]
    process = subprocess.Popen(words, pass_fds=[writing], cwd=REPOSITORY)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read().split("\n")
    assert process.wait(60) == 0
    assert said == ["[True] [100000] []", "9", "9", "9", ""]
    pool.umount()
    assert "nothing is damaged" in pool.command("fsck", str(pool.path)).stdout


@pytest.mark.parametrize("shut", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_daemon_starts_without_standard_streams(own_pool, shut):
    pool = own_pool(files=1, size="64M", started=False)
    words = ["sh", "-c", f'exec "$0" -m kvfs mount "$1" "$2" {shut}', sys.executable, pool.path, pool.mount]
    done = subprocess.run(words, cwd=REPOSITORY, env={**os.environ, **pool.environment}, timeout=120, check=False)
    assert done.returncode == 0
    file = pool.mount / "file"
    file.write_bytes(b"data")
    opened = pathlib.Path(f"/proc/{pool.pid()}/fd")
    # /dev/null, and the log.
    assert os.readlink(opened / "0") == "/dev/null"
    assert {os.readlink(opened / fd) for fd in "12"} == {str(pool.path / "kvfs.log")}
    assert file.read_bytes() == b"data"


def opened(pool: Pool) -> set[str]:
    """Files of the pool that this process has open or mapped."""
    paths = set()
    for link in pathlib.Path("/proc/self/fd").iterdir():
        try:
            paths.add(os.readlink(link))
        except FileNotFoundError:  # the listing's own
            continue
    maps = pathlib.Path("/proc/self/maps").read_text()
    return {path for path in paths if path.startswith(str(pool.path))} | (
        {"table"} if "kvfs-block-table" in maps else set()
    )


def test_an_idle_client_lets_go_of_a_pool_that_was_unmounted(own_pool):
    pool = own_pool(files=2, size="128M")
    client = kvfs.connect(pool.mount, "n", timeout_s=20)
    with client, client.queue() as queue:
        assert client.put([(b"k", content(MIB, 1))]) == [True]
        queue.get([(b"k", bytearray(MIB))])
        assert len(opened(pool)) == 3
        with client.lease([b"k"], 60) as lease:
            assert lease.held == [True]
            pool.umount()
            wait_until(lambda: not opened(pool), "devices and table are let go of")
        # Nothing of it is read any more, and all is well once it is back.
        with pytest.raises(NotMountedError, match="unmounted"):
            client.exists([b"k"])
        with pytest.raises(NotMountedError, match="unmounted"):
            client.put([(b"k", b"v")])
        assert client.information().connected is False
        pool.start()
        assert client.get(b"k") == content(MIB, 1)
        assert len(opened(pool)) == 3
        # A daemon that dies leaves its table, which is right until another comes.
        pool.kill()
        assert client.get(b"k") == content(MIB, 1) and len(opened(pool)) == 3
        pool.remount()
        pool.umount()
        wait_until(lambda: not opened(pool), "devices of a daemon whose successor came and went")
        pool.start()
        assert client.get(b"k") == content(MIB, 1)


def test_a_client_that_is_out_of_descriptors_says_whose_limit_it_is(directory):
    def connect() -> int:
        """How many descriptors short it has failed."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        filling = []
        with contextlib.suppress(OSError):
            while True:
                filling.append(os.dup(0))
        for failed in range(30):
            try:
                kvfs.connect(directory, "n", timeout_s=20).close()
            except ClientError as error:
                assert error.errno == errno.EMFILE, error
                assert "all the 256 descriptors that it may have (RLIMIT_NOFILE)" in str(error)
            else:
                return failed
            os.close(filling.pop())
            # It has let go of all that it got.
            filling.append(os.dup(0))
            os.close(filling.pop())
        raise AssertionError("never connected")

    # Without one for /proc/self/mountinfo, the socket, the block table, and each device.
    assert in_child(connect) >= 4


def test_a_limit_of_file_sizes_is_no_matter_of_the_pool(own_pool):
    pool = own_pool(files=1, size="128M")

    def put() -> None:
        with kvfs.connect(pool.mount, "n", timeout_s=20) as client:
            resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
            with pytest.raises(PutError) as error:
                client.put([(b"k", content(100_000, 1))])
            (failure,) = error.value.failed.values()
            assert failure.errno == errno.EOVERFLOW and "ulimit -f" in str(failure)

    in_child(put)
    with kvfs.connect(pool.mount, "n", timeout_s=20) as client, pytest.raises(PutError, match="larger than the pool"):
        client.put([(b"k", bytes(200 * MIB))])
