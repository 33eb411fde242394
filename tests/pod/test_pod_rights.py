"""Rights in a pod: what is closed on one node is closed on the others, by files, by guests, and after remounts.
And a directory that several nodes have goes with the last of them alone."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Sequence

import front_end
import pytest
from helpers import in_child, process_alive, requires_fuse, requires_root, wait_until
from podmounts import NEWS_S, Node, Pod, block, found, missing, settle, stored

SIZE = 8192
SOMEBODY = 12345
SETATTR = 4  # linux/fuse.h
ENGINE_BACK_S = 30.0


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    requires_root()
    requires_fuse()
    with Pod(nodes=3, started=False) as made:
        for node in made.nodes:
            mount(node)
        settle(made.nodes)
        yield made
        for node in made.nodes:
            unmount(node)


def mount(node: Node) -> None:
    node.start("--virtiofs", os.fspath(node.base / "guest.sock"))


def unmount(node: Node) -> None:
    """Mount and export."""
    pid = node.pid()
    node.command("umount", str(node.path))
    wait_until(lambda: not process_alive(pid), f"the end of daemon {pid}", timeout_s=60)


def remount(nodes: Sequence[Node], all_of: Pod) -> None:
    for node in nodes:
        unmount(node)
        mount(node)
    settle(all_of.nodes)


@pytest.fixture
def here(pod: Pod, request: pytest.FixtureRequest) -> str:
    """The name of a directory that all nodes know."""
    name = request.node.name.replace("[", "-").replace("]", "")
    (pod.nodes[0].mount / name).mkdir()
    for node in pod.nodes[1:]:
        wait_until((node.mount / name).is_dir, f"{name} at node {node.number}", timeout_s=30)
    return name


def rights(path: pathlib.Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid


def agree(nodes: Sequence[Node], name: str, wanted: tuple[int, int, int], timeout_s: float = NEWS_S) -> None:
    for node in nodes:
        path = node.mount / name
        wait_until(lambda: rights(path) == wanted, f"{path} with {wanted}", timeout_s=timeout_s, interval_s=0.005)  # noqa: B023


def refused(path: pathlib.Path) -> bool:
    """Whether a user who has nothing to do with it cannot read it."""

    def reads() -> bool:
        with contextlib.suppress(PermissionError):
            path.read_bytes()
            return True
        return False

    return not in_child(reads, user=SOMEBODY, group=SOMEBODY)


# ---- blocks ----


def test_a_block_that_is_closed_is_closed_on_every_node(pod: Pod, here: str) -> None:
    a, b, c = pod.nodes
    name = f"{here}/a"
    stored(a, name, block(1, SIZE))
    for node in (b, c):
        found(node.mount / name, block(1, SIZE))
        assert not refused(node.mount / name)
    inode = (b.mount / name).stat().st_ino
    (a.mount / name).chmod(0o600)
    agree(pod.nodes, name, (0o600, 0, 0))
    assert all(refused(node.mount / name) for node in pod.nodes)
    # It is the same block: kernels keep its pages.
    assert (b.mount / name).stat().st_ino == inode and (b.mount / name).read_bytes() == block(1, SIZE)
    os.chown(a.mount / name, 7, 8)
    agree(pod.nodes, name, (0o600, 7, 8))
    remount([b], pod)
    agree(pod.nodes, name, (0o600, 7, 8))
    remount([a], pod)
    agree(pod.nodes, name, (0o600, 7, 8), ENGINE_BACK_S)
    (a.mount / name).chmod(0o644)
    agree(pod.nodes, name, (0o644, 7, 8))


def test_a_copy_has_the_rights_of_now_and_not_those_of_its_header(pod: Pod, here: str) -> None:
    a, b, _ = pod.nodes
    name = f"{here}/a"
    stored(a, name, block(1, SIZE))
    found(b.mount / name, block(1, SIZE))
    (a.mount / name).chmod(0o600)
    os.chown(a.mount / name, 7, 8)
    agree([b], name, (0o600, 7, 8))
    with (b.mount / name).open("ab") as opened:
        opened.write(b"more")
    agree(pod.nodes, name, (0o600, 7, 8))
    longer = block(1, SIZE) + b"more"
    wait_until(lambda: (a.mount / name).read_bytes() == longer, "the longer block", timeout_s=NEWS_S)


def test_times_that_are_set_are_a_change_that_others_count_by(pod: Pod, here: str) -> None:
    """A version that nobody hears of would beat a later store of another node, on one side alone."""
    a, b, _ = pod.nodes
    name = f"{here}/a"
    stored(a, name, block(1, SIZE))
    found(b.mount / name, block(1, SIZE))
    with pod.redis.stopped():  # neither hears of the other
        stored(b, name, block(2, SIZE))
        for _ in range(300):
            os.utime(a.mount / name)

    def same() -> bool:
        return len({(node.mount / name).read_bytes() for node in pod.nodes}) == 1

    wait_until(same, f"one content of {name} on every node", timeout_s=ENGINE_BACK_S)


# ---- directories ----


@pytest.mark.parametrize("own", [True, False], ids=["several-have-it", "one-has-it"])
def test_a_directory_that_is_closed_is_closed_on_every_node(pod: Pod, here: str, own: bool) -> None:
    a, b, c = pod.nodes
    top = f"{here}/d"
    (a.mount / top).mkdir()
    stored(a, f"{top}/a", block(1, SIZE))
    found(b.mount / top / "a", block(1, SIZE))
    found(c.mount / top / "a", block(1, SIZE))
    if own:
        stored(b, f"{top}/b", block(2, SIZE))
        found(a.mount / top / "b", block(2, SIZE))
    (a.mount / top).chmod(0o700)
    agree(pod.nodes, top, (0o700, 0, 0))
    assert all(refused(node.mount / top / "a") for node in pod.nodes)
    os.chown(b.mount / top, 7, 8)  # a node that has only looked at it may, too
    agree(pod.nodes, top, (0o700, 7, 8))
    remount([b, c], pod)
    agree(pod.nodes, top, (0o700, 7, 8))
    remount([a], pod)
    agree(pod.nodes, top, (0o700, 7, 8), ENGINE_BACK_S)
    assert all(refused(node.mount / top / "a") for node in pod.nodes)
    (c.mount / top).chmod(0o755)
    agree(pod.nodes, top, (0o755, 7, 8))


def test_an_empty_directory_that_was_closed_while_a_node_was_away(pod: Pod, here: str) -> None:
    """No device has it, and the news are lost."""
    a, b, c = pod.nodes
    top = f"{here}/d"
    (a.mount / top).mkdir()
    agree(pod.nodes, top, (0o755, 0, 0))
    unmount(b)
    (a.mount / top).chmod(0o700)
    (a.mount / here / "unseen").mkdir(0o711)
    agree([c], top, (0o700, 0, 0))
    pod.redis.command("FLUSHALL")
    mount(b)
    agree([b], top, (0o700, 0, 0), ENGINE_BACK_S)
    wait_until((b.mount / here / "unseen").is_dir, "a directory that was made meanwhile", timeout_s=ENGINE_BACK_S)
    settle(pod.nodes)


def test_of_a_directory_that_two_nodes_make_the_later_rights_count(pod: Pod, here: str) -> None:
    a, b, _ = pod.nodes
    with pod.redis.stopped():  # neither hears of the other
        (a.mount / here / "d").mkdir()
        (a.mount / here / "d").chmod(0o711)
        (b.mount / here / "d").mkdir()
        for _ in range(300):
            (b.mount / here / "d").chmod(0o750)  # the last by far
    agree(pod.nodes, f"{here}/d", (0o750, 0, 0), ENGINE_BACK_S)
    remount([a], pod)
    agree(pod.nodes, f"{here}/d", (0o750, 0, 0), ENGINE_BACK_S)


def test_times_of_a_directory_undo_no_change_of_its_rights(pod: Pod, here: str) -> None:
    a, b, _ = pod.nodes
    top = f"{here}/d"
    (a.mount / top).mkdir()
    stored(b, f"{here}/mine", block(1, SIZE))
    agree(pod.nodes, top, (0o755, 0, 0))
    with pod.redis.stopped():
        (a.mount / top).chmod(0o700)
        for _ in range(100):
            os.utime(b.mount / top)
            os.setxattr(b.mount / top, b"user.note", b"1")
        stored(b, f"{top}/b", block(2, SIZE))
    agree(pod.nodes, top, (0o700, 0, 0), ENGINE_BACK_S)


# ---- guests ----


def _lookup(guest: front_end.Guest, parent: int, name: str) -> tuple[int, int]:
    """Node id and mode, as a guest's kernel is told."""
    error, body = guest.ask(front_end.LOOKUP, parent, name.encode() + b"\0")
    assert error == 0, os.strerror(-error)
    return int(struct.unpack_from("<Q", body)[0]), int(struct.unpack_from("<I", body, 40 + 60)[0])


