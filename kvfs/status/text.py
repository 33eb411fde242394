"""A status document as text: `kvfs status` like `zpool status`, `kvfs stats` like iostat.

Works on the status document that the daemon sends over the control socket (docs/operations.md lists its fields). Knows
neither the daemon nor the data plane. Everything here is pure: documents in, text out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvfs.errors import printable
from kvfs.status.holder import holder_advice, holder_text
from kvfs.status.numbers import (
    EXPORT_ERRORS,
    Json,
    age_text,
    asked_and_found,
    count_text,
    items,
    latency_summary,
    number,
    section,
    table,
    time_text,
)  # fmt: skip
from kvfs.status.pod import pod_advice, pod_lines, pod_table, stats_cells, stats_heads
from kvfs.units import counted, size_text

# The part of the table of names that is no reason for advice.
_NAMES_MANY = 0.5
_SEGMENT_STATES = ("free", "open", "closed", "evicting", "lost")


def advice(status: Json) -> list[str]:
    """Facts that the operator should know or act on, worst first."""
    found = [str(item) for item in cast(Sequence[object], status.get("advice", ()))]
    for device in items(status, "devices"):
        state = str(device.get("state", ""))
        if state.startswith(("failed", "returning", "slow")) and device.get("reason"):
            what = {
                "failed": "its blocks are misses until it is back; kvfs device replace or remove, if it does not come",
                "slow": "it gets no new segments while others can take them",
            }.get(state, "its blocks are being looked for")
            who = f"device {device.get('index')} {device.get('path')}"
            found.append(f"{who} is {state}: {device.get('reason')}; {what}")
            continue
        errors, timeouts = number(device, "errors"), number(device, "timeouts")
        if errors or timeouts:
            found.append(
                f"device {device.get('path')}: {counted(errors, 'error')}, {counted(timeouts, 'timeout')}; "
                "see kvfs.log in the pool"
            )
    found += [*holder_advice(status), *pod_advice(status)]
    for export in items(status, "exports"):
        broken = number(export, "protocol_errors") + number(export, "descriptor_errors")
        if broken:
            found.append(
                f"export {export.get('socket')}: {counted(broken, 'breach of the protocol')}; its "
                "front end or guest is broken or hostile"
            )
    counters = section(status, "counters")
    if number(counters, "checksum_errors"):
        bad = number(counters, "checksum_errors")
        found.append(f"{counted(bad, 'block')} failed the checksum and went; check the devices")
    if number(counters, "commit_failures"):
        found.append("the index cannot be committed: is the filesystem that holds the pool full?")
    if number(counters, "forward_timeouts"):
        found.append(
            f"{counted(number(counters, 'forward_timeouts'), 'request')} got no answer in time and failed with EIO"
        )
    found += _staging_advice(status)
    space = section(status, "space")
    size = number(space, "size")
    if size and number(space, "pinned") > size / 2:
        found.append(
            f"{number(space, 'pinned') * 100 / size:.0f}% of the pool is pinned; what is not pinned is evicted sooner"
        )
    return found + _names_advice(status)


def _names_advice(status: Json) -> list[str]:
    """Names that eviction cannot take are many, of all or of one user."""
    size, kept = number(status, "names", "size"), number(status, "names", "kept")
    how = "remove those that nobody needs: find DIR -type d -empty -delete"
    what = "directories, links and unfinished files, which are not evicted"
    found = [
        f"{user.get('name')} has {number(user, 'names'):.0f} {what}: it can make no more directories; {how}"
        for user in items(status, "users")
        if number(user, "names_beyond")
    ]
    if size and kept > size * _NAMES_MANY:
        found.append(f"{kept * 100 / size:.0f}% of the table of names is {what}; {how}")
    return found


def _staging_advice(status: Json) -> list[str]:
    """The holder of most memory of files being written, while that is short."""
    counters, users = section(status, "counters"), items(status, "users")
    if not number(counters, "staging_short"):
        return []
    most = max(users, key=lambda user: number(user, "staged"), default=None)
    who = "" if most is None else f", {size_text(number(most, 'staged'))} of that by {most.get('name')}"
    refused = [str(user.get("name")) for user in users if number(user, "staging_refusals")]
    end = f"; writes of {', '.join(refused)} were refused" if refused else ""
    used, size, share = (
        number(counters, "staged_bytes"),
        number(counters, "staging_size"),
        number(status, "staging_share"),
    )
    return [
        f"memory for files being written is short: {size_text(used)} of {size_text(size)} in use{who} (share of one "
        f"user {size_text(share)}){end}; close files that are written, or mount with more --staging"
    ]


_KEPT = {
    "pinned": "pinned",
    "open": "open",
    "leased": "leased by a native client",
    "grouped": "in a group with one that is pinned or open",
    "others": "stored meanwhile, or on a device that is away",
}


def render_evicted(result: Json) -> str:
    """The text of `kvfs evict`: how much went, and what stayed and why."""
    lines = [
        f"evicted {counted(number(result, 'evicted_blocks'), 'block')} of "
        f"{size_text(number(result, 'evicted_bytes'))}; {counted(number(result, 'evicted_segments'), 'segment')} freed"
    ]
    if result.get("dry_run"):
        blocks, size = number(result, "evictable_blocks"), size_text(number(result, "evictable_bytes"))
        lines = [f"{counted(blocks, 'block')} of {size} may go; nothing was evicted"]
    kept = section(result, "kept")
    for why, text in _KEPT.items():
        some = section(kept, why)
        count = number(some, "blocks")
        if not count:
            continue
        found = [str(name) for name in cast(Sequence[object], some.get("names", ()))]
        names = ", ".join(printable(name) for name in found)
        more = ", ..." if count > len(found) else ""
        lines.append(f"kept {counted(count, 'block')}, {size_text(number(some, 'bytes'))}, {text}: {names}{more}")
    return "\n".join(lines)


def render_removed(result: Json) -> str:
    """The text of `kvfs rm` of one place."""
    path = printable(str(result.get("path")))
    if "blocks" in result:
        pins = len(items(result, "pins"))
        pinned = f", {counted(pins, 'pin')} among them" if pins else ""
        blocks, size = counted(number(result, "blocks"), "block"), size_text(number(result, "bytes"))
        return f"{path}: {blocks} of {size} would go{pinned}; nothing was removed"
    files, size = counted(number(result, "files"), "file"), size_text(number(result, "bytes"))
    lines = [f"{path}: removed {files} of {size} and {counted(number(result, 'directories'), 'directory')}"]
    if opened := number(result, "open"):
        are = "is" if opened == 1 else "are"
        lines.append(f"  note: {opened:.0f} of them {are} open; its space is free after the last close")
    if shared := number(result, "shared"):
        lines.append(f"  note: {_stay(shared)}: other nodes have such names too; kvfs rm there")
    return "\n".join(lines)


def _stay(directories: float) -> str:
    return f"{counted(directories, 'directory')} {'stays' if directories == 1 else 'stay'}"


def told_filled(result: Json) -> str:
    """Why `kvfs rm` has failed at a place, or nothing."""
    filled = number(result, "filled")
    where = printable(str(result.get("path")))
    return f"{where}: {_stay(filled)}: blocks are stored there all the time" if filled else ""


def _user_rows(status: Json) -> list[list[str]]:
    """The holders of blocks that eviction leaves alone."""
    title = f"user (share {size_text(number(status, 'share'))})"
    rows = [[title, "open", "writing", "staged", "pinned", "reserved", "slabs", "evicted open", "names"]]
    for user in items(status, "users"):
        kinds = ("open", "writing", "staged", "pinned", "reserved", "slabs")
        sizes = [size_text(number(user, kind)) for kind in kinds]
        counts = [f"{number(user, kind):.0f}" for kind in ("evicted_open", "names")]
        rows.append([str(user.get("name")), *sizes, *counts])
    return rows


def _names_text(status: Json) -> str:
    """The table of names, where it fills before the pool does."""
    names = section(status, "names")
    size, used = number(names, "size"), number(names, "used")
    if not size or used < size * _NAMES_MANY:
        return ""
    return f", names {used:.0f} of {size:.0f} ({number(names, 'kept'):.0f} not evictable)"


def memory_text(status: Json) -> str:
    """The memory that the daemon gives to files being written and to reads, and its cgroup's limit."""
    memory = section(status, "memory")
    sizes = [size_text(number(memory, key)) for key in ("staging_size", "read_memory_size")]
    limit = f", cgroup's limit {size_text(number(memory, 'limit'))}" if memory.get("limit") else ""
    return f"staging {sizes[0]}, reads {sizes[1]}{limit}"


