"""Has this version of an engine what kvfs's connector uses of it? A program of seconds, in the engine's environment.

    python probe.py INTERFACE REPOSITORY

On its last line of output it has a JSON object: what was looked for, how much of it, and what is missing. It imports
the connector, and looks for all that the connector's source uses (uses.py). It looks for the connector's own list of
what it cannot do without (kvfs.connectors.versions), too. An engine asks as much of the connector: methods by their
names, and arguments that they can take.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Files of each interface's connector; the first is the one that an engine loads.
CONNECTORS = {
    "vllm": ("vllm", "vllm_events"),
    "sglang": ("sglang", "sglang_pools"),
    "sglang linker": ("sglang_linker",),
    "lmcache": ("lmcache", "lmcache_adapter", "lmcache_remote"),
    "ucm": ("ucm",),
}
_MANAGER = "vllm.v1.kv_offload.tiering.manager"
# Names that a connector takes where they are there, with the number of arguments; None: it is no call. Without them it
# refuses vLLM's hints to read ahead, or is not told the revision of SGLang's weights.
TAKEN: dict[str, dict[str, int | None]] = {
    "vllm": {
        f"{_MANAGER}:_SecondaryTierFacingParent._m": None,
        f"{_MANAGER}:TieringOffloadingManager.on_new_request": 1,
        f"{_MANAGER}:TieringOffloadingManager.lookup": 2,
        f"{_MANAGER}:TieringOffloadingManager.on_request_finished": 1,
        "vllm.v1.kv_offload.base:ReqContext.set_offload_key_position": 2,
    },
    "sglang": {"sglang.srt.runtime_context:get_server_args": 0},
    "sglang linker": {"sglang.srt.runtime_context:get_server_args": 0},
}


class Finding:
    """The number of things that were looked for, and those that are missing, in words."""

    def __init__(self) -> None:
        self.looked_for = 0
        self.missing: list[str] = []

    def look(self, what: str, is_there: bool, why: str = "") -> None:
        self.looked_for += 1
        if not is_there:
            self.missing.append(f"{what}{f': {why}' if why else ''}")

    def attempt(self, what: str, call: Callable[..., object], *given: object) -> Any:
        """The call's result; None if it fails, which is missing then: engines fail in their own ways."""
        self.looked_for += 1
        try:
            return call(*given)
        except BaseException as error:
            reason = " ".join(str(error).split())[:200]
            self.missing.append(f"{what}: {type(error).__name__}: {reason}")
            return None


def found(target: str) -> Any:
    """The object of module:Name, a module too. Raises ImportError or AttributeError."""
    module, _, name = target.partition(":")
    there = importlib.import_module(module)
    if not name or hasattr(there, name):
        return getattr(there, name) if name else there
    try:
        return importlib.import_module(f"{module}.{name}")
    except ImportError:
        raise AttributeError(f"{module} has no {name}") from None


def has(owner: Any, name: str) -> bool:
    """Whether instances have it: an attribute of the class, a field, or one that a method of a class gives them."""
    if hasattr(owner, name):
        return True
    for each in getattr(owner, "__mro__", ()):
        if name in getattr(each, "__annotations__", ()) or name in getattr(each, "__struct_fields__", ()):
            return True
        if each.__module__ != "builtins" and name in set(_given_to_self(each)):
            return True
    return False


