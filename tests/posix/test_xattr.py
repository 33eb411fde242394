"""Extended attributes: set before the rename, they must be there after it (vLLM's user.vllm.kv_crc32c)."""

import ctypes
import errno
import os

import pytest
from helpers import MIB, content, libc, opened, raises_errno, read_file, write_file

CHECKSUM = "user.vllm.kv_crc32c"


@pytest.fixture(autouse=True)
def _attributes_supported(directory, is_kvfs):
    try:
        os.setxattr(directory, "user.probe", b"")
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP and not is_kvfs:
            pytest.skip("this filesystem has no extended attributes")
        raise


def test_checksum_set_before_the_rename_survives_it(directory):
    write_file(directory / "block.tmp", content(2 * MIB))
    os.setxattr(directory / "block.tmp", CHECKSUM, b"\x12\x34\x00\xff")
    os.rename(directory / "block.tmp", directory / "block")
    assert os.getxattr(directory / "block", CHECKSUM) == b"\x12\x34\x00\xff"
    assert os.listxattr(directory / "block") == [CHECKSUM]
    assert read_file(directory / "block") == content(2 * MIB)


def test_attribute_set_by_descriptor_before_the_close_survives_it(directory):
    with opened(directory / "block.tmp", os.O_CREAT | os.O_WRONLY) as descriptor:
        os.write(descriptor, content(5000))
        os.setxattr(descriptor, CHECKSUM, b"1234")
        os.write(descriptor, content(5000))
        assert os.getxattr(descriptor, CHECKSUM) == b"1234"
    os.rename(directory / "block.tmp", directory / "block")
    assert os.getxattr(directory / "block", CHECKSUM) == b"1234"
    assert (directory / "block").stat().st_size == 10_000


def test_attributes_are_set_listed_read_changed_and_removed(directory):
    path = directory / "block"
    write_file(path, b"x")
    values = {f"user.name-{index}": content(index * 8, index) for index in range(20)}
    for name, value in values.items():
        os.setxattr(path, name, value)
    assert sorted(os.listxattr(path)) == sorted(values)
    assert {name: os.getxattr(path, name) for name in os.listxattr(path)} == values
    os.setxattr(path, "user.name-3", b"changed")
    assert os.getxattr(path, "user.name-3") == b"changed"
    os.removexattr(path, "user.name-3")
    assert sorted(os.listxattr(path)) == sorted(set(values) - {"user.name-3"})
    with raises_errno(errno.ENODATA):
        os.getxattr(path, "user.name-3")


def test_missing_attribute_is_enodata(directory):
    write_file(directory / "block", b"x")
    assert os.listxattr(directory / "block") == []
    with raises_errno(errno.ENODATA):
        os.getxattr(directory / "block", "user.missing")
    with raises_errno(errno.ENODATA):
        os.removexattr(directory / "block", "user.missing")


def test_create_and_replace_flags_are_honoured(directory):
    path = directory / "block"
    write_file(path, b"x")
    with raises_errno(errno.ENODATA):
        os.setxattr(path, "user.a", b"1", os.XATTR_REPLACE)
    os.setxattr(path, "user.a", b"1", os.XATTR_CREATE)
    with raises_errno(errno.EEXIST):
        os.setxattr(path, "user.a", b"2", os.XATTR_CREATE)
    assert os.getxattr(path, "user.a") == b"1"
    os.setxattr(path, "user.a", b"3", os.XATTR_REPLACE)
    assert os.getxattr(path, "user.a") == b"3"


def test_too_small_a_buffer_is_erange_and_size_zero_asks_for_the_size(directory):
    path = directory / "block"
    write_file(path, b"x")
    os.setxattr(path, "user.a", b"v" * 100)
    name = os.fsencode(path)
    assert _getxattr(name, b"user.a", 0) == 100
    assert _getxattr(name, b"user.a", 100) == 100
    with raises_errno(errno.ERANGE):
        _getxattr(name, b"user.a", 99)
    listed = _listxattr(name, 0)
    assert listed == len(b"user.a\0")
    with raises_errno(errno.ERANGE):
        _listxattr(name, listed - 1)


def test_values_may_be_empty_and_binary(directory):
    path = directory / "block"
    write_file(path, b"x")
    for value in (b"", b"\0", b"\xff\x00\xfe" * 300):
        os.setxattr(path, "user.a", value)
        assert os.getxattr(path, "user.a") == value


def test_directories_have_attributes_too(directory):
    (directory / "sub").mkdir()
    os.setxattr(directory / "sub", "user.namespace", b"llama")
    os.rename(directory / "sub", directory / "moved")
    assert os.getxattr(directory / "moved", "user.namespace") == b"llama"


def test_replaced_and_removed_files_take_their_attributes_with_them(directory):
    path = directory / "block"
    write_file(path, b"old")
    os.setxattr(path, "user.a", b"old")
    write_file(directory / "block.tmp", b"new")
    os.rename(directory / "block.tmp", path)
    assert os.listxattr(path) == []
    os.setxattr(path, "user.a", b"new")
    os.unlink(path)
    write_file(path, b"third")
    assert os.listxattr(path) == []


def test_attributes_survive_rewriting_the_content(directory):
    path = directory / "block"
    write_file(path, content(10_000))
    os.setxattr(path, "user.a", b"kept")
    write_file(path, content(20_000))
    assert os.getxattr(path, "user.a") == b"kept"


def test_namespaces_that_are_not_there_cost_nothing(own_pool):
    """`ls -l` asks each file for its ACL and its label, unless the first one says that there is no such thing."""
    pool = own_pool(files=1, size="256M")
    path = pool.mount / "block"
    write_file(path, b"x")

    def forwarded():
        return pool.status()["counters"]["forwarded"]

    before = forwarded()
    for name in ("system.posix_acl_access", "system.posix_acl_default", "security.selinux", "security.capability"):
        for _ in range(20):
            with raises_errno(errno.EOPNOTSUPP):
                os.getxattr(path, name)
    assert forwarded() - before < 20, "requests that the data plane answers went to the control plane"


def _getxattr(path, name, size):

    result = libc.getxattr(path, name, ctypes.create_string_buffer(size) if size else None, ctypes.c_size_t(size))
    if result < 0:
        raise OSError(ctypes.get_errno(), "getxattr")
    return result


def _listxattr(path, size):

    result = libc.listxattr(path, ctypes.create_string_buffer(size) if size else None, ctypes.c_size_t(size))
    if result < 0:
        raise OSError(ctypes.get_errno(), "listxattr")
    return result


@pytest.mark.parametrize(
    ("name", "value"),
    [("pinned", b"1"), ("", b"1"), ("Pin", b"1"), ("pin", b"yes"), ("pin", b""), ("slab", b"0"), ("keep", b"soon"),
     ("keep", b"3601"), ("group", b""), ("group", b"g" * 256), ("parent", b""), ("parent", b"/")],
)  # fmt: skip
def test_a_name_of_kvfs_that_it_does_not_have_is_refused_and_a_value_too(directory, is_kvfs, name, value):
    """Else a mistyped one is kept, and does nothing."""
    if not is_kvfs:
        pytest.skip("these names are kvfs's own")
    path = directory / "block"
    write_file(path, b"x")
    with raises_errno(errno.EINVAL):
        os.setxattr(path, f"user.kvfs.{name}", value)
    assert os.listxattr(path) == []
    os.setxattr(path, "user.kvf", b"1")  # everybody's
