"""Starts a process for each request that touches a mount, and gives it a deadline.

A process that is killed in a FUSE request may live on until the daemon answers or ends. It is left to itself. Their
number is bounded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("binding.py")
_WAITING_MOST = 16


class Worker:
    def __init__(self, mount: str, kubelet: str, timeout_s: float) -> None:
        self.mount, self.kubelet, self.timeout_s = mount, kubelet, timeout_s
        self._lock = threading.Lock()
        self._late: list[subprocess.Popen[str]] = []

    def ask(self, verb: str, **words: Any) -> dict[str, Any]:
        """The answer to a request; UNAVAILABLE if there is none within the deadline."""
        with self._lock:
            self._late = [process for process in self._late if process.poll() is None]
            if len(self._late) >= _WAITING_MOST:
                return self._unavailable(f"{len(self._late)} earlier requests still wait for it")
        request = json.dumps({"verb": verb, "mount": self.mount, "kubelet": self.kubelet, **words})
        # Without site-packages and the environment: it takes 20 ms, and is nobody's but ours.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            said, complaints = process.communicate(request, timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
            with self._lock:
                self._late.append(process)
            return self._unavailable(f"no answer within {self.timeout_s:g} s")
        if process.returncode != 0:
            last = complaints.strip().splitlines()[-1:] or ["nothing was said"]
            return {"code": "INTERNAL", "message": f"{verb}: ended with {process.returncode}: {last[0]}"}
        answer: dict[str, Any] = json.loads(said)
        return answer

    def _unavailable(self, why: str) -> dict[str, Any]:
        return {"code": "UNAVAILABLE", "message": f"{self.mount}: the kvfs mount does not answer: {why}"}
