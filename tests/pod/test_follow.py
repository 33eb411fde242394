"""The follower by itself, step by step: order, gaps, starts, loads, and what others may forge."""

from __future__ import annotations

from dataclasses import replace

import pytest
from members import make_batch

from kvfs.pod.batch import HEADER
from kvfs.pod.follow import Applied, Ask, Follower
from kvfs.pod.limits import Limits
from kvfs.pod.messages import State

LIMITS = Limits(held_size=1000)
START = 11


class Sink:
    def __init__(self) -> None:
        self.applied: list[int] = []
        self.reloads = 0
        self.says = Applied.DONE

    def apply(self, slot: int, batch: bytes) -> Applied:
        assert slot == 1
        if self.says is Applied.DONE:
            self.applied.append(HEADER.unpack_from(batch)[5])
        return self.says

    def reload(self, slot: int) -> None:
        self.reloads += 1


class Case:
    """A follower of slot 1, and a clock."""

    def __init__(self, links: int = 1) -> None:
        self.now = 100.0
        self.sink = Sink()
        self.follower = Follower(0, [0, 1], self.sink, self.now, links=links, limits=LIMITS)

    def state(self, number: int, *, start: int = START, epoch: int = 1, oldest: int = 0, floor: int = 0, beat: int = 1,
              ask: int = 0) -> None:  # fmt: skip
        self.follower.state(1, State(epoch, start, number, oldest, floor, beat, ask), self.now)

    def batch(
        self, number: int, records: int = 1, *, start: int = START, slot: int = 1, repeated: bool = False
    ) -> None:
        data = make_batch(slot, start, number, records)
        self.follower.batch(1, data, int(self.now * 1e9), self.now, int(self.now * 1e9) + 5_000_000, repeated=repeated)

    def loaded(self, *, whole: bool = True) -> None:
        self.follower.loaded(1, self.now, 0, whole=whole)

    def due(self, after_s: float = 0.0) -> list[Ask]:
        self.now += after_s
        asks = self.follower.due(self.now)
        for ask in asks:
            ask.number = 77
        return asks

    @property
    def owner(self) -> object:
        return self.follower.statistics(self.now)[0]


@pytest.fixture
def case() -> Case:
    """An owner at number 0 that is followed."""
    one = Case()
    one.state(0)
    assert one.sink.reloads == 1
    one.loaded()
    return one


def test_batches_are_applied_in_order_and_each_once(case: Case) -> None:
    for number in (0, 1, 1, 0, 2):
        case.batch(number)
    statistics = case.follower.statistics(case.now)[0]
    assert case.sink.applied == [0, 1, 2] and statistics.duplicates == 2 and statistics.lag_ms == 5.0
    assert statistics.state == "following" and statistics.behind == 0


def test_batches_before_the_load_is_through_wait_for_it() -> None:
    case = Case()
    case.state(4, floor=2)
    case.batch(4)
    case.batch(2, 2)
    case.batch(1)
    assert case.sink.applied == [] and case.follower.next_of(1, START) == -1
    case.loaded()
    assert case.sink.applied == [2, 4] and case.follower.next_of(1, START) == 5


def test_a_gap_is_asked_for_once_until_the_deadline(case: Case) -> None:
    case.batch(0)
    case.batch(3)
    asks = case.due()
    assert [(ask.slot, ask.of, ask.first) for ask in asks] == [(1, START, 1)]
    assert case.due(0.1) == []
    assert len(case.due(0.2)) == 1
    assert case.due(0.3) == [] and len(case.due(0.3)) == 1  # twice as long
    case.batch(1, 2, repeated=True)
    assert case.sink.applied == [0, 1, 3] and case.due(9) == []


def test_an_answer_in_parts_is_asked_on_at_once(case: Case) -> None:
    case.batch(0)
    case.batch(9)
    case.due()
    case.batch(1, 4, repeated=True)
    case.state(10, ask=77)
    assert [ask.first for ask in case.due()] == [5]


