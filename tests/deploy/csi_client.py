"""A client of a CSI plugin for tests: the specification's messages made by protobuf's own runtime.

So the plugin's encoding is held against another's. The fields are csi.proto's, v1.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# name: number and type; a type in capitals is a message of this table, "map" is of strings, "[]" repeated.
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Empty": {},
    "Flag": {"value": (1, "bool")},
    "PluginInfo": {"name": (1, "string"), "vendor_version": (2, "string"), "manifest": (3, "map")},
    "Kind": {"type": (1, "int32")},
    "Capability": {"kind": (1, "Kind")},
    "Capabilities": {"capabilities": (1, "[]Capability")},
    "Probed": {"ready": (1, "Flag")},
    "Topology": {"segments": (1, "map")},
    "NodeInfo": {
        "node_id": (1, "string"), "max_volumes_per_node": (2, "int64"), "accessible_topology": (3, "Topology"),
    },
    "Mode": {"mode": (1, "int32")},
    "MountVolume": {"fs_type": (1, "string"), "mount_flags": (2, "[]string"), "volume_mount_group": (3, "string")},
    "VolumeCapability": {"block": (1, "Empty"), "mount": (2, "MountVolume"), "access_mode": (3, "Mode")},
    "Publish": {
        "volume_id": (1, "string"), "publish_context": (2, "map"), "staging_target_path": (3, "string"),
        "target_path": (4, "string"), "volume_capability": (5, "VolumeCapability"), "readonly": (6, "bool"),
        "secrets": (7, "map"), "volume_context": (8, "map"),
    },
    "Unpublish": {"volume_id": (1, "string"), "target_path": (2, "string")},
    "Stats": {"volume_id": (1, "string"), "volume_path": (2, "string"), "staging_target_path": (3, "string")},
    "Usage": {"available": (1, "int64"), "total": (2, "int64"), "used": (3, "int64"), "unit": (4, "int32")},
    "Condition": {"abnormal": (1, "bool"), "message": (2, "string")},
    "Statistics": {"usage": (1, "[]Usage"), "volume_condition": (2, "Condition")},
}  # fmt: skip

METHODS = {
    "GetPluginInfo": ("Identity", "PluginInfo"),
    "GetPluginCapabilities": ("Identity", "Capabilities"),
    "Probe": ("Identity", "Probed"),
    "NodeGetInfo": ("Node", "NodeInfo"),
    "NodeGetCapabilities": ("Node", "Capabilities"),
    "NodePublishVolume": ("Node", "Empty"),
    "NodeUnpublishVolume": ("Node", "Empty"),
    "NodeGetVolumeStats": ("Node", "Statistics"),
    "NodeStageVolume": ("Node", "Empty"),
    "NodeUnstageVolume": ("Node", "Empty"),
    "NodeExpandVolume": ("Node", "Empty"),
    "CreateVolume": ("Controller", "Empty"),
}


def _made() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="csi_of_tests.proto", package="csi_of_tests", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, parts in MESSAGES.items():
        message = file.message_type.add(name=name)
        for part, (number, kind) in parts.items():
            field = message.field.add(name=part, number=number, label=kinds.LABEL_OPTIONAL)
            if kind.startswith("[]"):
                field.label, kind = kinds.LABEL_REPEATED, kind[2:]
            if kind == "map":
                entry = "".join(word.capitalize() for word in part.split("_")) + "Entry"
                nested = message.nested_type.add(name=entry)
                nested.options.map_entry = True
                for index, word in enumerate(("key", "value"), 1):
                    nested.field.add(name=word, number=index, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_STRING)
                field.label, field.type = kinds.LABEL_REPEATED, kinds.TYPE_MESSAGE
                field.type_name = f".csi_of_tests.{name}.{entry}"
            elif kind in MESSAGES:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".csi_of_tests.{kind}"
            else:
                field.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"csi_of_tests.{name}")) for name in MESSAGES
    }


CLASSES = _made()


def message(kind: str, **parts: Any) -> Any:
    return CLASSES[kind](**parts)


class Client:
    def __init__(self, socket: str) -> None:
        self.channel = grpc.insecure_channel(f"unix://{socket}")

    def ready(self, timeout_s: float) -> None:
        grpc.channel_ready_future(self.channel).result(timeout_s)

    def is_ready(self) -> bool:
        try:
            self.ready(0.2)
        except grpc.FutureTimeoutError:
            return False
        return True

    def raw(self, method: str, data: bytes, timeout_s: float = 150) -> bytes:
        service, _ = METHODS[method]
        found: bytes = self.channel.unary_unary(f"/csi.v1.{service}/{method}")(data, timeout=timeout_s)
        return found

    def call(self, method: str, request: Any = None) -> Any:
        data = b"" if request is None else request.SerializeToString()
        return CLASSES[METHODS[method][1]].FromString(self.raw(method, data))

    def refused(self, method: str, request: Any = None) -> tuple[str, str]:
        """The code and the words of a call that must not succeed."""
        try:
            answer = self.call(method, request)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        raise AssertionError(f"{method} was answered: {answer}")
