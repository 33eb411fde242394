"""kvfs as vLLM's secondary tier, in vLLM's own wheel: loaded by its configuration, driven by its own tiering manager.

Engines are in processes of vLLM's environment, scripts/vllm_player.py, which store, look up and load on command.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import MIB, REPOSITORY, content, slowness, wait_until
from image import Image, flipped

SCRIPTS = Path(__file__).parent / "scripts"
START_S, ANSWER_S = 120, 90
COUNT = 8

pytestmark = pytest.mark.timeout(300)


def configuration(kvfs_mount, *, chunks=64, block_size=MIB, **options):
    """The kv_connector_extra_config of --kv-transfer-config, as docs/engines.md shows it."""
    return {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": chunks * block_size,
        "secondary_tiers": [
            {"type": "KvfsTier", "module_path": "kvfs.connectors.vllm", "mount": str(kvfs_mount), **options}
        ],
    }


class Player:
    """A process of vLLM's environment, and the engine that is open in it."""

    def __init__(self, environment, log):
        self.log, self.log_begin = log, 0
        self.ready = None
        self.process = environment.start(SCRIPTS / "vllm_player.py")

    def open(self, mount, *, options=None, **settings):
        extra = configuration(mount, **(options or {}))
        self.take_rest()
        self.log_begin = self.log.stat().st_size if self.log.exists() else 0
        self.ready = self.ask("open", timeout_s=START_S, settings={"kv_connector_extra_config": extra} | settings)
        return self.ready

    def ask(self, what, timeout_s=ANSWER_S, **arguments):
        self.process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self.process.stdin.flush()
        deadline = time.monotonic() + timeout_s * slowness()
        line = ""
        while not line:
            readable, _, _ = select.select(
                [self.process.stdout, self.process.stderr], [], [], max(0.0, deadline - time.monotonic())
            )
            assert readable, f"no answer to {what} after {timeout_s} s: {self.tail()}"
            if self.process.stderr in readable:
                self.take_log()
            if self.process.stdout in readable:
                line = self.process.stdout.readline()
                assert line, f"vLLM died of {what}: {self.process.wait(10)}: {self.tail()}"
        return json.loads(line)

    def take_log(self):
        with self.log.open("ab") as file:
            file.write(os.read(self.process.stderr.fileno(), 1 << 16))

    def tail(self):
        self.take_rest()
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def take_rest(self):
        while select.select([self.process.stderr], [], [], 0.05)[0]:
            before = self.log.stat().st_size if self.log.exists() else 0
            self.take_log()
            if self.log.stat().st_size == before:
                return

    def warnings(self):
        """The connector's own; vLLM's log may or may not say of which level they are."""
        self.take_rest()
        lines = self.log.read_bytes()[self.log_begin :].decode(errors="replace").splitlines()
        news = ("/mount is connected", "/mount is back")
        return [line for line in lines if "kvfs for vLLM" in line and not line.endswith(news)]

    def store(self, numbers):
        return self.ask("store", numbers=list(numbers))

    def load(self, numbers):
        """From kvfs, not from vLLM's own memory."""
        self.ask("forget")
        return self.ask("load", numbers=list(numbers))

    def lookup(self, numbers):
        return self.ask("lookup", numbers=list(numbers))

    def paths(self, mount, numbers):
        space = mount / self.ask("space")
        return [space / key[:2] / key for key in self.ask("keys", numbers=list(numbers))]

    def shutdown(self):
        """End the engine; its process can have another."""
        if self.ready is not None:
            self.ready = None
            assert self.ask("shutdown") == {"region": False, "mapped": False}, self.tail()
        return True

    def stop(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.fixture(scope="module")
def processes(engine, tmp_path_factory):
    """Processes without an open engine: vLLM takes seconds to import."""
    idle = []
    yield engine("vllm"), idle, tmp_path_factory.mktemp("vllm")
    for player in idle:
        player.stop()


@pytest.fixture
def vllm(processes):
    """vllm(mount, ...) is an engine in a process that no other engine of the test is in."""
    environment, idle, directory = processes
    players = []

    def start(mount, **settings):
        player = idle.pop() if idle else Player(environment, directory / f"{time.monotonic_ns()}.log")
        players.append(player)
        player.open(mount, **settings)
        return player

    yield start
    for player in players:
        if player.ready is None or (player.process.poll() is None and player.shutdown()):
            idle.append(player)
        else:
            player.stop()


def damage(pool, path):
    """Flip a bit of the block on the devices."""
    image = Image(pool.path)
    pages = image.block_of(os.stat(path).st_ino).data_pages()
    segment, page, _ = pages[len(pages) // 2]
    image.write(segment, page, flipped(image.read(segment, page), 12_345))


def same(count=COUNT):
    return ["same"] * count


def test_what_is_stored_is_found_in_the_same_step_and_loads_the_same(own_pool, vllm):
    pool = own_pool(files=2, size="128M")
    player = vllm(pool.mount, options={"namespace": "team/a"})
    assert player.lookup(range(COUNT)) == [False] * COUNT
    assert player.store(range(COUNT)) == COUNT
    assert player.lookup(range(COUNT + 2)) == [True] * COUNT + [False] * 2
    assert player.load(range(COUNT + 2)) == same() + ["miss"] * 2
    assert all(path.stat().st_size == MIB for path in player.paths(pool.mount, range(COUNT)))
    assert player.ask("space").startswith("team/a/team_tiny-llama_")

    # Blocks that are there are not written again.
    player.ask("forget")
    assert player.store(range(COUNT)) == COUNT
    stats = player.ask("stats")
    assert stats["vllm:kvfs_stored"] == stats["vllm:kvfs_present"] == stats["vllm:kvfs_loaded"] == COUNT
    assert stats["vllm:kvfs_stored_bytes"] == stats["vllm:kvfs_loaded_bytes"] == COUNT * MIB
    assert stats["vllm:kvfs_up"] == 1 and "vllm:kvfs_failed_loads" not in stats
    assert "vllm:kvfs_loaded" not in player.ask("stats"), "told twice"
    player.shutdown()
    assert player.warnings() == []


def test_between_two_steps_an_answer_is_not_an_old_one(own_pool, vllm):
    pool = own_pool(files=2, size="128M")
    player, other = vllm(pool.mount), vllm(pool.mount)
    between = lambda: player.ask("lookup_between", numbers=list(range(COUNT)))  # noqa: E731
    assert between() == [False] * COUNT
    assert other.store(range(COUNT)) == COUNT
    wait_until(lambda: all(between()), "what another engine stored")
    pool.command("evict", str(pool.path), "--all")
    wait_until(lambda: not any(between()), "what was evicted, to be a miss")


def test_several_threads_call_one_tier(own_pool, vllm):
    player = vllm(own_pool(files=2, size="128M").mount)
    assert player.ask("crowd", rounds=100) == same(400)


def test_a_prefix_of_3600_blocks_is_looked_up_within_a_step(own_pool, vllm):
    pool = own_pool(files=2, size="128M")
    player = vllm(pool.mount, block_size=4096, options={"block_size": 4096, "chunks": 4096})
    assert player.store(range(3600)) == 3600
    assert player.lookup(range(3601)) == [True] * 3600 + [False]
    hits_us = player.ask("time_lookups", numbers=list(range(3600)))
    misses_us = player.ask("time_lookups", numbers=list(range(10_000, 13_600)))
    print(f"look-up: {hits_us:.2f} us a hit, {misses_us:.2f} us a miss")
    # 1.5 and 1.3 on two cores with other work; the promise is 5.
    assert max(hits_us, misses_us) < 5


def test_the_block_before_is_told_with_each_block(own_pool, vllm):
    player = vllm(own_pool(files=2, size="64M").mount)
    keys = player.ask("keys", numbers=list(range(300)))
    assert player.ask("parents", numbers=list(range(300))) == [None, *keys[:-1]]


@pytest.mark.parametrize(
    ("to_keep", "to_end"),
    [
        ({"hint": {"keep_s": 600}}, {"hint": {"done": True}}),
        ({"actions": [["kv.retain", {"ttl_s": 600}]]}, {"actions": [["kv.demote", {}]]}),
    ],
    ids=["parameters", "envelope"],
)
def test_a_request_says_how_long_its_blocks_are_needed(own_pool, vllm, to_keep, to_end):
    pool = own_pool(files=2, size="128M")
    player = vllm(pool.mount)
    kept, done, others = list(range(4)), list(range(100, 110)), list(range(200, 210))
    assert player.ask("store", numbers=kept, **to_keep) == len(kept)
    leased(pool, len(kept))
    assert player.ask("store", numbers=done, **to_end) == len(done)
    assert player.ask("store", numbers=others) == len(others)
    for hint in ({"done": False}, {"keep_s": -1}, {"soon": 1}, "done"):  # passed over, and said in the log
        assert player.ask("store", numbers=[300], hint=hint) is not None
    first = 1000
    while any(player.lookup(done)):
        assert first < 1400 and all(player.lookup(others))
        assert player.store(range(first, first + 10)) == 10
        player.ask("forget")
        first += 10
    while any(player.lookup(others)):
        assert first < 1800 and all(player.lookup(kept))
        assert player.store(range(first, first + 10)) == 10
        player.ask("forget")
        first += 10
    assert all(player.lookup(kept))


def leased(pool, count):
    wait_until(lambda: pool.status()["counters"]["leased_blocks"] == count, f"leases of {count} blocks")


def hint_counts(player, **expected):
    """The hints' counters become these. A block whose store is over when its request ends may be done twice."""
    sums = dict.fromkeys(expected, 0)

    def come():
        player.ask("step")
        for name, count in player.ask("stats").items():
            if name.removeprefix("vllm:kvfs_") in sums:
                sums[name.removeprefix("vllm:kvfs_")] += count
        return all(sums[name] >= count for name, count in expected.items())

    wait_until(come, f"{expected}")
    assert sums | {"hints_done": 0} == expected | {"hints_done": 0}


def test_hints_are_limited_to_blocks_that_a_router_knows_and_to_the_client_s_share(own_pool, vllm):
    pool = own_pool(files=2, size="256M")  # of which one client leases a sixteenth
    player = vllm(pool.mount)
    hashes = player.ask("hashes", numbers=list(range(100)))
    some = [["kv.pin", {"ttl_s": 600, "block_hashes": hashes[:3] + hashes[50:]}], ["kv.demote", {}]]
    assert (
        player.ask("store", numbers=list(range(COUNT)), actions=[*some, ["kv.fetch", {}], ["kv.pin", []]]) is not None
    )
    hint_counts(player, hints=2, hints_ignored=2, hints_done=COUNT - 3, hints_refused=0)
    leased(pool, 3)
    assert player.ask("store", numbers=list(range(10, 42)), actions=[["kv.retain", {"ttl_s": 10**9}]]) == 32
    wait_until(lambda: player.ask("stats").get("vllm:kvfs_hints_refused"), "a refusal")
    assert 3 < pool.status()["counters"]["leased_blocks"] < 35
    assert player.load(range(10, 42)) == same(32)
    player.stop()  # killed: its leases go with it
    leased(pool, 0)


def ahead(player, numbers, ttl_s=300):
    hashes = player.ask("hashes", numbers=list(numbers))
    player.ask("hint", actions=[["kv.prefetch", {"block_hashes": hashes, "ttl_s": ttl_s}]])


def test_a_prefetch_brings_blocks_of_any_engine_to_where_a_load_finds_them(own_pool, vllm):
    pool = own_pool(files=2, size="256M")
    other, player = vllm(pool.mount), vllm(pool.mount)
    assert player.ready["chunks"] == 64, "of which 16 may be ahead"
    assert other.store(range(20)) == 20
    ahead(player, [3, 999, *range(8)])
    hint_counts(player, hints=1, hints_ahead=8, hints_refused=1, hints_kept=0)
    assert player.ask("near", numbers=list(range(10))) == [True] * 8 + [False] * 2
    leased(pool, 0)
    pool.command("evict", str(pool.path), "--all")
    assert player.ask("load", numbers=list(range(4))) == same(4)
    hint_counts(player, hints_used=4)

    # Those that came after the list of all was made, and no more than a quarter of the memory.
    assert other.store(range(30, 50)) == 20
    ahead(player, range(30, 50))
    hint_counts(player, hints=1, hints_ahead=12, hints_refused=8)
    assert player.ask("load", numbers=list(range(30, 42))) == same(12)
    hint_counts(player, hints_used=12)
    ahead(player, range(42, 50))
    hint_counts(player, hints_ahead=8, hints_refused=0)


def test_an_engine_that_is_killed_in_the_middle_of_a_prefetch_leaves_nothing(own_pool, vllm):
    pool = own_pool(files=2, size="256M")
    other, player = vllm(pool.mount), vllm(pool.mount)
    assert other.store(range(16)) == 16
    ahead(player, range(16))
    player.ask("step")
    player.stop()  # killed: whatever it was at
    leased(pool, 0)
    assert other.load(range(16)) == same(16)


def test_eviction_in_a_small_pool_is_a_miss_and_never_a_wrong_block(own_pool, vllm):
    pool = own_pool(files=2, size="48M")
    player = vllm(pool.mount)
    for first in range(0, 160, COUNT):
        assert player.store(range(first, first + COUNT)) == COUNT
        player.ask("forget")
    answers = player.load(range(160))[: player.ready["chunks"]]
    assert set(answers) <= {"same", "miss"}
    recent = player.load(range(160 - COUNT, 160))
    assert recent == same(), "the newest blocks are gone"
    assert "miss" in player.load(range(COUNT))
    pool.command("evict", str(pool.path), "--all")
    assert player.load(range(160 - COUNT, 160)) == ["miss"] * COUNT
    assert player.store(range(160 - COUNT, 160)) == COUNT
    assert player.load(range(160 - COUNT, 160)) == same()


def test_a_damaged_block_is_recomputed_and_stored_again(own_pool, vllm):
    pool = own_pool(files=2, size="128M")
    player = vllm(pool.mount)
    player.store(range(COUNT))
    damage(pool, player.paths(pool.mount, [3])[0])
    assert player.lookup([3]) == [True]
    assert player.load(range(COUNT)) == [*same(3), "miss", *same(COUNT - 4)], "only one of them was damaged"
    assert player.lookup([3]) == [False], "found again: the request would ask for ever"
    assert player.ask("stats")["vllm:kvfs_failed_loads"] == 1
    player.ask("forget")
    assert player.store([3]) == 1
    assert player.lookup([3]) == [True]
    assert player.load(range(COUNT)) == same()


def test_a_block_whose_load_failed_is_replaced_though_its_name_is_there(own_pool, vllm):
    """Another engine's block under this name is too short: no load can take it, and put-if-absent would keep it."""
    pool = own_pool(files=2, size="64M")
    player = vllm(pool.mount)
    (path,) = player.paths(pool.mount, [1])
    path.parent.mkdir(parents=True)
    path.write_bytes(content(MIB // 2))
    assert player.load([1]) == ["miss"]
    assert player.lookup([1]) == [False]
    assert player.store([1]) == 1
    assert path.stat().st_size == MIB
    assert player.load([1]) == ["same"]


def test_the_daemon_is_killed_and_comes_back(own_pool, vllm):
    pool = own_pool(files=2, size="128M")
    player = vllm(pool.mount)
    player.store(range(COUNT))
    pool.kill()
    # Reads go on without a daemon; a store is dropped, and said once.
    assert player.load(range(COUNT)) == same()
    for first in (20, 30, 40):
        assert player.store(range(first, first + 4)) == 4
    assert player.lookup(range(20, 24)) == [False] * 4
    assert player.ask("state") == "reading"
    assert len(player.warnings()) == 1, player.warnings()
    pool.remount()
    wait_until(lambda: player.ask("state") == "up", "the connection", timeout_s=20)
    player.ask("forget")
    assert player.store(range(20, 24)) == 4
    assert player.load(range(20, 24)) == same(4)
    assert len(player.warnings()) == 1, player.warnings()


def test_a_pool_that_is_unmounted_and_another_that_comes_in_its_place(own_pool, vllm):
    pool = own_pool(files=2, size="64M")
    player = vllm(pool.mount)
    player.store(range(COUNT))
    pool.umount()
    assert player.load(range(COUNT)) == ["miss"] * COUNT
    assert player.ask("state") == "away"
    assert player.store(range(20, 24)) == 4
    stats = player.ask("stats")
    assert stats["vllm:kvfs_up"] == 0 and stats["vllm:kvfs_lost"] == 1 and stats["vllm:kvfs_dropped"] == 4
    pool.start()
    wait_until(lambda: player.ask("state") == "up", "the connection", timeout_s=20)
    assert player.load(range(COUNT)) == same()
    pool.umount()
    pool.command("format", str(pool.path), "--files", "2", "--size", "64M", "--force")
    pool.start()
    wait_until(lambda: player.load([0]) == ["miss"] and player.ask("state") == "up", "the other pool", timeout_s=20)
    player.ask("forget")
    assert player.store(range(COUNT)) == COUNT
    assert player.load(range(COUNT)) == same()


def test_an_engine_starts_without_a_mount_and_finds_it_later(own_pool, vllm):
    pool = own_pool(files=2, size="64M", started=False)
    player = vllm(pool.mount)
    assert player.store(range(2)) == 2
    assert player.load(range(2)) == ["miss"] * 2
    assert len(player.warnings()) == 1, player.warnings()
    pool.start()
    wait_until(lambda: player.ask("state") == "up", "the connection", timeout_s=20)
    player.ask("forget")
    assert player.store(range(2)) == 2
    assert player.load(range(2)) == same(2)


def test_a_full_pool_refuses_stores_and_nothing_else_suffers(own_pool, vllm):
    pool = own_pool(files=2, size="48M")
    player = vllm(pool.mount)
    space = pool.mount / player.ask("space")
    space.mkdir(parents=True)
    pool.command("pin", str(space))
    for first in range(0, 120, COUNT):
        assert player.store(range(first, first + COUNT)) == COUNT
        player.ask("forget")
    stats = player.ask("stats")
    assert stats["vllm:kvfs_failed_stores"] >= 120 - 94, "more than the pool's size is stored"
    assert player.load(range(COUNT)) == same(), "pinned, and gone"
    assert player.load(range(120 - COUNT, 120)) == ["miss"] * COUNT
    assert player.ask("state") == "up"
    assert len(player.warnings()) == 1 and "no room" in player.warnings()[0], player.warnings()
    pool.command("unpin", str(space))
    player.ask("forget")
    assert player.store(range(200, 204)) == 4
    assert player.load(range(200, 204)) == same(4)


def test_two_engines_share_a_pool_and_other_layouts_miss(own_pool, vllm):
    pool = own_pool(files=2, size="128M")
    one, two = vllm(pool.mount), vllm(pool.mount)
    one.store(range(COUNT))
    assert two.load(range(COUNT)) == same(), "stored by the first, at once there for the second"
    two.store(range(10, 10 + COUNT))
    assert one.load(range(10, 10 + COUNT)) == same()
    one.stop()
    assert two.load(range(COUNT)) == same()
    spaces = {two.ask("space")}
    for settings in ({"layout": "BLHNC"}, {"tp": 2}, {"model": "team/other"}, {"block_size": 2 * MIB}):
        two.shutdown()
        two.open(pool.mount, **settings)
        assert two.lookup(range(COUNT)) == [False] * COUNT, settings
        spaces.add(two.ask("space"))
    assert len(spaces) == 5


def test_a_shutdown_with_loads_under_way_gives_all_memory_back(own_pool, vllm):
    player = vllm(own_pool(files=2, size="128M").mount)
    player.store(range(32))
    player.ask("forget")
    player.ask("start_load", numbers=list(range(32)))
    player.shutdown()


def test_what_kvfs_stores_and_removes_is_told(own_pool, vllm):
    pool = own_pool(files=2, size="128M")
    player = vllm(pool.mount, events=True, options={"enable_kv_events": True})
    player.store(range(COUNT))
    keys = player.ask("keys", numbers=list(range(COUNT)))
    # With an ownership Dynamo drops it; without an expected removal vLLM forgets the hashes of a chunk's blocks.
    fields = ["LOCAL", None, True]
    assert player.ask("events") == [[keys, False, fields]]
    assert player.ask("events") == []
    # vLLM empties its tiers, and says to routers that all is gone. They hear of the others when they are loaded.
    assert player.load(range(3)) == same(3)
    assert player.ask("events") == [[keys[:3], False, fields]]
    pool.command("evict", str(pool.path), "--all")
    told = []

    def gone():
        told.extend(player.ask("events"))
        return sum(len(names) for names, _, _ in told) == 3

    wait_until(gone, "the removal of those that were told", timeout_s=20)
    assert {name for names, _, _ in told for name in names} == set(keys[:3])
    assert all(removed and of_all == fields for _, removed, of_all in told)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mount": "mnt/kv"}, "mount 'mnt/kv': an absolute path"),
        ({"namespace": "../up"}, "namespace '../up'"),
        ({"timeout_s": 0}, "timeout_s 0: 0.001 to 3600"),
        ({"depth": 65}, "depth 65: 1 to 64"),
        ({"depth": "8"}, "depth '8': 1 to 64"),
        ({"hints": "no"}, "hints 'no': true and false"),
    ],
)
def test_an_option_that_cannot_be_is_named(vllm, options, words):
    player = vllm("/nowhere", options=options)
    assert player.ready["refused"].startswith(f"kvfs for vLLM: {words}"), player.ready
    player.ready = None  # nothing is open


def test_without_vllm_the_import_says_which_versions_were_tried():
    code = "import kvfs.connectors.vllm"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert "No module named 'vllm'" in last and "tried with 0.31.0, 0.32.0, 0.33.0" in last
