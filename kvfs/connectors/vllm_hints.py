"""Hints that a request brings to vLLM, and what comes of them. Nothing here needs vLLM (docs/engines.md).

A request has them in `kv_hints`, an envelope of actions, or in its `kv_transfer_params` under "kvfs". They are advice,
from senders of requests: each is checked and bounded, and no mistake in one is an error of the request.
"""

from __future__ import annotations

import functools
import logging
import reprlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from kvfs.client.leases import Lease
from kvfs.connectors.common import Connection

# A lease lasts an hour at most. Blocks that are read ahead and never asked for are given up sooner.
KEEP_MAX_S, AHEAD_MAX_S = 3600.0, 300.0
_KEEP_S, _AHEAD_S = 300.0, 30.0
# Of one envelope: actions, and hashes in all of them. A prompt of a million tokens has 65,536 blocks of 16.
ACTIONS_MAX, HASHES_MAX = 64, 65_536
# So much may wait for the thread; a hint beyond it is refused.
_TASKS_MAX, _KEYS_MAX = 4096, 1 << 20
_CLOSE_S = 2.0
# Leases that may end before their time. The oldest beyond it are left to their deadlines.
_GRANTS_MAX = 4096


class Kind(Enum):
    KEEP = "keep"
    DONE = "done"
    AHEAD = "read ahead"


_KINDS = {"kv.retain": Kind.KEEP, "kv.pin": Kind.KEEP, "kv.demote": Kind.DONE, "kv.prefetch": Kind.AHEAD}


@dataclass(frozen=True, slots=True)
class Hint:
    """hashes: of the blocks that it is about, the last 64 bits of vLLM's; None: all of the request's."""

    kind: Kind
    seconds: float = 0.0
    hashes: tuple[int, ...] | None = None


def hash_of(key: bytes) -> int:
    """As vLLM tells it of the block: its key is the block's hash, and four bytes for the group of layers."""
    return int.from_bytes(key[-12:-4], "big")


def hints_of(request: Any) -> tuple[list[Hint], list[str]]:
    """The hints of a request's context; and of each that is passed over, why."""
    hints: list[Hint] = []
    wrong: list[str] = []
    parameters = getattr(request, "kv_transfer_params", None)
    given = parameters.get("kvfs") if isinstance(parameters, dict) else None
    if given is not None:
        _note(hints, wrong, functools.partial(_of_parameters, given))
    envelope = getattr(request, "kv_hints", None)
    if envelope is not None:
        actions = getattr(envelope, "actions", None)
        if _major(getattr(envelope, "protocol_version", None)) not in (0, 1):
            wrong.append(f"protocol_version {_shown(getattr(envelope, 'protocol_version', None))}: 0 and 1 are known")
        elif not isinstance(actions, (list, tuple)):
            wrong.append(f"actions {_shown(actions)}: a list is needed")
        else:
            if len(actions) > ACTIONS_MAX:
                wrong.append(f"{len(actions)} actions: the first {ACTIONS_MAX} are taken")
            left = HASHES_MAX
            for action in actions[:ACTIONS_MAX]:
                if _note(hints, wrong, functools.partial(_of_action, action, left)):
                    left -= len(hints[-1].hashes or ())
    return hints, wrong


def _note(hints: list[Hint], wrong: list[str], parse: Callable[[], Hint]) -> bool:
    try:
        hints.append(parse())
        return True
    except ValueError as error:
        wrong.append(str(error))
        return False


def _of_parameters(given: object) -> Hint:
    if isinstance(given, dict) and len(given) == 1:
        if given.get("done") is True:
            return Hint(Kind.DONE)
        keep_s = given.get("keep_s")
        if isinstance(keep_s, (int, float)) and not isinstance(keep_s, bool) and 0 < keep_s <= KEEP_MAX_S:
            return Hint(Kind.KEEP, float(keep_s))
    raise ValueError(f'{_shown(given)}: {{"done": true}} and {{"keep_s": S}} are possible, S from 0 to 3600')


