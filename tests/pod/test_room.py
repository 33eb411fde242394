"""The room costs nobody anything who has no pod, and its benchmark keeps working."""

from __future__ import annotations

import subprocess
import sys

import pytest
from servers import needs_redis

WITHOUT = """
import sys
import kvfs.cli.command, kvfs.daemon.daemon, kvfs.status.document
assert not [name for name in sys.modules if f"{name}.".startswith(("kvfs.pod.", "redis."))]
import kvfs.pod.threads, kvfs.pod.doctor, kvfs.pod.url
assert "redis" not in sys.modules and "kvfs.pod.redis_engine" not in sys.modules
"""


def test_without_a_pod_neither_the_feed_nor_a_client_of_an_engine_is_imported() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, timeout=60)


@needs_redis
@pytest.mark.slow
def test_the_benchmark_of_the_feed_runs() -> None:
    from bench_feed import run

    results = run(0.3, 1)
    assert {str(one["case"]).partition(":")[0] for one in results} == {"latency", "cpu", "lag", "barrier and lease"}
