"""Native clients that have the mount alone, as in a container: who gets a connection, what it can do, who gets none.

The containers are namespaces of unshare(1): a bind of one directory of the mount, and no pool.
"""

import errno
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from helpers import REPOSITORY, in_child, raises_errno, requires_root, run, wait_until, write_file

import kvfs

ATTRIBUTE = "user.kvfs.connect."
# A client below $1, which sees no pool: it stores, reads, and goes on when it is told to.
CLIENT = """
import sys, kvfs
with kvfs.connect(sys.argv[1], "llama", gpu=None) as client:
    for number, line in enumerate(sys.stdin):
        try:
            client.put([(b"key%d" % number, line.encode())])
            data = bytearray(len(line))
            assert client.get_into([(b"key%d" % number, data)]) == [len(line)]
            print("stored", bytes(data), flush=True)
        except kvfs.errors.ClientError as error:
            print("failed", error, flush=True)
"""


@pytest.fixture
def pool(own_pool):
    requires_root()
    made = own_pool(files=2, size="256M", mount_args=("--allow-other", "--native-in", "/tenant-a"))
    (made.mount / "tenant-a" / "below").mkdir(parents=True)
    (made.mount / "tenant-b").mkdir()
    return made


def contained(pool, place, words, *, options=(), hidden=True):
    """The command line that runs words in a namespace where `place` is a bind, and the pool is not."""
    hide = f"mount -t tmpfs none {pool.path} && " if hidden else ""
    script = f'{hide}mount --bind {place} /mnt && exec "$@"'
    return ["unshare", "--mount", "--propagation", "slave", *options, "sh", "-c", script, "sh", *words]


def client_of(place, code=CLIENT):
    return [sys.executable, "-c", code, str(place)]


def environment():
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def talk(words, text="one\n"):
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60, env=environment(), check=False)
    return done.stdout + done.stderr


def ask(place, number, expected):
    with raises_errno(*([expected] if isinstance(expected, int) else expected)):
        os.getxattr(place, f"{ATTRIBUTE}{number}")


@pytest.mark.slow
def test_a_client_with_the_mount_alone_stores_and_reads(pool):
    place = pool.mount / "tenant-a"
    for options in ((), ("--pid", "--fork", "--mount-proc"), ("--user", "--map-root-user", "--pid", "--fork")):
        if "--user" in options:
            os.chmod(place, 0o777)
        said = talk(contained(pool, place, client_of("/mnt"), options=options))
        assert "stored b'one\\n'" in said, (options, said)
    assert b"one\n" in next((place / "llama").rglob("6b657930")).read_bytes()
    assert pool.status()["counters"]["native_clients"] == 0
    # Below it, too; without /proc; as another user than the daemon's.
    said = talk(contained(pool, place / "below", client_of("/mnt")))
    assert "stored b'one\\n'" in said
    script = ["sh", "-c", 'umount -l /proc && exec "$@"', "sh", *client_of("/mnt")]
    assert "stored b'one\\n'" in talk(contained(pool, place, script))
    words = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", *client_of("/mnt")]
    assert "stored b'one\\n'" in talk(contained(pool, place, words))


def test_outside_of_the_named_directories_nobody_is_let_in(pool):
    for place in (pool.mount / "tenant-b", pool.mount):
        said = talk(contained(pool, place, client_of("/mnt")))
        assert "its daemon lets no client in there: kvfs mount --native-in DIR does" in said
    assert "unmounted" not in talk(client_of(pool.mount / "tenant-b"))  # the socket's way is as it was
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ask(pool.mount, theirs.fileno(), errno.ENODATA)
        ask(pool.mount / "tenant-b", theirs.fileno(), errno.ENODATA)
        write_file(pool.mount / "tenant-a" / "file", b"data")
        ask(pool.mount / "tenant-a" / "file", theirs.fileno(), errno.ENODATA)
    assert not [name for name in os.listxattr(pool.mount / "tenant-a") if name.startswith(ATTRIBUTE)]
    with raises_errno(errno.EINVAL):
        os.setxattr(pool.mount / "tenant-a", ATTRIBUTE + "3", b"1")


