"""The small parts of the connectors: leases, spoiled keys, counters for Prometheus, versions, revisions."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import REPOSITORY

from kvfs.connectors import tried, versions
from kvfs.connectors.common import Counters, State, options_of
from kvfs.connectors.leases import Leases
from kvfs.connectors.lmcache import key_of
from kvfs.connectors.metrics import Exporter
from kvfs.connectors.spoiled import Spoiled
from kvfs.errors import NotMountedError


class Client:
    """The claims of kvfs.Client."""

    def __init__(self) -> None:
        self.said: list[tuple[str, list[bytes]]] = []
        self.fails = False

    def claim(self, keys: Sequence[bytes], seconds: float) -> int:
        self.said.append(("claim", list(keys)))
        if self.fails:
            raise NotMountedError("unmounted")
        return len(keys)

    def unclaim(self, keys: Sequence[bytes]) -> int:
        self.said.append(("unclaim", list(keys)))
        if self.fails:
            raise NotMountedError("unmounted")
        return len(keys)


def leases_of(client: Client | None, seconds: float = 10.0, state: State = State.UP) -> Leases:
    connection: Any = SimpleNamespace(client=client, state=state if client else State.AWAY)
    return Leases(connection, seconds)


def test_a_look_up_claims_once_what_it_found_and_a_load_gives_it_back_once() -> None:
    client = Client()
    leases = leases_of(client)
    leases.take([b"a", b"b"])
    leases.take([])
    leases.give_back([b"a", b"c"])
    leases.give_back([])
    assert client.said == [("claim", [b"a", b"b"]), ("unclaim", [b"a", b"c"])]


def test_a_claim_that_fails_is_none() -> None:
    client = Client()
    client.fails = True
    leases = leases_of(client)
    leases.take([b"a"])
    leases.give_back([b"a"])
    assert len(client.said) == 2


def test_a_daemon_that_is_away_is_told_nothing() -> None:
    client = Client()
    leases_of(client, state=State.READING).take([b"a"])
    leases_of(None).take([b"a"])
    leases_of(None).give_back([b"a"])
    assert client.said == []


def test_without_leases_nothing_is_claimed() -> None:
    client = Client()
    leases_of(client, 0.0).take([b"a"])
    leases_of(client, 0.0).give_back([b"a"])
    assert client.said == []


def test_spoiled_keys_are_bounded_and_the_oldest_go() -> None:
    spoiled = Spoiled(2)
    spoiled.add([b"a", b"b"])
    spoiled.add([b"a", b"c"])
    assert len(spoiled) == 2 and spoiled.any_of([b"x", b"a"]) and not spoiled.any_of([b"b"])
    spoiled.discard([b"a", b"c", b"x"])
    assert not spoiled.any_of([b"a", b"c"])


@pytest.mark.parametrize("length", [1, 127])
def test_short_names_are_keys_as_they_are(length: int) -> None:
    assert key_of("m" * length) == b"m" * length


def test_long_names_are_told_apart_by_the_digest_at_their_end() -> None:
    from kvfs.client.keys import KEY_MAX

    names = ["m" * 300 + end for end in ("", "a", "b")] + ["ü" * 200]
    keys = [key_of(name) for name in names]
    assert len(set(keys)) == len(names) and {len(key) for key in keys} == {KEY_MAX}
    assert all(key[-65:-64] == b"~" for key in keys)


def test_what_was_counted_since_the_last_time_is_added() -> None:
    from prometheus_client import REGISTRY

    exporter, counters = Exporter("an engine", "a/namespace"), Counters(loaded=3)
    exporter.update(counters)
    counters.loaded += 2
    exporter.update(counters)
    Exporter("an engine", "another").update(Counters(loaded=1))
    labels = {"engine": "an engine", "namespace": "a/namespace"}
    assert REGISTRY.get_sample_value("kvfs_connector_loaded_total", labels) == 5
    assert REGISTRY.get_sample_value("kvfs_connector_hits_total", labels) == 0


def test_an_engine_that_does_not_import_is_named_with_the_versions_that_were_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(tried.VERSIONS, "no-such-engine", ("1.2", "1.3"))
    error = versions.missing("no-such-engine", ImportError("no module", name="no_such"))
    assert "no-such-engine: no module (it is not installed here" in str(error) and "1.2, 1.3" in str(error)
    assert error.name == "no_such"


def test_an_engine_that_lacks_something_is_refused_by_all_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {"json": ("JSONDecoder.decode", "JSONDecoder.gone", "absent"), "no_such_module": ("x",)}
    monkeypatch.setitem(versions.NEEDS, "pip", needs)
    monkeypatch.setattr(versions, "installed", lambda _: "99.1")
    assert [each.split(" (")[0] for each in versions.probe("pip")] == [
        "json: JSONDecoder.gone", "json: absent", "no_such_module",
    ]  # fmt: skip
    error = str(versions.missing("pip", ImportError("cannot import name 'absent'")))
    assert "json: JSONDecoder.gone, json: absent, no_such_module (ModuleNotFoundError" in error
    assert "version 99.1 is installed" in error


def test_a_field_that_only_instances_have_is_found_by_its_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = ("Counters.lookups", "Options.mount", "Options.nothing", "State.UP")
    monkeypatch.setitem(versions.NEEDS, "itself", {"kvfs.connectors.common": fields})
    assert versions.probe("itself") == ["kvfs.connectors.common: Options.nothing"]


def test_a_version_that_was_not_tried_is_warned_of_and_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(tried.VERSIONS, "vllm", ("1.0", "1.1"))
    logger = logging.getLogger("kvfs.connectors")
    assert not any(versions.warn_untried("vllm", version, logger) for version in ("1.1", "1.0+cpu", None))
    assert caplog.messages == []
    assert versions.warn_untried("vllm", "1.2.post1", logger)
    assert "version 1.2.post1 was not tried" in caplog.messages[0] and tried.DATE in caplog.messages[0]
    assert "1.0, 1.1" in caplog.messages[0]


def test_an_untried_version_is_refused_by_what_it_lacks_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    needs = {"json": ("JSONDecoder.decode",)}
    monkeypatch.setitem(versions.NEEDS, "pip", needs)
    monkeypatch.setitem(tried.VERSIONS, "pip", ("1.0",))
    monkeypatch.setattr(versions, "installed", lambda _: "99.1")
    logger = logging.getLogger("kvfs.connectors")
    versions.check("pip", logger)
    assert "version 99.1 was not tried" in caplog.messages[0]
    needs["json"] = ("JSONDecoder.gone", "absent")
    with pytest.raises(ImportError, match=r"it lacks json: JSONDecoder.gone, json: absent \(version 99.1 is installed"):
        versions.check("pip", logger)
    with pytest.raises(ImportError, match=r"version 98 is installed"):
        versions.check("pip", logger, "98")
    versions.check("pip", logger, "1.0+cpu")  # it was run with that one
    monkeypatch.setattr(versions, "installed", lambda _: None)
    versions.check("pip", logger)


def test_each_use_of_lmcache_is_refused_by_its_own_needs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No LMCache is here: a version that lacks all. Its native client needs nothing that could be looked for."""
    monkeypatch.setattr(versions, "installed", lambda _: "99.1")
    logger = logging.getLogger("kvfs.connectors")
    versions.check("lmcache", logger)
    for part, needed, other in (("adapter", "l2_adapters", "v1.protocol"), ("remote", "v1.protocol", "l2_adapters")):
        with pytest.raises(ImportError) as refused:
            versions.check(f"lmcache {part}", logger)
        words = str(refused.value)
        assert words.startswith("kvfs for lmcache: it lacks ") and needed in words and other not in words
        assert f"tried with {', '.join(tried.VERSIONS['lmcache'])})" in words
    assert versions.parts("lmcache") == ["lmcache", "lmcache adapter", "lmcache remote"]
    assert versions.parts("sglang") == ["sglang"] and versions.parts("sglang linker") == ["sglang linker"]
    assert versions.parts("nixl") == []


