"""`kvfs-csi`: the services on a unix socket, by grpcio, until SIGTERM."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import kvfs
from kvfs.csi import messages as csi
from kvfs.csi.node import CallError, Services
from kvfs.csi.worker import Worker

NAME = "csi.kvfs"
_CALLS_AT_ONCE = 8
_GRACE_S = 5
_PATH_MAX = 107  # sockaddr_un, without the zero at its end
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
log = logging.getLogger("kvfs.csi")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="kvfs-csi",
        description="CSI node plugin: binds a directory of this node's kvfs mount into pods. docs/kubernetes.md.",
    )
    found.add_argument("--endpoint", required=True, metavar="SOCKET", help="the unix socket to serve at (required)")
    found.add_argument("--mount", required=True, metavar="MOUNT", help="this node's kvfs mount (required)")
    found.add_argument("--node-id", required=True, metavar="NAME", help="this node's name in Kubernetes (required)")
    found.add_argument(
        "--kubelet", default="/var/lib/kubelet", metavar="DIR",
        help="kubelet's directory; targets lie below it (default: %(default)s)",
    )  # fmt: skip
    found.add_argument(
        "--pool-name",
        default="default",
        metavar="NAME",
        help="the pool, for the node's topology (default: %(default)s)",
    )
    found.add_argument(
        "--timeout", type=float, default=10.0, metavar="S",
        help="answer UNAVAILABLE if the mount does not answer within this (default: %(default)g)",
    )  # fmt: skip
    found.add_argument("--version", action="version", version=f"kvfs-csi {kvfs.__version__}")
    return found


def handlers(services: Services, grpc: Any) -> list[Any]:
    """Both services as grpcio takes them; what is not named is UNIMPLEMENTED."""

    def method(call: Callable[[Any], csi.Message], request: type[csi.Message]) -> Any:
        def answer(data: bytes, context: Any) -> bytes:
            try:
                return call(request.decode(data)).encode()
            except CallError as error:
                code, words = error.code, str(error)
            except csi.EncodingError as error:
                code, words = "INVALID_ARGUMENT", f"the request's encoding: {error}"
            log.warning("%s: %s: %s", call.__name__, code, words)
            context.abort(getattr(grpc.StatusCode, code), words)
            raise AssertionError("abort returned")

        return grpc.unary_unary_rpc_method_handler(answer)

    identity = {
        "GetPluginInfo": method(services.plugin_info, csi.Empty),
        "GetPluginCapabilities": method(services.plugin_capabilities, csi.Empty),
        "Probe": method(services.probe, csi.Empty),
    }
    node = {
        "NodeGetInfo": method(services.node_info, csi.Empty),
        "NodeGetCapabilities": method(services.node_capabilities, csi.Empty),
        "NodePublishVolume": method(services.publish, csi.PublishRequest),
        "NodeUnpublishVolume": method(services.unpublish, csi.UnpublishRequest),
        "NodeGetVolumeStats": method(services.statistics, csi.StatsRequest),
    }
    return [
        grpc.method_handlers_generic_handler("csi.v1.Identity", identity),
        grpc.method_handlers_generic_handler("csi.v1.Node", node),
    ]


def clear_socket(path: Path) -> None:
    """Remove the socket of a plugin that ended. OSError: something else lies there, a process listens, or it has no
    directory for it."""
    if not path.parent.is_dir():
        raise NotADirectoryError(f"{path.parent} is no directory")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} is no socket")
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(2)
        try:
            asking.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise FileExistsError(f"{path}: another plugin listens there")


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    path = Path(given.endpoint.removeprefix("unix://"))
    problem = next((words for words, is_wrong in (
        (f"--mount {given.mount}: not an absolute path", not os.path.isabs(given.mount)),
        (f"--kubelet {given.kubelet}: not an absolute path", not os.path.isabs(given.kubelet)),
        (f"--endpoint {given.endpoint}: not an absolute path", not path.is_absolute()),
        (f"--endpoint {path}: {len(os.fsencode(path))} bytes; the path of a socket has at most {_PATH_MAX}",
         len(os.fsencode(path)) > _PATH_MAX),
        (f"--node-id of {len(given.node_id)} bytes: 1 to 256 are allowed", not 0 < len(given.node_id.encode()) <= 256),
        (f"--pool-name {given.pool_name}: no value of a label", not _LABEL.fullmatch(given.pool_name)),
        (f"--timeout {given.timeout:g}: 0.1 to 60 are allowed", not 0.1 <= given.timeout <= 60),
    ) if is_wrong), None)  # fmt: skip
    if problem:
        print(f"kvfs-csi: {problem}", file=sys.stderr)
        return 2
    try:
        import grpc
    except ImportError as error:
        print(f"kvfs-csi: {error}: pip install 'kvfs[csi]'", file=sys.stderr)
        return 1
    # Before any thread: signals are waited for here alone.
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    services = Services(
        Worker(given.mount, given.kubelet, given.timeout),
        name=NAME, version=kvfs.__version__, node_id=given.node_id, pool_name=given.pool_name,
    )  # fmt: skip
    server = grpc.server(futures.ThreadPoolExecutor(_CALLS_AT_ONCE), maximum_concurrent_rpcs=4 * _CALLS_AT_ONCE)
    server.add_generic_rpc_handlers(tuple(handlers(services, grpc)))
    try:
        clear_socket(path)
        # Kubelet and its helpers are root: nobody else has anything to ask.
        os.umask(0o177)
        server.add_insecure_port(f"unix://{path}")
    except (OSError, RuntimeError) as error:
        print(f"kvfs-csi: --endpoint {given.endpoint}: {error}", file=sys.stderr)
        return 1
    server.start()
    log.info("kvfs-csi %s serves %s of node %s at %s", kvfs.__version__, given.mount, given.node_id, path)
    ended.wait()
    server.stop(_GRACE_S).wait(_GRACE_S + 1)
    path.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