def _given_to_self(owner: type) -> Iterator[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except (OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def takes(call: Any, count: int, names: tuple[str, ...]) -> str:
    """Why it cannot be called with so many arguments without a name, and these names; empty if it can."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*range(count), **dict.fromkeys(names))
    except TypeError as error:
        return str(error)
    return ""


def overridden(own: type, base: type) -> Iterator[tuple[str, str]]:
    """Each method of the base that the connector has too, and what of the base's arguments it cannot take."""
    for name, method in inspect.getmembers(base, inspect.isfunction):
        mine = inspect.getattr_static(own, name, None)
        if mine is None or mine is inspect.getattr_static(base, name, None) or name.startswith("__"):
            continue
        given = [*inspect.signature(method).parameters.values()]
        count = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in given)
        words = tuple(each.name for each in given if each.kind is each.KEYWORD_ONLY)
        yield name, takes(getattr(own, name), count, words)


def probe_connector(interface: str, connectors: Path, finding: Finding) -> None:
    from engines import uses
    from kvfs.connectors import versions

    modules = {}
    for name in CONNECTORS[interface]:
        module = f"kvfs.connectors.{name}"
        modules[name] = finding.attempt(f"import {module}", importlib.import_module, module)
    for part in versions.parts(interface):
        for lacking in versions.probe(part):
            finding.look(lacking, False)
    for name, module in modules.items():
        used = uses.of_connector(name, connectors)
        for target in sorted(used.names | used.inherited):
            owner, attribute = _split(target)
            there = finding.attempt(target, found, owner)
            if there is not None and attribute:
                finding.look(target, has(there, attribute))
        for call in sorted(used.calls):
            there = finding.attempt(call.target, found, call.target)
            if there is not None:
                finding.look(f"{call.target}()", not (why := takes(there, call.count, call.names)), why)
        for own_name, target in sorted(used.bases.items()):
            own, base = getattr(module, own_name, None), finding.attempt(target, found, target)
            if own is None or base is None:
                continue
            abstract = sorted(getattr(own, "__abstractmethods__", ()))
            finding.look(f"{own_name} is abstract", not abstract, ", ".join(abstract))
            for method, why in overridden(own, base):
                finding.look(f"{own_name}.{method}() as {target} has it", not why, why)


def probe_taken(targets: dict[str, int | None]) -> list[str]:
    """Those that are not there, or cannot be called so. The connector works without them."""
    finding = Finding()
    for target, count in targets.items():
        owner, attribute = _split(target)
        there = finding.attempt(target, found, owner)
        if there is None:
            continue
        if attribute and not has(there, attribute):
            finding.look(target, False)
        elif count is not None:
            why = takes(getattr(there, attribute, None) if attribute else there, count + bool(attribute), ())
            finding.look(f"{target}()", not why, why)
    return finding.missing


def _split(target: str) -> tuple[str, str]:
    """Of module:Name.attribute the owner and the attribute; of module:Name alone no attribute."""
    module, _, names = target.partition(":")
    name, _, attribute = names.partition(".")
    return f"{module}:{name}", attribute


def probe_lmcache(finding: Finding) -> None:
    """LMCache calls its native client by name: what its adapter calls, the connector has."""
    from kvfs.connectors.lmcache import KvfsClient

    module = "lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter"
    adapter = finding.attempt(module, importlib.import_module, module)
    if adapter is None:
        return
    called = {
        (node.func.attr, len(node.args))
        for node in ast.walk(ast.parse(inspect.getsource(adapter)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("self._client", "native_client")
    }
    finding.look(f"calls of the client in {module}", len(called) >= 5, str(sorted(called)))
    for name, count in sorted(called):
        method = getattr(KvfsClient, name, None)
        why = takes(method, count + 1, ()) if method is not None else "the connector has none"
        finding.look(f"KvfsClient.{name}()", not why, why)


def probe_nixl(repository: Path, finding: Finding) -> None:
    """NIXL loads the plugin, which asks for its mount: it was not refused, by number or by the shape of the vtable."""
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as log:
        from kvfs.client import nixl as plugin

        plugins = finding.attempt("kvfs nixl-plugins", plugin.make, Path(directory) / "plugins", None)
        os.environ.update(NIXL_PLUGIN_DIR=str(plugins.directory if plugins else directory), NIXL_LOG_LEVEL="INFO")
        said = [os.dup(1), os.dup(2)]
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        refused = ""
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            agent = nixl_agent("probe", nixl_agent_config(backends=[]))
            agent.create_backend("KVFS", {})
        except Exception as error:
            refused = str(error)
        finally:
            os.dup2(said[0], 1)
            os.dup2(said[1], 2)
        log.seek(0)
        words = log.read().decode(errors="replace")
        told = [line for line in words.splitlines() if "kvfs" in line.lower() and "Discovered" not in line]
        reason = (told or [f"{words[-300:]} {refused}"])[-1]
        finding.look("libplugin_KVFS.so is loaded", "'mount' is missing" in words, reason)


def probe_mooncake(finding: Finding) -> None:
    """Its store, and the program of its master."""
    store = finding.attempt("mooncake.store", importlib.import_module, "mooncake.store")
    for name in ("MooncakeDistributedStore", "MooncakeHostMemAllocator", "ReplicateConfig"):
        if store is not None:
            finding.look(f"mooncake.store:{name}", hasattr(store, name))
    spec = importlib.util.find_spec("mooncake")
    places = [Path(place) / "mooncake_master" for place in (spec.submodule_search_locations or [])] if spec else []
    finding.look("mooncake_master", any(place.exists() for place in places))


def stub_torchvision() -> None:
    """SGLang imports it, and it is left out: for a CPU it comes with CUDA's libraries. Nothing here calls it."""
    import transformers.utils.import_utils  # noqa: F401  (looks for torchvision itself, so first)

    def stubbed(attribute: str) -> object:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return types.SimpleNamespace()

    if importlib.util.find_spec("torchvision") is None:
        for name in ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional"):
            module = types.ModuleType(name)
            module.__spec__ = importlib.util.spec_from_loader(name, None)
            module.__getattr__ = stubbed  # type: ignore[method-assign]
            sys.modules[name] = module


def stub_ucm() -> None:
    """UCM's wheel is for another Python: its files in Python are loaded alone, without its packages' own imports."""
    import logging

    at = next((Path(entry) for entry in sys.path if Path(entry, "ucm/store").is_dir()), Path())
    for name in ("ucm", "ucm.store", "ucm.store.pipeline"):
        package = types.ModuleType(name)
        package.__path__ = [str(at.joinpath(*name.split(".")))]
        sys.modules[name] = package
    logger = types.ModuleType("ucm.logger")
    logger.init_logger = logging.getLogger  # type: ignore[attr-defined]
    sys.modules["ucm.logger"] = logger


def main() -> None:
    interface, repository = sys.argv[1], Path(sys.argv[2])
    # Python put the folder of this file there, whose modules have names of others.
    sys.path[0] = str(repository / "tools")
    finding = Finding()
    if interface.startswith("sglang"):
        stub_torchvision()
    if interface == "ucm":
        stub_ucm()
    if interface in CONNECTORS:
        probe_connector(interface, repository / "kvfs/connectors", finding)
    if interface == "lmcache":
        probe_lmcache(finding)
    elif interface == "nixl":
        probe_nixl(repository, finding)
    elif interface == "mooncake":
        probe_mooncake(finding)
    missing = list(dict.fromkeys(finding.missing))
    without = probe_taken(TAKEN.get(interface, {}))
    print("\n" + json.dumps({"looked_for": finding.looked_for, "missing": missing, "without": without}))


if __name__ == "__main__":
    main()
