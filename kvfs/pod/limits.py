"""Bounds and times of the feed, in one place: a test or the simulation gives others."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
BATCH_MAX = 64 * 1024
# Of one message: keys of a lease or a touch. 1,024 keys of 16 bytes are 34 KiB as text.
KEYS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes are bytes. The defaults are a pod's."""

    # An owner's memory: what it can repeat, and what it collects while no engine can be reached.
    history_s: float = 600.0
    history_size: int = 64 * MIB
    # A node's stream in the engine.
    stream_s: float = 60.0
    stream_size: int = 32 * MIB
    # A stream that nobody writes to any more goes after this time.
    stream_expire_s: float = 3600.0
    # Records older than this are on flash: who loads an owner's flash asks for the younger ones.
    settle_s: float = 60.0
    beat_s: float = 1.0
    beat_expire_s: float = 3.0
    # A message is worth nothing later.
    message_s: float = 2.0
    messages_max: int = 4096
    # A follower: batches of one owner that wait for those before them.
    held_size: int = 8 * MIB
    # An answer to one ask; the asker asks for the rest, so a slow reader is never flooded.
    repeat_size: int = MIB
    ask_s: float = 0.25
    ask_max_s: float = 4.0
    # How long a gap may close by itself: over several engines entries overtake each other.
    patience_s: float = 0.02
    # A beat may be read before the entries that it speaks of.
    beat_patience_s: float = 0.2
    # An owner that gives no sign within this time after our start is read from flash alone.
    first_sign_s: float = 1.5
    load_again_s: float = 2.0
    load_again_max_s: float = 300.0
    retry_s: float = 0.05
    retry_max_s: float = 5.0
    # A link on which nothing came for this time is asked whether its streams went back.
    silence_s: float = 5.0
    verify_max_s: float = 60.0
    read_count: int = 8
