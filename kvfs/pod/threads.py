"""The turns of a member in threads: two for each engine, one that appends and one that waits in a read.

All are daemon threads, and each call has a deadline: an engine that hangs keeps no daemon from its end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvfs.pod.asking import LeaseAsk
from kvfs.pod.engine import Engine
from kvfs.pod.limits import KEYS_MAX
from kvfs.pod.member import Half, Member, MemberStatistics, Source

FRESH_S, LEASE_S = 0.1, 0.05
_READ_WAIT_S = 1.0
# A turn that has nothing to do waits this long at most.
_IDLE_MAX_S = 1.0

log = logging.getLogger("kvfs.pod")


class Pod:
    """The pod, for a daemon. make: connects to an engine; each thread has its own connection."""

    def __init__(self, member: Member, source: Source, make: Sequence[Callable[[], Engine]]) -> None:
        assert len(make) == len(member.links)
        self.member, self._source = member, source
        self._stopping = threading.Event()
        self._engines = [(one(), one()) for one in make]
        self._threads = [
            threading.Thread(target=target, args=(index, engine), name=f"kvfs-pod-{what}-{index}", daemon=True)
            for index, pair in enumerate(self._engines)
            for target, what, engine in ((self._append, "append", pair[0]), (self._read, "read", pair[1]))
        ]
        self.failed: BaseException | None = None

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float = 2.0) -> bool:
        """End the threads. Whether they did within the time; the others end with the process."""
        self._stopping.set()
        for pair in self._engines:
            for engine in pair:
                engine.interrupt()
        self._source.wake()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # ---- for the daemon: from any thread ----

    def fresh(self, timeout_s: float = FRESH_S) -> None:
        """Return once all is applied here that living owners had when this was called. FreshError, EngineAwayError."""
        barrier = self.member.flush(time.monotonic(), timeout_s)
        barrier.wait()
        self.member.flushed(barrier)

    def lease(self, slot: int, keys: Sequence[bytes], seconds: float, timeout_s: float = LEASE_S) -> LeaseAsk:
        """Ask an owner to keep blocks from eviction; `held` says which are. Without an answer in time: none."""
        (ask,) = self.lease_all({slot: keys}, seconds, timeout_s)
        return ask

    def lease_all(
        self, wanted: Mapping[int, Sequence[bytes]], seconds: float, timeout_s: float = LEASE_S
    ) -> list[LeaseAsk]:
        """As lease(), of several owners side by side. A node that is asked for many has several answers, in order."""
        asks = [
            self.member.lease(slot, keys[at : at + KEYS_MAX], seconds, time.monotonic(), timeout_s)
            for slot, keys in wanted.items()
            for at in range(0, len(keys), KEYS_MAX)
        ]
        for ask in asks:
            ask.wait()
            self.member.finish_lease(ask)
        return asks

    def release(self, ask: LeaseAsk) -> None:
        self.member.release(ask, time.monotonic())

    def touch(self, slot: int, keys: Sequence[bytes]) -> None:
        self.member.touch(slot, keys, time.monotonic())

    def loaded(self, slot: int, *, whole: bool = True) -> None:
        """The flash of an owner has been read, as Sink.reload() asked."""
        self.member.loaded(slot, time.monotonic(), time.time_ns(), whole=whole)

    def statistics(self) -> MemberStatistics:
        return self.member.statistics(time.monotonic())

    # ---- the threads ----

    def _append(self, index: int, engine: Engine) -> None:
        half = self.member.links[index].writing
        with self._watched(engine):
            while not self._stopping.is_set():
                was_up = half.up
                wait_s = self.member.append_turn(index, engine, time.monotonic(), time.time_ns())
                self._tell(engine, was_up, half)
                if wait_s > 0 and not self._stopping.is_set():
                    self._source.wait(min(wait_s, _IDLE_MAX_S))
            if half.up:
                self.member.leave(index, engine, time.monotonic(), time.time_ns())

    def _read(self, index: int, engine: Engine) -> None:
        half = self.member.links[index].reading
        with self._watched(engine):
            while not self._stopping.is_set():
                was_up = half.up
                now = time.monotonic()
                wait_s = self.member.read_turn(index, engine, now, _READ_WAIT_S, time.monotonic, time.time_ns)
                self._tell(engine, was_up, half)
                if wait_s > 0:
                    self._stopping.wait(min(wait_s, _IDLE_MAX_S))

    @contextmanager
    def _watched(self, engine: Engine) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # Our bug. The pod goes on without this half of an engine, and the daemon can say so.
            self.failed = error
            log.exception("pod: a thread of engine %s ended", engine.name)
        finally:
            engine.close()

    @staticmethod
    def _tell(engine: Engine, was_up: bool, half: Half) -> None:
        if half.up and not was_up:
            log.info("pod: engine %s is there", engine.name)
        elif was_up and not half.up:
            log.warning("pod: %s", half.error)