def test_guests_close_and_find_closed(pod: Pod, here: str) -> None:
    a, b, _ = pod.nodes
    (a.mount / here / "d").mkdir()
    stored(a, f"{here}/a", block(1, SIZE))
    found(b.mount / here / "a", block(1, SIZE))
    agree([b], f"{here}/d", (0o755, 0, 0))
    with front_end.Guest(a.base / "guest.sock") as one, front_end.Guest(b.base / "guest.sock") as other:
        tops = [_lookup(guest, 1, here)[0] for guest in (one, other)]
        for name, mode in (("a", 0o600), ("d", 0o700)):
            node, _ = _lookup(one, tops[0], name)
            # struct fuse_setattr_in: valid FATTR_MODE.
            assert one.ask(SETATTR, node, struct.pack("<I64xI16x", 1, mode))[0] == 0
            wait_until(
                lambda: stat.S_IMODE(_lookup(other, tops[1], name)[1]) == mode,  # noqa: B023
                f"{name} closed for the other node's guest", timeout_s=NEWS_S,
            )  # fmt: skip
    agree(pod.nodes, f"{here}/a", (0o600, 0, 0))
    agree(pod.nodes, f"{here}/d", (0o700, 0, 0))


# ---- the last node that has a directory removes it ----


class Watcher:
    """Reads a block over and over on some nodes; keeps what was not right."""

    def __init__(self, nodes: Sequence[Node], name: str, data: bytes) -> None:
        self.wrong: list[str] = []
        self._nodes, self._name, self._data = nodes, name, data
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._watch, args=(node,)) for node in nodes]
        self.rounds = 0

    def _watch(self, node: Node) -> None:
        while not self._stop.is_set():
            try:
                if (node.mount / self._name).read_bytes() != self._data:
                    self.wrong.append(f"node {node.number}: other bytes")
            except OSError as error:
                self.wrong.append(f"node {node.number}: {error}")
            self.rounds += 1

    def __enter__(self) -> Watcher:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        wanted = self.rounds + 20 * len(self._nodes)
        try:
            wait_until(lambda: self.rounds >= wanted or bool(self.wrong), "reads after the change", timeout_s=30)
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()