def test_with_two_engines_a_gap_may_close_by_itself() -> None:
    case = Case(links=2)
    case.state(0)
    case.loaded()
    case.batch(1)
    assert case.due() == [] and case.due(0.01) == []
    case.batch(0)
    assert case.due(1) == [] and case.sink.applied == [0, 1]
    case.batch(3)
    assert case.due() == [] and len(case.due(0.03)) == 1


def test_a_lost_last_batch_is_seen_by_the_next_beat(case: Case) -> None:
    case.batch(0)
    case.state(3, beat=2)
    assert case.due() == []
    assert [ask.first for ask in case.due(LIMITS.beat_patience_s)] == [1]


def test_a_new_start_is_read_from_flash_and_the_old_one_is_not_believed_again(case: Case) -> None:
    case.batch(0)
    case.state(5, start=22, epoch=2, floor=3)
    assert case.sink.reloads == 2
    case.loaded()
    case.batch(1)
    case.state(50)
    case.batch(3, 2, start=22)
    statistics = case.follower.statistics(case.now)[0]
    assert case.sink.applied == [0, 3] and statistics.epoch == 2 and statistics.stale == 2


def test_a_start_that_nobody_told_of_is_asked_for(case: Case) -> None:
    case.batch(0, start=33)
    asks = case.due()
    assert [(ask.of, ask.first) for ask in asks] == [(0, 0)] and case.sink.applied == []
    case.batch(1, start=33)
    assert case.due() == []


def test_a_start_that_comes_while_flash_is_read_is_read_too(case: Case) -> None:
    case.state(0, start=22, epoch=2)
    case.state(0, start=33, epoch=3)
    assert case.sink.reloads == 2
    case.loaded()
    assert case.sink.reloads == 3 and case.follower.next_of(1, 33) == -1
    case.loaded()
    assert case.follower.next_of(1, 33) == 0


def test_numbers_that_cannot_be_repeated_are_read_from_flash_while_news_go_on(case: Case) -> None:
    case.batch(0)
    case.batch(9)
    case.state(10, oldest=8, floor=9)
    case.due()
    assert case.follower.statistics(case.now)[0].lost == 7 and case.follower.next_of(1, START) == -1
    case.batch(8)
    assert case.sink.applied == [0, 8, 9] and case.sink.reloads == 1
    case.due(LIMITS.load_again_s)
    assert case.sink.reloads == 2
    case.batch(9, repeated=True)
    case.loaded()
    assert case.sink.applied == [0, 8, 9, 9] and case.follower.next_of(1, START) == 10


def test_flash_is_read_again_if_it_may_lack_what_cannot_be_repeated() -> None:
    """An owner whose memory was too short has dropped numbers 2 to 4 before they were on flash."""
    case = Case()
    case.state(6, oldest=5, floor=2)
    case.loaded()
    case.batch(5, repeated=True)
    assert case.sink.applied == [5] and case.follower.next_of(1, START) == -1
    case.due(LIMITS.settle_s - 0.1)
    assert case.sink.reloads == 1
    case.state(6, oldest=5, floor=6, beat=2)
    case.due(0.2)
    assert case.sink.reloads == 2
    case.loaded()
    assert case.follower.next_of(1, START) == 6
    case.due(LIMITS.load_again_max_s)
    assert case.sink.reloads == 2


def test_flash_is_read_again_after_a_loss_that_was_not_on_flash_yet(case: Case) -> None:
    case.batch(0)
    case.state(10, oldest=8, floor=0)
    case.due()
    case.due(LIMITS.load_again_s)
    assert case.sink.reloads == 2
    case.loaded()
    case.batch(8, 2)
    assert case.follower.next_of(1, START) == -1
    # It ends, although its owner says nothing any more.
    case.due(LIMITS.settle_s)
    assert case.sink.reloads == 3
    case.loaded()
    case.batch(8, 2)
    assert case.follower.next_of(1, START) == 10
    case.due(LIMITS.load_again_max_s)
    assert case.sink.reloads == 3


def test_losses_far_apart_do_not_make_the_next_load_wait_longer(case: Case) -> None:
    lost = 0
    for _ in range(12):
        case.batch(lost)
        case.state(lost + 10, oldest=lost + 8, floor=lost + 9)
        case.due()
        reloads = case.sink.reloads
        case.due(LIMITS.load_again_s)
        assert case.sink.reloads == reloads + 1
        case.loaded()
        case.batch(lost + 8, 2)
        lost += 10
        assert case.follower.next_of(1, START) == lost
        case.due(2 * LIMITS.load_again_s)


