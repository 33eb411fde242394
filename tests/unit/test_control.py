"""The control socket, both ends of it, over a real socket."""

from __future__ import annotations

import array
import contextlib
import functools
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest
import trio
from helpers import lingering, slowness

from kvfs.errors import DeadlineError, KvfsError
from kvfs.frontend import control as control_room
from kvfs.frontend.asking import ControlClient
from kvfs.frontend.control import Arguments, ControlServer, Progress
from kvfs.frontend.wire import MAGIC, VERSIONS, Peer


def in_trio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test; pytest sees its arguments."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        trio.run(functools.partial(test, *args, **kwargs))

    return run


async def _echo(arguments: Arguments, progress: Progress) -> object:
    return {"echo": arguments.get("text")}


async def _fail(arguments: Arguments, progress: Progress) -> object:
    raise KvfsError("segment 7: no")


async def _count(arguments: Arguments, progress: Progress) -> object:
    for index in range(3):
        await progress({"done": index})
    return 3


async def _sleep(arguments: Arguments, progress: Progress) -> object:
    await trio.sleep(60)
    return None


COMMANDS = {"echo": _echo, "fail": _fail, "count": _count, "sleep": _sleep}


async def serving(pool: Path, client: Callable[[], None]) -> None:
    """Run the server, and the client's blocking calls in a thread beside it."""
    server = ControlServer(pool, COMMANDS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        with trio.fail_after(50 * slowness()):
            await trio.to_thread.run_sync(client)
        nursery.cancel_scope.cancel()
    server.close()
    assert not (pool / "control.sock").exists()


@in_trio
async def test_commands_are_answered_one_after_the_other(tmp_path: Path) -> None:
    def client() -> None:
        with ControlClient(tmp_path) as control:
            for text in ("a", "b" * 100_000, "ü"):
                assert control.call("echo", text=text) == {"echo": text}

    await serving(tmp_path, client)


@in_trio
async def test_an_error_comes_back_as_one_with_the_pools_name(tmp_path: Path) -> None:
    def client() -> None:
        with ControlClient(tmp_path) as control:
            with pytest.raises(KvfsError, match="segment 7: no"):
                control.call("fail")
            with pytest.raises(KvfsError, match="no command 'explode'"):
                control.call("explode")
            assert control.call("echo", text="still there") == {"echo": "still there"}

    await serving(tmp_path, client)


@in_trio
async def test_progress_arrives_before_the_result(tmp_path: Path) -> None:
    def client() -> None:
        seen: list[Mapping[str, object]] = []
        with ControlClient(tmp_path) as control:
            assert control.call("count", seen.append) == 3
        assert seen == [{"done": 0}, {"done": 1}, {"done": 2}]

    await serving(tmp_path, client)


@in_trio
async def test_a_daemon_that_does_not_answer_meets_the_deadline(tmp_path: Path) -> None:
    def client() -> None:
        with ControlClient(tmp_path, timeout_s=0.1) as control, pytest.raises(DeadlineError, match="gave no answer"):
            control.call("sleep")

    await serving(tmp_path, client)


@in_trio
async def test_nonsense_is_answered_with_an_error(tmp_path: Path) -> None:
    def client() -> None:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(50)
            raw.connect(str(tmp_path / "control.sock"))
            for line in (b"not json\n", b"[1,2]\n", b'{"command": 5}\n'):
                raw.sendall(line)
                assert json.loads(raw.makefile().readline())["ok"] is False

    await serving(tmp_path, client)


@in_trio
async def test_a_pool_with_a_long_path_can_be_controlled(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)

    def client() -> None:
        with ControlClient(deep) as control:
            assert control.call("echo", text="far") == {"echo": "far"}

    await serving(deep, client)


@in_trio
async def test_a_socket_left_by_a_dead_daemon_is_replaced(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "control.sock"))
    left.close()
    with pytest.raises(KvfsError, match="not mounted"):
        ControlClient(tmp_path)

    def client() -> None:
        with ControlClient(tmp_path) as control:
            assert control.call("echo", text="new") == {"echo": "new"}

    await serving(tmp_path, client)


def test_without_a_daemon_the_pool_is_not_mounted(tmp_path: Path) -> None:
    with pytest.raises(KvfsError) as caught:
        ControlClient(tmp_path)
    assert str(caught.value) == f"{tmp_path}: not mounted, and no pool"
    (tmp_path / "pool.toml").touch()
    with pytest.raises(KvfsError) as caught:
        ControlClient(tmp_path)
    assert str(caught.value) == f"{tmp_path}: not mounted: kvfs mount {tmp_path} MOUNTPOINT"


