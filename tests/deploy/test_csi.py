"""The CSI node plugin, a process beside a live mount: the specification's checks of Identity and Node, and bad input.

No kubelet is here: the test says what a kubelet says, with directories as kubelet lays them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import REPOSITORY, Pool, requires_fuse, run, slowness, wait_until

pytest.importorskip("grpc", reason="grpcio is not installed: pip install 'kvfs[csi]'")
pytest.importorskip("google.protobuf", reason="protobuf, the test's client, is not installed")

from csi_client import Client, message

from kvfs.csi import messages as ours
from kvfs.csi.messages import EncodingError

TIMEOUT_S = 5
WRITER, READER = 5, 3


class Node:
    """A pool's mount, a kubelet's directory and the plugin between them."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.kubelet = pool.base / "kubelet"
        self.socket = pool.base / "csi.sock"
        self.log = pool.base / "csi.log"
        (self.kubelet / "pods").mkdir(parents=True)
        self.process = self.start()
        self.client = Client(str(self.socket))
        wait_until(self.is_ready, "the plugin")
        self.pods = 0

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return self.client.is_ready()

    def words(self, *more: str) -> list[str]:
        return [sys.executable, "-m", "kvfs.csi.server", "--endpoint", f"unix://{self.socket}", "--mount",
                str(self.pool.mount), "--node-id", "node-a", "--kubelet", str(self.kubelet), "--pool-name", "fast",
                "--timeout", str(min(60, TIMEOUT_S * slowness())), *more]  # fmt: skip

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(self.words(), cwd=REPOSITORY, stdout=log, stderr=log)

    def stop(self) -> None:
        self.client.channel.close()
        self.process.terminate()
        self.process.wait(60)
        with open("/proc/self/mountinfo") as lines:
            below = [line.split()[4] for line in lines if line.split()[4].startswith(str(self.kubelet))]
        for path in reversed(below):
            subprocess.run(["umount", "--lazy", path], check=False)

    def target(self) -> Path:
        """A new pod's target, as kubelet names it: the directory above is there, the target is not."""
        self.pods += 1
        above = self.kubelet / f"pods/{self.pods}/volumes/kubernetes.io~csi/kv"
        above.mkdir(parents=True)
        return above / "mount"

    def publish(self, target: Path, namespace: str = "team-a", **more: Any) -> None:
        self.client.call("NodePublishVolume", wanted(target, namespace, **more))

    def refused(self, request: Any) -> tuple[str, str]:
        return self.client.refused("NodePublishVolume", request)

    def unpublish(self, target: Path) -> None:
        self.client.call("NodeUnpublishVolume", message("Unpublish", volume_id="v", target_path=str(target)))


def capability(mode: int = WRITER, **mount: Any) -> Any:
    return message(
        "VolumeCapability", mount=message("MountVolume", **mount), access_mode=message("Mode", mode=mode)
    )  # fmt: skip


def wanted(target: Path | str, namespace: str | None = "team-a", **more: Any) -> Any:
    """A request for a pod's ephemeral volume, as kubelet writes it; without a namespace for a persistent one."""
    context = {} if namespace is None else {
        "csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/pod.namespace": namespace,
        "csi.storage.k8s.io/pod.name": "engine-0",
    }  # fmt: skip
    words = {"volume_id": "csi-0123", "target_path": str(target), "volume_capability": capability()}
    return message("Publish", **{**words, "volume_context": context, **more})


def mounts_at(target: Path) -> list[str]:
    with open("/proc/self/mountinfo") as lines:
        return [line for line in lines if line.split()[4] == str(target)]


@pytest.fixture(scope="module")
def live() -> Iterator[Node]:
    """A node for tests that leave its daemon alone."""
    requires_fuse()
    with Pool(files=1, size="256M") as pool:
        node = Node(pool)
        try:
            yield node
        finally:
            node.stop()


@pytest.fixture
def own(own_pool: Callable[..., Pool]) -> Iterator[Node]:
    node = Node(own_pool(files=1, size="256M"))
    try:
        yield node
    finally:
        node.stop()


# Identity.


def test_the_plugin_says_its_name_and_version(live: Node) -> None:
    import kvfs

    info = live.client.call("GetPluginInfo")
    assert (info.name, info.vendor_version) == ("csi.kvfs", kvfs.__version__)