def _read_ahead_text(ahead: Json) -> str:
    """Return how far the kernel reads ahead, with the reason where that is less than was asked for."""
    size, asked = ahead.get("size"), number(ahead, "asked")
    if size is None:
        return f"unknown: {ahead.get('why')}"
    told = f"the kernel reads {size_text(number(ahead, 'size'))} ahead"
    return told if number(ahead, "size") >= asked else f"{told}, not {size_text(asked)}: {ahead.get('why')}"


def render_status(status: Json) -> str:
    """The text of `kvfs status`."""
    pool, segments, space = section(status, "pool"), section(status, "segments"), section(status, "space")
    counters = section(status, "counters")
    lines = [f"  pool: {pool.get('path')}", f"  uuid: {pool.get('uuid')}", f" state: {pool.get('state')}"]
    if "pid" in pool:
        lines[-1] += f" (pid {number(pool, 'pid'):.0f}, epoch {number(pool, 'epoch'):.0f})"
    for mount in items(status, "mounts"):
        idmap = " (idmap: shares go by files' owners, and root has one)" if mount.get("idmap") else ""
        lines.append(f" mount: {mount.get('mountpoint')}{idmap}")
    if "read_ahead" in status:
        lines.append(f" ahead: {_read_ahead_text(section(status, 'read_ahead'))}")
    for export in items(status, "exports"):
        guest = "connected" if number(export, "connected") else "waiting for a front end"
        lines.append(f"export: {export.get('socket')} (tag {export.get('tag')}): {guest}")
    if "rings" in status:
        lines.append(f" rings: {status['rings']}")
    if "memory" in status:
        lines.append(f"memory: {memory_text(status)}")
    if "holder" in status:
        lines.append(f"  held: {holder_text(status)}")
    notes = advice(status)
    lines.append(f"advice: {notes[0] if notes else 'nothing to do'}")
    lines += [f"        {note}" for note in notes[1:]]
    if space:
        size = number(space, "size")
        used = number(space, "used")
        share = f" ({used * 100 / size:.1f}%)" if size else ""
        lines.append(
            f"   use: {size_text(used)} of {size_text(size)}{share}, pinned {size_text(number(space, 'pinned'))}, "
            f"slabs {size_text(number(space, 'slabs'))}, blocks {number(status, 'blocks'):.0f}" + _names_text(status)
        )
    if segments:
        devices = [device for device in items(status, "devices") if device.get("state") != "removed"]
        everywhere = 1 < len(devices) == number(segments, "stripe_width")
        states = ", ".join(
            f"{number(segments, key):.0f} {key}"
            for key in _SEGMENT_STATES
            if key in segments and (key != "lost" or number(segments, key))
        )
        lines.append(
            f"layout: {counted(number(segments, 'count'), 'segment')} of {size_text(number(segments, 'size'))}, width "
            f"{number(segments, 'stripe_width'):.0f}, unit {size_text(number(segments, 'stripe_unit'))}"
            + (", all of them on every device" if everywhere else "")
            + (f": {states}" if states else "")
        )
    lines += pod_lines(status)
    lines += ["", *(f"  {line}" for line in render_device_list(status))]
    owners = pod_table(status)
    if owners:
        lines += ["", *(f"  {line}" for line in owners)]
    if items(status, "users"):
        lines += ["", *table(_user_rows(status), indent="  ")]
    if items(status, "exports"):
        lines += ["", *table(_export_rows(status), indent="  ")]
    if counters:
        asked, found_share = asked_and_found(counters)
        found = "-" if found_share is None else f"{found_share * 100:.1f}%"
        lines += [
            "",
            f"  blocks asked for {asked:.0f}, found {found}; "
            f"read {size_text(number(counters, 'read_bytes'))}, written {size_text(number(counters, 'write_bytes'))}",
            f"  evicted {counted(number(counters, 'evicted_blocks'), 'block')} in "
            f"{counted(number(counters, 'evicted_segments'), 'segment')}, "
            f"carried over {number(counters, 'carried_blocks'):.0f}; dropped bad {number(counters, 'bad_blocks'):.0f}",
            f"  parents known of {counted(number(counters, 'parents_known'), 'block')}, orphans "
            f"{number(counters, 'orphans'):.0f}; evicted and remembered {number(counters, 'ghosts'):.0f}, "
            f"came back {number(counters, 'ghosts_returned'):.0f}",
            *_native_line(counters),
        ]
    errors = (
        number(counters, "checksum_errors")
        + number(counters, "read_errors")
        + sum(number(d, "errors") for d in items(status, "devices"))
    )
    lines.append(f"errors: {f'{errors:.0f}, see advice' if errors else 'none known'}")
    return "\n".join(printable(line) for line in lines)


