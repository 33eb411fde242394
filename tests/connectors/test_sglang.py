"""kvfs under SGLang: its own controllers, host pools, threads and factory, on a CPU, lose pages, daemons and room."""

import json
import os

import pytest
from engine_players import SCRIPTS, Player, damage, files_below
from helpers import wait_until
from remounts import own_pool

from kvfs.connectors import tried

__all__ = ["own_pool"]

LAYOUTS = ["page_first_direct", "page_first", "page_head", "layer_first"]
PAGES = 8
pytestmark = pytest.mark.timeout(600)


def settings(mount, layout="page_first_direct", hybrid=False, pages=40, **options):
    extra = {
        "backend_name": "kvfs", "module_path": "kvfs.connectors.sglang", "class_name": "HiCacheKvfs", "interface_v1": 1,
        "mount": str(mount), "timeout_s": 20, **options,
    }  # fmt: skip
    return json.dumps({"extra": extra, "layout": layout, "hybrid": hybrid, "pages": pages})


@pytest.fixture
def sglang(engine, tmp_path):
    """sglang(mount): a process with a controller of SGLang's."""
    there, players = engine("sglang"), []

    def start(mount, **options):
        players.append(Player(there, "sglang_player.py", [settings(mount, **options)], tmp_path))
        return players[-1]

    start.there = there
    yield start
    for player in players:
        player.stop()


def check(player, prompt, found, loaded=None, pages=PAGES):
    """A load of so many pages finds and loads so many, and what it loads is right."""
    said = player.ask("load", [prompt * 100 + pages - 1])
    assert said == [found, found if loaded is None else loaded, True], player.tail()


def store(player, prompt, pages=PAGES):
    assert player.ask("store", [prompt * 100 + pages - 1]) == pages, player.tail()


def blocks(pool):
    return files_below(pool.mount / "sglang")