def test_the_plugin_has_topology_and_no_controller(live: Node) -> None:
    found = live.client.call("GetPluginCapabilities")
    assert [item.kind.type for item in found.capabilities] == [2]
    assert live.client.refused("CreateVolume")[0] == "UNIMPLEMENTED"


def test_a_mount_that_answers_is_ready(live: Node) -> None:
    assert live.client.call("Probe").ready.value


# Node.


def test_the_node_says_its_id_and_its_pool(live: Node) -> None:
    info = live.client.call("NodeGetInfo")
    assert info.node_id == "node-a" and info.max_volumes_per_node == 0
    assert dict(info.accessible_topology.segments) == {"topology.csi.kvfs/pool": "fast"}


def test_the_node_has_statistics_and_conditions_and_does_not_stage(live: Node) -> None:
    found = live.client.call("NodeGetCapabilities")
    assert [item.kind.type for item in found.capabilities] == [2, 4]
    for method in ("NodeStageVolume", "NodeUnstageVolume", "NodeExpandVolume"):
        assert live.client.refused(method)[0] == "UNIMPLEMENTED"


def test_a_volume_is_published_used_measured_and_taken_back(live: Node) -> None:
    target = live.target()
    for _ in range(2):  # the second call finds it there
        live.publish(target)
    assert len(mounts_at(target)) == 1 and {"nosuid", "nodev"} <= set(mounts_at(target)[0].split()[5].split(","))
    (target / "block").write_bytes(b"x" * 70000)
    assert (live.pool.mount / "team-a/block").read_bytes() == b"x" * 70000
    assert (live.pool.mount / "team-a").stat().st_mode & 0o777 == 0o777
    found = live.client.call("NodeGetVolumeStats", message("Stats", volume_id="v", volume_path=str(target)))
    assert [usage.unit for usage in found.usage] == [1, 2]
    size = found.usage[0]
    assert size.total > 0 and size.used + size.available == size.total
    assert not found.volume_condition.abnormal and found.volume_condition.message
    for _ in range(2):
        live.unpublish(target)
        assert not target.exists() and not mounts_at(target)
    assert (live.pool.mount / "team-a/block").exists()


def test_pods_of_one_namespace_share_and_those_of_another_do_not(live: Node) -> None:
    first, second, other = live.target(), live.target(), live.target()
    live.publish(first, "share-a")
    live.publish(second, "share-a")
    live.publish(other, "share-b")
    (first / "block").write_bytes(b"one")
    assert (second / "block").read_bytes() == b"one" and os.listdir(other) == []


@pytest.mark.parametrize("more", [
    {"readonly": True}, {"volume_capability": capability(READER)},
    {"volume_capability": capability(mount_flags=["ro", "noexec"])},
], ids=["readonly", "reader", "flag"])  # fmt: skip
def test_a_volume_that_is_asked_for_read_only_is(live: Node, more: dict[str, Any]) -> None:
    target = live.target()
    live.publish(target, **more)
    live.publish(target, **more)
    with pytest.raises(OSError, match="Read-only"):
        (target / "block").write_bytes(b"x")
    code, words = live.refused(wanted(target))
    assert code == "ALREADY_EXISTS" and "read-only" in words


def test_a_persistent_volume_is_the_namespace_of_its_attribute_or_its_handle(live: Node) -> None:
    by_handle, by_attribute = live.target(), live.target()
    live.client.call("NodePublishVolume", wanted(by_handle, None, volume_id="team-p"))
    more = {"volume_id": "pv-2", "volume_context": {"namespace": "team-p"}}
    live.client.call("NodePublishVolume", wanted(by_attribute, None, **more))
    (by_handle / "block").write_bytes(b"p")
    assert (by_attribute / "block").read_bytes() == b"p"


def test_a_pod_s_author_chooses_no_other_namespace(live: Node) -> None:
    target = live.target()
    request = wanted(target, "mine")
    request.volume_context["namespace"] = "yours"
    live.client.call("NodePublishVolume", request)
    assert mounts_at(target)[0].split()[3] == "/mine" and not (live.pool.mount / "yours").exists()


