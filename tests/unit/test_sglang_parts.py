"""Parts of SGLang's connector without SGLang: what is said, once, where SGLang has less than is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Tensor:
    def numel(self) -> int:
        return 16

    def element_size(self) -> int:
        return 2


class Host:
    """A host pool whose pages have no addresses, for this reason."""

    page_size, layout, dtype = 4, "a_layout", "float16"

    def __init__(self, reason: Exception) -> None:
        self._reason = reason

    def get_page_buffer_meta(self, indices: object) -> object:
        raise self._reason

    def get_dummy_flat_data_page(self) -> Tensor:
        return Tensor()


@pytest.fixture
def context() -> ModuleType:
    return ModuleType("sglang.srt.runtime_context")


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch, context: ModuleType) -> Iterator[Any]:
    modules: dict[str, Any] = {
        name: ModuleType(name)
        for name in ("torch", "sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.hicache_storage")
    }
    modules["torch"].arange, modules["torch"].int64 = lambda count, dtype: list(range(count)), "int64"
    modules["sglang.srt.mem_cache.hicache_storage"].PoolHitPolicy = object
    for name, module in (modules | {context.__name__: context}).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvfs.connectors.sglang_pools", raising=False)
    yield importlib.import_module("kvfs.connectors.sglang_pools")
    sys.modules.pop("kvfs.connectors.sglang_pools", None)


def test_a_revision_that_cannot_be_had_is_said_once_with_the_reason(
    pools: Any, context: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert [pools.own_revision() for _ in range(3)] == [""] * 3
    (message,) = caplog.messages
    assert "ImportError: cannot import name 'get_server_args'" in message and "give `revision`" in message

    def unpublished() -> None:
        raise ValueError("not published")

    context.get_server_args = unpublished
    assert [pools.own_revision() for _ in range(3)] == [""] * 3
    assert len(caplog.messages) == 2 and "(ValueError: not published)" in caplog.messages[1]
    context.get_server_args = lambda: SimpleNamespace(revision="v2")
    assert pools.own_revision() == "v2"
    assert pools.options_given({"mount": "/mnt"}) == {"namespace": "sglang", "mount": "/mnt", "revision": "v2"}


def test_a_user_s_own_revision_asks_sglang_nothing(pools: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert pools.options_given({"revision": None, "namespace": "a"}) == {"namespace": "a", "revision": None}
    assert pools.options_given(None) == {"namespace": "sglang", "revision": ""}
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError, AttributeError, AssertionError])
def test_a_pool_whose_pages_have_no_addresses_is_copied_and_the_reason_is_said_once(
    pools: Any, caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    for _ in range(3):
        assert isinstance(pools.pool_of(Host(kind("no such layout"))), pools.CopiedPool)
    (message,) = caplog.messages
    assert "Host of layout a_layout has no addresses of pages" in message and f"{kind.__name__}: no such" in message
    with pytest.raises(RuntimeError, match="out of memory"):
        pools.pool_of(Host(RuntimeError("out of memory")))
