"""The image in containers, as the chart's pods have them: the root read-only, no network, the mount seen outside."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator, Sequence

import helpers
import pytest
from oci import Container, Image, image, shared

__all__ = ["image"]
pytestmark = pytest.mark.slow
CONTENT = b"a block of a cache, " * 50_000
POOL, MOUNTS = "/var/lib/kvfs", "/run/kvfs"
# The chart's readiness probe, where no metrics answer.
_TEMPLATE = (helpers.REPOSITORY / "packaging/chart/kvfs/templates/daemon.yaml").read_text()
(READY,) = re.findall(r"exec: \{command: \[sh, -c, '([^']+)', ", _TEMPLATE)


class Node:
    """A node's directories, and containers on it."""

    def __init__(self, image: Image, work: pathlib.Path, mounts: pathlib.Path) -> None:
        self.image, self.work, self.mounts = image, work, mounts
        self.pools = work / "pools"
        self.pools.mkdir()
        self.made: list[Container] = []

    def start(self, words: list[str], *more: tuple[pathlib.Path, str, str], how: str = "rshared") -> Container:
        bound = [(self.pools, POOL, "rprivate"), (self.mounts, MOUNTS, how), (pathlib.Path("/dev"), "/dev", "rprivate")]
        name = f"{self.work.name}-{len(self.made)}"
        self.made.append(Container(self.image, name, self.work, words, [*bound, *more]))
        return self.made[-1]

    def daemon(self, *options: str, more: Sequence[tuple[pathlib.Path, str, str]] = ()) -> Container:
        words = [*self.image.entrypoint, "mount", "--foreground", "--allow-other", "--staging", "64M", *options]
        container = self.start([*words, f"{POOL}/fast", f"{MOUNTS}/fast"], *more)
        helpers.wait_until(lambda: self.answers() or self.has_ended(container), "the mount is seen outside")
        return container

    def has_ended(self, container: Container) -> bool:
        assert container.process.poll() is None, container.log.read_text()
        return False

    def answers(self) -> bool:
        """Whether a daemon answers there. One call: a dead mount may go, and be the directory below it, at any time."""
        return helpers.run("sh", "-c", READY, self.files(), check=False).returncode == 0

    def files(self) -> pathlib.Path:
        return self.mounts / "fast"


@pytest.fixture
def node(image: Image, tmp_path: pathlib.Path) -> Iterator[Node]:
    helpers.requires_fuse()
    with shared(tmp_path / "mounts") as mounts:
        found = Node(image, tmp_path, mounts)
        try:
            made = found.start(
                ["sh", "-c", f"mkdir {MOUNTS}/fast && kvfs format {POOL}/fast --files 1 --size 1G"], how="rprivate"
            )
            assert made.wait() == 0, made.log.read_text()
            yield found
        finally:
            for container in found.made:
                container.close()


def test_the_image_starts_kvfs(image: Image) -> None:
    assert image.entrypoint == ["kvfs"]
    # Files that a build alone needs are not in it.
    assert not (image.root / "tmp/kvfs").exists() and not list((image.root / "var/lib/apt/lists").glob("*Packages*"))


def test_the_mount_of_a_container_is_the_machine_s_and_another_container_s(node: Node) -> None:
    daemon = node.daemon()
    (node.files() / "block").write_bytes(CONTENT)
    seen = node.start(["sh", "-c", f"cmp {MOUNTS}/fast/block {MOUNTS}/fast/block && cat {MOUNTS}/fast/block | wc -c"],
                      how="rslave")  # fmt: skip
    assert seen.wait() == 0 and seen.log.read_text().strip() == str(len(CONTENT))
    assert daemon.inside("sh", "-c", READY, f"{MOUNTS}/fast").returncode == 0
    daemon.signal("TERM")
    assert daemon.wait() == 0, daemon.log.read_text()
    assert not node.answers()
    again = node.daemon()
    assert (node.files() / "block").read_bytes() == CONTENT
    again.signal("TERM")
    assert again.wait() == 0


