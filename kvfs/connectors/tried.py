"""Versions of each engine that kvfs passed with. `tools/engine-matrix --write` writes this file.

One line for each engine: native/shims/nixl/Makefile takes NIXL's out of here.
"""

DATE = "2026-11-29"
VERSIONS: dict[str, tuple[str, ...]] = {
    "vllm": ("0.31.0", "0.32.0", "0.33.0"),
    "sglang": ("0.5.21", "0.5.22", "0.5.23"),
    "sglang linker": ("0.5.23",),
    "lmcache": ("0.5.4", "0.5.5", "0.5.6"),
    "nixl": ("1.3.2", "1.4.1", "1.5.0", "1.5.1"),
    "mooncake": ("0.3.11.post1", "0.3.13.post1"),
    "ucm": ("0.7.0", "0.8.0", "0.8.1"),
}