def render_device_list(status: Json) -> list[str]:
    """The text of `kvfs device list`: since the mount."""
    rows = [["device", "size", "state", "read", "written", "errors", "timeouts", "rd p99", "wr p99"]]
    for device in items(status, "devices"):
        times = [latency_summary(section(section(device, "latency"), kind)) for kind in ("read", "write")]
        rows.append(
            [
                f"{number(device, 'index'):.0f} {device.get('path')}",
                size_text(number(device, "size")),
                str(device.get("state", "-")),
                size_text(number(device, "read_bytes")),
                size_text(number(device, "write_bytes")),
                f"{number(device, 'errors'):.0f}",
                f"{number(device, 'timeouts'):.0f}",
                *(time_text(summary["p99_us"]) if summary["count"] else "-" for summary in times),
            ]
        )
    return table(rows)


def render_list(document: Json, *, pins_only: bool = False) -> str:
    """The text of `kvfs list`."""
    spaces, pins = items(document, "namespaces"), items(document, "pins")
    whole = [{**section(document, "total"), "path": "total"}] if len(spaces) > 1 else []
    lines = [] if pins_only else _places("namespace", [*spaces, *whole])
    if pins or pins_only:
        lines += [*([""] if lines else []), *_places("pinned", pins)]
    age_s = number(document, "age_s")
    if age_s >= 0.1:
        lines += ["", f"counted {age_s:.1f} s ago (--fresh: now)"]
    return "\n".join(lines)


