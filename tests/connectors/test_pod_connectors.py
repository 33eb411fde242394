"""kvfs's connectors in real engines on a pod: blocks that an engine stored on one node are loaded by one on another.

The programs are those of the other tests here; each node's mount has a process of its own.
"""

import json

import pytest
import test_lmcache
import test_sglang
import test_vllm
from engine_players import Player
from helpers import requires_fuse, requires_root, wait_until
from podmounts import NEWS_S, Pod, settle

COUNT = 8

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def pod():
    requires_root()
    requires_fuse()
    with Pod(nodes=2, size="512M") as started:
        settle(started.nodes)
        yield started


@pytest.fixture
def players(pod, tmp_path):
    """players(start) is a process at each node: start(node, home, more...) begins one."""
    begun = []

    def start_all(start, *more):
        for node in pod.nodes:
            home = tmp_path / f"home{node.number}"
            home.mkdir()
            begun.append(start(node, home, *more))
        return begun

    yield start_all
    for player in begun:
        player.stop()


def answers(ask, wanted):
    """Wait for the news: what is asked for is then this."""
    wait_until(lambda: ask() == wanted, f"the answer {wanted} on the other node", timeout_s=NEWS_S, interval_s=0.05)


def test_vllm_on_two_nodes(engine, players):
    there = engine("vllm")

    def start(node, home):
        player = test_vllm.Player(there, home / "vllm.log")
        player.open(node.mount)
        return player

    one, other = players(start)
    assert other.load(range(COUNT)) == ["miss"] * COUNT
    assert one.store(range(COUNT)) == COUNT
    answers(lambda: other.lookup(range(COUNT)), [True] * COUNT)
    assert other.load(range(COUNT)) == ["same"] * COUNT, other.tail()
    # Blocks that are there are not written again. New ones go the other way.
    other.ask("forget")
    assert other.store(range(COUNT + 2)) == COUNT + 2
    answers(lambda: one.lookup(range(COUNT + 2)), [True] * (COUNT + 2))
    assert one.load(range(COUNT + 2)) == ["same"] * (COUNT + 2), one.tail()
    assert [player.warnings() for player in (one, other)] == [[], []]
    assert one.shutdown() and other.shutdown()


def lmcache_adapter(node, home, there):
    return Player(there, "lmcache_player.py", [test_lmcache.configuration(node.mount)], home)


def lmcache_remote(node, home, there):
    given = {
        "module_path": "kvfs.connectors.lmcache_remote", "class_name": "KvfsAdapter", "mount": str(node.mount),
        "timeout_s": 20,
    }  # fmt: skip
    extra = {f"remote_storage_plugin.kvfs.{name}": value for name, value in given.items()}
    return Player(there, "lmcache_remote_player.py", [json.dumps(extra)], home)


@pytest.mark.parametrize("start", [lmcache_adapter, lmcache_remote])
def test_lmcache_on_two_nodes(engine, players, start):
    one, other = players(start, engine("lmcache"))
    blocks = range(COUNT)
    assert other.ask("load", blocks) == ["miss"] * COUNT
    assert one.ask("store", blocks) == [True] * COUNT, one.tail()
    answers(lambda: other.ask("lookup", blocks), [True] * COUNT)
    assert other.ask("load", blocks) == ["same"] * COUNT, other.tail()
    # Blocks that are there are not written again. New ones go the other way.
    assert other.ask("store", range(COUNT + 2)) == [True] * (COUNT + 2), other.tail()
    counters = other.ask("counters")
    assert counters["stored"] == 2, counters
    answers(lambda: one.ask("lookup", range(COUNT + 2)), [True] * (COUNT + 2))
    assert one.ask("load", range(COUNT + 2)) == ["same"] * (COUNT + 2), one.tail()
    # One is removed by its own node, one by the other.
    remove = "delete" if start is lmcache_adapter else "remove"
    one.ask(remove, [0])
    other.ask(remove, [1])
    for player in (one, other):
        answers(lambda player=player: player.ask("lookup", [0, 1, 2]), [False, False, True])
        assert player.ask("load", [0, 1, 2]) == ["miss", "miss", "same"], player.tail()
    for player in (one, other):
        player.end()


def sglang_controller(node, home, there, options):
    return Player(there, "sglang_player.py", [test_sglang.settings(node.mount, **options)], home)


@pytest.mark.parametrize("in_place", [True, False], ids=["v1", "copied"])
@pytest.mark.parametrize("layout", test_sglang.LAYOUTS)
def test_sglang_on_two_nodes(engine, players, layout, in_place):
    one, other = players(sglang_controller, engine("sglang"), {"layout": layout, "interface_v1": int(in_place)})
    pages = test_sglang.PAGES
    test_sglang.store(one, 0)
    answers(lambda: other.ask("load", [pages - 1]), [pages, pages, True])
    # The prefix is there, and the pages behind it go the other way.
    test_sglang.store(other, 0, pages + 2)
    assert other.ask("counters")["stored"] == 2
    answers(lambda: one.ask("load", [pages + 1]), [pages + 2, pages + 2, True])
    assert one.ask("call", method="clear", arguments=[]) is True
    answers(lambda: other.ask("load", [pages - 1]), [0, 0, True])
    for player in (one, other):
        player.end()


def sglang_linker(node, home, there):
    linker = {
        "linker": "KvfsLinker", "linker_module_path": "kvfs.connectors.sglang_linker",
        "linker_extra_config": {"mount": str(node.mount), "timeout_s": 20},
    }  # fmt: skip
    words = json.dumps({"linker": linker, "pages": 40, "group_size": 256 << 10})
    return Player(there, "sglang_player.py", [words], home)


def test_sglang_linked_on_two_nodes(engine, players):
    one, other = players(sglang_linker, engine("sglang"))
    pages = test_sglang.PAGES
    assert other.ask("load", [pages - 1]) == [0, True, True]
    test_sglang.store(one, 0)
    answers(lambda: test_sglang.linked_load(other, 0), [pages, True, True])
    assert other.ask("counters")["failed_loads"] == 0
    for player in (one, other):
        player.end()
