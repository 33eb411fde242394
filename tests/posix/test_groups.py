"""Groups through the mount: what belongs together goes together, under the pressure of other files. kvfs only."""

import errno
import os

import pytest
from helpers import KIB, assert_same, content, opened, raises_errno, read_file, wait_until, write_file

BLOCK = 256 * KIB + 100
GROUP = "user.kvfs.group"

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def pool(own_pool):
    """Of 64 MiB in segments of one, with rules in pool.toml."""
    made = own_pool(files=4, size="16M", started=False)
    path = made.path / "pool.toml"
    path.write_text(
        path.read_text()
        + """
[[group]]
suffixes = ["", ".metadata"]

[[group]]
directory = "prompts/*"
"""
    )
    made.start()
    return made


def fill(pool, count, start=0):
    """Write `count` blocks that belong to nothing."""
    for index in range(start, start + count):
        write_file(pool.mount / f"filler-{index:06d}.bin", content(BLOCK, index))


def apart(pool, paths):
    """Write files with more than a segment of others between them, so that they never lie in one."""
    for index, path in enumerate(paths):
        write_file(path, content(BLOCK, path.name))
        fill(pool, 8, start=900_000 + 8 * index)


def left(paths):
    """Which are there, and those whole."""
    found = []
    for path in paths:
        try:
            data = read_file(path)
        except FileNotFoundError:
            continue
        assert_same(data, content(BLOCK, path.name), path.name)
        found.append(path.name)
    return found


def press_until_something_goes(pool, paths, limit=800):
    """Write others until one of these is gone; return which are left."""
    for index in range(limit):
        fill(pool, 1, start=index)
        if not all(path.exists() for path in paths):
            return left(paths)
    raise AssertionError(f"nothing of {[path.name for path in paths]} went under {limit} others")


def test_a_block_and_its_metadata_go_together(pool):
    pair = [pool.mount / "x.data", pool.mount / "x.data.metadata"]
    apart(pool, pair)
    assert press_until_something_goes(pool, pair) == []


def test_a_group_by_attribute_goes_together_from_any_directory(pool):
    (pool.mount / "a").mkdir()
    (pool.mount / "b").mkdir()
    paths = [pool.mount / "a" / "one", pool.mount / "b" / "two", pool.mount / "three"]
    apart(pool, paths)
    for path in paths:
        os.setxattr(path, GROUP, b"prompt 17")
    assert press_until_something_goes(pool, paths) == []


@pytest.mark.parametrize("how", ["attribute", "rule"])
def test_a_directory_goes_as_a_whole_and_stays(pool, how):
    directory = pool.mount / ("kv" if how == "attribute" else "prompts/7")
    directory.mkdir(parents=True)
    if how == "attribute":
        os.setxattr(directory, GROUP, b"1")
    paths = [directory / f"layer-{index}" for index in range(3)]
    apart(pool, paths)
    assert press_until_something_goes(pool, paths) == []
    assert os.listdir(directory) == []


def test_a_file_that_is_open_keeps_its_group(pool):
    pair = [pool.mount / "x", pool.mount / "x.metadata"]
    apart(pool, pair)
    with opened(pair[1], os.O_RDONLY):
        fill(pool, 500)
        assert not (pool.mount / "filler-000000.bin").exists(), "nothing was evicted"
        assert left(pair) == ["x", "x.metadata"]

    def evicted():
        pool.command("evict", str(pool.path), "--all")
        return [path.name for path in pair if path.exists()] == []

    wait_until(evicted, "the eviction of both, which were read and so may stay once more", timeout_s=120)


def test_a_file_that_is_read_often_keeps_its_group(pool):
    """One member is hit all the time, the other never: both stay, while others of their age are gone."""
    # A page's worth is learnt from the first blocks that go; nothing is carried over before.
    press_until_something_goes(pool, [pool.mount / "filler-000000.bin"])

    def stays(pair, start):
        apart(pool, pair)
        for index in range(start, start + 500):
            fill(pool, 1, start=index)
            try:
                with opened(pair[1], os.O_RDONLY | os.O_DIRECT) as descriptor:
                    assert os.pread(descriptor, 4 * KIB, 0) == content(BLOCK, pair[1].name)[: 4 * KIB]
            except FileNotFoundError:
                return False
        return True

    # A hot group goes too where there is no room for a copy at that moment: but then the whole group. Others have new
    # names each time: blocks that were evicted and come back would teach the pool to keep their kind.
    for attempt in range(4):
        pair = [pool.mount / f"x{attempt}", pool.mount / f"x{attempt}.metadata"]
        if stays(pair, 10_000 * (attempt + 1)) and left(pair) == [path.name for path in pair]:
            break
        wait_until(lambda pair=pair: left(pair) == [], "the whole group to go")
    else:
        raise AssertionError("there was never room for a copy")
    # Those that share a segment with one of the pair may stay too: it is not the cheapest to give up.
    assert not (pool.mount / "filler-900004.bin").exists(), "nothing of their age was evicted"


def test_what_is_renamed_out_of_a_group_stays_behind(pool):
    pair = [pool.mount / "x", pool.mount / "x.metadata"]
    apart(pool, pair)
    os.rename(pair[1], pool.mount / "alone")
    write_file(pool.mount / "y", content(BLOCK, "y"))
    os.unlink(pool.mount / "y")
    with opened(pool.mount / "alone", os.O_RDONLY):
        for index in range(800):
            fill(pool, 1, start=index)
            if not pair[0].exists():
                break
        assert not pair[0].exists(), "the other has nothing to do with it any more"
        assert (pool.mount / "alone").exists()


def test_unlink_leaves_the_others(pool):
    pair = [pool.mount / "x", pool.mount / "x.metadata"]
    apart(pool, pair)
    pair[0].unlink()
    assert left(pair) == ["x.metadata"]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["umount", "kill", "rebuild"])
def test_groups_outlive_a_restart(pool, end):
    paths = [pool.mount / "one", pool.mount / "two"]
    apart(pool, paths)
    for path in paths:
        os.setxattr(path, GROUP, b"g")
        with opened(path, os.O_RDONLY) as descriptor:
            os.fsync(descriptor)
    if end == "kill":
        pool.kill()
    else:
        pool.umount()
    if end == "rebuild":
        for path in (pool.path / "index").iterdir():
            path.unlink()
    pool.remount()
    pool.wait_rebuilt()
    assert os.getxattr(paths[0], GROUP) == b"g"
    assert all(path.exists() for path in paths)  # not read: what was hit stays longer
    assert press_until_something_goes(pool, paths) == []


def test_the_name_of_a_group_has_1_to_255_bytes(pool):
    write_file(pool.mount / "a", b"x")
    for value in (b"", b"x" * 256):
        with raises_errno(errno.EINVAL):
            os.setxattr(pool.mount / "a", GROUP, value)
    os.setxattr(pool.mount / "a", GROUP, b"x" * 255)
    assert os.getxattr(pool.mount / "a", GROUP) == b"x" * 255
    os.removexattr(pool.mount / "a", GROUP)
    with raises_errno(errno.ENODATA):
        os.getxattr(pool.mount / "a", GROUP)