@pytest.mark.parametrize(("change", "words"), [
    ({"volume_id": ""}, "volume_id is missing"),
    ({"target_path": ""}, "target_path is missing"),
    ({"volume_capability": None}, "volume_capability with an access type is missing"),
    ({"volume_capability": message("VolumeCapability", access_mode=message("Mode", mode=5))}, "access type is missing"),
    ({"volume_capability": message("VolumeCapability", block=message("Empty"))}, "not a block device"),
    ({"volume_capability": capability(0)}, "access mode 0"),
    ({"volume_capability": capability(99)}, "access mode 99"),
    ({"volume_capability": capability(fs_type="ext4")}, "fs_type 'ext4'"),
    ({"volume_capability": capability(mount_flags=["suid"])}, "1 mount flags are unknown"),
    ({"volume_context": {"csi.storage.k8s.io/ephemeral": "true"}}, "podInfoOnMount"),
    ({"volume_context": {"namespace": "../team-b"}}, "'../team-b'"),
    ({"volume_context": {"namespace": ".."}}, "'..'"),
    ({"volume_context": {"namespace": "a/b"}}, "'a/b'"),
    ({"volume_context": {"namespace": ""}}, "''"),
    ({"volume_context": {"namespace": ".kvfs"}}, "'.kvfs'"),
    ({"volume_context": {"namespace": "n" * 254}}, "at most 253"),
    ({"volume_context": {}, "volume_id": "/etc"}, "volume_id"),
])  # fmt: skip
def test_a_request_that_is_wrong_says_which_field(live: Node, change: dict[str, Any], words: str) -> None:
    target = live.target()
    code, said = live.refused(wanted(target, **change))
    assert code == "INVALID_ARGUMENT" and words in said
    assert not target.exists()


@pytest.mark.parametrize(("method", "request_", "word"), [
    ("NodeUnpublishVolume", message("Unpublish", target_path="/x"), "volume_id"),
    ("NodeUnpublishVolume", message("Unpublish", volume_id="v"), "target_path"),
    ("NodeGetVolumeStats", message("Stats", volume_path="/x"), "volume_id"),
    ("NodeGetVolumeStats", message("Stats", volume_id="v"), "volume_path"),
])  # fmt: skip
def test_a_missing_field_of_the_other_calls_is_named(live: Node, method: str, request_: Any, word: str) -> None:
    assert live.client.refused(method, request_) == ("INVALID_ARGUMENT", f"{word} is missing")


def test_a_volume_path_that_is_not_there_or_no_volume_is_not_found(live: Node) -> None:
    for path in (live.target(), live.kubelet / "pods"):
        code, said = live.client.refused("NodeGetVolumeStats", message("Stats", volume_id="v", volume_path=str(path)))
        assert code == "NOT_FOUND" and str(path) in said


def test_targets_outside_kubelet_s_directory_are_refused(live: Node) -> None:
    outside = live.pool.base / "outside"
    inside = f"{live.kubelet}/pods/x/../../../outside"
    for target in (str(outside), inside, f"{live.kubelet}//pods/a", str(live.kubelet), "pods/x", "/"):
        for call, request in (
            ("NodePublishVolume", wanted(target)),
            ("NodeUnpublishVolume", message("Unpublish", volume_id="v", target_path=target)),
        ):
            code, said = live.client.refused(call, request)
            assert code == "INVALID_ARGUMENT" and "is not below" in said
    assert not outside.exists()


def test_no_symbolic_link_is_followed(live: Node) -> None:
    elsewhere = live.pool.base / "elsewhere"
    (elsewhere / "kv").mkdir(parents=True)
    target = live.target()
    target.symlink_to(elsewhere)
    code, said = live.refused(wanted(target))
    assert code == "FAILED_PRECONDITION" and "symbolic link" in said
    unpublish = message("Unpublish", volume_id="v", target_path=str(target))
    assert live.client.refused("NodeUnpublishVolume", unpublish)[0] == "FAILED_PRECONDITION"
    (live.kubelet / "pods/linked").symlink_to(elsewhere)
    code, said = live.refused(wanted(live.kubelet / "pods/linked/kv/mount"))
    assert code == "INVALID_ARGUMENT" and "symbolic link" in said
    assert target.is_symlink() and os.listdir(elsewhere / "kv") == []


