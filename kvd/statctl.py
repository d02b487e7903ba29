"""`python -m kvd.statctl`: print a running daemon's counters, and why there are no hits."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from kvd import protocol
from kvd.commands import arguments, readers, running
from kvd.results import Latency, MemoryStats, Stats
from kvd.slab_geometry import PAGE_BYTES
from tablespace import format_size

TIMEOUT_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counters; return 0, 1 when no daemon answers, 2 for usage."""
    return running.run("statctl", argv, _statctl)


def _statctl(argv: list[str]) -> int:
    parser = arguments.Parser(prog="kvd statctl", description=__doc__, allow_abbrev=False)
    parser.add_argument("--socket", metavar="PATH", help="default: as the client's")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--block-bytes",
        metavar="SIZE",
        type=readers.size,
        help="of an engine's block: says how many fit",
    )
    parser.add_argument(
        "--block-tokens", metavar="N", type=readers.count, help="tokens in one: says how many fit"
    )
    flags, names = arguments.parse(parser, argv)
    if names:
        parser.error(f"{names[0]!r} is no option")
    block_bytes, block_tokens = flags.block_bytes or 0, flags.block_tokens or 0
    stats = running.ask(
        flags.socket, protocol.StatsRequest(), protocol.StatsReply, TIMEOUT_S, otherwise=""
    ).stats
    # Its own session asks for nothing and is nobody's engine.
    stats = msgspec.structs.replace(stats, sessions=max(0, stats.sessions - 1))
    reason = no_hits_reason(stats)
    if flags.json:
        document = stats.to_dict()
        document["no_hits_reason"] = reason
        document["fit"] = _fit(stats, block_bytes, block_tokens)
        running.show_json(document)
    else:
        fit = _fit(stats, block_bytes, block_tokens)
        sys.stdout.write("\n".join(_lines(stats, reason, fit)) + "\n")
    return running.DONE


def no_hits_reason(stats: Stats) -> str | None:
    """Return the likely reason for 0 hits, or None when there are hits.

    `sessions` counts those of others.
    """
    if stats.hits_total:
        return None
    if not stats.sets_total and not stats.gets_total:
        if not stats.engines and not stats.sessions:
            return "no engine is connected: set KVD_SOCKET for it to this daemon's socket"
        return "engines are connected but asked for nothing yet: send the same prompt twice"
    if not stats.gets_total:
        return "blocks were stored but none looked up: send the same prompt again"
    if not stats.sets_total:
        return "blocks were looked up but none stored: the engine only reads, or its stores fail"
    if not stats.sets_stored and not stats.sets_refreshed:
        return f"every block offered was refused: {stats.refused}"
    return (
        "blocks are stored and looked up under different names: another namespace (model, "
        "layout, parallelism) or another hash seed (the same PYTHONHASHSEED everywhere)"
    )


def _fit(stats: Stats, block_bytes: int, block_tokens: int) -> dict[str, int | str]:
    """Return what each tier holds of an engine's blocks; nothing where no size was given.

    A block takes a whole slot: what a slot has beyond it is slack.
    """
    if not block_bytes:
        return {}
    memory = stats.memory
    slot_bytes = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
    if slot_bytes > memory.slab_bytes:
        return {"problem": f"larger than a slab of {memory.slab_bytes}: raise --max-bytes"}
    known = [each.slot_bytes for each in memory.classes]
    fit: dict[str, int | str] = {}
    if max(known) < block_bytes:
        fit["note"] = (
            f"Client(block_bytes={block_bytes}) gets slots of its own; now none is so large"
        )
    elif slot_bytes not in known:
        slot_bytes = min(size for size in known if size >= block_bytes)
    fit["slack_bytes"] = slot_bytes - block_bytes
    in_memory = memory.data_bytes // memory.slab_bytes * (memory.slab_bytes // slot_bytes)
    in_memory += memory.data_bytes % memory.slab_bytes // slot_bytes
    on_disk = stats.long.capacity_slots
    if stats.long.enabled and block_bytes > stats.long.largest_slot_bytes:
        on_disk = 0
        fit["problem"] = (
            f"larger than a slot of the long tier, {stats.long.largest_slot_bytes}: "
            "raise --tablespace-slot-bytes"
        )
    for tier, slots in (("memory", in_memory), ("long", on_disk)):
        fit[f"{tier}_blocks"] = slots
        if block_tokens:
            fit[f"{tier}_tokens"] = slots * block_tokens
    return fit


