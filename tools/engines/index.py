"""The package index: which releases an engine has, and which versions others pin. Its answers are checked.

Which versions to try is computed from it: the newest releases of each engine, and those that stacks pin in their
metadata. A requirement that is not `==` pins nothing.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

INDEX = "https://pypi.org/pypi"
TIMEOUT_S = 30
ANSWER_MAX = 64 << 20
NEWEST = 3
# Packages whose metadata say which engines they run with.
PINNERS = ("ai-dynamo", "kvbm", "kvcr", "lmcache")
# An engine's packages: the first is asked for releases, and any of them may be pinned.
PROJECTS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "lmcache": ("lmcache",),
    "nixl": ("nixl", "nixl-cu12", "nixl-cu13"),
    "mooncake": ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"),
    "ucm": ("uc-manager-cuda-cu129", "uc-manager"),
}

_VERSION = re.compile(r"\d{1,9}(?:\.\d{1,9}){0,5}(?:\.post\d{1,9})?")
_REQUIREMENT = re.compile(
    r"\s*([A-Za-z0-9][A-Za-z0-9._-]{0,99})\s*(?:\[([^\]]*)\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?", re.S
)


class Bad(Exception):
    """The index cannot be reached, or answers what is no metadata of a project."""


@dataclass(frozen=True)
class Project:
    name: str
    version: str  # the one whose requirements these are: the newest that is final
    versions: frozenset[str]  # all that are final, and have a file that was not withdrawn
    requirements: tuple[str, ...]


@dataclass(frozen=True)
class Chosen:
    engine: str
    version: str
    why: tuple[str, ...]


def is_version(text: str) -> bool:
    """Whether it is a final release, or a post-release of one."""
    return _VERSION.fullmatch(text) is not None


def key_of(version: str) -> tuple[tuple[int, ...], int]:
    """For sorting: the release without zeros at its end, and the number of the post-release."""
    release, _, post = version.partition(".post")
    numbers = [int(number) for number in release.split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), int(post) if post else -1


def project(name: str) -> Project:
    """Raises Bad."""
    answer = _asked(name)
    info, releases = answer.get("info"), answer.get("releases")
    if not isinstance(info, dict) or not isinstance(releases, dict):
        raise Bad(f"{name}: the index answers without info and releases")
    versions = frozenset(
        version for version, files in releases.items() if is_version(version) and _has_file(name, files)
    )
    if not versions:
        raise Bad(f"{name}: the index has no final release of it")
    newest = max(versions, key=key_of)
    if info.get("version") != newest:
        info = _asked(f"{name}/{newest}").get("info")
        if not isinstance(info, dict):
            raise Bad(f"{name} {newest}: the index answers without info")
    requirements = info.get("requires_dist") or []
    if not isinstance(requirements, list) or not all(isinstance(each, str) for each in requirements):
        raise Bad(f"{name} {newest}: requires_dist is {str(requirements)[:80]!r}")
    return Project(name, newest, versions, tuple(requirements))


def _asked(path: str) -> dict[str, Any]:
    url = f"{INDEX}/{path}/json"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            data = answer.read(ANSWER_MAX + 1)
        if len(data) > ANSWER_MAX:
            raise Bad(f"{url}: more than {ANSWER_MAX} bytes")
        document = json.loads(data)
    except urllib.error.HTTPError as error:
        error.close()
        raise Bad(f"{url}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise Bad(f"{url}: {error}") from error
    if not isinstance(document, dict):
        raise Bad(f"{url}: {type(document).__name__}, and no object")
    return document


def _has_file(name: str, files: object) -> bool:
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        raise Bad(f"{name}: a release that is no list of files: {str(files)[:80]!r}")
    return any(not file.get("yanked") for file in files)


def newest(versions: Iterable[str], count: int = NEWEST) -> list[str]:
    """The newest releases, newest first: of each the last post-release."""
    by_release: dict[tuple[int, ...], str] = {}
    for version in sorted(versions, key=key_of):
        by_release[key_of(version)[0]] = version
    return [by_release[release] for release in sorted(by_release, reverse=True)[:count]]


def pins(requirements: Iterable[str]) -> list[tuple[str, str, str]]:
    """(engine, version, extra) of each requirement that is one exact version of an engine's package."""
    found = []
    for requirement in requirements:
        matched = _REQUIREMENT.fullmatch(requirement)
        if matched is None:
            continue
        package = re.sub(r"[-_.]+", "-", matched[1]).lower()
        version = matched[3].strip()
        if not version.startswith("==") or not is_version(version[2:].strip().partition("+")[0]):
            continue
        for engine, packages in PROJECTS.items():
            if package in packages:
                extra = re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", matched[4] or "")
                found.append((engine, version[2:].strip().partition("+")[0], extra[1] if extra else ""))
    return found


def choose() -> list[Chosen]:
    """All that is to be tried, each version once, an engine's newest first. Raises Bad."""
    why: dict[tuple[str, str], list[str]] = {}
    for engine, packages in PROJECTS.items():
        for version in newest(project(packages[0]).versions):
            why.setdefault((engine, version), []).append("newest")
    for name in PINNERS:
        pinner = project(name)
        pinned = pins(pinner.requirements)
        for engine, version, extra in dict.fromkeys(pinned):
            if extra and (engine, version, "") in pinned:
                continue
            by = f"pinned by {name}{f'[{extra}]' if extra else ''} {pinner.version}"
            why.setdefault((engine, version), []).append(by)
    order = list(PROJECTS)
    chosen = [Chosen(engine, version, tuple(reasons)) for (engine, version), reasons in why.items()]
    chosen.sort(key=lambda one: key_of(one.version), reverse=True)
    return sorted(chosen, key=lambda one: order.index(one.engine))