def test_a_namespace_that_is_a_link_or_a_file_is_refused(live: Node) -> None:
    (live.pool.mount / "linked").symlink_to("/etc")
    (live.pool.mount / "file").write_bytes(b"x")
    for name in ("linked", "file"):
        code, said = live.refused(wanted(live.target(), name))
        assert code == "FAILED_PRECONDITION" and f"'{name}'" in said


def test_an_occupied_target_is_left_as_it_is(live: Node) -> None:
    taken = live.target()
    live.publish(taken, "occupied-a")
    code, said = live.refused(wanted(taken, "occupied-b"))
    assert code == "ALREADY_EXISTS" and "/occupied-a" in said and "/occupied-b" in said
    foreign = live.target()
    foreign.mkdir()
    run("mount", "-t", "tmpfs", "tmpfs", foreign)
    full = live.target()
    full.mkdir()
    (full / "somebody's").touch()
    file = live.target()
    file.write_text("somebody's")
    for target, words in ((foreign, "tmpfs"), (full, "1 entries"), (file, "no directory")):
        code, said = live.refused(wanted(target))
        assert code == "FAILED_PRECONDITION" and words in said
        unpublish = message("Unpublish", volume_id="v", target_path=str(target))
        assert live.client.refused("NodeUnpublishVolume", unpublish)[0] == "FAILED_PRECONDITION"
    assert len(mounts_at(taken)) == len(mounts_at(foreign)) == 1 and file.read_text() == "somebody's"


def test_a_target_of_another_live_pool_is_refused(live: Node, own_pool: Callable[..., Pool]) -> None:
    other = own_pool(files=1, size="256M")
    target = live.target()
    target.mkdir()
    run("mount", "--bind", other.mount, target)
    code, said = live.refused(wanted(target))
    assert code == "FAILED_PRECONDITION" and "another connection" in said and str(other.path) in said
    run("umount", target)