def test_a_load_that_a_new_start_made_needless_says_nothing_of_the_next() -> None:
    case = Case()
    case.state(6, oldest=5, floor=2)
    case.state(0, start=22, epoch=2)
    case.loaded()
    case.loaded()
    assert case.sink.reloads == 2 and case.follower.next_of(1, 22) == 0
    case.due(LIMITS.settle_s + 1)
    assert case.sink.reloads == 2


def test_a_load_that_failed_is_tried_again_later_and_later(case: Case) -> None:
    case.state(0, start=22, epoch=2)
    for wait_s in (2, 4, 8):
        before = case.sink.reloads
        case.loaded(whole=False)
        case.due(wait_s - 0.1)
        assert case.sink.reloads == before
        case.due(0.2)
        case.due(1.0)
        assert case.sink.reloads == before + 1


def test_an_owner_without_a_sign_of_life_is_read_from_flash_alone() -> None:
    case = Case()
    case.due(LIMITS.first_sign_s - 0.1)
    assert case.sink.reloads == 0
    case.due(LIMITS.beat_s)
    case.loaded()
    case.due(60)
    assert case.sink.reloads == 1 and case.follower.statistics(case.now)[0].state == "silent"
    case.state(7, floor=7)
    assert case.sink.reloads == 2


def test_held_batches_are_bounded_and_the_last_ones_go_first(case: Case) -> None:
    for number in range(1, 30):
        case.batch(number)
    statistics = case.follower.statistics(case.now)[0]
    assert statistics.held_size <= LIMITS.held_size
    case.batch(0)
    assert case.sink.applied == list(range(11))


def test_a_damaged_batch_is_asked_for_again_and_in_the_end_passed_over(case: Case) -> None:
    case.sink.says = Applied.DAMAGED
    case.batch(0)
    case.due()
    assert [ask.first for ask in case.due(LIMITS.beat_patience_s)] == [0]
    case.batch(0, repeated=True)
    case.batch(0, repeated=True)
    case.sink.says = Applied.DONE
    case.batch(1)
    statistics = case.follower.statistics(case.now)[0]
    assert statistics.damaged == 3 and case.sink.applied == [1]
    case.due(LIMITS.load_again_s)
    assert case.sink.reloads == 2


def test_a_forged_claim_ends_with_the_owners_answer(case: Case) -> None:
    case.batch(1 << 40)
    assert len(case.due()) == 1
    case.state(0, ask=77)
    assert case.due(10) == []


def test_what_is_no_batch_is_counted(case: Case) -> None:
    for data in (b"", bytes(56), make_batch(2, START, 0, 1), make_batch(1, START, 0, 1)[:-1]):
        case.follower.batch(1, data, 0, case.now, 0)
    assert case.follower.statistics(case.now)[0].damaged == 4 and case.sink.applied == []


def test_a_newer_version_of_batches_is_ignored_and_said(case: Case) -> None:
    data = bytearray(make_batch(1, START, 0, 1))
    data[8] = 2
    case.follower.batch(1, bytes(data), 0, case.now, 0)
    assert case.follower.statistics(case.now)[0].state == "unsupported" and case.due(10) == []
    case.batch(0)
    assert case.follower.statistics(case.now)[0].state == "following"


def test_an_owner_lives_while_its_beat_counts_on(case: Case) -> None:
    assert case.follower.alive(case.now) == [1]
    case.now += 2
    case.state(0, beat=2)
    case.now += 2
    case.state(0, beat=2)
    assert case.follower.alive(case.now) == [1]
    case.now += 2
    case.state(0, beat=2)
    assert case.follower.alive(case.now) == []


def test_many_owners_at_rest_cost_nothing() -> None:
    follower = Follower(0, range(72), Sink(), 0.0, links=1, limits=replace(LIMITS, first_sign_s=1e9))
    follower.due(0.1)
    assert not follower.busy
