"""A connector's uses of its engine, by its source: names that it imports, attributes of them, arguments that it gives.

An engine's objects have no types in a connector. OBJECTS says of which class a parameter is; a unit test asks that each
parameter of which an attribute is used is listed. An attribute that getattr() looks for with a default, or an import
whose failure is caught, is no use.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ENGINES = ("vllm", "sglang", "lmcache", "ucm")
_STORAGE = "sglang.srt.mem_cache.hicache_storage"
_OFFLOAD = "vllm.v1.kv_offload"
# By connector: the class, as module:Name, of each parameter that is an engine's.
OBJECTS: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "offloading_spec": f"{_OFFLOAD}.base:OffloadingSpec",
        "req_context": f"{_OFFLOAD}.base:ReqContext",
        "job_metadata": f"{_OFFLOAD}.tiering.base:TransferJob",
        "context": f"{_OFFLOAD}.base:ScheduleEndContext",
    },
    "sglang": {
        "config": f"{_STORAGE}:HiCacheStorageConfig",
        "transfer": f"{_STORAGE}:PoolTransfer",
        "mem_pool_host": "sglang.srt.mem_cache.pool_host.mha:MHATokenToKVPoolHost",
    },
    "sglang_pools": {"host": "sglang.srt.mem_cache.pool_host.mha:MHATokenToKVPoolHost"},
    "sglang_linker": {
        "params": "sglang.srt.mem_cache.cache_init_params:CacheInitParams",
        "entry": "sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler:DevicePoolEntry",
        "transfer": f"{_STORAGE}:PoolTransfer",
    },
    "lmcache_remote": {
        "chunk": "lmcache.v1.memory_management:MemoryObj",
        "context": "lmcache.v1.storage_backend.connector:ConnectorContext",
        "config": "lmcache.v1.config:LMCacheEngineConfig",
        "metadata": "lmcache.v1.metadata:LMCacheMetadata",
        "key": "lmcache.utils:CacheEngineKey",
    },
}
# Read only where the engine says before that it has them: its transfers of groups of pages.
OPTIONAL = frozenset({f"{_STORAGE}:PoolTransfer.{name}" for name in ("group_pages", "block_pages")})
# Parameters whose attributes are not an engine's, but Python's own.
OTHERS: Mapping[str, frozenset[str]] = {"lmcache_remote": frozenset({"loop"})}


@dataclass(frozen=True, order=True)
class Call:
    """A call of an engine's class or function, as module:Name: so many arguments without a name, and these names."""

    target: str
    count: int
    names: tuple[str, ...]


@dataclass
class Uses:
    names: set[str] = field(default_factory=set)  # module:Name, and module:Name.attribute
    calls: set[Call] = field(default_factory=set)
    bases: dict[str, str] = field(default_factory=dict)  # own class -> module:Name of the engine's that it extends
    inherited: set[str] = field(default_factory=set)  # module:Name.attribute of self that the base has to have


def of_source(source: str, objects: Mapping[str, str]) -> Uses:
    tree, uses = ast.parse(source), Uses()
    names = _imported(tree)
    uses.names |= {target for target in names.values() if ":" in target}
    given = _given(tree, objects)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            target = names.get(owner) or given.get(node.value)
            if owner.startswith("self."):
                target = objects.get(owner.removeprefix("self.").lstrip("_"))
            if target is not None and isinstance(node.ctx, ast.Load):
                uses.names.add(f"{target}.{node.attr}" if ":" in target else f"{target}:{node.attr}")
        elif isinstance(node, ast.Call):
            called = names.get(ast.unparse(node.func))
            if called is not None and not any(isinstance(each, ast.Starred) for each in node.args):
                words = tuple(sorted(word.arg for word in node.keywords if word.arg))
                uses.calls.add(Call(called, len(node.args), words))
        elif isinstance(node, ast.ClassDef):
            for base in node.bases:
                if (target := names.get(ast.unparse(base))) is not None:
                    uses.bases[node.name] = target
                    uses.inherited |= {f"{target}.{name}" for name in _not_own(node)}
    return uses


def of_connector(name: str, connectors: Path) -> Uses:
    uses = of_source((connectors / f"{name}.py").read_text(), OBJECTS.get(name, {}))
    uses.names -= OPTIONAL
    return uses


def _untyped(tree: ast.Module) -> Iterator[tuple[ast.AST, set[str]]]:
    """Each function, with its parameters without a type."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            yield node, {each.arg for each in arguments if each.annotation and ast.unparse(each.annotation) == "Any"}


def _given(tree: ast.Module, objects: Mapping[str, str]) -> dict[ast.expr, str]:
    """The places where a parameter is named that is an engine's object, with its class."""
    return {
        node: objects[node.id]
        for function, names in _untyped(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and node.id in names and node.id in objects
    }


def _imported(tree: ast.Module) -> dict[str, str]:
    """Local names of what is imported of engines: module, or module:Name. Not what is tried to be imported."""
    found: dict[str, str] = {}
    tried = {node for caught in ast.walk(tree) if _passes_over(caught) for node in ast.walk(caught)}
    for node in ast.walk(tree):
        if node in tried:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in ENGINES:
                    found[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ENGINES and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}:{alias.name}"
    return found


def _passes_over(node: ast.AST) -> bool:
    """Whether it is a try statement that goes on where an import, or what it imports, fails."""
    return isinstance(node, ast.Try) and not any(
        isinstance(each, ast.Raise) for handler in node.handlers for each in ast.walk(handler)
    )


def _not_own(node: ast.ClassDef) -> Iterator[str]:
    """Attributes of self that a class reads and does not make."""
    own = {each.name for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))}
    read: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            own.add(each.target.id)
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
            (read if isinstance(each.ctx, ast.Load) else own).add(each.attr)
        elif (
            isinstance(each, ast.Attribute)
            and isinstance(each.value, ast.Call)
            and ast.unparse(each.value.func) == "super"
        ):
            read.add(each.attr)
            own.discard(each.attr)
    yield from sorted(read - own)


def unlisted(name: str, source: str) -> set[str]:
    """Parameters without a type of which attributes are used, and that OBJECTS does not list."""
    used = {
        node.value.id
        for function, names in _untyped(ast.parse(source))
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names
    }
    return used - set(OBJECTS.get(name, {})) - OTHERS.get(name, frozenset())