def test_bytes_that_are_no_message_are_refused_and_the_plugin_lives(live: Node) -> None:
    import grpc

    for data in (b"\x0a", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", b"\x08\x01", b"\xff" * 11, b"\x0b", b"\x00\x00"):
        with pytest.raises(grpc.RpcError) as caught:
            live.client.raw("NodePublishVolume", data)
        assert caught.value.code().name == "INVALID_ARGUMENT", data
    assert live.client.call("Probe").ready.value


def test_a_second_plugin_does_not_take_the_socket(live: Node) -> None:
    ended = run(*live.words(), check=False)
    assert ended.returncode == 1 and "another plugin listens there" in ended.stderr
    nowhere = run(*live.words(), "--endpoint", "/nowhere/x.sock", check=False)
    assert nowhere.returncode == 1 and nowhere.stderr == (
        "kvfs-csi: --endpoint /nowhere/x.sock: /nowhere is no directory\n"
    )
    assert live.client.call("GetPluginInfo").name


def test_the_plugin_s_memory_is_bounded(live: Node) -> None:
    target = live.target()
    for _ in range(30):
        live.publish(target)
    status = Path(f"/proc/{live.process.pid}/status").read_text()
    size = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
    print(f"VmRSS of the plugin: {size >> 10} MiB")
    assert size < 100 << 10


# More of the specification's checks.


@pytest.mark.parametrize("name", ["..", ".", "a/..", "../b", "", "a\n", "é", "n" * 254])
def test_a_pod_s_namespace_that_is_no_name_is_refused(live: Node, name: str) -> None:
    target = live.target()
    code, said = live.refused(wanted(target, name))
    assert code == "INVALID_ARGUMENT" and "the pod's namespace" in said
    assert not target.exists()


def test_a_volume_that_nobody_published_is_taken_back_without_an_error(live: Node) -> None:
    never = live.target()
    for path in (never, live.kubelet / "pods/none/volumes/kubernetes.io~csi/kv/mount"):
        for volume in ("nobody's", "csi-0123"):
            request = message("Unpublish", volume_id=volume, target_path=str(path))
            live.client.call("NodeUnpublishVolume", request)
    assert never.parent.exists() and not never.exists()


def test_a_target_whose_directory_is_not_there_is_not_found(live: Node) -> None:
    code, said = live.refused(wanted(live.kubelet / "pods/none/volumes/kubernetes.io~csi/kv/mount"))
    assert code == "NOT_FOUND" and "pods/none" in said


def test_one_volume_has_many_targets_and_each_goes_by_itself(live: Node) -> None:
    first, second = live.target(), live.target()
    for target in (first, second):
        live.publish(target, None, volume_id="team-many")
    live.unpublish(first)
    assert not first.exists() and len(mounts_at(second)) == 1
    (second / "block").write_bytes(b"x")
    assert (live.pool.mount / "team-many/block").read_bytes() == b"x"
    # A read-only one is taken back as well.
    live.publish(first, None, volume_id="team-many", readonly=True)
    assert (first / "block").read_bytes() == b"x"
    live.unpublish(first)
    assert not first.exists()


def test_a_namespace_that_was_removed_is_made_anew_below_its_pods_next_volume(live: Node) -> None:
    target = live.target()
    live.publish(target, "removed")
    (live.pool.mount / "removed").rmdir()
    live.publish(target, "removed")
    assert len(mounts_at(target)) == 1
    (target / "block").write_bytes(b"x")
    assert (live.pool.mount / "removed/block").read_bytes() == b"x"


def test_measures_of_a_path_that_is_a_link_or_elsewhere_are_refused(live: Node) -> None:
    target, link = live.target(), live.target()
    live.publish(target)
    link.symlink_to(target)
    for path, code in ((link, "FAILED_PRECONDITION"), (live.pool.mount, "INVALID_ARGUMENT")):
        request = message("Stats", volume_id="v", volume_path=str(path))
        assert live.client.refused("NodeGetVolumeStats", request)[0] == code


def test_fields_without_a_meaning_here_change_nothing(live: Node) -> None:
    target = live.target()
    more = {"staging_target_path": "/nowhere", "publish_context": {"a": "b"}, "secrets": {"token": "hidden words"}}
    live.publish(target, "extra", **more)
    live.publish(target, "extra")
    assert len(mounts_at(target)) == 1
    # The specification: neither secrets nor mount flags in messages or logs.
    code, said = live.refused(wanted(live.target(), "..", **more))
    assert code == "INVALID_ARGUMENT" and "hidden" not in said
    flagged = wanted(live.target(), volume_capability=capability(mount_flags=["hidden"]))
    assert "hidden" not in live.refused(flagged)[1]
    assert "hidden" not in live.log.read_text()


def test_many_volumes_are_published_at_one_time(live: Node) -> None:
    targets = [live.target() for _ in range(12)]
    with ThreadPoolExecutor(len(targets)) as threads:
        list(threads.map(lambda target: live.publish(target, "together"), targets))
        assert [len(mounts_at(target)) for target in targets] == [1] * len(targets)
        list(threads.map(live.unpublish, targets))
    assert not [target for target in targets if target.exists() or mounts_at(target)]


# The daemon ends, stops, comes back.


@pytest.mark.slow
def test_a_bind_of_an_ended_daemon_is_replaced_by_the_new_one_s(own: Node) -> None:
    target = own.target()
    own.publish(target)
    (target / "block").write_bytes(b"x" * 4096)
    own.pool.kill()
    assert not own.client.call("Probe").ready.value
    code, said = own.refused(wanted(target))
    assert code == "UNAVAILABLE" and str(own.pool.mount) in said
    found = own.client.call("NodeGetVolumeStats", message("Stats", volume_id="v", volume_path=str(target)))
    assert found.volume_condition.abnormal and "does not answer" in found.volume_condition.message
    own.pool.remount()
    own.publish(target)
    assert len(mounts_at(target)) == 1
    (target / "again").write_bytes(b"y")
    # Dead once more, and taken back without a daemon; a plugin that is new takes the socket of the one that was killed.
    own.pool.kill()
    own.process.kill()
    own.process.wait(60)
    own.process = own.start()
    own.client = Client(str(own.socket))
    own.client.ready(60 * slowness())
    own.unpublish(target)
    assert not target.exists() and not mounts_at(target)


@pytest.mark.slow
def test_a_mount_that_does_not_answer_is_unavailable_within_the_deadline(own: Node) -> None:
    target, later = own.target(), own.target()
    own.publish(target)
    pid = own.pool.pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        code, said = own.refused(wanted(later))
        assert code == "UNAVAILABLE" and "does not answer: no answer within" in said
        assert not own.client.call("Probe").ready.value
        found = own.client.call("NodeGetVolumeStats", message("Stats", volume_id="v", volume_path=str(target)))
        assert found.volume_condition.abnormal
        assert time.monotonic() - began < 3 * 12 * TIMEOUT_S * slowness()
        # Of two calls for one target one ends at once.
        busy = wanted(own.target())
        with ThreadPoolExecutor(2) as threads:
            codes = [code for code, _ in threads.map(own.refused, (busy, busy))]
        assert sorted(codes) == ["ABORTED", "UNAVAILABLE"]
        # A pod can end meanwhile: what takes a volume back asks the mount nothing.
        own.unpublish(target)
        assert not mounts_at(target) and not mounts_at(later)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: own.client.call("Probe").ready.value, "the mount answers again")
    own.publish(later)
    assert len(mounts_at(later)) == 1


