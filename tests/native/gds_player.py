"""python gds_player.py STEP MOUNT: gds with doubles, in a process of its own. Run by test_gpu_direct.py.

Its environment names the libraries; where the kernel has no /proc/modules a stand-in is preloaded.
"""

import ctypes
import os
import pathlib
import sys
import threading
import time

import helpers
from test_gpu_client import Batch, fill, flip

import kvfs
from benches import cuda
from kvfs.client import gpu
from kvfs.client import keys as keys_
from kvfs.errors import BusyBufferError, MissingFeatureError

helpers.give_devices_time()

KIB, MIB = helpers.KIB, helpers.MIB
SIZES = (0, 1, 4095, 4096, 4097, 70_001, MIB, MIB + 1, 5 * MIB + 12_345)
ROOM = 64


def batch_of(driver, sizes):
    """Destinations at multiples of 64: others are read staged."""
    return Batch(driver, [-(-size // 64) * 64 for size in sizes], room=ROOM)


def read(client, batch, contents):
    results = client.get_into(list(zip(contents, batch.parts, strict=True)))
    data = batch.memory.read()
    for part, result, content in zip(batch.parts, results, contents.values(), strict=True):
        if result is not None:
            assert data[part.offset : part.offset + result] == content
    return results


def whole(driver, mount, cufile):
    """auto takes gds; every kind of file comes right, what cannot come so by the ring."""
    with kvfs.connect(mount, "gpu") as client:
        assert client.mode == "gds", client.mode_reason
        assert "TEST DOUBLE, no GPU" in client.mode_reason
        assert "4 devices read directly into 2 GPUs" in client.mode_reason
        contents = fill(client, SIZES)
        # Several extents, and one with a hole.
        for key, size in (("posix", 9 * MIB + 7), ("hole", 3 * MIB)):
            name = key.encode().hex()
            path = pathlib.Path(mount, "gpu", name[:2], name)
            path.parent.mkdir(parents=True, exist_ok=True)
            contents[key] = helpers.content(size, key)
            if key == "posix":
                helpers.write_file(path, contents[key])
            else:
                contents[key] = contents[key][:MIB] + bytes(size - MIB - 4096) + contents[key][-4096:]
                with path.open("wb") as file:
                    file.write(contents[key][:MIB])
                    file.seek(size - 4096)
                    file.write(contents[key][-4096:])
        sizes = [len(content) for content in contents.values()]
        batch = batch_of(driver, sizes)
        assert read(client, batch, contents) == sizes
        found = client.gpu_reader().direct_statistics()
        assert found.blocks in (7, 8) and found.mismatches == 0 and found.direct, found
        # Two contents of one key in turn: what arrives is one of them.
        turns = [helpers.content(3 * MIB + 5, turn) for turn in range(2)]
        client.put([("key", turns[0])])
        stop = threading.Event()

        def rewrite():
            turn = 0
            while not stop.is_set():
                turn += 1
                client.put([("key", turns[turn % 2])])

        thread = threading.Thread(target=rewrite)
        thread.start()
        single, seen, deadline = batch_of(driver, [len(turns[0])]), 0, time.monotonic() + 3
        while time.monotonic() < deadline or (seen < 4 and time.monotonic() < deadline + 30):
            try:
                if client.get_into([("key", single.parts[0])]) == [None]:
                    continue
            except BusyBufferError:
                continue
            part = single.parts[0]
            assert single.memory.read()[part.offset : part.offset + len(turns[0])] in turns
            seen += 1
        stop.set()
        thread.join()
        assert seen > 3
        assert client.gpu_reader().direct_statistics().blocks > found.blocks


def flipped(driver, mount, cufile):
    pool = type("Pool", (), {"path": pathlib.Path(os.environ["GDS_POOL"])})
    with kvfs.connect(mount, gpu="gds") as client:
        contents = fill(client, [400 * KIB] * 6)
        flip(pool, contents["key3"][8192 : 8192 + 4096])
        batch = batch_of(driver, [400 * KIB] * 6)
        assert read(client, batch, contents) == [400 * KIB] * 3 + [None] + [400 * KIB] * 2
        assert client.gpu_reader().direct_statistics().mismatches == 1
        assert client.statistics().checksum_errors == 1


def hangs(driver, mount, cufile):
    """A miss in time; the memory is refused, and its owner kept, until the read is back."""
    with kvfs.connect(mount, gpu="gds", timeout_s=5) as client:
        contents = fill(client, [300 * KIB] * 6)
        batch = batch_of(driver, [300 * KIB] * 6)
        assert None not in read(client, batch, contents)
        cufile.fake_cufile_hold(1)
        began = time.monotonic()
        assert None in read(client, batch, contents)
        assert time.monotonic() - began < 25 * helpers.slowness()
        assert client.library.held > 0
        try:
            read(client, batch, contents)
        except BusyBufferError:
            pass
        else:
            raise AssertionError("memory that a device owns was taken")
        other = batch_of(driver, [300 * KIB] * 6)
        helpers.wait_until(lambda: None not in read(client, other, contents), "other memory")
        cufile.fake_cufile_hold(0)
        helpers.wait_until(lambda: client.library.held == 0, "the reads")
        helpers.wait_until(lambda: None not in read(client, batch, contents), "the memory that was held")


def refused(driver, mount, cufile):
    """Named, it is an error that says which condition failed; auto takes staged."""
    words = {"indirect": "through host memory", "unknown": "statistics do not know GPU 0", "unregistered": "error 5027"}
    words = words[os.environ["FAKE_CUFILE"]]
    try:
        kvfs.connect(mount, gpu="gds")
    except MissingFeatureError as error:
        assert words in str(error) and str(error).startswith("gds is not to be had: "), error
    else:
        raise AssertionError("gds was to be had")
    with kvfs.connect(mount) as client:
        assert client.mode == "staged" and words in client.mode_reason, client.mode_reason


def real(driver, mount, cufile):
    """The real libcufile, in its compatibility mode: so only by the option for diagnosis."""
    files = gpu.examine_cufile()
    assert not files.missing and files.version == "1.20", files
    with kvfs.connect(mount, gpu="staged", timeout_s=10.0) as client:
        contents = fill(client, SIZES)
        reader = gpu.GpuReader(client.library, "gds", "", cufile=files.library, nvrtc=files.nvrtc, indirect=True)
        batch = batch_of(driver, SIZES)
        for _ in range(3):
            packed = keys_.pack(contents)
            places = [(batch.memory.pointer + part.offset, part.size, 0) for part in batch.parts]
            assert reader.get_into(packed, places, 0) == list(SIZES)
            data = batch.memory.read()
            for part, content in zip(batch.parts, contents.values(), strict=True):
                assert data[part.offset : part.offset + len(content)] == content
        found = reader.direct_statistics()
        assert found.blocks == 3 * 6 and found.fallbacks == found.mismatches == 0, found
        assert not found.direct
        reader.close()
    try:
        kvfs.connect(mount, gpu="gds")
    except MissingFeatureError as error:
        assert "cuFile's statistics do not know GPU 0" in str(error), error
    else:
        raise AssertionError("gds was to be had in compatibility mode")


def main(step, mount):
    driver = cuda.Driver()
    cufile = ctypes.CDLL(os.environ["KVFS_CUFILE_LIBRARY"])
    {"whole": whole, "flipped": flipped, "hangs": hangs, "refused": refused, "real": real}[step](driver, mount, cufile)
    violation = driver.library.fake_cuda_violation
    violation.restype = ctypes.c_char_p
    assert not driver.library.fake_cuda_violations(), violation()
    print(f"played {step}", flush=True)
    os._exit(0)  # the double crashes in an ordinary end


main(*sys.argv[1:])
