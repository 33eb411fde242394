"""A pod by files: what is stored on one node is read, replaced, removed and changed on the others."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from helpers import loop_devices, requires_fuse, requires_root, wait_until
from podmounts import Pod, block, found, missing


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    requires_root()
    requires_fuse()
    with Pod(nodes=2) as started:
        yield started


@pytest.fixture
def here(pod: Pod, request: pytest.FixtureRequest) -> pathlib.Path:
    """A directory of the test's own, at node 0."""
    path = pod.nodes[0].mount / request.node.name.replace("[", "-").replace("]", "")
    path.mkdir()
    return path


@pytest.fixture
def there(pod: Pod, here: pathlib.Path) -> pathlib.Path:
    """The same directory at node 1."""
    path = pod.nodes[1].mount / here.name
    wait_until(path.is_dir, f"{path} at node 1", timeout_s=10)
    return path


def test_a_block_is_found_on_the_other_node(here: pathlib.Path, there: pathlib.Path) -> None:
    (here / "a").write_bytes(block(1))
    found(there / "a", block(1))
    (there / "b").write_bytes(block(2))
    found(here / "b", block(2))


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 5 << 20], ids=str)
def test_sizes(here: pathlib.Path, there: pathlib.Path, size: int) -> None:
    (here / "a").write_bytes(block(3, size))
    found(there / "a", block(3, size))
    assert (there / "a").stat().st_size == size


def test_directories_are_entered(here: pathlib.Path, there: pathlib.Path) -> None:
    (here / "x" / "y" / "z").mkdir(parents=True)
    (here / "x" / "y" / "z" / "a").write_bytes(block(4))
    found(there / "x" / "y" / "z" / "a", block(4))
    assert (there / "x" / "y").stat().st_ino == (here / "x" / "y").stat().st_ino
    (there / "x" / "y" / "z" / "b").write_bytes(block(5))
    found(here / "x" / "y" / "z" / "b", block(5))


def test_write_then_rename(here: pathlib.Path, there: pathlib.Path) -> None:
    """As engines store."""
    (here / "a.tmp.1").write_bytes(block(6))
    os.rename(here / "a.tmp.1", here / "a")
    found(there / "a", block(6))
    assert not (there / "a.tmp.1").exists()


def test_a_rewrite_is_old_or_new(here: pathlib.Path, there: pathlib.Path) -> None:
    (here / "a").write_bytes(block(7))
    found(there / "a", block(7))
    (here / "a").write_bytes(block(8))

    def new() -> bool:
        content = (there / "a").read_bytes()
        assert content in (block(7), block(8))
        return content == block(8)

    wait_until(new, "the new content at node 1", timeout_s=10)


def test_the_other_node_replaces_it(here: pathlib.Path, there: pathlib.Path) -> None:
    (here / "a").write_bytes(block(9))
    found(there / "a", block(9))
    (there / "a.tmp.1").write_bytes(block(10))
    os.rename(there / "a.tmp.1", there / "a")
    assert (there / "a").read_bytes() == block(10)
    wait_until(lambda: (here / "a").read_bytes() == block(10), "the new content at node 0", timeout_s=10)


def test_unlink_by_the_owner(here: pathlib.Path, there: pathlib.Path) -> None:
    (here / "a").write_bytes(block(11))
    found(there / "a", block(11))
    (here / "a").unlink()
    missing(there / "a")


def test_unlink_by_the_other(here: pathlib.Path, there: pathlib.Path) -> None:
    (here / "a").write_bytes(block(12))
    found(there / "a", block(12))
    (there / "a").unlink()
    assert not (there / "a").exists()
    missing(here / "a")


def test_an_open_file_keeps_one_content(here: pathlib.Path, there: pathlib.Path) -> None:
    (here / "a").write_bytes(block(13))
    found(there / "a", block(13))
    with (there / "a").open("rb") as opened:
        first = opened.read(4096)
        (here / "a.tmp.1").write_bytes(block(14))
        os.rename(here / "a.tmp.1", here / "a")
        wait_until(lambda: (there / "a").read_bytes() == block(14), "the new content", timeout_s=10)
        assert first + opened.read() == block(13)


def test_copy_up_by_append(here: pathlib.Path, there: pathlib.Path) -> None:
    (here / "a").write_bytes(block(15))
    found(there / "a", block(15))
    with (there / "a").open("ab") as opened:
        opened.write(b"more")
    assert (there / "a").read_bytes() == block(15) + b"more"
    wait_until(lambda: (here / "a").read_bytes() == block(15) + b"more", "the longer file at node 0", timeout_s=10)


def test_copy_up_by_truncate_and_chmod(here: pathlib.Path, there: pathlib.Path) -> None:
    (here / "a").write_bytes(block(16))
    (here / "b").write_bytes(block(17))
    found(there / "a", block(16))
    found(there / "b", block(17))
    os.truncate(there / "a", 4096)
    assert (there / "a").read_bytes() == block(16)[:4096]
    os.chmod(there / "b", 0o600)
    assert (there / "b").stat().st_mode & 0o777 == 0o600
    assert (there / "b").read_bytes() == block(17)


