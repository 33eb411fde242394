"""kvfs as a store of UCM: its own factory makes it, and its own base class and manager of ranks drive it."""

import pytest
from engine_players import SCRIPTS

pytestmark = pytest.mark.timeout(600)


def test_ucms_factory_makes_a_store_and_its_blocks_come_back(engine, directory):
    said = engine("ucm").run(SCRIPTS / "ucm_player.py", directory)
    assert said.stdout.endswith("done\n"), (said.stdout[-2000:], said.stderr[-4000:])
