"""The example of libkvfs in C: built as a reader builds it, run on a mount. And its header from C++."""

import itertools
import subprocess

import pytest
from helpers import MIB, REPOSITORY, content, requires_program, run

LIBRARY = REPOSITORY / "kvfs" / "lib"


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    requires_program("gcc")
    out = tmp_path_factory.mktemp("examples")
    run("make", "-s", "-C", REPOSITORY / "native" / "examples", f"OUT={out}", timeout_s=120)
    return out / "get_put"


def test_the_example_stores_finds_reads_lists_and_deletes(example, directory):
    said = run(example, directory).stdout.splitlines()
    assert said[0] == "stored 8 of 8 blocks"
    assert said[1:9] == [f"block {i} is there" for i in range(8)]
    assert said[9] == "read 8 of 8 blocks, 16 MiB, every byte right"
    assert said[10:18] == [f"key 'example block {i:02}'" for i in range(8)]
    assert said[18:] == ["deleted 8 of 8 blocks"]
    assert [path for path in directory.rglob("*") if path.is_file()] == []


def test_the_example_says_what_is_wrong(example, directory, tmp_path):
    for argument, words in ((tmp_path, "not on a kvfs mount"), (tmp_path / "none", "No such file"), ("", "")):
        result = run(example, argument, check=False)
        assert result.returncode == 1 and result.stdout == ""
        assert result.stderr.startswith(f"get_put: connect: {argument}") and words in result.stderr, result.stderr
        assert result.stderr.count("\n") == 1
    assert run(example, check=False).returncode == 2
    for timeout in ("0", "-1", "soon", "2s", "3600001", "99999999999999999999"):
        result = run(example, directory, check=False, environment={"KVFS_TIMEOUT_MS": timeout})
        words = f"get_put: connect: KVFS_TIMEOUT_MS is '{timeout}': 1 to 3600000 are possible\n"
        assert (result.returncode, result.stdout, result.stderr) == (1, "", words)


def test_the_example_is_clean_under_the_address_sanitizer(directory, tmp_path):
    """The program alone: libkvfs itself is tested so by native/test."""
    program = tmp_path / "get_put"
    run(
        "gcc",
        "-std=c11",
        "-D_POSIX_C_SOURCE=200809L",
        "-g",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        f"-I{REPOSITORY / 'native' / 'include'}",
        REPOSITORY / "native" / "examples" / "get_put.c",
        "-o",
        program,
        f"-L{LIBRARY}",
        "-lkvfs",
        f"-Wl,-rpath,{LIBRARY}",
        timeout_s=120,
    )
    run(program, directory, environment={"ASAN_OPTIONS": "detect_leaks=1"})


_CPP = """
#include <kvfs.h>
#include <cstdio>
#include <cstring>
#include <vector>

int main(int, char **argv) {
    kvfs_options options{};
    options.size = sizeof(options);
    options.timeout_ms = 20000;
    options.flags = KVFS_READ_ONLY;
    kvfs_client *client = nullptr;
    if (kvfs_connect(argv[1], nullptr, &options, &client) < 0)
        return std::printf("%s\\n", kvfs_error()), 1;
    const std::uint32_t size = 3;
    kvfs_keys keys{"key", &size, 1, 0};
    std::vector<char> memory(1 << 20);
    kvfs_buffer buffer{memory.data(), memory.size()};
    std::int64_t result = 0;
    int read = kvfs_get(client, &keys, &buffer, &result);
    kvfs_close(client);
    return read == 1 && result == (1 << 20) && std::memcmp(memory.data(), argv[2], std::strlen(argv[2])) == 0 ? 0 : 1;
}
"""


@pytest.mark.parametrize("standard", ["c++11", "c++17"])
def test_the_header_serves_cpp(directory, tmp_path, standard):
    requires_program("g++")
    (tmp_path / "program.cc").write_text("#include <cstdint>\n" + _CPP)
    run(
        "g++",
        f"-std={standard}",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        f"-I{REPOSITORY / 'native/include'}",
        tmp_path / "program.cc",
        "-o",
        tmp_path / "program",
        f"-L{LIBRARY}",
        "-lkvfs",
        f"-Wl,-rpath,{LIBRARY}",
        timeout_s=120,
    )
    path = directory / "6b" / "6b6579"
    path.parent.mkdir()
    path.write_bytes(b"from the mount" + content(MIB - 14))
    run(tmp_path / "program", directory, "from the mount")


@pytest.mark.parametrize("standard", ["c99", "c11", "c17"])
def test_the_header_serves_c(tmp_path, standard):
    (tmp_path / "program.c").write_text("#include <kvfs.h>\nint main(void) { return 0; }\n")
    run(
        "gcc",
        f"-std={standard}",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        "-fsyntax-only",
        f"-I{REPOSITORY / 'native/include'}",
        tmp_path / "program.c",
    )


def test_the_library_exports_what_the_header_says_and_no_more():
    """Versioned symbols, all of one prefix."""
    requires_program("nm")
    names = run("nm", "-D", "--defined-only", LIBRARY / "libkvfs.so.1").stdout.split("\n")
    symbols = {line.split()[2] for line in names if line and " A " not in line}
    declared = set()
    for header in ("kvfs.h", "kvfs_gpu.h"):
        text = (REPOSITORY / "native" / "include" / header).read_text()
        result = subprocess.run(
            ["gcc", "-fpreprocessed", "-dD", "-E", "-P", "-"], input=text, capture_output=True, text=True, check=True
        )
        words = result.stdout.replace("(", " ( ").replace("*", " ").split()
        declared |= {word for word, after in itertools.pairwise(words) if after == "(" and word.startswith("kvfs_")}
    private = {name for name in symbols if name.endswith("@@KVFS_PRIVATE")}
    # For libkvfs_preload alone.
    assert private == {"kvfs_own_descriptor@@KVFS_PRIVATE", "kvfs_own_thread@@KVFS_PRIVATE"}
    assert {name.partition("@")[0] for name in symbols - private} == declared
    assert all("@@KVFS_" in name for name in symbols), symbols