def test_an_unmount_as_a_hook_ends_with_0_before_the_container(node: Node) -> None:
    for _ in range(helpers.often(2, 3, 50)):
        daemon = node.daemon()
        ended = daemon.inside("kvfs", "umount", f"{MOUNTS}/fast")
        assert ended.returncode == 0, ended.stderr
        assert daemon.wait() == 0
        assert not node.answers()


def test_the_first_process_reaps_orphans(node: Node) -> None:
    daemon = node.daemon()
    orphan = daemon.inside("sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!").stdout.strip()
    assert daemon.inside("sh", "-c", f"kill -9 {orphan}").returncode == 0

    def gone() -> bool:
        return daemon.inside("test", "-e", f"/proc/{orphan}").returncode != 0

    helpers.wait_until(gone, "the orphan is reaped")


def test_a_container_that_was_killed_leaves_a_pool_that_the_next_one_mounts(node: Node) -> None:
    daemon = node.daemon()
    (node.files() / "block").write_bytes(CONTENT)
    helpers.run("sync", "--file-system", node.files() / "block")
    daemon.signal("KILL")
    assert daemon.wait() == 137
    # As a kubelet starts it anew: the dead mount is still there.
    node.daemon()
    assert (node.files() / "block").read_bytes() == CONTENT


def test_a_held_mount_outlives_its_container(node: Node) -> None:
    held = node.work / "held"
    held.mkdir()
    socket = (held, "/run/kvfs-hold", "rprivate")
    holder = node.start([*node.image.entrypoint, "hold", "/run/kvfs-hold/fast.sock"], socket)
    helpers.wait_until((held / "fast.sock").exists, "the holder listens")
    words = ("--hold", "/run/kvfs-hold/fast.sock")
    daemon = node.daemon(*words, more=[socket])
    (node.files() / "block").write_bytes(CONTENT)
    helpers.run("sync", "--file-system", node.files() / "block")
    device = node.files().stat().st_dev
    with (node.files() / "block").open("rb") as reader:
        for name, status in (("TERM", 0), ("KILL", 137)):
            daemon.signal(name)
            assert daemon.wait() == status, daemon.log.read_text()
            daemon = node.daemon(*words, more=[socket])
            assert reader.seek(0) == 0 and reader.read() == CONTENT
            assert "taken over from" in daemon.log.read_text()
    assert node.files().stat().st_dev == device
    assert daemon.inside("kvfs", "umount", f"{MOUNTS}/fast").returncode == 0
    assert daemon.wait() == holder.wait() == 0


def test_the_plugin_of_the_image_binds_the_mount_for_a_pod(node: Node, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("grpc", reason="grpcio, the test's client, is not installed")
    pytest.importorskip("google.protobuf", reason="protobuf, the test's client, is not installed")
    from csi_client import Client
    from test_csi import wanted

    node.daemon()
    with shared(tmp_path / "kubelet") as kubelet:
        (kubelet / "plugins").mkdir()
        above = kubelet / "pods/1/volumes/kubernetes.io~csi/kv"
        above.mkdir(parents=True)
        words = ["kvfs-csi", "--endpoint=/csi/csi.sock", f"--mount={MOUNTS}/fast", "--node-id=node-a",
                 f"--kubelet={kubelet}", "--pool-name=fast"]  # fmt: skip
        node.start(words, (kubelet / "plugins", "/csi", "rprivate"), (kubelet, str(kubelet), "rshared"), how="rslave")
        client = Client(str(kubelet / "plugins/csi.sock"))
        try:
            client.ready(60 * helpers.slowness())
            assert client.call("Probe").ready.value
            client.call("NodePublishVolume", wanted(above / "mount", "team-a"))
            (above / "mount/block").write_bytes(CONTENT)
            assert (node.files() / "team-a/block").read_bytes() == CONTENT
            pod = node.start(["sh", "-c", "cat /kv/block | wc -c"], (above / "mount", "/kv", "rprivate"))
            assert pod.wait() == 0 and pod.log.read_text().strip() == str(len(CONTENT))
        finally:
            client.channel.close()
