"""Rules of durability, each with a switch that breaks it: what a crash test must notice.

A switch is a context manager that patches the engine, in this process, for every store on every
kind of disk.  It breaks what happens to be on the disk when the power fails, and as little else
as can be: tests without a crash pass with it on.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tablespace import commit, reading
from tablespace._core.journal_replay import next_record
from tablespace._core.key_index import KeyIndex
from tablespace._core.line_codec import LineWriter
from tablespace._core.victim_list import VictimList
from tablespace.commit import Committer
from tablespace.io.commit_group import CommitGroup, Stage
from tablespace.io.directory import Directory, PosixDirectory
from tablespace.io.read_batch import ReadBatch
from tablespace.journal import JOURNAL_NAME, Journal, JournalHead, without_filler
from tablespace.recovery import _Loading, _Rewriting
from tablespace.testing.broken_groups import (
    EarlyGroup,
    JournalFirstGroup,
    OneGroupARecord,
    UnsyncedDataGroup,
    UnsyncedJournalGroup,
)
from tablespace.testing.directory import SimulatedDirectory

Switch = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Rule:
    """A rule of durability and the switch that breaks it.

    Attributes
    ----------
    name : str
    promise : str
        What the engine does and the switch undoes.
    switch : callable
        Returns a context manager within which the rule is broken.
    """

    name: str
    promise: str
    switch: Switch


RULES: dict[str, Rule] = {}


def _rule(promise: str) -> Callable[[Callable[[], Iterator[None]]], Switch]:
    def register(body: Callable[[], Iterator[None]]) -> Switch:
        switch = contextlib.contextmanager(body)
        name = body.__name__
        RULES[name] = Rule(name, promise, switch)
        return switch

    return register


def broken(name: str) -> AbstractContextManager[None]:
    """Break a rule by its name.

    Raises
    ------
    ValueError
        No rule has this name; the message lists those there are.
    """
    if name not in RULES:
        raise ValueError(f"no rule is named {name!r}; there are: {', '.join(RULES)}")
    return RULES[name].switch()


def _groups_are(kind: type[CommitGroup]) -> AbstractContextManager[Any]:
    return mock.patch.object(commit, "CommitGroup", kind)


@_rule("data is synced before the journal names it")
def skip_data_sync() -> Iterator[None]:
    with _groups_are(UnsyncedDataGroup):
        yield


@_rule("the journal's lines are appended after the data sync, not before")
def journal_before_data() -> Iterator[None]:
    with _groups_are(JournalFirstGroup):
        yield


@_rule("the journal is synced before the acknowledgement")
def skip_journal_sync() -> Iterator[None]:
    with _groups_are(UnsyncedJournalGroup):
        yield


@_rule("a group is appended only after the group before it was synced")
def append_before_last_sync() -> Iterator[None]:
    with _groups_are(OneGroupARecord):
        yield


@_rule("a value is published only once its record is durable")
def publish_before_commit() -> Iterator[None]:
    real = Committer._write_and_journal

    def write_and_journal(
        self: Committer, group: CommitGroup, requests: Any, victims: list[VictimList]
    ) -> None:
        assert isinstance(group, EarlyGroup)
        group.index = self.index
        real(self, group, requests, victims)

    with (
        _groups_are(EarlyGroup),
        mock.patch.object(Committer, "_write_and_journal", write_and_journal),
    ):
        yield


@_rule("a freed slot is written again only when the record that freed it is durable")
def reuse_before_durable_free() -> Iterator[None]:
    real, real_room = Committer._begin_group, Committer._make_room
    freed: dict[Committer, list[tuple[bytes, int, int]]] = {}

    def make_room(self: Committer, pool: int, wanted: int) -> None:
        """Free slots at once; the records of that ride in the very group that fills them."""
        short = wanted - self.allocator.room(pool)
        if short <= 0 or not self.allocator.pool_capacity(pool):
            real_room(self, pool, wanted)
            return
        keys = self.index.keys()
        before = {key: self.index.get(key) for key in keys}
        self.evictions += VictimList(self.index, short, pool).publish()
        freed.setdefault(self, []).extend(
            (key, entry[0], entry[1])
            for key, entry in before.items()
            if entry is not None and key not in self.index
        )

    def begin_group(self: Committer) -> tuple[LineWriter, int, int, int]:
        writer, seq, group, drops = real(self)
        for key, container, slot in freed.pop(self, []):
            writer.free("evict", seq, group, key, container, slot)
            seq += 1
        return writer, seq, group, drops

    with (
        mock.patch.object(Committer, "_make_room", make_room),
        mock.patch.object(Committer, "_begin_group", begin_group),
    ):
        yield


@_rule("a sync that failed is final, whatever the next one says")
def retry_failed_sync() -> Iterator[None]:
    real = Committer._judge

    def judge(self: Committer, stage: Stage, code: int, path: str) -> None:
        if stage is Stage.JOURNAL_SYNC:
            try:
                self.journal.device.sync_data()
            except OSError:
                pass
            else:
                stage = Stage.DONE
        real(self, stage, code, path)

    with mock.patch.object(Committer, "_judge", judge):
        yield


@_rule("names are durable before what relies on them goes on")
def skip_directory_sync() -> Iterator[None]:
    def sync(self: Directory, name: str = "") -> None:
        if name and not self.exists(name):
            raise FileNotFoundError(errno.ENOENT, "no such directory", name)

    with (
        mock.patch.object(PosixDirectory, "sync", sync),
        mock.patch.object(SimulatedDirectory, "sync", sync),
    ):
        yield


@_rule("a value is served only when its checksum fits")
def ignore_checksum() -> Iterator[None]:
    def unverified(index: Any, devices: Any, slot_bytes: int, verify: bool) -> ReadBatch:
        return ReadBatch(index, devices, slot_bytes, False)

    with mock.patch.object(reading, "ReadBatch", unverified):
        yield


@_rule("a missing or damaged record is never passed over silently")
def replay_past_a_gap() -> Iterator[None]:
    def gap(self: _Loading, replay: Any, base_seq: int, path: str) -> None:
        replay.seq = base_seq - 1

    def replay_one(
        self: _Loading, replay: Any, data: bytes, head: JournalHead, path: str, last: bool
    ) -> memoryview:
        if head.base_seq > replay.seq + 1:
            self.gap(replay, head.base_seq, path)
        replay.place = head.base_seq
        at = head.start
        kept = b""
        while True:
            end = replay.feed(data, at)
            kept += data[at:end]
            if end >= len(data):
                return without_filler(kept, 0, len(kept))
            replay.lenient = True
            at = next_record(data, end)

    with (
        mock.patch.object(_Loading, "gap", gap),
        mock.patch.object(_Loading, "replay_one", replay_one),
    ):
        yield


@_rule("recovery makes what it replayed durable before it hands out a slot")
def recover_without_sync() -> Iterator[None]:
    real = _Rewriting.rewrite_journal

    def rewrite_journal(
        self: _Rewriting, index: KeyIndex, seq: int, base_seq: int, records: bytes | memoryview
    ) -> Journal:
        if self.sound_bytes is None:
            return real(self, index, seq, base_seq, records)
        device = self.directory.open(JOURNAL_NAME)
        device.filler_bytes = self.directory.filler_bytes
        if device.size_bytes > self.sound_bytes:
            device.truncate(self.sound_bytes)
        return Journal(device, base_seq)

    with mock.patch.object(_Rewriting, "rewrite_journal", rewrite_journal):
        yield
