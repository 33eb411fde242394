"""The guests themselves, against Debian's virtiofsd: what the tests beside this one rely on.

A back end that is known to work tells a wrong harness from a wrong kvfs.
"""

import hashlib
import os
import pathlib
import subprocess
import time
import types

import pytest
from helpers import MIB, content, process_alive, slowness, wait_until

from benches.common import MissingError
from benches.guest import Guest, GuestError, GuestTimeoutError, Share, children, virtiofsd

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A directory, and a guest that has it mounted: (directory, guest, where it is mounted in the guest)."""
    directory = tmp_path_factory.mktemp("served")
    socket = directory.parent / "virtiofsd.socket"
    try:
        with virtiofsd(directory, socket), Guest([Share(socket)]) as guest:
            yield directory, guest, guest.mount("kvfs")
    except MissingError as error:
        pytest.skip(str(error))


def test_commands_have_a_status_and_two_outputs(served):
    _, guest, _ = served
    output = guest.run("echo out; echo err >&2; exit 3", check=False)
    assert (output.status, output.stdout, output.stderr) == (3, b"out\n", b"err\n")
    assert guest.run("cat; uname -s", stdin=b"in\n").stdout == b"in\nLinux\n"
    with pytest.raises(GuestError, match="status 1"):
        guest.run("false")


def test_python_of_this_tree_runs_in_it(served):
    _, guest, _ = served
    assert guest.python("import pytest; print(pytest.__version__)").text.strip() == pytest.__version__


def test_files_go_in_and_out_whole(served):
    directory, guest, mount = served
    data = content(3 * MIB + 17)
    guest.put("/run/tmp/data", data)
    assert guest.get("/run/tmp/data") == data
    guest.run(f"cp /run/tmp/data {mount}/data && sync")
    assert (directory / "data").read_bytes() == data
    told = guest.run(f"sha256sum {mount}/data").text.split()[0]
    assert told == hashlib.sha256(data).hexdigest()


def test_a_late_command_is_killed_and_others_go_on_meanwhile(served):
    _, guest, _ = served
    started, timeout_s = time.monotonic(), 5 * slowness()
    late = guest.start("sleep 3600", timeout_s=timeout_s)
    assert guest.run("echo other").stdout == b"other\n"
    assert not late.done()
    with pytest.raises(GuestTimeoutError, match="sleep 3600"):
        late.wait()
    assert time.monotonic() - started < timeout_s + 30 * slowness()
    assert guest.run("echo still here").stdout == b"still here\n"


def test_a_killed_guest_is_gone_at_once_and_its_commands_fail(tmp_path):
    socket = tmp_path / "socket"
    (tmp_path / "served").mkdir()
    try:
        with virtiofsd(tmp_path / "served", socket) as server, Guest([Share(socket, queue_size=128)]) as guest:
            mount = guest.mount()
            running = guest.start(f"dd if=/dev/zero of={mount}/file bs=64k count=10000; sleep 60")
            [pid] = guest.qemu()
            [serving] = children(server)
            guest.kill()
            assert not process_alive(pid)
            with pytest.raises(GuestError, match="ended"):
                running.wait()
            assert not guest.alive()
            wait_until(lambda: not process_alive(serving), "virtiofsd to see that the guest is gone", timeout_s=20)
    except MissingError as error:
        pytest.skip(str(error))


def test_a_guest_that_cannot_boot_says_why(tmp_path):
    with Guest([Share(tmp_path / "nobody")]) as guest:
        with pytest.raises(GuestError, match="nobody"):
            guest.run("true")


def test_a_guest_whose_kernel_stops_is_started_once_more(monkeypatch):
    """QEMU's -S holds the CPUs of the first still before their first instruction."""
    begun = []

    def popen(words, **arguments):
        begun.append(subprocess.Popen([*words, *([] if begun else ["-S"])], **arguments))
        return begun[-1]

    with monkeypatch.context() as patch:
        patch.setattr("benches.guest.KERNEL_TIMEOUT_S", 2.0)
        patch.setattr("benches.guest.subprocess", types.SimpleNamespace(**vars(subprocess) | {"Popen": popen}))
        with Guest([], name="held") as guest:
            with pytest.warns(UserWarning, match="the kernel of held has stopped"):
                assert guest.run("echo up").stdout == b"up\n"
            assert [process.poll() is None for process in begun] == [False, True]


def test_a_guest_nobody_ends_ends_by_itself():
    with Guest([], lifetime_s=1) as guest:
        wait_until(lambda: not guest.alive(), "the end of the guest", timeout_s=20)


def test_kvm_is_never_used(served):
    _, guest, _ = served
    [pid] = guest.qemu()
    words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    assert words[words.index(b"-accel") + 1] == b"tcg"
    assert not any(os.path.realpath(link).endswith("/dev/kvm") for link in pathlib.Path(f"/proc/{pid}/fd").iterdir())
