"""Names of blocks: keys of up to 255 bytes, and paths; as files of the mount, in lists, over remounts and crashes."""

import errno
import os
import random

import pytest
from helpers import opened, read_file, write_file

import kvfs
from kvfs.errors import ClientError, InvalidKeyError, PutError


def long_path(root, key):
    """The documented file of a key of 128 to 255 bytes."""
    digits = key.hex()
    return root / digits[:2] / (digits[:254] + "ghijklmnopqrstuv"[int(digits[254], 16)]) / digits[255:]


def every_size(seed=1):
    """Keys around each bound, of all byte values, some the beginnings of others."""
    chooser = random.Random(seed)
    whole = bytes(chooser.randbytes(255))
    keys = {whole[:size] for size in (1, 2, 126, 127, 128, 129, 200, 254, 255)}
    keys |= {whole[:127] + bytes([last]) for last in range(0, 256, 5)}
    keys |= {whole[:126] + bytes([last]) for last in (0, whole[126] ^ 1, 255)}
    keys |= {whole[:127] + bytes([whole[127]]) + tail for tail in (b"", b"\0", b"\xff", b"\0\0")}
    keys |= {bytes([first]) * size for first in (0, 0x6B, 255) for size in (127, 128, 255)}
    keys |= {chooser.randbytes(chooser.randrange(1, 256)) for _ in range(60)}
    return sorted(keys)


def test_long_keys_live_as_short_ones_do(client, directory):
    root, keys = directory / "llama", every_size()
    longer = [key for key in keys if len(key) > 127]
    assert len(longer) > 80 and all(client.put((key, key[::-1]) for key in keys))
    assert client.exists(keys) == [True] * len(keys) and client.sizes(keys) == list(map(len, keys))
    for key in keys:
        assert bytes(client.get(key)) == key[::-1], key
    for key in longer:
        assert read_file(long_path(root, key)) == key[::-1]
    assert list(client.list()) == keys, "in byte order, long ones among short ones"
    for i in range(0, len(keys), 7):
        assert list(client.list(after=keys[i])) == keys[i + 1 :]
    assert list(client.list(after=longer[3] + b"\0" if len(longer[3]) < 255 else longer[3]))
    # Files and blocks are one set.
    write_file(long_path(root, longer[5]), b"by the mount")
    assert bytes(client.get(longer[5])) == b"by the mount"
    client.put([(longer[5], b"by key")])
    assert read_file(long_path(root, longer[5])) == b"by key"
    os.unlink(long_path(root, longer[6]))
    assert client.exists([longer[6]]) == [False]
    assert client.delete([*keys[::2], b"no" * 100]) == [key != longer[6] for key in keys[::2]] + [False]
    left = [key for key in keys[1::2] if key != longer[6]]
    assert list(client.list()) == left
    assert client.exists(keys) == [key in left for key in keys]


def test_a_list_goes_page_by_page_through_directories_of_long_keys(client):
    base = b"\x6b" * 127
    keys = sorted({base + number.to_bytes(2, "big") for number in range(0, 6000)} | {base, b"\x6b", b"\x6c"})
    client.put((key, b"x") for key in keys)
    assert list(client.list()) == keys
    assert list(client.list(after=keys[4100])) == keys[4101:]
    assert client.delete(keys) == [True] * len(keys)
    assert list(client.list()) == []


def test_a_list_passes_over_what_no_long_key_has_made(client, directory):
    key = b"\xab" * 130
    client.put([(key, b"data"), (b"\xab", b"short")])
    above = long_path(directory / "llama", key).parent
    for name in ("ab", "xyz", "ABC", "", "a" * 254):
        if name:
            write_file(above / name, b"even digits, or none")
    (above / "a").mkdir()
    write_file(above.parent / ("ab" * 127 + "w"), b"no letter of a digit")
    write_file(above.parent / ("ab" * 127 + "h"), b"a file where a directory would be")
    write_file(above.parent / ("ab" * 126 + "g"), b"too short")
    (above.parent / ("cd" * 127 + "g")).mkdir()
    write_file(above.parent / ("cd" * 127 + "g") / "1", b"of another shard")
    assert list(client.list()) == [b"\xab", key]


def test_long_keys_over_a_remount_and_a_crash(own_pool):
    pool, keys = own_pool(files=2, size="64M"), every_size(2)
    with kvfs.connect(pool.mount, "deep/space", gpu=None) as client:
        client.put((key, key) for key in keys)
    pool.umount()
    assert pool.command("fsck", "--verify-data", str(pool.path)).returncode == 0
    pool.start()
    with kvfs.connect(pool.mount, "deep/space", gpu=None) as client:
        assert list(client.list()) == keys
        client.put((key, key + b" again") for key in keys[::2])
        client.delete(keys[1::4])
        pool.kill()
    pool.remount()
    with kvfs.connect(pool.mount, "deep/space", gpu=None) as client:
        assert bytes(client.get(keys[0])) == keys[0] + b" again"
        for key in keys[::2]:
            assert bytes(client.get(key)) == key + b" again"
        # A removal may come back: kvfs is a cache. All that is there is right.
        listed = list(client.list())
        assert listed == sorted(listed) and set(listed) <= set(keys) and set(keys) - set(listed) <= set(keys[1::4])
        for key in listed:
            assert bytes(client.get(key)) in (key, key + b" again")
    pool.umount()
    assert pool.command("fsck", "--verify-data", str(pool.path)).returncode == 0


# ---- paths ----


@pytest.fixture
def by_path(directory):
    with kvfs.connect(directory, "llama", gpu=None, paths=True) as connected:
        yield connected


