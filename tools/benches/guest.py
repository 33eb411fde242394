"""Virtual machines for tests and benches: a Debian kernel under QEMU's software emulation, with vhost-user-fs devices.

The kernel is downloaded as a package into build/vm, unpacked and decompressed there once (a decompressed one boots in
two seconds less). It starts from an initrd of busybox and the few modules it needs. A guest's commands run in a chroot
of this machine's own root, exported read-only by 9p. Python, pytest, fio and the project's tree are where they are
here. /run is writable, and the shared file systems are mounted in it.

Commands and files go through virtio serial ports, each served by one shell in the guest, so that several commands run
at once. Everything has a deadline; a guest that nobody ends is ended by `timeout`. KVM is never used: where it is
nested, it may hang.

    python -m benches.guest [--virtiofs SOCKET[,TAG]]... COMMAND...
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import lzma
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from benches.common import REPOSITORY, MissingError, needs_program, run_command, wait_until
from kvfs.errors import DeadlineError, KvfsError

CACHE = REPOSITORY / "build/vm"
KERNEL = "linux-image-amd64"
# Loaded by every guest, in this order, and by those that ask for them; their dependencies are added.
MODULES = ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "virtiofs")
MORE_MODULES = ("virtio_net", "nvme", "nvme_tcp", "nvmet_tcp", "crc32c_generic")
# Leaves out features that cost an emulated CPU much and protect nobody here.
KERNEL_ARGUMENTS = "console=ttyS0 quiet panic=-1 mitigations=off"
# For more than one CPU, clocks that tick by themselves. The emulation may lose the interrupt of a second CPU's timer
# (QEMU 7.2; seen once, in a boot). A timer set for each wake-up alone is then never set again. A guest that waits costs
# 0.08 of a CPU by it.
TICKING_ARGUMENTS = "nohz=off highres=off"
PORTS = 4  # commands at once
BOOT_TIMEOUT_S = 180.0
# The emulated kernel alone, until init: some seconds. A kernel that takes longer has stopped, and is started once more.
# So is one whose back ends do not let QEMU start, hence the warning.
KERNEL_TIMEOUT_S = 60.0
INIT_BEGINS = "guest: init"
COMMAND_TIMEOUT_S = 180.0
# A guest's own kill of a command comes first; after this time the guest does not answer.
GRACE_S = 5.0
SHARES = Path("/run/shares")
# The name of this machine in QEMU's user network.
HOST_ADDRESS = "10.0.2.2"

INIT = (
    rf"""#!/bin/busybox sh
echo {INIT_BEGINS}
"""
    + r"""/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs devtmpfs /dev; mount -t tmpfs tmpfs /tmp
mkdir -p /dev/shm /dev/pts
mount -t tmpfs tmpfs /dev/shm; mount -t devpts devpts /dev/pts
for wanted in order $more_modules; do
    while read -r module; do
        grep -q "^$module " /proc/modules || insmod /modules/$module.ko || echo "guest: insmod $module failed"
    done < /modules/$wanted
done
mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=512000 host /host || echo "guest: no host root"
mount -t tmpfs -o mode=755 tmpfs /host/run
mkdir -p /host/run/shares /host/run/tmp /host/run/lock
chmod 1777 /host/run/tmp
mount -t fusectl fusectl /sys/fs/fuse/connections
[ ! -e /sys/kernel/config ] || mount -t configfs configfs /sys/kernel/config
for directory in proc sys dev; do mount --rbind /$directory /host/$directory; done
ip link set lo up
if [ -e /sys/class/net/eth0 ]; then ip address add 10.0.2.15/24 dev eth0; ip link set eth0 up; fi
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/run/tmp TMPDIR=/run/tmp PYTHONDONTWRITEBYTECODE=1 LC_ALL=C.UTF-8

