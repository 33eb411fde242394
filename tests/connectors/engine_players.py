"""An engine's process that a test tells what to do with blocks, and what the test does to the pool meanwhile.

A player (scripts/) reads a JSON request a line, {"do": ..., "blocks": [indexes]}, and writes a JSON answer a line. Its
first line is "ready". End of input is its end.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path

from helpers import REPOSITORY, content, write_file
from image import Image, flipped

SCRIPTS = Path(__file__).resolve().parent / "scripts"
ANSWER_S = 180


def begun(engine, arguments, home, *, stdout=subprocess.PIPE, stderr, **environment):
    """A process of the engine's Python, in a group of its own. No engine looks for a GPU; an extension that SGLang
    builds at its first use is built once for all tests."""
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "2",
        "HOME": os.fspath(home),
        "LMCACHE_TRACK_USAGE": "false",
        "TORCH_EXTENSIONS_DIR": os.fspath(REPOSITORY / "build" / f"extensions-{engine.name}"),
        **environment,
    }
    return subprocess.Popen(
        [engine.python, *arguments], stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, text=True,
        env=engine.environment(**environment), start_new_session=True,
    )  # fmt: skip


class Player:
    def __init__(self, engine, script, arguments, home, **environment):
        self.log = (Path(home) / f"{script}.log").open("ab")
        self.name, self.home = script, home
        self.process = begun(engine, [SCRIPTS / script, *arguments], home, stderr=self.log, **environment)
        assert self.answer() == "ready", self.tail()

    def answer(self):
        """The next line of its answers, parsed."""
        line = b""
        deadline = time.monotonic() + ANSWER_S
        while not line.endswith(b"\n"):
            descriptor = self.process.stdout.fileno()
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{self.name} has not answered for {ANSWER_S} s: {self.tail()}"
            piece = os.read(descriptor, 1 << 16)
            assert piece, f"{self.name} died: {self.tail()}"
            line += piece
        return json.loads(line)

    def ask(self, what, blocks=(), **more):
        self.process.stdin.write(json.dumps({"do": what, "blocks": list(blocks), **more}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def tail(self, size=4000):
        self.log.flush()
        return Path(self.log.name).read_bytes()[-size:].decode(errors="replace")

    def end(self):
        """End of input; it must have lived until now, and ends by itself."""
        self.process.stdin.close()
        assert self.process.wait(60) == 0, self.tail()

    def stop(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout, self.log):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def files_below(directory):
    """All block files, by name."""
    return sorted(path for path in Path(directory).rglob("*") if path.is_file())


def damage(pool, path):
    """Flip a bit in the middle of a block on the devices."""
    image = Image(pool.path)
    pages = image.block_of(os.stat(path).st_ino).data_pages()
    segment, page, _ = pages[len(pages) // 2]
    image.write(segment, page, flipped(image.read(segment, page), 12_345))


def press(pool, paths):
    """Write other files until some of these are gone: 500 of them are twice the pool."""
    size = int(pool.status()["space"]["size"]) // 250
    for index in range(2000):
        write_file(pool.mount / f"other-{index % 500}", content(size, index))
        if not all(os.path.exists(path) for path in paths):
            return
    raise AssertionError("eight times the pool's size of other files drove nothing out")
