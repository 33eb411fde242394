"""Histories: operations of hands.py by their names, and what each hand made of them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio
from hands import TIME_STEP_S, Answered, Hand, Refused, Side, State, differences
from store_pools import make_pool

from kvfs import journal
from kvfs.store.fsck import fsck

# An operation's name and arguments. "restart" and "crash" end a life of the store.
Operation = tuple[Any, ...]
ENDS = {"restart": False, "crash": True}
JOURNAL_SIZE = 1 << 20


class Run:
    """The results of one hand's operations, and all that is found after each."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.results: list[object] = []
        self.states: list[State] = []
        self.answered = Answered()


def told(operation: Operation) -> str:
    return f"{operation[0]}({', '.join(map(repr, operation[1:]))})"


async def one(hand: Hand, operation: Operation) -> object:
    """The result, or the errno."""
    name, *arguments = operation
    keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
    try:
        return await getattr(hand, name)(*arguments, **keywords)
    except Refused as error:
        return f"errno {error.errno}"


def lives(history: Sequence[Operation]) -> Iterator[tuple[list[Operation], Operation]]:
    """The operations of each life, and how it ends."""
    life: list[Operation] = []
    for operation in history:
        if operation[0] in ENDS:
            yield life, operation
            life = []
        else:
            life.append(operation)
    yield life, ("restart",)


def run(history: Sequence[Operation], pool: Path, side: Side, fd: int | None) -> Run:
    """Do it all, look after each operation and after each beginning, and once more after the end."""
    hand, found = Hand(pool, side, fd), Run(side)

    async def look() -> None:
        found.states.append(await hand.look() | hand.look_at_index())

    def life_of(operations: Sequence[Operation]) -> Any:
        async def life(hand: Hand) -> None:
            await look()
            for operation in operations:
                await trio.sleep(TIME_STEP_S)
                hand.began.append(time.time_ns())
                hand.process += 1
                try:
                    found.results.append(await one(hand, operation))
                    await look()
                except BaseException as error:
                    error.add_note(f"{side}, in operation {len(found.results)} of\n{story(history)}")
                    raise

        return life

    hand.began.append(time.time_ns())
    for operations, end in lives(history):
        hand.live(life_of(operations), crash=ENDS[end[0]])
        found.results.append(end[0])
    hand.live(life_of(()))
    found.answered = hand.answered
    return found


def compare(history: Sequence[Operation], runs: Sequence[Run], ignored: Sequence[str] = ()) -> None:
    """AssertionError at the first operation after which the hands have not the same."""
    sides = ", ".join(run.side for run in runs)
    for number in range(len(runs[0].states)):
        done = [*history, ("restart",)][:number]
        if number:
            results = [run.results[number - 1] for run in runs]
            assert len({repr(result) for result in results}) == 1, f"{story(done)}\nresults of {sides}: {results}"
        found = [
            line for line in differences([run.states[number] for run in runs]) if not any(map(line.startswith, ignored))
        ]
        assert not found, f"{story(done)}\nthen {sides} have\n  " + "\n  ".join(found)


def story(operations: Sequence[Operation]) -> str:
    return "\n".join(f"{number:3} {told(operation)}" for number, operation in enumerate(operations, 1))


@contextmanager
def kept_journal(wanted: bool) -> Iterator[int | None]:
    if not wanted:
        yield None
        return
    fd = journal.make(JOURNAL_SIZE)
    try:
        yield fd
    finally:
        os.close(fd)


class Pools:
    """Copies of one pool: all hands begin with the same bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.first = make_pool(folder / "pool", files=1, size=32 << 20)

    def copy(self) -> Path:
        self.count += 1
        return Path(shutil.copytree(self.first, self.folder / f"copy{self.count}"))


def run_all(pools: Pools, history: Sequence[Operation], sides: Sequence[Side], *, with_journal: bool) -> list[Run]:
    runs = []
    for side in sides:
        pool = pools.copy()
        with kept_journal(with_journal) as fd:
            runs.append(run(history, pool, side, fd))
        assert not fsck(pool).damaged, side
        shutil.rmtree(pool)
    return runs
