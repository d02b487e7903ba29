"""Which metrics a daemon exports, as the types of STATS say: for the documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from kvd.durations import RequestTimes
from kvd.results import Stats, Status
from kvd.sight.families import stats_families, status_families, time_families


@dataclass(frozen=True)
class Exported:
    """One metric."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


def exported() -> list[Exported]:
    """Return every metric but `kvd_info`, in the order of /metrics."""
    found = []
    families = [
        *stats_families(_zero(Stats)),
        *status_families(_zero(Status)),
        *time_families(RequestTimes([]), {}),
    ]
    for family in families:
        if family.type != "info":
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = tuple(family._labelnames)  # type: ignore[attr-defined]
            found.append(Exported(name, family.type, labels, family.documentation))
    return found


def _zero(struct: Any) -> Any:
    """Return an instance with nothing in it, and one element in each list of structs."""
    kind = msgspec.inspect.type_info(struct)
    assert isinstance(kind, msgspec.inspect.StructType)
    return struct(**{field.name: _zero_of(field.type) for field in kind.fields})


def _zero_of(kind: msgspec.inspect.Type) -> Any:
    if isinstance(kind, msgspec.inspect.StructType):
        return _zero(kind.cls)
    if isinstance(kind, msgspec.inspect.ListType):
        inner = kind.item_type
        return [_zero(inner.cls)] if isinstance(inner, msgspec.inspect.StructType) else []
    if isinstance(kind, msgspec.inspect.DictType):
        return {}
    if isinstance(kind, msgspec.inspect.StrType):
        return ""
    # What may be absent is exported when it is there, and is in no document.
    return None if isinstance(kind, msgspec.inspect.UnionType) else 0
