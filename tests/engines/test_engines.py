"""Real engines' storage clients, unchanged, while the test takes their blocks away: each is a miss, none is wrong.

`tools/setup-clients` brings the clients in; one that is not there is a named skip. Each runs in a process of its own,
scripts/player.py, which stores, looks up and loads on command. It has to live through unlinked blocks, blocks damaged
on the devices, eviction by hand, the pressure of others, and a pool with no room.
"""

import errno
import os
import signal

import pytest
from file_clients import CASES, COUNT, MISSES, MOONCAKE, Case, Player, check, store
from helpers import MIB, content, opened, wait_until, write_file
from image import Image, flipped

pytestmark = pytest.mark.timeout(240)


def damage(pool, path):
    """Flip a bit in the middle of a block on the devices, and have the kernel forget what it knew of it."""
    image = Image(pool.path)
    pages = image.block_of(os.stat(path).st_ino).data_pages()
    segment, page, _ = pages[len(pages) // 2]
    image.write(segment, page, flipped(image.read(segment, page), 12_345))
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def press(pool, paths):
    """Write other files until some of these are gone: 500 of them are twice the pool."""
    size = int(pool.status()["space"]["size"]) // 250
    for index in range(2000):
        write_file(pool.mount / f"other-{index % 500}", content(size, index))
        if not all(os.path.exists(path) for path in paths):
            return
    raise AssertionError("eight times the pool's size of other files drove nothing out")


def fill(pool):
    """Pin other files until there is no room; return how many."""
    for index in range(1000):
        path = pool.mount / f"pinned-{index}"
        with opened(path, os.O_CREAT | os.O_WRONLY) as descriptor:
            os.setxattr(descriptor, "user.kvfs.pin", b"1")
            try:
                assert os.write(descriptor, content(MIB, 1)) == MIB
            except OSError as error:
                assert error.errno == errno.ENOSPC
                path.unlink()
                return index
    raise AssertionError("a thousand MiB were pinned")


@pytest.mark.parametrize("name", CASES)
def test_what_is_lost_is_a_miss_and_the_engine_lives_on(own_pool, tmp_path, name):
    case = CASES[name]
    pool = own_pool(files=2, size=case.size)
    directory = pool.mount / "kv"
    player = Player(case, directory, tmp_path)
    try:
        assert player.answer() == "ready", player.tail()
        store(player, range(COUNT))
        files = player.ask("files", range(COUNT))
        assert check(player, range(COUNT)) == list(range(COUNT))
        assert player.ask("load", [99])[0] in MISSES

        os.unlink(files[1])
        check(player, range(COUNT), gone={1})

        damage(pool, files[2])
        if case.mapped:
            player = after_damage(player, 2)
        assert player.ask("load", [2])[0] in MISSES, "damaged, and no miss"
        wait_until(lambda: not os.path.exists(files[2]), "the end of a block that was found damaged")
        check(player, range(COUNT), gone={1, 2})

        # By the pressure of others, then by hand.
        store(player, range(10, 10 + COUNT))
        files = player.ask("files", range(10, 10 + COUNT))
        press(pool, files)
        lost = {10 + index for index, path in enumerate(files) if not os.path.exists(path)}
        assert lost
        check(player, lost, gone=lost)
        check(player, range(10, 10 + COUNT), gone=lost, evicting=True)
        pool.command("evict", str(pool.path), "--all")
        check(player, range(20), evicting=True)

        # No room: what cannot be stored is not there, and nothing else suffers.
        count = fill(pool)
        answers = zip(range(30, 34), player.ask("store", range(30, 34)), strict=True)
        refused = [block for block, error in answers if error]
        assert refused, "a full pool took four blocks"
        check(player, refused, gone=set(refused), stumps=case.stumps)
        check(player, range(30, 34), evicting=True)
        for index in range(count):
            os.unlink(pool.mount / f"pinned-{index}")
        store(player, range(40, 44))
        check(player, range(40, 44))
        player.end()
    finally:
        player.stop()


def after_damage(player, block):
    """A process that reads damaged bytes through a mapping gets SIGBUS, as from any disk: docs/engines.md. The block is
    gone for the next one."""
    player.tell("load", [block])
    answer = player.answer()
    if answer is not None:
        assert answer[0] in MISSES
        return player
    assert player.process.wait(60) == -signal.SIGBUS
    player.stop()
    again = Player(player.case, player.directory, player.home)
    assert again.answer() == "ready", again.tail()
    return again


POOLS = {
    "nixl-pool": Case("nixl-pool", ("nixl", "nixl-cu12")),
    "mooncake-offset": Case(
        "mooncake",
        (MOONCAKE,),
        (
            ("MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR", "offset_allocator_storage_backend"),
            ("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(256 * MIB)),
        ),
    ),
}


@pytest.mark.parametrize("name", POOLS)
def test_a_preallocated_pool_is_a_slab_that_eviction_leaves_alone(own_pool, tmp_path, name):
    pool = own_pool(files=2, size="640M")
    player = Player(POOLS[name], pool.mount / "kv", tmp_path)
    try:
        assert player.answer() == "ready", player.tail()
        store(player, range(4))
        path = player.ask("files", [0])[0]
        assert os.getxattr(path, "user.kvfs.slab") == b"1"
        assert pool.status()["space"]["slabs"] >= 256 * MIB
        check(player, range(4))
        pool.command("evict", str(pool.path), "--all")
        check(player, range(4))
        store(player, range(4, 8))
        pool.command("evict", str(pool.path), "--all")
        check(player, range(4, 8))
        player.end()
    finally:
        player.stop()
    wait_until(lambda: pool.status()["space"]["slabs"] == 0, "the end of the slab")


def test_ucm():
    pytest.skip("UCM's posix store is in no wheel that installs here: uc-manager needs a build with CUDA or CANN")
