"""A pool that is mounted read-only: native clients read and lease, and neither store nor delete."""

import errno
import logging
import socket
import struct

import pytest
from helpers import Pool, content, wait_until

import kvfs
from kvfs.connectors.common import Connection, Options, State
from kvfs.errors import ClientError
from kvfs.frontend.wire import VERSIONS

DATA = content(100_000, 1)


@pytest.fixture
def pool(own_pool) -> Pool:
    pool = own_pool(files=2, size="128M")
    with kvfs.connect(pool.mount, "n", timeout_s=20) as client:
        assert client.put([(b"k", DATA)]) == [True]
    pool.umount()
    pool.start("--options", "ro")
    return pool


def ended(queue):
    done = []
    wait_until(lambda: done.extend(queue.drain()) or done, "the end of a batch")
    return done


def test_a_client_reads_and_leases_and_neither_stores_nor_deletes(pool):
    for path in (pool.mount, pool.path):
        with kvfs.connect(path, "n", timeout_s=20) as client, client.queue() as queue:
            assert not client.information().writable
            assert client.get(b"k") == DATA
            with client.lease([b"k"], 10) as lease:
                assert lease.held == [True]
            assert client.touch([b"k"]) == 1
            for write in (lambda: client.put([(b"k", b"v")]), lambda: client.delete([b"k"])):
                with pytest.raises(ClientError, match="mounted read-only") as error:
                    write()
                assert error.value.errno == errno.EROFS
            ticket = queue.put([(b"l", b"v")])
            (done,) = ended(queue)
            assert done.id == ticket and done.error is not None and done.error.errno == errno.EROFS
            assert client.exists([b"k", b"l"]) == [True, False]
    with pytest.raises(OSError, match="Read-only") as error:
        (pool.mount / "file").write_bytes(b"data")
    assert error.value.errno == errno.EROFS
    pool.umount()
    pool.start()
    with kvfs.connect(pool.mount, "n", timeout_s=20) as client:
        assert client.put([(b"l", b"v")]) == [True] and client.delete([b"k"]) == [True]


def test_a_client_that_says_nothing_of_rights_is_refused_each_change_and_has_no_writable_device(pool):
    """On the wire: type 3 is RESERVE, 4 COMMIT, 5 DELETE."""
    with socket.socket(socket.AF_UNIX) as wire:
        wire.settimeout(30)
        wire.connect(str(pool.path / "control.sock"))
        wire.sendall(struct.pack("<8sIIII", b"KVFSCLI1", VERSIONS[-1], 0, 20_000, 0))
        stream = wire.makefile("rb")
        size, kind, _, status, _ = struct.unpack("<IHHiI", stream.read(16))
        assert (kind, status) == (1, 0) and struct.unpack_from("<II", stream.read(size)) == (VERSIONS[-1], 0)
        assert struct.unpack("<IHHiI", stream.read(16))[1] == 2
        for kind in (3, 4, 5):
            wire.sendall(struct.pack("<IHHiI", 16, kind, 0, 0, kind) + bytes(16))
            size, answered, _, status, number = struct.unpack("<IHHiI", stream.read(16))
            text = stream.read(size)
            assert (answered, number, status) == (kind, kind, -errno.EROFS) and b"mounted read-only" in text


def test_a_connector_loads_and_says_once_that_nothing_is_stored(pool, caplog):
    caplog.set_level(logging.WARNING)
    connection = Connection(Options(str(pool.mount), timeout_s=20), "n", engine="test")
    try:
        assert connection.state is State.UP
        for _ in range(3):
            assert connection.put([(b"l", b"v")]) == [False]
            connection.submit_put([(b"m", b"v")])
            assert connection.wait(30)
            memory = bytearray(len(DATA))
            assert connection.get_into([(b"k", memory)]) == [len(DATA)] and memory == DATA
            assert connection.delete([b"k"]) == [False]
        assert connection.state is State.UP and connection.counters.stored == 0
    finally:
        connection.close()
    assert len([record for record in caplog.records if "read-only" in record.getMessage()]) == 1