def test_rename_of_the_others_file_is_exdev(here: pathlib.Path, there: pathlib.Path) -> None:
    (here / "a").write_bytes(block(18))
    found(there / "a", block(18))
    with pytest.raises(OSError) as error:
        os.rename(there / "a", there / "b")
    assert error.value.errno == errno.EXDEV
    shutil.move(there / "a", there / "b")  # copies, as mv does
    assert (there / "b").read_bytes() == block(18)
    found(here / "b", block(18))
    missing(here / "a")


def test_rename_of_a_directory_is_exdev(here: pathlib.Path) -> None:
    (here / "d").mkdir()
    with pytest.raises(OSError) as error:
        os.rename(here / "d", here / "e")
    assert error.value.errno == errno.EXDEV


def test_rmdir_while_the_other_has_something_there(here: pathlib.Path, there: pathlib.Path) -> None:
    (here / "d").mkdir()
    (here / "d" / "a").write_bytes(block(19))
    found(there / "d" / "a", block(19))
    (there / "d" / "b").write_bytes(block(20))
    found(here / "d" / "b", block(20))
    (here / "d" / "a").unlink()

    def refused() -> bool:
        try:
            (here / "d").rmdir()
        except OSError as error:
            assert error.errno == errno.ENOTEMPTY
            return True
        return False

    assert refused()
    assert (here / "d" / "b").read_bytes() == block(20)
    (there / "d" / "b").unlink()

    def removed() -> bool:
        try:
            (there / "d").rmdir()
        except FileNotFoundError:  # both had left it: the news of the other's leave has taken it away
            return True
        except OSError as error:
            assert error.errno == errno.ENOTEMPTY
            return False
        return True

    wait_until(removed, "the directory is the last node's to remove", timeout_s=10)
    missing(here / "d")


def test_extended_attributes_are_read(here: pathlib.Path, there: pathlib.Path) -> None:
    (here / "a").write_bytes(block(21))
    os.setxattr(here / "a", b"user.test", b"value")
    with (here / "a").open("r+b"):
        pass
    found(there / "a", block(21))
    with contextlib.suppress(OSError):
        assert os.getxattr(there / "a", b"user.test") == b"value"
    with pytest.raises(OSError) as error:
        os.getxattr(there / "a", b"user.kvfs.none")
    assert error.value.errno == errno.ENODATA
    with pytest.raises(OSError) as error:
        os.setxattr(there / "a", b"user.kvfs.pin", b"1")
    assert error.value.errno == errno.EOPNOTSUPP


def test_an_exclusive_create_knows_the_other(here: pathlib.Path, there: pathlib.Path) -> None:
    (here / "a").write_bytes(block(22))
    found(there / "a", block(22))
    with pytest.raises(FileExistsError):
        os.close(os.open(there / "a", os.O_CREAT | os.O_EXCL | os.O_WRONLY))


def test_mmap(here: pathlib.Path, there: pathlib.Path) -> None:
    (here / "a").write_bytes(block(23))
    found(there / "a", block(23))
    assert subprocess.run(["cmp", here / "a", there / "a"]).returncode == 0


def test_many_small_blocks(here: pathlib.Path, there: pathlib.Path) -> None:
    for i in range(500):
        (here / f"b{i}").write_bytes(block(i, 4096))
    for i in range(500):
        found(there / f"b{i}", block(i, 4096))


@pytest.mark.slow
def test_eight_nodes_on_devices_of_the_kernel(tmp_path: pathlib.Path) -> None:
    """Blocks of every node are read on every other one, on block devices that the kernel has."""
    requires_root()
    requires_fuse()
    with loop_devices(tmp_path, 2, "512M") as devices, Pod(nodes=8, addresses=devices) as pod:
        for node in pod.nodes:
            (node.mount / f"of-{node.number}").write_bytes(block(node.number))
        for node in pod.nodes:
            for other in pod.nodes:
                found(node.mount / f"of-{other.number}", block(other.number), 30)
        (pod.nodes[7].mount / "of-0").unlink()
        for node in pod.nodes:
            missing(node.mount / "of-0", 30)


def test_kvfs_rm_forgets_what_each_node_has(pod: Pod, here: pathlib.Path, there: pathlib.Path) -> None:
    """On one node the other's blocks stay, with the directories that both have; then the last one takes these."""
    (here / "r1" / "00").mkdir(parents=True)
    wait_until((there / "r1" / "00").is_dir, "the directory at node 1")
    (here / "r1" / "00" / "a").write_bytes(block(1))
    (there / "r1" / "00" / "b").write_bytes(block(2))
    (here / "r1" / "own").mkdir()
    (here / "r1" / "own" / "c").write_bytes(block(3))
    found(there / "r1" / "00" / "a", block(1))
    found(here / "r1" / "00" / "b", block(2))
    said = pod.kvfs("rm", here / "r1").stdout
    assert f"/{here.name}/r1: removed 2 files of 2.00M and 1 directory\n" in said, said
    assert "note: 1 directory stays: other nodes have such names too; kvfs rm there" in said, said
    missing(there / "r1" / "00" / "a")
    missing(there / "r1" / "own")
    found(there / "r1" / "00" / "b", block(2))
    found(here / "r1" / "00" / "b", block(2))
    assert pod.kvfs("rm", there / "r1").stdout.startswith(f"/{there.name}/r1: removed 1 file of 1.00M")
    for node in (here, there):
        missing(node / "r1" / "00")
    # Directories above such that both have stay empty, until the first is asked once more.
    pod.kvfs("rm", here / "r1", "--force")
    for node in (here, there):
        missing(node / "r1")