@pytest.mark.parametrize("in_place", [True, False], ids=["v1", "copied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_every_layout_come_back_as_they_were(own_pool, sglang, layout, in_place):
    pool = own_pool(files=2, size="128M")
    player = sglang(pool.mount, layout=layout, interface_v1=int(in_place))
    check(player, 0, 0)
    store(player, 0)
    assert len(blocks(pool)) == PAGES, "a page is one block"
    check(player, 0, PAGES)
    check(player, 0, PAGES, pages=PAGES + 3)
    check(player, 1, 0)
    store(player, 0, PAGES + 2)
    check(player, 0, PAGES + 2, pages=PAGES + 2)
    counters = player.ask("counters")
    assert counters["stored"] == PAGES + 2 and counters["failed_loads"] == counters["failed_stores"] == 0
    if in_place:
        assert counters["present"] == PAGES, "what is there is not written again"
        prefetched, backed_up, *rates = player.ask("stats")
        assert sum(backed_up) >= PAGES + 2 and sum(prefetched) >= PAGES and all(all(each) for each in rates)
    player.end()


def test_pages_that_are_lost_are_misses_and_sglang_lives_on(own_pool, sglang):
    pool = own_pool(files=2, size="48M")
    player = sglang(pool.mount)
    store(player, 0)
    hashes = player.ask("keys", [PAGES - 1])
    paths = {path.name: path for path in blocks(pool)}
    third = paths[(hashes[3].encode() + b".kv.t0").hex()]

    # Three pages are loaded and the damaged one is not; the next store of it replaces it.
    damage(pool, third)
    said = player.ask("load", [PAGES - 1])
    assert said[1:] == [3, True], said
    store(player, 0)
    check(player, 0, PAGES)
    # One that is gone ends the prefix at the look-up.
    os.unlink(third)
    check(player, 0, 3)
    store(player, 0)
    check(player, 0, PAGES)

    # One and a half times the pool: prefixes are as long as eviction left them, and right.
    prompts = range(10, 240)
    for other in prompts:
        store(player, other, 30)
    loads = [player.ask("load", [other * 100 + 29]) for other in prompts]
    assert all(found == loaded and is_right for found, loaded, is_right in loads)
    assert min(found for found, _, _ in loads) < 30, "nothing was evicted"
    pool.command("evict", str(pool.path), "--all")
    check(player, 0, 0)

    # No room, as all that is stored is pinned: SGLang is told, and nothing else suffers.
    pool.command("pin", str(pool.mount / "sglang"))
    prompt = 1000
    while player.ask("store", [prompt * 100 + 29]) == 30:
        prompt += 1
        assert prompt < 1300, "a pool of 96 MiB took 140"
    check(player, 1000, 30, pages=30)
    pool.command("unpin", str(pool.mount / "sglang"))
    store(player, 2000)
    check(player, 2000, PAGES)
    assert player.ask("counters")["failed_stores"] > 0
    player.end()


def test_a_daemon_that_is_killed_costs_stores_and_comes_back(own_pool, sglang):
    pool = own_pool(files=2, size="128M")
    player = sglang(pool.mount)
    store(player, 0)
    pool.kill()
    assert player.ask("store", [100 + PAGES - 1]) == 0
    check(player, 0, PAGES)
    pool.remount()
    wait_until(lambda: player.ask("store", [200 + PAGES - 1]) == PAGES, "stores after the restart", interval_s=0.2)
    check(player, 0, PAGES)
    check(player, 2, PAGES)
    player.end()
    assert player.tail(1 << 20).count("the daemon is away") <= 1


def test_a_kvfs_that_is_mounted_later_is_found(own_pool, sglang):
    pool = own_pool(files=2, size="128M", started=False)
    player = sglang(pool.mount)
    assert player.ask("store", [PAGES - 1]) == 0
    check(player, 0, 0)
    pool.start()
    wait_until(lambda: player.ask("store", [PAGES - 1]) == PAGES, "a store", interval_s=0.2)
    check(player, 0, PAGES)
    player.end()


def test_two_engines_share_a_pool_and_another_layout_shares_nothing(own_pool, sglang):
    pool = own_pool(files=2, size="128M")
    one, other, apart = sglang(pool.mount), sglang(pool.mount), sglang(pool.mount, layout="page_first")
    store(one, 0)
    check(other, 0, PAGES)
    check(apart, 0, 0)
    store(other, 0)
    store(apart, 0)
    assert len(blocks(pool)) == 2 * PAGES
    # clear() takes the pages of one layout alone.
    assert one.ask("call", method="clear", arguments=[]) is True
    check(other, 0, 0)
    check(apart, 0, PAGES)


def test_a_hybrid_model_restores_what_all_its_pools_have(own_pool, sglang):
    pool = own_pool(files=2, size="128M")
    player = sglang(pool.mount, hybrid=True)
    last = [PAGES - 1]
    assert player.ask("lookup", last) == [0, {}, []]
    # Prefixes of four and of eight pages have a window of two pages at their ends, and none between has one.
    assert player.ask("store", [3]) == [4, {"swa": 2, "indexer": 4}], player.tail()
    assert player.ask("store", last) == [PAGES, {"swa": 2, "indexer": PAGES}]
    assert player.ask("lookup", last) == [PAGES, {"kv": PAGES, "swa": PAGES, "indexer": PAGES}, [4, PAGES]]
    assert player.ask("load", last) == [{"kv": PAGES, "swa": 2, "indexer": PAGES}, True], player.tail()
    hashes = player.ask("keys", last)
    by_name = {bytes.fromhex(path.name).decode(): path for path in blocks(pool)}
    assert len(by_name) == 2 * PAGES + 4

    def removed(pool_name, page):
        (name,) = [name for name in by_name if name.startswith(f"{hashes[page]}.{pool_name}")]
        os.unlink(by_name[name])

    # Without a page of the last window the shorter prefix is left.
    removed("swa", 7)
    assert player.ask("lookup", last) == [4, {"kv": PAGES, "swa": 4, "indexer": PAGES}, [4]]
    assert player.ask("load", last) == [{"kv": 4, "swa": 2, "indexer": 4}, True]
    # Groups of three pages of which the third lacks one reach two blocks far, and KV does not care.
    removed("indexer", 6)
    groups = player.ask("groups", last, group_pages=3, block_pages=5)
    assert groups in (None, [PAGES, {"kv": PAGES, "indexer": 10}])
    # SGLang 0.5.21 has no such groups.
    assert (groups is None) == (version_of(sglang.there) == "0.5.21")
    removed("indexer", 2)
    assert player.ask("lookup", last) == [0, {"kv": PAGES, "swa": 4, "indexer": 2}, []]
    player.end()


def test_ranks_share_what_is_the_same_and_nothing_else(engine, own_pool, tmp_path):
    """MLA, tensor parallelism, heads that are split: by SGLang's own pools, each rank a back end of its own."""
    pool = own_pool(files=2, size="128M")
    program = engine("sglang").run(SCRIPTS / "sglang_ranks.py", pool.mount, HOME=os.fspath(tmp_path))
    seen = json.loads(program.stdout.splitlines()[-1])
    assert seen == {
        "mla": {"stored": [4, 4], "found": [4, 4], "right": [True, True], "blocks": 4},
        "heads": {"stored": [4, 4], "found": [4, 4], "right": [True, True], "blocks": 8},
        "split": {"stored": [4], "found": [4, 4], "right": [True, True], "blocks": 8},
    }


def test_an_environment_without_sglang_is_told_which_version_was_tried(engine):
    said = engine("lmcache").run("-c", "import kvfs.connectors.sglang", check=False)
    assert said.returncode == 1 and "kvfs for sglang: " in said.stderr
    assert f"tried with {', '.join(tried.VERSIONS['sglang'])}" in said.stderr


OTHER_VERSIONS = """
import json, sys, types
import sglang_player
from kvfs.connectors import sglang, versions

said = {"lacks": versions.probe("sglang"), "writes": [
    sglang._writes(types.SimpleNamespace(is_mla_model=is_mla, tp_rank=rank, **more))
    for is_mla, rank, more in [
        (False, 1, {}), (True, 0, {}), (True, 1, {}), (True, 0, {"is_storage_writer": False}),
        (False, 1, {"is_storage_writer": True}),
    ]
]}
# The revision of the weights is SGLang's own, once it has told it in this process.
from sglang.srt import runtime_context
from kvfs.connectors.sglang_pools import own_revision

said["revisions"] = [own_revision()]
for given in (None, "v2"):
    runtime_context.get_server_args = lambda given=given: types.SimpleNamespace(revision=given)
    said["revisions"].append(own_revision())
sys.modules["sglang.srt.mem_cache.unified_cache.linker_factory"] = None
try:
    import kvfs.connectors.sglang_linker
except ImportError as error:
    said["linker"] = str(error)
print(json.dumps(said))
"""


def test_what_another_version_lacks_is_looked_for(engine):
    """Which rank writes is told from 0.5.23 on, and linkers of others are loaded from then on."""
    there = engine("sglang")
    path = f"{there.site}{os.pathsep}{SCRIPTS}"
    said = json.loads(there.run("-c", OTHER_VERSIONS, PYTHONPATH=path).stdout.splitlines()[-1])
    assert said["revisions"] == ["", "", "v2"]
    assert said["lacks"] == [] and said["writes"] == [True, True, False, False, True]
    assert "it lacks " in said["linker"] and "unified_cache.linker_factory (ModuleNotFoundError" in said["linker"]
    assert f"(version {version_of(there)} is installed; this connector was tried with 0.5.23" in said["linker"]


def version_of(there):
    return there.run("-c", "import importlib.metadata as each; print(each.version('sglang'))").stdout.strip()


# ---- the external linker, without a tier on the host ----


@pytest.fixture
def linked(engine, tmp_path):
    """linked(mount): a process with a unified radix cache of SGLang's and kvfs linked to its device's pools."""
    there, players = engine("sglang"), []
    if version_of(there) in ("0.5.21", "0.5.22"):
        pytest.skip("NOT RUN: SGLang loads linkers of others from 0.5.23 on")

    def start(mount, group_size=256 << 10, **options):
        linker = {
            "linker": "KvfsLinker", "linker_module_path": "kvfs.connectors.sglang_linker",
            "linker_extra_config": {"mount": str(mount), "timeout_s": 20, **options},
        }  # fmt: skip
        words = json.dumps({"linker": linker, "pages": 40, "group_size": group_size})
        players.append(Player(there, "sglang_player.py", [words], tmp_path))
        return players[-1]

    yield start
    for player in players:
        player.stop()


def linked_load(player, prompt, pages=PAGES):
    """After the device has lost all."""
    assert player.ask("evict")
    return player.ask("load", [prompt * 100 + pages - 1])


@pytest.mark.parametrize("group_size", [1, 200 << 10], ids=["a layer", "some layers"])
def test_pages_of_a_device_come_back_by_layers_in_another_process(own_pool, linked, group_size):
    pool = own_pool(files=2, size="128M")
    player = linked(pool.mount, group_size)
    assert player.ask("load", [PAGES - 1]) == [0, True, True]
    store(player, 0)
    assert len(blocks(pool)) == 2 * PAGES, "a page is one block in each of two pools"
    assert linked_load(player, 0) == [PAGES, True, True]
    assert linked_load(player, 0, PAGES + 3) == [PAGES, True, True]
    assert linked_load(player, 1) == [0, True, True]
    # The tree has the first pages: only those behind them are asked for and stored.
    store(player, 1, 3)
    store(player, 1)
    assert linked_load(player, 1) == [PAGES, True, True]
    player.end()
    other = linked(pool.mount, group_size)
    assert other.ask("load", [PAGES - 1]) == [PAGES, True, True]
    counters = other.ask("counters")
    assert counters["failed_loads"] == 0 and counters["loaded_bytes"] == 2_629_632, "each byte once"
    other.end()


def test_a_linked_page_that_is_lost_aborts_one_load_and_is_stored_again(own_pool, linked):
    pool = own_pool(files=2, size="128M")
    player = linked(pool.mount)
    store(player, 0)
    third = player.ask("keys", [PAGES - 1])[3].encode()
    paths = {path.name: path for path in blocks(pool)}
    damage(pool, paths[(third + b".indexer.c0.p0").hex()])
    assert linked_load(player, 0)[:2] == [PAGES, False], "the load of a damaged page landed"
    assert linked_load(player, 0) == [3, True, True], "SGLang is told of a page that cannot be loaded"
    assert player.ask("evict")
    store(player, 0)
    assert linked_load(player, 0) == [PAGES, True, True]
    # A page is of use only with those of all pools.
    os.unlink(paths[(player.ask("keys", [PAGES - 1])[5].encode() + b".kv.c0.p0").hex()])
    assert linked_load(player, 0) == [5, True, True]
    player.end()


def test_what_a_linked_look_up_found_is_leased_until_it_is_loaded(own_pool, linked):
    pool = own_pool(files=2, size="256M")
    player = linked(pool.mount)
    store(player, 0)
    store(player, 1)
    assert player.ask("lookup", [PAGES - 1]) == list(range(1, PAGES + 1))
    assert player.ask("evict")
    pool.command("evict", str(pool.path), "--all")
    assert linked_load(player, 0) == [PAGES, True, True] and linked_load(player, 1) == [0, True, True]
    player.end()


def test_a_daemon_that_is_killed_under_a_linker_costs_stores_and_comes_back(own_pool, linked):
    pool = own_pool(files=2, size="128M")
    player = linked(pool.mount)
    store(player, 0)
    pool.kill()
    assert player.ask("store", [100 + PAGES - 1]) == 0
    assert linked_load(player, 0) == [PAGES, True, True]
    pool.remount()

    def stored():
        assert player.ask("evict")
        return player.ask("store", [200 + PAGES - 1]) == PAGES

    wait_until(stored, "stores after the restart", interval_s=0.2)
    assert linked_load(player, 0) == [PAGES, True, True] and linked_load(player, 2) == [PAGES, True, True]
    player.end()
