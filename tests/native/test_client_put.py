"""Puts of blocks in pieces, of blocks that may be there, and of chains; and the length of a prefix that exists."""

import errno
import random
from array import array

import pytest
from helpers import KIB, MIB, Pool, assert_same, content, read_file

import kvfs
from kvfs.errors import InvalidBufferError, InvalidKeyError, PutError


def cut(memory, sizes):
    """The memory in pieces of these sizes, over and over."""
    view, pieces, at = memoryview(memory), [], 0
    while at < len(view):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(view[at : at + size])
        at += size
    return pieces


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 128 * KIB, MIB + 1, 5 * MIB + 77])
@pytest.mark.parametrize("sizes", [[4096], [64 * KIB, 8192], [1000, 5000, 1], [3 * MIB]], ids=str)
def test_a_block_in_pieces_is_one_block(client, block_path, size, sizes):
    if size > 64 * KIB and sizes[0] == 1000:
        size = 64 * KIB + 5
    data = content(size, size)
    memory = client.buffer(size)
    memory[:] = data
    copied = 0
    for kind in (list, tuple):
        before = client.statistics().bounced_bytes
        assert client.put([(b"key", kind(cut(memory, sizes)))]) == [True]
        copied += client.statistics().bounced_bytes - before
        assert_same(client.get(b"key"), data, "get")
        assert_same(read_file(block_path(b"key")), data, "the file")
    whole_pages = all(size % 4096 == 0 for size in sizes)
    assert (copied == 0) == (whole_pages or size <= sizes[0])


def test_pieces_lie_anywhere_and_in_any_kind_of_memory(client, block_path):
    chooser = random.Random(1)
    parts = [chooser.randbytes(chooser.choice([1, 17, 4096, 70_000])) for _ in range(100)]
    kinds = [bytes, bytearray, lambda part: array("B", part), memoryview]
    client.put([(b"key", [kinds[i % 4](part) for i, part in enumerate(parts)]), (b"other", [b"one piece"])])
    assert_same(client.get(b"key"), b"".join(parts), "get")
    assert_same(read_file(block_path(b"key")), b"".join(parts), "the file")
    assert bytes(client.get(b"other")) == b"one piece"
    client.put([(b"key", [])])
    assert client.sizes([b"key"]) == [0]


def test_500_pieces_of_a_page_each_are_not_copied(client, block_path):
    memory = client.buffer(1000 * 4096)
    for i in range(1000):
        memory[i * 4096 : (i + 1) * 4096] = bytes([i % 251]) * 4096
    pieces = [memory[i * 4096 : (i + 1) * 4096] for i in range(0, 1000, 2)]
    client.put([(b"key", pieces)])
    assert client.statistics().bounced_bytes == 0
    assert_same(read_file(block_path(b"key")), b"".join(pieces), "the file")
    assert_same(client.get(b"key"), b"".join(pieces), "get")


def test_pieces_of_blocks_of_several_extents(own_pool):
    pool = own_pool(files=2, size="128M", format_args=("--segment-size", "4M"))
    with kvfs.connect(pool.mount, gpu=None) as client:
        memory = client.buffer(9 * MIB + 1)
        memory[:] = content(len(memory), 9)
        for sizes in ([4096], [12 * KIB, 100 * KIB], [4095, 8192]):
            client.put([(str(sizes), cut(memory, sizes))])
            assert_same(client.get(str(sizes)), memory, f"pieces of {sizes}")


def test_a_piece_that_is_no_memory_is_named(client):
    for wrong in (7, None, [b"nested"]):
        with pytest.raises(InvalidBufferError, match="key b'key'"):
            client.put([(b"first", b"data"), (b"key", [b"good", wrong])])
    assert client.exists([b"first"]) == [False]


# ---- if absent ----