@pytest.mark.slow
def test_a_path_without_a_mount_is_not_ready(own: Node) -> None:
    own.pool.umount()
    assert not own.client.call("Probe").ready.value
    code, said = own.refused(wanted(own.target()))
    assert code == "UNAVAILABLE" and "is no kvfs mount" in said


# Without a daemon.


def test_the_encoding_is_protobuf_s() -> None:
    request = wanted("/t", "ns", volume_id="v", readonly=True)
    request.secrets["unknown here"] = "skipped"
    found = ours.PublishRequest.decode(request.SerializeToString())
    assert (found.volume_id, found.target_path, found.readonly) == ("v", "/t", True)
    assert found.volume_context == dict(request.volume_context)
    reply = ours.StatsReply([ours.Usage(available=-1, total=1 << 62, used=0, unit=1)], ours.Condition(True, "ä"))
    theirs = message("Statistics").FromString(reply.encode())
    assert (theirs.usage[0].available, theirs.usage[0].total) == (-1, 1 << 62)
    assert theirs.volume_condition.abnormal and theirs.volume_condition.message == "ä"
    with pytest.raises(EncodingError, match="more than 10 bytes"):
        ours.PublishRequest.decode(b"\xff" * 11)


@pytest.mark.parametrize(("words", "said"), [
    (("--mount", "mnt"), "--mount mnt: not an absolute path"),
    (("--endpoint", "x.sock"), "--endpoint x.sock: not an absolute path"),
    (("--node-id", ""), "--node-id of 0 bytes"),
    (("--pool-name", "a b"), "--pool-name a b"),
    (("--timeout", "0"), "--timeout 0"),
    (("--endpoint", f"/{'x' * 107}"), "108 bytes; the path of a socket has at most 107"),
])  # fmt: skip
def test_a_wrong_option_is_named(words: tuple[str, ...], said: str) -> None:
    whole = ("--endpoint", "/nowhere/x.sock", "--mount", "/mnt", "--node-id", "n", *words)
    ended = run(sys.executable, "-m", "kvfs.csi.server", *whole, check=False)
    assert ended.returncode == 2 and said in ended.stderr


def test_the_manual_page_has_each_option_and_its_default() -> None:
    from kvfs.csi.server import parser

    page = (REPOSITORY / "tools/kvfs-csi.8").read_text().replace("\\-", "-")
    options = page.partition(".SH OPTIONS")[2]
    given = [action for action in parser()._actions if action.metavar]
    assert options.count(".TP") == len(given) == 6
    for action in given:
        (name,) = action.option_strings
        text = options.partition(f"\\fB{name}\\fR \\fI{action.metavar}\\fR")[2].partition(".TP")[0]
        default = (
            "Required." if action.required else f"(default: {action.default:{'g' if name == '--timeout' else ''}})"
        )
        assert default in text, name


def test_the_manual_page_is_roff() -> None:
    mandoc = shutil.which("mandoc")
    if mandoc is None:
        pytest.skip("no mandoc on this machine")
    for page in ("kvfs-csi.8", "mount.kvfs.8"):
        said = run(mandoc, "-T", "lint", "-W", "warning", REPOSITORY / "tools" / page, check=False).stdout
        assert [line for line in said.splitlines() if "missing date" not in line] == []
