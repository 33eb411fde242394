"""A program's Ctrl-C at any moment: Python raises it between any two steps of the client's calls."""

import subprocess
import sys

from helpers import REPOSITORY, slowness

# Each round is broken off by a signal at some moment of its calls; then everything is closed.
PROGRAM = """
import errno, random, signal, sys, threading, time
import kvfs
from kvfs.errors import ClientError

ROUNDS = 300

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGUSR1, interrupt)
main, begin = threading.main_thread().ident, threading.Event()

def interrupter():
    while begin.wait():
        begin.clear()
        until = time.perf_counter_ns() + random.randrange(300_000)
        while time.perf_counter_ns() < until:
            pass
        signal.pthread_kill(main, signal.SIGUSR1)

threading.Thread(target=interrupter, daemon=True).start()
client = kvfs.connect(sys.argv[1], "interrupts", timeout_s=20)
block, memory = bytes(100_000), bytearray(100_000)
client.put([(b"key", block)])
events, queue = client.events(), client.queue()
kinds = {
    "exists": lambda: client.exists([b"key"]),
    "get": lambda: client.get_into([(b"key", memory)]),
    "events": lambda: events.next_event(0.0),
    "queue": lambda: (queue.exists([b"key"]), queue.get([(b"key", memory)]), queue.drain()),
}
for number in range(ROUNDS):
    call = list(kinds.values())[number % len(kinds)]
    try:
        begin.set()
        while True:
            try:
                call()
            except ClientError as error:  # what waits in the queue is bounded
                assert error.errno == errno.EAGAIN, error
    except KeyboardInterrupt:
        pass
for step in (events.close, queue.close, lambda: client.close(timeout_s=20)):
    began = time.monotonic()
    step()
    print(round(time.monotonic() - began, 3))
"""


def test_a_client_closes_after_any_interrupts(mount):
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM, mount],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=100 * slowness(), check=False,
    )  # fmt: skip
    assert (child.returncode, child.stderr) == (0, "")
    took_s = list(map(float, child.stdout.split()))
    assert len(took_s) == 3
    # A call that counted as one under way would be waited for: 20 s.
    assert max(took_s) < 19, took_s
