"""The test enclosure keeps to the specifications, survives hosts that do not, and goes wrong only as it is told to."""

import contextlib
import itertools
import os
import random
import socket
import struct
import subprocess
import threading
import time

import pytest
from enclosure import NQN, Enclosure, EnclosureError
from helpers import slowness, wait_until
from host_double import (
    C2H_DATA,
    H2C_DATA,
    R2T,
    RESPONSE,
    SUCCESS,
    ClosedError,
    DigestError,
    Host,
    Queue,
    StatusError,
    TermError,
    crc32c,
)

# They test the enclosure's double: needed where that changes.
pytestmark = pytest.mark.slow

MIB = 1 << 20
SIZE = 8 * MIB
BLOCK = 4096
OTHER = "nqn.2026-01.test:other"
DISCOVERY = "nqn.2014-08.org.nvmexpress.discovery"
MEDIA = random.Random(5).randbytes(SIZE)
HEADER_FIELD, SEQUENCE, HEADER_DIGEST, RANGE, LIMIT = 1, 2, 3, 4, 5


def sanitizers():
    """Those that gcc has here."""
    for name, library in (("address", "libasan.so"), ("thread", "libtsan.so")):
        found = subprocess.run(
            ["gcc", f"-print-file-name={library}"], capture_output=True, text=True, check=True
        ).stdout
        missing = [] if os.path.isabs(found.strip()) else [pytest.mark.skip(f"gcc without {library}")]
        yield pytest.param(name, marks=missing)


@pytest.fixture
def files(tmp_path):
    """Two namespaces' files: the first holds MEDIA, the second zeros."""
    (tmp_path / "first").write_bytes(MEDIA)
    with (tmp_path / "second").open("wb") as file:
        file.truncate(SIZE)
    return [tmp_path / "first", tmp_path / "second"]


@pytest.fixture
def enclosure(files):
    with Enclosure({NQN: files}) as running:
        yield running


@pytest.fixture
def host(enclosure):
    with Host(enclosure.port, NQN) as connected:
        yield connected


# ---- what it is for ----