def test_blocks_by_path_are_files_and_the_reverse(by_path, directory):
    root = directory / "llama"
    paths = ["name", "base_r0/0ab/3c_g1/4d5e.bin", "a/b/c/d/e", "a/b", "...", "with space/ü", "a/." + "x" * 200]
    assert by_path.put((path, path.encode()) for path in paths if path != "a/b") == [True] * 6
    for path in paths:
        if path != "a/b":
            assert bytes(by_path.get(path)) == read_file(root / path) == path.encode()
    assert (root / "a/b").is_dir() and (root / "base_r0").stat().st_mode == 0o40755
    # As an engine's own tier writes: a temporary file, renamed.
    (root / "base_r0/0ab/3c_g2").mkdir()
    write_file(root / "base_r0/0ab/3c_g2/x.tmp", b"by the mount")
    os.rename(root / "base_r0/0ab/3c_g2/x.tmp", root / "base_r0/0ab/3c_g2/x.bin")
    assert by_path.exists(["base_r0/0ab/3c_g2/x.bin", "base_r0/0ab/3c_g2/x.tmp"]) == [True, False]
    assert bytes(by_path.get(b"base_r0/0ab/3c_g2/x.bin")) == b"by the mount"
    assert by_path.put([("base_r0/0ab/3c_g2/x.bin", b"new")], if_absent=True) == [False]
    assert by_path.put([("base_r0/0ab/3c_g2/x.bin", b"new")], parents=["base_r0/0ab/3c_g1/4d5e.bin"]) == [True]
    assert read_file(root / "base_r0/0ab/3c_g2/x.bin") == b"new"
    assert by_path.exists_prefix(["name", "...", "none", "name"]) == 2
    assert by_path.sizes(["name", "none/name", "name/below", "a/b"]) == [4, None, None, None]
    assert by_path.delete(["name", "none/name", "name/below", "a/b", "a/b/c/d/e"]) == [True, False, False, False, True]
    assert not (root / "name").exists() and (root / "a/b/c/d").is_dir()
    with opened(root / "being written", os.O_CREAT | os.O_WRONLY) as descriptor:
        os.write(descriptor, b"half")
        assert by_path.exists(["being written"]) == [False]


def test_a_key_and_its_path_are_one_block(client, by_path):
    client.put([(b"key", b"data")])
    assert bytes(by_path.get("6b/6b6579")) == b"data"
    assert by_path.delete(["6b/6b6579"]) == [True]
    assert client.exists([b"key"]) == [False]


def test_300_directories_in_one_batch(by_path, directory):
    paths = [f"base/{number:03x}/{number % 7:02x}_g0/{number}.bin" for number in range(300)]
    assert all(by_path.put((path, path.encode()) for path in paths))
    assert by_path.exists(paths) == [True] * 300
    destinations = [bytearray(40) for _ in paths]
    assert by_path.get_into(zip(paths, destinations, strict=True)) == list(map(len, paths))
    assert len(list((directory / "llama/base").iterdir())) == 300
    assert by_path.delete([*paths, "base/none"]) == [True] * 300 + [False]
    assert by_path.exists(paths) == [False] * 300


def test_a_path_through_a_file_or_to_a_directory_is_an_error_of_that_block(by_path, directory):
    root = directory / "llama"
    by_path.put([("file", b"f"), ("dir/name", b"d")])
    os.symlink("dir", root / "link")
    with pytest.raises(PutError, match="3 of 5 blocks") as caught:
        by_path.put([(path, b"x") for path in ("good", "file/below", "dir", "link/name", "dir/other")])
    errors = {path: error.errno for path, error in caught.value.failed.items()}
    assert errors == {b"file/below": errno.ENOTDIR, b"dir": errno.EISDIR, b"link/name": errno.ENOTDIR}
    assert bytes(by_path.get("good")) == bytes(by_path.get("dir/other")) == b"x"
    assert by_path.exists(["file/below", "dir", "link/name"]) == [False] * 3
    assert read_file(root / "dir/name") == b"d" and read_file(root / "file") == b"f"


@pytest.mark.parametrize(
    "path", ["", "/a", "a/", "a//b", ".", "..", "./a", "a/..", "a/../b", "a\0b", "n" * 256, "a/" * 511 + "bc"]
)
def test_a_path_that_cannot_be_is_named(by_path, directory, path):
    for call in (by_path.exists, by_path.sizes, by_path.delete, by_path.prestage, by_path.exists_prefix):
        with pytest.raises(InvalidKeyError, match="path"):
            call([path])
    with pytest.raises(InvalidKeyError, match="path"):
        by_path.put([("good", b"x"), (path, b"x")])
    if path:
        with pytest.raises(InvalidKeyError, match="path"):
            by_path.put([("good", b"x")], parents=[path])
    assert not (directory / "llama").exists()


def test_paths_are_not_listed(by_path):
    by_path.put([("a/name", b"x")])
    with pytest.raises(ClientError, match="paths are not listed") as caught:
        list(by_path.list())
    assert caught.value.errno == errno.EOPNOTSUPP


def test_paths_are_found_after_a_rename_of_their_directory(by_path, directory):
    root = directory / "llama"
    by_path.put([("one/name", b"1"), ("two/name", b"2")])
    os.rename(root / "one", root / "three")
    assert by_path.exists(["one/name", "three/name"]) == [False, True]
    by_path.put([("one/name", b"new")])
    assert [bytes(by_path.get(path)) for path in ("one/name", "two/name", "three/name")] == [b"new", b"2", b"1"]