def test_what_is_no_socket_of_the_asker_is_refused(pool):
    place = pool.mount / "tenant-a"
    for number in ("", "-1", "x", "99999999999", "4294967296"):
        ask(place, number, errno.ENODATA)
    ask(place, 1_000_000, errno.EBADF)
    with open("/dev/null") as null, socket.socket() as tcp, socket.socket(socket.AF_UNIX) as lone:
        for file in (null, tcp, lone):
            ask(place, file.fileno(), errno.ENOTSOCK)
    one, other = socket.socketpair()
    with one, other:
        ask(place, one.fileno(), errno.ENOTSOCK)
    lone = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with lone:
        ask(place, lone.fileno(), (errno.EPERM, errno.ENOTCONN))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        # A child asks with its parent's.
        in_child(lambda: ask(place, theirs.fileno(), errno.EPERM))
        # The other end is gone, or full.
        ours.close()
        ask(place, theirs.fileno(), errno.EPIPE)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                theirs.send(b"x" * 4096)
        theirs.setblocking(True)
        ask(place, theirs.fileno(), errno.EAGAIN)


def connected(place):
    """A connection by the mount, raw."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert os.getxattr(place, f"{ATTRIBUTE}{theirs.fileno()}") == b"connected"
        text, fds, _, _ = socket.recv_fds(ours, 100, 4)
    assert text == b"KVFSASK1"
    (fd,) = fds
    return socket.socket(fileno=fd)


def test_such_a_connection_has_no_commands_even_for_root(pool):
    with connected(pool.mount / "tenant-a") as connection:
        connection.settimeout(30)
        connection.sendall(b'{"command": "stop"}\n')
        assert b"a native client's, without commands" in connection.recv(4096)
        assert connection.recv(4096) == b""
    assert pool.status()["pool"]["state"] == "mounted"


def test_many_askers_at_one_time(pool):
    place = pool.mount / "tenant-a"
    failures = []

    def some():
        try:
            for _ in range(60):
                connected(place).close()
        except BaseException as error:  # told below
            failures.append(error)

    threads = [threading.Thread(target=some) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    # One that is killed meanwhile.
    loop = f"""
import os, socket
while True:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.getxattr({str(place)!r}, "{ATTRIBUTE}%d" % theirs.fileno())
    ours.close(), theirs.close()
"""
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", loop])
        time.sleep(0.3)
        child.kill()
        child.wait()
    connected(place).close()
    wait_until(lambda: pool.status()["counters"]["native_clients"] == 0, "the end of all clients")
    with kvfs.connect(place, "llama", gpu=None) as client:
        client.put([(b"after", b"it")])


@pytest.fixture
def shared(tmp_path):
    """A directory below which mounts are seen in other namespaces, too."""
    requires_root()
    run("mount", "--bind", tmp_path, tmp_path)
    run("mount", "--make-shared", tmp_path)
    tmp_path.chmod(0o755)
    yield tmp_path
    run("umount", "--lazy", tmp_path)


def test_a_client_asks_again_after_a_restart_of_the_daemon(shared, own_pool):
    pool = own_pool(files=2, size="256M", base=str(shared), mount_args=("--allow-other", "--native-in", "/"))
    hide = f'mount -t tmpfs none {pool.path} && exec "$@"'
    words = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", hide, "sh", *client_of(pool.mount)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:

        def said(text):
            process.stdin.write(text)
            process.stdin.flush()
            return process.stdout.readline()

        try:
            assert "stored b'one" in said("one\n")
            pool.kill()
            assert "failed" in said("two\n")
            pool.remount()
            wait_until(lambda: "stored b'three" in said("three\n"), "a connection with the new daemon", timeout_s=30)
            process.stdin.close()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_an_error_says_what_is_wrong_with_the_directory(pool, tmp_path):
    for text in ("tenant-a", "/a/../b", ""):
        done = pool.command("mount", str(pool.path), str(tmp_path), "--native-in", text, check=False)
        assert done.returncode != 0
        assert "a directory from the pool's root on is expected" in done.stderr
