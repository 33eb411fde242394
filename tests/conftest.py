"""Shared by all tests: the fixtures of a mount (helpers.py), and the rule by which a run leaves slow tests out.

A test is marked slow (`pytest.mark.slow`) for either of two reasons. It takes more than a second or two on an idle
machine, or it asserts through another door what a quick test asserts. Slow tests run with --run-slow, or if their file
is named on the command line. A run says how many slow tests it left out: they have not passed.

`pytest tests/posix` mounts kvfs on a pool of its own. `pytest tests/posix --directory DIR` asserts the same of any
directory (ext4, or a FUSE peer), to tell a wrong test from a wrong filesystem. tests/engines does both too.
"""

import os

import pytest

pytest_plugins = ["helpers", "progress"]

# Fixtures of tests that need a file system: a folder, a pool, a mount.
_OF_FILES = {"tmp_path", "tmp_path_factory", "service", "own_pool", "shared_pool"}
_LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="run the tests that are marked slow too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smoke: tools/check runs it too, of those that mount")
    config.addinivalue_line("markers", "slow: left out without --run-slow, unless its file is named")
    config.addinivalue_line("markers", "files: needs a file system; set here, from the fixtures that a test asks for")
    if config.getoption("run_slow"):
        os.environ["KVFS_RUN_SLOW"] = "1"  # for helpers.often(), and inherited by programs that a test starts


def pytest_itemcollected(item: pytest.Item) -> None:
    if _OF_FILES.intersection(getattr(item, "fixturenames", ())):
        item.add_marker("files")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("run_slow"):
        return
    here = config.invocation_params.dir
    named = {(here / word.partition("::")[0]).resolve() for word in config.invocation_params.args}
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        slow = item.get_closest_marker("slow") is not None and item.path not in named
        (left_out if slow else kept).append(item)
    items[:] = kept
    config.stash[_LEFT_OUT] = len(left_out)
    config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.stash.get(_LEFT_OUT, 0):
        terminalreporter.write_line(f"SLOW: {count} tests left out: --run-slow runs them")