def test_every_connector_looks_at_its_engine_s_version_before_it_works() -> None:
    """With the interface that its error for a failed import names. The pools are a part of SGLang's connector."""
    found = {
        path.stem: (interface[1], f'versions.check("{interface[1]}"' in source)
        for path in sorted((REPOSITORY / "kvfs/connectors").glob("*.py"))
        if (interface := re.search(r'versions\.missing\("(.*?)"', source := path.read_text()))
    }
    assert found.pop("sglang_pools") == ("sglang", False)
    assert len(found) >= 6 and all(is_checked for _, is_checked in found.values()), found
    assert {interface for interface, _ in found.values()} <= set(versions.NEEDS)


def test_another_revision_of_the_weights_is_another_namespace() -> None:
    def space(**options: object) -> str:
        return options_of("an engine", {"mount": "/mnt/kv", "namespace": "a", **options}).space("model", "layout")

    assert space() == space(revision="") == space(revision=None) == "a/model/layout"
    assert space(revision="v2") == "a/@v2/model/layout" and space(revision=7) == "a/@7/model/layout"
    odd = {space(revision=revision) for revision in ("x/y", "x_y", "x\ny", "../x", "." * 2, "x" * 300)}
    assert len(odd) == 6 and all(each.count("/") == 3 and each.startswith("a/@") for each in odd)


@pytest.mark.parametrize("revision", [True, 1.5, ["a"], b"a"])
def test_a_revision_that_is_no_text_is_refused(revision: object) -> None:
    with pytest.raises(ValueError, match=r"an engine: revision .* a text is needed"):
        options_of("an engine", {"mount": "/mnt/kv", "revision": revision})
