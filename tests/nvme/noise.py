"""The time that a busy machine adds to every deadline."""

import threading
import time


class Noise(threading.Thread):
    """How late a thread of this process wakes up from a sleep. A read that ends at its deadline ends by such a wake-up,
    so what comes on top of the deadline then is the machine's.
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

    def worst_s(self, began, ended):
        """The longest such delay between two times."""
        return max((late for start, end, late in self.late if start < ended and end > began), default=0.0)

    def beyond(self, deadline_s, calls):
        """Of calls (began, ended): by how much the worst took longer than the deadline and the machine's delay then."""
        return max((ended - began - deadline_s - self.worst_s(began, ended) for began, ended in calls), default=0.0)