def _places(head: str, places: Sequence[Json]) -> list[str]:
    rows = [[head, "blocks", "bytes", "hits", "unused", "newest", "oldest"]]
    for place in places:
        ages = [age_text(number(place, key)) if key in place else "-" for key in ("newest_s", "oldest_s")]
        rows.append(
            [
                str(place.get("path")),
                f"{number(place, 'blocks'):.0f}",
                size_text(number(place, "bytes")),
                count_text(number(place, "hits")),
                size_text(number(place, "unused_bytes")) if "unused_bytes" in place else "-",
                *ages,
            ]
        )
    return table(rows)


def _export_rows(status: Json) -> list[list[str]]:
    """The requests of front ends, one row an export."""
    rows = [["export", "queues", "connections", "requests", "read", "zero copy", "written", "errors"]]
    for export in items(status, "exports"):
        rows.append(
            [
                str(export.get("socket")),
                f"{number(export, 'queues_running'):.0f}",
                f"{number(export, 'connections'):.0f}",
                f"{number(export, 'requests'):.0f}",
                size_text(number(export, "bytes_read")),
                _uncopied(export),
                size_text(number(export, "bytes_written")),
                f"{export_errors(export):.0f}",
            ]
        )
    return rows


def _uncopied(export: Json) -> str:
    """The share of bytes read that no CPU has copied."""
    total = number(export, "bytes_read")
    return f"{number(export, 'zero_copy_bytes') * 100 / total:.1f}%" if total else "-"


def export_errors(export: Json) -> float:
    return sum(number(export, key) for key in EXPORT_ERRORS)


def _native_line(counters: Json) -> list[str]:
    """The requests of native clients, if there ever was one."""
    if not number(counters, "native_clients") and not number(counters, "native_lookups"):
        return []
    return [
        f"  native: {counted(number(counters, 'native_clients'), 'client')}; read "
        f"{counted(number(counters, 'native_gets'), 'block')} ({size_text(number(counters, 'native_get_bytes'))}), "
        f"stored {number(counters, 'native_puts'):.0f} ({size_text(number(counters, 'native_put_bytes'))}); "
        f"prestaged {number(counters, 'native_prestaged'):.0f}, used {number(counters, 'native_prestage_used'):.0f}, "
        f"wasted {number(counters, 'native_prestage_wasted'):.0f}; reservations "
        f"{number(counters, 'reservations_open'):.0f} open, {number(counters, 'reservations_reclaimed'):.0f} reclaimed"
        f"; leased {counted(number(counters, 'leased_blocks'), 'block')} "
        f"({size_text(number(counters, 'leased_bytes'))}) by {counted(number(counters, 'leased_clients'), 'client')}"
    ]


