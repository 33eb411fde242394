"""Identity and Node of CSI: requests are checked here, and carried out by a worker. Nothing is kept between requests:
the kernel's mounts are the state.

Codes are as in the specification's tables. A missing or wrong field is INVALID_ARGUMENT, a path that is not there
NOT_FOUND. A target at work is ABORTED, and one that is published otherwise ALREADY_EXISTS.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from kvfs.csi import messages as csi
from kvfs.csi.worker import Worker

# A namespace is one name: Kubernetes' own rule, and room for volume handles.
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_FLAGS = ("ro", "noexec", "nosuid", "nodev")
_READ_ONLY = (csi.AccessMode.SINGLE_NODE_READER_ONLY, csi.AccessMode.MULTI_NODE_READER_ONLY)
_POD_NAMESPACE, _EPHEMERAL = "csi.storage.k8s.io/pod.namespace", "csi.storage.k8s.io/ephemeral"


class CallError(Exception):
    """The end of a call: a gRPC code's name, and words."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _refuse(message: str) -> NoReturn:
    raise CallError("INVALID_ARGUMENT", message)


def namespace_of(request: csi.PublishRequest) -> str:
    """The directory of the mount that a volume is.

    An ephemeral volume is written into a pod by its author, so it gets the pod's own namespace and no other. A
    persistent one is made by the cluster's administrator: its attribute `namespace`, else its handle.
    """
    context = request.volume_context
    if context.get(_EPHEMERAL) == "true":
        if _POD_NAMESPACE not in context:
            _refuse(f"volume_context has no {_POD_NAMESPACE}: podInfoOnMount of the CSIDriver object is not set")
        what, name = f"the pod's namespace of ephemeral volume {request.volume_id!r}", context[_POD_NAMESPACE]
    elif "namespace" in context:
        what, name = f"attribute namespace of volume {request.volume_id!r}", context["namespace"]
    else:
        what, name = "volume_id, which is the namespace where no attribute names one,", request.volume_id
    if not _NAMESPACE.fullmatch(name):
        _refuse(f"{what} is {name!r}: one name of letters, digits, '.', '_' and '-', at most 253, is allowed")
    return name


def flags_of(request: csi.PublishRequest) -> list[str]:
    """Mount flags, and "ro" where the volume is read-only by any of the three ways to say it."""
    wanted = request.volume_capability
    if wanted is None or (wanted.mount is None and wanted.block is None):
        _refuse("volume_capability with an access type is missing")
    if wanted.block is not None:
        _refuse("volume_capability: a kvfs volume is a directory, not a block device")
    assert wanted.mount is not None
    mode = wanted.access_mode.mode if wanted.access_mode else 0
    if mode not in list(csi.AccessMode):
        _refuse(f"volume_capability: access mode {mode} is missing or unknown")
    if wanted.mount.fs_type not in ("", "kvfs"):
        _refuse(f"volume_capability: fs_type {wanted.mount.fs_type!r}: there is kvfs alone, leave it out")
    # The specification forbids to repeat mount flags in messages.
    if unknown := [flag for flag in wanted.mount.mount_flags if flag not in _FLAGS]:
        _refuse(f"volume_capability: {len(unknown)} mount flags are unknown; there are {', '.join(_FLAGS)}")
    read_only = request.readonly or mode in _READ_ONLY
    return sorted({*wanted.mount.mount_flags, *(["ro"] if read_only else [])})


class Services:
    def __init__(self, worker: Worker, *, name: str, version: str, node_id: str, pool_name: str) -> None:
        self._worker, self._name, self._version = worker, name, version
        self._node_id, self._pool_name = node_id, pool_name
        self._lock = threading.Lock()
        self._at_work: set[str] = set()

    # Identity.

    def plugin_info(self, request: csi.Empty) -> csi.PluginInfo:
        return csi.PluginInfo(self._name, self._version)

    def plugin_capabilities(self, request: csi.Empty) -> csi.Capabilities:
        return csi.Capabilities.of(csi.Capabilities.ACCESSIBILITY_CONSTRAINTS)

    def probe(self, request: csi.Empty) -> csi.ProbeReply:
        """Ready if the mount answers. The plugin itself is sound, so it is no error if not."""
        return csi.ProbeReply(csi.Flag(self._worker.ask("probe")["code"] == "OK"))

    # Node.

    def node_info(self, request: csi.Empty) -> csi.NodeInfo:
        return csi.NodeInfo(self._node_id, 0, csi.Topology({f"topology.{self._name}/pool": self._pool_name}))

    def node_capabilities(self, request: csi.Empty) -> csi.Capabilities:
        return csi.Capabilities.of(csi.Capabilities.GET_VOLUME_STATS, csi.Capabilities.VOLUME_CONDITION)

    def publish(self, request: csi.PublishRequest) -> csi.Empty:
        self._check_volume(request.volume_id, "target_path", request.target_path)
        flags, namespace = flags_of(request), namespace_of(request)
        with self._alone(request.target_path):
            self._ask("publish", target=request.target_path, namespace=namespace, flags=flags)
        return csi.Empty()

    def unpublish(self, request: csi.UnpublishRequest) -> csi.Empty:
        self._check_volume(request.volume_id, "target_path", request.target_path)
        with self._alone(request.target_path):
            self._ask("unpublish", target=request.target_path)
        return csi.Empty()

    def statistics(self, request: csi.StatsRequest) -> csi.StatsReply:
        self._check_volume(request.volume_id, "volume_path", request.volume_path)
        try:
            answer = self._ask("statistics", target=request.volume_path)
        except CallError as error:
            if error.code != "UNAVAILABLE":
                raise
            answer = {"abnormal": str(error)}
        if "abnormal" in answer:
            return csi.StatsReply([], csi.Condition(True, answer["abnormal"]))
        usage = []
        for unit, name in ((csi.Usage.BYTES, "bytes"), (csi.Usage.INODES, "inodes")):
            available, total, used = answer[name]
            usage.append(csi.Usage(available=available, total=total, used=used, unit=unit))
        return csi.StatsReply(usage, csi.Condition(False, "the mount answers"))

    @staticmethod
    def _check_volume(volume_id: str, name: str, path: str) -> None:
        if not volume_id:
            _refuse("volume_id is missing")
        if not path:
            _refuse(f"{name} is missing")

    def _ask(self, verb: str, **words: Any) -> dict[str, Any]:
        answer = self._worker.ask(verb, **words)
        if answer["code"] != "OK":
            raise CallError(answer["code"], answer["message"])
        return answer

    @contextmanager
    def _alone(self, target: str) -> Iterator[None]:
        with self._lock:
            if target in self._at_work:
                raise CallError("ABORTED", f"target path {target!r}: an earlier call is still at work")
            self._at_work.add(target)
        try:
            yield
        finally:
            with self._lock:
                self._at_work.discard(target)
