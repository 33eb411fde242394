"""Native clients by user: what one user may have of the daemon at one time, however many connections it opens and
whatever it says there.

The daemon has one thread for all that Python answers. Its work for a user is cut into turns: between two of them
everybody else's work is done that is ready. What the data plane's thread answers has turns of its own, and it bounds
the bytes that are kept (native/include/kvfs_clients.h).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from errno import EMFILE
from time import perf_counter

import trio

from kvfs.frontend.told import TOGETHER_S, Told
from kvfs.frontend.wire import RefusedError

# Of work for one user, between two looks at the others'.
TURN_S = 0.001
CONNECTIONS_MAX = 1024
CONNECTIONS_OF_USER_MAX = 512
# Blocks to be read again because clients call them bad; reports beyond are dropped.
CHECKS_MAX = 16
CHECKS_OF_USER_MAX = 4
# Threads that wait for other nodes.
ASKING_OF_USER_MAX = 4


class User:
    """One user. Its callers are tasks of its connections."""

    def __init__(self, users: Users, uid: int) -> None:
        self.uid = uid
        self.connections: set[object] = set()
        self.checks: set[tuple[int, int]] = set()
        self.checking = trio.CapacityLimiter(1)
        self.asking = trio.CapacityLimiter(ASKING_OF_USER_MAX)
        self.told = Told(users.device_count)
        self.left_s = 0.0  # when its last connection ended, if it has none
        self._users = users
        self._spent_s = self._begun_s = 0.0
        self._waiting: deque[trio.Event] = deque()

    # ---- turns ----

    async def begin(self) -> None:
        """Return when work for this user may be done. After some, end() or pause() follows."""
        if not self.may_begin:
            turn = trio.Event()
            self._waiting.append(turn)
            try:
                await turn.wait()
            except BaseException:
                if turn.is_set():
                    self._pass_on()
                else:
                    self._waiting.remove(turn)
                raise
        self.begin_now()

    @property
    def may_begin(self) -> bool:
        """Whether begin() would return at once."""
        return not self._waiting and self._spent_s < TURN_S

    def begin_now(self) -> None:
        self._begun_s = perf_counter()

    def end(self) -> None:
        self._spent_s += perf_counter() - self._begun_s
        self._users.used(self)
        if self._spent_s < TURN_S:
            self._pass_on()

    async def pause(self) -> None:
        """Between two parts of work: others' is done, if this user's turn is over."""
        self.end()
        await self.begin()

    @property
    def is_over(self) -> bool:
        """Whether this turn has lasted long enough."""
        return self._spent_s + perf_counter() - self._begun_s >= TURN_S

    def renew(self) -> bool:
        """All others have had a turn. Returns whether a call has waited for it."""
        self._spent_s = 0.0
        return self._pass_on()

    def _pass_on(self) -> bool:
        if self._waiting:
            self._waiting.popleft().set()
            return True
        return False

    def leave(self, connection: object) -> None:
        """The connection has ended."""
        self.connections.discard(connection)
        self._users.leave(self)


class Users:
    """All users that have connections. `run()` must run."""

    def __init__(self, device_count: int, is_exempt: Callable[[int], bool]) -> None:
        """is_exempt: of users who may have all connections that one user may have."""
        self.device_count, self._is_exempt = device_count, is_exempt
        self._users: dict[int, User] = {}
        # Those without connections, for a while: what they have told counts.
        self._gone: dict[int, User] = {}
        self._used: dict[User, None] = {}
        self._busy = trio.Event()

    def enter(self, connection: object, uid: int) -> User:
        """Whose connection it is. RefusedError: there are too many. One user leaves as many to all others as it has."""
        self._forget()
        user = self._users.get(uid) or self._gone.get(uid) or User(self, uid)
        left = CONNECTIONS_MAX - sum(len(one.connections) for one in self._users.values())
        if left <= 0:
            raise RefusedError(EMFILE, f"{CONNECTIONS_MAX} native clients are connected, the most there can be")
        most = CONNECTIONS_OF_USER_MAX if self._is_exempt(uid) else min(CONNECTIONS_OF_USER_MAX, left)
        if len(user.connections) >= most:
            raise RefusedError(
                EMFILE,
                f"{len(user.connections)} native clients of user {uid} are connected, the most of one user while "
                f"{left} more can be",
            )
        self._gone.pop(uid, None)
        self._users[uid] = user
        user.connections.add(connection)
        return user

    def leave(self, user: User) -> None:
        """One of its connections has ended."""
        if not user.connections and self._users.get(user.uid) is user:
            del self._users[user.uid]
            user.left_s = trio.current_time()
            self._gone[user.uid] = user

    def _forget(self) -> None:
        """Those whose credit is whole again."""
        while self._gone and (oldest := next(iter(self._gone.values()))).left_s + TOGETHER_S <= trio.current_time():
            del self._gone[oldest.uid]

    def used(self, user: User) -> None:
        if not self._used:
            self._busy.set()
        self._used[user] = None

    async def run(self) -> None:
        """Begin turns anew, once all that was ready has been done. Until cancelled."""
        while True:
            await self._busy.wait()
            self._busy = trio.Event()
            await trio.lowlevel.checkpoint()
            used, self._used = self._used, {}
            for user in used:
                if user.renew():
                    self.used(user)