def _lines(stats: Stats, reason: str | None, fit: dict[str, int | str]) -> list[str]:
    memory, long = stats.memory, stats.long
    rows: list[tuple[str, object]] = [
        ("version", stats.version),
        ("pid", stats.pid),
        ("uptime_s", stats.uptime_s),
        ("sessions", stats.sessions),
        ("namespaces", stats.namespaces),
        ("sets_total", stats.sets_total),
        ("sets_stored", stats.sets_stored),
        ("sets_refreshed", stats.sets_refreshed),
        ("sets_refused", _reasons(stats)),
        ("gets_total", stats.gets_total),
        ("hits_total", stats.hits_total),
        ("misses_total", stats.misses_total),
        ("deletes_total", stats.deletes_total),
        ("errors_total", stats.errors_total),
        ("inline_total", stats.inline_total),
        ("memory.hits", memory.hits),
        ("memory.misses", memory.misses),
        ("memory.evictions", memory.evictions),
        ("memory.entries", memory.entries),
        ("memory.bytes", f"{memory.value_bytes} ({format_size(memory.value_bytes)})"),
        ("memory.slots", f"{memory.slots_free} free of {memory.slots} x {memory.slot_bytes}"),
        ("memory.used", f"{memory.used_bytes} of {memory.data_bytes}"),
        *_class_rows(memory),
        ("memory.no_room", memory.no_room),
        ("memory.corrupt", memory.corrupt),
    ]
    if long.enabled:
        rows += [
            ("long.region", long.region),
            ("long.hits", long.hits),
            ("long.misses", long.misses),
            ("long.evictions", long.evictions),
            ("long.entries", f"{long.entries} of {long.capacity_slots}"),
            ("long.blocks_written", long.blocks_written),
            ("long.blocks_promoted", long.blocks_promoted),
            ("long.dropped", long.dropped),
            ("long.rejected", long.rejected_writes),
            ("long.used", f"{long.used_bytes} of {long.max_bytes}"),
            ("long.never_read", f"{long.written_never_read_bytes} of {long.bytes_written} bytes"),
            ("long.corrupt", long.corrupt),
            ("long.queue", f"{long.queue_blocks} blocks, {long.queue_bytes} bytes"),
            ("long.write_back_us", _times(long.write_back)),
            ("long.promotion_us", _times(long.promotion)),
            ("long.io", f"{long.io_mode} by {long.io_engine}"),
            ("long.failed", long.failed),
        ]
    else:
        rows.append(("long", "none (--long-path DIR adds one)"))
    rows += [(f"fit.{name}", value) for name, value in fit.items()]
    rows += [("note", note) for note in stats.notes]
    lines = [f"{name:<22} {value}" for name, value in rows]
    if reason is not None:
        lines.append(f"\n0 hits: {reason}")
    return lines


def _class_rows(memory: MemoryStats) -> list[tuple[str, object]]:
    """One line a size class, where there are several."""
    if len(memory.classes) < 2:
        return []
    return [
        (
            f"memory.{format_size(each.slot_bytes)}",
            f"{each.entries} blocks, {each.slots_free} free of {each.slots} in {each.slabs} slabs",
        )
        for each in memory.classes
    ]


def _times(latency: Latency) -> str:
    return f"p50 {latency.p50_us} p99 {latency.p99_us}" if latency.samples else "-"


def _reasons(stats: Stats) -> str:
    if not stats.sets_refused:
        return "0"
    reasons = ", ".join(f"{reason} {count}" for reason, count in stats.refused.items())
    return f"{stats.sets_refused} ({reasons})"


if __name__ == "__main__":
    sys.exit(main())
