"""Probes of CUDA, libcufile and gds, which run in a separate process: a driver may hang or crash.

    python -m kvfs.client.gpu_probe --probe cuda|cufile|gds   one line of JSON

gpu.py starts it, with a timeout.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from kvfs.client.client import connect
from kvfs.client.gpu import (
    CUDA_LIBRARY_VARIABLE,
    CUFILE_LIBRARY_VARIABLE,
    NVRTC_LIBRARY_VARIABLE,
    Cuda,
    CuFile,
    Direct,
    GpuReader,
)
from kvfs.errors import KvfsError

NO_MODULES = "cuFileDriverOpen is not tried: without /proc/modules it never returns"
# The least compute capability of libnvrtc 13 is 7.5; the checksums are compiled for this one to see whether it works.
PROBED_CAPABILITY = 80


def probe_cuda() -> Cuda:
    """Here, in this process: call it in a separate one."""
    name = os.environ.get(CUDA_LIBRARY_VARIABLE) or "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        return Cuda(name, error=f"no CUDA: {error}")
    double = hasattr(library, "fake_cuda_is_double")
    number, count = ctypes.c_int(), ctypes.c_int()

    def failed(function: str, code: int) -> Cuda:
        text = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(text))
        why = (text.value or b"unknown error").decode()
        return Cuda(name, error=f"{function}: {why} ({code})", double=double)

    for function, arguments in (
        ("cuInit", (0,)),
        ("cuDriverGetVersion", (ctypes.byref(number),)),
        ("cuDeviceGetCount", (ctypes.byref(count),)),
    ):
        if code := getattr(library, function)(*arguments):
            return failed(function, code)
    devices = []
    for index in range(count.value):
        device, text, size = ctypes.c_int(), ctypes.create_string_buffer(100), ctypes.c_size_t()
        code = library.cuDeviceGet(ctypes.byref(device), index) or library.cuDeviceGetName(text, 100, device)
        code = code or library.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        if code:
            return failed(f"GPU {index}", code)
        devices.append(f"GPU {index}: {text.value.decode(errors='replace')}, {size.value >> 20} MiB")
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    none = "" if devices else "CUDA sees no GPU"
    return Cuda(name, error=none, double=double, driver_version=version, devices=tuple(devices))


class CuFileStatus(ctypes.Structure):
    """The result of most functions of libcufile, by value."""

    _fields_ = (("error", ctypes.c_int), ("cuda_error", ctypes.c_int))


def probe_cufile() -> CuFile:
    """Here, in this process: call it in one of its own."""
    modules = Path("/proc/modules")
    loaded = modules.exists() and any(line.startswith("nvidia_fs ") for line in modules.read_text().splitlines())
    nvrtc, nvrtc_error = _probe_nvrtc()
    found, library = "", None
    named = os.environ.get(CUFILE_LIBRARY_VARIABLE)
    for name in (named,) if named else ("libcufile.so.0", *_wheels("libcufile.so.0")):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        found = name
        break
    if library is None:
        return CuFile("", f"no {named or 'libcufile.so.0'}", "", loaded, nvrtc, nvrtc_error)
    number = ctypes.c_int()
    library.cuFileGetVersion.restype = library.cuFileDriverOpen.restype = CuFileStatus
    library.cuFileGetVersion(ctypes.byref(number))
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    # By the C library, as libcufile itself looks for the file.
    library_c = ctypes.CDLL(None)
    library_c.fopen.restype = ctypes.c_void_p
    if not library_c.fopen(b"/proc/modules", b"r"):
        return CuFile(found, f"libcufile {version}: {NO_MODULES}", version, loaded, nvrtc, nvrtc_error)
    status = library.cuFileDriverOpen()
    failed = f"libcufile {version}: cuFileDriverOpen: error {status.error} (CUDA: {status.cuda_error})"
    return CuFile(found, failed if status.error else "", version, loaded, nvrtc, nvrtc_error)


def _probe_nvrtc() -> tuple[str, str]:
    """Where libnvrtc is, and why it does not compile the checksums."""
    from kvfs._native import ffi, lib

    out, error = ffi.new("const char **"), ""
    named = os.environ.get(NVRTC_LIBRARY_VARIABLE, "")
    for path in (named,) if named else ("", *_wheels("libnvrtc.so.1?")):
        if lib.kvfs_gpu_kernel(path.encode() or ffi.NULL, PROBED_CAPABILITY, out) == 0:
            return path, ""
        error = error or ffi.string(lib.kvfs_error()).decode(errors="replace").removeprefix("no gds: ")
    return "", error


def probe_direct(path: str, gpus: int, cufile: str, nvrtc: str) -> Direct:
    """Here, in this process: call it in one of its own."""
    try:
        with connect(path, read_only=True, gpu=None) as client:
            for device in range(gpus):
                reader = GpuReader(client.library, "gds", "", cufile=cufile, nvrtc=nvrtc)
                reader.try_out(device)
                reader.close()
            return Direct("", client.information().device_count, gpus)
    except KvfsError as error:
        return Direct(str(error).removeprefix("no gds: "))


def _wheels(name: str) -> Iterator[str]:
    """Where NVIDIA's Python packages have their libraries."""
    for directory in sys.path:
        yield from map(str, Path(directory or ".").glob(f"nvidia/*/lib/{name}"))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m kvfs.client.gpu_probe", description="Look at CUDA; one line of JSON."
    )
    parser.add_argument("--probe", choices=("cuda", "cufile", "gds"), required=True)
    for name in ("--path", "--cufile", "--nvrtc"):
        parser.add_argument(name, default="", help="for gds")
    parser.add_argument("--gpus", type=int, default=1, help="for gds")
    arguments = parser.parse_args()
    probes: dict[str, Callable[[], Cuda | CuFile | Direct]] = {
        "cuda": probe_cuda,
        "cufile": probe_cufile,
        "gds": lambda: probe_direct(arguments.path, arguments.gpus, arguments.cufile, arguments.nvrtc),
    }
    answer(json.dumps(asdict(probes[arguments.probe]())))


def answer(line: str) -> NoReturn:
    """Print it and end here and now. libcufile 1.15 was seen to crash in a process's ordinary end, after a device that
    it did not take (an H200, driver 580)."""
    print(line, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
