"""How often the block before a block is guessed right, from what an engine's process does with files, unchanged.

A prompt of 8 blocks is stored. Another begins with the first 4, which are looked up and loaded. Then its own 4 are
stored. A guess is right if it names the block before; early if it names another block before it in the same prompt.
"""

import errno
import os
from collections import Counter

import pytest
from file_clients import CASES, COUNT, Player, check, store

pytestmark = pytest.mark.timeout(240)
# Several blocks a file, or a place of each engine's own: there is no block before a file.
SLABS = {"mooncake-bucket", "lmcache-l2-fs"}
# Threads of its own store what was put, in an order of their own.
UNORDERED = {"mooncake-file"}


def parent_of(path):
    try:
        parent = os.getxattr(path, "user.kvfs.parent").decode()
    except OSError as error:
        assert error.errno == errno.ENODATA, error
        return None
    return os.path.join(os.path.dirname(path), parent) if not parent.startswith("/") else parent


def judge(mount, prompt, places):
    """Of the blocks of a prompt at these places: how many guesses are right, early, wrong, or none."""
    files = [os.path.realpath(path) for path in prompt]
    judged = Counter()
    for i in places:
        parent = parent_of(files[i])
        if parent is None:
            judged["none"] += 1
            continue
        if not parent.startswith(str(mount)):
            parent = str(mount) + parent
        # A file that an engine writes beside a block, such as its metadata, stands for the block.
        near = [
            j
            for j, file in enumerate(files)
            if parent == file or os.path.basename(parent).startswith(os.path.basename(file))
        ]
        judged["right" if i - 1 in near else "early" if any(j < i for j in near) else "wrong"] += 1
    return judged


@pytest.mark.parametrize("name", [name for name in CASES if name not in SLABS])
def test_the_block_before_is_guessed(own_pool, tmp_path, name):
    case = CASES[name]
    pool = own_pool(files=2, size=case.size)
    player = Player(case, pool.mount / "kv", tmp_path)
    try:
        assert player.answer() == "ready", player.tail()
        first = list(range(COUNT))
        store(player, first)
        half = COUNT // 2
        check(player, first[:half])
        second = first[:half] + list(range(100, 100 + half))
        store(player, second[half:])
        judged = judge(pool.mount, player.ask("files", first), range(1, COUNT))
        judged += judge(pool.mount, player.ask("files", second), range(half, COUNT))
        print(f"{name}: {dict(judged)}")
        assert judged.total() == COUNT - 1 + half
        # On a busy machine more than a tenth of a second may pass between two stores: then there is no guess.
        assert name in UNORDERED or (judged["right"] >= 1 and judged["right"] + judged["none"] == judged.total())
        player.end()
    finally:
        player.stop()
