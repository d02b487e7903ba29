"""The scheduler's side: what a request finds, what is to be loaded and saved in a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import kvd
from kvd_connectors.vllm.block_holds import BlockHolds
from kvd_connectors.vllm.counts import Counts
from kvd_connectors.vllm.lookups import Lookups
from kvd_connectors.vllm.metadata import StepMetadata, WorkerNews
from kvd_connectors.vllm.options import Keep, Options, read_keep
from kvd_connectors.vllm.plan import Plan
from kvd_connectors.vllm.transfer import Pair, Transfer


@dataclass
class Tracked:
    """A request between its arrival and its end.

    Attributes
    ----------
    units_saved : int
        Leading units that were handed to the workers, or came from them.
    saves : int
        Transfers to save that were handed to the workers.
    done : dict of int to int
        How many of them each worker is through with.
    has_failed : bool
        Whether a load failed: what is there and cannot be loaded would be tried for ever.
    is_unsure : bool
        Whether a step was planned on top of a load whose outcome was not heard yet. What such a
        step computes may be wrong, and is not saved.
    known_tokens : int
        Tokens that the engine had or got from here when it began the request. Any others came
        from another connector.
    """

    request: Any
    keep: Keep
    units_saved: int = 0
    saves: int = 0
    done: dict[int, int] = field(default_factory=dict)
    has_failed: bool = False
    is_unsure: bool = False
    known_tokens: int = 0


# (numbers of a request's blocks by group, units to load): decided on, not yet told the workers.
Loading = tuple[tuple[list[int], ...], int]


@dataclass
class SchedulerSide:
    """Looks up, and plans loads and saves. One thread.

    Parameters
    ----------
    options : Options
    plan : Plan
    client : kvd.Client
        Whose time limit bounds a look-up.
    """

    options: Options
    plan: Plan
    client: kvd.Client
    counts: Counts = field(default_factory=Counts)
    _requests: dict[str, Tracked] = field(default_factory=dict)
    _loading: dict[str, Loading] = field(default_factory=dict)
    _delayed: set[str] = field(default_factory=set)
    _ended: list[str] = field(default_factory=list)
    holds: BlockHolds = field(default_factory=BlockHolds)

    def __post_init__(self) -> None:
        self._blocks = [
            [
                (self.client.namespace(name), group)
                for name, group in zip(names, self.plan.groups, strict=True)
            ]
            for names in dict.fromkeys(self.plan.names)
        ]
        self.lookups = Lookups(self.plan, self._blocks)

    @property
    def is_async(self) -> bool:
        """Whether loads go on beside the engine's steps.

        With several groups always: only such a load's failure can be told by its request.
        """
        return self.options.async_load or not self.plan.single

    def add(self, request: Any) -> None:
        """Take note of a new request."""
        params = getattr(request, "kv_transfer_params", None)
        keep = read_keep(params, self.options.retention)
        self._requests[request.request_id] = Tracked(request, keep)

    def matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond those computed can be loaded, and whether meanwhile.

        None: to be asked again, which the engine does with its next step. At least one token is
        left to compute: its output is what the engine goes on from.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0, False
        tracked.known_tokens = computed_tokens
        if tracked.has_failed or not self.plan.groups:
            return 0, False
        if tracked.keep.retention == "none":
            return 0, False
        unit = self.plan.unit_tokens
        first = computed_tokens // unit
        last = (request.num_tokens - 1) // unit
        if computed_tokens % unit or last <= first:
            return 0, False
        units = self.lookups.find(request.request_id, request.block_hashes, first, last)
        if units is None:
            return None, False
        self.counts.add("lookups")
        self.counts.add("tokens_found", units * unit)
        return units * unit, bool(units) and self.is_async

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Decide on a load: its blocks are there."""
        self.lookups.forget(request.request_id)
        tracked = self._requests.get(request.request_id)
        if not external_tokens or tracked is None:
            return
        tracked.known_tokens += external_tokens
        units = external_tokens // self.plan.unit_tokens
        block_ids = tuple(list(ids) for ids in blocks.get_block_ids())
        self._loading[request.request_id] = block_ids, units

    def step(self, output: Any) -> StepMetadata:
        """Return the work of the step that the engine has planned."""
        metadata = StepMetadata(is_async=self.is_async)
        metadata.preempted = list(getattr(output, "preempted_req_ids", None) or ())
        metadata.delayed, self._ended = self._ended, []
        for request_id, (block_ids, units) in self._loading.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            # What is computed already counts the tokens of the load.
            last = tracked.request.num_computed_tokens // self.plan.unit_tokens
            metadata.loads.append(self._transfer(tracked, block_ids, last - units, last))
            tracked.units_saved = max(tracked.units_saved, last)
            tracked.is_unsure = not self.is_async
        self._loading.clear()
        self._plan_saves(output, metadata)
        return metadata

    def _plan_saves(self, output: Any, metadata: StepMetadata) -> None:
        """Plan the saves of blocks that this step fills."""
        if not self.plan.groups or output.kv_connector_block_state is None:
            return
        cached = output.scheduled_cached_reqs
        computed = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, tokens in computed.items():
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.keep.retention == "none":
                continue
            if tracked.is_unsure or self._is_loaded_by_another(output, request_id, tokens):
                continue
            # Behind what was saved before: after a load that failed, or a preemption.
            tracked.units_saved = min(tracked.units_saved, tokens // self.plan.unit_tokens)
            tokens += output.num_scheduled_tokens.get(request_id, 0)
            # Tokens that a draft proposed have no hash yet.
            hashed = len(tracked.request.block_hashes) * self._hash_tokens()
            full = min(tokens, hashed) // self.plan.unit_tokens
            if full <= tracked.units_saved:
                continue
            block_ids = output.kv_connector_block_state.get_block_ids(request_id)
            if block_ids is None:
                continue
            transfer = self._transfer(tracked, block_ids, tracked.units_saved, full)
            released = [
                block
                for group, pairs in zip(self.plan.groups, transfer.pairs, strict=True)
                if group.releases
                for block, _ in pairs
            ]
            if released and not self.holds.hold(request_id, tracked.saves + 1, released):
                continue
            metadata.saves.append(transfer)
            tracked.units_saved = full
            tracked.saves += 1

    def _is_loaded_by_another(self, output: Any, request_id: str, tokens: int) -> bool:
        """Say whether this step begins with another connector's load, which may fail."""
        if not getattr(output, "has_sync_kv_loads", False):
            return False
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        begins = request_id in resumed or any(
            each.req_id == request_id for each in output.scheduled_new_reqs
        )
        return begins and tokens > self._requests[request_id].known_tokens

    def _hash_tokens(self) -> int:
        group = self.plan.groups[0]
        return group.block_tokens // group.hashes

    def _transfer(
        self, tracked: Tracked, block_ids: tuple[list[int], ...], first: int, last: int
    ) -> Transfer:
        pairs: list[list[Pair]] = []
        for group in self.plan.groups:
            each = self.plan.unit_tokens // group.block_tokens
            ids = block_ids[group.number]
            # Block 0 stands for one that fell out of a sliding window.
            end = min(last * each, len(ids))
            keys = group.keys(tracked.request.block_hashes, first * each, end)
            blocks = zip(ids[first * each : end], keys, strict=True)
            pairs.append([(block, bytes(key)) for block, key in blocks if block])
        return Transfer(tracked.request.request_id, pairs, tracked.keep)

    def finished(self, request: Any) -> bool:
        """Forget a request; return whether its blocks must stay until the workers are done."""
        tracked = self._requests.pop(request.request_id, None)
        self.lookups.forget(request.request_id)
        self._loading.pop(request.request_id, None)
        if tracked is None:
            return False
        if self._saved(tracked) >= tracked.saves:
            self.holds.release(request.request_id)
            return False
        self._delayed.add(request.request_id)
        self._ended.append(request.request_id)
        return True

    def _saved(self, tracked: Tracked) -> int:
        """Return how many of a request's transfers every worker is through with."""
        if len(tracked.done) < len(set(self.plan.names)):
            return 0
        return min(tracked.done.values())

    def hear(self, output: Any) -> None:
        """Take in what the workers finished."""
        for request_id in output.finished_sending or ():
            if request_id in self._delayed:
                self._delayed.discard(request_id)
                self.holds.release(request_id)
        news = output.kv_connector_worker_meta
        if not isinstance(news, WorkerNews):
            return
        for rank, requests in news.saves_done.items():
            for request_id, done in requests.items():
                tracked = self._requests.get(request_id)
                if tracked is not None:
                    tracked.done[rank] = done
                    self.holds.release(request_id, self._saved(tracked))
        for request_id in news.loaded:
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.is_unsure = False
        for request_id in news.failed:
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.has_failed = True

    def is_waiting(self) -> bool:
        """Say whether blocks of finished requests wait for the workers."""
        return bool(self._delayed)

    def holds_blocks(self) -> bool:
        """Say whether blocks become free once saves are over."""
        return bool(self._delayed or self.holds)

    def clear(self) -> bool:
        """Remove what is stored of this engine's kind; say whether that worked."""
        try:
            for groups in self._blocks:
                for blocks, _ in groups:
                    blocks.clear()
        except kvd.UnavailableError:
            return False
        return True
