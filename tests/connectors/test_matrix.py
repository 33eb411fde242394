"""tools/engine-matrix in the tier of engines: the newest versions, and those that stacks pin, as the index has them."""

import os
import subprocess

import pytest
from helpers import REPOSITORY

# Of a run of the tier: versions whose turn has not come by then are said to be not tried.
MINUTES = float(os.environ.get("KVFS_MATRIX_MINUTES", "20"))
NOTHING_TRIED = 3


@pytest.mark.slow
@pytest.mark.timeout((MINUTES + 30) * 60)
def test_no_version_of_an_engine_fails_its_probe_or_its_drive():
    command = [REPOSITORY / "tools/engine-matrix", "--minutes", str(MINUTES)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    print(ended.stdout)
    if ended.returncode == NOTHING_TRIED:
        pytest.skip(f"NOT RUN: {ended.stderr.strip().splitlines()[-1]}")
    assert ended.returncode == 0, (ended.stdout[-6000:], ended.stderr[-3000:])
