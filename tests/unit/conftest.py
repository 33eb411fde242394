"""hypothesis's examples have no deadline: a machine that others use stalls for longer than the usual 200 ms.

Tests without the marker `files` (tests/conftest.py) make no file.
"""

import tempfile

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(autouse=True)
def no_files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that need no file system (tests/conftest.py) run first, in seconds: one that makes a file is none of them,
    and is to ask for tmp_path."""
    if request.node.get_closest_marker("files") is None:
        monkeypatch.setattr(tempfile, "tempdir", "/this-test-needs-no-file-system")