agent() {
    exec 3<>/dev/$1
    echo ready >&3
    while read -r size input_size seconds <&3; do
        command=/run/tmp/$1.command; input=/tmp/$1.input; output=/tmp/$1.output; errors=/tmp/$1.errors
        /bin/dd bs=$size count=1 iflag=fullblock <&3 >/host$command 2>/dev/null
        : >$input
        [ $input_size = 0 ] || /bin/dd bs=$input_size count=1 iflag=fullblock <&3 >$input 2>/dev/null
        /bin/timeout -s KILL $seconds /bin/chroot /host /bin/bash $command <$input >$output 2>$errors 3>&-
        echo "$? $(/bin/stat -c %s $output) $(/bin/stat -c %s $errors)" >&3
        /bin/cat $output $errors >&3
    done
}
for port in /sys/class/virtio-ports/*; do agent ${port##*/} & done
while :; do sleep 1000; done
"""
)


class GuestError(KvfsError):
    """A guest did not boot, ended, or a command in it failed."""


class GuestTimeoutError(DeadlineError):
    """A command in a guest, or the guest itself, was late."""


@dataclass(frozen=True, slots=True)
class Share:
    """A vhost-user-fs device: the socket of its back end, which listens already."""

    socket: Path
    tag: str = "kvfs"
    queue_size: int = 1024
    queue_count: int = 1  # request queues


@dataclass(frozen=True, slots=True)
class Output:
    status: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace")


# ---- kernel and initrd ----


def prepare() -> tuple[Path, Path]:
    """The kernel and the initrd, made now if they do not exist. Raises MissingError with the part that cannot be
    had."""
    for program in ("qemu-system-x86_64", "timeout", "setpriv", "apt-get", "dpkg-deb"):
        needs_program(program)
    busybox = Path(needs_program("busybox"))
    if b"/ld-linux" in busybox.read_bytes():
        raise MissingError(f"{busybox} is not static: needs the package busybox-static")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        package = _kernel_package()
        directory = CACHE / package.stem
        if not all((directory / "modules" / name).exists() for name in ("order", *MORE_MODULES)):
            shutil.rmtree(directory, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                _unpack(package, Path(scratch))
                os.replace(scratch, directory)
                Path(scratch).mkdir()  # for the context manager
        initrd = CACHE / "initrd"
        with tempfile.NamedTemporaryFile(dir=CACHE, delete=False) as file:
            _write_initrd(file, busybox, directory / "modules")
        os.replace(file.name, initrd)
        return directory / "vmlinux", initrd


def _kernel_package() -> Path:
    """The package of the kernel, the newest that was downloaded, or downloaded now."""
    there = sorted(CACHE.glob("linux-image-*.deb"), key=lambda path: path.stat().st_mtime)
    if there:
        return there[-1]
    depends = run_command("apt-cache", "depends", KERNEL, check=False).stdout
    found = re.search(r"Depends: (linux-image-\S+)", depends)
    if found is None:
        raise MissingError(f"apt knows no {KERNEL}: apt-get update?")
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        words = ["sh", "-c", f"cd {shlex.quote(scratch)} && apt-get download -qq {found[1]}"]
        result = run_command(*words, check=False, timeout_s=300)
        loaded = list(Path(scratch).glob("*.deb"))
        if result.returncode or len(loaded) != 1:
            raise MissingError(f"apt-get download {found[1]} failed: {result.stderr.strip()[-300:]}")
        os.replace(loaded[0], CACHE / loaded[0].name)
        return CACHE / loaded[0].name


def _unpack(package: Path, target: Path) -> None:
    """The decompressed kernel as `vmlinux`, and modules/*.ko. `order` lists MODULES with their dependencies, and a file
    of its name the dependencies of one of MORE_MODULES."""
    process = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE)
    assert process.stdout is not None
    modules: dict[str, bytes] = {}
    with process.stdout, tarfile.open(fileobj=process.stdout, mode="r|") as archive:
        for member in archive:
            name = Path(member.name).name
            if "/boot/vmlinuz-" in member.name:
                (target / "vmlinux").write_bytes(_decompressed_kernel(_content(archive, member)))
            elif "/kernel/" in member.name and name.endswith((".ko", ".ko.xz")):
                data = _content(archive, member)
                modules[_module_name(name)] = lzma.decompress(data) if name.endswith(".xz") else data
    if process.wait():
        raise MissingError(f"dpkg-deb cannot unpack {package}")
    (target / "modules").mkdir()
    for file, names in (("order", MODULES), *((name, (name,)) for name in MORE_MODULES)):
        order: list[str] = []
        for name in names:
            _add_module(modules, name, order)
        for name in order:
            (target / f"modules/{name}.ko").write_bytes(modules[name])
        (target / f"modules/{file}").write_text("".join(f"{name}\n" for name in order))


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None
    return file.read()


def _module_name(file_name: str) -> str:
    return file_name.partition(".ko")[0].replace("-", "_")


def _add_module(modules: dict[str, bytes], name: str, order: list[str]) -> None:
    """Depth first; built-in modules are in no file."""
    if name in order or name not in modules:
        return
    found = re.search(rb"\0depends=([^\0]*)\0", modules[name])
    for needed in found[1].decode().split(",") if found is not None else []:
        _add_module(modules, needed.replace("-", "_"), order)
    order.append(name)


def _decompressed_kernel(image: bytes) -> bytes:
    """The ELF file in a bzImage (Linux, Documentation/x86/boot.rst): QEMU starts it through its PVH entry."""
    setup_sectors = image[0x1F1] or 4
    offset, size = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = image[start : start + size]
    if payload.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMADecompressor().decompress(payload)
    if payload.startswith(b"\x1f\x8b"):
        return gzip.decompress(payload)
    return image  # QEMU boots a bzImage too, only later


def _write_initrd(file: IO[bytes], busybox: Path, modules: Path) -> None:
    """A cpio archive (newc), not compressed: decompressing it in the guest would take longer."""
    number = 0

    def add(name: str, mode: int, data: bytes = b"") -> None:
        nonlocal number
        number += 1
        encoded = name.encode() + b"\0"
        fields = [number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0]
        head = b"070701" + b"".join(b"%08X" % value for value in fields) + encoded
        for part in (head, data):
            file.write(part + bytes(-len(part) % 4))

    for name in ("bin", "dev", "host", "modules", "proc", "sys", "tmp"):
        add(name, 0o040755)
    add("bin/busybox", 0o100755, busybox.read_bytes())
    add("init", 0o100755, INIT.encode())
    for path in sorted(modules.iterdir()):
        add(f"modules/{path.name}", 0o100644, path.read_bytes())
    add("TRAILER!!!", 0)


def children(pid: int) -> list[int]:
    """The process ids of a process's children."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


# ---- the reference back end ----


@contextlib.contextmanager
def virtiofsd(directory: Path, socket_path: Path, options: str = "cache=auto") -> Iterator[int]:
    """Debian's virtiofsd serving a directory to one guest; yields its process id. It ends with its guest.

    Once the guest has connected, a child of that process serves it.
    """
    program = Path("/usr/lib/qemu/virtiofsd")
    if not program.exists():
        raise MissingError(f"needs {program}: the package qemu-system-common of Debian 12")
    with tempfile.TemporaryFile() as log:
        words = [str(program), "-f", f"--socket-path={socket_path}", "-o", f"source={directory.resolve()},{options}"]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_until(lambda: socket_path.exists() or process.poll() is not None, "virtiofsd's socket")
            if process.poll() is not None:
                log.seek(0)
                raise MissingError(f"virtiofsd ended with {process.returncode}: {log.read().decode()[-500:]}")
            yield process.pid
        finally:
            for pid in (*children(process.pid), process.pid):  # first the process that served, so that it is waited for
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(20)
            socket_path.unlink(missing_ok=True)


# ---- a guest ----


class Running:
    """A command in a guest that has been started on a port of its own."""

    def __init__(self, guest: Guest, port: socket.socket, command: str, timeout_s: float) -> None:
        self._guest, self._port, self._command = guest, port, command
        self._deadline = time.monotonic() + timeout_s + GRACE_S

    def wait(self, *, check: bool = True) -> Output:
        """Wait for the command's end. Raises GuestError if it failed and check is set, GuestTimeoutError if it was
        late."""
        head = bytearray()
        while not head.endswith(b"\n"):
            head += self._receive(1)
        status, output_size, error_size = map(int, head.split())
        output = Output(status, self._receive(output_size), self._receive(error_size))
        self._guest.release(self._port)
        if status == 137 and time.monotonic() > self._deadline - GRACE_S:
            raise GuestTimeoutError(f"{self._command}: killed in the guest as it was late; {_told(output)}")
        if check and status:
            raise GuestError(f"{self._command}: status {status}; {_told(output)}")
        return output

    def done(self) -> bool:
        """Whether wait() would return at once."""
        self._port.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            return bool(self._port.recv(1, socket.MSG_PEEK)) or True
        return False

    def _receive(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                self._port.settimeout(max(0.001, self._deadline - time.monotonic()))
                part = self._port.recv(min(size - len(parts), 1 << 20))
            except TimeoutError:
                raise GuestTimeoutError(f"{self._command}: the guest does not answer\n{self._guest.told()}") from None
            except OSError as error:
                raise GuestError(f"{self._command}: the guest has ended: {error}") from error
            if not part:
                raise GuestError(f"{self._command}: the guest has ended\n{self._guest.told()}")
            parts += part
        return bytes(parts)


def _told(output: Output) -> str:
    return (output.stdout[-3000:] + output.stderr[-3000:]).decode(errors="replace").strip()


@dataclass(slots=True)
class Guest:
    """Used as `with Guest([Share(path)]) as guest: guest.mount("kvfs")`. Entering starts it; the first command waits
    for it."""

    shares: Sequence[Share]
    name: str = "guest"
    # Not one: QEMU's emulation then leaves out the guest's memory barriers (7.2; -d op shows it). A guest may then wait
    # for an interrupt that its device had no reason to send.
    cpu_count: int = 2
    memory_mib: int = 512
    lifetime_s: float = 600.0
    disks: Sequence[Path] = ()  # raw images, each the only namespace of an NVMe controller: /dev/nvme0n1, ...
    modules: Sequence[str] = ()  # of MORE_MODULES
    network: bool = False  # QEMU's own network: this machine is HOST_ADDRESS there
    forwards: Mapping[int, int] = field(default_factory=dict)  # ports of 127.0.0.1 here that lead to the guest's
    directory: Path = field(default_factory=Path)
    _command: list[str] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None
    _ports: list[socket.socket] = field(default_factory=list)
    _free: list[socket.socket] = field(default_factory=list)

    def __enter__(self) -> Self:
        kernel, initrd = prepare()
        self.directory = Path(tempfile.mkdtemp(prefix=f"kvfs-{self.name}-"))
        self._command = self._words(kernel, initrd)
        self._start_qemu()
        return self

    def _start_qemu(self) -> None:
        with (self.directory / "qemu.log").open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _words(self, kernel: Path, initrd: Path) -> list[str]:
        memory = f"{self.memory_mib}M"
        # It ends with its parent, and after its time.
        words = ["setpriv", "--pdeathsig", "TERM", "timeout", "--kill-after=5", f"{self.lifetime_s:.0f}"]
        words += ["setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64"]
        words += ["-accel", "tcg", "-cpu", "max,la57=off", "-smp", f"{self.cpu_count}", "-m", memory]
        # All of the guest's memory is shared: the back ends read and write it.
        words += ["-M", "pc,memory-backend=memory"]
        words += ["-object", f"memory-backend-memfd,id=memory,size={memory},share=on"]
        words += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        words += ["-name", f"{self.name},debug-threads=on", "-serial", f"file:{self.directory}/console.log"]
        modules = [*self.modules, *(["nvme"] if self.disks else []), *(["virtio_net"] if self.network else [])]
        # The kernel hands parameters that it does not know to init, as its environment.
        ticking = f"{TICKING_ARGUMENTS} " if self.cpu_count > 1 else ""
        arguments = f'{KERNEL_ARGUMENTS} {ticking}more_modules="{" ".join(modules)}"'
        words += ["-kernel", f"{kernel}", "-initrd", f"{initrd}", "-append", arguments]
        words += ["-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"]
        words += ["-device", "virtio-9p-pci,fsdev=host,mount_tag=host", "-device", "virtio-serial-pci"]
        for index in range(PORTS):
            words += ["-chardev", f"socket,id=port{index},path={self.directory}/port{index},server=on,wait=off"]
            words += ["-device", f"virtserialport,chardev=port{index},name=agent.{index}"]
        for index, share in enumerate(self.shares):
            queues = f"queue-size={share.queue_size},num-request-queues={share.queue_count}"
            words += ["-chardev", f"socket,id=share{index},path={share.socket}"]
            words += ["-device", f"vhost-user-fs-pci,chardev=share{index},tag={share.tag},{queues}"]
        for index, path in enumerate(self.disks):
            words += ["-drive", f"file={path},if=none,id=disk{index},format=raw,cache=unsafe"]
            words += ["-device", f"nvme,serial=kvfs{index},drive=disk{index}"]
        if self.network:
            forwards = "".join(f",hostfwd=tcp:127.0.0.1:{here}-:{there}" for here, there in self.forwards.items())
            words += ["-netdev", f"user,id=network{forwards}", "-device", "virtio-net-pci,netdev=network,romfile="]
        return words

    # ---- work in the guest ----

    def run(
        self, command: str, *, stdin: bytes = b"", timeout_s: float = COMMAND_TIMEOUT_S, check: bool = True
    ) -> Output:
        """Run a bash command in the guest to its end."""
        return self.start(command, stdin=stdin, timeout_s=timeout_s).wait(check=check)

    def start(self, command: str, *, stdin: bytes = b"", timeout_s: float = COMMAND_TIMEOUT_S) -> Running:
        """Start a bash command; at most PORTS at once. It is killed after timeout_s."""
        self.wait_ready()
        if not self._free:
            raise GuestError(f"{self.name}: {PORTS} commands run already, or hang: {command}")
        port = self._free.pop()
        encoded = command.encode()
        running = Running(self, port, f"{self.name}: {command[:300]}", timeout_s)
        port.settimeout(timeout_s)
        port.sendall(b"%d %d %d\n" % (len(encoded), len(stdin), max(1, round(timeout_s))) + encoded + stdin)
        return running

    def python(self, code: str, *words: str, timeout_s: float = COMMAND_TIMEOUT_S, check: bool = True) -> Output:
        """Run Python code with this interpreter's environment in the guest."""
        command = shlex.join([sys.executable, "-c", code, *words])
        return self.run(command, timeout_s=timeout_s, check=check)

    def mount(self, tag: str = "kvfs") -> Path:
        """Mount a share and return where."""
        path = SHARES / tag
        self.run(f"mkdir -p {path} && mount -t virtiofs {tag} {path}")
        return path

    def put(self, path: str | Path, data: bytes) -> None:
        self.run(f"cat > {shlex.quote(str(path))}", stdin=data)

    def get(self, path: str | Path) -> bytes:
        return self.run(f"cat {shlex.quote(str(path))}").stdout

    # ---- its life ----

    def wait_ready(self) -> None:
        """Wait until the shells in the guest are there."""
        if self._ports:
            return
        if not self._kernel_is_up() and self.alive():
            # Not to stderr: pytest reports a warning in a passing test too.
            warnings.warn(f"the kernel of {self.name} has stopped, and is started anew\n{self.told()}", stacklevel=2)
            self.kill()
            self._start_qemu()
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        with contextlib.ExitStack() as stack:
            ports = [stack.enter_context(self._connected(index, deadline)) for index in range(PORTS)]
            for port in ports:
                try:
                    port.settimeout(max(0.001, deadline - time.monotonic()))
                    answer = port.recv(6, socket.MSG_WAITALL)
                except (TimeoutError, ConnectionError):
                    answer = b""
                if answer != b"ready\n":
                    raise GuestError(f"{self.name} did not boot\n{self.told()}")
            stack.pop_all()
        self._ports, self._free = ports, list(ports)

    def _kernel_is_up(self) -> bool:
        """Whether it has started init before KERNEL_TIMEOUT_S."""
        deadline = time.monotonic() + KERNEL_TIMEOUT_S
        console = self.directory / "console.log"
        while self.alive() and time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                if INIT_BEGINS.encode() in console.read_bytes():
                    return True
            time.sleep(0.05)
        return False

    def _connected(self, index: int, deadline: float) -> socket.socket:
        while True:
            port = socket.socket(socket.AF_UNIX)
            try:
                port.connect(f"{self.directory}/port{index}")
                return port
            except OSError as error:
                port.close()
                if not self.alive() or time.monotonic() > deadline:
                    raise GuestError(f"{self.name} did not start: {error}\n{self.told()}") from error
                time.sleep(0.02)

    def release(self, port: socket.socket) -> None:
        """A port whose command has ended takes the next."""
        self._free.append(port)

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End the guest at once, as a power cut does."""
        if self._process is not None:
            for pid in (*self.qemu(), self._process.pid):  # `timeout` then ends by itself, and leaves no zombie
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(10)
                    break
        for port in self._ports:
            port.close()
        self._ports, self._free = [], []

    def told(self) -> str:
        """The last output of QEMU and of the guest's console."""
        texts = []
        for name in ("qemu.log", "console.log"):
            with contextlib.suppress(OSError):
                texts.append((self.directory / name).read_text(errors="replace")[-2000:])
        return "\n".join(texts).strip()

    def qemu(self) -> list[int]:
        """QEMU's process id, the child of `timeout`."""
        try:
            return children(self._process.pid) if self._process is not None else []
        except OSError:
            return []

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of QEMU: of the threads that emulate CPUs (`vcpu`), and of the others."""
        used = {"vcpu": 0.0, "other": 0.0}
        for task in (task for pid in self.qemu() for task in Path(f"/proc/{pid}/task").iterdir()):
            text = (task / "stat").read_text()
            fields = text.rpartition(")")[2].split()
            kind = "vcpu" if "(CPU " in text else "other"
            used[kind] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return used


def main(argv: Sequence[str]) -> int:
    """Boot a guest, mount its shares, run a command in it."""
    shares: list[Share] = []
    words = list(argv)
    while words[:1] == ["--virtiofs"] and len(words) > 1:
        path, _, tag = words[1].partition(",")
        shares.append(Share(Path(path), tag or "kvfs"))
        words = words[2:]
    if not words:
        print("guest: usage: [--virtiofs SOCKET[,TAG]]... COMMAND...", file=sys.stderr)
        return 2
    with Guest(shares) as guest:
        for share in shares:
            print(f"guest: {share.tag} is mounted at {guest.mount(share.tag)}", file=sys.stderr)
        output = guest.run(" ".join(words), timeout_s=guest.lifetime_s, check=False)
        sys.stdout.buffer.write(output.stdout)
        sys.stderr.buffer.write(output.stderr)
        return output.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
