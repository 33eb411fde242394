"""Verdicts on devices: by numbers and times alone."""

from __future__ import annotations

import errno

import pytest

from kvfs.store.health import FAILURES, SAMPLES, UNHEARD_S, Failures, Pace, judge


def test_errors_beyond_the_threshold_fail_a_device_and_fewer_do_not() -> None:
    failures = Failures()
    assert failures.verdict(100, 0.0) is None
    for i in range(FAILURES - 1):
        assert failures.note(errno.EIO, i / 10) is None
    assert failures.verdict(100, 1.0) is None
    failures.note(errno.EIO, 1.1)
    reason = failures.verdict(100, 1.2)
    assert reason is not None and f"{FAILURES} errors" in reason and "EIO" in reason


def test_errors_among_much_that_goes_well_or_spread_over_time_are_no_failure() -> None:
    failures = Failures()
    failures.verdict(0, 0.0)
    for i in range(2 * FAILURES):
        failures.note(errno.EIO, i / 100)
    assert failures.verdict(10_000, 1.0) is None, "one bad sector that is read again and again"
    failures = Failures()
    for i in range(10 * FAILURES):
        failures.note(errno.EIO, 3.0 * i)
        assert failures.verdict(0, 3.0 * i) is None


def test_a_full_disk_below_a_device_is_no_failure() -> None:
    failures = Failures()
    for i in range(10 * FAILURES):
        assert failures.note(errno.ENOSPC, i / 100) is None
    assert failures.verdict(0, 1.0) is None


def test_one_missed_deadline_fails_a_device_that_is_silent_and_none_that_answers() -> None:
    silent, answering = Failures(), Failures()
    for i in range(41):
        assert silent.verdict(7, i / 4) is None and answering.verdict(i, i / 4) is None
    silent.note(errno.ETIMEDOUT, 10.0)
    answering.note(errno.ETIMEDOUT, 10.0)
    reason = silent.verdict(7, 10.25)
    assert reason is not None and "no answer" in reason
    assert answering.verdict(42, 10.25) is None


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ENXIO, errno.ENOTCONN])
def test_a_descriptor_that_leads_nowhere_fails_at_once(number: int) -> None:
    reason = Failures().note(number, 0.0)
    assert reason is not None and errno.errorcode[number] in reason


def _turn(paces: dict[int, Pace], totals: dict[int, list[int]], bucket: dict[int, int], count: int, now: float) -> None:
    for device, pace in paces.items():
        totals[device][bucket[device]] += count
        pace.take({"read": list(totals[device]), "write": [0] * 40}, now)


def test_a_device_far_slower_than_its_peers_is_slow_in_two_turns_and_not_slow_after_three() -> None:
    paces, totals = {i: Pace() for i in range(4)}, {i: [0] * 40 for i in range(4)}
    usual, sick = dict.fromkeys(range(4), 20), {0: 20, 1: 27, 2: 20, 3: 20}  # about 1 ms; 100 ms
    nobody: frozenset[int] = frozenset()
    _turn(paces, totals, usual, 100, 1)
    assert judge(paces, nobody, 1) == {}
    _turn(paces, totals, sick, 100, 2)
    assert judge(paces, nobody, 2) == {}
    _turn(paces, totals, sick, 100, 3)
    verdict = judge(paces, nobody, 3)
    assert list(verdict) == [1] and "times that of its peers" in (verdict[1] or "")
    slow = frozenset((1,))
    for now in (4, 5):
        _turn(paces, totals, usual, 100, now)
        assert judge(paces, slow, now) == {}
    _turn(paces, totals, usual, 100, 6)
    assert judge(paces, slow, 6) == {1: None}


def test_few_samples_small_times_and_a_pool_that_is_slow_together_say_nothing() -> None:
    nobody: frozenset[int] = frozenset()
    for count, bucket in (
        (SAMPLES // 4, {0: 20, 1: 27}),
        (1000, {0: 14, 1: 20}),  # 16 us and 1 ms
        (1000, {0: 27, 1: 28}),
    ):
        paces, totals = {i: Pace() for i in range(2)}, {i: [0] * 40 for i in range(2)}
        for now in range(1, 4):
            _turn(paces, totals, bucket, count, now)
            assert judge(paces, nobody, now) == {}, (count, bucket)


def test_samples_are_collected_over_turns_until_they_are_enough() -> None:
    paces, totals = {i: Pace() for i in range(2)}, {i: [0] * 40 for i in range(2)}
    verdicts = []
    for now in range(1, 20):
        _turn(paces, totals, {0: 18, 1: 27}, SAMPLES // 4, now)
        verdicts.append(judge(paces, frozenset(), now))
    assert {1} in [set(verdict) for verdict in verdicts]


def test_a_slow_device_of_which_nothing_is_heard_may_show_how_it_is() -> None:
    paces, totals = {i: Pace() for i in range(2)}, {i: [0] * 40 for i in range(2)}
    _turn(paces, totals, {0: 18, 1: 27}, 100, 1)
    slow = frozenset((1,))
    assert judge(paces, slow, 1) == {}
    paces[1].take({"read": list(totals[1]), "write": [0] * 40}, UNHEARD_S)
    assert judge(paces, slow, UNHEARD_S) == {}
    paces[1].take({"read": list(totals[1]), "write": [0] * 40}, UNHEARD_S + 2)
    assert judge(paces, slow, UNHEARD_S + 2) == {1: None}
