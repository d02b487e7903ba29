"""One form of one host pool's pages, kept in kvd: saved, loaded, looked up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import kvd
from kvd_connectors.batching import batches
from kvd_connectors.counting import Counts
from kvd_connectors.retention import Keep
from kvd_connectors.sglang.pages import Pages
from kvd_connectors.sglang.speeds import Speeds
from kvd_connectors.stored_digests import StoredDigests

logger = logging.getLogger(__name__)

# (key, where the page lies)
Pair = tuple[bytes, Any]


class KeptPages:
    """Pages under one namespace. Safe from any thread.

    Parameters
    ----------
    pages : Pages
    name : str
        Namespace.
    loading, saving : kvd.Client
        Whose time limits bound the calls.
    keep : Keep
    digests : bool
        Keep a digest beside each page.
    """

    def __init__(
        self,
        pages: Pages,
        name: str,
        loading: kvd.Client,
        saving: kvd.Client,
        keep: Keep,
        digests: bool,
        counts: Counts,
        speeds: Speeds,
    ) -> None:
        self.pages = pages
        self.name = name
        self._keep = keep
        self._counts = counts
        self._speeds = speeds
        self._loading = loading.namespace(name)
        self._saving = saving.namespace(name)
        self._loading_digests = StoredDigests(loading, name) if digests else None
        self._saving_digests = StoredDigests(saving, name) if digests else None

    def leading(self, keys: list[bytes]) -> int:
        """Return how many leading pages there are."""
        return self._loading.match_prefix(keys)

    def present(self, keys: list[bytes]) -> list[bool]:
        """Return which pages there are."""
        return self._loading.exists(keys)

    def save(self, keys: Sequence[bytes], where: Any) -> list[bool]:
        """Store pages; return which are there afterwards, from the first on.

        `where` is as `Pages.at` of this form takes it.
        """
        return self._in_batches(keys, where, self._save, "save")

    def load(self, keys: Sequence[bytes], where: Any) -> list[bool]:
        """Copy pages to where they belong; return which were, from the first on."""
        return self._in_batches(keys, where, self._load, "load")

    def clear(self) -> None:
        """Remove all pages; kvd.UnavailableError when no daemon answers."""
        self._saving.clear()
        if self._saving_digests is not None:
            self._saving_digests.blocks.clear()

    def _in_batches(
        self,
        keys: Sequence[bytes],
        where: Any,
        do: Callable[[list[Pair]], list[bool]],
        direction: str,
    ) -> list[bool]:
        started = time.monotonic_ns()
        done: list[bool] = []
        try:
            pairs = list(zip(keys, self.pages.at(where, len(keys)), strict=True))
            for part in batches(pairs, self.pages.page_bytes):
                done += do(part)
                if not done[-1]:
                    # SGLang uses leading pages alone, and counts a save as a whole.
                    break
        except Exception:
            logger.exception("a %s of pages of %s is given up", direction, self.name)
        spent_ns = time.monotonic_ns() - started
        self._counts.add(f"{direction}_us", spent_ns // 1000)
        pages = sum(done)
        self._speeds.add(direction, pages, pages * self.pages.page_bytes, spent_ns)
        return done + [False] * (len(keys) - len(done))

    def _save(self, pairs: list[Pair]) -> list[bool]:
        there = self._saving.exists([key for key, _ in pairs])
        self._counts.add("pages_present", sum(there))
        wanted = [at for at, is_there in enumerate(there) if not is_there]
        if not wanted:
            return there
        digests: dict[bytes, bytes] = {}
        keys: list[bytes | None] = [None] * len(wanted)
        with self._saving.reserve([self.pages.page_bytes] * len(wanted)) as slots:
            for slot, at in enumerate(wanted):
                view = slots[slot].view
                if view is None:
                    continue
                key, place = pairs[at]
                self.pages.gather(place, view)
                keys[slot] = key
                if self._saving_digests is not None:
                    digests[key] = self.pages.digest(place)
            stored = slots.commit(keys, retention=self._keep.retention, ttl_s=self._keep.ttl_s)
        if self._saving_digests is not None:
            self._saving_digests.store(digests, self._keep)
        for at, is_stored in zip(wanted, stored, strict=True):
            there[at] = is_stored
        self._counts.add("pages_saved", sum(stored))
        self._counts.add("bytes_saved", sum(stored) * self.pages.page_bytes)
        self._counts.add("pages_unsaved", len(wanted) - sum(stored))
        return there

    def _load(self, pairs: list[Pair]) -> list[bool]:
        size = self.pages.page_bytes
        loaded = [False] * len(pairs)
        bad: list[bytes] = []
        with self._loading.lease([key for key, _ in pairs]) as views:
            for at, ((key, place), view) in enumerate(zip(pairs, views, strict=True)):
                if view is None:
                    continue
                if view.nbytes == size:
                    self.pages.scatter(place, view)
                    loaded[at] = True
                else:
                    bad.append(key)
        if self._loading_digests is not None:
            wrong = self._loading_digests.differing(
                {
                    key: self.pages.digest(place)
                    for (key, place), there in zip(pairs, loaded, strict=True)
                    if there
                }
            )
            for at, (key, _) in enumerate(pairs):
                if key in wrong:
                    logger.warning("page %s is not what was saved", key.hex())
                    loaded[at] = False
            bad += wrong
            self._counts.add("digests_wrong", len(wrong))
        if bad:
            # Nobody is to meet them again, and what is computed in their place is saved.
            self._loading.delete(bad)
        self._counts.add("pages_loaded", sum(loaded))
        self._counts.add("bytes_loaded", sum(loaded) * size)
        self._counts.add("pages_failed", len(pairs) - sum(loaded))
        return loaded
