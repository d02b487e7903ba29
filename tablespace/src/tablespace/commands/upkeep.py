"""``info``, ``classify``, ``check`` and ``compact``: the state of a region and of its storage."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any

from tablespace.check import check
from tablespace.commands.failures import FINE, FOUND
from tablespace.commands.output import Output
from tablespace.commands.progress import Progress
from tablespace.commands.regions import holds_region, no_region, open_for_writing
from tablespace.describe import describe_region, format_description
from tablespace.io.classify import Classification, classify


def run_info(options: argparse.Namespace, output: Output) -> int:
    """Describe a region from its files; takes no lock and writes nothing."""
    if not holds_region(options.path):
        raise no_region(options.path)
    found = describe_region(options.path)
    output.give(found, [] if output.as_json else [format_description(found)])
    return FOUND if found["missing_containers"] else FINE


def run_classify(options: argparse.Namespace, output: Output) -> int:
    """Say what storage a path is on, and what is made of it."""
    found = classify(options.path)
    output.give(dataclasses.asdict(found), _classification_lines(found))
    return FINE


def _classification_lines(found: Classification) -> Iterator[str]:
    when = ", where the trial write at open works" if found.io_mode == "direct" else ""
    yield f"path         {found.path}"
    yield f"class        {found.device_class}"
    yield f"file system  {found.file_system or 'unknown'} at {found.mount_point or 'unknown'}"
    for at, layer in enumerate(found.chain):
        kind = f" ({layer.device_class})" if layer.device_class else ""
        yield f"{'' if at else 'through':<13}{layer.name}{kind}: {layer.why}"
    yield f"io mode      {found.io_mode}{when}"
    yield f"in flight    {found.concurrency} transfers"
    yield f"flush        {found.flush_interval_ms} ms, where puts need not be durable on return"
    for at, reason in enumerate(found.reasons):
        yield f"{'' if at else 'why':<13}{reason}"
    for warning in found.warnings:
        yield f"WARNING      {warning}"


def run_check(options: argparse.Namespace, output: Output) -> int:
    """Look for damage, and repair on demand; the findings are `tablespace.check`'s report."""
    with Progress("checking"):
        report = check(options.path, repair=options.repair)
    document = report.to_dict()
    output.give(document, _report_lines(document))
    return FINE if report.ok else FOUND


def _report_lines(document: dict[str, Any]) -> Iterator[str]:
    width = max(map(len, document))
    for name, value in document.items():
        if isinstance(value, list):
            yield f"{name:<{width}}  {len(value)}"
            for each in value:
                yield f"{'':<{width}}  {_shown(each)}"
        else:
            yield f"{name:<{width}}  {_shown(value)}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def run_compact(options: argparse.Namespace, output: Output) -> int:
    """Write a snapshot and start a new journal."""
    if not holds_region(options.path):
        raise no_region(options.path)
    before = describe_region(options.path)["index_files"]
    started = time.perf_counter()
    with open_for_writing(options.path) as store:
        with Progress("compacting"):
            store.snapshot()
        entries = len(store)
    seconds = time.perf_counter() - started
    after = describe_region(options.path)["index_files"]
    output.give(
        {
            "path": options.path,
            "entries": entries,
            "seconds": round(seconds, 6),
            "files_before": before,
            "files": after,
        },
        [
            f"{entries} entries, {seconds:.3f} s",
            *(f"{name}: {before.get(name, 0)} -> {size} bytes" for name, size in after.items()),
        ],
    )
    return FINE
