"""gds end to end on mounted pools: with doubles of libcuda, libcufile and libnvrtc, and with the real libcufile 1.20.

A pass here says nothing about a GPU: the double's DMA is a read by the CPU, and its kernel is gcc's. The real libcufile
runs in its compatibility mode; the real libnvrtc compiles, and nothing runs what it made.
"""

import os
import pathlib
import sys

import helpers
import pytest
from test_cufile import REFERENCE_DIRECTORY, needs_unpacked
from test_gpu_client import fake  # noqa: F401

from benches.gpu_check import READER_COUNTS

NVRTC_DIRECTORY = helpers.REPOSITORY / "build/clients/nvidia-cuda-nvrtc"
PLAYER = pathlib.Path(__file__).with_name("gds_player.py")
PATH = os.pathsep.join(map(str, (PLAYER.parent, PLAYER.parents[1], helpers.REPOSITORY / "tools", helpers.REPOSITORY)))
PTX = """
from kvfs._native import ffi, lib
out = ffi.new("const char **")
for capability in (80, 90):
    assert lib.kvfs_gpu_kernel(b"{path}", capability, out) == 0, ffi.string(lib.kvfs_error())
    text = ffi.string(out[0]).decode()
    assert f".target sm_{{capability}}" in text, text[:500]
    for kernel in ("kvfs_leaf_lanes", "kvfs_leaf_sums"):
        assert f".visible .entry {{kernel}}(" in text
"""


@pytest.fixture(scope="session")
def modules(tmp_path_factory):
    """A need of libcufile on a kernel without modules: a stand-in for /proc/modules."""
    if os.path.exists("/proc/modules"):
        return ""
    helpers.requires_program("gcc")
    library = tmp_path_factory.mktemp("modules") / "modules.so"
    source = helpers.REPOSITORY / "native/shims/cufile/test/proc_modules.c"
    helpers.run("gcc", "-shared", "-fPIC", "-o", library, source)
    return str(library)


@pytest.fixture
def play(fake, modules):  # noqa: F811
    def run(step, pool, **environment):
        given = {
            "KVFS_CUDA_LIBRARY": str(fake), "KVFS_NVRTC_LIBRARY": str(fake),
            "KVFS_CUFILE_LIBRARY": str(fake.with_name("libcufile-fake.so")), "LD_PRELOAD": modules,
            "FAKE_CUDA_REACHABLE": "1", "CUFILE_LOGFILE_PATH": "/dev/null", "GDS_POOL": str(pool.path),
            "PYTHONPATH": PATH, **environment,
        }  # fmt: skip
        result = helpers.run(sys.executable, PLAYER, step, pool.mount, environment=given, check=False, timeout_s=150)
        assert result.returncode == 0 and f"played {step}" in result.stdout, result.stdout + result.stderr

    return run


@pytest.mark.timeout(180)
@pytest.mark.parametrize("step", ["whole", helpers.slow("flipped"), helpers.slow("hangs")])
def test_gds_with_a_double_of_cufile(step, play, own_pool):
    play(step, own_pool(files=4, size="512M"))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("why", ["indirect", helpers.slow("unknown"), helpers.slow("unregistered")])
def test_a_condition_that_fails_is_named_and_auto_does_without(why, play, own_pool):
    play("refused", own_pool(files=2, size="256M"), FAKE_CUFILE=why)


@pytest.mark.timeout(180)
def test_the_real_libcufile_on_loop_devices(play, tmp_path):
    library = needs_unpacked(REFERENCE_DIRECTORY, "nvidia/*/lib/libcufile.so.0")
    helpers.requires_loop()
    with helpers.loop_devices(tmp_path, 2, "256M") as devices, helpers.Pool(devices=devices) as pool:
        play("real", pool, KVFS_CUFILE_LIBRARY=str(library))


def test_the_real_nvrtc_compiles_the_kernel():
    """For the GPUs of two generations; no GPU has run it."""
    library = needs_unpacked(NVRTC_DIRECTORY, "nvidia/*/lib/libnvrtc.so.1?")
    helpers.run(sys.executable, "-c", PTX.format(path=library))


def check_with_doubles(fake, modules, tmp_path, **environment):  # noqa: F811
    """tools/gpu_check's output; all three libraries are doubles."""
    result = helpers.run(
        "tools/gpu_check", "--fake", "--quick", "--directory", tmp_path, check=False, timeout_s=240,
        environment={"KVFS_NVRTC_LIBRARY": str(fake), "KVFS_CUFILE_LIBRARY": str(fake.with_name("libcufile-fake.so")),
                     "LD_PRELOAD": modules, "FAKE_CUDA_REACHABLE": "1", **environment},
    )  # fmt: skip
    assert result.returncode == 3, result.stdout + result.stderr
    assert "WRONG" not in result.stdout
    return result.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gpu_check_has_rows_for_gds(fake, modules, tmp_path):  # noqa: F811
    output = check_with_doubles(fake, modules, tmp_path)
    assert sum("right  gds, " in line for line in output.splitlines()) == 2 * len(READER_COUNTS)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gpu_check_outlives_a_cufile_that_takes_no_device(fake, modules, tmp_path):  # noqa: F811
    """Such a libcufile crashes in a process's ordinary end, as its double does: the exit status would be lost."""
    output = check_with_doubles(fake, modules, tmp_path, FAKE_CUFILE="unregistered")
    assert "not exercised: gds: its checksums by the GPU: no gds: device 0: cuFileHandleRegister: error 5027" in output
