"""The result of `pip install kvfs`: the sdist, the wheel that is built from it and nothing else, and a client. The
client is installed from that wheel into an empty environment, for each Python that this machine has."""

import email
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import helpers
import pytest

pytestmark = pytest.mark.slow

LIBRARIES = {f"kvfs/lib/{name}" for name in (
    "libkvfs.so.1", "libkvfs.so", "libkvfs_cufile.so", "libkvfs_preload.so", "libplugin_KVFS.so", "cufile/libcufile.so",
    "cufile/libcufile.so.0",
)}  # fmt: skip
# For the machine's own programs: man, shells, systemd. mount.kvfs lies beside the command.
SHARED = (
    "man/man1/kvfs.1", "man/man1/kvfs-mount.1", "man/man8/mount.kvfs.8", "man/man8/kvfs-csi.8",
    "bash-completion/completions/kvfs", "zsh/site-functions/_kvfs", "fish/vendor_completions.d/kvfs.fish",
)  # fmt: skip
DAEMON = ("pyfuse3", "trio", "lmdb", "xxhash")
BUILD_TIMEOUT_S = 280

# A program of a user's, as the README has it; and that nothing of the daemon's came along.
CLIENT = """
import asyncio, json, sys
import kvfs
key, data = b"a key", bytes(range(256)) * 8192
with kvfs.connect(sys.argv[1], namespace="llama-3-8b", timeout_s=60) as client:
    client.put([(key, data)])
    buffer = bytearray(len(data))
    there, sizes = client.exists([key, b"other"]), client.get_into([(key, buffer), (b"other", bytearray(9))])
    absent = client.get(b"other")

async def main():
    async with kvfs.connect(sys.argv[1], "llama-3-8b", timeout_s=60).asyncio() as client:
        return bytes(await client.get(key)) == data, await client.delete([key])

again = asyncio.run(main())
print(json.dumps({
    "file": kvfs.__file__, "python": sys.version_info[:2], "there": there, "sizes": sizes, "same": buffer == data,
    "absent": absent, "again": again, "modules": sorted(sys.modules),
}))
"""


# Each connector's module, imported as an engine imports it: its ImportError, and which modules came.
CONNECTORS = """
import importlib, json, pkgutil, sys
found = {}
try:
    import kvfs.connectors as package
except ModuleNotFoundError:
    package = None
for one in pkgutil.iter_modules(package.__path__ if package else []):
    error = None
    try:
        importlib.import_module(f"kvfs.connectors.{one.name}")
    except ImportError as raised:
        error = str(raised)
    found[one.name] = error, sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps(found))
"""


def run(*command, **options):
    return helpers.run(*map(str, command), timeout_s=BUILD_TIMEOUT_S, **options)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("package")


