"""The workers' side: copies blocks between the engine's cache and kvd's arena."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

import kvd
from kvd_connectors.vllm.counts import Counts
from kvd_connectors.vllm.digests import Digests
from kvd_connectors.vllm.loading import Loader
from kvd_connectors.vllm.metadata import StepMetadata, WorkerNews
from kvd_connectors.vllm.options import Options
from kvd_connectors.vllm.pages import LayoutError, Pages
from kvd_connectors.vllm.plan import Plan
from kvd_connectors.vllm.saving import Saver

if TYPE_CHECKING:
    from kvd_connectors.gpu_direct.vllm_files import ChunkFiles

logger = logging.getLogger(__name__)


class WorkerSide:
    """Loads and saves what the scheduler's side planned.

    Parameters
    ----------
    options : Options
    plan : Plan
    rank : int
        Among the engine's ranks: which of the plan's namespaces are this worker's.
    connect : callable
        ``connect(timeout_s, block_bytes)`` returns a client.
    files : ChunkFiles, optional
        Saves and loads go there, and not through a client.
    """

    def __init__(
        self,
        options: Options,
        plan: Plan,
        rank: int,
        connect: Callable[[float, int], kvd.Client],
        files: ChunkFiles | None = None,
    ) -> None:
        self.counts = Counts()
        self._options = options
        self._plan = plan
        self._names = plan.names[rank] if plan.names else ()
        # Ranks that hold the same bytes: one of them saves for all.
        self._saves = plan.names.index(self._names) == rank if plan.names else False
        self._connect = connect
        self._files = files
        self._clients: list[kvd.Client] = []
        self._loader: Loader | None = None
        self._saver: Saver | None = None
        self._device = torch.device("cpu")
        self._rank = rank
        # Where nothing is saved, or loaded: what the scheduler's side thinks is on its way.
        self._unsaved: set[str] = set()
        self._unloaded: dict[str, set[int]] = {}
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._loaded: set[str] = set()

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's cache into use; a layout that is not understood is left alone."""
        self.unregister()
        if not self._plan.groups:
            return
        try:
            pages = [
                Pages(tensors, group.layers, self._plan.block_count) for group in self._plan.groups
            ]
        except LayoutError as error:
            logger.warning("KvdConnector keeps nothing of this model: %s", error)
            return
        self._device = next(iter(tensors.values())).device
        options = self._options
        if self._files is not None:
            saver, self._loader = self._files.open(
                pages[0], self._names[0], self.counts, options.save_queue_bytes, self._settle
            )
            self._saver = saver if self._saves else None
            return
        size = max(each.block_bytes for each in pages)
        saving = self._connect(options.save_timeout_s, size)
        loading = self._connect(options.load_timeout_s, size)
        self._clients = [saving, loading]
        digests = [
            Digests(client, self._names, pages, self.counts) if options.digests else None
            for client in self._clients
        ]
        if self._saves:
            self._saver = Saver(
                pages,
                [saving.namespace(name) for name in self._names],
                digests[0],
                self.counts,
                options.save_queue_bytes,
            )
        self._loader = Loader(
            pages,
            [loading.namespace(name) for name in self._names],
            digests[1],
            self.counts,
            self._settle,
        )
        logger.info(
            "KvdConnector: %d groups, blocks of %s bytes, %d of them, through %s",
            len(pages),
            [each.block_bytes for each in pages],
            self._plan.block_count,
            saving.socket,
        )

    def unregister(self) -> None:
        """Let go of the engine's cache: it may move."""
        for each in (self._saver, self._loader):
            if each is not None:
                each.close()
        self._saver = self._loader = None
        for client in self._clients:
            client.close()
        self._clients = []

    def preempted(self, metadata: StepMetadata) -> None:
        """Stop reading the blocks of requests that lost them."""
        if self._saver is not None:
            for request in metadata.preempted:
                self._saver.give_up(request)

    def load(self, metadata: StepMetadata) -> None:
        """Begin the step's loads, or do them where the step needs them."""
        if not metadata.is_async:
            self._loaded.update(transfer.request for transfer in metadata.loads)
        if self._loader is None:
            for transfer in metadata.loads:
                self._unloaded[transfer.request] = {
                    block for pairs in transfer.pairs for block, _ in pairs
                }
            if metadata.is_async:
                # Only of such loads the engine wants to hear that they are over.
                self._received.update(self._unloaded)
            return
        for transfer in metadata.loads:
            if metadata.is_async:
                self._loader.add(transfer)
            else:
                self._loader.load(transfer)

    def save(self, metadata: StepMetadata) -> None:
        """Queue the step's saves, to begin once what it computes is written."""
        if self._saver is None:
            self._unsaved.update(metadata.delayed)
            return
        self._saver.delay(metadata.delayed)
        if not metadata.saves:
            return
        ready = self._written()
        for transfer in metadata.saves:
            self._saver.add(transfer, ready)

    def finished(self, ended: set[str]) -> tuple[set[str], set[str]]:
        """Return delayed requests whose saves are over, and requests whose loads are."""
        sent, self._unsaved = self._unsaved, set()
        if self._saver is not None:
            sent |= self._saver.finished(ended)
        received, self._received = self._received, set()
        if self._loader is not None:
            received |= self._loader.take()
        return sent, received

    def news(self) -> WorkerNews | None:
        """Return how far the saves are and whose loads failed, if there are news."""
        found = self._saver.take_news() if self._saver is not None else {}
        failed, self._failed = self._failed, set()
        loaded, self._loaded = self._loaded, set()
        if not (found or failed or loaded):
            return None
        return WorkerNews({self._rank: found}, failed, loaded)

    def failed(self) -> tuple[set[int], set[str]]:
        """Return blocks that could not be loaded, and the requests they are of."""
        unloaded, self._unloaded = self._unloaded, {}
        blocks, requests = set[int]().union(*unloaded.values()), set(unloaded)
        if self._loader is not None:
            more = self._loader.take_failed()
            blocks, requests = blocks | more[0], requests | more[1]
        self._failed |= requests
        return blocks, requests

    def _written(self) -> Callable[[], None]:
        """Return what waits until the work queued on the device so far is done."""
        if self._device.type != "cuda":
            return _nothing
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _nothing() -> None:
    pass
