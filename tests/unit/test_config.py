"""pool.toml, sizes and geometry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.errors import PoolError, UsageError
from kvfs.pool import config
from kvfs.pool.config import compare, new_config, parse
from kvfs.pool.geometry import Geometry, choose_geometry, layout, zones_on
from kvfs.units import format_size, parse_size

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("64K", 65536), ("4M", 4 << 20), ("1G", GIB), ("1.5T", 3 << 39), ("2g", 2 * GIB), ("1GiB", GIB)],
)
def test_sizes_parse(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1X", "1 000", "0x10", "1e9", "99999999P"])
def test_other_sizes_are_usage_errors_naming_the_text(text: str) -> None:
    with pytest.raises(UsageError, match="--size"):
        parse_size(text, what="--size")


@given(st.integers(0, 1 << 60))
def test_format_size_is_exact(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize("total", [256 << 20, GIB, 64 * GIB, 1 << 40, 600 << 40, 4 << 50])
def test_every_pool_has_hundreds_to_tens_of_thousands_of_segments(total: int) -> None:
    sizes = [total // 4] * 4
    geometry, _ = choose_geometry(sizes)
    segments = len(layout([zones_on(size, geometry.zone_size) for size in sizes], geometry.stripe_width))
    assert 200 <= segments <= 32768
    if 200 * GIB < total < 8 << 40:
        assert geometry.segment_size == 512 << 20


def test_a_small_zone_reduces_the_default_stripe_unit_and_says_so() -> None:
    geometry, notes = choose_geometry([16 << 20] * 16, stripe_width=16)
    assert geometry.stripe_unit == geometry.zone_size == 65536
    assert "64K" in notes[0]


def test_an_explicit_stripe_unit_larger_than_the_zone_is_an_error() -> None:
    with pytest.raises(UsageError, match="stripe unit"):
        choose_geometry([16 << 20] * 16, stripe_width=16, stripe_unit=128 << 10)


def test_a_stripe_width_over_the_device_count_is_an_error() -> None:
    with pytest.raises(UsageError, match="stripe width 3"):
        choose_geometry([GIB, GIB], stripe_width=3)


def test_a_device_too_small_is_an_error() -> None:
    with pytest.raises(UsageError, match="too small"):
        choose_geometry([GIB, 1 << 20])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 4))
def test_layout_uses_each_zone_once_and_each_device_once_a_segment(zones: list[int], width: int) -> None:
    width = min(width, len(zones))
    seen = set()
    for members in layout(zones, width):
        assert len({device for device, _ in members}) == width == len(members)
        for member in members:
            assert member not in seen
            seen.add(member)
            assert member[1] < zones[member[0]]
    unused = [count - sum(1 for device, _ in seen if device == i) for i, count in enumerate(zones)]
    assert sum(1 for left in unused if left > 0) < width


def test_layout_rotates_over_equal_devices_and_fills_unequal_ones() -> None:
    segments = layout([4, 4, 4, 4], 2)
    assert [sorted(device for device, _ in members) for members in segments[:2]] == [[0, 1], [2, 3]]
    assert len(layout([10, 5, 5], 2)) == 10


def _config() -> config.PoolConfig:
    geometry, _ = choose_geometry([GIB] * 3)
    return new_config(geometry, [("devices/0", GIB), ('/dev/disk/by-id/x"y\\z', GIB), ("ü", GIB)])


def test_what_is_written_reads_back() -> None:
    made = _config()
    assert parse(made.dump(), "pool.toml") == made


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version = 2", "version = 3", "newer"),
        ("version = 2", "version = 1", "a pool of format 1, and this kvfs reads format 2"),
        ("version = 2", "", "version is missing"),
        ("stripe_width = 3", "stripe_width = 4", "geometry.stripe_width is 4, but the pool has 3"),
        ("stripe_width = 3", 'stripe_width = "3"', "geometry.stripe_width"),
        ("stripe_width = 3", "stripe_width = true", "geometry.stripe_width"),
        ("stripe_width = 3", "stripe_width = 3\ncolour = 1", "geometry.colour"),
        ("index = 1", "index = 2", r"device\[1\].index is 2"),
        ("[geometry]", "[geometry", "not valid TOML"),
        ('created = "', 'created = 1 # "', "created is 1"),
    ],
)  # fmt: skip
def test_an_edited_pool_toml_names_the_key(old: str, new: str, message: str) -> None:
    text = _config().dump()
    assert old in text
    with pytest.raises(PoolError, match=message) as caught:
        parse(text.replace(old, new, 1), "POOL/pool.toml")
    assert "POOL/pool.toml" in str(caught.value)


def test_zones_that_do_not_fit_are_named() -> None:
    made = _config()
    zones = made.devices[0].zone_count
    with pytest.raises(PoolError, match="zone_count"):
        parse(made.dump().replace(f"zone_count = {zones}", f"zone_count = {zones + 1}", 1), "x")


def test_compare_names_both_values() -> None:
    one, other = _config(), _config()
    with pytest.raises(PoolError, match=f"uuid is {one.uuid}, but the label says {other.uuid}"):
        compare(one, "pool.toml", other, "the label")


def test_runs_and_summaries_fill_a_segment() -> None:
    geometry = Geometry(4, 128 << 10, 1 << 20)
    assert geometry.segment_pages == 1024 and geometry.summary_pages == 16
    assert geometry.summary_page(1) + geometry.summary_pages == geometry.segment_pages
