"""Native clients by user: connections, and what clients tell. Connections are doubles."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
import trio
import trio.testing

from kvfs.frontend.told import DEVICE_BYTES_S, REPORTED, TOGETHER_S, TOTALS, Report
from kvfs.frontend.users import CONNECTIONS_MAX, CONNECTIONS_OF_USER_MAX, User, Users
from kvfs.frontend.wire import RefusedError

ROOT, ALICE, BOB, CAROL = 0, 41_001, 41_002, 41_003


class Connected:
    """A double of a connection."""


def fill(users: Users, uid: int) -> list[tuple[User, Connected]]:
    """As many connections as the user may have."""
    made: list[tuple[User, Connected]] = []
    for _ in range(CONNECTIONS_MAX + 1):
        connection = Connected()
        try:
            made.append((users.enter(connection, uid), connection))
        except RefusedError as error:
            assert error.errno == errno.EMFILE, error
            return made
    raise AssertionError("there is no end")


def on_a_clock(work: Callable[[Users, trio.testing.MockClock], None]) -> None:
    clock = trio.testing.MockClock()

    async def main() -> None:
        work(Users(1, lambda uid: uid == ROOT), clock)

    trio.run(main, clock=clock)


def test_however_many_users_come_each_finds_connections() -> None:
    def work(users: Users, _: trio.testing.MockClock) -> None:
        found = [len(fill(users, uid)) for uid in (ALICE, BOB, CAROL)]
        assert found == [CONNECTIONS_OF_USER_MAX, 256, 128], found
        assert len(fill(users, ROOT)) == CONNECTIONS_MAX - sum(found), "root has all that are left"
        with pytest.raises(RefusedError, match=f"{CONNECTIONS_MAX} native clients are connected"):
            users.enter(Connected(), BOB + CAROL)

    on_a_clock(work)


def test_a_connection_that_ends_makes_room_for_another() -> None:
    def work(users: Users, _: trio.testing.MockClock) -> None:
        for user, connection in fill(users, ALICE):
            user.leave(connection)
        assert len(fill(users, ALICE)) == CONNECTIONS_OF_USER_MAX

    on_a_clock(work)


def told(value: int, busy: int = 0) -> list[int]:
    """A report whose every total is this, of a client that was never connected before."""
    return [0 if name == "reconnects" else value for name in REPORTED[:TOTALS]] + [busy]


def reported(users: Users, value: int, times: int) -> int:
    """Bytes that count of so many clients of a user, each of which connects, tells this total, and leaves."""
    bytes_ = 0
    for _ in range(times):
        connection, report = Connected(), Report()
        user = users.enter(connection, ALICE)
        report.take(told(value), user.told, trio.current_time())
        user.leave(connection)
        bytes_ += report.totals[next(i for i, name in enumerate(REPORTED) if name.endswith("_bytes"))]
    return bytes_


def test_who_connects_again_may_tell_no_more() -> None:
    """Bytes that devices could have given in that time, of one user, however often it connects."""

    def work(users: Users, clock: trio.testing.MockClock) -> None:
        most = int(DEVICE_BYTES_S * TOGETHER_S)
        assert reported(users, 1 << 60, 100) == most
        clock.jump(TOGETHER_S / 2)
        assert reported(users, 1 << 60, 100) == most // 2
        clock.jump(10 * TOGETHER_S)
        assert reported(users, 1 << 60, 100) == most
        assert reported(users, 1000, 1) == 0
        clock.jump(1)
        assert reported(users, 1000, 3) == 3000

    on_a_clock(work)


def test_a_total_that_was_cut_comes_later_and_one_that_falls_stays() -> None:
    def work(users: Users, clock: trio.testing.MockClock) -> None:
        user, report, most = users.enter(Connected(), ALICE), Report(), int(DEVICE_BYTES_S * TOGETHER_S)
        at = next(i for i, name in enumerate(REPORTED) if name.endswith("_bytes"))
        for seconds, value, counts in ((0, most + 5, most), (1, most + 5, most + 5), (1, 7, most + 5)):
            clock.jump(seconds)
            report.take(told(value), user.told, trio.current_time())
            assert report.totals[at] == counts, (seconds, value)

    on_a_clock(work)
