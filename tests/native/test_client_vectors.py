"""Blocks into memory in pieces, and parts of blocks, through a real daemon: any size and alignment against a model."""

import random
import time

import pytest
from helpers import MIB, assert_same, content, write_file

import kvfs
from kvfs.errors import InvalidBufferError, InvalidKeyError, SmallBufferError

SIZES = [0, 1, 4095, 4096, 4097, 2 * MIB + 1]
GUARD = 0xA5


class Scatter:
    """Pieces of random sizes at random places of one memory, every other byte of which is a guard."""

    def __init__(self, client, size, rng, largest):
        self.memory = client.buffer(3 * size + 1000 * 4096)
        self.memory[:] = bytes([GUARD]) * len(self.memory)
        self.places = []
        at = 0
        while size:
            part = min(size, rng.randint(0, largest))
            step = rng.choice([0, 0, rng.randint(1, 900), -at % 512, -at % 4096])
            if len(self.places) == 400:
                part = size
            at += step
            self.places.append((at, part))
            at += part
            size -= part
        self.pieces = [self.memory[at : at + part] for at, part in self.places]

    def check(self, expected):
        """The pieces hold these bytes; what lies behind them, and between, was not touched."""
        whole = bytes(self.memory)
        for at, part in self.places:
            taken, expected = expected[:part], expected[part:]
            assert_same(whole[at : at + len(taken)], taken, f"piece of {part} bytes at {at}")
            whole = whole[:at] + bytes([GUARD]) * len(taken) + whole[at + len(taken) :]
        assert not expected
        assert whole.count(GUARD) == len(whole)


def test_any_pieces_and_any_ranges(client):
    rng = random.Random(seed := time.time_ns())
    print("seed", seed)
    blocks = {f"key {size}": content(size, size) for size in SIZES}
    client.put(blocks.items())
    for key, data in blocks.items():
        for largest in (2000, 70_000):
            scatter = Scatter(client, len(data) + rng.choice([0, 0, 5000]), rng, largest)
            assert client.get_into([(key, scatter.pieces)]) == [len(data)]
            scatter.check(data)
            for _ in range(3):
                offset, size = rng.randint(0, len(data) + 100), rng.randint(0, len(data) + 100)
                scatter = Scatter(client, size, rng, largest)
                expected = data[offset : offset + size]
                assert client.get_ranges([(key, offset, tuple(scatter.pieces))]) == [len(expected)]
                scatter.check(expected)


def test_ranges_of_blocks_of_several_extents(own_pool):
    """By key and written as files, some of them over existing ones in part."""
    pool = own_pool(files=2, size="128M", format_args=("--segment-size", "4M"))
    rng = random.Random(7)
    with kvfs.connect(pool.mount, gpu=None) as client:
        blocks = {f"key {size}": bytearray(content(size, size)) for size in (3 * MIB, 9 * MIB + 1, 17 * MIB + 4097)}
        client.put(blocks.items())
        for key, data in blocks.items():
            name = key.encode().hex()
            with open(pool.mount / name[:2] / name, "r+b") as file:
                file.seek(2 * MIB + 77)
                file.write(content(300_000, key))
            data[2 * MIB + 77 : 2 * MIB + 77 + 300_000] = content(300_000, key)
        with open(pool.mount / b"kole".hex()[:2] / b"kole".hex(), "wb") as file:
            file.write(b"start")
            file.seek(5 * MIB + 9)
            file.write(b"end")
        blocks["kole"] = bytearray(b"start" + bytes(5 * MIB + 4) + b"end")
        for key, data in blocks.items():
            for _ in range(20):
                offset, size = rng.randint(0, len(data)), rng.randint(0, rng.choice([100, 70_000, 6 * MIB]))
                destination, expected = bytearray(size), data[offset : offset + size]
                assert client.get_ranges([(key, offset, destination)]) == [len(expected)]
                assert_same(destination[: len(expected)], expected, f"{key} at {offset}")