def not_empty(remove: Callable[[], None]) -> None:
    with pytest.raises(OSError) as error:
        remove()
    assert error.value.errno == errno.ENOTEMPTY, error.value


def test_a_directory_in_which_another_node_has_a_block_is_not_removed(pod: Pod, here: str) -> None:
    a, b, c = pod.nodes
    for i in range(5):
        top = f"{here}/{i}"
        (a.mount / top).mkdir()
        stored(a, f"{top}/a", block(1, SIZE))
        found(b.mount / top / "a", block(1, SIZE))
        stored(b, f"{top}/b", block(2, SIZE))
        found(a.mount / top / "b", block(2, SIZE))
        found(c.mount / top / "b", block(2, SIZE))
        (b.mount / top / "b").unlink()
        missing(c.mount / top / "b")
        with Watcher(pod.nodes, f"{top}/a", block(1, SIZE)) as watcher:
            not_empty((b.mount / top).rmdir)
            stored(b, f"{here}/told-{i}", block(3, SIZE))
            found(c.mount / here / f"told-{i}", block(3, SIZE))  # so C has heard
        assert watcher.wrong == []
        not_empty((c.mount / top).rmdir)
        (a.mount / top / "a").unlink()
        (a.mount / top).rmdir()
        missing(b.mount / top)
        missing(c.mount / top)


def test_a_directory_of_a_dead_node_is_not_removed_by_the_others(pod: Pod, here: str) -> None:
    a, b, c = pod.nodes
    top = f"{here}/d"
    (a.mount / top).mkdir()
    stored(a, f"{top}/a", block(1, SIZE))
    found(b.mount / top / "a", block(1, SIZE))
    stored(b, f"{top}/b", block(2, SIZE))
    found(c.mount / top / "b", block(2, SIZE))
    found(a.mount / top / "b", block(2, SIZE))
    unmount(a)
    (b.mount / top / "b").unlink()
    with Watcher([b, c], f"{top}/a", block(1, SIZE)) as watcher:
        not_empty((b.mount / top).rmdir)
        stored(b, f"{here}/told", block(3, SIZE))
        found(c.mount / here / "told", block(3, SIZE))
    assert watcher.wrong == []
    mount(a)
    settle(pod.nodes)
    assert (c.mount / top / "a").read_bytes() == block(1, SIZE)
    (a.mount / top / "a").unlink()
    (a.mount / top).rmdir()
    missing(c.mount / top)


def test_a_directory_is_left_and_had_again(pod: Pod, here: str) -> None:
    """Each node says in order whether it has it; the version is of its rights."""
    a, b, c = pod.nodes
    top = f"{here}/d"
    (a.mount / top).mkdir()
    agree(pod.nodes, top, (0o755, 0, 0))
    for i in range(5):
        stored(b, f"{top}/{i}", block(i, SIZE))
        found(c.mount / top / str(i), block(i, SIZE))
        found(a.mount / top / str(i), block(i, SIZE))
        if i == 0:
            not_empty((a.mount / top).rmdir)  # A has nothing there any more
        (b.mount / top / str(i)).unlink()
        missing(c.mount / top / str(i))
        (b.mount / top).rmdir()
        for node in pod.nodes:
            missing(node.mount / top)
        (b.mount / top).mkdir()
        agree(pod.nodes, top, (0o755, 0, 0))
