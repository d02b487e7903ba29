"""What the two sides tell each other with a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvd_connectors.vllm.transfer import Transfer


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The work of one step.

    Attributes
    ----------
    loads, saves : list of Transfer
    is_async : bool
        Whether the loads may go on while the engine steps.
    preempted : list of str
        Requests whose blocks may be written over from now on.
    delayed : list of str
        Requests that ended since, whose blocks stay until the workers say that they are saved.
    """

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    is_async: bool = True
    preempted: list[str] = field(default_factory=list)
    delayed: list[str] = field(default_factory=list)


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):
    """What became of transfers since the last step.

    Attributes
    ----------
    saves_done : dict of int to dict of str to int
        How many transfers of a request were saved or given up, by worker, in all. Only of
        requests with news.
    failed : set of str
        Requests of which a block could not be loaded.
    loaded : set of str
        Requests whose loads were done, or not, within the step.
    """

    saves_done: dict[int, dict[str, int]]
    failed: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        """Return what several workers say."""
        assert isinstance(other, WorkerNews)
        return WorkerNews(
            {**self.saves_done, **other.saves_done},
            self.failed | other.failed,
            self.loaded | other.loaded,
        )