def render_stats_header(change: Json) -> str:
    heads = (
        "asked/s",
        "hit%",
        "open/s",
        "read/s",
        "read B/s",
        "write B/s",
        "fwd/s",
        "rd p50",
        "rd p99",
        "use%",
        "evict/s",
        *stats_heads(change),
    )
    return "  ".join(head.rjust(9) for head in heads)


def render_stats_line(change: Json) -> str:
    """One line of `kvfs stats`, from a difference()."""
    seconds = number(change, "seconds") or 1.0
    counters = section(change, "counters")
    asked, share = asked_and_found(counters)
    read = latency_summary(section(section(change, "latency"), "read"))
    size = number(change, "space", "size")
    cells = (
        count_text(asked / seconds),
        "-" if share is None else f"{share * 100:.1f}",
        count_text(number(counters, "opens") / seconds),
        count_text(number(counters, "reads") / seconds),
        size_text(number(counters, "read_bytes") / seconds),
        size_text(number(counters, "write_bytes") / seconds),
        count_text(number(counters, "forwarded") / seconds),
        time_text(read["p50_us"]) if read["count"] else "-",
        time_text(read["p99_us"]) if read["count"] else "-",
        f"{number(change, 'space', 'used') * 100 / size:.1f}" if size else "-",
        count_text(number(counters, "evicted_blocks") / seconds),
        *stats_cells(change, seconds),
    )
    return "  ".join(cell.rjust(9) for cell in cells)


def render_stats(change: Json) -> str:
    """The text of one `kvfs stats` without an interval: rates since the mount, latencies, devices."""
    seconds = number(change, "seconds") or 1.0
    lines = [render_stats_header(change), render_stats_line(change), ""]
    rows = [["operation", "count", "mean", "p50", "p90", "p99", "p99.9"]]
    for name, value in section(change, "latency").items():
        summary = latency_summary(cast(Json, value))
        times = [
            time_text(summary[key]) if summary["count"] else "-"
            for key in ("mean_us", "p50_us", "p90_us", "p99_us", "p99.9_us")
        ]
        rows.append([name, f"{summary['count']:.0f}", *times])
    lines += [*table(rows), "", *_native_line(section(change, "counters"))]
    lines += render_devices(change, seconds)
    owners = pod_table(change, seconds)
    if owners:
        lines += ["", *owners]
    if items(change, "exports"):
        lines += ["", *render_exports(change, seconds)]
    return "\n".join(lines)


def render_exports(change: Json, seconds: float) -> list[str]:
    rows = [["export", "guest", "req/s", "read B/s", "zero copy", "write B/s", "errors"]]
    for export in items(change, "exports"):
        rows.append(
            [
                str(export.get("socket")),
                "connected" if number(export, "connected") else "none",
                count_text(number(export, "requests") / seconds),
                size_text(number(export, "bytes_read") / seconds),
                _uncopied(export),
                size_text(number(export, "bytes_written") / seconds),
                f"{export_errors(export):.0f}",
            ]
        )
    return table(rows)


def render_devices(change: Json, seconds: float) -> list[str]:
    rows = [["device", "r/s", "read B/s", "r_await", "w/s", "write B/s", "w_await", "errors"]]
    for device in items(change, "devices"):
        reads, writes = number(device, "reads"), number(device, "writes")
        rows.append(
            [
                str(device.get("path")),
                count_text(reads / seconds),
                size_text(number(device, "read_bytes") / seconds),
                time_text(number(device, "read_ns") / reads / 1000) if reads else "-",
                count_text(writes / seconds),
                size_text(number(device, "write_bytes") / seconds),
                time_text(number(device, "write_ns") / writes / 1000) if writes else "-",
                f"{number(device, 'errors'):.0f}",
            ]
        )
    return table(rows)