def test_layers_of_many_blocks_in_one_call(client):
    """As engines ask for them: one layer of each block, then all layers of one, each into a tensor of its own."""
    layer, layers, count = 64 << 10, 32, 10
    blocks = {f"block {i}": content(layer * layers, i) for i in range(count)}
    client.put(blocks.items())
    copied_by_put = client.statistics().bounced_bytes
    memory = client.buffer(layer * count)
    parts = [memory[i * layer : (i + 1) * layer] for i in range(count)]
    for number in (0, 7, layers - 1):
        items = [(key, number * layer, part) for key, part in zip(blocks, parts, strict=True)]
        assert client.get_ranges(items) == [layer] * count
        for part, data in zip(parts, blocks.values(), strict=True):
            assert_same(part, data[number * layer : (number + 1) * layer], f"layer {number}")
    assert client.statistics().bounced_bytes == copied_by_put
    tensors = [client.buffer(layer * count) for _ in range(layers)]
    pieces = [[tensor[i * layer : (i + 1) * layer] for tensor in tensors] for i in range(count)]
    assert client.get_into(zip(blocks, pieces, strict=True)) == [layer * layers] * count
    for i, data in enumerate(blocks.values()):
        assert_same(b"".join(tensor[i * layer : (i + 1) * layer] for tensor in tensors), data, f"block {i}")
    assert client.statistics().bounced_bytes == copied_by_put


def test_one_key_many_times_and_misses_between(client):
    data = content(100_000)
    client.put([(b"key", data)])
    parts = [bytearray(1000) for _ in range(50)]
    items = [(b"none" if i % 5 == 4 else b"key", 2000 * i, part) for i, part in enumerate(parts)]
    results = client.get_ranges(items)
    assert results == [None if i % 5 == 4 else 1000 for i in range(50)]
    for i, part in enumerate(parts):
        assert part == (bytes(1000) if i % 5 == 4 else data[2000 * i : 2000 * i + 1000])
    assert client.get_ranges([(b"key", 10**12, bytearray(1)), (b"key", 0, bytearray())]) == [0, 0]
    assert client.get_ranges([]) == []


def test_a_file_is_read_in_parts_like_a_block(client, block_path):
    client.put([(b"kez", b"makes the directory")])
    data = content(300_001)
    write_file(block_path(b"key"), data)
    part = bytearray(5000)
    assert client.get_ranges([(b"key", 299_000, part)]) == [1001]
    assert_same(part[:1001], data[299_000:], "the end")


def test_what_cannot_be_is_named(client):
    client.put([(b"key", content(100))])
    memory = bytearray(200)
    for call, words in (
        (
            lambda: client.get_into([(b"key", [memory, b"read-only"])]),
            r"key b'key': destination of type list: read-only \(piece 1, of type bytes\)",
        ),
        (lambda: client.get_into([(b"key", [memoryview(memory)[:50], memoryview(memory)[40:90]])]), "overlap"),
        (lambda: client.get_ranges([(b"key", 0, [memory, memory])]), "buffers 0, piece 0 and 0, piece 1 overlap"),
    ):
        with pytest.raises((InvalidBufferError, kvfs.errors.ClientError), match=words):
            call()
    for offset in (-1, 1.0, None, 1 << 63):
        with pytest.raises(ValueError, match="offset"):
            client.get_ranges([(b"key", offset, memory)])
    for items in ([(b"key", memory)], [b"four"], [7]):
        with pytest.raises(TypeError, match="key, offset and memory are expected"):
            client.get_ranges(items)
    with pytest.raises(InvalidKeyError):
        client.get_ranges([(b"", 0, memory)])
    parts = [bytearray(50), bytearray(49)]
    with pytest.raises(SmallBufferError, match="the block has 100 bytes, its destination 99") as caught:
        client.get_into([(b"key", parts)])
    assert caught.value.results == [None]
    with pytest.raises(SmallBufferError, match="its destination 0"):
        client.get_into([(b"key", [])])


def test_memory_of_pieces_is_held_while_it_is_read_into(client):
    client.put([(b"key", content(100))])
    parts = [bytearray(60), bytearray(60)]
    assert client.get_into([(b"key", parts)]) == [100]
    parts[0].append(1)  # a bytearray with an export could not be resized


def test_prestaged_blocks_are_taken_in_parts(client):
    data = content(300_000)
    client.put([(b"key", data)])
    assert client.prestage([b"key"]) == 1
    part = bytearray(1000)
    for offset in (0, 100_000, 299_500):
        expected = data[offset : offset + 1000]
        assert client.get_ranges([(b"key", offset, part)]) == [len(expected)]
        assert_same(part[: len(expected)], expected, f"at {offset}")
    halves = [bytearray(150_001), bytearray(149_999)]
    assert client.get_into([(b"key", halves)]) == [300_000]
    assert_same(halves[0] + halves[1], data, "the whole block")
    statistics = client.statistics()
    assert (statistics.prestage_used, statistics.prestage_wasted) == (1, 0)