def test_a_block_that_is_there_is_left_and_told(client):
    client.put([(b"there", b"old"), (b"too", b"old too")])
    items = [(b"there", b"new"), (b"new", b"block"), (b"too", b"new")]
    before = client.statistics().puts
    assert client.put(items, if_absent=True) == [False, True, False]
    assert client.statistics().puts == before + 1
    assert [bytes(client.get(key)) for key, _ in items] == [b"old", b"block", b"old too"]
    assert client.put(items, if_absent=True) == [False] * 3
    assert client.put(items) == [True] * 3
    assert [bytes(client.get(key)) for key, _ in items] == [b"new", b"block", b"new"]
    client.delete([b"there"])
    assert client.put(items, if_absent=True) == [True, False, False]
    with pytest.raises(InvalidKeyError, match="twice"):
        client.put([(b"there", b"one"), (b"there", b"two")], if_absent=True)
    assert client.put([], if_absent=True) == client.put([]) == []


def test_a_failure_beside_blocks_that_are_there_names_itself_alone(client, block_path):
    client.put([(b"there", b"old")])
    block_path(b"dir").mkdir(parents=True)
    with pytest.raises(PutError, match="1 of 3 blocks") as caught:
        client.put([(b"there", b"new"), (b"dir", b"x"), (b"new", b"n")], if_absent=True)
    assert list(caught.value.failed) == [b"dir"] and caught.value.failed[b"dir"].errno == errno.EISDIR
    assert bytes(client.get(b"there")) == b"old" and bytes(client.get(b"new")) == b"n"


def damage(pool: Pool, data: bytes) -> None:
    """Every copy of these bytes on the devices."""
    found = 0
    for path in sorted((pool.path / "devices").iterdir()):
        with path.open("r+b", buffering=0) as device:
            stored = device.read()
            at = stored.find(data)
            while at >= 0:
                found += 1
                device.seek(at)
                device.write(bytes(byte ^ 0x55 for byte in data[:64]))
                at = stored.find(data, at + 1)
    assert found, "the block is not on the devices"


def test_a_block_that_was_found_bad_is_stored_again(own_pool):
    pool = own_pool(files=1, size="64M")
    data = content(8192, "bad")
    with kvfs.connect(pool.mount, gpu=None) as client, kvfs.connect(pool.mount, gpu=None) as other:
        assert client.put([(b"bad", data), (b"good", b"g")], if_absent=True) == [True, True]
        damage(pool, data[:4096])
        assert client.get(b"bad") is None
        # Also before the daemon has looked for itself.
        assert client.put([(b"bad", data), (b"good", b"g")], if_absent=True) == [True, False]
        assert_same(client.get(b"bad"), data, "the new block")
        assert client.put([(b"bad", data)], if_absent=True) == [False]
        assert_same(other.get(b"bad"), data, "another client's")


# ---- chains ----


def test_parents_are_taken_and_checked(client):
    keys = [f"block {i}" for i in range(600)]
    parents = [None, *keys[:-1]]
    assert client.put([(key, key.encode()) for key in keys], parents=parents) == [True] * 600
    assert [bytes(client.get(key)) for key in keys] == [key.encode() for key in keys]
    assert client.put([("next", b"n")], parents=[keys[-1]], if_absent=True) == [True]
    with pytest.raises(ValueError, match="1 parents of 2 blocks"):
        client.put([("a", b"a"), ("b", b"b")], parents=[None])
    with pytest.raises(InvalidKeyError, match="expected, not int"):
        client.put([("a", b"a")], parents=[7])


# ---- a prefix ----


def test_the_length_of_the_prefix_that_exists(client):
    keys = [f"block {i}" for i in range(100)]
    assert client.exists_prefix(keys) == client.exists_prefix([]) == 0
    client.put([(key, b"x") for i, key in enumerate(keys) if i != 40])
    assert client.exists_prefix(keys) == 40
    assert client.exists_prefix(keys[41:]) == 59
    assert client.exists_prefix(iter(keys)) == 40
    client.delete([keys[0]])
    assert client.exists_prefix(keys) == 0
    with pytest.raises(InvalidKeyError):
        client.exists_prefix([keys[1], b""])