def _of_action(action: Any, left: int) -> Hint:
    """left: hashes that it may have."""
    of_type, version = getattr(action, "action_type", None), getattr(action, "action_version", None)
    payload = getattr(action, "payload", None)
    kind = _KINDS.get(of_type) if isinstance(of_type, str) else None
    if kind is None:
        raise ValueError(f"action {_shown(of_type)}: {', '.join(_KINDS)} are known")
    if _major(version) != 1:
        raise ValueError(f"{of_type} of version {_shown(version)}: 1 is known")
    if not isinstance(payload, dict):
        raise ValueError(f"{of_type}: payload {_shown(payload)}: an object is needed")
    hashes = _hashes(of_type, payload.get("block_hashes"), left)
    if kind is Kind.DONE:
        return Hint(kind, 0.0, hashes)
    if kind is Kind.AHEAD:
        if hashes is None:
            # Its own blocks are known with its first look-up, and that one starts to read them.
            raise ValueError(f"{of_type}: block_hashes are needed")
        return Hint(kind, _seconds(of_type, payload.get("ttl_s"), _AHEAD_S, AHEAD_MAX_S), hashes)
    return Hint(kind, _seconds(of_type, payload.get("ttl_s"), _KEEP_S, KEEP_MAX_S), hashes)


def _major(version: object) -> int | None:
    major = version.partition(".")[0] if isinstance(version, str) else ""
    return int(major) if major.isascii() and major.isdigit() and len(major) < 5 else None


def _seconds(of_type: object, given: object, default: float, most: float) -> float:
    """More than `most` is cut to it."""
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0:
        raise ValueError(f"{of_type}: ttl_s {_shown(given)}: a number of seconds above 0 is needed")
    return float(min(given, most))


def _hashes(of_type: object, given: object, left: int) -> tuple[int, ...] | None:
    if given is None:
        return None
    if not isinstance(given, (list, tuple)) or not 0 < len(given) <= HASHES_MAX:
        raise ValueError(f"{of_type}: block_hashes {_shown(given)}: a list of 1 to {HASHES_MAX} is needed")
    if len(given) > left:
        raise ValueError(f"{of_type}: {len(given)} block_hashes: an envelope has {HASHES_MAX} in all, {left} are left")
    if not all(type(number) is int and 0 <= number < 1 << 64 for number in given):
        raise ValueError(f"{of_type}: block_hashes {_shown(given)}: integers of 64 bits are needed")
    return tuple(dict.fromkeys(given))


def _shown(given: object) -> str:
    return reprlib.repr(given)[:100]


# ---- one request ----


class Plan:
    """A request's hints about its own blocks. Of several about one block the longest to keep it wins."""

    def __init__(self, hints: Iterable[Hint]) -> None:
        self._hints = [(hint, None if hint.hashes is None else frozenset(hint.hashes)) for hint in hints]
        self.ended = False

    def split(self, keys: Iterable[bytes]) -> tuple[dict[float, list[bytes]], list[bytes]]:
        """Keys to keep, by seconds, and keys that are no longer needed."""
        kept: dict[float, list[bytes]] = {}
        done = []
        for key in keys:
            said = [hint for hint, only in self._hints if only is None or hash_of(key) in only]
            if seconds := max((hint.seconds for hint in said), default=0.0):
                kept.setdefault(seconds, []).append(key)
            elif said:
                done.append(key)
        return kept, done


# ---- all requests ----


HINT_METRICS = {
    "hints": "Hints of requests that were taken.",
    "hints_ignored": "Hints that were passed over: of no known kind or version, or with a mistake.",
    "hints_kept": "Blocks kept from eviction for a hint, each time.",
    "hints_done": "Blocks that a hint called needed no more, each time.",
    "hints_ahead": "Blocks read into vLLM's memory for a hint, before a request asked for them.",
    "hints_used": "Blocks that were read ahead, and that a request then had.",
    "hints_refused": "Blocks that a hint was about and nothing was done for: not there, beyond a share.",
}


@dataclass(slots=True)
class HintCounters:
    """Hints, and blocks that they were about: HINT_METRICS says what each is."""

    hints: int = 0
    hints_ignored: int = 0
    hints_kept: int = 0
    hints_done: int = 0
    hints_ahead: int = 0
    hints_used: int = 0
    hints_refused: int = 0

    def since(self, before: HintCounters) -> dict[str, int]:
        """The ones that changed."""
        changes = {each.name: getattr(self, each.name) - getattr(before, each.name) for each in fields(self)}
        return {name: change for name, change in changes.items() if change}


@dataclass(slots=True)
class _Grant:
    lease: Lease
    keys: frozenset[bytes]
    until: float


@dataclass(slots=True)
class _Task:
    plan: Plan
    keys: Sequence[bytes]
    ended: bool


