"""The holder of a mount, as a status document has it: for people, and for Prometheus.

Pure: documents in, text and samples out.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvfs.status.numbers import Json, number, section
from kvfs.units import counted, size_text

_JOURNAL_GAUGES = {
    "size": ("kvfs_journal_size_bytes", "Bytes of the journal of names, which the holder keeps."),
    "used": ("kvfs_journal_used_bytes", "Bytes of changes of names in it, which no commit has or no answer has told."),
    "unanswered": ("kvfs_journal_unanswered", "Requests whose changes wait in it for the answer to be written."),
}


def holder_text(status: Json) -> str:
    """One line: who keeps the mount, how often it was taken over, and the fill of the journal of names."""
    holder = section(status, "holder")
    ended = "" if holder.get("alive") else ", which has ended"
    pid = number(holder, "pid")  # 0: as the kernel says of a process in another container
    where = f"pid {pid:.0f}" if pid else "a process in another pid namespace"
    return (
        f"by {holder.get('path')} ({where}{ended}), taken over "
        f"{counted(number(holder, 'takeovers'), 'time')}{_journal_text(section(holder, 'journal'))}"
    )


def _journal_text(journal: Json) -> str:
    if not journal:
        return ""
    lost = number(journal, "lost")
    return (
        f"; journal {size_text(number(journal, 'used'))} of {size_text(number(journal, 'size'))}, "
        f"unanswered {number(journal, 'unanswered'):.0f}" + (f", lost {lost:.0f}" if lost else "")
    )


def holder_advice(status: Json) -> list[str]:
    """Facts that the operator should act on."""
    holder = section(status, "holder")
    found = []
    if holder and not holder.get("alive"):
        found.append(
            f"the holder, {holder.get('path')}, has ended: the mount ends with this daemon; "
            "unmount, start the holder, and mount again when it suits"
        )
    if lost := number(section(holder, "journal"), "lost"):
        found.append(
            f"the journal of names had no room for {counted(lost, 'change')}: a kill before the next commit may undo "
            "them; is the pool's own filesystem slow, or full?"
        )
    return found


def holder_samples(status: Json) -> Iterator[tuple[str, str, str, dict[str, str], float]]:
    """Metrics: kind, name, help, labels, value. Without a holder there are none."""
    holder = section(status, "holder")
    if not holder:
        return
    alive = float(bool(holder.get("alive")))
    yield "gauge", "kvfs_holder_up", "Whether the process that keeps the mount for the next daemon is there.", {}, alive
    takeovers = number(holder, "takeovers")
    yield "counter", "kvfs_holder_takeovers", "Times that a daemon took the mount over from the last.", {}, takeovers
    journal = section(holder, "journal")
    for key, (name, help_) in _JOURNAL_GAUGES.items():
        if key in journal:
            yield "gauge", name, help_, {}, number(journal, key)
    if "lost" in journal:
        help_ = "Changes of names that the journal had no room for, since it was attached."
        yield "counter", "kvfs_journal_lost", help_, {}, number(journal, "lost")