@pytest.mark.parametrize("digests", range(4), ids=("plain", "header", "data", "both"))
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--no-success",),
        ("--c2h-size", "8192", "--r2t-size", "12288", "--max-h2c-data", "4096", "--cpda", "3"),
        ("--block-size", "512", "--in-capsule", "1024"),
    ],
    ids=("defaults", "no-success", "split", "small"),
)
def test_what_is_written_is_read_back_and_is_in_the_file(files, digests, options):
    rng = random.Random(digests)
    unit = 512 if "--block-size" in options else BLOCK
    model = bytearray(MEDIA)
    with (
        Enclosure({NQN: files}, *options) as enclosure,
        Host(enclosure.port, NQN, digests=digests, hpda=digests * 7) as host,
    ):
        queue = host[1]
        for _ in range(24):
            count = rng.choice((1, 2, 3, 16, 33)) * (8 if unit == 512 else 1)
            block = rng.randrange(SIZE // unit - count)
            if rng.random() < 0.5:
                data = rng.randbytes(count * unit)
                in_capsule = len(data) <= (1024 if unit == 512 else 16384) and rng.random() < 0.5
                answer = queue.write(1, block, data, in_capsule=in_capsule, block_size=unit)
                assert any(kind == R2T for kind, _ in answer.pdus) != in_capsule
                model[block * unit : block * unit + len(data)] = data
            else:
                assert queue.read(1, block, count, block_size=unit) == model[block * unit : (block + count) * unit]
        assert queue.read(2, 3, 4, block_size=unit) == bytes(4 * unit)
    assert files[0].read_bytes() == model


def test_many_commands_at_once_end_each_with_its_own_data(host):
    queue = host[1]
    blocks = random.Random(1).sample(range(SIZE // BLOCK - 8), 100)
    cids = {queue.submit_read(1, block, 1 + block % 8): block for block in blocks}
    for cid, block in cids.items():  # take() keeps what ends meanwhile
        while queue.waiting[cid].answer.pdus == []:
            queue.take()
        assert bytes(queue.waiting[cid].into) == MEDIA[block * BLOCK : (block + 1 + block % 8) * BLOCK]


def test_a_read_ends_with_its_last_data_only_where_the_host_allows_that(enclosure):
    for cattr, ends in ((4, [(C2H_DATA, SUCCESS)]), (0, [(C2H_DATA, 0), (RESPONSE, 0)])):
        with Host(enclosure.port, NQN, cattr=cattr) as host:
            cid = host[1].submit_read(1, 0, 2)
            answer = host[1].wait(cid)
            assert [(kind, flags & SUCCESS) for kind, flags in answer.pdus] == ends


def test_the_controller_describes_itself(enclosure, files):
    with Host(enclosure.port, NQN) as host:
        admin = host.admin
        assert admin.property_get(0, eight=True) & 0xFFFF == 127
        assert admin.property_get(8) == 0x10400
        identity = admin.identify(1)
        assert struct.unpack_from("<H", identity, 78)[0] == admin.cntlid
        assert identity[768:1024].rstrip(b"\0").decode() == NQN
        assert struct.unpack_from("<IIH", identity, 1792) == ((64 + 16384) // 16, 1, 0)
        assert struct.unpack_from("<I", identity, 516)[0] == 2
        assert struct.unpack("<1024I", admin.identify(2))[:3] == (1, 2, 0)
        namespace = admin.identify(0, 1)
        assert struct.unpack_from("<QQ", namespace) == (SIZE // BLOCK, SIZE // BLOCK)
        assert 1 << namespace[128 + 2] == BLOCK
        descriptors = admin.identify(3, 1)
        assert descriptors[:2] == b"\x02\x10" and descriptors[4:20] == namespace[104:120] != bytes(16)
        granted = admin.wait(admin.submit(9, 0, struct.pack("<II", 7, 9 << 16 | 5))).dw0
        assert granted == 5 << 16 | 5
        assert admin.wait(admin.submit(10, 0, struct.pack("<I", 7))).dw0 == granted
        assert len(admin.log_page(2, 512)) == 512
        with pytest.raises(StatusError) as caught:
            admin.identify(0, 3)
        assert caught.value.code == 0x00B


def test_the_discovery_log_names_every_subsystem(files):
    with Enclosure({NQN: files[:1], OTHER: files[1:]}) as enclosure, Queue(enclosure.port, DISCOVERY) as queue:
        queue.enable()
        assert queue.identify(1)[111] == 2
        count = struct.unpack_from("<Q", queue.log_page(0x70, 1024), 8)[0]
        entries = queue.log_page(0x70, 1024 * count, 1024)
        found = [entries[at : at + 1024] for at in range(0, len(entries), 1024)]
        assert [entry[256:512].rstrip(b"\0").decode() for entry in found] == [NQN, OTHER]
        assert {(entry[0], entry[1], entry[2]) for entry in found} == {(3, 1, 2)}
        assert {entry[32:64].rstrip(b"\0 ") for entry in found} == {b"%d" % enclosure.port}
        assert {entry[512:768].rstrip(b"\0 ") for entry in found} == {b"127.0.0.1"}
        with pytest.raises(StatusError):
            Queue(enclosure.port, DISCOVERY, qid=1, cntlid=queue.cntlid)


def test_zeroes_and_deallocated_blocks_read_as_zeros(host, files):
    queue = host[1]
    queue.wait(queue.submit(8, 1, struct.pack("<QI", 10, 3)))
    ranges = struct.pack("<IIQ", 0, 2, 100) + struct.pack("<IIQ", 0, 1, 200)
    queue.wait(queue.submit(9, 1, struct.pack("<II", 1, 4), write=ranges, in_capsule=True))
    # A list may be longer than what counts of it, as Linux's always is.
    queue.wait(queue.submit(9, 1, struct.pack("<II", 0, 4), write=struct.pack("<IIQ", 0, 1, 300).ljust(BLOCK, b"x")))
    queue.wait(queue.submit(0, 1, b""))
    queue.wait(queue.submit(0, 0xFFFFFFFF, b""))
    model = bytearray(MEDIA)
    for block, count in ((10, 4), (100, 2), (200, 1), (300, 1)):
        assert queue.read(1, block, count) == bytes(count * BLOCK)
        model[block * BLOCK : (block + count) * BLOCK] = bytes(count * BLOCK)
    assert files[0].read_bytes() == model


@pytest.mark.parametrize(
    ("opcode", "nsid", "last", "size", "sgl", "code"),
    [
        (2, 1, struct.pack("<QI", SIZE // BLOCK, 0), BLOCK, None, 0x080),
        (2, 1, struct.pack("<QI", SIZE // BLOCK - 1, 1), 2 * BLOCK, None, 0x080),
        (2, 1, struct.pack("<QI", 2**64 - 1, 0), BLOCK, None, 0x080),
        (8, 1, struct.pack("<QI", SIZE // BLOCK - 1, 1), 0, None, 0x080),
        (2, 3, struct.pack("<QI", 0, 0), BLOCK, None, 0x00B),
        (2, 0, struct.pack("<QI", 0, 0), BLOCK, None, 0x00B),
        (2, 1, struct.pack("<QI", 0, 3), BLOCK, None, 0x00F),
        (2, 1, struct.pack("<QI", 0, 65535), 65536 * BLOCK, None, 0x002),
        (2, 1, struct.pack("<QI", 0, 0), BLOCK, struct.pack("<QI3xB", 0, BLOCK, 0x01), 0x011),
        (2, 1, struct.pack("<QI", 0, 0), BLOCK, struct.pack("<QI3xB", 0, BLOCK, 0x00), 0x011),
        (0x55, 1, b"", 0, None, 0x001),
    ],
    ids=("past", "across", "overflow", "zeroes", "nsid", "nsid0", "length", "mdts", "capsule", "sgl", "opcode"),
)
def test_a_command_that_cannot_be_gets_a_status_and_the_queue_goes_on(host, opcode, nsid, last, size, sgl, code):
    queue = host[1]
    with pytest.raises(StatusError) as caught:
        queue.wait(queue.submit(opcode, nsid, last, read=size, sgl=sgl))
    assert (caught.value.code, caught.value.dnr) == (code, True)
    assert queue.read(1, 7, 1) == MEDIA[7 * BLOCK : 8 * BLOCK]


def test_data_in_a_capsule_of_a_command_that_fails_is_passed_over(host, files):
    queue = host[1]
    data = b"x" * BLOCK
    for last, sgl in (
        (struct.pack("<QI", SIZE // BLOCK, 0), None),
        (struct.pack("<QI", 3, 0), struct.pack("<QI3xB", 1, BLOCK, 1)),
        (struct.pack("<QI", 3, 0), struct.pack("<QI3xB", 0, BLOCK, 0x5A)),
    ):
        with pytest.raises(StatusError):
            queue.wait(queue.submit(1, 1, last, write=data, in_capsule=True, sgl=sgl))
    # Only a part of what is there is the command's.
    queue.wait(
        queue.submit(
            1,
            1,
            struct.pack("<QI", 5, 0),
            write=b"y" * 100 + data + b"z",
            in_capsule=True,
            sgl=struct.pack("<QI3xB", 100, BLOCK, 1),
        )
    )
    assert queue.read(1, 3, 3) == MEDIA[3 * BLOCK : 5 * BLOCK] + data


def test_a_wrong_data_digest_fails_the_command_alone(files):
    with Enclosure({NQN: files}) as enclosure, Host(enclosure.port, NQN, digests=3) as host:
        with pytest.raises(StatusError) as caught:
            host[1].wait(
                host[1].submit(1, 1, struct.pack("<QI", 0, 0), write=bytes(BLOCK), in_capsule=True, data_digest_xor=1)
            )
        assert caught.value.code == 0x022
        assert host[1].read(1, 9, 1) == MEDIA[9 * BLOCK : 10 * BLOCK]


# ---- controllers and queues ----


def test_connect_is_refused_with_the_parameter_at_fault(enclosure):
    data = 1 << 16
    with Host(enclosure.port, NQN) as host:
        cntlid = host.admin.cntlid
        for words, where in (
            ({"nqn": "nqn.none"}, data | 256),
            ({"nqn": NQN, "cntlid": 5}, data | 16),
            ({"nqn": NQN, "size": 1}, 44),
            ({"nqn": NQN, "size": 129}, 44),
            ({"nqn": NQN, "qid": 1, "cntlid": 0x1234}, data | 16),
            ({"nqn": NQN, "qid": 65, "cntlid": cntlid}, 42),
            ({"nqn": NQN, "qid": 2, "cntlid": cntlid, "host": "nqn.another"}, data | 512),
        ):
            with pytest.raises(StatusError) as caught:
                Queue(enclosure.port, **words)
            assert (caught.value.code, caught.value.dw0) == (0x182, where), words
        with pytest.raises(StatusError):
            Queue(enclosure.port, NQN, qid=1, cntlid=cntlid)  # it is there already
    enclosure.wait_connections(0)


def test_io_queues_end_with_their_admin_queue(enclosure):
    with Host(enclosure.port, NQN, queues=3) as host, Host(enclosure.port, NQN) as other:
        host.admin.socket.close()
        for queue in host.queues[1:]:
            with pytest.raises(ClosedError):
                queue.take()
        assert other[1].read(1, 0, 1) == MEDIA[:BLOCK]
        enclosure.wait_connections(2)
        assert enclosure.status()["controllers"] == 1


def test_disabling_a_controller_ends_its_io_queues_and_shutdown_completes(host):
    host.admin.property_set(0x14, 6 << 16 | 4 << 20 | 1 | 1 << 14)
    assert host.admin.property_get(0x1C) >> 2 & 3 == 2
    host.admin.property_set(0x14, 0)
    with pytest.raises(ClosedError):
        host[1].take()
    with pytest.raises(StatusError):
        host.admin.identify(1)
    host.admin.enable()
    assert len(host.admin.identify(1)) == 4096


def test_disconnect_ends_one_queue(host, enclosure):
    host[1].wait(host[1].submit(0x7F, b"\x08\0\0\0", b""))
    with pytest.raises(ClosedError):
        host[1].take()
    with Queue(enclosure.port, NQN, qid=1, cntlid=host.admin.cntlid) as again:
        assert again.read(1, 1, 1) == MEDIA[BLOCK : 2 * BLOCK]


def test_a_host_without_keep_alive_is_dropped_and_one_with_it_is_not(enclosure):
    with Host(enclosure.port, NQN, kato_ms=300) as silent, Host(enclosure.port, NQN, kato_ms=2000) as alive:
        start = time.monotonic()
        while time.monotonic() < start + 4:
            alive.admin.wait(alive.admin.submit(0x18, 0, b""))
            time.sleep(0.05)
        for queue in silent.queues:
            with pytest.raises(ClosedError):
                queue.take()
        assert alive[1].read(1, 0, 1) == MEDIA[:BLOCK]


def test_a_namespace_that_goes_is_told_once_until_the_log_is_read(host, enclosure):
    admin = host.admin
    admin.wait(admin.submit(9, 0, struct.pack("<II", 0x0B, 1 << 8)))
    first, second = admin.submit(0x0C, 0, b""), admin.submit(0x0C, 0, b"")
    enclosure.control(f"detach {NQN} 2")
    assert admin.wait(first).dw0 == 2 | 4 << 16
    assert struct.unpack("<1024I", admin.identify(2))[:2] == (1, 0)
    with pytest.raises(StatusError) as caught:
        host[1].read(2, 0, 1)
    assert caught.value.code == 0x00B
    enclosure.control(f"attach {NQN} 2")
    admin.wait(admin.submit(0x18, 0, b""))  # no second event comes before it
    assert struct.unpack_from("<2I", admin.log_page(4, 4096)) == (2, 0)
    assert admin.wait(second).dw0 == 2 | 4 << 16
    assert host[1].read(2, 0, 1) == bytes(BLOCK)
    for _ in range(4):
        admin.submit(0x0C, 0, b"")
    with pytest.raises(StatusError) as caught:
        admin.wait(admin.submit(0x0C, 0, b""))
    assert caught.value.code == 0x105


def test_abort_ends_a_command_that_is_held_and_no_other(host, enclosure):
    enclosure.control("fault drop op=read count=1")
    cid = host[1].submit_read(1, 0, 1)
    wait_until(lambda: not enclosure.control("faults")["faults"][0]["left"], "the read to come", timeout_s=20)
    for other, aborted in ((cid + 77, False), (cid, True)):
        answer = host.admin.wait(host.admin.submit(8, 0, struct.pack("<HH", 1, other)))
        assert answer.dw0 & 1 == (0 if aborted else 1)
    with pytest.raises(StatusError) as caught:
        host[1].wait(cid)
    assert caught.value.code == 0x007
    assert host[1].read(1, 0, 1) == MEDIA[:BLOCK]


# ---- hosts that do not keep to it ----


def pdu(kind: int, *, hlen: int, plen: int, flags: int = 0, pdo: int = 0, rest: bytes = b"") -> bytes:
    return (struct.pack("<BBBBI", kind, flags, hlen, pdo, plen) + rest).ljust(min(plen, 4096), b"\0")


@pytest.mark.parametrize(
    ("message", "fes"),
    [
        (pdu(4, hlen=72, plen=72), SEQUENCE),
        (pdu(0, hlen=64, plen=128), SEQUENCE),
        (pdu(0, hlen=128, plen=136), SEQUENCE),
        (pdu(0, hlen=128, plen=128, rest=b"\1"), 6),
        (pdu(0, hlen=128, plen=128, rest=b"\0\0\x20"), 6),
        (pdu(9, hlen=24, plen=24), SEQUENCE),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", SEQUENCE),
    ],
    ids=("command", "hlen", "plen", "pfv", "hpda", "r2t", "http"),
)
def test_a_wrong_beginning_ends_the_connection(enclosure, message, fes):
    with Queue(enclosure.port, NQN, greet=False) as queue:
        queue.socket.sendall(message)
        with pytest.raises(TermError) as caught:
            queue.take()
        assert caught.value.fes == fes
        with pytest.raises(ClosedError):
            queue.receive(1)


@pytest.mark.parametrize(
    ("message", "fes"),
    [
        (pdu(0, hlen=128, plen=128), SEQUENCE),
        (pdu(0x42, hlen=24, plen=24), HEADER_FIELD),
        (pdu(5, hlen=24, plen=24), HEADER_FIELD),
        (pdu(4, hlen=64, plen=72), HEADER_FIELD),
        (pdu(4, hlen=72, plen=71), HEADER_FIELD),
        (pdu(4, hlen=72, plen=0), HEADER_FIELD),
        (pdu(4, hlen=72, plen=2**32 - 1, pdo=72), HEADER_FIELD),
        (pdu(4, hlen=72, plen=80, pdo=80), HEADER_FIELD),
        (pdu(4, hlen=72, plen=80, pdo=64), HEADER_FIELD),
        (pdu(4, hlen=72, plen=80, pdo=74), HEADER_FIELD),
        (pdu(4, hlen=72, plen=72, flags=1), HEADER_FIELD),
        (pdu(4, hlen=72, plen=76, flags=2, pdo=72), HEADER_FIELD),
        (pdu(4, hlen=72, plen=72 + 16388, pdo=72), HEADER_FIELD),
        (pdu(6, hlen=24, plen=24), HEADER_FIELD),
        (pdu(6, hlen=24, plen=32, pdo=24, rest=struct.pack("<HHII", 0, 0, 0, 4)), HEADER_FIELD),
        (pdu(6, hlen=24, plen=32, pdo=24, rest=struct.pack("<HHII", 0, 0xFFFF, 0, 8)), HEADER_FIELD),
        (pdu(6, hlen=24, plen=32, pdo=24, rest=struct.pack("<HHII", 9, 3, 0, 8)), HEADER_FIELD),
        (pdu(2, hlen=24, plen=200), HEADER_FIELD),
    ],
    ids=(
        "icreq",
        "type",
        "response",
        "hlen",
        "short",
        "empty",
        "huge",
        "pdo-end",
        "pdo-head",
        "pdo-odd",
        "hdgst",
        "ddgst",
        "capsule",
        "no-data",
        "size",
        "ttag",
        "cid",
        "term",
    ),
)
def test_a_wrong_pdu_ends_its_connection_and_no_other(enclosure, message, fes):
    with Host(enclosure.port, NQN) as host, Host(enclosure.port, NQN) as other:
        host[1].socket.sendall(message)
        with pytest.raises(TermError) as caught:
            host[1].take()
        assert caught.value.fes == fes
        assert other[1].read(1, 4, 1) == MEDIA[4 * BLOCK : 5 * BLOCK]
        host.admin.identify(1)
        enclosure.wait_connections(3)


@pytest.mark.parametrize(
    ("offset", "size", "told", "fes"),
    [
        (0, 8192, None, None),
        (4096, 4096, None, RANGE),
        (0, 8196, None, RANGE),
        (2**32 - 4096, 4096, None, RANGE),
        (0, 4096, 8192, HEADER_FIELD),
    ],
    ids=("right", "ahead", "longer", "wraps", "told"),
)
def test_data_outside_what_was_asked_for_ends_the_connection(enclosure, files, offset, size, told, fes):
    with Host(enclosure.port, NQN) as host:
        queue = host[1]
        cid = queue.submit(1, 1, struct.pack("<QI", 3, 1), read=8192)
        head = queue.receive(24)
        assert head[0] == R2T and struct.unpack_from("<HHII", head, 8)[::3] == (cid, 8192)
        queue.send_data(cid, struct.unpack_from("<H", head, 10)[0], offset, b"n" * size, size=told)
        if fes is None:
            queue.wait(cid)
            return
        with pytest.raises(TermError) as caught:
            queue.take()
        assert caught.value.fes == fes
    assert files[0].read_bytes() == MEDIA


def test_a_wrong_header_digest_ends_the_connection(enclosure):
    with Host(enclosure.port, NQN, digests=1) as host:
        host[1].send(bytes([4]) + bytes(71), digest_xor=1)
        with pytest.raises(TermError) as caught:
            host[1].take()
        assert caught.value.fes == HEADER_DIGEST


def test_more_commands_than_entries_end_the_connection(enclosure):
    enclosure.control("fault drop op=read")
    with Host(enclosure.port, NQN, size=8) as host:
        for block in range(9):
            host[1].submit_read(1, block, 1)
        with pytest.raises(TermError) as caught:
            host[1].take()
        assert caught.value.fes == LIMIT


def test_a_command_id_in_use_is_refused(host, enclosure):
    enclosure.control("fault delay op=read count=1 ms=300")
    cid = host[1].submit_read(1, 0, 1)
    with pytest.raises(StatusError) as caught:
        host[1].wait(host[1].submit(2, 1, struct.pack("<QI", 1, 0), read=BLOCK, cid=cid))
    assert caught.value.code == 0x003


@pytest.mark.parametrize("sanitizer", list(sanitizers()))
def test_no_bytes_from_outside_harm_it(files, sanitizer):
    """PDUs changed at random, torn at random, on queues in use, while faults come and go: under a sanitizer."""
    rng = random.Random(11)
    with Enclosure({NQN: files}, "--r2t-size", "8192", sanitizer=sanitizer) as enclosure:
        base = len(os.listdir(f"/proc/{enclosure.pid}/fd"))
        stop = threading.Event()

        # Each writes blocks that nobody else touches meanwhile: that is the hosts' race, not the enclosure's.
        def good(seed):
            mine = random.Random(seed)
            for turn in itertools.count():
                if stop.is_set():
                    return
                block = seed * 300 + turn % 50 * 8
                with contextlib.suppress(
                    ClosedError, TermError, TimeoutError, DigestError, StatusError, AssertionError, KeyError, OSError
                ):
                    with Host(enclosure.port, NQN, digests=seed) as host:
                        host[1].socket.settimeout(1)
                        for _ in range(20):
                            if mine.random() < 0.5:
                                host[1].read(2, block, mine.randint(1, 8))
                            else:
                                host[1].write(
                                    2,
                                    block,
                                    bytes(BLOCK * mine.randint(1, 4)),
                                    in_capsule=mine.random() < 0.5,
                                )

        threads = [threading.Thread(target=good, args=(seed,)) for seed in (0, 3)]
        for thread in threads:
            thread.start()
        try:
            for turn in range(150):
                if turn % 5 == 0:
                    kind = rng.choice(
                        (
                            "delay ms=5",
                            "drop",
                            "reset",
                            "digest what=data",
                            "flip",
                            "half",
                            "status status=0x281",
                            "slow factor=3",
                            "protocol what=size",
                            "protocol what=twice",
                            "protocol what=c2h",
                            "protocol what=r2t",
                        )
                    )
                    enclosure.control("clear")
                    enclosure.control(f"fault {kind} share=0.05")
                digests = rng.randrange(4)
                with contextlib.suppress(
                    ClosedError, OSError, TermError, StatusError, AssertionError, KeyError, DigestError
                ):
                    with Host(enclosure.port, NQN, digests=digests) as host:
                        queue = host[rng.randrange(2)]
                        for _ in range(rng.randint(1, 6)):
                            kind, hlen = rng.choice(
                                ((4, 72), (6, 24), (2, 24), (0, 128), (rng.randrange(256), rng.randrange(8, 240)))
                            )
                            body = rng.randbytes(rng.choice((0, 0, 4, 100, 4096)))
                            head = bytearray(bytes([kind, 0]) + bytes(6) + rng.randbytes(hlen - 8))
                            if kind == 4 and rng.random() < 0.7:
                                head[8:10] = bytes([rng.choice((0, 1, 2, 6, 8, 9, 0x7F, 10, 12)), 0x40])
                                head[12:16] = struct.pack("<I", rng.choice((0, 1, 2, 3, 4, 8)))
                                head[48:60] = struct.pack(
                                    "<QI", rng.choice((0, 1, 2047, 2**63)), rng.choice((0, 1, 3, 65535))
                                )
                                size = rng.choice((0, BLOCK, 1024, len(body)))
                                head[32:48] = struct.pack("<QI3xB", rng.choice((0, 1)), size, rng.choice((1, 0x5A)))
                            queue.send(bytes(head), body) if rng.random() < 0.8 else queue.socket.sendall(
                                head[: rng.randrange(hlen)]
                            )
                        queue.socket.settimeout(0.02)
                        with contextlib.suppress(TimeoutError):
                            queue.take()
        finally:
            stop.set()
            enclosure.control("clear")
            for thread in threads:
                thread.join()
        enclosure.wait_connections(0, timeout_s=30)
        with Host(enclosure.port, NQN, digests=3) as host:
            assert len(host[1].read(1, 0, 4)) == 4 * BLOCK
        enclosure.wait_connections(0)
        assert len(os.listdir(f"/proc/{enclosure.pid}/fd")) <= base + 1


# ---- faults ----


def test_delay_holds_the_command_it_hits_and_lets_others_pass(host, enclosure):
    enclosure.control("fault delay op=read ms=5000 count=1")
    start = time.monotonic()
    late, soon = host[1].submit_read(1, 0, 1), host[1].submit_read(1, 1, 1)
    assert host[1].take() == soon, "a command is held with the one before it"
    assert host[1].take() == late and time.monotonic() >= start + 5


def test_a_write_delayed_as_a_command_lands_late(host, enclosure):
    for in_capsule in (True, False):
        enclosure.control("fault delay what=command op=write ms=2000 count=1")
        late = host[1].submit_write(2, 5, b"l" * BLOCK, in_capsule=in_capsule)
        assert host[1].write(2, 5, b"s" * BLOCK, in_capsule=True).pdus
        assert host[1].read(2, 5, 1) == b"s" * BLOCK
        host[1].wait(late)
        assert host[1].read(2, 5, 1) == b"l" * BLOCK


@pytest.mark.parametrize("what", ["command", "answer"])
def test_drop_swallows_the_command_or_only_its_answer(host, enclosure, what):
    enclosure.control(f"fault drop what={what} op=write count=1")
    host[1].submit_write(2, 0, b"w" * BLOCK, in_capsule=True)
    assert host[1].read(2, 0, 1) == (bytes(BLOCK) if what == "command" else b"w" * BLOCK)
    host[1].socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        host[1].take()


def test_reset_ends_the_connection_with_a_reset(host, enclosure):
    enclosure.control("fault reset count=1")
    host[1].submit_read(1, 0, 1)
    with pytest.raises(ClosedError, match="reset"):
        host[1].take()
    host.admin.identify(1)


def test_reset_of_all_is_at_once(host, enclosure):
    assert enclosure.control(f"reset {NQN}")["connections"] == 2
    for queue in host.queues:
        with pytest.raises(ClosedError, match="reset"):
            queue.take()


@pytest.mark.parametrize("what", ["header", "data"])
def test_a_digest_that_is_told_to_be_wrong_is(enclosure, what):
    with Host(enclosure.port, NQN, digests=3) as host:
        enclosure.control(f"fault digest what={what} count=1")
        with pytest.raises(DigestError, match=what):
            host[1].read(1, 0, 1)


def test_a_flipped_bit_is_under_a_right_digest_or_a_wrong_one(enclosure):
    with Host(enclosure.port, NQN, digests=3) as host:
        enclosure.control("fault flip count=1 at=8001")
        found = host[1].read(1, 0, 1)
        assert [(at, a ^ b) for at, (a, b) in enumerate(zip(found, MEDIA, strict=False)) if a != b] == [(1000, 2)]
        assert host[1].read(1, 0, 1) == MEDIA[:BLOCK]
        enclosure.control("fault flip what=wire count=1")
        with pytest.raises(DigestError, match="data"):
            host[1].read(1, 0, 1)


def test_status_answers_in_the_commands_place(host, enclosure):
    enclosure.control("fault status status=0x4281 op=write,read count=2")
    for submit in (lambda: host[1].write(2, 0, b"n" * BLOCK), lambda: host[1].read(2, 0, 1)):
        with pytest.raises(StatusError) as caught:
            submit()
        assert (caught.value.code, caught.value.dnr) == (0x281, True)
    assert host[1].read(2, 0, 1) == bytes(BLOCK)


@pytest.mark.parametrize(("what", "at"), [("close", 10), ("close", 1000), ("hang", 2000)])
def test_half_a_pdu_is_all_that_comes(host, enclosure, what, at):
    enclosure.control(f"fault half what={what} at={at} count=1")
    host[1].submit_read(1, 0, 1)
    assert host[1].receive(at)[0] == C2H_DATA
    host[1].socket.settimeout(0.3 if what == "hang" else 20)
    with pytest.raises(ClosedError if what == "close" else TimeoutError):
        host[1].receive(1)


def test_silence_lasts_until_it_is_cleared_and_then_all_is_answered(host, enclosure):
    enclosure.control(f"fault silence subsystem={NQN} queue=io")
    cid = host[1].submit_read(1, 0, 1)
    host[1].socket.settimeout(0.3)
    with pytest.raises(TimeoutError):
        host[1].take()
    host.admin.identify(1)
    enclosure.control("clear")
    host[1].socket.settimeout(20)
    assert host[1].wait(cid).data == MEDIA[:BLOCK]


def test_silence_of_all_queues_greets_nobody(enclosure):
    enclosure.control("fault silence")
    with Queue(enclosure.port, NQN, greet=False) as queue:
        queue.socket.sendall(pdu(0, hlen=128, plen=128))
        queue.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            queue.receive(1)
        enclosure.control("clear")
        queue.socket.settimeout(20)
        assert queue.receive(128)[0] == 1


def test_slow_is_a_device_so_many_times_slower(host, enclosure):
    enclosure.control("fault slow factor=1000 op=read")  # 20 us and 2 bytes a nanosecond
    start = time.monotonic()
    cids = [host[1].submit_read(1, block, 1) for block in range(10)]
    for cid in cids:
        assert host[1].take() == cid
    assert 0.21 <= time.monotonic() - start < 10 * slowness()


@pytest.mark.parametrize(
    "what", ["type", "hlen", "plen", "pdo", "cid", "offset", "size", "short", "twice", "r2t", "term", "flags", "icresp"]
)
def test_a_protocol_error_is_one(host, enclosure, what):
    enclosure.control(f"fault protocol what={what} op=read count=1")
    host[1].socket.settimeout(0.5)
    with pytest.raises((AssertionError, KeyError, TermError, TimeoutError)):
        host[1].read(1, 4, 4)
        host[1].take()
    assert enclosure.control("faults")["faults"][0]["hits"] == 1


@pytest.mark.parametrize("what", ["type", "pfv", "cpda", "maxh2cdata", "hlen", "plen"])
def test_a_greeting_can_be_wrong(enclosure, what):
    enclosure.control(f"fault protocol what={what} op=icreq count=1")
    with Queue(enclosure.port, NQN, greet=False) as queue:
        queue.socket.sendall(pdu(0, hlen=128, plen=128))
        found = struct.unpack_from("<BBBBIHBBI", queue.receive(128))
        assert found != (1, 0, 128, 0, 128, 0, 0, 0, MIB)


def test_faults_hit_whom_they_are_for(files):
    with Enclosure({NQN: files[:1], OTHER: files[1:]}) as enclosure:
        enclosure.control(f"fault status subsystem={OTHER} op=read skip=1 count=1")
        with Host(enclosure.port, NQN, queues=2) as host, Host(enclosure.port, OTHER) as other:
            for queue in host.queues[1:]:
                queue.read(1, 0, 1)
            other[1].read(1, 0, 1)
            with pytest.raises(StatusError):
                other[1].read(1, 0, 1)
            other[1].read(1, 0, 1)
            enclosure.control("clear")
            enclosure.control("fault status queue=2")
            host[1].read(1, 0, 1)
            with pytest.raises(StatusError):
                host[2].read(1, 0, 1)
            enclosure.control("clear")
            enclosure.control("fault status share=0.5")
            failed = 0
            for _ in range(100):
                try:
                    host[1].read(1, 0, 1)
                except StatusError:
                    failed += 1
            assert 20 < failed < 80


def test_connections_are_refused_while_it_does_not_listen(enclosure, host):
    enclosure.control("listen off")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", enclosure.port), timeout=5)
    assert host[1].read(1, 0, 1) == MEDIA[:BLOCK]
    enclosure.control("listen on")
    with Host(enclosure.port, NQN) as again:
        assert again[1].read(1, 0, 1) == MEDIA[:BLOCK]


@pytest.mark.parametrize(
    "line",
    [
        "fault",
        "fault nothing",
        "fault drop share=2",
        "fault drop op=none",
        "fault flip what=x",
        "fault drop count",
        "listen",
        "attach nqn.none 1",
        'say "\\"',
        "fault " + "x" * 900,
    ],
)
def test_a_command_that_makes_no_sense_is_refused(enclosure, line):
    with pytest.raises(EnclosureError):
        enclosure.control(line)


def test_the_digest_is_crc32c():
    assert crc32c(b"123456789") == struct.pack("<I", 0xE3069283)
    assert H2C_DATA == 6