class Hints:
    """The hints of one tier. The tier calls with its lock; a thread asks the daemon, so that no step of vLLM's waits.

    Kept is what a request's jobs bring as soon as they are over, and all of its blocks from its end on. They are no
    longer needed from its end on: before that the request itself uses them.
    """

    def __init__(self, connection: Connection, logger: logging.Logger, *, obeyed: bool = True) -> None:
        self.counters = HintCounters()
        self._obeyed = obeyed
        self._connection, self._logger = connection, logger
        self._plans: dict[str, Plan] = {}
        self._changed = threading.Condition()
        self._tasks: deque[_Task] = deque()
        self._waiting = 0  # keys in them
        self._grants: OrderedDict[bytes, _Grant] = OrderedDict()  # by the last of its keys
        self._stopping = self._warned = False
        self._thread: threading.Thread | None = None

    def new_request(self, request_id: str, request: Any) -> list[Hint]:
        """Returns those about blocks to read ahead, which are not the request's own."""
        if not self._obeyed:
            return []
        hints, wrong = hints_of(request)
        if wrong:
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            self._logger.log(level, "kvfs for vLLM: request %s: a hint is passed over: %s", request_id, wrong[0])
        if hints or wrong:
            self.count(hints=len(hints), hints_ignored=len(wrong))
        own = [hint for hint in hints if hint.kind is not Kind.AHEAD]
        if own:
            self._plans[request_id] = Plan(own)
        return [hint for hint in hints if hint.kind is Kind.AHEAD]

    def plan(self, request_id: str) -> Plan | None:
        return self._plans.get(request_id) if self._plans else None

    def arrived(self, plan: Plan, keys: Sequence[bytes], failed: Sequence[bytes] = ()) -> None:
        """A job of the request is over: `keys` are in kvfs now, and `failed` are not."""
        if keys:
            self._add(_Task(plan, keys, plan.ended))
        if failed and plan.ended:  # before its end the request may bring them yet
            kept, _ = plan.split(failed)
            self.count(hints_refused=sum(map(len, kept.values())))

    def finished(self, request_id: str, keys: Iterable[bytes], coming: Collection[bytes] = ()) -> None:
        """The request, whose jobs may still be under way: what they bring, `coming`, is left to arrived()."""
        plan = self._plans.pop(request_id, None) if self._plans else None
        if plan is not None:
            plan.ended = True
            self._add(_Task(plan, [key for key in keys if key not in coming], True))

    def close(self) -> None:
        """Leases end with the connection."""
        with self._changed:
            self._stopping = True
            self._tasks.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(self._connection.options.timeout_s + _CLOSE_S)

    def count(self, **changes: int) -> None:
        with self._changed:
            for name, change in changes.items():
                setattr(self.counters, name, getattr(self.counters, name) + change)

    def _add(self, task: _Task) -> None:
        with self._changed:
            full = len(self._tasks) >= _TASKS_MAX or self._waiting + len(task.keys) > _KEYS_MAX
            if not full and not self._stopping and self._has_thread():
                self._tasks.append(task)
                self._waiting += len(task.keys)
                self._changed.notify_all()
                return
        self.count(hints_refused=len(task.keys))

    def _has_thread(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="kvfs-hints", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there is no thread to be had: a later hint tries again
                return False
            self._thread = thread
        return True

    # ---- its thread ----

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._stopping)
                if self._stopping:
                    return
                task = self._tasks.popleft()
                self._waiting -= len(task.keys)
            kept, done = task.plan.split(task.keys)
            for seconds, keys in kept.items():
                self._keep(keys, seconds)
            if done and task.ended:
                self.count(hints_done=self._connection.done(done))

    def _keep(self, keys: Sequence[bytes], seconds: float) -> None:
        until = time.monotonic() + seconds
        lease = self._connection.lease(keys, seconds)
        held = [] if lease is None else [key for key, is_held in zip(keys, lease.held, strict=True) if is_held]
        self.count(hints_kept=len(held), hints_refused=len(keys) - len(held))
        if lease is None or not held:
            return
        grant = _Grant(lease, frozenset(held), until)
        # A session's next request has the blocks of the one before, and some more: the lease before is needed no more.
        for key in held:
            older = self._grants.get(key)
            if older is not None and older.until <= until and older.keys <= grant.keys:
                del self._grants[key]
                older.lease.end()
        self._grants.pop(held[-1], None)  # the newest is the last
        self._grants[held[-1]] = grant
        now = time.monotonic()
        while next(iter(self._grants.values())).until <= now:
            self._grants.popitem(last=False)
        if len(self._grants) > _GRANTS_MAX:
            self._grants = OrderedDict((key, each) for key, each in self._grants.items() if each.until > now)
            while len(self._grants) > _GRANTS_MAX:
                self._grants.popitem(last=False)
