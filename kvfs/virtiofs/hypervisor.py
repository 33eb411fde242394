"""Settings that connect a hypervisor's guest to an export, as text to paste. Pure: exports in, text out.

Sources: qemu(1), QEMU's hw/virtio/vhost-user-fs.c, libvirt's kbase/virtiofs.
"""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence
from xml.sax.saxutils import quoteattr

from kvfs.virtiofs.exports import Export

# The largest queue there is: with the default of 128 entries a request is at most 124 pages.
QUEUE_SIZE = 1024
MEMORY = "4G"
_CPUS = 4
_MACHINES = {"x86_64": "q35", "aarch64": "virt"}


def qemu_arguments(export: Export) -> list[str]:
    """A whole QEMU command without disk, network and console.

    The chardev has no reconnect=: vhost-user-fs then refuses to start (tried with 7.2). No version known to us sets up
    a new connection with it.
    """
    architecture = platform.machine() if platform.machine() in _MACHINES else "x86_64"
    machine = _MACHINES[architecture]
    return [
        f"qemu-system-{architecture}",
        # The guest's whole memory, shared: requests' data is read into it.
        "-machine", f"{machine},accel=kvm:tcg,memory-backend=mem",
        "-cpu", "max", "-smp", str(max(_CPUS, export.queues)), "-m", MEMORY,
        "-object", f"memory-backend-memfd,id=mem,size={MEMORY},share=on",
        "-chardev", f"socket,id=kvfs,path={export.socket}",
        "-device",
        f"vhost-user-fs-pci,chardev=kvfs,tag={export.tag},queue-size={QUEUE_SIZE},num-request-queues={export.queues}",
    ]  # fmt: skip


def guest_arguments(export: Export) -> list[str]:
    """The guest's mount command (Linux 5.4 or later)."""
    return ["mount", "-t", "virtiofs", export.tag, "/mnt/kv"]


def render_qemu(exports: Sequence[Export]) -> str:
    """A shell command for the host and one for the guest, for each export."""
    parts = []
    for export in exports:
        program, *arguments = [shlex.quote(word) for word in qemu_arguments(export)]
        lines = [program]
        for word in arguments:
            # An option a line.
            if word in ("-machine", "-object", "-chardev", "-device"):
                lines.append("   ")
            lines[-1] += f" {word}"
        parts.append(
            f"# host: {export.socket}; one guest a socket. Add the guest's disk, network and console.\n"
            + " \\\n".join(lines)
            + f"\n# guest\n{shlex.join(guest_arguments(export))}"
        )
    return "\n\n".join(parts)


def render_libvirt(exports: Sequence[Export]) -> str:
    """The elements for each guest's domain XML."""
    parts = []
    for export in exports:
        parts.append(
            "<!-- in <domain> -->\n"
            "<memoryBacking>\n"
            "  <source type='memfd'/>\n"
            "  <access mode='shared'/>\n"
            "</memoryBacking>\n"
            "<!-- in <devices> -->\n"
            "<filesystem type='mount'>\n"
            f"  <driver type='virtiofs' queue='{QUEUE_SIZE}'/>\n"
            f"  <source socket={quoteattr(str(export.socket))}/>\n"
            f"  <target dir={quoteattr(export.tag)}/>\n"
            "</filesystem>\n"
            f"<!-- in the guest: {shlex.join(guest_arguments(export))} -->"
        )
    return "\n\n".join(parts)
