"""Which versions of engines are to be tried, by what an index answers; and that an index is not believed."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines import index


class Index(dict[str, object]):
    """Answers by path: bytes as they are, all else as JSON."""

    def has(self, name: str, versions: list[str], requirements: list[str] | None = None) -> None:
        self[name] = {
            "info": {"version": versions[-1], "requires_dist": requirements},
            "releases": {version: [{"filename": "a.whl", "yanked": False}] for version in versions},
        }


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    there = Index()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = Path(self.path)
            assert path.name == "json"
            answer = there.get(str(path.parent).lstrip("/"))
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            if answer is not None:
                self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(index, "INDEX", f"http://127.0.0.1:{server.server_address[1]}")
        yield there
        server.shutdown()
        thread.join()


def test_the_newest_releases_are_those_with_the_last_post_release_of_each() -> None:
    versions = ["0.9", "0.10.0", "0.10.0.post2", "0.10.0.post10", "0.8.1", "1.0", "0.9.0.post1"]
    assert index.newest(versions) == ["1.0", "0.10.0.post10", "0.9.0.post1"]
    assert index.newest(["2.0"]) == ["2.0"]


@pytest.mark.parametrize("text", ["1.0rc1", "1.0.dev3", "1!1.0", "1.0+cpu", "", "1..0", "v1", "1.0.post", "9" * 20])
def test_what_is_no_final_release_is_not_tried(text: str) -> None:
    assert not index.is_version(text)


def test_a_project_has_the_releases_that_are_final_and_not_withdrawn(answers: Index) -> None:
    answers.has("a", ["1.0", "1.1", "1.2rc1", "1.3", "1.4"])
    releases = answers["a"]["releases"]  # type: ignore[index]
    releases["1.3"][0]["yanked"] = True
    releases["1.4"] = []
    answers["a/1.1"] = {"info": {"requires_dist": ["vllm==0.1"]}}
    found = index.project("a")
    assert found.versions == {"1.0", "1.1"}
    assert (found.version, found.requirements) == ("1.1", ("vllm==0.1",)), "the requirements of another version"


def test_pins_are_exact_versions_of_engines() -> None:
    assert index.pins(
        [
            "vllm[flashinfer,otel]==0.31.0; extra == \"vllm\"", "sglang[diffusion] (==0.5.21) ; extra == 'sglang'",
            "nixl[cu13]==1.3.2", "NIXL_cu12 == 1.3.2+cu12", "nixl>=1.3.0", "nixl==1.5.*", "vllm===0.3",
            "vllm-extra==1.0", "lmcache==0.5.6rc1", "lmcache==0.5.4,!=0.5.5", "mooncake-transfer-engine==0.3.12",
            "", "==1", "\x00", "x" * 5000,
        ]
    ) == [
        ("vllm", "0.31.0", "vllm"), ("sglang", "0.5.21", "sglang"), ("nixl", "1.3.2", ""), ("nixl", "1.3.2", ""),
        ("mooncake", "0.3.12", ""),
    ]  # fmt: skip


def test_the_newest_three_and_those_that_are_pinned_are_tried(answers: Index) -> None:
    for packages in index.PROJECTS.values():
        for package in packages:
            answers.has(package, ["0.1", "0.2", "0.3", "0.4"])
    answers.has("lmcache", ["0.5"], ["nixl==0.2", "nixl==0.2; extra == 'cu12'"])
    answers.has("ai-dynamo", ["1.6"], ["vllm==0.1; extra == 'vllm'", "sglang==0.4; extra == 'sglang'"])
    answers.has("kvbm", ["2.0"], ["nixl==0.2"])
    answers.has("kvcr", ["3.0"])
    chosen = index.choose()
    assert [(one.engine, one.version) for one in chosen] == [
        ("vllm", "0.4"), ("vllm", "0.3"), ("vllm", "0.2"), ("vllm", "0.1"), ("sglang", "0.4"), ("sglang", "0.3"),
        ("sglang", "0.2"), ("lmcache", "0.5"), ("nixl", "0.4"), ("nixl", "0.3"), ("nixl", "0.2"), ("mooncake", "0.4"),
        ("mooncake", "0.3"), ("mooncake", "0.2"), ("ucm", "0.4"), ("ucm", "0.3"), ("ucm", "0.2"),
    ]  # fmt: skip
    why = {(one.engine, one.version): one.why for one in chosen}
    assert why["vllm", "0.1"] == ("pinned by ai-dynamo[vllm] 1.6",)
    assert why["sglang", "0.4"] == ("newest", "pinned by ai-dynamo[sglang] 1.6")
    assert why["nixl", "0.2"] == ("newest", "pinned by kvbm 2.0", "pinned by lmcache 0.5")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "404"),
        (b"<html>", "Expecting value"),
        (b"[" * 100_000, "recursion"),
        ([], "list, and no object"),
        ({"info": {"version": "1.0"}}, "without info and releases"),
        ({"info": {"version": "1.0"}, "releases": {"1.0": "a.whl"}}, "no list of files"),
        ({"info": {"version": "1.0"}, "releases": {"1.0": [1]}}, "no list of files"),
        ({"info": {"version": "1.0"}, "releases": {"1.0rc1": [{}]}}, "no final release"),
        ({"info": {"version": "1.0", "requires_dist": "vllm"}, "releases": {"1.0": [{}]}}, "requires_dist is 'vllm'"),
        ({"info": {"version": "1.0", "requires_dist": [1]}, "releases": {"1.0": [{}]}}, "requires_dist is"),
    ],
)
def test_an_answer_that_is_no_metadata_is_refused_by_name(answers: Index, answer: object, reason: str) -> None:
    answers["a"] = answer
    with pytest.raises(index.Bad, match=reason) as refused:
        index.project("a")
    assert "a" in str(refused.value)


def test_an_answer_without_an_end_is_refused(answers: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "ANSWER_MAX", 100)
    answers["a"] = b"{" + b" " * 100
    with pytest.raises(index.Bad, match="more than 100 bytes"):
        index.project("a")


def test_an_index_that_is_away_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "INDEX", "http://127.0.0.1:1")
    with pytest.raises(index.Bad, match="a/json"):
        index.project("a")
