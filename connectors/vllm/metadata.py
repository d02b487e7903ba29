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
class SavesDone(KVConnectorWorkerMetadata):
    """How many transfers of each request were saved or given up, by worker, in all.

    Only of requests with news.
    """

    by_rank: dict[int, dict[str, int]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SavesDone:
        """Return what several workers say."""
        assert isinstance(other, SavesDone)
        return SavesDone({**self.by_rank, **other.by_rank})
