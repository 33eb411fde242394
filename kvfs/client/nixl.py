"""`kvfs nixl-plugins`: a directory of links in which NIXL finds its own plugins and libplugin_KVFS.so.

NIXL looks for plugins in one directory, and NIXL_PLUGIN_DIR replaces the one next to its library. A plugin's own
libraries are looked for from where the plugin was opened, which is the link. So the directory has the layout of the
wheel: `lib/plugins` with the plugins, `lib` with NIXL's libraries, and `<package>.libs` with other libraries. No
LD_LIBRARY_PATH is needed, and variables may be set by the program itself before it imports nixl.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvfs.errors import MissingFeatureError, UsageError

LIB = Path(__file__).resolve().parents[1] / "lib"
PLUGIN = LIB / "libplugin_KVFS.so"
# Found beside the plugin, which needs it.
LIBKVFS = LIB / "libkvfs.so.1"
VARIABLE = "NIXL_PLUGIN_DIR"


@dataclass(frozen=True)
class Plugins:
    """NIXL's library, the directory made for it (the value of NIXL_PLUGIN_DIR), and the names of plugins there."""

    nixl: Path
    directory: Path
    names: list[str]


def make(directory: Path, nixl: Path | None) -> Plugins:
    """Make the directory, or bring it up to date. nixl: where to look for libnixl.so; None: next to the packages of
    this Python. UsageError if there is none, or more than one, or if something that is no link is in the way.
    MissingFeatureError if the plugin is not built.
    """
    if not PLUGIN.exists():
        raise MissingFeatureError(f"{PLUGIN}: not built; g++ is needed, then tools/setup")
    library = find(nixl)
    directory = directory.absolute()
    lib, plugins = directory / "lib", directory / "lib/plugins"
    wanted = {
        **{plugins / path.name: path for path in library.parent.glob("plugins/*.so")},
        **{lib / path.name: path for path in library.parent.iterdir() if path.is_file()},
        **{directory / path.name: path for path in library.parent.parent.glob("nixl*.libs")},
        **{plugins / path.name: path for path in (PLUGIN, LIBKVFS)},
    }
    plugins.mkdir(parents=True, exist_ok=True)
    for room in (directory, lib, plugins):
        for path in room.iterdir():
            if path.is_symlink() and path not in wanted:
                path.unlink()
    for link, target in wanted.items():
        _link(link, target)
    names = sorted(path.name[len("libplugin_") : -len(".so")] for path in plugins.glob("libplugin_*.so"))
    return Plugins(library, plugins, names)


def _link(link: Path, target: Path) -> None:
    if link.exists() and not link.is_symlink():
        raise UsageError(f"{link}: in the way of a link; give a new directory, or one that this command has made")
    if link.is_symlink() and link.readlink() == target:
        return
    # Under another name first: an engine that starts now finds the old one or the new one.
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.rename(link)


def find(given: Path | None) -> Path:
    """NIXL's library. given: itself, its directory, or a directory of packages or an environment that has it."""
    places = [Path(place) for place in sys.path if place] if given is None else [given.absolute()]
    found = list(dict.fromkeys(path.resolve() for place in places for path in _libraries(place)))
    where = "the packages of this Python" if given is None else str(given)
    if not found:
        raise UsageError(f"{where}: no NIXL (libnixl.so beside a directory of plugins); --nixl PATH says where it is")
    if len(found) > 1:
        listed = ", ".join(map(str, found))
        raise UsageError(f"{where}: more than one NIXL: {listed}; --nixl PATH says which")
    return found[0]


def _libraries(place: Path) -> Iterator[Path]:
    patterns = (
        "libnixl.so",
        ".nixl*.mesonpy.libs/libnixl.so",
        "lib/python3*/site-packages/.nixl*.mesonpy.libs/libnixl.so",
    )
    candidates = [place] if place.is_file() else [path for pattern in patterns for path in sorted(place.glob(pattern))]
    for path in candidates:
        if path.name == "libnixl.so" and (path.parent / "plugins").is_dir():
            yield path


def environment(plugins: Plugins) -> dict[str, str]:
    """The variables of an engine that shall find them."""
    return {VARIABLE: os.fspath(plugins.directory)}