@pytest.fixture(scope="module")
def sdist(work):
    """Made from a copy of the sources: a build leaves its traces beside them."""
    source = work / "source"
    shutil.copytree(helpers.REPOSITORY, source, symlinks=True, ignore=lambda at, names: [
        name for name in names if name in ("__pycache__", "build") or ".so" in name or name.startswith(".")
        or name.endswith(".egg-info") or pathlib.Path(at, name) == helpers.REPOSITORY / "kvfs/lib"
    ])  # fmt: skip
    code = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"
    result = subprocess.run(
        [sys.executable, "-c", code, work],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return work / result.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(sdist, work):
    options = ("--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", work / "wheels")
    run(sys.executable, "-m", "pip", "wheel", *options, sdist)
    (path,) = (work / "wheels").glob("*.whl")
    return path


def test_the_sdist_has_the_native_sources_and_nothing_that_was_built(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    repository = helpers.REPOSITORY
    sources = [*repository.glob("native/**/*"), *repository.glob("kvfs/**/*.py")]
    kinds = (".c", ".cc", ".h", ".S", ".map", ".mk", ".py")
    wanted = {str(path.relative_to(repository)) for path in sources if path.suffix in kinds}
    wanted |= {str(path.relative_to(repository)) for path in repository.glob("native/**/Makefile")}
    assert len(wanted) > 100
    assert wanted <= names, sorted(wanted - names)
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py", "tools/setup", "docs/format.md"} <= names
    assert not [name for name in names if name.endswith((".o", ".pyc")) or ".so" in pathlib.Path(name).name]


def test_the_wheel_is_of_this_platform_and_holds_the_data_plane(wheel):
    project, version, python, abi, platform = wheel.stem.split("-")
    assert (project, python, abi) == ("kvfs", "cp311", "abi3")
    assert re.fullmatch(r"(manylinux_2_\d+|linux)_[a-z0-9_]+", platform)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(f"kvfs-{version}.dist-info/METADATA"))
        tags = archive.read(f"kvfs-{version}.dist-info/WHEEL").decode()
        licence = archive.read(f"kvfs-{version}.dist-info/licenses/LICENSE").decode()
    binaries = {name for name in names if ".so" in name}
    assert binaries == {"kvfs/_native.abi3.so", *LIBRARIES}
    assert "kvfs/py.typed" in names
    modules = {str(path.relative_to(helpers.REPOSITORY)) for path in helpers.REPOSITORY.glob("kvfs/**/*.py")}
    assert {name for name in names if name.endswith(".py")} == modules  # no test, no tool
    outside = {name for name in names if not name.startswith(("kvfs/", f"kvfs-{version}.dist-info/"))}
    share = f"kvfs-{version}.data/data/share/"
    expected = {f"{share}{name}" for name in SHARED} | {f"kvfs-{version}.data/scripts/mount.kvfs"}
    expected |= {f"{share}kvfs/systemd/{path.name}" for path in helpers.REPOSITORY.glob("tools/*.service")}
    assert expected <= outside, expected - outside
    assert not [name for name in outside - expected if not name.startswith(f"{share}man/man1/kvfs-")]
    assert "Root-Is-Purelib: false" in tags and f"Tag: cp311-abi3-{platform}" in tags
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Author"] == "the kvfs authors"
    assert "Apache License" in licence and "Copyright 2026 the kvfs authors" in licence
    assert metadata.get_payload().startswith("# kvfs\n") and metadata["Description-Content-Type"] == "text/markdown"
    required = metadata.get_all("Requires-Dist")
    assert [one for one in required if "extra" not in one] == ["cffi>=1.16"]
    assert {one.partition(">")[0] for one in required if 'extra == "daemon"' in one} == set(DAEMON)


def test_the_wheel_needs_no_library_of_the_machine_but_glibc_of_the_version_in_its_tag(wheel, work):
    unpacked = work / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    libraries = sorted(unpacked.rglob("*.so*"))
    own = {path.name for path in libraries}
    needed, versions = {}, set()
    for path in libraries:
        said = run("readelf", "--wide", "--dynamic", "--version-info", path).stdout
        needed[path.name] = set(re.findall(r"\(NEEDED\).*\[(.*)\]", said)) - own
        versions |= {(int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", said)}
    others = {name for names in needed.values() for name in names} - {"libc.so.6"}
    others = {name for name in others if not name.startswith("ld-linux")}
    # Of the plugin alone, whose strings and maps are NIXL's too; a program without NIXL never loads it.
    assert not [name for name, of in needed.items() if "libstdc++.so.6" in of and name != "libplugin_KVFS.so"]
    others -= {"libstdc++.so.6", "libgcc_s.so.1"}
    archive = pathlib.Path(run("gcc", "-print-file-name=liburing.a").stdout.strip())
    if not archive.is_absolute():
        # The shared liburing of the machine it is: such a wheel says that it is of this machine's kind alone.
        assert others == {"liburing.so.2"} and wheel.stem.split("-")[-1].startswith("linux_")
        return
    assert others == set(), needed
    major, minor = max(versions)
    assert wheel.stem.split("-")[-1].startswith(f"manylinux_{major}_{minor}_")
    # No name of the copy is seen by others: an engine may have a liburing of its own.
    for name in ("_native.abi3.so", "libkvfs.so.1"):
        assert "io_uring_" not in run("readelf", "--wide", "--dyn-syms", next(unpacked.rglob(name))).stdout, name
    licence = next(unpacked.rglob("liburing.copyright"), None)
    assert licence is None or "Jens Axboe" in licence.read_text()


def pythons():
    """This one, and what else of the versions that the wheel is for can be found."""
    installed = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    found = {sys.version_info[:2]: sys.executable}
    for minor in (11, 12, 13, 14):
        candidates = [shutil.which(f"python3.{minor}"), *sorted(installed.glob(f"3.{minor}.*/bin/python3"))]
        for path in filter(None, candidates):
            # A shim of a version manager is a program that may find no Python behind it.
            asked = run(path, "-c", "import sys; print(sys.version_info[1])", check=False)
            if asked.returncode == 0 and int(asked.stdout) == minor:
                found.setdefault((3, minor), str(path))
    return found


@pytest.mark.parametrize("version", [(3, minor) for minor in (11, 12, 13, 14)], ids=lambda version: f"3.{version[1]}")
def test_a_client_is_installed_into_an_empty_environment_and_used(wheel, work, directory, version):
    if version not in (found := pythons()):
        pytest.skip(f"no Python 3.{version[1]} on this machine")
    environment = work / f"python3.{version[1]}"
    run(found[version], "-m", "venv", "--without-pip", environment)
    python = environment / "bin/python"
    # The wheel's dependencies, fetched for this Python.
    needed = work / f"needed3.{version[1]}"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    fetched = run(*pip, "--python", python, "download", "-q", "-d", needed, "cffi>=1.16", check=False)
    if fetched.returncode != 0:
        pytest.skip(f"cffi cannot be had for Python 3.{version[1]}: {fetched.stderr.strip()[-200:]}")
    run(*pip, "--python", python, "install", "-q", "--no-index", "--find-links", needed, wheel)

    result = json.loads(run(python, "-I", "-c", CLIENT, directory).stdout)
    assert result["file"].startswith(str(environment)) and tuple(result["python"]) == version
    assert result["there"] == [True, False] and result["sizes"] == [2 << 20, None] and result["same"]
    assert result["absent"] is None and result["again"] == [True, [True]]
    assert not {name.partition(".")[0] for name in result["modules"]} & set(DAEMON)
    # A connector's engine is not here: its module says which version it wants, and asks for nothing of the daemon's.
    connectors = json.loads(run(python, "-I", "-c", CONNECTORS).stdout)
    for name, (error, modules) in connectors.items():
        assert error is None or re.search(r"\d+\.\d+", error), (name, error)
        assert not set(modules) & set(DAEMON), (name, modules)
    packages = environment.glob("lib/python3*/site-packages/*.dist-info")
    installed = {path.name.partition("-")[0].lower() for path in packages}
    assert installed == {"kvfs", "cffi", "pycparser"}

    # The command is there, and mount.kvfs finds it. A verb of the daemon's says what it needs.
    kvfs = environment / "bin/kvfs"
    assert run(kvfs, "--version").stdout.startswith("kvfs ")
    shown = run(environment / "bin/mount.kvfs", "/srv/pool", "/mnt/kv", "-f", "-o", "allow_other,nofail").stdout
    assert shown == f"{kvfs} mount /srv/pool /mnt/kv --allow-other\n"
    assert all((environment / "share" / name).stat().st_size > 100 for name in SHARED)
    refused = run(kvfs, "mount", directory, directory, check=False)
    assert refused.returncode == 1 and "pip install 'kvfs[daemon]'" in refused.stderr
    # A program under the library of the wheel reads a file of the mount.
    (directory / "file").write_bytes(b"sealed" * 200_000)
    read = f"import os; fd = os.open({str(directory / 'file')!r}, os.O_RDONLY); print(len(os.pread(fd, 1 << 20, 0)))"
    statistics = work / "preload.json"
    shown = run("env", f"KVFS_PRELOAD_STATS={statistics}", kvfs, "preload-run", python, "-I", "-c", read).stdout
    assert shown == f"{1 << 20}\n"
    assert '"connects": 0' not in statistics.read_text().replace('":0', '": 0')
