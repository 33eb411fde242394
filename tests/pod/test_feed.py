"""The publisher by itself: order over links, bounds of memory and of streams, repeats, and the seals of messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from members import SECRET, make_batch

from kvfs.pod.batch import read_header
from kvfs.pod.engine import BATCH, MESSAGE, REPEATED, Names
from kvfs.pod.feed import Feed, Outgoing
from kvfs.pod.limits import Limits
from kvfs.pod.member import Link
from kvfs.pod.messages import FLUSH, STATE, Message, State, seal, unseal

LIMITS = Limits(history_size=4000, stream_size=1000, settle_s=10.0, repeat_size=700)
NAMES = Names("u")
START = 5


def make(links: int = 1, limits: Limits = LIMITS) -> Feed:
    return Feed(NAMES, 3, START, 1, SECRET, links=links, limits=limits)


def collect(feed: Feed, count: int, now: float = 0.0) -> None:
    for _ in range(count):
        feed.collect([make_batch(3, START, feed.next, 1)], now, 0)


def send(feed: Feed, link: int = 0, now: float = 0.0) -> list[Outgoing]:
    sent: list[Outgoing] = []
    while (out := feed.outgoing(link, now)) is not None:
        sent.append(out)
        feed.sent(link, out, (len(sent), 0), now)
    return sent


def numbers(sent: list[Outgoing]) -> list[int]:
    headers = [read_header(out.fields[BATCH]) for out in sent if BATCH in out.fields]
    return [header.number for header in headers if header is not None]


def test_each_link_gets_all_batches_in_their_order() -> None:
    feed = make(links=2)
    collect(feed, 3)
    assert numbers(send(feed, 0)) == [0, 1, 2]
    collect(feed, 1)
    assert numbers(send(feed, 1)) == [0, 1, 2, 3] and numbers(send(feed, 0)) == [3]
    assert send(feed, 0) == []


def test_a_batch_stays_the_next_until_it_is_sent() -> None:
    feed = make()
    collect(feed, 1)
    first, second = feed.outgoing(0, 0.0), feed.outgoing(0, 0.0)
    assert first == second != None  # noqa: E711


def test_without_an_engine_the_oldest_go_and_are_counted() -> None:
    feed = make()
    collect(feed, 50)
    statistics = feed.statistics()
    assert statistics.history_size <= LIMITS.history_size and statistics.dropped == 50 - statistics.history_batches
    assert numbers(send(feed)) == list(range(statistics.dropped, 50)) and feed.oldest == statistics.dropped


def test_batches_that_are_sent_go_with_time_and_others_stay() -> None:
    feed = make()
    collect(feed, 3)
    send(feed)
    collect(feed, 2, 1.0)
    collect(feed, 1, LIMITS.history_s + 2)
    assert feed.oldest == 3


def test_an_engine_that_comes_back_is_not_told_what_another_had() -> None:
    feed = make(links=2)
    collect(feed, 5)
    send(feed, 0)
    collect(feed, 1)
    feed.link_up(1)
    assert numbers(send(feed, 1)) == [5]


def test_a_stream_is_trimmed_by_size_and_by_time() -> None:
    feed = make()
    collect(feed, 11)
    positions = [out.oldest for out in send(feed)]
    assert positions[0] is None and positions[-1] is not None and positions[-1] > (1, 0)
    collect(feed, 1, LIMITS.stream_s + 1)
    assert positions[1] is None
    out = feed.outgoing(0, LIMITS.stream_s + 1)
    assert out is not None and out.oldest == (11, 0)


def test_a_link_that_comes_back_does_not_trim_what_readers_still_need() -> None:
    feed = make(limits=replace(LIMITS, history_size=1 << 20, stream_size=1 << 20))
    collect(feed, 4)
    send(feed)
    feed.link_up(0)
    collect(feed, 4, 1.0)
    assert [out.oldest for out in send(feed, now=1.0)] == [None] * 4


def test_a_stream_that_went_back_is_not_trimmed_by_places_before() -> None:
    feed = make()
    collect(feed, 11)
    send(feed)
    collect(feed, 2)
    out = feed.outgoing(0, 0.0)
    assert out is not None and out.oldest is not None
    feed.sent(0, out, (0, 1), 0.0)
    out = feed.outgoing(0, 0.0)
    assert out is not None and out.oldest is None


@pytest.mark.parametrize("first", [2, 0])
def test_a_repeat_comes_in_parts_and_ends_with_the_state(first: int) -> None:
    feed = make()
    collect(feed, 6)
    send(feed)
    feed.repeat(0, 1, START, first, 0.0, ask=9, ask_start=8)
    feed.repeat(0, 1, START, first, 0.0, ask=10, ask_start=8)
    sent = send(feed)
    assert numbers(sent) == [first, first + 1] and {out.stream for out in sent} == {NAMES.inbox(1)}
    assert all(REPEATED in out.fields for out in sent[:-1])
    answer = unseal(sent[-1].fields[MESSAGE], SECRET)
    assert answer is not None and State.of(answer) == State(1, START, 6, 0, 0, 0, 9, 8)


def test_too_old_another_start_and_nothing_new_are_answered_by_the_state_alone() -> None:
    feed = make()
    collect(feed, 50)
    send(feed)
    for start, first in ((START, 0), (77, 0), (START, 50), (0, 0)):
        feed.repeat(0, 1, start, first, 0.0, ask=9, ask_start=8)
        sent = send(feed)
        assert numbers(sent) == [] and len(sent) == 1
        answer = unseal(sent[0].fields[MESSAGE], SECRET)
        assert answer is not None and State.of(answer).oldest == feed.oldest > 0
    assert feed.statistics().too_old == 1


def test_repeats_do_not_hold_up_news() -> None:
    feed = make(limits=replace(LIMITS, repeat_size=10_000))
    collect(feed, 4)
    send(feed)
    feed.repeat(0, 1, START, 0, 0.0, ask=9, ask_start=8)
    collect(feed, 3)
    assert numbers(send(feed)) in ([4, 0, 5, 1, 6, 2, 3], [0, 4, 1, 5, 2, 6, 3])


def test_numbers_that_the_source_skipped_cannot_be_repeated() -> None:
    feed = make()
    collect(feed, 2)
    feed.collect([make_batch(3, START, 7, 2)], 0.0, 0)
    assert feed.next == 9 and feed.oldest == 7 and feed.statistics().skipped == 5


def test_the_floor_is_where_flash_may_lack_something() -> None:
    feed = make()
    collect(feed, 2, 0.0)
    collect(feed, 2, 5.0)
    assert feed.state(9.0).floor == 0
    assert feed.state(11.0).floor == 2 and feed.state(16.0).floor == 4 == feed.state(16.0).next


def test_the_floor_does_not_rise_because_the_memory_is_short() -> None:
    feed = make()
    collect(feed, 50)
    assert feed.oldest > 30 and feed.state(9.0).floor == 0
    collect(feed, 5, 9.0)
    assert feed.state(11.0).floor == 50 and feed.state(19.0).floor == 55


def test_numbers_that_the_source_skipped_are_on_flash_no_sooner_than_others() -> None:
    feed = make()
    feed.collect([make_batch(3, START, 7, 2)], 0.0, 0)
    state = feed.state(9.0)
    assert (state.floor, state.oldest) == (0, 7) and State.of(Message(STATE, 3, START, 1, state.fields())) == state
    assert feed.state(11.0).floor == 9


def test_the_floor_follows_an_owner_that_never_rests_with_few_marks() -> None:
    feed = make()
    for turn in range(1000):
        collect(feed, 1, turn / 10)
        # One number each 0.1 s: those of the last ten seconds are not on flash yet.
        assert max(0, turn - 103) <= feed.state(turn / 10).floor <= max(0, turn - 99)
        assert len(feed._marks) < 70


def test_a_message_that_is_late_is_not_sent_and_messages_are_bounded() -> None:
    feed = make(limits=replace(LIMITS, messages_max=3))
    for _ in range(5):
        feed.post(FLUSH, {}, 0.0, wait_s=1.0)
    assert len(send(feed, now=0.5)) == 3
    feed.post(FLUSH, {}, 0.0, wait_s=1.0)
    assert send(feed, now=2.0) == []


def test_a_message_is_of_this_pool_and_whole_or_nothing() -> None:
    message = Message(STATE, 1, 2, 3, {"next": 4})
    data = seal(message, SECRET)
    assert unseal(data, SECRET) == message
    assert unseal(data, b"another") is None
    for at in range(len(data)):
        assert unseal(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], SECRET) is None
        assert unseal(data[:at], SECRET) is None
    for wrong in ({"next": "4"}, {"next": -1}, {"next": True}, {}):
        with pytest.raises(ValueError, match="state of slot 1: field next"):
            Message(STATE, 1, 2, 3, wrong).integer("next")


def test_a_link_that_is_away_says_what_each_half_of_it_knows() -> None:
    link = Link(0)
    assert link.error == ""
    link.reading.error = "password file p: mode 0644"
    assert link.error == "password file p: mode 0644"
    link.writing.error = "Connection closed by server."
    assert "0644" in link.error and "closed" in link.error
    link.writing.error = link.reading.error
    assert link.error == "password file p: mode 0644"
