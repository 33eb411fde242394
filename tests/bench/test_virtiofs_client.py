"""The front end of `tools/bench` for virtio-fs: right bytes from an export, stores that the mount reads, liars named.

native/test/test_vhost_fuse.c has a double of a back end that lies in every field; here are whole programs.
"""

from __future__ import annotations

import contextlib
import pathlib
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from helpers import MIB, REPOSITORY, assert_same, content, read_file, slowness, write_file

from benches.common import BenchError
from benches.vhost import driver

PAGE = 4096
SIZE = 9 * MIB + 5000  # no multiple of a page, nor of a request
GET_FEATURES, ANSWER = 1, 5


@pytest.fixture(scope="module")
def client() -> pathlib.Path:
    subprocess.run([REPOSITORY / "tools/bench_clients"], check=True, capture_output=True, timeout=300)
    return REPOSITORY / "build/bench/virtiofs_client"


def test_it_reads_the_bytes_of_an_export_and_stores_blocks_that_the_mount_reads(own_pool, client, tmp_path):
    pool = own_pool(files=2, size="128M", started=False)
    path = pool.base / "guest.sock"
    pool.start("--virtiofs", str(path))
    block = content(SIZE)
    (pool.mount / "a").mkdir()
    write_file(pool.mount / "a/block", block)
    (pool.mount / "stored").mkdir()
    with driver(client, path) as front_end:
        assert front_end.ask(f"copy a/block {tmp_path / 'copied'}")["bytes"] == SIZE
        assert_same(read_file(tmp_path / "copied"), block, "the block, by virtio-fs")
        for case in ("read-4k", "read-1m", "read-4m"):
            done = front_end.ask(f"{case} a/block 3 0.05")
            assert done["case"] == case and done["operations"] >= 3
        assert front_end.ask("store-2m stored 2 60 5")["operations"] == 5
    assert sorted(entry.name for entry in (pool.mount / "stored").iterdir()) == [f"block-{i}" for i in range(5)]
    assert pool.status()["exports"][0]["descriptor_errors"] == 0
    bodies = [stored(read_file(pool.mount / f"stored/block-{index}"), index) for index in range(5)]
    assert len(bodies[0]) == 2 * MIB and bodies.count(bodies[0]) == 5
    pool.command("umount", str(pool.path))  # the export too


def stored(block: bytes, number: int) -> bytes:
    """A block without the stamps of its pages, which say whose page it is."""
    assert len(block) == 2 * MIB
    kept = bytearray(block)
    for page in range(2 * MIB // PAGE):
        half, offset = divmod(page * PAGE, MIB)
        assert struct.unpack_from("<QQ", block, page * PAGE) == (2 * number + half, offset)
        kept[page * PAGE : page * PAGE + 16] = bytes(16)
    return bytes(kept)


@contextlib.contextmanager
def liar(path: pathlib.Path, answer: bytes) -> Iterator[None]:
    """A double of a back end: it takes one connection, answers its first message by these bytes, and hangs up."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(30)

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(12, socket.MSG_WAITALL)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            thread.join(30)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "the back end closed its socket before it answered message 1"),
        (struct.pack("<IIIQ", GET_FEATURES, ANSWER, 8, 0), "features 0x0: without VERSION_1"),
        (struct.pack("<IIIQ", GET_FEATURES, ANSWER, 4, 0), "of 4 bytes, expected 8"),
        (struct.pack("<IIIQ", GET_FEATURES + 1, ANSWER, 8, 0), "message 1: an answer to 2"),
    ],
    ids=["closed", "no features", "bad length", "other message"],
)
def test_a_back_end_that_lies_is_named_at_once(client, tmp_path, answer: bytes, said: str) -> None:
    path = tmp_path / "liar.sock"
    started = time.monotonic()
    with liar(path, answer), driver(client, path) as front_end, pytest.raises(BenchError) as raised:
        front_end.ask("read-4k a 1 1")
    assert said in str(raised.value) and str(path) in str(raised.value)
    assert time.monotonic() - started < 30 * slowness()


@pytest.mark.parametrize("command", ["read-4k a 0 1", "read-9k a 1 1", "read-4k absent 1 1"])
def test_a_command_that_cannot_be_done_ends_it_with_a_reason(own_pool, client, command: str) -> None:
    pool = own_pool(files=1, size="64M", started=False)
    path = pool.base / "guest.sock"
    pool.command("export", str(pool.path), "--virtiofs", str(path))
    with driver(client, path) as front_end, pytest.raises(BenchError, match="ended with 1: virtiofs_client: "):
        front_end.ask(command)
