"""Uses that connectors make of engines, as tools/engine-matrix reads them, and the search for them in an engine."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from helpers import REPOSITORY

from engines import probe, uses

CONNECTORS = REPOSITORY / "kvfs/connectors"
SOURCE = """
import vllm.a as a
import numpy
from lmcache.b import Base, Enum, maker
try:
    from sglang.c import optional
except ImportError:
    optional = None
try:
    from sglang.d import needed
except ImportError as error:
    raise RuntimeError from error

class Own(Base):
    size: int = 3
    def __init__(self, config: Any, other: str):
        super().__init__(config)
        self._config, self.made = config, 1
        self.inherited(maker(1, 2, word=Enum.ONE), self.made, self.size)
        print(config.rank, getattr(config, "looked_for", 0), other.strip, optional.name, numpy.zeros)
    def later(self):
        return self._config.late + a.function() + needed.thing
"""


def test_names_attributes_calls_and_bases_are_read_from_the_source() -> None:
    used = uses.of_source(SOURCE, {"config": "lmcache.b:Config"})
    assert used.names == {
        "lmcache.b:Base", "lmcache.b:Enum", "lmcache.b:Enum.ONE", "lmcache.b:maker", "sglang.d:needed",
        "sglang.d:needed.thing", "vllm.a:function", "lmcache.b:Config.rank", "lmcache.b:Config.late",
    }  # fmt: skip
    assert used.calls == {uses.Call("lmcache.b:maker", 2, ("word",))}
    assert used.bases == {"Own": "lmcache.b:Base"}
    assert used.inherited == {"lmcache.b:Base.inherited", "lmcache.b:Base.__init__"}
    assert uses.unlisted("a connector", SOURCE) == {"config"}


@pytest.mark.parametrize("path", sorted(CONNECTORS.glob("*.py")), ids=lambda path: path.stem)
def test_every_object_of_an_engine_that_a_connector_uses_is_listed_with_its_class(path: Path) -> None:
    assert uses.unlisted(path.stem, path.read_text()) == set(), "tools/engines/uses.py: OBJECTS, or OTHERS"


def test_every_connector_that_imports_an_engine_is_probed() -> None:
    probed = {name for names in probe.CONNECTORS.values() for name in names}
    importing = {path.stem for path in CONNECTORS.glob("*.py") if uses.of_connector(path.stem, CONNECTORS).names}
    assert importing and importing <= probed
    assert set(uses.OBJECTS) <= probed


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = ModuleType("a_double_of_an_engine")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module


class Declared:
    field: int

    def __init__(self) -> None:
        self.given = 1


def test_instances_have_what_their_class_declares_or_gives_them() -> None:
    assert probe.has(Declared, "field") and probe.has(Declared, "given") and probe.has(Declared, "__init__")
    assert not probe.has(Declared, "other")


def test_what_is_missing_is_named(engine: ModuleType) -> None:
    finding = probe.Finding()
    engine.Declared = Declared  # type: ignore[attr-defined]
    assert finding.attempt("there", probe.found, f"{engine.__name__}:Declared") is Declared
    assert finding.attempt("gone", probe.found, f"{engine.__name__}:gone") is None
    assert finding.attempt("nowhere", probe.found, "no_such_engine:Name") is None
    finding.look("an attribute", probe.has(Declared, "other"), "since 0.2")
    assert finding.looked_for == 4
    assert finding.missing == [
        f"gone: AttributeError: {engine.__name__} has no gone",
        "nowhere: ModuleNotFoundError: No module named 'no_such_engine'",
        "an attribute: since 0.2",
    ]


def test_what_a_connector_takes_where_it_is_there_is_looked_for(engine: ModuleType) -> None:
    class Parent:
        __slots__ = ("_m",)

        def call(self, one: int) -> None: ...

    engine.Parent, engine.made = Parent, lambda: 1  # type: ignore[attr-defined]
    name = engine.__name__
    targets = {f"{name}:Parent._m": None, f"{name}:Parent.call": 1, f"{name}:made": 0}
    assert probe.probe_taken(targets) == []
    del Parent._m
    assert probe.probe_taken({**targets, f"{name}:Parent.call": 2, f"{name}:made": 1, f"{name}:gone.x": None}) == [
        f"{name}:Parent._m", f"{name}:Parent.call(): too many positional arguments",
        f"{name}:made(): too many positional arguments", f"{name}:gone.x: AttributeError: {name} has no gone",
    ]  # fmt: skip


def test_the_names_by_which_hints_are_read_ahead_are_looked_for() -> None:
    """Each name that the connector uses of vLLM's manager, which no source of kvfs imports."""
    source = (CONNECTORS / "vllm.py").read_text()
    used = {f"TieringOffloadingManager.{name}" for name in re.findall(r"\bmanager\.(\w+)\(", source)}
    assert len(used) == 3 and 'getattr(parent, "_m", None)' in source
    assert used | {"_SecondaryTierFacingParent._m"} <= {target.partition(":")[2] for target in probe.TAKEN["vllm"]}
    assert "get_server_args" in (CONNECTORS / "sglang_pools.py").read_text()
    assert all("get_server_args" in str(probe.TAKEN[each]) for each in ("sglang", "sglang linker"))


def test_a_call_that_cannot_be_is_one() -> None:
    def function(one: int, two: int = 2, *, word: int = 3) -> None: ...

    assert probe.takes(function, 1, ()) == probe.takes(function, 2, ("word",)) == ""
    assert "missing" in probe.takes(function, 0, ()) and "too many" in probe.takes(function, 3, ())
    assert "gone" in probe.takes(function, 1, ("gone",))


def test_a_method_that_cannot_take_what_the_engine_gives_it_is_found() -> None:
    class Base:
        def same(self, a: int) -> None: ...
        def grown(self, a: int, b: int) -> None: ...
        def left(self) -> None: ...

    class Own(Base):
        def same(self, a: int) -> None: ...
        def grown(self, a: int) -> None: ...  # type: ignore[override]

    assert {name: bool(why) for name, why in probe.overridden(Own, Base)} == {"same": False, "grown": True}
