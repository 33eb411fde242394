"""A process with a NIXL agent, in the environment of the engine: it does what it is told, a line of JSON each way.

    python nixl_player.py AGENT LOG

All that the process and NIXL write elsewhere goes to LOG. It knows nothing of kvfs but the name of its back end.
"""

import contextlib
import hashlib
import json
import os
import sys
import time

OUT = os.fdopen(os.dup(1), "w", buffering=1)
LOG = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for descriptor in (1, 2):  # NIXL writes to both, from its import on
    os.dup2(LOG, descriptor)

import numpy as np  # noqa: E402
from nixl._api import nixl_agent, nixl_agent_config  # noqa: E402

DEADLINE_S = 120


def content(name, size, version):
    """Bytes that no other object has."""
    seed = int.from_bytes(hashlib.sha256(f"{name} {version}".encode()).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Player:
    def __init__(self, name):
        self.name = name
        self.agent = nixl_agent(name, nixl_agent_config(backends=[]))
        self.device = 1000

    def create(self, parameters):
        try:
            self.agent.create_backend("KVFS", parameters)
        except Exception as error:
            return str(error)
        return sorted(self.agent.get_backend_mem_types("KVFS"))

    def register(self, names, kind, memory="OBJ"):
        """Rows (address, size, device, meta) as given, each under a device of its own where that is None."""
        rows = []
        for address, size, device, meta in names:
            self.device += device is None
            rows.append((address, size, self.device if device is None else device, meta))
        return rows, self.agent.register_memory(self.agent.get_reg_descs(rows, memory), backends=[kind])

    @contextlib.contextmanager
    def transfer(self, operation, buffers, rows, memory):
        """The states of a transfer between arrays and (address, size, device) rows, as a generator."""
        here = [(array.ctypes.data, array.nbytes, 0) for array in buffers]
        local = self.agent.register_memory(
            self.agent.get_reg_descs([(*row, "") for row in here], "DRAM"), backends=["KVFS"]
        )
        handle = self.agent.initialize_xfer(
            operation, self.agent.get_xfer_descs(here, "DRAM"), self.agent.get_xfer_descs(rows, memory), self.name,
            backends=["KVFS"],
        )  # fmt: skip
        try:
            yield handle
        finally:
            self.agent.release_xfer_handle(handle)
            self.agent.deregister_memory(local, backends=["KVFS"])

    def finish(self, handle):
        """The last state; the post and each look at it took less than a blocking read would."""
        deadline = time.monotonic() + DEADLINE_S
        state = self.agent.transfer(handle)
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(0.0005)
            state = self.agent.check_xfer_state(handle)
        return state

    def _move(self, operation, names, buffers, memory):
        """A transfer of whole objects, or files from their beginning."""
        rows, registered = self.register(
            [(0, array.nbytes, None, name) for name, array in zip(names, buffers, strict=True)], "KVFS", memory
        )
        try:
            with self.transfer(operation, buffers, [row[:3] for row in rows], memory) as handle:
                return self.finish(handle)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.agent.deregister_memory(registered, backends=["KVFS"])

    def store(self, names, size, version=0, memory="OBJ"):
        return self._move("WRITE", names, [content(name, size, version) for name in names], memory)

    def load(self, names, size, version=0, memory="OBJ", stored_as=None):
        """The state, and whether each buffer has what was stored."""
        buffers = [np.zeros(size, dtype=np.uint8) for _ in names]
        state = self._move("READ", names, buffers, memory)
        wanted = [content(name, size, version) for name in stored_as or names]
        return [state, [bool((a == b).all()) for a, b in zip(buffers, wanted, strict=True)]]

    def parts(self, name, size, count, version=0):
        """Store an object by `count` parts, and load its parts in the other order, in one transfer each."""
        data, part = content(name, size, version), size // count
        rows, registered = self.register([(0, size, None, name)], "KVFS")
        places = [(index * part, part, rows[0][2]) for index in range(count)]
        states, got = [], np.zeros(size, dtype=np.uint8)
        for operation, array, order in (("WRITE", data, 1), ("READ", got, -1)):
            try:
                buffers = [array[start : start + part] for start, _, _ in places][::order]
                with self.transfer(operation, buffers, places[::order], "OBJ") as handle:
                    states.append(self.finish(handle))
            except Exception as error:
                states.append(str(error))
        self.agent.deregister_memory(registered, backends=["KVFS"])
        return [*states, bool((got == data).all())]

    def query(self, names, memory="OBJ"):
        rows = [(0, 0, 0, name) for name in names]
        found = self.agent.query_memory(rows, "KVFS", mem_type=memory)
        return [None if one is None else int(one["size"]) for one in found]

    def refused(self, memory, device, meta):
        """The error by which a registration is refused; None if it is not."""
        try:
            self.register([(0, 4096, device, meta)], "KVFS", memory)
        except Exception as error:
            return type(error).__name__
        return None

    def posts(self, names, size):
        """The longest of posts and looks at a transfer, in seconds, beside its time as a whole."""
        rows, registered = self.register([(0, size, None, name) for name in names], "KVFS")
        buffers = [np.zeros(size, dtype=np.uint8) for _ in names]
        with self.transfer("READ", buffers, [row[:3] for row in rows], "OBJ") as handle:
            begin = last = time.monotonic()
            state, longest = self.agent.transfer(handle), time.monotonic() - begin
            while state == "PROC":
                time.sleep(0.0005)
                last = time.monotonic()
                state = self.agent.check_xfer_state(handle)
                longest = max(longest, time.monotonic() - last)
            whole = time.monotonic() - begin
        self.agent.deregister_memory(registered, backends=["KVFS"])
        return [state, longest, whole]


def main():
    player = Player(sys.argv[1])
    print(json.dumps("ready"), file=OUT)
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        print(json.dumps(getattr(player, call)(*arguments)), file=OUT)


if __name__ == "__main__":
    main()
