"""The time that a busy machine adds to every deadline."""

import threading
import time


class Noise(threading.Thread):
    """How late a thread of this process wakes up from a sleep. A read that ends at its deadline ends by several such
    wake-ups, one after the other, and each may be late. So what comes on top of the deadline is the machine's, as far
    as all delays of that time together.
    """

    STEP_S = 0.002

    def __init__(self):
        super().__init__()
        self.halt, self.late = threading.Event(), []

    def run(self):
        while not self.halt.is_set():
            began = time.monotonic()
            time.sleep(self.STEP_S)
            ended = time.monotonic()
            if (late := ended - began - self.STEP_S) > self.STEP_S:
                self.late.append((began, ended, late))

    def total_s(self, began, ended):
        """All such delays between two times, together."""
        return sum(late for start, end, late in self.late if start < ended and end > began)

    def beyond(self, deadline_s, calls):
        """Of calls (began, ended): by how much the worst took longer than the deadline and the machine's delays."""
        return max((ended - began - deadline_s - self.total_s(began, ended) for began, ended in calls), default=0.0)