@in_trio
async def test_the_socket_is_for_its_owner_and_group(tmp_path: Path) -> None:
    def client() -> None:
        assert os.stat(tmp_path / "control.sock").st_mode & 0o777 == 0o660

    await serving(tmp_path, client)


def _silent(pool: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30)
    connection.connect(str(pool / "control.sock"))
    return connection


@in_trio
async def test_silent_connections_are_bounded_for_each_user_and_the_newest_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_room, "GREETINGS_OF_USER_MAX", 3)
    monkeypatch.setattr(control_room, "GREETING_TIMEOUT_S", 3600.0)

    def client() -> None:
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(_silent(tmp_path)) for _ in range(5)]
            # Two too many: the two oldest are hung up on; the others, and whoever comes next, are heard.
            assert [connection.recv(1) for connection in silent[:2]] == [b"", b""]
            silent[2].setblocking(False)
            with pytest.raises(BlockingIOError):
                silent[2].recv(1)
            silent[4].sendall(b'{"command": "echo", "text": 1}\n')
            assert json.loads(silent[4].recv(1000)) == {"ok": True, "result": {"echo": 1}}
            with ControlClient(tmp_path) as control:
                assert control.call("echo", text="a") == {"echo": "a"}

    await serving(tmp_path, client)


@in_trio
async def test_half_a_hello_is_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_room, "GREETINGS_OF_USER_MAX", 3)
    monkeypatch.setattr(control_room, "GREETING_TIMEOUT_S", 3600.0)

    def client() -> None:
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(_silent(tmp_path)) for _ in range(3)]
            hello = MAGIC + struct.pack("<II", VERSIONS[-1], 0)
            for connection, begun in zip(silent, (hello[:1], hello[:8], hello), strict=True):
                connection.sendall(begun)
            for connection in silent:
                stack.enter_context(_silent(tmp_path))
                assert connection.recv(1) == b""

    await serving(tmp_path, client)


# An option that no kernel has: as one that does not know the real one.
@pytest.mark.parametrize("option", [pytest.param(None, id="this kernel"), pytest.param(0x7FFF, id="older kernel")])
@pytest.mark.parametrize("begun", [b"", b'{"command": "echo"}\n', MAGIC])
@in_trio
async def test_a_descriptor_that_a_client_sends_is_waited_for_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: int | None, begun: bytes
) -> None:
    if option is not None:
        monkeypatch.setattr(control_room, "SO_PASSRIGHTS", option)

    def client() -> None:
        with _silent(tmp_path) as hostile, lingering() as gift:
            hostile.sendall(begun)

            def give() -> None:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [gift.fileno()]))
                with contextlib.suppress(PermissionError):
                    hostile.sendmsg([b"{"], [rights])
                    gift.close()

            # In the server's thread: it looks when the descriptor is the last one.
            trio.from_thread.run_sync(give)
            with contextlib.suppress(OSError):
                hostile.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while hostile.recv(1000):
                    pass
            with ControlClient(tmp_path, timeout_s=10) as control:
                assert control.call("echo", text="a") == {"echo": "a"}

    await serving(tmp_path, client)


@in_trio
async def test_many_users_together_are_bounded_at_the_cost_of_the_one_with_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_room, "GREETINGS_MAX", 4)
    monkeypatch.setattr(control_room, "GREETING_TIMEOUT_S", 3600.0)
    users = iter([1000, 1001, 1000, 1000, 1002])

    def named(sock: object) -> Peer:
        return Peer(1, next(users), 0, frozenset())

    monkeypatch.setattr(Peer, "of", named)

    def client() -> None:
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(_silent(tmp_path)) for _ in range(5)]
            assert silent[0].recv(1) == b""
            for connection in silent[1:]:
                connection.setblocking(False)
                with pytest.raises(BlockingIOError):
                    connection.recv(1)

    await serving(tmp_path, client)


@in_trio
async def test_a_connection_that_says_nothing_is_hung_up_on_also_one_of_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_room, "GREETING_TIMEOUT_S", 0.05)

    def client() -> None:
        with _silent(tmp_path) as connection:
            assert connection.recv(1) == b""

    await serving(tmp_path, client)
